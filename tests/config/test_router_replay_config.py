"""`router_replay` in a config: what has to be there for it."""

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.pipelines.plans import rlvr
from roll_core.plugins.loader import Plugin
from roll_core.plugins.registry import Registry
from roll_core.runtime.workers.build import model_spec
from roll_core.spec.providers import InferCapabilities, InferProvider, TrainCapabilities, TrainProvider
from roll_testing.errors import mentions
from shared_tests.hf_plugins import hf_plugins

RLVR = """
pipeline: rlvr
router_replay: {mode: R3}
adv_estimator: gae
actor_train:
  model_args: {random_init: {model_type: qwen3_moe}}
  data_args: {file_name: prompts.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
critic:
  strategy_args: {strategy_name: hf_train}
rewards: {math: {reward: math_rule}}
"""


@pytest.fixture(scope="module")
def registry():
    """roll-core, and strategies that do neither."""
    providers = (
        TrainProvider(
            name="plain_train",
            target="nowhere:Plain",
            summary="Chooses its experts itself",
            capabilities=TrainCapabilities(weight_transports=("shared",)),
        ),
        InferProvider(
            name="plain",
            target="nowhere:Plain",
            summary="Keeps its experts to itself",
            capabilities=InferCapabilities(weight_transports=("shared",)),
        ),
    )
    acme = Plugin(
        package="roll-acme", version="1", entry_point="acme", target="acme", state="loaded", providers=providers
    )
    return Registry([*hf_plugins(), acme])


@pytest.fixture
def read(tmp_path, registry):
    """The config that the text and overrides give."""

    def read(*overrides):
        path = tmp_path / "run.yaml"
        path.write_text(RLVR.lstrip(), encoding="utf-8")
        return load(path, list(overrides), registry).config

    return read


def problems(read, *overrides):
    with pytest.raises(ConfigError) as caught:
        read(*overrides)
    return str(caught.value)


def told(config, folder):
    """Roles whose strategies are to do their part."""
    roles = [role for role in rlvr(config).roles if role.kind != "reward"]
    return {role.name for role in roles if model_spec(role, config, folder).router_replay}


def test_only_policy_trainer_and_engine_replay_routers(read, tmp_path):
    assert told(read(), tmp_path) == {"actor_train", "actor_infer"}
    assert told(read("router_replay.mode=disable"), tmp_path) == set()


def test_a_model_without_experts_is_refused_once(read):
    found = problems(read, "actor_train.model_args.random_init.model_type=qwen3")
    assert found.count("router_replay.mode") == 1
    assert mentions(found, "qwen3")
    assert "mode: disable" in found


def test_unknown_routers_are_named(read):
    found = problems(read, "actor_train.model_args.random_init.model_type=gpt_oss")
    assert mentions(found, "gpt_oss")
    assert "qwen3_moe" in found


def test_strategies_that_cannot_are_named_with_those_that_can(read):
    found = problems(read, "actor_infer.strategy_args.strategy_name=plain")
    assert mentions(found, "ROLL-C017", "plain", "actor_infer", "hf_infer")
    found = problems(read, "actor_train.strategy_args.strategy_name=plain_train")
    assert mentions(found, "ROLL-C017", "plain_train", "actor_train", "hf_train")
    read("actor_train.strategy_args.strategy_name=plain_train", "router_replay.mode=disable")
    read("critic.strategy_args.strategy_name=plain_train")


def test_a_mode_that_there_is_not_is_refused(read):
    found = problems(read, "router_replay.mode=R2")
    assert "router_replay.mode" in found
    assert "R3" in found
