"""Decoding on a simulated device: the CPU's responses, and what a step copies and waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roll_platform_sim.settings import table

KINDS = ("sampled", "greedy", "top-k, top-p", "min-p", "penalty", "banned ends")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("decoding")
    host = f"decoding-{os.getpid()}"
    variables = {"ROLL_SIM_DEVICES": "2", "ROLL_SIM_HOST": host, "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("decoding.py")
    subprocess.run([sys.executable, str(program)], cwd=folder, env={**os.environ, **variables}, check=True)
    table(host).unlink(missing_ok=True)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return results


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_a_device_samples_the_tokens_of_the_cpu(found, kind):
    pairs = zip(found["device"][kind]["responses"], found["cpu"][kind]["responses"], strict=True)
    for (tokens, logprobs, reason), (right, right_logprobs, right_reason) in pairs:
        assert (tokens, reason) == (right, right_reason)
        np.testing.assert_allclose(logprobs, right_logprobs, atol=1e-5)


def test_responses_end_in_both_ways(found):
    assert {reason for _, _, reason in found["device"]["mixed"]["responses"]} == {"stop", "length"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_copies_once_to_the_host_and_waits_once(found, kind):
    assert found["device"][kind]["per_step"] == {"d2h": 1, "h2d": 0, "host_waits": 1}
