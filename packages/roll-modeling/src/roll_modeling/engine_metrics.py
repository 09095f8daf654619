"""Metrics of an engine: counters, and mean and maximum of sampled gauges."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from roll_core.spec.infer import MetricKind

GAUGES = ("running", "waiting", "kv_cache_usage")
"""Sampled gauges; reported as mean and maximum."""
_KINDS: tuple[MetricKind, ...] = ("mean", "max")
KINDS: Mapping[str, MetricKind] = MappingProxyType({f"{name}/{kind}": kind for name in GAUGES for kind in _KINDS})
"""`metric_kinds` of the gauges."""


class EngineMetrics:
    """Metrics since the last `take`."""

    def __init__(self, counters: Iterable[str]) -> None:
        """`counters` are the names of the counters."""
        self._names = tuple(counters)
        self._clear()

    def count(self, name: str, value: float) -> None:
        """Add to a counter."""
        self._counts[name] += value

    def sample(self, gauges: Mapping[str, float]) -> None:
        """Add one sample of all gauges."""
        self._num_samples += 1
        for name, value in gauges.items():
            self._sums[name] += value
            self._maxima[name] = max(self._maxima[name], value)

    def take(self) -> Mapping[str, float]:
        """Metrics by name since the last call, 0 if nothing happened; resets them."""
        metrics = dict(self._counts)
        for name in GAUGES:
            metrics[f"{name}/mean"] = self._sums[name] / max(self._num_samples, 1)
            metrics[f"{name}/max"] = self._maxima[name]
        self._clear()
        return metrics

    def _clear(self) -> None:
        self._counts = dict.fromkeys(self._names, 0.0)
        self._sums, self._maxima = dict.fromkeys(GAUGES, 0.0), dict.fromkeys(GAUGES, 0.0)
        self._num_samples = 0
