"""The engine's logprobs are those of a plain forward pass of transformers over the whole sequence."""

import asyncio
import functools

import numpy as np
import pytest
import torch
from transformers import BambaForCausalLM

from roll_core.errors import UnsupportedError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_hf import decoder
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy
from roll_modeling.model import load_model
from roll_testing.errors import raises_error
from shared_tests.tiny_architectures import MIXERS, MULTIMODAL, write_multimodal

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
WINDOW = {"sliding_window": 8}
FAST = {
    "llama": {**SMALL, "model_type": "llama"},
    "llama with biases": {**SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, one key head, tied": {
        **SMALL,
        "model_type": "llama",
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "llama, rope base": {**SMALL, "model_type": "llama", "rope_theta": 500.0},
    "llama 3 rope": {
        **SMALL,
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "yarn": {
        **SMALL,
        "model_type": "qwen3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {**SMALL, "model_type": "qwen2"},
    "qwen3": {**SMALL, "model_type": "qwen3", "head_dim": 16},
    "qwen3, tied": {**SMALL, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "mistral without window": {**SMALL, "model_type": "mistral", "sliding_window": None},
}
LARGE = {
    **SMALL,
    "model_type": "qwen3",
    "head_dim": 16,
    "hidden_size": 128,
    "intermediate_size": 640,
    "vocab_size": 640,
    "attention_bias": True,
}
"""Its weights are large enough for kernels of their own."""
GENERAL = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 97},
    "gpt_neox": {
        **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
        "model_type": "gpt_neox",
    },
    "mistral with window": {**SMALL, **WINDOW, "model_type": "mistral"},
    "qwen3_moe": {
        **SMALL,
        "model_type": "qwen3_moe",
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "gemma2": {**SMALL, **WINDOW, "model_type": "gemma2", "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {**SMALL, **WINDOW, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma4_text": {
        **SMALL,
        **WINDOW,
        "model_type": "gemma4_text",
        "head_dim": 8,
        "per_layer_config": {1: {"head_dim": 16, "num_key_value_heads": 1}},
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
    },
    "phi": {**SMALL, "model_type": "phi"},
    "qwen2 with windows": {
        **SMALL,
        **WINDOW,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
}


def run(spec, requests, **config):
    async def all_of_them():
        engine = HFInferStrategy(HFInferConfig(**config))
        await engine.start(spec, MeshInfo(role="actor_infer", num_threads=1))
        try:
            return await asyncio.gather(*[engine.generate(each) for each in requests])
        finally:
            await engine.stop()

    return asyncio.run(all_of_them())


def some_requests(*, seed=0, vocabulary=97, n=2, **params):
    rng = np.random.default_rng(seed)
    return [
        GenerateRequest(
            id=f"r{i}",
            prompt_ids=rng.integers(0, vocabulary, length),
            params=SamplingParams(max_new_tokens=new, seed=i, ignore_eos=True, **params),
            n=n,
            prompt_logprobs=i % 2 == 0,
        )
        for i, (length, new) in enumerate([(5, 12), (1, 20), (17, 3), (5, 9), (23, 14)])
    ]


def reference(model, tokens, temperature=1.0):
    """Logprob of each token given those before it; 0 for the first."""
    ids = torch.from_numpy(tokens).unsqueeze(0)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float() / temperature, dim=-1)
    found = logprobs[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1).numpy()
    return np.concatenate([np.zeros(1, dtype=np.float32), found])


def largest_difference(model, requests, completions):
    worst = 0.0
    for request, completion in zip(requests, completions, strict=True):
        num = len(request.prompt_ids)
        for output in completion.outputs:
            tokens = np.concatenate([request.prompt_ids, output.token_ids])
            expected = reference(model, tokens, request.params.temperature or 1.0)
            worst = max(worst, float(np.abs(expected[num:] - output.logprobs).max()))
        if request.prompt_logprobs:
            expected = reference(model, request.prompt_ids)
            worst = max(worst, float(np.abs(expected - completion.prompt_logprobs).max()))
    return worst


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("name", FAST)
def test_fast_path_gives_the_logprobs_of_a_plain_forward_pass(name, kernels):
    spec = ModelSpec(random_init=FAST[name], dtype="fp32", seed=3)
    model = load_model(spec)
    assert decoder.unsupported(model) is None
    requests = some_requests(temperature=0.7)
    assert largest_difference(model, requests, run(spec, requests, kernels=kernels)) < 1e-5


@pytest.mark.parametrize("name", GENERAL)
def test_general_path_gives_the_logprobs_of_a_plain_forward_pass(name):
    spec = ModelSpec(random_init=GENERAL[name], dtype="fp32", seed=3)
    model = load_model(spec)
    assert decoder.unsupported(model) is not None
    requests = some_requests(temperature=1.3)
    assert largest_difference(model, requests, run(spec, requests)) < 1e-5


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_text_of_image_models_has_plain_forward_logprobs(tmp_path, model_type):
    spec = write_multimodal(tmp_path, model_type)
    requests = some_requests(vocabulary=61)
    assert largest_difference(load_model(spec), requests, run(spec, requests)) < 1e-5


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_have_the_logprobs_of_a_plain_forward_pass(name):
    spec = ModelSpec(random_init=MIXERS[name], dtype="fp32", seed=3)
    requests = some_requests(vocabulary=61, temperature=1.3)
    tolerance = 1e-2 if name == "nemotron_h" else 1e-5  # the decoding of transformers differs from its own pass
    assert largest_difference(load_model(spec), requests, run(spec, requests)) < tolerance


@pytest.mark.parametrize("name", MIXERS)
def test_mixers_start_in_bfloat16(name):
    run(ModelSpec(random_init=MIXERS[name], dtype="bf16", seed=3), some_requests(vocabulary=61))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_that_decodes_other_logits_is_refused(monkeypatch, dtype):
    forward = BambaForCausalLM.forward

    @functools.wraps(forward)
    def without_positions(self, *args, position_ids=None, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(BambaForCausalLM, "forward", without_positions)
    with raises_error(UnsupportedError, "bamba"):
        run(ModelSpec(random_init=MIXERS["bamba"], dtype=dtype, seed=3), [])


def test_models_of_few_positions_start():
    keys = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 97}
    for num_positions in (1, 2, 3, 8):
        run(ModelSpec(random_init=keys | {"n_positions": num_positions}, dtype="fp32", seed=3), [])


SMALL_RECURRENT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97},
        {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97},
        # takes a cache, and keeps the state of its recurrent layers in the module all the same
        {**SMALL_RECURRENT, "model_type": "recurrent_gemma", "lru_width": 32, "head_dim": 8, "intermediate_size": 64},
        # has a cache class of its own
        {**SMALL, "model_type": "minimax", "num_local_experts": 4, "head_dim": 8},
    ],
    ids=lambda keys: keys["model_type"],
)
def test_models_with_state_outside_the_cache_are_refused(keys):
    """Each token would be sampled without those before it: logprobs were off by 0.05 to 1.1."""
    with pytest.raises(UnsupportedError, match=keys["model_type"]):
        run(ModelSpec(random_init=keys, dtype="fp32", seed=3), [])


@pytest.mark.parametrize("pack", [False, True])
def test_kernels_for_large_weights_have_plain_forward_logprobs(pack):
    spec = ModelSpec(random_init=LARGE, dtype="fp32", seed=3)
    requests = some_requests(vocabulary=640)
    completions = run(spec, requests, pack_weights=pack)
    assert largest_difference(load_model(spec), requests, completions) < 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", list(FAST))
def test_half_precision_decodes_as_on_an_accelerator(name, dtype, monkeypatch):
    """Queries and keys have the model's dtype there, before and after their norms."""
    monkeypatch.setattr(decoder, "math_dtype", lambda device, dtype: dtype)
    spec = ModelSpec(random_init=FAST[name], dtype=dtype, seed=3)
    requests = some_requests()
    completions = run(spec, requests, kernels="torch")
    assert largest_difference(load_model(spec), requests, completions) < 0.03


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("pack", [False, True])
def test_bfloat16_logprobs_are_as_close_as_those_of_transformers(pack, kernels):
    spec = ModelSpec(random_init=LARGE, dtype="bf16", seed=3)
    requests = some_requests(vocabulary=640)
    completions = run(spec, requests, pack_weights=pack, kernels=kernels)
    rounded = load_model(spec)
    exact = load_model(spec).float()
    mine, theirs = [], []
    for request, completion in zip(requests, completions, strict=True):
        for output in completion.outputs:
            tokens = np.concatenate([request.prompt_ids, output.token_ids])
            expected = reference(exact, tokens)[len(request.prompt_ids) :]
            mine.append(np.abs(output.logprobs - expected))
            theirs.append(np.abs(reference(rounded, tokens)[len(request.prompt_ids) :] - expected))
    assert np.concatenate(mine).mean() < 1.2 * np.concatenate(theirs).mean()
