"""Known fatal errors of vLLM, with their causes and remedies in a run's config."""

from __future__ import annotations

from roll_core.spec.diagnostics import KnownError

KNOWN_ERRORS = (
    KnownError(
        id="vllm_cache",
        pattern=r"No available memory for the cache blocks|larger than the available KV cache",
        cause="Beside the weights too little memory is left for the keys and values of one longest sequence.",
        remedy="raise strategy_config.gpu_memory_utilization (or kv_cache_memory_bytes), lower max_model_len to"
        " prompt_length + response_length, or raise tensor_parallel_size",
    ),
    KnownError(
        id="vllm_memory_taken",
        pattern=r"less than desired GPU memory utilization",
        cause="Something else holds memory of the device that vLLM is to have.",
        remedy="lower strategy_config.gpu_memory_utilization below what is free; end other processes on the device"
        " (`roll-core doctor` shows them); where roles share slots keep is_offload_states: true",
    ),
    KnownError(
        id="vllm_start",
        pattern=r"[Ee]ngine core initialization( failed)?\. See root cause above|vLLM's engine is dead",
        cause="A process of vLLM's own failed; the first cause is among its messages, further up.",
        remedy="look for the first error that the process printed: most often the device's memory (vllm_cache,"
        " vllm_memory_taken), a kernel that could not be compiled (enforce_eager: true), or a model that this vLLM does"
        " not have",
    ),
)
"""Known errors; the patterns match the messages of vLLM 0.32."""
