"""Plugin hooks of the package: registers the infer strategy `hf_infer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferCapabilities, InferProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1
CAPABILITIES = InferCapabilities(
    dtypes=("fp32", "bf16", "fp16"),
    sleeps=True,
    lora=True,
    prompt_logprobs=True,
    prompt_topk=True,
    images=True,
    videos=True,
    routed_experts=True,
    free_seeds=True,
    in_flight_update=True,
    activations=True,
    device_weights=True,
    weight_transports=("shared", "cuda_ipc", "shm", "collective", "disk"),
    keeps_weights=True,
)


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    """Infer strategy `hf_infer`, the embedded engine."""
    yield InferProvider(
        name="hf_infer",
        target="roll_infer_hf.engine:HFInferStrategy",
        config="roll_infer_hf.config:HFInferConfig",
        summary="Embedded engine for Hugging Face models: continuous batching with a KV cache",
        capabilities=CAPABILITIES,
        memory="roll_infer_hf.memory:engine",
    )
