"""Memory of simulated devices: how it is counted, limited, shared and reserved."""

import ctypes
import os
import signal

import pytest
import torch
from sim_process import MEMORY_BYTES, on_devices

MIB = 1024**2


def used(device: int) -> int:
    free, total = torch.accelerator.get_memory_info(device)
    assert total == MEMORY_BYTES
    return total - free


@on_devices()
def test_memory_is_counted_per_device():
    held = torch.empty(MIB, device="sim:1"), torch.empty(1, device="sim:1")
    assert torch.accelerator.memory_allocated(1) == 4 * MIB + 512  # blocks have multiples of 512 bytes, as on CUDA
    assert torch.accelerator.memory_allocated(0) == used(0) == 0
    del held
    assert torch.accelerator.memory_allocated(1) == 0
    assert torch.accelerator.max_memory_allocated(1) == 4 * MIB + 512


@on_devices()
def test_results_of_operators_are_counted():
    x = torch.ones(256, 256, device="sim:0")
    y = x @ x
    assert torch.accelerator.memory_allocated(0) == 2 * x.nbytes
    view, gradient = y[1:].T, torch.zeros_like(y)
    assert torch.accelerator.memory_allocated(0) == 3 * x.nbytes
    del view, y, gradient
    assert torch.accelerator.memory_allocated(0) == x.nbytes


@on_devices()
def test_freed_memory_stays_reserved_until_the_cache_is_emptied():
    x = torch.empty(8 * MIB, dtype=torch.uint8, device="sim:0")
    del x
    y = torch.empty(2 * MIB, dtype=torch.uint8, device="sim:0")  # of the reserved memory
    assert (torch.accelerator.memory_allocated(0), torch.accelerator.memory_reserved(0), used(0)) == (
        2 * MIB, 8 * MIB, 8 * MIB,
    )  # fmt: skip
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == used(0) == y.nbytes
    assert torch.accelerator.max_memory_reserved(0) == 8 * MIB
    torch.accelerator.reset_peak_memory_stats(0)
    assert torch.accelerator.max_memory_reserved(0) == torch.accelerator.max_memory_allocated(0) == y.nbytes


@on_devices()
def test_a_full_device_raises_and_stays_usable():
    half = torch.empty(MEMORY_BYTES // 2, dtype=torch.uint8, device="sim:0")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(MEMORY_BYTES // 2 + 1, dtype=torch.uint8, device="sim:0")
    assert used(0) == half.nbytes
    torch.empty(MEMORY_BYTES // 2, dtype=torch.uint8, device="sim:0")
    torch.empty(MEMORY_BYTES, dtype=torch.uint8, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError):  # of an operator's result
        half.to(torch.float32)


@on_devices()
def test_memory_of_other_processes_counts_until_they_exit():
    read, write = os.pipe()
    child = os.fork()
    if not child:
        held = torch.empty(400 * MIB, dtype=torch.uint8, device="sim:1")
        os.write(write, bytes(held[:1].cpu()))
        signal.pause()
    os.read(read, 1)
    assert used(1) == 400 * MIB
    assert torch.accelerator.memory_reserved(1) == 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200 * MIB, dtype=torch.uint8, device="sim:1")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert used(1) == 0


@on_devices()
def test_forked_children_refuse_used_devices():
    x = torch.ones(1, device="sim:0")
    child = os.fork()
    if not child:
        with pytest.raises(RuntimeError):
            torch.ones(1, device="sim:0")
        with pytest.raises(RuntimeError):
            x.cpu()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert x.cpu() == 1


@on_devices()
def test_forked_children_leave_the_memory_of_their_parent():
    assert used(0) == 0  # reads the table of processes, but uses no device
    child = os.fork()
    if not child:
        held = torch.empty(MIB, dtype=torch.uint8, device="sim:0")
        assert used(0) == held.nbytes
        del held
        torch.accelerator.empty_cache()
        ctypes.CDLL(None).exit(0)  # with the handlers of the parent
    assert os.waitpid(child, 0)[1] == 0
    held = torch.empty(2 * MIB, dtype=torch.uint8, device="sim:0")
    assert used(0) == held.nbytes


@on_devices()
def test_fresh_memory_holds_garbage():
    assert set(torch.empty(64, dtype=torch.uint8, device="sim").tolist()) == {0xCB}
    assert torch.zeros(64, device="sim").sum() == 0


@on_devices()
def test_storages_can_be_freed_and_filled_again():
    x = torch.arange(1024.0, device="sim:0")
    x.untyped_storage().resize_(0)
    assert torch.accelerator.memory_allocated(0) == 0
    x.untyped_storage().resize_(4096)
    x.copy_(torch.arange(1024.0))
    assert x.sum().item() == 1023 * 512
    assert torch.accelerator.memory_allocated(0) == 4096


@on_devices()
def test_results_that_grow_are_counted():
    out = torch.empty(0, device="sim:0")
    torch.add(torch.ones(1000, device="sim:0"), 1, out=out)
    assert out.tolist() == [2.0] * 1000
    del out
    assert torch.accelerator.memory_allocated(0) == 0


@on_devices()
def test_the_cache_of_pinned_memory_can_be_emptied():
    x = torch.ones(MIB, pin_memory=True)
    assert x.is_pinned()
    torch.accelerator.empty_host_cache()  # torch calls the backend's allocator without a check that there is one
    assert x.sum() == MIB
    del x
    torch.accelerator.empty_host_cache()
