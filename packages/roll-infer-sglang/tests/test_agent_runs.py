"""Agents that call SGLang through the recording endpoint, in a run."""

from __future__ import annotations

import pytest
from sglang_on_a_cpu import ON_A_CPU

from shared_tests.engine_runs import RecordedAgentRunTests


@pytest.mark.engine("sglang")
@pytest.mark.timeout(900)  # a server takes 30 s of CPU time to start
class TestRecordedAgentRun(RecordedAgentRunTests):
    engine = "sglang"
    settings = ON_A_CPU
