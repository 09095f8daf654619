"""Adapters in a config: what switches them on, which strategies may have them, and when a reference is needed."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from roll_core.config import load
from roll_core.config.dump import dump
from roll_core.errors import ConfigError, UnsupportedError
from roll_core.plugins.loader import Plugin
from roll_core.plugins.registry import Registry
from roll_core.runtime.workers.build import lora_spec, served_adapters
from roll_core.spec.config import ModelArguments, Needs
from roll_core.spec.model import LoraSpec
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.providers import InferCapabilities, InferProvider, TrainCapabilities, TrainProvider
from roll_testing.errors import mentions, raises_error
from shared_tests.hf_plugins import hf_plugins

DOCS = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
SFT = """
pipeline: sft
sft_train:
  model_args:
    lora_target: all-linear
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
TRAINER, ENGINE = "roll_strategy_hf.train:HFTrainStrategy", "roll_infer_hf.engine:HFInferStrategy"
RLVR = """
pipeline: rlvr
use_kl_loss: true
actor_train:
  model_args: {lora_target: all-linear}
  data_args: {file_name: prompts.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
rewards: {math: {reward: math_rule}}
"""


@pytest.fixture(scope="module")
def registry():
    """roll-core, strategies that have no adapters, and one that does not export them."""
    ways = ("shared",)
    providers = (
        TrainProvider(name="plain_train", target=TRAINER, summary="Whole models only"),
        TrainProvider(
            name="merged_train",
            target=TRAINER,
            summary="",
            capabilities=TrainCapabilities(lora=True, gradient_checkpointing=True, weight_transports=ways),
        ),
        InferProvider(
            name="plain_infer",
            target=ENGINE,
            summary="",
            capabilities=InferCapabilities(weight_transports=ways),
        ),
    )
    acme = Plugin(
        package="roll-acme", version="1", entry_point="acme", target="acme", state="loaded", providers=providers
    )
    ours = ("roll-strategy-fsdp2", "roll-strategy-megatron", "roll-strategy-deepspeed")
    return Registry([*hf_plugins(*ours), acme])


@pytest.fixture
def read(tmp_path, registry):
    """The config that a text and overrides give."""

    def read(text, *overrides, needs=False):
        path = tmp_path / "run.yaml"
        path.write_text(text.lstrip(), encoding="utf-8")
        return load(path, list(overrides), registry, needs=needs).config

    return read


@pytest.mark.parametrize(
    ("written", "targets"),
    [
        ("all-linear", ("all-linear",)),
        ("q_proj", ("q_proj",)),
        ("q_proj, k_proj,v_proj", ("q_proj", "k_proj", "v_proj")),
        ("[q_proj, layers.0.mlp.up_proj]", ("q_proj", "layers.0.mlp.up_proj")),
        (r"'.*\.(q|v)_proj'", r".*\.(q|v)_proj"),
    ],
)
def test_targets_are_names_in_any_form_or_a_regular_expression(read, written, targets):
    args = read(SFT.replace("all-linear", written)).sft_train.model_args
    assert lora_spec(args) == LoraSpec(targets=targets, rank=8, alpha=16.0)


def test_every_key_arrives(read):
    keys = (
        "lora_rank: 4, lora_alpha: 6, additional_target: 'lm_head, norm', lora_export: adapter, use_rslora: true,"
        " rank_pattern: {q_proj: 2}, alpha_pattern: {'0.*q_proj': 3}, target_parameters: [experts.down_proj],"
        " load_in_4bit: true"
    )
    text = SFT.replace("model_args:\n    lora_target: all-linear", f"model_args: {{lora_target: [q_proj], {keys}}}")
    expected = LoraSpec(
        targets=("q_proj",),
        rank=4,
        alpha=6.0,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"0.*q_proj": 3.0},
        use_rslora=True,
        parameters=("experts.down_proj",),
        extra_modules=("lm_head", "norm"),
        load_in_4bit=True,
        export="adapter",
    )
    assert lora_spec(read(text).sft_train.model_args) == expected
    assert lora_spec(read(SFT, "sft_train.model_args.use_dora=true").sft_train.model_args).use_dora


@pytest.mark.parametrize("off", ["lora_rank=0", "lora_rank=null", "lora_target=null"])
def test_single_override_trains_the_whole_model(read, off):
    args = read(SFT, f"sft_train.model_args.{off}").sft_train.model_args
    assert not args.trains_adapters
    assert lora_spec(args) is None


def test_a_saved_config_without_adapters_loads_again(read):
    config = read(SFT, "sft_train.model_args.lora_target=null")
    assert read(dump(config)) == config
    config = read(SFT)
    assert read(dump(config)) == config


def test_lora_with_a_strategy_without_adapters_is_refused(read):
    text = SFT.replace("hf_train", "plain_train")
    with raises_error("ROLL-C017", "plain_train", "hf_train", key="sft_train.model_args.lora_target") as raised:
        read(text)
    (problem,) = raised.value.problems
    assert problem.where.endswith("run.yaml:4:18")
    read(text, "sft_train.model_args.lora_rank=0")


def test_engine_adapters_without_a_trained_adapter_are_refused(read):
    text = RLVR.replace("hf_infer}", "hf_infer, strategy_config: {enable_lora: true}}").replace(
        "use_kl_loss: true\n", ""
    )
    assert read(text).actor_infer.strategy_args.strategy_config == {"enable_lora": True}
    with pytest.raises(ConfigError) as raised:
        read(text, "actor_train.model_args.lora_rank=0")
    (problem,) = raised.value.problems
    assert problem.key == "actor_infer.strategy_args.strategy_config"
    assert mentions(problem.message, "hf_infer")
    read(text, "actor_train.model_args.lora_rank=0", "actor_infer.strategy_args.strategy_config.enable_lora=false")


@pytest.mark.parametrize(
    "override",
    [
        "actor_train.model_args.additional_target=[norm]",
        "actor_train.model_args.use_dora=true",
        "actor_train.model_args.load_in_4bit=true",
        "actor_train.model_args.target_parameters=[experts.down_proj]",
        "actor_train.model_args.lora_target=[q_proj, model.embed_tokens]",
        "~actor_train.model_args",
        "actor_train.strategy_args.strategy_name=merged_train",
    ],
    ids=["whole weights beside them", "DoRA", "4 bits", "experts", "embeddings", "only the critic's", "no export"],
)
def test_engine_adapters_are_refused_if_the_policy_sends_none(read, override):
    text = RLVR.replace("hf_infer}", "hf_infer, strategy_config: {enable_lora: true}}").replace(
        "use_kl_loss: true", "adv_estimator: gae"
    )
    role = {"model_args": {"lora_target": "all-linear"}, "strategy_args": {"strategy_name": "hf_train"}}
    text += yaml.safe_dump({"critic": role})
    assert read(text).critic.model_args.trains_adapters
    with raises_error("ROLL-C014", key="actor_infer.strategy_args.strategy_config"):
        read(text, override)


def test_evaluation_engine_gets_adapters_or_is_refused(read, registry):
    engine = {"strategy_args": {"strategy_name": "hf_infer", "strategy_config": {"enable_lora": True}}}
    rows = {"data_args": {"file_name": "rows.jsonl"}}
    text = SFT + yaml.safe_dump(
        {"actor_infer": engine, "validation": rows, "rewards": {"math": {"reward": "math_rule"}}}
    )
    role = RoleSpec(name="actor_infer", kind="generate", model_from="sft_train")
    assert served_adapters(role, read(text), registry) == LoraSpec(targets=("all-linear",), rank=8, alpha=16.0)
    with raises_error("ROLL-C014", key="actor_infer.strategy_args.strategy_config"):
        read(text, "sft_train.model_args.additional_target=[norm]")
    # A pipeline without a policy: only the run knows which role sends its weights.
    with raises_error(UnsupportedError, "actor_infer"):
        served_adapters(replace(role, model_from=""), read(text), registry)


@pytest.mark.parametrize("size", ["tensor_model_parallel_size", "ep_size"])
def test_adapters_that_need_whole_weights_are_refused_on_shards(read, size):
    text = SFT.replace("hf_train}", f"fsdp2_train, strategy_config: {{{size}: 2}}}}\n  device_mapping: [0, 1]")
    for key in ("use_dora=true", "target_parameters=experts.down_proj", "load_in_4bit=true"):
        if (size, key) == ("ep_size", "use_dora=true"):
            read(text, f"sft_train.model_args.{key}")
            continue
        with raises_error("ROLL-C018", size, key="sft_train.strategy_args.strategy_config"):
            read(text, f"sft_train.model_args.{key}")


@pytest.mark.parametrize("key", ["rank_pattern.q_proj=2", "alpha_pattern.q_proj=2", "use_dora=true"])
def test_adapters_that_megatron_has_not_are_refused(read, key):
    with raises_error("ROLL-C018", key="sft_train.strategy_args.strategy_config"):
        read(SFT.replace("hf_train", "megatron_train"), f"sft_train.model_args.{key}")


def test_4bit_without_strategy_or_library_support_is_refused(read, monkeypatch):
    at = "sft_train.model_args.load_in_4bit"
    for name in ("megatron_train", "deepspeed_train", "merged_train"):
        with raises_error("ROLL-C017", name, "hf_train", "fsdp2_train", key=at):
            read(SFT.replace("hf_train", name), f"{at}=true")
        read(SFT.replace("hf_train", name), f"{at}=true", "sft_train.model_args.lora_rank=0")
    with raises_error("ROLL-C014", "lora_target", key=at):
        read(SFT, f"{at}=true", "sft_train.model_args.lora_target=null")
    with raises_error("ROLL-C014", "load_in_4bit", "use_dora", key="sft_train.model_args"):
        read(SFT, f"{at}=true", "sft_train.model_args.use_dora=true")
    with raises_error("ROLL-C018", "load_in_4bit", "torch_compile", key="sft_train.strategy_args.strategy_config"):
        read(SFT, f"{at}=true", "sft_train.strategy_args.strategy_config.torch_compile=true")
    read(SFT, f"{at}=true")
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else real(name))
    read(SFT, f"{at}=true")
    with raises_error("ROLL-C017", "bitsandbytes", "roll-modeling[qlora]", key=at):
        read(SFT, f"{at}=true", needs=True)


@pytest.mark.parametrize("role", ["actor_infer", "reference"])
def test_adapters_of_a_role_that_cannot_load_them_are_refused(read, role):
    plain = {"actor_infer": "plain_infer", "reference": "plain_train"}[role]
    reference = yaml.safe_dump({"reference": {"strategy_args": {"strategy_name": "hf_infer"}}})
    chosen = f"{role}.strategy_args.strategy_name={plain}"
    read(RLVR + reference, chosen)
    with raises_error("ROLL-C017", plain, key=f"{role}.model_args.lora_target"):
        read(RLVR + reference, chosen, f"{role}.model_args.lora_target=all-linear")


def test_reference_is_optional_for_a_policy_with_adapters(read):
    assert read(RLVR).reference is None
    reference = yaml.safe_dump({"reference": {"strategy_args": {"strategy_name": "hf_infer"}}})
    assert read(RLVR + reference).reference is not None
    with raises_error(ConfigError, "use_kl_loss"):
        read(RLVR, "actor_train.model_args.lora_rank=0")


def test_the_page_has_every_key_and_its_example_loads(read):
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCS, flags=re.DOTALL)
    config = read(example)
    assert lora_spec(config.actor_train.model_args) == LoraSpec(targets=("all-linear",), rank=16, alpha=32.0)
    assert config.stays_close
    listed = set(re.findall(r"^- `(\w+)`:", DOCS, flags=re.MULTILINE))
    fields = ModelArguments.model_fields.items()
    assert listed == {
        "lora_target",
        *(name for name, field in fields if any(isinstance(m, Needs) for m in field.metadata)),
    }
