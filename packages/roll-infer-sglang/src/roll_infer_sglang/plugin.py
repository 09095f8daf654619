"""Plugin hooks of the package: registers the infer strategy `sglang`. Imports neither torch nor SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.diagnostics import KnownError
from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferCapabilities, InferProvider, KnownErrorsProvider
from roll_infer_sglang.release import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1

CAPABILITIES = InferCapabilities(
    dtypes=("fp32", "bf16", "fp16"),
    images=True,
    videos=True,
    sleeps=True,
    lora=True,
    prompt_logprobs=True,
    prompt_topk=True,
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
        id="sglang_server",
        pattern=r"SGLang's server (exited with status|has exited)",
        cause="The server process failed; it logged the first cause above.",
        remedy="find the first error that the server logged. `Please try to increase --mem-fraction-static`: raise"
        " strategy_config.mem_fraction_static or tp_size; if roles share slots, give actor_infer its own slots. Out of"
        " memory during generation: lower mem_fraction_static, max_running_requests or chunked_prefill_size. A CUDA"
        " graph error: disable_cuda_graph: true",
    ),
)


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    """Infer strategy `sglang`."""
    yield InferProvider(
        name="sglang",
        target="roll_infer_sglang.strategy:SglangStrategy",
        config="roll_infer_sglang.config:SglangConfig",
        needs=(f"sglang{VERSIONS}",),
        summary="Generates with an SGLang server started by the worker: radix cache, tensor parallelism, OpenAI API",
        capabilities=CAPABILITIES,
        memory="roll_infer_sglang.memory:memory",
        platforms=("cpu", "cuda"),
    )


@hookimpl
def roll_known_errors() -> Iterator[KnownErrorsProvider]:
    """Known fatal errors of SGLang, with causes and remedies."""
    yield KnownErrorsProvider(name="sglang", target="roll_infer_sglang.plugin:KNOWN_ERRORS", summary="Errors of SGLang")
