"""Which executor a config gets, and what is wrong with one that gets none."""

import os
import textwrap

import pytest

from roll_core.config import load
from roll_core.config.executors import choose_executor
from roll_core.config.parts import on_a_cluster
from roll_core.errors import ConfigError, ProviderConflictError, UnknownProviderError
from roll_core.plugins.loader import Plugin, load_plugins
from roll_core.plugins.registry import Registry
from roll_core.spec.providers import ExecutorProvider, TrainCapabilities, TrainProvider

CONFIG = """\
pipeline: sft
tokenizer: {kind: byte}
track_with: []
sft_train:
  model_args: {dtype: fp32, random_init: {model_type: qwen3}}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: spread}
"""
SPREAD = TrainProvider(
    name="spread",
    target="acme:Trainer",
    summary="",
    capabilities=TrainCapabilities(data_parallel=True, gradient_checkpointing=True),
)
TWO = "sft_train.device_mapping=[0,1]"


def executor(name, **more):
    return ExecutorProvider(name=name, target=f"acme:{name}", summary="", **more)


def registry(*providers):
    """The core alone, with what a plugin offers."""
    acme = Plugin(
        package="roll-acme",
        version="1",
        entry_point="acme",
        target="acme",
        state="loaded",
        providers=(SPREAD, *providers),
    )
    return Registry([*(each for each in load_plugins(environ={"ROLL_PLUGINS": ""}) if each.state == "loaded"), acme])


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(textwrap.dedent(CONFIG))

    def problems(*overrides, having=()):
        try:
            load(file, overrides, registry(*having))
        except ConfigError as error:
            return [(each.key, each.code, each.hint) for each in error.problems]
        return []

    return problems


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([TWO], "sft_train.device_mapping"),
        ([TWO, "sft_train.num_gpus_per_worker=null"], "sft_train.device_mapping"),
        (["sft_train.world_size=2"], "sft_train.world_size"),
        (["+sft_train.environment=envs"], "sft_train.environment"),
        (["executor=ray"], "executor"),
    ],
)
def test_missing_executor_package_for_several_workers_is_named(problems, overrides, key):
    ((found, code, hint),) = problems(*overrides)
    assert (found, code) == (key, UnknownProviderError.code)
    assert "pip install roll-executor-ray" in hint


def test_a_reward_of_several_workers_names_the_package_too(tmp_path):
    file = tmp_path / "run.yaml"
    role = "{device_mapping: [0], strategy_args: {strategy_name: spread}}"
    file.write_text(
        f"pipeline: rlvr\nactor_train: {role}\nrewards: {{m: {{reward: function, function: f:f, world_size: 2}}}}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load(file, [], registry())
    found = {each.key: each for each in raised.value.problems}["rewards.m.world_size"]
    assert found.code == UnknownProviderError.code
    assert "pip install roll-executor-ray" in found.hint


def test_single_worker_needs_no_further_package(problems):
    assert problems() == []
    assert problems("executor=local") == []


def test_any_plugins_executor_serves(problems):
    assert problems(TWO, having=[executor("swarm", priority=1)]) == []
    assert problems("executor=roll-acme/swarm", having=[executor("swarm")]) == []


def test_an_executor_of_priority_0_must_be_named(problems):
    assert problems(TWO, having=[executor("swarm")]) != []
    assert problems(TWO, "executor=swarm", having=[executor("swarm")]) == []


def test_executors_of_equal_priority_are_an_error(problems):
    tie = [executor("swarm", priority=1), executor("herd", priority=1)]
    ((key, code, _),) = problems(TWO, having=tie)
    assert (key, code) == ("sft_train.device_mapping", ProviderConflictError.code)


def test_role_environment_needs_an_executor_that_starts_it(problems):
    having = [executor("swarm", priority=2), executor("herd", priority=1, python_environments=True)]
    assert problems("+sft_train.environment=envs", having=having) == []
    for name in ("swarm", "local"):
        ((key, code, _),) = problems("+sft_train.environment=envs", f"executor={name}", having=having)
        assert (key, code) == ("executor", "ROLL-C014")
    found = choose_executor(registry(*having), "auto", "it has two workers")
    assert found.name == "swarm"
    assert choose_executor(registry(*having), "auto", "it has its own", environments=True).name == "herd"


def test_the_address_of_a_cluster_is_that_of_the_executor(monkeypatch):
    known = registry(executor("swarm", address_variable="SWARM_HEAD"))
    for value, names in ((None, ()), ("", ()), ("local", ()), ("head:1", ("auto", "swarm", "roll-acme/swarm"))):
        os.environ.pop("SWARM_HEAD", None)
        if value is not None:
            monkeypatch.setenv("SWARM_HEAD", value)
        found = [name for name in ("auto", "swarm", "roll-acme/swarm", "local") if on_a_cluster(known, name)]
        assert found == list(names)
