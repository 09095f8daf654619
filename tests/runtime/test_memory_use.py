"""What a process has held at most, asked of one that holds known amounts."""

import json
import subprocess
import sys

import pytest
import torch

from roll_core.runtime.cluster.memory_use import MemoryWatch, forget_peak

ASK = """
import json, mmap, sys, tempfile
from roll_core.runtime.cluster.memory_use import MemoryWatch, forget_peak
MIB = 2**20
{before}
watch = MemoryWatch("cpu")
{between}
use = watch.use()
print(json.dumps([use.begun_bytes, use.peak_bytes, use.device_bytes]))
"""
FILE = """
file = tempfile.TemporaryFile()
file.write(b"x" * MIB * 64)
file.flush()
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(mapped[::4096])
"""


def grown(before="", between=""):
    """MiB that were taken at most."""
    script = ASK.format(before=before, between=between)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    begun, peak, device = json.loads(done.stdout)
    assert device is None
    return (peak - begun) / 2**20


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts are read from /proc")


def test_memory_that_was_given_back_counts():
    assert 64 <= grown(between="held = b'x' * MIB * 64; del held") < 80


def test_memory_used_before_does_not_count():
    assert grown(before="before = b'x' * MIB * 64") < 16


def test_a_peak_of_before_is_forgotten():
    assert grown(before="held = b'x' * MIB * 64; del held; forget_peak()") < 16


def test_shared_memory_counts_and_pages_of_files_do_not():
    assert 64 <= grown(between="held = mmap.mmap(-1, 64 * MIB); [held.write(b'x' * MIB) for _ in range(64)]") < 80
    # What is read from the file in between is a copy of 16 KiB, and the 64 MiB that are written to it are freed.
    assert grown(before=FILE.replace("sum(mapped[::4096])", "forget_peak()"), between="sum(mapped[::4096])") < 16


@pytest.mark.parametrize("used", [True, False])
def test_earlier_device_peak_is_reset_if_a_device_was_used(monkeypatch, used):
    peaks = [5, 7]

    class Devices:
        """Stands in for `torch.accelerator` and for torch's module of the devices' type."""

        def current_accelerator(self):
            return "acc"

        def is_initialized(self):
            return used

        def device_count(self):
            assert used, "torch would keep to the devices that are visible now"
            return len(peaks)

        def reset_peak_memory_stats(self, index):
            peaks[index] = 0

        def max_memory_reserved(self, device):
            return peaks[int(device.partition(":")[2])]

    monkeypatch.setattr(torch, "accelerator", Devices())
    monkeypatch.setattr(torch, "get_device_module", lambda kind: torch.accelerator)
    forget_peak()
    measured = [MemoryWatch(f"acc:{index}").use().device_bytes for index in range(2)]
    assert measured == ([0, 0] if used else [5, 7])
