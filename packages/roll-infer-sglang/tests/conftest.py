"""SGLang on a CPU: stand-ins for what it imports from packages that are only there for CUDA, in its processes alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # tests import modules of this folder by name


@pytest.fixture(autouse=True)
def _stand_ins():
    """Of processes that are started meanwhile."""
    from sglang_on_a_cpu import stood_in

    with stood_in():
        yield
