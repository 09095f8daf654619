"""Runs of the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shared_tests.runs import PipelineRuns


@pytest.fixture
def local_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipelineRuns:
    """Runs in this process."""
    # Imported here: the environment of a framework that formulas are compared with does not have it.
    from shared_tests.runs import REWARDS, PipelineRuns

    (tmp_path / "rollrewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return PipelineRuns(tmp_path, "local")
