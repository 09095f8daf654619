"""vLLM's own counters, summed up between two looks."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class EngineMetrics:
    """Written by vLLM after each step, read by the run."""

    def __init__(self) -> None:
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {"running": 0.0, "waiting": 0.0, "kv_cache_usage": 0.0}

    def note(self, scheduler: Any, iteration: Any) -> None:
        """What one step was."""
        if scheduler is not None:
            self._gauges["running"] = float(scheduler.num_running_reqs)
            self._gauges["waiting"] = float(scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs)
            self._gauges["kv_cache_usage"] = float(scheduler.kv_cache_usage)
            self._counters["prefix_cache_queries"] += scheduler.prefix_cache_stats.queries
            self._counters["prefix_cache_hits"] += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self._counters["steps"] += 1
            self._counters["prompt_tokens"] += iteration.num_prompt_tokens
            self._counters["generated_tokens"] += iteration.num_generation_tokens
            self._counters["preemptions"] += iteration.num_preempted_reqs

    def take(self, *, idle: bool) -> Mapping[str, float]:
        """Counters since the last call, and how things are now: vLLM says nothing more when the last request is done,
        which is when the engine is `idle`."""
        if idle:
            self._gauges = dict.fromkeys(self._gauges, 0.0)
        counters, self._counters = self._counters, defaultdict(float)
        return {**counters, **self._gauges}


def stat_logger(metrics: EngineMetrics) -> Any:
    """What makes vLLM's loggers, for `AsyncLLM.from_engine_args(stat_loggers=...)`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):  # type: ignore[misc]  # vLLM is untyped to mypy
        """Hands each step on."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            """Called by vLLM."""
            metrics.note(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return Recorder
