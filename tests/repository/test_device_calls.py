"""Calls whose result depends on a thread's current device, or that only some names of devices pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [file for file in ROOT.glob("packages/*/src/**/*.py") if "roll-platform-sim" not in file.parts]
READERS = ("safe_open", "load_file")
OF_A_DEVICE = ("synchronize", "current_stream", "Event", "Stream")


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call of the source, with the text of what is called."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def faults(source: str) -> list[str]:
    """Waits, streams and events of torch without a device, and readers of files with one."""
    found = []
    for function, call in calls(source):
        owner, _, name = function.rpartition(".")
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if owner.startswith("torch.") and name in OF_A_DEVICE and not values:
            found.append(ast.unparse(call))
        if name in READERS and any(keyword.arg == "device" for keyword in call.keywords):
            found.append(ast.unparse(call))
    return found


def test_waits_name_their_device_and_readers_none():
    """A thread's current device is 0 at first, and safetensors knows few names of devices."""
    found = {str(file.relative_to(ROOT)): faults(file.read_text(encoding="utf-8")) for file in SOURCES}
    assert len(SOURCES) > 300
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "is_fault"),
    [
        ("torch.accelerator.synchronize()", True),
        ("torch.cuda.current_stream()", True),
        ("safe_open(file, framework='pt', device='npu:0')", True),
        ("torch.accelerator.synchronize(tensor.device)", False),
        ("step.copied.synchronize()", False),
        ("safe_open(file, framework='pt')", False),
    ],
)
def test_faults_are_found(source, is_fault):
    assert bool(faults(source)) == is_fault
