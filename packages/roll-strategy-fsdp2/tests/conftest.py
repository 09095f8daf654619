"""Ranks for the tests: processes that have imported everything once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roll_testing.bench import Case
from roll_testing.ranks import RankHost, free_port

sys.path.append(str(Path(__file__).parent))  # the ranks import fsdp2_programs by name

from fsdp2_programs import PRELOAD


@pytest.fixture(scope="session")
def ranks():
    """`ranks(function, job, *arguments)`: what each rank returned."""
    host = RankHost(
        preload=("fsdp2_programs", *PRELOAD),
        # One thread each; and freed memory goes back to the system at once, so that it can be measured.
        environment={"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )

    def run(function, job, *arguments):
        port = free_port() if job.world_size > 1 else 0
        ready = job.with_(master_port=port) if isinstance(job, Case) else job.with_(port=port)
        return host.run(function, ready, *arguments, num_ranks=job.world_size, timeout_s=100)

    yield run
    host.close()
