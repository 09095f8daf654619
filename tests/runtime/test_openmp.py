"""A thread that has nothing to do gives its OpenMP team back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from roll_core.runtime import openmp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")

COUNT = """
import os
import torch
from roll_core.runtime import openmp

def show():
    correct = torch.allclose(torch.softmax(torch.ones(512, 512), dim=-1), torch.full((512, 512), 1 / 512))
    print(len(os.listdir("/proc/self/task")), correct, torch.get_num_threads())

torch.set_num_threads(2)
show()
openmp.rest()
print(len(os.listdir("/proc/self/task")))
show()
"""


def test_the_team_ends_and_comes_back_as_large():
    """In a process of its own: tests before this one leave threads that end when they like."""
    if openmp._pause() is openmp._nothing:
        pytest.skip("torch computes with another OpenMP here")
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=120, check=True)
    with_team, resting, again = done.stdout.splitlines()
    assert with_team == again
    num_threads, *rest = with_team.split()
    assert rest == ["True", "2"]
    assert int(resting) == int(num_threads) - 1


def test_resting_without_a_team_is_harmless():
    openmp.rest()
    openmp.rest()
    assert torch.isfinite(torch.softmax(torch.ones(512, 512), dim=-1)).all()
