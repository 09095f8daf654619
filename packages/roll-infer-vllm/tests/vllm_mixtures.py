"""Small mixtures of experts, and vLLM with one of them in this process: a start takes seconds, and tests reach in."""

from __future__ import annotations

import asyncio
import gc
import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from roll_core.errors import CorruptTensorError
from roll_core.runtime.weights.publisher import verify
from roll_core.spec.model import ModelSpec
from roll_core.spec.weights import make_manifest
from roll_core.types import WeightReceipt
from roll_infer_vllm.engine_environment import engine_environment
from roll_infer_vllm.processes import VllmProcesses
from roll_infer_vllm.registration import TRANSFER
from roll_modeling.engine_files import engine_files
from roll_modeling.engine_weights import ModelWeights
from roll_modeling.model import load_model
from roll_modeling.portable_state import router_buffers
from roll_weight_transports.buckets import Incoming
from shared_tests.loaded_engine import digests
from shared_tests.tiny_models import tiny_config

PROMPT = [5, 6, 7, 8, 9, 10, 11]
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
HEADS = {"head_dim": 32}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}  # padded on a CPU: to 64, and to 32 on each of 2 ranks
DENSE = {"intermediate_size": 96}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
}
"""The only sizes of latent attention that vLLM supports on a CPU."""
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
"""As in DeepSeek's models. Without YaRN vLLM rotates keys of latent attention wrongly on a CPU."""
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1}
MODELS = {
    "qwen2_moe": {**DENSE, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**HEADS, **DENSE, **EXPERTS, "num_experts": 8},
    "qwen3_next": {**HEADS, **DENSE, **EXPERTS, **LINEAR, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "qwen3_5_moe_text": {**HEADS, **EXPERTS, **LINEAR, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "mixtral": {**DENSE, "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {**DENSE, "num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe": {**HEADS, **DENSE, **EXPERTS, **SHARED, "n_group": 2, "topk_group": 1},
    "deepseek_v2": {**DENSE, **EXPERTS, **LATENT, **SHARED, "n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    "deepseek_v3": {**DENSE, **EXPERTS, **LATENT, **SHARED, "n_group": 2, "topk_group": 1, "rope_parameters": YARN},
    "gpt_oss": {
        **HEADS,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "ernie4_5_moe": {
        **HEADS,
        **DENSE,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "minimax_m2": {
        **HEADS,
        **DENSE,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
}
OTHERS = (
    "afmoe",
    "cohere2_moe",
    "dots1",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe_lite",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "lfm2_moe",
    "mimo_v2_flash",
    "solar_open",
)
"""Further architectures that the table of models has, with the sizes of its tiny models."""
BF16 = ("qwen3_next", "qwen3_5_moe_text")
"""vLLM computes linear attention only in bf16 on a CPU."""


def mixture(kind, **changes):
    """A small model with random weights."""
    dtype = "bf16" if kind in BF16 else "fp32"
    if kind in OTHERS:
        keys = {"vocab_size": 64, "pad_token_id": 0, **tiny_config(kind)}
        keys |= {**LATENT, "head_dim": 64, "rope_parameters": YARN} if "kv_lora_rank" in keys else {}
    else:
        keys = {"model_type": kind, **SIZES, **MODELS[kind]}
    return ModelSpec(random_init=keys | changes, seed=1, dtype=dtype)


class Calls:
    """The calls of `AsyncLLM` that an update makes, to an `LLM`."""

    def __init__(self, llm):
        self.llm = llm

    async def collective_rpc(self, method, args=()):
        return self.llm.collective_rpc(method, args=args)

    async def update_weight_version(self, version):
        pass

    async def start_weight_update(self):
        self.llm.start_weight_update()

    async def update_weights(self, request):
        self.llm.update_weights(request)

    async def finish_weight_update(self):
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()


class InProcess:
    """A trainer's model beside vLLM's in the same process. Call `close` at the end."""

    def __init__(self, kind, **arguments):
        from vllm import LLM

        from roll_infer_vllm.launch import config_overrides

        self.spec, self.version = mixture(kind), 0
        self.trainer = load_model(self.spec)
        if "kv_lora_rank" in self.spec.random_init:
            # On a host with AMX the default packs `kv_b_proj`, and refuses float32.
            arguments = {"attention_backend": "CPU_MLA"} | arguments
        variables = engine_environment("cpu", {}, num_threads=1, num_slots=1, compiles=False)
        with (
            patch.dict("os.environ", {**variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
            engine_files(self.spec, "vLLM") as files,
        ):
            self.llm = LLM(
                model=files.model,
                hf_overrides=config_overrides(files.config),
                dtype="bfloat16" if self.spec.dtype == "bf16" else "float32",
                enforce_eager=True,
                skip_tokenizer_init=True,
                worker_extension_cls="roll_infer_vllm.worker.WorkerExtension",
                weight_transfer_config={"backend": TRANSFER},
                kv_cache_memory_bytes=16 << 20,
                max_model_len=64,
                **arguments,
            )
        self.weights = ModelWeights(VllmProcesses(Calls(self.llm), "actor_infer rank 0"), 1 << 20, ["cpu"])

    @property
    def model(self):
        """vLLM's model."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()

    def move(self):
        """Change every weight of the trainer."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for each in (*self.trainer.parameters(), *(buffer for _, buffer in router_buffers(self.trainer))):
                each += 0.05 * torch.randn(each.shape, generator=generator).to(each.dtype)

    def publish(self, tensors=None):
        """Publish the trainer's weights; returns the manifest and the receipt."""
        if tensors is None:
            tensors = [*self.trainer.named_parameters(), *router_buffers(self.trainer)]
        manifest = make_manifest(self.version, tensors)
        asyncio.run(self.weights.compare(manifest))
        asyncio.run(self.weights.load(Incoming("actor_infer rank 0", manifest, iter(tensors))))
        return manifest, self.receipt(manifest)

    def receipt(self, manifest):
        """What is loaded now."""
        digests = asyncio.run(self.weights.digests(manifest))
        return WeightReceipt(version=manifest.version, digests=digests, role="actor_infer")

    def generate(self, num_tokens=12):
        """Greedy tokens of `PROMPT` and their logprobs, by vLLM."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=0, ignore_eos=True)
        output = self.llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0]
        logprobs = [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)]
        return list(output.token_ids), np.asarray(logprobs)

    def close(self):
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.weights.close()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def expected_logprobs(model, tokens):
    """Logprobs `[R, V]` of each response token's row by the trainer."""
    ids = torch.as_tensor([*PROMPT, *tokens])
    with torch.no_grad():
        return model(ids[None]).logits[0].float().log_softmax(-1)[len(PROMPT) - 1 : -1]


# -- faults of one of two ranks ----------------------------------------------------------------------------------------


def remote_functions(monkeypatch):
    """`on_ranks(live, function)` calls a function of the worker in each process and returns the results."""
    import cloudpickle  # comes with vLLM

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return lambda live, function: live.run(live.strategy._processes._call(function))


def expert_map(worker):
    """Place of each expert on this rank, or -1, in the last layer."""
    return [each for each in worker.model_runner.get_model().modules() if hasattr(each, "_expert_map")][
        -1
    ].expert_map.tolist()


def second_rank(function):
    """`function` of the second rank's worker, which may be a tensor-parallel or a data-parallel rank."""

    def run(worker):
        if worker.rank + worker.parallel_config.data_parallel_rank == 1:
            function(worker, worker.model_runner.get_model())

    return run


@second_rank
def save_weights(worker, model):
    worker.saved = {name: each.detach().clone() for name, each in model.named_parameters()}


@second_rank
def restore_weights(worker, model):
    for name, each in model.named_parameters():
        each.data.copy_(worker.saved[name])


@second_rank
def change_element(worker, model):
    weight = [each for name, each in model.named_parameters() if name.endswith("routed_experts.w2_weight")][-1][0].view(
        -1
    )
    place = weight.nonzero()[11]
    weight[place] = torch.nextafter(weight[place], weight[place] + 1)


@second_rank
def shift_map(worker, model):
    for each in model.modules():
        if hasattr(each, "_expert_map"):
            each._expert_map.copy_(each._expert_map.roll(1))


@second_rank
def shift_map_back(worker, model):
    for each in model.modules():
        if hasattr(each, "_expert_map"):
            each._expert_map.copy_(each._expert_map.roll(-1))


FAULTS = {
    "a rank that stays stale": (save_weights, restore_weights),
    "a changed element": (None, change_element),
    "a shifted expert map": (None, shift_map),
}
"""Functions that each rank runs before and after an update; they do something on the second."""


def check_faults(live, on_ranks):
    """Each of them shows in the digests, and the next update repairs it."""
    for name, (before, after) in FAULTS.items():
        live.step()
        if before is not None:
            on_ranks(live, before)
        manifest, receipt = live.publish()
        verify(manifest, receipt)
        on_ranks(live, after)
        found = live.run(live.strategy._weights.digests(manifest))
        with pytest.raises(CorruptTensorError):
            verify(manifest, replace(receipt, digests=found))
        wrong = {key for key, each in digests(manifest).items() if found[key] != each}
        assert any(key.endswith(".experts.down_proj") for key in wrong)
        if name == "a shifted expert map":
            on_ranks(live, shift_map_back)
        verify(*live.publish())
