"""`strategy_config` of `sglang`, as `roll-core check` judges it: without SGLang."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_infer_sglang.arguments import PASSED_ON, REJECTED
from roll_infer_sglang.config import SglangConfig
from roll_testing.errors import mentions, raises_error


def test_a_worker_takes_the_slots_that_a_layer_is_spread_over():
    assert SglangConfig().slots_per_worker() is None  # as the role says
    assert SglangConfig(tp_size=4).slots_per_worker() == 4


def test_the_engines_own_arguments_go_to_it_as_they_are():
    given = {"context_length": 512, "attention_backend": "fa3", "triton_attention_num_kv_splits": 4}
    assert SglangConfig.model_validate(given).engine_arguments().items() >= given.items()


def test_unset_arguments_are_left_to_the_engine():
    assert SglangConfig().engine_arguments() == {
        "mem_fraction_static": 0.8,
        "disable_radix_cache": False,
        "load_format": "auto",
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": True,
        "ep_size": 1,
        "host": "127.0.0.1",
        "enable_lora": False,
    }


def test_null_arguments_reach_the_engine():
    assert SglangConfig.model_validate({"max_queued_requests": None}).engine_arguments()["max_queued_requests"] is None


@pytest.mark.parametrize("name", REJECTED)
def test_arguments_of_other_keys_are_refused_with_the_reason(name):
    with pytest.raises(ValidationError) as caught:
        SglangConfig.model_validate({name: 1})
    assert f"{name} {REJECTED[name]}" in str(caught.value)


def test_no_argument_is_both_passed_on_and_refused():
    assert not set(PASSED_ON) & set(REJECTED)
    assert not set(PASSED_ON) & set(SglangConfig.__annotations__)


@pytest.mark.parametrize(
    ("beside", "facts"),
    [
        ({"load_format": "dummy"}, ("weights",)),
        ({"sleep_level": 2}, ("weights",)),
        ({"tp_size": 2}, ("slots",)),
    ],
)
def test_adapters_are_refused_beside_what_would_break_them(beside, facts):
    with raises_error(ValidationError, "enable_lora", *facts):
        SglangConfig.model_validate({"enable_lora": True, **beside})


def test_adapters_are_served_only_where_it_is_asked_for():
    assert not SglangConfig().serves_adapters()
    assert SglangConfig(enable_lora=True).serves_adapters()


@pytest.mark.parametrize("share", [0.0, 1.0, 80])
def test_a_share_of_the_memory_is_a_share(share):
    with raises_error(ValidationError, "mem_fraction_static"):
        SglangConfig(mem_fraction_static=share)


def test_check_names_the_nearest_argument(tmp_path, capsys):
    from roll_core.cli.main import main

    (tmp_path / "run.yaml").write_text(
        "pipeline: rlvr\n"
        "max_steps: 1\n"
        "pretrain: model\n"
        "actor_train:\n"
        "  data_args: {file_name: rows.jsonl}\n"
        "  strategy_args: {strategy_name: hf_train}\n"
        "actor_infer:\n"
        "  strategy_args:\n"
        "    strategy_name: sglang\n"
        "    strategy_config: {mem_fraction: 0.7}\n"
        "rewards: {math: {reward: math_rule}}\n",
        encoding="utf-8",
    )
    assert main(["check", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert "actor_infer.strategy_args.strategy_config.mem_fraction" in said
    assert mentions(said, "mem_fraction_static")


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_that_cannot_be_distributed_are_refused(key):
    SglangConfig().check_model({key: 6})
    SglangConfig(tp_size=4, ep_size=2).check_model({key: 6})
    SglangConfig(ep_size=2).check_model({key: 6})  # the role decides on tp_size
    with raises_error(ValueError, "ep_size 4", "6 experts"):
        SglangConfig(tp_size=4, ep_size=4).check_model({key: 6})
    with raises_error(ValueError, "ep_size 3", "2 slots"):
        SglangConfig(tp_size=2, ep_size=3).check_model({key: 6})
    with raises_error(ValueError, "ep_size 2"):
        SglangConfig(tp_size=2, ep_size=2).check_model({key: 0, "model_type": "qwen3"})


def test_kernels_that_convert_experts_are_refused():
    SglangConfig(moe_runner_backend="triton").check_model({"num_experts": 8})
    for backend in ("auto", "flashinfer_cutlass"):
        with raises_error(ValueError, "moe_runner_backend", backend):
            SglangConfig(moe_runner_backend=backend).check_model({"num_experts": 8})
        SglangConfig(moe_runner_backend=backend).check_model({"model_type": "qwen3"})


def test_lengths_that_it_cannot_serve_are_refused():
    SglangConfig().check_lengths(1024, 1024)
    SglangConfig(context_length=2048).check_lengths(1024, 1024)
    with raises_error(ValueError, "context_length", "2047", "2048"):
        SglangConfig(context_length=2047).check_lengths(1024, 1024)


@pytest.mark.parametrize(
    ("keys", "fits"),
    [
        ({"model_type": "mistral", "sliding_window": 48}, True),
        ({"model_type": "mistral", "sliding_window": 47}, False),
        ({"model_type": "mistral", "sliding_window": None}, True),
        ({"model_type": "phi3", "sliding_window": 47}, False),
        ({"model_type": "qwen2", "sliding_window": 47}, True),
        ({"model_type": "qwen2", "sliding_window": 47, "use_sliding_window": False}, True),
        ({"model_type": "qwen2", "sliding_window": 47, "use_sliding_window": True}, False),
        ({"model_type": "gemma3_text", "sliding_window": 8}, True),  # SGLang computes its window
        ({}, True),
    ],
    ids=str,
)
def test_sequences_beyond_a_window_that_it_ignores_are_refused(keys, fits):
    if fits:
        return SglangConfig().check_positions(keys, 32, 16)
    with raises_error(ValueError, "sliding_window", "47", "48", str(keys["model_type"])):
        SglangConfig().check_positions(keys, 32, 16)


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({"model_type": "mistral"}, 4096),
        ({"model_type": "qwen2", "use_sliding_window": True}, 4096),
        ({"model_type": "qwen2"}, None),
        ({"model_type": "starcoder2"}, None),
        ({"model_type": "mistral", "auto_map": {}}, None),  # the config class is the model's own
    ],
    ids=str,
)
def test_the_default_window_of_a_type_counts(keys, window):
    SglangConfig().check_positions(keys, 4000, 96)
    if window is None:
        return SglangConfig().check_positions(keys, 4000, 97)
    with raises_error(ValueError, "sliding_window", str(window), "4097"):
        SglangConfig().check_positions(keys, 4000, 97)


RUN = """\
pipeline: rlvr
prompt_length: 1024
actor_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: sglang, strategy_config: CONFIG}
  device_mapping: [0]
rewards: {math: {reward: math_rule}}
"""


def problems(folder, config, *overrides, needs=False):
    """(line, column, key) of each."""
    (folder / "run.yaml").write_text(RUN.replace("CONFIG", config), encoding="utf-8")
    try:
        load(folder / "run.yaml", overrides, load_registry(), needs=needs)
    except ConfigError as error:
        return [(*map(int, each.where.split(":")[1:]), each.key) for each in error.problems]
    return []


def test_lengths_experts_and_nodes_are_located_mistakes(tmp_path):
    at = "actor_infer.strategy_args.strategy_config"
    assert problems(tmp_path, "{page_size: 1, context_length: 2047}") == [(7, 90, at)]
    assert problems(tmp_path, "{context_length: 2048}") == []
    experts = "actor_train.model_args.random_init={model_type: qwen3_moe, num_experts: 6}"
    assert problems(tmp_path, "{page_size: 1, ep_size: 2}", experts) == []
    assert problems(tmp_path, "{page_size: 1, ep_size: 4}", experts) == [(7, 59, at)]
    assert [key for *_, key in problems(tmp_path, "{enable_eplb: true}", experts)] == [at]
    spread = ("num_gpus_per_node=4", "actor_infer.device_mapping=[3,4]")
    assert [key for *_, key in problems(tmp_path, "{tp_size: 2}", *spread)] == ["actor_infer.device_mapping"]


def test_a_window_that_it_ignores_is_a_mistake_at_the_lengths(tmp_path):
    def at_length(window):
        mistral = f"actor_train.model_args.random_init={{model_type: mistral, sliding_window: {window}}}"
        return [each for each in problems(tmp_path, "{}", mistral, needs=True) if each[2] == "prompt_length"]

    assert at_length(2047) == [(2, 16, "prompt_length")]
    assert at_length(2048) == []
