"""A thread that has nothing to do gives its OpenMP team back."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from roll_core.runtime import openmp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def compute() -> torch.Tensor:
    return torch.softmax(torch.ones(512, 512), dim=-1)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_team_ends_and_comes_back_as_large():
    if openmp._pause() is openmp._nothing:
        pytest.skip("torch computes with another OpenMP here")
    compute()
    with_team = num_threads()
    openmp.rest()
    assert num_threads() == with_team - 1
    torch.testing.assert_close(compute(), torch.full((512, 512), 1 / 512))
    assert num_threads() == with_team
    assert torch.get_num_threads() == 2


def test_resting_without_a_team_is_harmless():
    openmp.rest()
    openmp.rest()
    assert torch.isfinite(compute()).all()
