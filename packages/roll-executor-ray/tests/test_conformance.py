"""The contract of executors."""

from __future__ import annotations

import pytest

from roll_testing import ExecutorConformance


@pytest.mark.ray
class TestRay(ExecutorConformance):
    name = "ray"
