"""Lookup by name, import of what a record points at, requirements, and event hooks."""

import importlib.metadata
import os
import pickle
import sys
import textwrap
from dataclasses import replace
from importlib.machinery import PathFinder

import pytest

from roll_core.errors import (
    MissingRequirementError,
    PluginHookError,
    PluginLoadError,
    ProviderConflictError,
    UnknownProviderError,
    install_command,
)
from roll_core.plugins.loader import Plugin, load_plugins
from roll_core.plugins.records import check_record
from roll_core.plugins.registry import Events, Registry, load_registry
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.targets import load_class, load_target
from roll_core.spec.providers import (
    AdvantageProvider,
    CheckProvider,
    EnvironmentProvider,
    InferCapabilities,
    InferProvider,
    KnownErrorsProvider,
    PipelineProvider,
    RewardProvider,
    TrackerProvider,
    TrainProvider,
)
from roll_core.spec.rollout import RewardFunction
from roll_testing.errors import mentions, raises_error
from roll_testing.part_checks import check_part
from shared_tests.hf_plugins import hf_plugins


def plugin(package, version="1.0", *providers, **fields):
    return Plugin(
        **{
            "package": package,
            "version": version,
            "entry_point": package,
            "target": f"{package}.plugin",
            "state": "loaded",
            "providers": providers,
            **fields,
        }
    )


def engine(name, target="a:b", **fields):
    return InferProvider(name=name, target=target, summary="", **fields)


def failed(package, cause):
    error = PluginLoadError(f"plugin {package} 1.0: importing it failed")
    error.__cause__ = cause
    return plugin(package, state="failed", error=error)


def test_a_name_finds_its_record_within_its_kind():
    train = TrainProvider(name="x", target="a:b", summary="")
    registry = Registry([plugin("one", "1.0", train, engine("x"))])
    assert registry.find(TrainProvider, "x") is train
    assert registry.find(InferProvider, "x") == engine("x")
    assert registry.find(InferProvider, "one/x") == engine("x")
    assert registry.find(InferProvider, "One/x") == engine("x"), "package names compare as PEP 503 says"


def test_names_and_records_are_listed_by_kind():
    registry = Registry([plugin("one", "1.0", engine("b"), engine("a")), plugin("two", "1.0", engine("a"))])
    assert registry.names(InferProvider) == ("a", "b")
    assert [each.name for each in registry.providers(InferProvider)] == ["b", "a", "a"]
    assert registry.names(RewardProvider) == ()


def test_conflict_names_packages_versions_and_remedy():
    registry = Registry([plugin("one", "1.1", engine("x")), plugin("two", "2.2", engine("x")), plugin("three", "3")])
    with pytest.raises(ProviderConflictError) as raised:
        registry.find(InferProvider, "x")
    assert mentions(str(raised.value), "'x'", "1.1", "2.2", "'one/x'", "'two/x'")


def test_a_conflict_inside_of_one_package_names_its_entry_points():
    first = plugin("one", "1.1", engine("x"), entry_point="first")
    second = plugin("one", "1.1", engine("x"), entry_point="second")
    with raises_error(ProviderConflictError, "--disable-plugin first", "--disable-plugin second"):
        Registry([first, second]).find(InferProvider, "one/x")


def test_an_unknown_name_gets_the_nearest_and_the_available_ones():
    registry = Registry([plugin("one", "1.0", engine("turbine"))])
    with pytest.raises(UnknownProviderError) as raised:
        registry.find(InferProvider, "turbin")
    assert mentions(str(raised.value), "'turbin'", "'turbine'")
    assert raised.value.__cause__ is None


def test_dotted_name_of_a_user_part_loads_the_target():
    with raises_error(UnknownProviderError, "my_env.levels:Lake"):
        Registry([]).find(EnvironmentProvider, "my_env.levels.Lake")


def test_the_beginning_of_a_name_gets_those_that_begin_so():
    registry = Registry([plugin("one", "1.0", engine("turbine_of_acme"), engine("turbine_of_ours"), engine("fan"))])
    with raises_error(UnknownProviderError, "'turbine_of_acme'", "'turbine_of_ours'"):
        registry.find(InferProvider, "turb")
    with raises_error(UnknownProviderError, "''", "turbine_of_ours"):
        registry.find(InferProvider, "")


def test_unknown_name_of_a_known_package_names_the_install():
    with raises_error(UnknownProviderError, "roll-infer-vllm"):
        Registry([]).find(InferProvider, "vllm")
    with raises_error(UnknownProviderError, "'megatron_train'", "roll-strategy-megatron"):
        Registry([]).find(TrainProvider, "megatron_trian")
    with raises_error(UnknownProviderError, "'dpo'", "roll-pipeline-preference"):
        Registry([]).find(PipelineProvider, "dpo")


def test_missing_package_is_named_for_every_known_name():
    """Except checks and lists of known errors, which no config or command names."""
    installed = load_registry().plugins
    core = Registry(each for each in installed if each.package == "roll-core")
    for each in installed:
        for record in each.providers if each.package != "roll-core" else ():
            kind = type(record)
            if kind not in (CheckProvider, KnownErrorsProvider) and record.name not in core.names(kind):
                with raises_error(UnknownProviderError, repr(record.name), each.package):
                    core.find(kind, record.name)


def test_unknown_name_lists_failed_plugins_and_chains_the_cause():
    cause = ImportError("libcuda.so.1 is missing")
    registry = Registry([failed("one", cause), failed("two", ValueError("no"))])
    with pytest.raises(UnknownProviderError) as raised:
        registry.find(InferProvider, "x")
    assert mentions(str(raised.value), "one 1.0", "ImportError", "libcuda.so.1")
    assert mentions(str(raised.value), "two 1.0", "ValueError")
    assert raised.value.__cause__.__cause__ is cause


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("nobody/x", ("'nobody'",)),
        ("one/y", ("1.0",)),
        ("two/x", ("1.0",)),
    ],
)
def test_unknown_qualified_name_lists_the_package_parts(name, facts):
    registry = Registry([plugin("one", "1.0", engine("x")), plugin("two")])
    with raises_error(UnknownProviderError, *facts):
        registry.find(InferProvider, name)


def test_records_and_errors_travel_between_processes():
    record = engine("x", needs=("a>1",), capabilities=InferCapabilities(weight_transports=("shared",)))
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(UnknownProviderError) as raised:
        Registry([]).find(InferProvider, "x")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_the_description_is_plain_and_complete():
    description = Registry([plugin("one", "1.0", engine("x"), hook_api=1), failed("two", ImportError("no"))]).describe()
    assert [each["package"] for each in description] == ["one", "two"]
    assert description[0]["provides"] == {"infer_strategies": ["x"]}
    assert description[0]["hook_api"] == 1
    assert description[1]["error"] == "plugin two 1.0: importing it failed"


def test_the_built_in_parts_come_through_the_same_door():
    core, *others = load_plugins(environ={"ROLL_PLUGINS": ""})
    assert {each.state for each in others} <= {"not allowed"}
    assert (core.package, core.target, core.state) == ("roll-core", "roll_core.builtin.plugin", "loaded")
    assert core.version == importlib.metadata.version("roll-core")
    assert not any(isinstance(each, TrainProvider | InferProvider) for each in core.providers)


def test_every_builtin_target_imports_and_matches_its_contract():
    registry = Registry(hf_plugins())
    records = [record for plugin in registry.plugins for record in plugin.providers]
    assert len(records) >= 15
    broken = []
    for record in records:
        try:
            check_part(record, owner=registry.owner(record))
        except PluginLoadError as error:
            broken.append(str(error))
    assert broken == []


# -- targets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write an importable module of this name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def module(name, source):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)

    return module


def test_a_target_is_imported_down_to_its_attribute():
    assert load_target("roll_core.spec.rollout:RewardFunction.score", owner="x") is RewardFunction.score


@pytest.mark.parametrize(
    ("source", "target", "facts"),
    [
        ("raise SystemExit(0)", "broken_target:X", ("'x'", "broken_target", "SystemExit", "0")),
        ("import nowhere_at_all", "broken_target:X", ("ModuleNotFoundError", "'nowhere_at_all'")),
        ("", "broken_target:X", ("'x'", "broken_target", "'X'")),
        ("class X: pass", "broken_target:X.Y", ("broken_target", "'X.Y'")),
        (
            "def __getattr__(name): import nowhere_at_all",
            "broken_target:X",
            ("'x'", "broken_target:X", "ModuleNotFoundError", "'nowhere_at_all'"),
        ),
        ("", "broken_target", ("'broken_target'", "'module:attribute'")),
    ],
)
def test_broken_target_names_owner_and_cause(module, source, target, facts):
    module("broken_target", source)
    with raises_error(PluginLoadError, *facts):
        load_target(target, owner="reward 'x' of acme")


def test_code_of_the_user_is_that_of_the_working_directory(tmp_path, monkeypatch):
    for folder in ("installed", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "losses_of_the_user.py").write_text(f"where = {folder!r}")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), str(tmp_path / "here"), *sys.path])
    record = Registry([]).find(AdvantageProvider, "losses_of_the_user:where")
    assert load_target(record.target, owner="x") == "here"
    sys.modules.pop("losses_of_the_user")


def test_a_target_of_another_class_is_refused(module):
    module("other_class", "class X: pass")
    with raises_error(PluginLoadError, "roll_core.spec.rollout.RewardFunction"):
        load_class("other_class:X", RewardFunction, owner="x")


@pytest.mark.parametrize(
    ("source", "facts"),
    [
        ("class X(RewardFunction): pass", ("score",)),
        ("X = 3", ("subclass",)),
    ],
)
def test_a_part_that_breaks_its_contract_is_refused(module, source, facts):
    module("contract_breaker", "from roll_core.spec.rollout import RewardFunction\n" + source)
    record = RewardProvider(name="x", target="contract_breaker:X", summary="")
    with raises_error(PluginLoadError, *facts):
        check_part(record, owner="x")


WRONG = """
import functools
from roll_core.spec.algorithms import AdvantageOutput
from roll_core.spec.environment import Environment
from roll_core.spec.pipeline import Tracker
from roll_core.spec.rollout import RewardFunction

class Base(RewardFunction):
    def score(self, request, model): ...
class Inherited(Base): ...
class Coroutine(RewardFunction):
    async def score(self, request): ...
class NotCalled(RewardFunction):
    score = 3
class Decorated(RewardFunction):
    @functools.cache
    def start(self, device): ...
    def score(self, request): ...
class Static(RewardFunction):
    @staticmethod
    def score(self, request): ...
class Keywords(Tracker):
    def log(self, step, metrics): ...
    def run_finished(self, failed, outcome): ...
    def close(self): ...
def estimator(batch, scale): ...
async def check(context): ...
def memory(): ...
def plan(config, registry): ...
class Fine(RewardFunction):
    @classmethod
    def score(cls, request, *more, **others): ...
class Either(Environment):
    async def reset(self, task, seed): ...
    def step(self, reply): ...
"""
SCORE = ("wrong_parts", "score", "RewardRequest")


@pytest.mark.parametrize(
    ("kind", "target", "facts"),
    [
        (RewardProvider, "Inherited", (*SCORE, "'model'")),
        (RewardProvider, "Coroutine", (*SCORE, "plain")),
        (RewardProvider, "NotCalled", (*SCORE, "int")),
        (RewardProvider, "Decorated", ("Decorated.start", "'device'")),
        (RewardProvider, "Static", (*SCORE, "'request'")),
        (TrackerProvider, "Keywords", ("Keywords.run_finished", "failed", "'outcome'")),
        (AdvantageProvider, "estimator", ("wrong_parts:estimator", "AdvantageInput", "'scale'")),
        (CheckProvider, "check", ("wrong_parts:check", "plain", "CheckContext")),
    ],
)
def test_contract_check_covers_inherited_and_async_methods(module, kind, target, facts):
    module("wrong_parts", WRONG)
    record = kind(name="x", target=f"wrong_parts:{target}", summary="")
    with raises_error(PluginLoadError, "acme", *facts):
        check_part(record, owner="part 'x' of acme 1")


@pytest.mark.parametrize(("kind", "target"), [(RewardProvider, "Fine"), (EnvironmentProvider, "Either")])
def test_parts_that_accept_more_or_may_choose_pass(module, kind, target):
    module("wrong_parts", WRONG)
    check_part(kind(name="x", target=f"wrong_parts:{target}", summary=""), owner="x")


def test_functions_of_plans_and_memory_are_compared_too(module):
    module("wrong_parts", WRONG)
    sft = next(each for each in load_registry().providers(PipelineProvider) if each.name == "sft")
    with raises_error(PluginLoadError, "wrong_parts:plan", "RunConfig", "'registry'"):
        check_part(replace(sft, plan="wrong_parts:plan"), owner="x")
    hf = next(each for each in load_registry().providers(TrainProvider) if each.name == "hf_train")
    with raises_error(PluginLoadError, "wrong_parts:memory", "MemoryInput"):
        check_part(replace(hf, memory="wrong_parts:memory"), owner="x")


# -- requirements ------------------------------------------------------------------------------------------------------


def test_requirements_that_are_met_are_silent():
    check_requirements(engine("x", needs=("pytest>=1", "numpy", "nothing; python_version<'3'")), owner="x")


def test_unmet_requirements_name_versions_and_command():
    version = importlib.metadata.version("pytest")
    with pytest.raises(MissingRequirementError) as raised:
        check_requirements(engine("x", needs=("pytest<1", "no-such-package[gpu]>=2,<3")), owner="infer strategy 'x'")
    assert mentions(
        str(raised.value),
        "'x'",
        version,
        "1",
        "no-such-package",
        "3",
        "2",
        "'pytest<1'",
        "'no-such-package[gpu]<3,>=2'",
    )


def test_the_install_command_is_for_this_interpreter(tmp_path, monkeypatch):
    python, other = tmp_path / "env" / "bin" / "python", tmp_path / "other"
    for pip in (python.with_name("pip"), other / "pip"):
        pip.parent.mkdir(parents=True)
        pip.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(PathFinder, "find_spec", {"pip": object()}.get)
    monkeypatch.setenv("PATH", str(python.parent))
    assert install_command("acme>=2", "-e", "x") == "pip install 'acme>=2' -e x"
    monkeypatch.setenv("PATH", os.pathsep.join([str(other), str(python.parent)]))
    assert install_command("acme") == f"{python} -m pip install acme"
    monkeypatch.setattr(PathFinder, "find_spec", {}.get)
    assert install_command("acme") == f"uv pip install --python {python} acme"
    assert install_command(python="/a b/python") == "uv pip install --python '/a b/python'"


def test_a_need_with_alternatives_is_met_by_any_one_of_them():
    check_requirements(engine("x", needs=(("no-such-package", "pytest>=1"),)), owner="x")


def test_unmet_alternatives_name_every_installed_version():
    with pytest.raises(MissingRequirementError) as raised:
        check_requirements(engine("x", needs=(("no-such-package>=1", "no-such-package-cpu>=1"),)), owner="x")
    assert mentions(str(raised.value), "no-such-package", "1", "no-such-package-cpu", "'no-such-package>=1'")


def test_installed_alternative_is_suggested_for_upgrade():
    with raises_error(MissingRequirementError, "'pytest<1'"):
        check_requirements(engine("x", needs=(("no-such-package>=1", "pytest<1"),)), owner="x")


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": 3}, "name is 3 (int), expected str"),
        ({"name": "a/b"}, "name is 'a/b', expected letters"),
        ({"name": ""}, "name is '', expected letters"),
        ({"target": "no_colon"}, "target is 'no_colon', expected 'module:attribute'"),
        ({"config": "no colon:x"}, "config is 'no colon:x', expected 'module:attribute' or ''"),
        ({"needs": ["a"]}, "needs is ['a'] (list), expected a tuple, each item str or a tuple, each item str"),
        ({"needs": ((),)}, "needs has ()"),
        ({"needs": (("a", "b c"),)}, "needs has 'b c'"),
        ({"needs": ("a b c",)}, "needs has 'a b c'"),
        ({"platforms": "cuda"}, "platforms is 'cuda' (str), expected a tuple, each item str"),
        ({"capabilities": None}, "capabilities is None (NoneType), expected InferCapabilities"),
        ({"capabilities": InferCapabilities(sleeps=1)}, "capabilities.sleeps is 1 (int), expected bool"),
        (
            {"capabilities": InferCapabilities(weight_transports=("shm", 3))},
            "capabilities.weight_transports is ('shm', 3) (tuple), expected a tuple, each item str",
        ),
    ],
)
def test_every_field_of_a_record_is_checked(fields, problem):
    assert check_record(InferProvider(**{"name": "x", "target": "a:b", "summary": "", **fields})).startswith(problem)


def test_a_good_record_has_no_problem():
    assert check_record(engine("x", needs=("a>=1; extra == 'b'",), platforms=("cpu",))) == ""


# -- events ------------------------------------------------------------------------------------------------------------


LISTENER = """
    from roll_core.spec.hooks import hookimpl

    ROLL_HOOK_API = 1
    heard = []

    @hookimpl
    def roll_run_started(run):
        heard.append(("started", run))

    @hookimpl
    def roll_step_finished(step, metrics):
        heard.append(("step", step, metrics["loss"]))

    @hookimpl
    def roll_run_finished(error):
        heard.append(("finished", error))
"""


def test_event_hooks_run_in_order_and_may_omit_arguments(importable):
    importable.install("acme-listener", source=LISTENER)
    events = Events(load_registry())
    events.run_started("the run")
    events.step_finished("the run", 1, {"loss": 0.5})
    events.run_finished("the run", None)
    import acme_listener.plugin

    assert acme_listener.plugin.heard == [("started", "the run"), ("step", 1, 0.5), ("finished", None)]


@pytest.mark.parametrize("crash", ["raise ValueError('no')", "raise SystemExit(0)"])
def test_event_hook_error_names_its_package(importable, crash):
    importable.install("acme-crash", "0.9", source=LISTENER.replace('heard.append(("started", run))', crash))
    with raises_error(PluginHookError, "acme-crash 0.9", "roll_run_started") as raised:
        Events(load_registry()).run_started("the run")
    assert raised.value.__cause__ is not None
    assert raised.value.exit_code == 1


def test_run_end_reaches_every_plugin_even_if_one_raises(importable):
    importable.install("acme-a", source=LISTENER.replace('heard.append(("finished", error))', "raise ValueError('no')"))
    importable.install("acme-b", source=LISTENER)
    with raises_error(PluginHookError, "acme-a"):
        Events(load_registry()).run_finished("the run", None)
    import acme_b.plugin

    assert acme_b.plugin.heard == [("finished", None)]
