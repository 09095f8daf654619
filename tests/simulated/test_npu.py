"""roll-platform-npu on a host whose torch-npu, CANN and device files are stand-ins: its devices are simulated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shared_tests.simulated import REPOSITORY, check_metrics, npu_host, program, run

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def host(tmp_path: Path) -> dict[str, str]:
    return npu_host(tmp_path)


@pytest.mark.slow(ci=True)
def test_doctor_and_plan_find_the_devices(host, tmp_path):
    found = json.loads(run("-m", "roll_core", "doctor", "--json", folder=tmp_path, **host))["findings"]
    levels = {(each["check"], each["subject"]): each["level"] for each in found}
    assert levels["platform", "npu"] == levels["cann", ""] == levels["dtypes", "bf16"] == "ok"
    config = REPOSITORY / "examples" / "quickstart" / "sft.yaml"
    plan = json.loads(run("-m", "roll_core", "plan", config, "--json", "--no-files", folder=tmp_path, **host))
    assert plan["platform"] == "npu"
    assert plan["fits"]


@pytest.mark.slow(ci=True)
def test_the_platform_computes(host):
    tests = REPOSITORY / "packages" / "roll-platform-npu" / "tests" / "test_conformance.py"
    select = "computes_in_what_it_supports or counts_allocations or counted_in_bytes"
    output = run("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", tests, "-k", select, folder=REPOSITORY, **host)
    assert re.findall(r"\d+ (?:passed|skipped)", output) == ["3 passed"]


@pytest.mark.slow
def test_the_quick_start_has_the_cpus_metrics(host, tmp_path):
    found = program("example_runs", "npu", "sft", "grpo", folder=tmp_path, **host)
    for runs in found.values():
        check_metrics(runs["npu"], runs["cpu"])


@pytest.mark.slow(ci=True)
def test_packed_rows_are_attended_to_in_one_call(host, tmp_path):
    """By torch-npu's function, with and without a window; half a unit of float16 at the outputs' size."""
    found = program("npu_attention", folder=tmp_path, **host)
    assert found["num_calls"] == 2
    assert max(found["differences"].values()) < 2**-7
