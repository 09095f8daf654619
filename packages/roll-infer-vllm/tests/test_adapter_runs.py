"""A run that trains adapters and sends them alone: `roll-core run` on a tiny model, roles taking turns on one slot."""

from __future__ import annotations

import pytest

from shared_tests.engine_runs import AdapterRunTests


@pytest.mark.engine("vllm")
@pytest.mark.timeout(900)
class TestAdapterRun(AdapterRunTests):
    engine = "vllm"
    settings = {"kv_cache_memory_bytes": 32 << 20}  # noqa: RUF012
