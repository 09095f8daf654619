"""What SGLang's server is told: without SGLang."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from roll_core.errors import ModelError
from roll_core.spec.model import LoraSpec, MeshInfo
from roll_infer_sglang.config import SglangConfig
from roll_infer_sglang.hooks import add_bias
from roll_infer_sglang.launch import SPARE_TOKENS, check_sizes, config_overrides, server_arguments
from roll_modeling.engine_files import engine_files
from roll_testing.errors import raises_error
from shared_tests.live_engine import biased

LORA = LoraSpec(targets=("all-linear",), rank=5, alpha=10.0)


def told(device="cpu", *, lora=None, num_slots=2, sampling_seed=0, **config):
    model = dataclasses.replace(biased(), lora=lora)
    with engine_files(model, "SGLang") as files:
        mesh = MeshInfo(role="actor_infer", device=device, sampling_seed=sampling_seed)
        return server_arguments(SglangConfig.model_validate(config), model, mesh, files, num_slots)


@pytest.mark.parametrize(
    ("device", "level", "saver", "backup"),
    [("cuda:1", 0, False, False), ("cuda:1", 1, True, True), ("cuda:1", 2, True, False), ("cpu", 2, False, False)],
)
def test_sleeping_engines_on_accelerators_enable_memory_saving(device, level, saver, backup):
    found = told(device, sleep_level=level)
    assert (found["enable_memory_saver"], found["enable_weights_cpu_backup"]) == (saver, backup)
    assert "sleep_level" not in found


def test_sliding_windows_are_those_of_transformers():
    def keys(model_type, **config):
        return config_overrides(AutoConfig.for_model(model_type, sliding_window=9, **config), {"use_cache": True})

    for model_type in ("cohere2", "cwm", "ministral"):
        assert keys(model_type) == {"use_cache": True, "sliding_window": 8}
    assert "sliding_window" not in keys("gemma2")


def test_keys_that_transformers_does_not_need_are_implied():
    config = AutoConfig.for_model("deepseek_v3", scoring_func="softmax")
    found = config_overrides(config, {"topk_method": "greedy"})
    assert found == {"moe_layer_freq": 1, "topk_method": "greedy"}  # the config's own and the user's win
    assert config_overrides(AutoConfig.for_model("llama"), {}) == {}


@pytest.mark.parametrize(
    ("model_type", "released"),
    [
        ("glm4_moe_lite", {"first_k_dense_replace": 1}),
        ("hy_v3", {"first_k_dense_replace": 1, "expert_hidden_dim": 1536, "qk_norm": True, "route_norm": True}),
        ("minimax_m2", {"rotary_dim": 64, "use_routing_bias": True, "scoring_func": "sigmoid", "use_qk_norm": True}),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 8, "partial_rotary_factor": 0.334, "swa_rope_theta": 1e4}),
        ("qwen3_next", {"full_attention_interval": 4}),
    ],
)
def test_implied_keys_are_those_of_released_models(model_type, released):
    keys = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}}
    config = AutoConfig.for_model(model_type, **(keys if model_type == "minimax_m2" else {}))
    assert config_overrides(config, {}).items() >= released.items()


def test_layers_of_mimo_are_numbered_as_in_released_models():
    found = config_overrides(AutoConfig.for_model("mimo_v2_flash"), {})
    assert found["hybrid_layer_pattern"] == ([0] + [1] * 4 + [0]) + ([1] * 5 + [0]) * 7
    assert found["moe_layer_freq"] == [0] + [1] * 47


def test_the_bias_of_an_output_layer_is_added():
    head, hidden_TH = torch.nn.Linear(8, 5), torch.randn(3, 8)
    logits_TV = hidden_TH @ head.weight.T
    torch.testing.assert_close(add_bias(logits_TV.clone(), None, hidden_TH, head), head(hidden_TH))
    assert add_bias(logits_TV, None, hidden_TH, head, head.bias) is logits_TV  # SGLang adds this one
    assert add_bias(logits_TV, None, hidden_TH, torch.nn.Linear(8, 5, bias=False)) is logits_TV


def test_rotary_keys_of_images_keep_the_users_own():
    config = AutoConfig.for_model("qwen3_vl", text_config={"rope_parameters": {"mrope_section": [8, 4, 4]}})
    found = config_overrides(config, {"text_config": {"num_hidden_layers": 2}})
    assert found["text_config"]["num_hidden_layers"] == 2
    assert found["text_config"]["rope_parameters"] == found["rope_scaling"]
    assert found["rope_scaling"].items() >= {"mrope_interleaved": True, "mrope_section": [8, 4, 4]}.items()


def test_a_device_is_taken_apart():
    found = told("cuda:1")
    assert (found["device"], found["base_gpu_id"], found["tp_size"]) == ("cuda", 1, 2)
    assert "max_total_tokens" not in found


def test_a_cpus_cache_is_bounded_unless_the_user_says_how():
    assert told()["max_total_tokens"] == 1 << 16
    assert told(max_total_tokens=4096)["max_total_tokens"] == 4096


def test_context_length_is_that_of_the_model_unless_shortened():
    assert told()["context_length"] == 256 + SPARE_TOKENS
    assert told(context_length=100)["context_length"] == 100 + SPARE_TOKENS
    with raises_error(ModelError, "context_length", "257", "256"):
        told(context_length=257)


def test_requests_without_a_seed_use_one_of_the_start():
    assert told()["random_seed"] == 0
    assert told(sampling_seed=2**40 + 7)["random_seed"] == 7


def test_priorities_are_told_of_where_they_are_heeded():
    assert told()["disable_priority_preemption"]
    assert "disable_priority_preemption" not in told(enable_priority_scheduling=False)


def test_adapter_has_room_and_the_base_model_another_name():
    found = told(lora=LORA, num_slots=1, enable_lora=True)
    assert (found["enable_lora"], found["max_lora_rank"], found["max_loras_per_batch"]) == (True, 5, 2)
    assert found["served_model_name"] == "actor_infer-base"
    plain = told()
    assert plain["served_model_name"] == "actor_infer"
    assert not plain["enable_lora"]
    assert "max_lora_rank" not in plain


def test_adapter_kernels_default_to_torch_on_a_cpu():
    assert told(lora=LORA, num_slots=1)["lora_backend"] == "torch_native"
    assert "lora_backend" not in told("cuda", lora=LORA, num_slots=1)
    assert told("cuda", lora=LORA, num_slots=1, lora_backend="triton")["lora_backend"] == "triton"


def test_adapters_over_several_slots_are_refused():
    with raises_error(ModelError, "actor_infer rank 0", "enable_lora"):
        told(lora=LORA)


@pytest.mark.parametrize(
    ("sizes", "num_slots", "facts"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 2},
            4,
            ("num_attention_heads", "6", "4"),
        ),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 1},
            2,
            ("num_key_value_heads", "1", "2"),
        ),
        ({"intermediate_size": 96}, 2, ("intermediate_size", "96", "2", "32", "tp_size")),
        ({"moe_intermediate_size": 96}, 2, ("moe_intermediate_size", "96", "2", "32")),
    ],
)
def test_a_model_that_would_be_filled_up_is_refused(sizes, num_slots, facts):
    with raises_error(ModelError, "actor_infer rank 0", *facts):
        check_sizes(SimpleNamespace(**sizes), num_slots, "actor_infer rank 0")
    even = dict.fromkeys(sizes, 64 * num_slots) | {"moe_intermediate_size": None}
    check_sizes(SimpleNamespace(**even), num_slots, "actor_infer rank 0")
