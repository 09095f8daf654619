"""Differences between the supported vLLM versions (`plugin.VERSIONS`): 0.31 to 0.33.

All code and data that depend on the version are here, except `PASSED_ON` in `arguments`, which lists the arguments of
all versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SINCE: Mapping[str, str] = {
    "custom_histogram_buckets": "0.32",
    "enable_hc_sp": "0.32",
    "enable_shm_tensor_arena": "0.32",
    "sleep_mode_offload_cudagraph": "0.32",
    "monokernel": "0.33",
    "sleep_mode_backend": "0.33",
    "watchdog_config": "0.33",
}
"""Engine arguments that the oldest supported version lacks, each with the first version that has it."""


def has_data_parallel() -> bool:
    """True if vLLM returns results of all data-parallel ranks, and gives them different random numbers (0.32)."""
    from vllm.v1.engine.core_client import AsyncMPClient

    return hasattr(AsyncMPClient, "call_utility_all_async")


def server_arguments() -> Any:
    """Arguments of `vllm serve` with their default values."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # 0.33
    except ModuleNotFoundError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    return make_arg_parser(FlexibleArgumentParser()).parse_args([])


def weight_spans(output: Any) -> Iterable[Any]:
    """Weight versions that vLLM reports at the end of an output, as spans of its tokens; empty in 0.31."""
    return getattr(output, "weight_versions", None) or ()
