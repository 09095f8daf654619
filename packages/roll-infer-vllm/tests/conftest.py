"""vLLM and what it imports warn of their own deprecations, and vLLM leaves a context to the garbage collector."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for `vllm_live`


def pytest_collection_modifyitems(items):
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::FutureWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore:[Uu]nclosed context:ResourceWarning"))


@pytest.fixture(scope="session", autouse=True)
def _garbage():
    """Collected while these tests' filters hold."""
    yield
    gc.collect()
