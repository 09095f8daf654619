"""Runs of the pipelines, and a strategy for tests of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec

if TYPE_CHECKING:
    from roll_strategy_hf.train import HFTrainStrategy
    from shared_tests.runs import PipelineRuns


@pytest.fixture
def local_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineRuns:
    """Runs in this process."""
    from shared_tests.runs import REWARDS, PipelineRuns

    (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return PipelineRuns(tmp_path, "local")


@pytest.fixture
def build() -> Iterator[Callable[[str], HFTrainStrategy]]:
    """`build(task)`: a strategy with a model of 61 tokens; closed after the test."""
    # Imported here: the environment of a framework that formulas are compared with has neither.
    from roll_strategy_hf.config import HFTrainConfig
    from roll_strategy_hf.train import HFTrainStrategy
    from roll_testing.models import QWEN3

    built: list[HFTrainStrategy] = []

    def make(task: Any) -> HFTrainStrategy:
        strategy = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=1e-2, num_steps=100))
        model = ModelSpec(seed=3, task=task, random_init={**QWEN3, "vocab_size": 61})
        strategy.build(model, MeshInfo(role="student"))
        built.append(strategy)
        return strategy

    yield make
    for strategy in built:
        strategy.close()
