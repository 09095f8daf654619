"""Runs on two DeepSpeed ranks: the numbers of one rank of `hf_train`. CI compares steps in `test_strategy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared_tests.flow_runs import flow_config, flow_runs, validated
from shared_tests.runs import (
    PipelineRuns,
    check_distillation,
    check_preference,
    check_stale_rollouts,
    check_two_ranks,
)

pytestmark = [pytest.mark.engine("deepspeed"), pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs(tmp_path: Path) -> PipelineRuns:
    return PipelineRuns(tmp_path, "local")


def zero(stage: int) -> dict[str, Any]:
    """Settings of a stage that shards every parameter, however small."""
    return {"zero_optimization": {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}


@pytest.mark.parametrize(
    ("name", "stage"), [("vocabulary", 3), ("vocabulary", 2), ("lora", 3), ("ema", 3), ("rollouts", 2)]
)
def test_distillation(runs, name, stage):
    check_distillation(runs, name, "deepspeed", **zero(stage))


@pytest.mark.parametrize(("name", "stage"), [("dpo", 3), ("reward_model", 2)])
def test_preferences(runs, name, stage):
    check_preference(runs, name, "deepspeed", zero_optimization={"stage": stage})


@pytest.mark.parametrize(("objective", "stage"), [("flow_grpo", 0), ("refl", 1), ("flow_grpo", 2), ("nft", 3)])
def test_reward_flow(tmp_path, objective, stage):
    runs = flow_runs(tmp_path)
    config = flow_config(runs, objective, max_steps=2, eval_steps=2, validation=validated(runs))
    check_two_ranks(runs, config, "deepspeed", rel=1e-5, **zero(stage))


def test_stale_rollouts(runs):
    check_stale_rollouts(runs, "deepspeed", **zero(2))
