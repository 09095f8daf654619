"""Runs of the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from roll_testing.runs import Runs


@pytest.fixture
def local_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Runs in this process."""
    # Imported here: the environment of a framework that formulas are compared with does not have it.
    from roll_testing.runs import REWARDS, Runs

    (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return Runs(tmp_path, "local")
