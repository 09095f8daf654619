"""DeepSpeed's path for accelerators, on NPUs whose torch-npu is a stand-in: their devices are simulated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roll_platform_sim.device import EXTENSION
from shared_tests.simulated import REPOSITORY, npu_host, run

SELECTED = (
    "(test_steps_of_adamw_equal_the_reference and (zero0-2 or zero3-2))"
    " or (test_a_resumed_run_equals_an_uninterrupted_one and (zero1-2-2 or zero3-2-2))"
    " or (test_offload_frees_memory and zero1-2-all)"
)
"""Not the offload of stage 3. Buckets for reductions have 2 GB by default, as much as a simulated device."""


@pytest.mark.engine("deepspeed")
@pytest.mark.timeout(900)
def test_simulated_devices_train_resume_and_offload(tmp_path: Path) -> None:
    EXTENSION.library()
    kit = f"{REPOSITORY / 'tools' / 'gpu' / 'kits.py'}::TestDeepSpeed"
    command = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", kit, "-k", SELECTED)
    output = run(*command, folder=REPOSITORY, ROLL_GPU_PLATFORM="npu", ROLL_SIM_MEMORY_GIB="3", **npu_host(tmp_path))
    assert re.findall(r"\d+ (?:passed|skipped)", output) == ["5 passed"]


@pytest.mark.engine("deepspeed")
def test_no_microbatch_waits_for_the_device(tmp_path: Path) -> None:
    EXTENSION.library()
    program = Path(__file__).with_name("deepspeed_waits.py")
    run(program, folder=tmp_path, **npu_host(tmp_path))
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["0"] == [2, 2]
    assert all(one == three for one, three in found.values()), found
