"""What vLLM says of its steps, as a run sees it: without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from roll_infer_vllm.engine_metrics import VllmMetrics
from roll_modeling.engine_metrics import KINDS


def scheduler(running, waiting, usage, queries=0, hits=0, skipped=0):
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        kv_cache_usage=usage,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def iteration(prompt, generated, preempted=0):
    return SimpleNamespace(num_prompt_tokens=prompt, num_generation_tokens=generated, num_preempted_reqs=preempted)


def test_steps_are_summed_up_and_levels_averaged():
    metrics = VllmMetrics()
    metrics.add_step(scheduler(4, 3, 0.5, queries=20, hits=8, skipped=2), iteration(20, 4))
    metrics.add_step(scheduler(2, 0, 0.25), iteration(0, 2, preempted=1))
    metrics.add_step(None, iteration(0, 2))
    assert metrics.take() == pytest.approx(
        {
            "steps": 3,
            "prompt_tokens": 20,
            "generated_tokens": 8,
            "preemptions": 1,
            "prefix_cache_queries": 20,
            "prefix_cache_hits": 8,
            "running/mean": 3,
            "running/max": 4,
            "waiting/mean": 2.5,
            "waiting/max": 5,
            "kv_cache_usage/mean": 0.375,
            "kv_cache_usage/max": 0.5,
        }
    )


def test_levels_of_data_parallel_ranks_are_added():
    """Each rank's last level counts until its next step; the cache is that of both ranks together."""
    metrics = VllmMetrics()
    metrics.add_step(scheduler(4, 3, 0.5), iteration(20, 4), 0)
    metrics.add_step(scheduler(2, 1, 0.1), iteration(9, 2), 1)
    metrics.add_step(scheduler(0, 0, 0.0), iteration(0, 4), 0)
    found = metrics.take()
    assert (found["steps"], found["prompt_tokens"], found["generated_tokens"]) == (3, 29, 10)
    assert (found["running/max"], found["running/mean"]) == (6, 4)  # 4, 4 + 2, 0 + 2
    assert (found["waiting/max"], found["kv_cache_usage/max"]) == (4, 0.5)
    assert found["kv_cache_usage/mean"] == pytest.approx((0.5 + 0.3 + 0.05) / 3)


def test_nothing_is_told_twice():
    metrics = VllmMetrics()
    metrics.add_step(scheduler(4, 3, 0.5), iteration(20, 4))
    first = metrics.take()
    assert set(metrics.take()) == set(first)
    assert not any(metrics.take().values())


def test_kinds_are_those_of_levels():
    assert set(KINDS) < set(VllmMetrics().take())
    assert {name.rpartition("/")[2]: kind for name, kind in KINDS.items()} == {"mean": "mean", "max": "max"}
