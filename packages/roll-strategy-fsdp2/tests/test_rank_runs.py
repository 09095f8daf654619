"""Runs on two FSDP2 ranks: the numbers of one rank of `hf_train`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared_tests.runs import PipelineRuns, check_distillation, check_preference, check_stale_rollouts

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

RING: dict[str, Any] = {"replicas": 1, "ring_size": 2}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineRuns:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return PipelineRuns(tmp_path, "local")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("vocabulary", {}), ("vocabulary", RING), ("lora", {}), ("ema", {}), ("rollouts", {})]
)
def test_distillation(runs, name, settings):
    check_distillation(runs, name, "fsdp2", **settings)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("dpo", {}), ("kto", RING), ("reward_model", {})])
def test_preferences(runs, name, settings):
    check_preference(runs, name, "fsdp2", **settings)


@pytest.mark.engine
def test_stale_rollouts(runs):
    check_stale_rollouts(runs, "fsdp2")
