"""Runs that train adapters and send them alone, or repeat the engine's experts: `roll-core run` on a tiny model, roles
taking turns on one slot."""

from __future__ import annotations

import pytest
from sglang_on_a_cpu import ON_A_CPU

from shared_tests.engine_runs import AdapterRunTests, RouterReplayRunTests


@pytest.mark.engine("sglang")
@pytest.mark.slow  # CI has such runs with the embedded engine, and adapters on this one
@pytest.mark.timeout(900)
class TestAdapterRun(AdapterRunTests):
    engine = "sglang"
    settings = ON_A_CPU


@pytest.mark.engine("sglang")
@pytest.mark.slow  # two servers; CI has the experts that one returns, in the conformance kit
@pytest.mark.timeout(1800)
class TestRouterReplayRun(RouterReplayRunTests):
    engine = "sglang"
    settings = ON_A_CPU
