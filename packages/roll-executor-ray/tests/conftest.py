import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
WORKERS = HERE.parents[2] / "tests" / "executors"
"""Folder of `executor_workers`, which the tests of all executors share."""
sys.path.extend([str(HERE), str(WORKERS)])  # for modules of tests that other modules import when they are collected


@pytest.fixture(autouse=True)
def _workers_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are named as `executor_workers:Class`, as a user's own module would be, and found on the import path."""
    monkeypatch.syspath_prepend(str(WORKERS))
