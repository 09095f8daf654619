"""Engine metrics accumulated from SGLang's responses and its load endpoint."""

from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from roll_infer_sglang.server import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roll_core.spec.infer import MetricKind
    from roll_infer_sglang.server import Server

LOOK_S = 0.5
"""Seconds between two queries of the load."""
COUNTED = {
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "completion_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_tokens",
    "preemptions": "num_retractions",
}
"""Counters in each response's `meta_info`: our name to SGLang's name."""
LEVELS = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "kv_cache_usage": "token_usage"}
"""Gauges of the load endpoint: our name to SGLang's name."""
_JOINED: tuple[MetricKind, ...] = ("mean", "max")
KINDS: Mapping[str, MetricKind] = MappingProxyType({f"{name}/{kind}": kind for name in LEVELS for kind in _JOINED})


class EngineMetrics:
    """Counters of finished requests, and mean and maximum of the sampled load."""

    def __init__(self) -> None:
        self._clear()

    def note(self, meta: Mapping[str, Any]) -> None:
        """Add the counters of a request that finished or was interrupted; `meta` is its `meta_info`."""
        for ours, theirs in COUNTED.items():
            self._counted[ours] += meta.get(theirs) or 0
        self._counted["prompt_tokens"] -= meta.get("cached_tokens") or 0  # cached tokens were not computed

    async def watch(self, server: Server, busy: Callable[[], bool]) -> None:
        """Sample the load every `LOOK_S` seconds while requests run (`busy`); returns when the server is gone."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not busy():
                continue
            try:
                found = await server.ask("/v1/loads?include=core")
            except ServerError:  # the requests raise it too
                return
            self.look({name: sum(each[theirs] for each in found["loads"]) for name, theirs in LEVELS.items()})

    def look(self, levels: Mapping[str, float]) -> None:
        """Add one sample of the load, by our names."""
        self._num_looks += 1
        for name, value in levels.items():
            self._sums[name] += value
            self._most[name] = max(self._most[name], value)

    def take(self) -> Mapping[str, float]:
        """Metrics by name since the last call, 0 if nothing happened; resets them."""
        found = dict(self._counted)
        for name in LEVELS:
            found[f"{name}/mean"] = self._sums[name] / max(self._num_looks, 1)
            found[f"{name}/max"] = self._most[name]
        self._clear()
        return found

    def _clear(self) -> None:
        self._counted = dict.fromkeys(COUNTED, 0.0)
        self._sums, self._most = dict.fromkeys(LEVELS, 0.0), dict.fromkeys(LEVELS, 0.0)
        self._num_looks = 0
