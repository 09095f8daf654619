"""Engine metrics from vLLM's per-step statistics."""

from __future__ import annotations

from typing import Any

from roll_modeling.engine_metrics import EngineMetrics

COUNTERS = (
    "steps",
    "prompt_tokens",
    "generated_tokens",
    "preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
)


class VllmMetrics(EngineMetrics):
    """Metrics since the last `take`; vLLM's stat logger writes them after each step."""

    def __init__(self) -> None:
        super().__init__(COUNTERS)
        self._latest: dict[int, tuple[float, float, float]] = {}
        """Latest gauges of each data-parallel rank."""

    def add_step(self, scheduler: Any, iteration: Any, rank: int = 0) -> None:
        """Add the statistics of one step of a data-parallel rank; either of the first two may be None."""
        if scheduler is not None:
            waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._latest[rank] = scheduler.num_running_reqs, waiting, scheduler.kv_cache_usage
            running, waiting, usage = map(sum, zip(*self._latest.values(), strict=True))
            self.sample({"running": running, "waiting": waiting, "kv_cache_usage": usage / len(self._latest)})
            self.count("prefix_cache_queries", scheduler.prefix_cache_stats.queries)
            self.count("prefix_cache_hits", scheduler.prefix_cache_stats.hits)
        if iteration is not None:
            self.count("steps", 1)
            self.count("prompt_tokens", iteration.num_prompt_tokens)
            self.count("generated_tokens", iteration.num_generation_tokens)
            self.count("preemptions", iteration.num_preempted_reqs)


def stat_logger(metrics: VllmMetrics) -> Any:
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
            metrics.add_step(scheduler_stats, iteration_stats, engine_idx)

        def log_engine_initialized(self) -> None:
            """Log nothing: the run records the metrics."""

    return Recorder
