"""What SGLang says of its requests and its load, summed up between two looks."""

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
"""Between two looks at the load."""
COUNTED = {
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "completion_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_tokens",
    "preemptions": "num_retractions",
}
"""Our names, and SGLang's, of what each answer counts."""
LEVELS = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "kv_cache_usage": "token_usage"}
"""Of how things stood when they were looked at."""
_JOINED: tuple[MetricKind, ...] = ("mean", "max")
KINDS: Mapping[str, MetricKind] = MappingProxyType({f"{name}/{kind}": kind for name in LEVELS for kind in _JOINED})


class EngineMetrics:
    """Counters of answered requests, and the load as it was seen now and then."""

    def __init__(self) -> None:
        self._clear()

    def note(self, meta: Mapping[str, Any]) -> None:
        """What SGLang says of a request that is done, or was interrupted."""
        for ours, theirs in COUNTED.items():
            self._counted[ours] += meta.get(theirs) or 0
        self._counted["prompt_tokens"] -= meta.get("cached_tokens") or 0  # those were not computed

    async def watch(self, server: Server, busy: Callable[[], bool]) -> None:
        """Look at the load while requests run, until the server is gone."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not busy():
                continue
            try:
                found = await server.ask("/v1/loads?include=core")
            except ServerError:  # the requests themselves say it
                return
            self.look({name: sum(each[theirs] for each in found["loads"]) for name, theirs in LEVELS.items()})

    def look(self, levels: Mapping[str, float]) -> None:
        """How things stand."""
        self._num_looks += 1
        for name, value in levels.items():
            self._sums[name] += value
            self._most[name] = max(self._most[name], value)

    def take(self) -> Mapping[str, float]:
        """What happened since the last call; zeros where nothing did."""
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
