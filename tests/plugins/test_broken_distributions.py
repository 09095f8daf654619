"""Every way in which an installed plugin can be broken.

Other plugins work, the listing has the cause, and an error names the broken plugin to those who configure it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from roll_testing.errors import mentions

BROKEN = {
    "import": (
        "import a_module_that_is_nowhere",
        ("acme.plugin", "ModuleNotFoundError", "'a_module_that_is_nowhere'"),
    ),
    "exit": ("import sys\nsys.exit(3)", ("acme.plugin", "SystemExit: 3")),
    "syntax": ("def (:", ("acme.plugin", "SyntaxError")),
    "not an exception": (
        "class Rude(BaseException): pass\nraise Rude('no')",
        ("acme.plugin", "Rude: no"),
    ),
    "older hook API": ("ROLL_HOOK_API = 0", ("ROLL_HOOK_API", 0, 1, "plugin")),
    "newer hook API": ("ROLL_HOOK_API = 2", ("ROLL_HOOK_API", 2, 1, "roll-core")),
    "no hook API": ("x = 1", ("ROLL_HOOK_API", 1)),
    "no hook API, and attributes that are computed": (
        """
        LAZY = {}
        def __getattr__(name):
            return LAZY[name]
        """,
        ("KeyError", "ROLL_HOOK_API"),
    ),
    "hook API that is no number": ("ROLL_HOOK_API = '1'", ("ROLL_HOOK_API", "'1'", 1)),
    "misspelt hook": (
        """
        from roll_core.spec.hooks import hookimpl
        ROLL_HOOK_API = 1
        @hookimpl
        def roll_infer_strategys():
            return []
        """,
        ("roll_infer_strategys", "roll_infer_strategies?"),
    ),
    "hook without its mark": (
        """
        ROLL_HOOK_API = 1
        def roll_infer_strategies():
            return []
        """,
        ("roll_infer_strategies", "@hookimpl"),
    ),
    "hook with an argument that there is not": (
        """
        from roll_core.spec.hooks import hookimpl
        ROLL_HOOK_API = 1
        @hookimpl
        def roll_step_finished(run, loss):
            pass
        """,
        ("roll_step_finished", "'loss'", "metrics"),
    ),
    "module without a hook": ("ROLL_HOOK_API = 1", ("@hookimpl", "roll_rewards")),
    "event hook that is a coroutine": (
        """
        from roll_core.spec.hooks import hookimpl
        ROLL_HOOK_API = 1
        @hookimpl
        async def roll_step_finished(run, step, metrics):
            raise AssertionError
        """,
        ("roll_step_finished",),
    ),
    "hook that returns a string": (
        """
        from roll_core.spec.hooks import hookimpl
        ROLL_HOOK_API = 1
        @hookimpl
        def roll_infer_strategies():
            return "acme"
        """,
        ("roll_infer_strategies", "'acme'", "InferProvider"),
    ),
    "hook that returns nothing": (
        """
        from roll_core.spec.hooks import hookimpl
        ROLL_HOOK_API = 1
        @hookimpl
        def roll_infer_strategies():
            pass
        """,
        ("roll_infer_strategies", "None", "InferProvider"),
    ),
    "hook that yields another record": (
        """
        from roll_core.spec.hooks import hookimpl
        from roll_core.spec.providers import TrainProvider
        ROLL_HOOK_API = 1
        @hookimpl
        def roll_infer_strategies():
            yield TrainProvider(name="acme", target="a:b", summary="")
        """,
        ("roll_infer_strategies", 1, "TrainProvider", "roll_train_strategies"),
    ),
    "hook that raises": (
        """
        from roll_core.spec.hooks import hookimpl
        ROLL_HOOK_API = 1
        @hookimpl
        def roll_infer_strategies():
            yield 1 / 0
        """,
        ("roll_infer_strategies", "ZeroDivisionError"),
    ),
    "record with a field of the wrong type": (
        """
        from roll_core.spec.hooks import hookimpl
        from roll_core.spec.providers import InferProvider
        ROLL_HOOK_API = 1
        @hookimpl
        def roll_infer_strategies():
            yield InferProvider(name="acme", target="a:b", summary="", needs="vllm>=0.30")
        """,
        ("roll_infer_strategies", 1, "needs", "'vllm>=0.30'"),
    ),
    "record with an unknown field": (
        """
        from roll_core.spec.hooks import hookimpl
        from roll_core.spec.providers import InferProvider
        ROLL_HOOK_API = 1
        @hookimpl
        def roll_infer_strategies():
            yield InferProvider(name="acme", target="a:b", summary="", priority=3)
        """,
        ("'priority'", "capabilities"),
    ),
}


@pytest.fixture(scope="module")
def all_broken(tmp_path_factory, new_site):
    """The listing, and the check of a good config and of one for each broken plugin, with all of them installed."""
    site = new_site(tmp_path_factory.mktemp("broken") / "site")
    for number, (source, _) in enumerate(BROKEN.values()):
        site.install(f"acme-{number}", f"1.{number}", source=source)
    return site.listing(), site.check("hf_infer", *(f"acme-{number}" for number in range(len(BROKEN))))


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plugin_is_listed_with_cause_and_named_if_missed(all_broken, name):
    listing, done = all_broken
    number, (_, facts) = list(BROKEN).index(name), BROKEN[name]
    package, whole = f"acme-{number}", f"acme-{number} 1.{number}"
    facts = [fact.replace("acme.plugin", f"acme_{number}.plugin") if isinstance(fact, str) else fact for fact in facts]
    assert listing[package]["state"] == "failed"
    assert mentions(listing[package]["error"], whole, *facts)
    place = f"run{number + 1}.yaml:6:34: ROLL-P004 actor_infer.strategy_args.strategy_name"
    (mistake,) = [each for each in re.split(r"^(?=run\d+\.yaml:)", done.stderr, flags=re.MULTILINE) if place in each]
    assert mentions(mistake, f"'{package}'", whole)


def test_broken_plugins_do_not_affect_configs_without_them(all_broken):
    listing, done = all_broken
    assert listing["roll-core"]["state"] == "loaded"
    assert mentions(done.stdout, "run0.yaml: ok:", "rlvr")
    assert done.returncode == 2
    assert done.stderr.endswith(f"{len(BROKEN)} mistakes\n"), "one message each, no traceback"
    assert "Traceback" not in done.stderr


def test_a_single_broken_plugin_is_one_mistake(site):
    site.install("acme", "1.2", source="import a_module_that_is_nowhere")
    done = site.check("hf_infer", "acme")
    assert done.returncode == 2
    assert mentions(done.stderr, "run1.yaml:6:34: ROLL-P004 actor_infer.strategy_args.strategy_name", "acme 1.2")
    assert done.stderr.endswith("1 mistake\n")


def test_the_listing_for_people_names_the_cause_too(site):
    site.install("acme", source="import a_module_that_is_nowhere")
    for arguments in ((), ("-v",)):
        done = site.roll_core("plugins", *arguments)
        assert done.returncode == 0
        assert "acme 1.0" in done.stdout
        assert mentions(done.stdout, "'a_module_that_is_nowhere'")


def test_plugin_check_fails_and_names_the_broken_plugin(site):
    site.install("acme", source="import a_module_that_is_nowhere")
    done = site.roll_core("plugins", "--check", "--disable-plugin", "roll-core", ROLL_PLUGINS="acme")
    assert done.returncode == 2
    assert mentions(done.stdout, "acme 1.0", "acme.plugin")


def test_the_plugin_to_test_is_found_by_any_spelling_of_its_name(site):
    site.install("Roll_Acme", source="import a_module_that_is_nowhere", module="roll_acme")
    done = site.roll_core("plugins", "test", "ROLL.acme")
    assert done.returncode == 2
    assert mentions(done.stderr, "ROLL-P002", "Roll_Acme", "'a_module_that_is_nowhere'")


def test_plugin_import_output_does_not_enter_the_json(site):
    site.install("acme", source="print('hello')\n" + site_source())
    assert site.listing()["acme"]["state"] == "loaded"


def test_distributions_with_equal_entry_point_names_both_load(site):
    site.install("acme-one", point="engine", name="one")
    site.install("acme-two", point="engine", name="two")
    listed = site.listing()
    assert listed["acme-one"]["provides"] == {"infer_strategies": ["one"]}
    assert listed["acme-two"]["provides"] == {"infer_strategies": ["two"]}


def test_strategy_name_conflict_only_affects_its_users(site):
    site.install("acme-one", "1.1", name="engine")
    site.install("acme-two", "2.2", name="engine")
    listing = site.roll_core("plugins")
    assert mentions(listing.stdout, "'engine'", "acme-one 1.1", "acme-two 2.2")
    wanted = site.check("hf_infer", "engine")
    assert mentions(wanted.stdout, "run0.yaml: ok:", "rlvr")
    assert wanted.returncode == 2
    assert mentions(wanted.stderr, "'engine'", "acme-one 1.1", "acme-two 2.2")
    assert "'acme-one/engine' or 'acme-two/engine'" in wanted.stderr
    assert "--disable-plugin acme-two" in wanted.stderr


def test_conflict_is_resolved_by_package_name_or_disabling(site):
    site.install("acme-one", name="engine")
    site.install("acme-two", name="engine")
    assert site.check("acme-two/engine").returncode == 0
    assert site.check("engine", disable="acme-two").returncode == 0


def test_slow_plugin_is_named_except_for_version_and_help(site):
    site.install("acme", source="import time\ntime.sleep(0.6)\nprint('slept')\n" + site_source())
    for arguments in (("--version",), ("--help",), ("check", "--help")):
        done = site.roll_core(*arguments)
        assert done.returncode == 0
        assert "slept" not in done.stdout + done.stderr
    assert site.listing()["acme"]["import_s"] >= 0.6
    assert "slow" in site.roll_core("plugins", "-v").stdout
    assert site.check("hf_infer").returncode == 0


def test_a_disabled_plugin_is_not_even_imported(site):
    site.install("acme", source="raise SystemExit('imported')")
    assert site.listing("--disable-plugin", "acme")["acme"]["state"] == "disabled"
    wanted = site.check("acme", disable="ACME")
    assert mentions(wanted.stderr, "acme 1.0", "(--disable-plugin)")
    assert "imported" not in wanted.stderr


def test_roll_plugins_allows_only_listed_plugins_and_core(site):
    site.install("acme-one", name="one")
    site.install("acme-two", source="raise SystemExit('imported')")
    listed = site.listing(ROLL_PLUGINS="Acme_One, absent")
    states = {name: each["state"] for name, each in listed.items()}
    # Whatever plugins of this repository are installed beside are not allowed either.
    assert set(states.values()) == {"loaded", "not allowed", "not installed"}
    assert {name for name, state in states.items() if state == "loaded"} == {"roll-core", "acme-one"}
    assert states["acme-two"] == "not allowed"
    assert {name for name, state in states.items() if state == "not installed"} == {"absent"}
    assert site.check("one", ROLL_PLUGINS="").returncode == 2


def test_disabling_a_plugin_that_is_not_installed_is_a_mistake(site):
    site.install("acme")
    done = site.roll_core("plugins", "--disable-plugin", "acmee")
    assert done.returncode == 2
    assert mentions(done.stderr, "--disable-plugin acmee:", "acme?")


def test_damaged_distributions_do_not_hide_the_others(site):
    site.install("acme")
    nameless = site.folder / "ghost-1.0.dist-info"
    nameless.mkdir()
    (nameless / "entry_points.txt").write_text("[roll.plugins]\nghost = nowhere\n")
    garbage = site.folder / "garbage-2.0.dist-info"
    garbage.mkdir()
    (garbage / "METADATA").write_text("Metadata-Version: 2.1\nName: garbage\nVersion: 2.0\n")
    (garbage / "entry_points.txt").write_text("[roll.plugins]\nno equals sign here\n= x\n")
    for name, group in (("latin", "roll.plugins"), ("stranger", "console_scripts")):
        other = site.folder / f"{name}-3.0.dist-info"
        other.mkdir()
        (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.0\n")
        (other / "entry_points.txt").write_bytes(f"[{group}]\ncaf\u00e9 = nowhere\n".encode("latin-1"))
    listed = site.listing()
    assert listed["acme"]["state"] == "loaded"
    assert listed["ghost"]["state"] == "failed"
    assert listed["garbage"]["state"] == "failed"
    assert listed["latin"]["state"] == "failed"
    assert "stranger" not in listed


def needing(needs):
    """Source of a plugin whose engine needs these packages."""
    return site_source("{name}", "{module}").replace('summary="', f'needs=({needs}), summary="')


@pytest.mark.parametrize(
    ("needs", "code", "listed"),
    [
        ('"no-such-engine>=2",', 0, "not_installed"),
        ('"no-such-engine>=2", "packaging<2"', 2, "broken"),
        ('("no-such-engine>=2", "packaging<2"),', 2, "broken"),
    ],
)
def test_plugin_without_its_engine_names_the_package(site, needs, code, listed):
    """A package of another version is a defect of the installation; a package that is not installed is a choice."""
    site.install("acme", source=needing(needs), files={"strategy.py": "import no_such_engine\nclass Engine: pass\n"})
    arguments = ("--check", "--disable-plugin", "roll-core")
    done = site.roll_core("plugins", *arguments, ROLL_PLUGINS="acme")
    assert done.returncode == code
    assert mentions(done.stdout, "no-such-engine" if "no-such" in needs else "packaging")
    found = json.loads(site.roll_core("plugins", "--json", *arguments, ROLL_PLUGINS="acme").stdout)
    assert {key: len(found[key]) for key in ("broken", "not_installed")} == {
        key: int(key == listed) for key in ("broken", "not_installed")
    }


def test_a_machine_that_checks_need_not_have_the_engine(site):
    for name, needs in {"absent": '"no-such-engine>=2",', "older": '"no-such-engine>=2", "packaging<2"'}.items():
        site.install(name, source=needing(needs), files={"strategy.py": "import no_such_engine\nclass Engine: pass\n"})
    assert site.check("absent", "older").returncode == 0


BACKEND = """\
import zipfile

FILES = {
    "roll_infer_tiny/__init__.py": "",
    "roll_infer_tiny/plugin.py": open("plugin.py").read(),
    "roll_infer_tiny-0.3.dist-info/METADATA": "Metadata-Version: 2.1\\nName: roll-infer-tiny\\nVersion: 0.3\\n",
    "roll_infer_tiny-0.3.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    "roll_infer_tiny-0.3.dist-info/entry_points.txt": "[roll.plugins]\\ntiny = roll_infer_tiny.plugin\\n",
}


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "roll_infer_tiny-0.3-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        for path, content in FILES.items():
            wheel.writestr(path, content)
        record = "".join(f"{path},,\\n" for path in [*FILES, "roll_infer_tiny-0.3.dist-info/RECORD"])
        wheel.writestr("roll_infer_tiny-0.3.dist-info/RECORD", record)
    return name
"""


def test_installed_project_is_found(site, tmp_path):
    project = tmp_path / "roll-infer-tiny"
    project.mkdir()
    (project / "plugin.py").write_text(site_source("tiny", "roll_infer_tiny"))
    (project / "backend.py").write_text(BACKEND)
    (project / "pyproject.toml").write_text(
        "[project]\nname = 'roll-infer-tiny'\nversion = '0.3'\n"
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    )
    subprocess.run([*installer(site.folder), str(project)], check=True, capture_output=True, timeout=120)
    listed = site.listing()["roll-infer-tiny"]
    assert (listed["version"], listed["provides"]) == ("0.3", {"infer_strategies": ["tiny"]})


def installer(target):
    """uv where it runs the tests, else this environment's pip."""
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--no-deps", "--offline", "--python", sys.executable, "--target", str(target)]
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]
    return [*pip, "install", "--no-deps", "--no-index", "--target", str(target), "--upgrade"]


def site_source(name="acme", module="acme"):
    return f"""\
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferCapabilities, InferProvider

ROLL_HOOK_API = 1
CAPABILITIES = InferCapabilities(weight_transports=("shared",))


@hookimpl
def roll_infer_strategies():
    yield InferProvider(
        name="{name}", target="{module}.strategy:Engine", summary="An engine for tests", capabilities=CAPABILITIES
    )
"""


BUGGY_PIPELINE = """\
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PipelineProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_pipelines():
    yield PipelineProvider(
        name="{name}", target="{module}.parts:Pipeline", config="{module}.parts:AcmeConfig", summary="For tests"
    )
"""
BUGGY_CONFIG = """\
import sys

from roll_core.spec.config import RunConfig


class AcmeConfig(RunConfig):
    def roles(self):
        frame = sys._getframe()
        while frame := frame.f_back:
            if frame.f_code.co_name == "validate_all":  # whose errors are a mistake of the schema
                return {}
        return {}["actor"]


class Pipeline: pass
"""


@pytest.mark.parametrize("command", ["check", "plan", "doctor"])
def test_plugin_bug_is_one_error_with_package_and_place(site, command):
    site.install("roll-acme", "1.2", source=BUGGY_PIPELINE, name="acme", files={"parts.py": BUGGY_CONFIG})
    (site.folder / "run.yaml").write_text("pipeline: acme\n")
    done = site.roll_core(command, "run.yaml")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: KeyError: 'actor'\n")
    assert "of roll-acme 1.2 (roll_acme/parts.py:12 in AcmeConfig.roles)" in done.stderr
    if command == "check":
        shown = site.roll_core("--traceback", command, "run.yaml")
        assert shown.returncode == 1
        assert "Traceback" in shown.stderr
        assert 'return {}["actor"]' in shown.stderr


IMPORTS = {
    "missing module": ({"strategy.py": "from acme.engine import Engine\n"}, "acme.engine"),
    "missing attribute": ({"strategy.py": "class Motor: pass\n"}, "'Engine'"),
    "syntax error": ({"strategy.py": "class Engine(:\n"}, "SyntaxError"),
    "renamed name of ROLL": ({"strategy.py": "from roll_core.types import Samples as Engine\n"}, "Sample?"),
    "renamed module of ROLL": (
        {"strategy.py": "import roll_core.model\nclass Engine: pass\n"},
        "roll_core.model",
    ),
    "name missing below": (
        {"strategy.py": "from .below import Engine\n", "below.py": "from roll_modeling.model import x\nEngine = x\n"},
        "roll_modeling.model",
    ),
    "relative module": ({"strategy.py": "from . import nowhere\nclass Engine: pass\n"}, "'nowhere'"),
}


@pytest.fixture(scope="module")
def missing_imports(tmp_path_factory, new_site):
    """The listing for programs, that for people, and the check of a good config and of one for each plugin."""
    site = new_site(tmp_path_factory.mktemp("imports") / "site")
    for number, (files, _) in enumerate(IMPORTS.values(), 1):
        renamed = {name: text.replace("acme.engine", f"acme_{number}.engine") for name, text in files.items()}
        site.install(f"acme-{number}", "1.2", files=renamed)
    done = site.check("hf_infer", *(f"acme-{number}" for number in range(1, len(IMPORTS) + 1)))
    return site.listing(), site.roll_core("plugins").stdout, done


@pytest.mark.parametrize("name", IMPORTS)
def test_check_and_listing_name_a_missing_import(missing_imports, name):
    listing, shown, done = missing_imports
    number = list(IMPORTS).index(name) + 1
    fact = IMPORTS[name][1].replace("acme.engine", f"acme_{number}.engine")
    (problem,) = listing[f"acme-{number}"]["broken"]
    assert mentions(problem, f"acme-{number} 1.2", fact)
    assert f"broken: {problem}\n" in shown
    place = f"run{number}.yaml:6:34: ROLL-P002 actor_infer.strategy_args.strategy_name"
    (mistake,) = [each for each in re.split(r"^(?=run\d+\.yaml:)", done.stderr, flags=re.MULTILINE) if place in each]
    assert mentions(mistake, fact)
    assert done.returncode == 2
    assert mentions(done.stdout, "run0.yaml: ok:")


def test_guarded_and_computed_imports_are_left_to_the_import(site):
    strategy = """
    from typing import TYPE_CHECKING
    import no_such_engine
    try:
        from roll_core.types import Older
    except ImportError:
        Older = None
    if TYPE_CHECKING:
        from roll_core.types import Nothing
    def __getattr__(name):
        return object
    """
    site.install("acme", files={"strategy.py": strategy})
    assert site.listing()["acme"]["broken"] == []
    assert site.check("acme").returncode == 0
