"""What the engine did between two looks."""

from __future__ import annotations

import asyncio

from roll_infer_sglang.engine_metrics import POLL_S, SglangMetrics
from roll_modeling.engine_metrics import KINDS


def test_answers_are_counted_between_two_looks():
    metrics = SglangMetrics()
    metrics.add_response({"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 4, "num_retractions": 1})
    metrics.add_response({"prompt_tokens": 2, "completion_tokens": 1, "num_retractions": None})  # one that never ran
    found = metrics.take()
    assert (found["prompt_tokens"], found["generated_tokens"], found["preemptions"]) == (7 - 4, 4, 1)
    assert (found["prefix_cache_queries"], found["prefix_cache_hits"]) == (7, 4)
    assert set(metrics.take().values()) == {0.0}


def test_levels_are_averaged_over_looks_and_the_largest_is_kept():
    metrics = SglangMetrics()
    metrics.sample({"running": 4, "waiting": 0, "kv_cache_usage": 0.25})
    metrics.sample({"running": 2, "waiting": 6, "kv_cache_usage": 0.75})
    found = metrics.take()
    assert (found["running/mean"], found["running/max"], found["waiting/max"]) == (3, 4, 6)
    assert (found["kv_cache_usage/mean"], found["kv_cache_usage/max"]) == (0.5, 0.75)


def test_every_level_says_how_it_is_joined():
    levels = {name for name in SglangMetrics().take() if "/" in name}
    assert set(KINDS) == levels
    assert all(name.endswith(kind) for name, kind in KINDS.items())


def test_load_is_looked_at_only_while_something_runs():
    class Asked:
        count = 0

        async def request(self, path):
            self.count += 1
            return {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 2, "token_usage": 0.5}]}

    async def watch(busy):
        metrics, server = SglangMetrics(), Asked()
        task = asyncio.create_task(metrics.watch(server, lambda: busy))
        await asyncio.sleep(1.5 * POLL_S)
        task.cancel()
        return server.count, metrics.take()["waiting/max"]

    assert asyncio.run(watch(False)) == (0, 0)
    assert asyncio.run(watch(True)) == (1, 2)
