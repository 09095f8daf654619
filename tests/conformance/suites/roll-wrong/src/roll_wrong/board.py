"""A pretend accelerator: it counts the bytes of the tensors that were put on it and still live."""

from __future__ import annotations

import weakref

import torch

from roll_core.spec.platform import Platform, Probe

USED = {"bytes": 0}


def put(tensor):
    """A copy of the tensor on the board, where its memory is until nothing refers to it any more."""
    memory = tensor.detach().numpy().copy()
    USED["bytes"] += memory.nbytes
    weakref.finalize(memory, _free, memory.nbytes)
    return torch.from_numpy(memory)


def _free(number):
    USED["bytes"] -= number


class Board(Platform):
    """Two slots with memory of their own."""

    name = "wrong_board"
    device_type = "cpu"
    resource_name = "CPU"
    visible_devices = ""
    collective_backend = "gloo"

    def probe(self):
        return Probe(found=True, why="it pretends")

    def device_count(self):
        return 2

    def device(self, local_index):
        return "cpu"

    def supports(self, dtype):
        return "" if dtype == "fp32" else "fp32 only"

    def memory(self, local_index):
        return {"total": 1 << 30, "used": USED["bytes"]}
