"""Plugin hooks of the package: registers the infer strategy `sglang`. Imports neither torch nor SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferCapabilities, InferProvider, KnownErrorsProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

VERSIONS = ">=0.5.20,<0.5.21"
"""Supported SGLang versions; every release has other arguments and internals."""
CAPABILITIES = InferCapabilities(
    dtypes=("fp32", "bf16"),
    sleeps=True,
    lora=True,
    prompt_logprobs=True,
    routed_experts=True,
    in_flight_update=True,
    endpoint=True,
    tensor_parallel=True,
    device_weights=True,
    weight_transports=("cuda_ipc", "shm", "collective", "shared", "disk"),
)


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    """Infer strategy `sglang`."""
    yield InferProvider(
        name="sglang",
        target="roll_infer_sglang.strategy:SglangStrategy",
        config="roll_infer_sglang.config:SglangConfig",
        needs=(f"sglang{VERSIONS}",),
        summary="Generates with an SGLang server of the worker's own: radix cache, tensor parallelism, OpenAI endpoint",
        capabilities=CAPABILITIES,
        memory="roll_infer_sglang.memory:memory",
        platforms=("cpu", "cuda"),
    )


@hookimpl
def roll_known_errors() -> Iterator[KnownErrorsProvider]:
    """Known fatal errors of SGLang, with causes and remedies."""
    yield KnownErrorsProvider(
        name="sglang", target="roll_infer_sglang.known_errors:KNOWN_ERRORS", summary="Errors of SGLang"
    )
