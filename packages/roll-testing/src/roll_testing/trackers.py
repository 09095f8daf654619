"""Conformance kit for metrics trackers.

class TestMine(TrackerConformance):
    name = "mine"

    def read(self, run_dir):
        return [(line["step"], line["metrics"]) for line in ...]
"""

from __future__ import annotations

import copy
import json
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from roll_core.plugins.targets import load_class, schema_of
from roll_core.spec.config import Config
from roll_core.spec.pipeline import Tracker
from roll_core.spec.providers import TrackerProvider
from roll_testing.packaging import PackagingTests

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

STEPS: Sequence[tuple[int, Mapping[str, float]]] = (
    (1, {"train/loss": 1.5, "val/score/mean": 0.25}),
    (2, {"train/loss": 0.5}),
    (4, {"train/loss": -2.0, "rewards/a-b.c/max": 1e30}),
)
"""Names come and go, and steps may be left out."""
CONFIG = {"seed": 1, "roles": {"actor_train": {"learning_rate": 1e-6, "device_mapping": [0, 1]}}, "tokenizer": None}


class TrackerConformance(PackagingTests):
    """Tests that every tracker must pass. They use no network: set `settings` that keep everything on this host."""

    provider: TrackerProvider
    settings: ClassVar[Mapping[str, Any]] = {}
    """`tracker_kwargs.<name>`."""

    _kind = TrackerProvider

    def read(self, run_dir: Path) -> Sequence[tuple[int, Mapping[str, float]]] | None:
        """Return the recorded steps and their metrics, in order. Default: None, which skips the tests that compare."""
        return None

    # -- tests ---------------------------------------------------------------------------------------------------------

    def test_what_was_logged_is_recorded(self, tmp_path: Path) -> None:
        """After `close`, every metric of every step must be readable."""
        tracker = self._open(tmp_path)
        tracker.log_config(copy.deepcopy(CONFIG))
        for step, metrics in STEPS:
            tracker.log(step, metrics)
        tracker.close()
        self._check(tmp_path, STEPS)

    def test_a_resumed_run_keeps_what_was_recorded(self, tmp_path: Path) -> None:
        """A second tracker of the same run must add to what the first one recorded."""
        for part in (STEPS[:2], STEPS[2:]):
            tracker = self._open(tmp_path)
            for step, metrics in part:
                tracker.log(step, metrics)
            tracker.close()
        self._check(tmp_path, STEPS)

    def test_metrics_that_are_not_finite_are_accepted(self, tmp_path: Path) -> None:
        """NaN and infinite metrics must not raise: an exception of a tracker ends the run."""
        tracker = self._open(tmp_path)
        tracker.log(1, {"loss": float("nan"), "kl": float("inf"), "low": float("-inf")})
        tracker.close()

    def test_metrics_and_config_stay_as_they_are(self, tmp_path: Path) -> None:
        """The driver passes the same mappings to several trackers."""
        config, metrics = copy.deepcopy(CONFIG), dict(STEPS[0][1])
        tracker = self._open(tmp_path)
        tracker.log_config(config)
        tracker.log(1, metrics)
        tracker.close()
        assert (config, metrics) == (CONFIG, STEPS[0][1]), "the tracker changed its arguments"

    def test_a_run_without_a_step_can_be_closed(self, tmp_path: Path) -> None:
        """A run may fail before its first step."""
        self._open(tmp_path).close()

    def test_nothing_runs_after_close(self, tmp_path: Path) -> None:
        """`close` must end the tracker's threads."""
        before = set(threading.enumerate())
        tracker = self._open(tmp_path)
        tracker.log(*STEPS[0])
        tracker.close()
        left = [thread.name for thread in threading.enumerate() if thread not in before]
        assert not left, f"threads run after close: {', '.join(left)}"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _open(self, run_dir: Path) -> Tracker:
        self._engine_or_skip()
        schema_of(self.provider, Config, owner=self.name).model_validate(dict(self.settings))
        cls = load_class(self.provider.target, Tracker, owner=self.name)  # type: ignore[type-abstract]
        return cls(run_dir, "conformance", dict(self.settings))

    def _check(self, run_dir: Path, expected: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        recorded = self.read(run_dir)
        if recorded is None:
            pytest.skip(f"{type(self).__name__} does not override read")
        rounded = [(step, {name: _rounded(value) for name, value in metrics.items()}) for step, metrics in recorded]
        expected_rounded = [
            (step, {name: _rounded(value) for name, value in metrics.items()}) for step, metrics in expected
        ]
        assert rounded == expected_rounded, f"recorded {json.dumps(recorded)}, expected {json.dumps(expected)}"


def _rounded(value: float) -> float:
    """Six significant digits: trackers may store float32."""
    return float(f"{value:.6g}")
