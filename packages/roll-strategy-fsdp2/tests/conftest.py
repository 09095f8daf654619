"""Ranks for the tests: processes that have imported everything once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roll_testing.bench import Case
from roll_testing.ranks import free_port, shared_host

sys.path.append(str(Path(__file__).parent))  # the ranks import fsdp2_programs by name

from fsdp2_programs import ENVIRONMENT, PRELOAD


@pytest.fixture(scope="session")
def ranks():
    """`ranks(function, job, *arguments)`: what each rank returned."""
    host = shared_host(tuple(sorted(ENVIRONMENT.items())), PRELOAD)  # that of the conformance kit as well

    def run(function, job, *arguments):
        port = free_port() if job.world_size > 1 else 0
        ready = job.with_(master_port=port) if isinstance(job, Case) else job.with_(port=port)
        return host.run(function, ready, *arguments, num_ranks=job.world_size, timeout_s=100)

    return run
