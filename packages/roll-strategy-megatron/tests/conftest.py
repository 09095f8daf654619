"""Ranks import what stands beside the tests by name. Modules that import Megatron wait for `./run test-engines`."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from roll_testing.ranks import shared_host

sys.path.append(str(Path(__file__).parent))

IMPORT_MEGATRON = [
    "test_architectures.py",
    "test_arrangements.py",
    "test_attention.py",
    "test_balancing.py",
    "test_bridge.py",
    "test_convert.py",
    "test_engine.py",
    "test_export.py",
    "test_head.py",
    "test_lora.py",
    "test_optimizer.py",
    "test_router_replay.py",
    "test_runs.py",
    "test_state.py",
    "test_versions.py",
]
collect_ignore = [] if find_spec("megatron") or os.environ.get("ROLL_CONFORMANCE") == "full" else IMPORT_MEGATRON

if not collect_ignore:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and Megatron use what they have deprecated
        import megatron.core  # noqa: F401


@pytest.fixture(scope="session")
def host():
    """Ranks that have imported Megatron: the same for all tests, those of the conformance kit included."""
    from megatron_programs import PRELOAD

    return shared_host(preload=PRELOAD)
