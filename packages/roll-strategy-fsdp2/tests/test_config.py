"""What `roll-core check` makes of the strategies' configuration."""

from __future__ import annotations

import pytest

from roll_core.config.loading import load
from roll_core.errors import ConfigError
from roll_testing.errors import mentions, raises_error
from roll_testing.train_kit import registry

RUN = """\
pipeline: sft
sft_train:
  data_args: {{file_name: rows.jsonl}}
  model_args: {{random_init: {{model_type: qwen3}}}}
  device_mapping: list(range(0, {slots}))
  training_args: {{per_device_train_batch_size: 2, gradient_accumulation_steps: 3}}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {{tensor_model_parallel_size: 2, ulysses_size: 2}}
"""


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ("ulysses_size: 2, ring_size: 2", ("ulysses_size", "ring_size")),
        ("tensor_model_parallel_size: 2, ep_size: 2", ("ep_size",)),
        ("ep_size: 2", ("ep_size", "qwen3")),
    ],
)
def test_check_refuses_what_does_not_go_together(tmp_path, keys, facts):
    file = tmp_path / "run.yaml"
    text = RUN.format(slots=8).replace("tensor_model_parallel_size: 2, ulysses_size: 2", keys)
    file.write_text(text, encoding="utf-8")
    with raises_error(ConfigError, *facts):
        load(file, [], registry())


@pytest.mark.parametrize("keys", ["model_type: qwen3_moe", "model_type: of_mine, auto_map: {AutoConfig: of.Mine}"])
def test_mixtures_and_models_with_own_code_may_have_an_ep_size(tmp_path, keys):
    file = tmp_path / "run.yaml"
    text = RUN.format(slots=8).replace("tensor_model_parallel_size: 2, ulysses_size: 2", "ep_size: 2")
    file.write_text(text.replace("model_type: qwen3", keys), encoding="utf-8")
    load(file, [], registry())


@pytest.mark.parametrize("key", ["ulysses_size", "ring_size"])
@pytest.mark.parametrize(
    "model",
    [
        "model_type: mamba2",
        "model_type: stablelm",
        "model_type: qwen3_next",
        "model_type: qwen3_5, text_config: {model_type: qwen3_5_text}",
        "model_type: lfm2_vl, text_config: {model_type: lfm2, layer_types: [conv, full_attention]}",
        "model_type: qwen3}, attn_implementation: eager, model_config_kwargs: {",
    ],
)
def test_context_parallelism_needs_a_model_without_padding(tmp_path, key, model):
    file = tmp_path / "run.yaml"
    text = RUN.format(slots=4).replace("model_type: qwen3", model)
    file.write_text(text.replace("tensor_model_parallel_size: 2, ulysses_size", key), encoding="utf-8")
    with raises_error("ROLL-C018", f"{key} is 2", "padding", key="sft_train.strategy_args.strategy_config"):
        load(file, [], registry())
    load(file, [f"sft_train.strategy_args.strategy_config.{key}=1"], registry())


@pytest.mark.parametrize(
    "model",
    [
        "model_type: qwen3",
        "model_type: mistral3",
        "model_type: gpt_oss",
        "model_type: granitemoehybrid, layer_types: [attention, attention]",
        "model_type: llama4_text, attention_chunk_size: null",
        "model_type: mamba2, auto_map: {AutoConfig: of.Mine}",
        "model_type: of_mine",
    ],
)
def test_context_parallelism_computes_models_without_padding(tmp_path, model):
    file = tmp_path / "run.yaml"
    text = RUN.format(slots=4).replace("model_type: qwen3", model)
    file.write_text(text.replace("tensor_model_parallel_size: 2, ", ""), encoding="utf-8")
    load(file, [], registry())


def test_check_counts_replicas_and_not_ranks(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(slots=8), encoding="utf-8")
    assert load(file, [], registry()).config.sft_train.ranks_per_replica == 4
    file.write_text(RUN.format(slots=6), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(file, [], registry())
    said = str(caught.value)
    assert mentions(said, "6", "tensor_model_parallel_size", "2", "ulysses_size", "4")
