"""Conformance kit for pipelines.

    class TestMine(PipelineConformance):
        name = "mine"

        def run_config(self, runs):
            config = runs.rlvr()  # roles, data and a model of one layer
            ...
            return config

Each run trains a model of one layer for a few steps, in this process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from roll_core.config import load
from roll_core.plugins.targets import load_target
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.run_files import number
from roll_core.spec.providers import PipelineProvider
from roll_testing.packaging import PackagingTests
from roll_testing.runs import REWARDS, Runs

if TYPE_CHECKING:
    from pathlib import Path

NUM_STEPS = 4


class PipelineConformance(PackagingTests):
    """Tests that every pipeline must pass."""

    provider: PipelineProvider

    _kind = PipelineProvider

    def run_config(self, runs: Runs) -> dict[str, Any]:
        """Return a small config of the pipeline. The keys `pipeline`, `max_steps` and `save_steps` are set."""
        pytest.skip(f"{type(self).__name__} does not override run_config")

    @pytest.fixture
    def runs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
        """A folder with data of sorted digits, and configs of ROLL's pipelines to start from."""
        self._engine_or_skip()
        (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        return Runs(tmp_path, "local")

    # -- tests ---------------------------------------------------------------------------------------------------------

    def test_a_run_has_finite_metrics_for_every_step(self, runs: Runs) -> None:
        """A run must complete each step and log at least one metric of its own in each."""
        lines = [line for line in runs.metrics(runs.ok(self._config(runs))) if line["step"]]  # 0: before the first
        assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1)), "a step has no metrics"
        for line in lines:
            bad = [name for name, value in line.items() if not math.isfinite(number(value) or 0)]
            assert not bad, f"step {line['step']}: {', '.join(bad)} are not finite"

    def test_a_resumed_run_equals_an_uninterrupted_one(self, runs: Runs) -> None:
        """Metrics of the last steps must be those of a run that was not interrupted, bit for bit."""
        config = self._config(runs)
        uninterrupted = runs.ok(config | {"save_steps": NUM_STEPS // 2})
        first = CheckpointDirectory(uninterrupted.run_dir.checkpoints).list()[0]
        resumed = runs.ok(config | {"exp_name": "resumed", "resume_from_checkpoint": str(first.path)})
        expected = [line for line in runs.timeless(uninterrupted) if line["step"] > NUM_STEPS // 2]
        assert [line for line in runs.timeless(resumed) if line["step"] > NUM_STEPS // 2] == expected

    def test_the_plan_names_the_roles_of_the_run(self, runs: Runs) -> None:
        """The record's `plan` must accept the config, and its roles must be roles of the config."""
        self.need(bool(self.provider.plan), "plan")
        path = runs.folder / "plan.yaml"
        path.write_text(yaml.safe_dump(self._config(runs)), encoding="utf-8")
        config = load(path, [], runs.registry).config
        plan = load_target(self.provider.plan, owner=self.name)(config)
        assert plan.roles, "the plan has no roles"
        unknown = {role.name for role in plan.roles} - config.roles().keys()
        assert not unknown, f"the plan has roles that the config has not: {', '.join(sorted(unknown))}"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _config(self, runs: Runs) -> dict[str, Any]:
        config = self.run_config(runs)
        return config | {"pipeline": self.provider.name, "max_steps": NUM_STEPS, "save_steps": 0}
