"""Runs of the pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_testing.runs import REWARDS, Runs


@pytest.fixture
def local_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs in this process."""
    (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path, "local")
