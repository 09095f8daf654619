"""The contract of executors."""

from __future__ import annotations

import pytest

from roll_testing import ExecutorConformance


@pytest.mark.ray
@pytest.mark.slow(ci=True)
class TestRay(ExecutorConformance):
    name = "ray"
