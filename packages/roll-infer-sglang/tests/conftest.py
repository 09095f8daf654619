"""SGLang on a CPU: stand-ins for what it imports from packages that are only there for CUDA, in its processes alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

sys.path.append(str(HERE))  # tests import modules of this folder by name


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    """Of processes that are started meanwhile: there they come before all else."""
    path = filter(None, [str(HERE / "cpu"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
