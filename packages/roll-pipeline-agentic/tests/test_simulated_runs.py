"""`benchmarks/agentic_sim` at a small size: the step and its bound, in virtual time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def sim() -> Iterator[Any]:
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        import agentic_sim

        yield agentic_sim
    for name in {"agentic_sim", "common", "environments"} - known:  # names that other folders have as well
        del sys.modules[name]


def simulated(
    sim: Any, tokenizer: Any, ratio: float, steps: int, environments: int = 16, **load: float
) -> dict[str, float]:
    found: dict[str, float] = sim.virtually(
        lambda: sim.simulate(sim.Workload(**load), environments, ratio, steps, tokenizer, text=False)
    )
    return found


EQUAL = {"turns_sigma": 0.0, "call_sigma": 0.0, "reply_sigma": 0.0, "slow_share": 0.0, "failing_share": 0.0}
"""A reset and 10 turns, each a call of 4 s and a reply of 100 tokens in 0.02 s each: 11 * 4 + 10 * 2 = 64 s."""


def test_synchronous_step_lasts_an_episode_and_the_training(sim: Any, tokenizer: Any) -> None:
    found = simulated(sim, tokenizer, 0.0, 2, **EQUAL)
    assert found["bound_s"] == pytest.approx(64)
    assert found["longest_s"] == pytest.approx(64)
    assert found["step_s"] == pytest.approx(64 + 30 + 4)  # the training step and the weights
    assert found["model_s"] == pytest.approx(64 + 30 + 4)


def test_asynchronous_step_lasts_an_episode_and_a_stall(sim: Any, tokenizer: Any) -> None:
    """Environments always have an episode; weights stall at most one reply of each by 4 s."""
    found = simulated(sim, tokenizer, 2.0, 6, **EQUAL)
    assert found["bound_s"] == pytest.approx(64)
    assert 64 <= found["step_s"] <= 64 + 4


def test_heavy_tails_keep_an_asynchronous_run_near_its_bound(sim: Any, tokenizer: Any) -> None:
    """Latencies of the benchmark, with slow and with five times as many failing environments."""
    sync = simulated(sim, tokenizer, 0.0, 2, 24, failing_share=0.05)
    found = simulated(sim, tokenizer, 8.0, 5, 24, failing_share=0.05)
    assert found["failed_attempts"]
    assert found["staleness"] <= 8
    assert 0.95 <= found["of_bound"] <= 1
    assert sync["step_s"] / found["step_s"] >= 2.7
