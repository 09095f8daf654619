"""Adapters in a config: what switches them on, which strategies may have them, and when a reference is needed."""

import re
from pathlib import Path

import pytest
import yaml

from roll_core.config import load
from roll_core.config.dump import dump
from roll_core.errors import ConfigError
from roll_core.plugins.loader import Plugin
from roll_core.plugins.registry import Registry
from roll_core.runtime.workers.build import lora_spec
from roll_core.spec.config import LORA_KEYS
from roll_core.spec.model import LoraSpec
from roll_core.spec.providers import TrainProvider
from roll_testing.errors import mentions, raises_error
from roll_testing.kit import hf_plugins

DOCS = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
SFT = """
pipeline: sft
sft_train:
  model_args:
    lora_target: all-linear
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
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
    """roll-core, and a train strategy that has no adapters."""
    plain = TrainProvider(name="plain_train", target="nowhere:Plain", summary="Whole models only")
    acme = Plugin(
        package="roll-acme", version="1", entry_point="acme", target="acme", state="loaded", providers=(plain,)
    )
    return Registry([*hf_plugins(), acme])


@pytest.fixture
def read(tmp_path, registry):
    """The config that a text and overrides give."""

    def read(text, *overrides):
        path = tmp_path / "run.yaml"
        path.write_text(text.lstrip(), encoding="utf-8")
        return load(path, list(overrides), registry).config

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
    keys = "lora_rank: 4, lora_alpha: 6, additional_target: 'lm_head, norm', lora_export: adapter"
    text = SFT.replace("model_args:\n    lora_target: all-linear", f"model_args: {{lora_target: [q_proj], {keys}}}")
    expected = LoraSpec(targets=("q_proj",), rank=4, alpha=6.0, extra_modules=("lm_head", "norm"), export="adapter")
    assert lora_spec(read(text).sft_train.model_args) == expected


@pytest.mark.parametrize("off", ["lora_rank=0", "lora_rank=null", "lora_target=null"])
def test_one_override_trains_the_whole_model(read, off):
    args = read(SFT, f"sft_train.model_args.{off}").sft_train.model_args
    assert not args.trains_adapters
    assert lora_spec(args) is None


def test_a_saved_config_without_adapters_loads_again(read):
    config = read(SFT, "sft_train.model_args.lora_target=null")
    assert read(dump(config)) == config
    config = read(SFT)
    assert read(dump(config)) == config


def test_a_strategy_without_adapters_is_refused_where_they_are_asked_for(read):
    text = SFT.replace("hf_train", "plain_train")
    with raises_error("ROLL-C017", "plain_train", "hf_train", key="sft_train.model_args.lora_target") as raised:
        read(text)
    (problem,) = raised.value.problems
    assert problem.where.endswith("run.yaml:4:18")
    read(text, "sft_train.model_args.lora_rank=0")


def test_an_engine_that_asks_for_adapters_is_refused_where_nobody_trains_any(read):
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


def test_a_policy_with_adapters_needs_no_reference_and_may_have_one(read):
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
    assert listed == {"lora_target", *LORA_KEYS}
