"""Compiles the simulated devices before the tests, and removes the memory table of their simulated host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from roll_platform_sim.device import EXTENSION
from roll_platform_sim.settings import table
from shared_tests.simulated import HOST


@pytest.fixture(autouse=True, scope="session")
def _compiled() -> Iterator[None]:
    EXTENSION.library()
    yield
    table(HOST).unlink(missing_ok=True)
