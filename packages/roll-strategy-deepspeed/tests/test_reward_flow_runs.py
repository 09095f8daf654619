"""Runs of `reward_flow` on two DeepSpeed ranks: the numbers of one rank of `hf_train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_testing.runs import Runs
from shared_tests.flow_runs import flow_config, flow_runs, validated

pytestmark = [pytest.mark.engine("deepspeed"), pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return flow_runs(tmp_path)


@pytest.mark.parametrize(("objective", "stage"), [("flow_grpo", 0), ("refl", 1), ("flow_grpo", 2), ("nft", 3)])
def test_ranks_equal_hf_train(runs, objective, stage):
    config = flow_config(runs, objective, max_steps=2, eval_steps=2, validation=validated(runs))
    expected = runs.learnt(runs.ok(config))
    # Nothing is small enough to stay whole on every rank.
    keys = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    given = runs.on_ranks(config, "deepspeed", 2, replicas=2, zero_optimization=keys)
    found = runs.learnt(runs.ok(given))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)
