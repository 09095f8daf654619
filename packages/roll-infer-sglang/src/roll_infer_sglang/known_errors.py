"""Known fatal errors of SGLang's server, with their causes and remedies in a run's config."""

from __future__ import annotations

from roll_core.spec.diagnostics import KnownError

KNOWN_ERRORS = (
    KnownError(
        id="sglang_server",
        pattern=r"SGLang's server (ended with status|is dead)",
        cause="The server's own process failed; the first cause is among its messages, further up.",
        remedy="look for the first error that it printed. `Please try to increase --mem-fraction-static`: raise"
        " strategy_config.mem_fraction_static or tp_size, and where roles share slots give actor_infer slots of its"
        " own; out of memory while it answers: lower mem_fraction_static, max_running_requests or"
        " chunked_prefill_size; a CUDA graph that fails: disable_cuda_graph: true",
    ),
)
