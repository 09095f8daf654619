"""A run that trains adapters and sends them alone: `roll-core run` on a tiny model, roles taking turns on one slot."""

from __future__ import annotations

import pytest
from sglang_on_a_cpu import ON_A_CPU

from shared_tests.engine_runs import AdapterRunTests


@pytest.mark.engine("sglang")
@pytest.mark.slow  # CI has that of vLLM
@pytest.mark.timeout(900)
class TestAdapterRun(AdapterRunTests):
    engine = "sglang"
    settings = ON_A_CPU
