"""Parts of `./run gpu` on simulated devices: they work there as on a GPU, and find what a device does wrong."""

import json
import os
import subprocess
import sys

import pytest

from shared_tests.simulated import REPOSITORY, npu_host, variables


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("platform", "parts"),
    [
        pytest.param("sim", ["decode", "resume", "sleep", "planner"], marks=pytest.mark.slow(ci=True)),
        pytest.param("npu", ["decode", "sleep"], marks=pytest.mark.slow),
    ],
)
def test_the_first_parts_pass_on_simulated_devices(platform, parts, tmp_path):
    """bf16 decoding, resume on two ranks, memory for a second process, and each phase's predicted peak memory."""
    host = npu_host(tmp_path) if platform == "npu" else {}
    # Devices of other tests would be counted, too.
    environment = variables(**host, ROLL_SIM_HOST=f"gpu-parts-{platform}-{os.getpid()}")
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)  # compiles the devices
    command = [sys.executable, REPOSITORY / "tools" / "gpu" / "suite.py", "--device", platform, "--rehearsal"]
    subprocess.run([*command, "--out", tmp_path, "--only", *parts], cwd=tmp_path, env=environment, check=False)
    found = json.loads((tmp_path / f"{platform}-rehearsal.json").read_text(encoding="utf-8"))["parts"]
    assert [(part["part"], part["status"]) for part in found] == [(name, "passed") for name in parts], found
