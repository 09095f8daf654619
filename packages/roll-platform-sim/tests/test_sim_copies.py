"""Copies between host and device: which are late, which wait, and how traces count them."""

import subprocess
import sys

import pytest
import torch
from sim_process import ENVIRONMENT, on_devices

from roll_platform_sim import settings

GARBAGE = 0xCB


@on_devices()
def test_late_copies_to_the_host_hold_garbage_until_the_wait():
    device = torch.arange(8, dtype=torch.uint8, device="sim:1")
    host = torch.zeros(8, dtype=torch.uint8, pin_memory=True)
    host.copy_(device, non_blocking=True)
    device.zero_()  # runs after the copy
    assert host.tolist() == [GARBAGE] * 8
    torch.accelerator.synchronize("sim:0")  # the wrong device
    assert host.tolist() == [GARBAGE] * 8
    torch.accelerator.synchronize("sim:1")
    assert host.tolist() == list(range(8))


@pytest.mark.parametrize("wait", ["event", "stream", "item", "copy"])
@on_devices()
def test_every_wait_finishes_late_copies(wait):
    host = torch.zeros(2, dtype=torch.uint8, pin_memory=True)
    host.copy_(torch.ones(2, dtype=torch.uint8, device="sim"), non_blocking=True)
    waits = {
        "event": lambda: torch.sim.current_stream().record_event().synchronize(),
        "stream": lambda: torch.sim.current_stream().synchronize(),
        "item": lambda: torch.ones(1, device="sim").item(),
        "copy": lambda: torch.ones(1, device="sim").cpu(),
    }
    waits[wait]()
    assert host.tolist() == [1, 1]


@on_devices()
def test_late_copies_to_the_device_read_the_host_when_they_run():
    host = torch.ones(4).pin_memory()
    assert host.is_pinned()
    first, second = torch.empty(4, device="sim"), torch.empty(4, device="sim")
    first.copy_(host, non_blocking=True)
    assert (first + 1).tolist() == [2.0] * 4  # an operator sees the copy
    second.copy_(host, non_blocking=True)
    host.zero_()  # too early
    assert second.tolist() == [0.0] * 4


@on_devices()
def test_late_copies_to_the_host_and_back_are_in_order():
    host = torch.empty(4, pin_memory=True)
    host.copy_(torch.arange(4.0, device="sim"), non_blocking=True)
    doubled = 2 * host.to("sim", non_blocking=True)  # without a wait
    assert doubled.tolist() == [0.0, 2.0, 4.0, 6.0]


@on_devices()
def test_late_copies_do_not_keep_their_destination():
    host = torch.ones(1024).pin_memory()
    host.to("sim", non_blocking=True)
    assert torch.accelerator.memory_allocated() == 0
    torch.accelerator.synchronize()


@on_devices()
def test_copies_of_pageable_memory_are_not_late():
    host = torch.zeros(4)
    device = torch.empty(4, device="sim")
    device.copy_(host, non_blocking=True)
    host.fill_(1)
    assert device.tolist() == [0.0] * 4
    host.copy_(device, non_blocking=True)
    assert host.tolist() == [0.0] * 4


@on_devices()
def test_traces_count_copies_and_waits_by_line():
    from roll_platform_sim.trace import Trace

    x = torch.arange(4.0, device="sim:0").requires_grad_()
    mask = x > -1
    with Trace() as other, Trace(packages=("test_sim",)) as trace:
        pinned = torch.ones(4).pin_memory()
        y = pinned.to("sim:0", non_blocking=True)
        y.to("sim:1")
        (x * y).sum().backward()
        if (x.detach() > 1).any():
            x.detach()[mask].nonzero().cpu()
    x.detach().sum().item()
    assert [trace.num(kind) for kind in ("h2d", "d2d", "d2h", "wait")] == [1, 1, 1, 3]
    assert trace.num("op") > 5
    assert trace.events.total() == other.events.total()
    (late,) = [event for event in trace.events if event.kind == "h2d"]
    assert (late.what, trace.num_bytes[late]) == ("copy", 16)
    assert all("test_sim_copies.py:" in event.line for event in trace.events if event.kind != "op")


def test_a_variable_traces_whole_processes(tmp_path):
    program = "import torch; torch.ones(3, device='sim').cpu()"
    environment = {**ENVIRONMENT, settings.TRACE: str(tmp_path / "trace"), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
    (file,) = tmp_path.iterdir()
    lines = [line.split("\t") for line in file.read_text().splitlines()]
    assert ["1", "12", "d2h", "copy of pageable memory, blocking", "<string>:1"] in lines
