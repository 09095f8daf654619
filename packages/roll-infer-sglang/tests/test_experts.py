"""Mixtures of experts: published to SGLang, proven by what is read back, computed as the trainer computes them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sglang_on_a_cpu import ON_A_CPU, stood_in

from roll_core.errors import MissingTensorError
from roll_core.spec.model import LoraSpec, ModelSpec
from roll_infer_sglang.config import SglangConfig
from roll_modeling.lora import add_adapters
from roll_modeling.model import load_model
from roll_modeling.portable_state import router_buffers
from roll_testing.errors import raises_error
from roll_testing.infer.interrupting import until_interrupted, was_whole
from shared_tests.live_engine import Live, request
from shared_tests.loaded_engine import CLOSE, PROMPT, digests
from shared_tests.tiny_models import tiny_config

pytestmark = [pytest.mark.engine("sglang"), pytest.mark.timeout(900)]

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""On a CPU, SGLang has rotary embeddings of latent attention only with a `rope_type` of its own."""
MODELS = {
    "qwen2_moe": {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "head_dim": 32},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**EXPERTS, **SHARED, "head_dim": 32, "n_group": 1, "topk_group": 1, "use_qk_norm": True},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": {**EXPERTS, **SHARED, **LATENT, "n_group": 4, "topk_group": 2},
    "deepseek_v3": {**EXPERTS, **SHARED, **LATENT, "n_group": 4, "topk_group": 2},
}
FILE_KEYS = {"deepseek_v2": {"topk_method": "group_limited_greedy"}}
"""Keys of the published configs."""
ROUTER_BIASES = {"glm4_moe": (1,), "dots1": (1,), "solar_open": (0, 1)}
"""Mixtures with correction biases, and their layers with experts. SGLang has a model of the first, and computes the
others with its Transformers backend."""
CLOSE_ROUNDED = 1e-3
"""Bound on the difference of logprobs in fp32 if attention sinks are rounded to bf16."""
CONFIG = {"max_total_tokens": 2048, "max_running_requests": 16, "bucket_mib": 1}


def mixture(kind, folder):
    """A small model with random weights."""
    dtype = "bf16" if kind == "gpt_oss" else "fp32"  # SGLang stores its sinks in bf16
    if kind in MODELS:
        keys = {"model_type": kind, **SIZES, **MODELS[kind]}
    else:
        keys = {**tiny_config(kind), "vocab_size": 100, "pad_token_id": 0, "n_routed_experts": 8}
    spec = ModelSpec(random_init=keys, seed=1, dtype=dtype)
    if kind not in FILE_KEYS:
        return spec
    load_model(spec).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **FILE_KEYS[kind]}))
    return replace(spec, random_init=None, path=str(folder))


def start(spec, num_slots=1, **config):
    from roll_infer_sglang.strategy import SglangStrategy

    settings = SglangConfig.model_validate({**ON_A_CPU, **CONFIG, **config})
    return Live(SglangStrategy(settings), spec, num_slots=num_slots)


def check(live, num_tokens=12, close=CLOSE):
    """Greedy and sampled tokens have the trainer's logprobs."""
    for how in ({"temperature": 0.0}, {"seed": 3}):
        output = live.generate(f"{live.version}-{how}", PROMPT, max_new_tokens=num_tokens, **how).outputs[0]
        right = live.logprobs([*PROMPT, *output.token_ids], len(PROMPT))
        np.testing.assert_allclose(output.logprobs, right, atol=close)


FAULTS = {
    "": (),
    "dropped": ("down_proj", "gate_up_proj"),
    "swapped": ("down_proj", "gate_up_proj"),
    "halves swapped": ("gate_up_proj",),
    "map shifted": ("down_proj", "gate_up_proj"),
    "bit": ("down_proj",),
}
"""Faults of `cpu/expert_faults.py`, and the tensors that differ then. Without one, none does."""


def check_fault(live, fault, name, layers):
    """The digests of the experts of these layers show it, and no others."""
    live.step()
    fault.write_text(name)
    manifest, receipt = live.publish()
    fault.write_text("")
    expected = digests(manifest)
    differing = {each for each in expected if receipt.digests[each] != expected[each]}
    assert differing == {f"model.layers.{layer}.mlp.experts.{each}" for layer in layers for each in FAULTS[name]}


class TestMixture:
    """One engine for all: a Qwen2-MoE, whose layers have routed experts and a shared one, with gates."""

    @pytest.fixture(scope="class")
    @classmethod
    def fault(cls, tmp_path_factory):
        file = tmp_path_factory.mktemp("fault") / "fault"
        file.write_text("")
        return file

    @pytest.fixture(scope="class")
    @classmethod
    def live(cls, fault):
        with stood_in(SGLANG_TEST_FAULT=str(fault)):
            live = start(mixture("qwen2_moe", fault.parent))
            yield live
            live.close()

    @pytest.mark.parametrize("name", FAULTS)
    def test_a_fault_shows_in_the_digests_of_its_tensors(self, live, fault, name):
        check_fault(live, fault, name, layers=(0, 1))

    def test_responses_continue_under_new_experts(self, live):
        live.publish()
        check(live)

        async def update_meanwhile():
            running = asyncio.create_task(live.strategy.generate(request("cut", PROMPT, max_new_tokens=100)))
            await live.strategy.generate(request("short", [5], max_new_tokens=6))
            live.step()
            await live.update()
            return await running

        output = until_interrupted(
            lambda: live.run(update_meanwhile()), lambda each: was_whole(each, 100, live.version - 1)
        ).outputs[0]
        new = output.versions == live.version
        right = live.logprobs([*PROMPT, *output.token_ids], len(PROMPT))
        assert 0 < new.sum() < 100
        np.testing.assert_allclose(output.logprobs[new], right[new], atol=CLOSE)

    def test_experts_of_an_engine_that_slept_are_the_published_ones(self, live):
        live.run(live.strategy.sleep())
        live.run(live.strategy.wake())
        live.step()
        manifest, receipt = live.publish()
        assert dict(receipt.digests) == digests(manifest)
        check(live)

    def test_merged_adapters_are_those_of_the_trainer(self, live):
        before, live.model = live.model, load_model(live.spec)
        lora = LoraSpec(targets=("q_proj", "o_proj", "shared_expert_gate"), rank=4, alpha=8)
        adapters = add_adapters(live.model, replace(live.spec, lora=lora))
        for each in adapters.trained().values():
            torch.nn.init.normal_(each, std=0.1)
        manifest, receipt = live.publish([(name, each.detach()) for name, each in adapters.merged()])
        assert dict(receipt.digests) == digests(manifest)
        check(live)
        live.model = before

    def test_a_layer_without_a_tensor_of_its_experts_is_refused(self, live):
        gone = "model.layers.1.mlp.experts.down_proj"
        with raises_error(MissingTensorError, gone):
            live.publish([(name, each) for name, each in live.model.named_parameters() if name != gone])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind not in ("qwen2_moe", "gpt_oss")])
def test_other_architectures_are_read_back_and_computed(kind, tmp_path):
    live = start(mixture(kind, tmp_path))
    try:
        check(live)
        for _ in range(2):
            live.step()
            manifest, receipt = live.publish()
            assert dict(receipt.digests) == digests(manifest)
            check(live)
    finally:
        live.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROUTER_BIASES)
def test_faults_and_missing_biases_are_found(kind, tmp_path):
    fault = tmp_path / "fault"
    fault.write_text("")
    with stood_in(SGLANG_TEST_FAULT=str(fault)):
        live = start(mixture(kind, tmp_path))
    try:
        for name in FAULTS:
            check_fault(live, fault, name, ROUTER_BIASES[kind])
        tensors = [*live.model.named_parameters(), *router_buffers(live.model)]
        for layer in ROUTER_BIASES[kind]:
            bias = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
            with raises_error(MissingTensorError, bias):
                live.publish([each for each in tensors if each[0] != bias])
        live.publish()
        check(live)
    finally:
        live.close()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_interleaved_experts_with_biases_are_read_and_computed(dtype, tmp_path):
    """SGLang computes gpt-oss with its own attention kernels only, here in Triton's interpreter: seconds per token.

    So its logprobs are wrong in bf16, also of the weights that it loads itself. In fp32 it rounds the sinks.
    """
    live = start(replace(mixture("gpt_oss", tmp_path), dtype=dtype), attention_backend="triton")
    try:
        live.step()
        manifest, receipt = live.publish()
        differing = {name for name, digest in digests(manifest).items() if receipt.digests[name] != digest}
        if dtype == "bf16":
            assert not differing
        else:
            assert differing == {f"model.layers.{layer}.self_attn.sinks" for layer in range(2)}
            check(live, num_tokens=2, close=CLOSE_ROUNDED)
    finally:
        live.close()


@pytest.mark.slow
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_ranks_share_the_experts(kind, ep_size, tmp_path):
    """Each has a half of every expert, or half of the experts. A rank that keeps its old weights is found."""
    fault = tmp_path / "fault"
    fault.write_text("")
    with stood_in(SGLANG_TEST_FAULT=str(fault)):
        live = start(mixture(kind, tmp_path), num_slots=2, ep_size=ep_size)
        try:
            for name in ("", "stale rank", ""):
                live.step()
                fault.write_text(name)
                manifest, receipt = live.publish()
                expected = digests(manifest)
                differing = {each for each in expected if receipt.digests[each] != expected[each]}
                assert all(".experts." in each for each in differing)
                assert len(differing) == (4 if name else 0)
            check(live)
        finally:
            live.close()
