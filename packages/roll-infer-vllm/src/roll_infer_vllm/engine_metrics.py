"""Engine metrics accumulated from vLLM's per-step statistics."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.infer import MetricKind

COUNTED = (
    "steps",
    "prompt_tokens",
    "generated_tokens",
    "preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
)
LEVELS = ("running", "waiting", "kv_cache_usage")
"""Gauges sampled in each step; reported as mean and maximum."""
_JOINED: tuple[MetricKind, ...] = ("mean", "max")
KINDS: Mapping[str, MetricKind] = MappingProxyType({f"{name}/{kind}": kind for name in LEVELS for kind in _JOINED})


class EngineMetrics:
    """Metrics since the last `take`; vLLM's stat logger writes them after each step."""

    def __init__(self) -> None:
        self._clear()

    def note(self, scheduler: Any, iteration: Any) -> None:
        """Add the statistics of one step; either argument may be None."""
        if scheduler is not None:
            waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            now = {
                "running": scheduler.num_running_reqs,
                "waiting": waiting,
                "kv_cache_usage": scheduler.kv_cache_usage,
            }
            self._num_levels += 1
            for name, value in now.items():
                self._sums[name] += value
                self._most[name] = max(self._most[name], value)
            self._counted["prefix_cache_queries"] += scheduler.prefix_cache_stats.queries
            self._counted["prefix_cache_hits"] += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self._counted["steps"] += 1
            self._counted["prompt_tokens"] += iteration.num_prompt_tokens
            self._counted["generated_tokens"] += iteration.num_generation_tokens
            self._counted["preemptions"] += iteration.num_preempted_reqs

    def take(self) -> Mapping[str, float]:
        """Metrics by name since the last call, 0 if nothing happened; resets them."""
        found = dict(self._counted)
        for name in LEVELS:
            found[f"{name}/mean"] = self._sums[name] / max(self._num_levels, 1)
            found[f"{name}/max"] = self._most[name]
        self._clear()
        return found

    def _clear(self) -> None:
        self._counted = dict.fromkeys(COUNTED, 0.0)
        self._sums, self._most = dict.fromkeys(LEVELS, 0.0), dict.fromkeys(LEVELS, 0.0)
        self._num_levels = 0


def stat_logger(metrics: EngineMetrics) -> Any:
    """Stat logger class that records into `metrics`, for `AsyncLLM.from_engine_args(stat_loggers=...)`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped to mypy
        """Stat logger that forwards each step's statistics."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            """Forward the statistics of one step; called by vLLM."""
            metrics.note(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Do nothing."""

    return Recorder
