"""Processes in which the simulated devices of roll-platform-sim exist. The process of the tests never loads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parents[3]
PROGRAMS = REPOSITORY / "tests" / "simulated"
HOST = f"tests-{os.getpid()}"
"""Name of the simulated host: workers of xdist have devices of their own."""
TIMEOUT_S = 900.0
RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Bounds on the difference between a device's metrics and the CPU's, after two or three steps in fp32.

Both use the CPU's kernels in fp32, but other implementations are chosen: of attention, of normalisation, and of the
engine's decoding, which is compiled on a CPU. Found: 1e-5, and 1e-7 of logprobs, whose mean difference is a metric.
"""


def variables(**more: str) -> dict[str, str]:
    """Environment of a process with two simulated devices."""
    path = (more.pop("PYTHONPATH", ""), str(PROGRAMS), os.environ.get("PYTHONPATH", ""))
    return {
        **os.environ,
        "ROLL_SIM_DEVICES": "2",
        "ROLL_SIM_HOST": HOST,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(each for each in path if each),
        **more,
    }


def npu_host(folder: Path) -> dict[str, str]:
    """Variables of a process on a host with two NPUs: stand-ins of torch-npu and CANN, and device files in `folder`."""
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (folder / name).touch()
    return {
        "PYTHONPATH": str(PROGRAMS / "npu_host"),
        "NPU_HOST_DEV": str(folder),
        "NPU_HOST_DEVICES": "2",
        "ROLL_SIM_DEVICES": "0",
        "ASCEND_HOME_PATH": str(folder),
    }


def run(*words: str | Path, folder: Path, **more: str) -> str:
    """Run `python WORDS` in `folder` beside simulated devices and return its output. Fails if the process does."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=variables(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-8000:]}"
    return done.stdout


def program(name: str, *words: str, folder: Path, **more: str) -> dict[str, Any]:
    """Run a program of `tests/simulated`; return what it wrote to `results.json`."""
    run(PROGRAMS / f"{name}.py", *words, folder=folder, **more)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def check_metrics(found: Sequence[dict[str, float]], expected: Sequence[dict[str, float]]) -> None:
    """Fail unless both runs have the same metrics at the same steps, and trained."""
    assert max(line["step"] for line in found) >= 1
    for line, right in zip(found, expected, strict=True):
        assert line == pytest.approx(right, rel=RELATIVE, abs=ABSOLUTE)
