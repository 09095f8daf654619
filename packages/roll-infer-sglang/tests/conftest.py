"""SGLang on a CPU: stand-ins for what it imports from packages that are only there for CUDA, in its processes alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # tests import modules of this folder by name
SLOW = ("test_adapters_over_a_lower_precision_stay_in_bounds",)
"""Tests of the conformance kit that need an engine of their own. The embedded engine's show it in each run of tests;
here others show that adapters are applied, and that bf16 stays in bounds."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.startswith(SLOW) and str(item.path).startswith(f"{HERE}/"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _stand_ins():
    """Of processes that are started meanwhile."""
    from sglang_on_a_cpu import stood_in

    with stood_in():
        yield
