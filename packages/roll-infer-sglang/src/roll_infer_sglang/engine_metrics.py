"""Engine metrics from SGLang's responses and its load endpoint."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from roll_infer_sglang.server import ServerError
from roll_modeling.engine_metrics import EngineMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roll_infer_sglang.server import SglangServer

POLL_S = 0.5
"""Seconds between two queries of the load."""
COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "completion_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_tokens",
    "preemptions": "num_retractions",
}
"""Counters in each response's `meta_info`: our name to SGLang's name."""
LOAD = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "kv_cache_usage": "token_usage"}
"""Gauges of the load endpoint: our name to SGLang's name."""


class SglangMetrics(EngineMetrics):
    """Counters of finished requests, and mean and maximum of the sampled load."""

    def __init__(self) -> None:
        super().__init__(COUNTERS)

    def add_response(self, meta: Mapping[str, Any]) -> None:
        """Add the counters of a request that finished or was interrupted; `meta` is its `meta_info`."""
        for ours, theirs in COUNTERS.items():
            self.count(ours, meta.get(theirs) or 0)
        self.count("prompt_tokens", -(meta.get("cached_tokens") or 0))  # cached tokens were not computed

    async def watch(self, server: SglangServer, busy: Callable[[], bool]) -> None:
        """Sample the load every `POLL_S` seconds while requests run (`busy`); returns when the server has stopped."""
        while True:
            await asyncio.sleep(POLL_S)
            if not busy():
                continue
            try:
                reply = await server.request("/v1/loads?include=core")
            except ServerError:  # the requests raise it too
                return
            self.sample({name: sum(load[theirs] for load in reply["loads"]) for name, theirs in LOAD.items()})
