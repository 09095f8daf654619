"""Agents that call vLLM through the recording endpoint, in a run."""

from __future__ import annotations

import pytest

from shared_tests.engine_runs import RecordedAgentRunTests


@pytest.mark.engine("vllm")
@pytest.mark.slow  # CI has that of SGLang
@pytest.mark.timeout(900)
class TestRecordedAgentRun(RecordedAgentRunTests):
    engine = "vllm"
    settings = {"kv_cache_memory_bytes": 64 << 20}  # noqa: RUF012
