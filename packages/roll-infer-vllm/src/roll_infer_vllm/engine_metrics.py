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

    def add_step(self, scheduler: Any, iteration: Any) -> None:
        """Add the statistics of one step; either argument may be None."""
        if scheduler is not None:
            self.sample(
                {
                    "running": scheduler.num_running_reqs,
                    "waiting": scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs,
                    "kv_cache_usage": scheduler.kv_cache_usage,
                }
            )
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
            metrics.add_step(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            """Do nothing."""

    return Recorder
