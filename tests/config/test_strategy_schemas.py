"""What plugins bring into a config: schemas of strategies and rewards, slots per worker, qualified names."""

import sys
import textwrap
from typing import get_args

import pytest

from roll_core.config import load, strategy_config
from roll_core.config.dump import dump
from roll_core.errors import ConfigError, PluginLoadError
from roll_core.plugins.loader import Plugin
from roll_core.plugins.registry import Registry
from roll_core.spec.providers import (
    InferCapabilities,
    InferProvider,
    ModelParallelism,
    PipelineProvider,
    PlatformProvider,
    RewardProvider,
    TrainCapabilities,
    TrainProvider,
)
from roll_testing.errors import mentions, raises_error
from shared_tests.hf_plugins import hf_plugins

MODULE = "acme_schemas_of_a_test"


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """roll-core, and a package whose engine takes tensor × pipeline slots per worker."""
    (tmp_path / f"{MODULE}.py").write_text(
        textwrap.dedent(
            """
            from typing import Literal
            from pydantic import model_validator
            from roll_core.spec.config import PositiveInt, StrategyConfig
            from roll_core.spec.config import RunConfig
            from roll_core.spec.config import InferWorkerConfig, RewardConfig, TrainWorkerConfig

            class EngineConfig(StrategyConfig):
                tensor_parallel_size: PositiveInt = 1
                pipeline_parallel_size: PositiveInt = 1
                swap: Literal["none", "host"] = "none"

                def slots_per_worker(self):
                    return self.tensor_parallel_size * self.pipeline_parallel_size

            class SpreadConfig(StrategyConfig):
                sizes: dict[str, PositiveInt] = {}
                together: PositiveInt | None = None

                def parallel_sizes(self):
                    return self.sizes

                def ranks_per_replica(self):
                    return self.together or super().ranks_per_replica()

            class JudgeConfig(RewardConfig):
                reward: Literal["math_rule"]
                strictness: float = 0.5

            class PairConfig(RunConfig):
                pipeline: Literal["pair"]
                learner: TrainWorkerConfig
                engines: dict[str, InferWorkerConfig] = {}
                rewards: dict[str, RewardConfig] = {}

            class Rude(RunConfig):
                @model_validator(mode="after")
                def _rude(self):
                    raise KeyError("oops")
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    providers = (
        InferProvider(
            name="engine",
            target=f"{MODULE}:Engine",
            config=f"{MODULE}:EngineConfig",
            summary="",
            platforms=("gpu",),
            capabilities=InferCapabilities(dtypes=("bf16", "fp16"), tensor_parallel=True),
        ),
        InferProvider(
            name="seedless",
            target=f"{MODULE}:Engine",
            config=f"{MODULE}:EngineConfig",
            summary="",
            capabilities=InferCapabilities(seeds=False),
        ),
        InferProvider(name="one_slot", target=f"{MODULE}:Engine", config=f"{MODULE}:EngineConfig", summary=""),
        InferProvider(name="broken", target=f"{MODULE}:Engine", config=f"{MODULE}:Nothing", summary=""),
        InferProvider(
            name="exact",
            target=f"{MODULE}:Engine",
            summary="",
            capabilities=InferCapabilities(dtypes=("fp32",)),
        ),
        PlatformProvider(name="gpu", target=f"{MODULE}:Gpu", summary=""),
        TrainProvider(name="bare", target=f"{MODULE}:Bare", summary=""),
        TrainProvider(name="alone", target=f"{MODULE}:Bare", config=f"{MODULE}:SpreadConfig", summary=""),
        TrainProvider(
            name="spread",
            target=f"{MODULE}:Bare",
            config=f"{MODULE}:SpreadConfig",
            summary="",
            capabilities=TrainCapabilities(
                gradient_checkpointing=True,
                tensor_parallel=True,
                pipeline_parallel=True,
                context_parallel=True,
                expert_parallel=True,
            ),
        ),
        RewardProvider(
            name="math_rule", target=f"{MODULE}:Judge", config=f"{MODULE}:JudgeConfig", summary="a second one"
        ),
        PipelineProvider(name="pair", target=f"{MODULE}:Pair", config=f"{MODULE}:PairConfig", summary=""),
        PipelineProvider(name="rude", target=f"{MODULE}:Pair", config=f"{MODULE}:Rude", summary=""),
    )
    acme = Plugin(
        package="roll-acme", version="2.1", entry_point="acme", target=MODULE, state="loaded", providers=providers
    )
    yield Registry([*hf_plugins(), acme])
    sys.modules.pop(MODULE, None)


BASE = """\
pipeline: pair
learner: {strategy_args: {strategy_name: bare}}
"""


@pytest.fixture
def check(registry, tmp_path):
    def check(text, *overrides):
        file = tmp_path / "run.yaml"
        file.write_text(BASE + textwrap.dedent(text))
        return load(file, overrides, registry).config

    return check


def problems_of(check, text):
    with pytest.raises(ConfigError) as raised:
        check(text)
    return [(problem.key, problem.message) for problem in raised.value.problems]


def test_slots_per_worker_are_computed_from_the_strategy(check):
    config = check(
        """
        engines:
          one:
            device_mapping: list(range(0,12))
            strategy_args:
              strategy_name: engine
              strategy_config: {tensor_parallel_size: 2, pipeline_parallel_size: 3}
        """
    )
    assert config.engines["one"].num_gpus_per_worker == 6


def test_slots_that_contradict_the_strategy_are_refused(check):
    found = problems_of(
        check,
        """
        engines:
          one:
            device_mapping: list(range(0,12))
            num_gpus_per_worker: 4
            strategy_args: {strategy_name: engine, strategy_config: {tensor_parallel_size: 2}}
        """,
    )
    assert found == [("engines.one.num_gpus_per_worker", "found 4, but engine's strategy_config makes it 2")]


def test_slots_not_divisible_by_computed_size_are_refused(check):
    text = """
        engines:
          one:
            device_mapping: list(range(0,7))
            strategy_args: {strategy_name: engine, strategy_config: {tensor_parallel_size: 2}}
        """
    with raises_error("ROLL-C014", "device_mapping", 7, "num_gpus_per_worker", 2, key="engines.one"):
        check(text)


@pytest.mark.parametrize(
    "more", ["", ", strategy_config: {tensor_parallel_size: 2}"], ids=["by the role", "by the strategy's own keys"]
)
def test_an_engine_that_does_not_spread_its_model_takes_one_slot(check, more):
    slots = "" if more else "num_gpus_per_worker: 2, "
    found = problems_of(
        check,
        f"engines: {{one: {{device_mapping: [0, 1], {slots}strategy_args: {{strategy_name: one_slot{more}}}}}}}\n",
    )
    assert [key for key, _ in found] == [
        "engines.one.strategy_args.strategy_config" if more else "engines.one.num_gpus_per_worker"
    ]


@pytest.mark.parametrize("ranks", ["device_mapping=[0,1]", "world_size=2"])
def test_several_ranks_without_data_parallelism_are_refused(check, ranks):
    """They would train a model each, and nothing would keep the models equal."""
    with pytest.raises(ConfigError) as raised:
        check("", f"learner.{ranks}")
    ((key, message),) = [(each.key, each.message) for each in raised.value.problems]
    assert key == "learner." + ranks.partition("=")[0]
    assert mentions(message, "2")


@pytest.mark.parametrize("kind", get_args(ModelParallelism))
def test_every_kind_of_parallelism_must_be_declared(check, kind):
    on = ["learner.device_mapping=[0,1]", f"learner.strategy_args.strategy_config.sizes.{kind}=2"]
    at = "learner.strategy_args.strategy_config"
    ranks = 1 if kind == "expert_parallel" else 2
    config = check("", "learner.strategy_args.strategy_name=spread", *on[2 - ranks :]).learner
    assert (config.ranks_per_replica or 1) == ranks
    with pytest.raises(ConfigError) as raised:
        check("", "learner.strategy_args.strategy_name=alone", *on[2 - ranks :])
    assert [each.key for each in raised.value.problems] == [at]
    assert kind in raised.value.problems[0].message


def test_ranks_of_a_replica_beyond_what_is_declared_are_refused(check):
    with pytest.raises(ConfigError) as raised:
        check(
            "",
            "learner.strategy_args.strategy_name=alone",
            "learner.device_mapping=[0,1]",
            "learner.strategy_args.strategy_config.together=2",
        )
    assert [each.key for each in raised.value.problems] == ["learner.strategy_args.strategy_config"]


def test_gradient_checkpointing_is_off_for_a_strategy_without_it(check):
    assert check("").learner.model_args.disable_gradient_checkpointing is True
    assert not check("", "learner.strategy_args.strategy_name=spread").learner.model_args.disable_gradient_checkpointing
    with pytest.raises(ConfigError) as raised:
        check("", "learner.model_args.disable_gradient_checkpointing=false")
    assert [each.key for each in raised.value.problems] == ["learner.model_args.disable_gradient_checkpointing"]


def test_strategy_config_is_validated_by_the_strategy_schema(check):
    found = problems_of(
        check,
        """
        engines:
          one:
            strategy_args: {strategy_name: engine, strategy_config: {tensor_paralel_size: 2, swap: disk}}
        """,
    )
    at = "engines.one.strategy_args.strategy_config"
    assert found == [
        (f"{at}.tensor_paralel_size", "there is no such key"),
        (f"{at}.swap", "found 'disk', expected none or host"),
    ]


def test_strategy_key_in_the_role_gets_a_hint_to_its_place(check):
    with raises_error(ConfigError, "engines.one.strategy_args.strategy_config"):
        check("engines: {one: {tensor_parallel_size: 2, strategy_args: {strategy_name: engine}}}\n")


def test_strategy_without_a_schema_refuses_keys(check):
    with raises_error(ConfigError, "learner.strategy_args.strategy_config.size"):
        check("", "learner.strategy_args.strategy_config.size=1")


def test_unsupported_platform_and_precision_are_refused(check):
    text = "platform: cpu\nengines: {one: {model_args: {dtype: fp32}, strategy_args: {strategy_name: engine}}}\n"
    with raises_error("ROLL-C017", "engine", "fp32", "bf16", key="engines.one.model_args.dtype") as raised:
        check(text)
    assert len(raised.value.problems) == 2
    with raises_error("ROLL-C017", "engine", "gpu", "cpu", key="engines.one.strategy_args.strategy_name"):
        check(text)


def test_a_platform_may_be_named_with_its_package(check):
    text = "platform: roll-acme/gpu\nengines: {one: {strategy_args: {strategy_name: engine}}}\n"
    assert check(text).platform == "roll-acme/gpu"


@pytest.mark.parametrize("model_args", ["", "model_args: {attn_implementation: sdpa}, "])
def test_the_default_precision_is_refused_too(check, model_args):
    text = f"engines: {{one: {{{model_args}strategy_args: {{strategy_name: exact}}}}}}\n"
    with raises_error("ROLL-C017", "exact", "bf16", "fp32", key="engines.one.model_args.dtype"):
        check(text)
    assert check(text, "engines.one.model_args.dtype=fp32").engines["one"].model_args.dtype == "fp32"


def test_seeds_for_an_engine_without_them_are_refused(check):
    args = "generating_args: {seed: 3}"
    text = f"engines: {{one: {{{args}, strategy_args: {{strategy_name: %s}}}}}}\n"
    assert check(text % "one_slot").engines["one"].generating_args.seed == 3
    with raises_error("ROLL-C017", "seedless", key="engines.one.generating_args.seed"):
        check(text % "seedless")


def test_a_schema_that_cannot_be_loaded_names_its_owner(check):
    with raises_error(PluginLoadError, "'broken'", "roll-acme 2.1", "'Nothing'"):
        check("engines: {one: {strategy_args: {strategy_name: broken}}}\n")


def test_a_schema_whose_rule_crashes_names_its_owner(registry, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("pipeline: rude\n")
    with raises_error(PluginLoadError, "'rude'", "roll-acme 2.1", "KeyError") as raised:
        load(file, [], registry)
    assert isinstance(raised.value.__cause__, KeyError)


def test_ambiguous_reward_is_refused_only_if_used(check):
    assert check("rewards: {}\n").rewards == {}
    with raises_error(ConfigError, "'roll-rewards/math_rule'", "'roll-acme/math_rule'"):
        check("rewards: {math: {reward: math_rule}}\n")


def test_a_qualified_name_chooses_and_survives_saving(check, registry, tmp_path):
    config = check("rewards: {math: {reward: roll-acme/math_rule, strictness: 0.75}}\n")
    reward = config.rewards["math"]
    assert type(reward).__name__ == "JudgeConfig"
    assert (reward.reward, reward.strictness) == ("roll-acme/math_rule", 0.75)
    saved = tmp_path / "config.yaml"
    saved.write_text(dump(config))
    assert load(saved, [], registry).config == config


def test_a_qualified_pipeline_is_loaded(registry, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(BASE.replace("pair", "roll-acme/pair"))
    loaded = load(file, [], registry)
    assert loaded.config.pipeline == "roll-acme/pair"
    assert loaded.pipeline.name == "pair"


def test_strategy_config_gives_the_schema_of_a_loaded_role(check, registry):
    config = check("engines: {one: {strategy_args: {strategy_name: engine, strategy_config: {swap: host}}}}\n")
    record = registry.find(InferProvider, "engine")
    keys = config.engines["one"].strategy_args.strategy_config
    assert strategy_config(record, keys, owner=registry.owner(record)).swap == "host"
