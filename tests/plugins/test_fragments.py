"""YAML fragments that a plugin brings: found by name, without importing anything, and never in the way of others."""

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError, PluginLoadError
from roll_core.plugins.loader import load_plugins
from roll_core.plugins.registry import Registry, load_registry
from roll_core.plugins.targets import data_file
from roll_core.spec.providers import FragmentProvider
from roll_testing.errors import mentions, raises_error
from roll_testing.part_checks import check_part

PLUGIN = """
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import FragmentProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_config_fragments():
    yield FragmentProvider(name="{name}", target="{module}.config:{name}.yaml", summary="Settings of Acme's")
"""
RUN = """\
defaults: [acme_adam, _self_]
pipeline: sft
sft_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
  training_args: ${acme_adam}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a config, which uses the fragment."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "run.yaml").write_text(RUN, encoding="utf-8")
    monkeypatch.chdir(home)
    return home


def install(site, package="acme-settings", text="acme_adam:\n  learning_rate: 0.25\n"):
    module = package.replace("-", "_")
    site.install(package, source=PLUGIN, name="acme_adam", files={})
    if text:
        (site.folder / module / "config").mkdir()
        (site.folder / module / "config" / "acme_adam.yaml").write_text(text, encoding="utf-8")


def test_a_fragment_of_a_plugin_is_referred_to_by_its_name(importable, folder):
    install(importable)
    loaded = load("run.yaml", [], load_registry())
    assert loaded.config.sft_train.training_args.learning_rate == 0.25
    assert loaded.sources[1].name == "acme_adam.yaml"


def test_a_mistake_in_it_is_located_in_its_file(importable, folder):
    install(importable, text="acme_adam:\n  learning_rate: fast\n")
    with raises_error(ConfigError, "acme_adam.yaml:2:18") as caught:
        load("run.yaml", [], load_registry())
    (problem,) = caught.value.problems
    assert problem.where == "run.yaml:6:3"


def test_unreferenced_fragment_is_reported_as_unused(importable, folder):
    install(importable)
    (folder / "run.yaml").write_text(RUN.replace("  training_args: ${acme_adam}\n", ""), encoding="utf-8")
    with raises_error(ConfigError, "acme_adam"):
        load("run.yaml", [], load_registry())


def test_ambiguous_fragment_is_an_error_only_if_named(importable, folder):
    install(importable)
    install(importable, package="other-settings")
    both = load_registry()
    with raises_error(ConfigError, "acme-settings 1.0", "other-settings 1.0") as caught:
        load("run.yaml", [], both)
    assert "--disable-plugin" in str(caught.value)
    plain = RUN.replace("defaults: [acme_adam, _self_]\n", "defaults: [_self_]\n")
    (folder / "run.yaml").write_text(plain.replace("  training_args: ${acme_adam}\n", ""), encoding="utf-8")
    assert load("run.yaml", [], both).pipeline.name == "sft"


def test_fragment_without_its_file_is_an_error_only_if_named(importable, folder):
    install(importable, text="")
    broken = load_registry()
    with raises_error(ConfigError, "acme_adam.yaml", "acme_settings.config"):
        load("run.yaml", [], broken)
    record = broken.find(FragmentProvider, "acme_adam")
    with raises_error(PluginLoadError, "acme_adam.yaml"):
        check_part(record, owner=broken.owner(record))


def test_unknown_fragment_suggests_the_nearest_or_its_package(importable, folder):
    install(importable)
    (folder / "run.yaml").write_text(RUN.replace("acme_adam", "acme_adan"), encoding="utf-8")
    with raises_error(ConfigError, "acme_adam"):
        load("run.yaml", [], load_registry())
    (folder / "run.yaml").write_text(RUN.replace("acme_adam", "deepspeed_zero3"), encoding="utf-8")
    with raises_error(ConfigError, "roll-strategy-deepspeed"):
        load("run.yaml", [], Registry(load_plugins(path=[str(importable.folder)], environ={})))


def test_missing_path_suggests_the_bare_fragment_name(importable, folder):
    install(importable)
    (folder / "run.yaml").write_text(RUN.replace("[acme_adam,", "[../../settings/acme_adam@_here_,"), encoding="utf-8")
    with raises_error(ConfigError, "acme_adam"):
        load("run.yaml", [], load_registry())


def test_fragment_file_must_have_the_name_of_its_record(importable):
    importable.install("acme-settings", source=PLUGIN.replace("{name}.yaml", "other.yaml"), name="acme_adam")
    (plugin,) = load_plugins(path=[str(importable.folder)], environ={})
    assert "expected 'package:acme_adam.yaml'" in str(plugin.error)


def test_the_listing_shows_fragments_with_their_summaries(importable):
    install(importable)
    done = importable.roll_core("plugins", "-v")
    assert mentions(done.stdout, "acme_adam")


@pytest.mark.parametrize("package", ["acme_heavy", "acme_heavy.settings"])
def test_a_fragment_s_package_and_its_parents_are_not_imported(tmp_path, monkeypatch, package):
    """Nor do folders below a package need an `__init__.py`."""
    folder = tmp_path.joinpath("site", *package.split("."))
    folder.mkdir(parents=True)
    (tmp_path / "site" / "acme_heavy" / "__init__.py").write_text('raise RuntimeError("no driver")')
    (folder / "adam.yaml").write_text("x: 1")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert data_file(f"{package}:adam.yaml", owner="it") == folder / "adam.yaml"
    with raises_error(PluginLoadError, "it", "eve.yaml"):
        data_file(f"{package}:eve.yaml", owner="it")
