import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))  # for modules of tests that other modules import when they are collected


@pytest.fixture(autouse=True)
def _workers_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are named as `executor_workers:Class`, as a user's own module would be, and found on the import path."""
    monkeypatch.syspath_prepend(str(HERE))
