"""Runs that train adapters and send them alone, or repeat the engine's experts: `roll-core run` on a tiny model, roles
taking turns on one slot."""

from __future__ import annotations

import pytest
from interpreted_runner import second_runner_variables

from shared_tests.engine_runs import AdapterRunTests, RouterReplayRunTests


@pytest.mark.engine("vllm")
@pytest.mark.slow  # CI has such runs with the embedded engine, and adapters on this one
@pytest.mark.timeout(900)
class TestAdapterRun(AdapterRunTests):
    engine = "vllm"
    settings = {"kv_cache_memory_bytes": 32 << 20}  # noqa: RUF012


@pytest.mark.engine("vllm")
@pytest.mark.slow  # two engines of interpreted kernels; CI has the experts that one returns, in the conformance kit
@pytest.mark.timeout(1800)
class TestRouterReplayRun(RouterReplayRunTests):
    engine = "vllm"
    settings = {"kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 64, "block_size": 32}  # noqa: RUF012
    variables = second_runner_variables()
