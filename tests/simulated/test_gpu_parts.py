"""Parts of `./run gpu` on simulated devices: they work there as on a GPU, and find what a device does wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PARTS = ["decode", "resume", "sleep", "planner"]


@pytest.mark.slow(ci=True)
@pytest.mark.timeout(600)
def test_the_first_parts_pass_on_simulated_devices(tmp_path):
    """bf16 decoding, resume on two ranks, memory for a second process, and each phase's predicted peak memory."""
    command = [sys.executable, str(REPOSITORY / "tools" / "gpu" / "suite.py"), "--device", "sim", "--rehearsal"]
    command += ["--out", str(tmp_path), "--only", *PARTS]
    # Devices of other tests would be counted, too.
    variables = {"ROLL_SIM_DEVICES": "2", "ROLL_SIM_HOST": f"gpu-parts-{os.getpid()}", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **variables}
    subprocess.run([sys.executable, "-c", "import torch"], env=environment, check=True)  # compiles the devices
    subprocess.run(command, cwd=tmp_path, env=environment, check=False)
    found = json.loads((tmp_path / "sim-rehearsal.json").read_text(encoding="utf-8"))
    assert [each["part"] for each in found["parts"]] == PARTS
    assert all(each["status"] == "passed" for each in found["parts"]), found["parts"]
