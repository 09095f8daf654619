"""Compiles the simulated devices before the tests, and removes the memory table of their simulated host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # processes with devices import modules of this folder by name

from sim_process import HOST

from roll_platform_sim.device import EXTENSION
from roll_platform_sim.settings import table


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> Iterator[None]:
    EXTENSION.library()
    yield
    table(HOST).unlink(missing_ok=True)
