"""Memory that is given back is no longer the process's."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import psutil
import pytest
import torch

from roll_modeling.offload import release_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")


def test_released_pages_return_when_written():
    tensor = torch.ones(64 << 20, dtype=torch.uint8)
    process = psutil.Process()
    before = process.memory_info().rss
    released = release_pages(tensor)
    assert tensor.nbytes - 2 * 4096 <= released <= tensor.nbytes
    assert before - process.memory_info().rss > 48 << 20
    tensor.fill_(7)
    assert int(tensor.min()) == int(tensor.max()) == 7


def test_neighbours_of_a_tensor_keep_what_they_hold():
    whole = torch.arange(40_000, dtype=torch.int32).clone()
    memory = whole.numpy()
    part = torch.frombuffer(memory[5_000:30_000], dtype=torch.int32)
    assert release_pages(part) > 0
    assert memory[:5_000].tolist() == list(range(5_000))
    assert memory[30_000:].tolist() == list(range(30_000, 40_000))


@pytest.mark.parametrize("size", [0, 1, 100])
def test_memory_below_a_page_is_not_released(size):
    tensor = torch.full((size,), 3, dtype=torch.uint8)
    assert release_pages(tensor) == 0
    assert tensor.tolist() == [3] * size


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("environment", [{}, {"MALLOC_ARENA_MAX": "8"}])
def test_freed_memory_is_reused_without_faults_unless_configured(environment):
    program = """
import resource, torch
from roll_modeling.offload import keep_freed_memory

keep_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    tensors = [torch.ones(n << 18) for n in range(1, 24)]  # 1 to 23 MiB each
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    usual = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=usual | environment, check=True, capture_output=True, text=True
    )
    pages_once = sum(range(1, 24)) * (1 << 20) // mmap.PAGESIZE
    assert (int(done.stdout) > 1.7 * pages_once) == bool(environment)
