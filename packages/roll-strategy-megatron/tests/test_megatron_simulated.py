"""Megatron's path for accelerators on a simulated device: its numbers, and how often the host waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_platform_sim.device import EXTENSION
from shared_tests.simulated import run

PROGRAM = Path(__file__).with_name("megatron_on_sim.py")


@pytest.mark.engine("megatron")
def test_a_step_of_megatron_waits_twice_for_the_device(tmp_path: Path) -> None:
    """For losses and metrics, and for the gradient norm; three microbatches."""
    EXTENSION.library()
    run(PROGRAM, folder=tmp_path, PYTHONPATH=str(PROGRAM.parent))
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["norms"] == pytest.approx(found["expected"], rel=1e-4)
    assert found["waits"] == [2, 2]
