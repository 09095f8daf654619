"""A thread that has nothing to do gives its OpenMP team back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from roll_core import openmp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")

COUNT = """
import os
import torch
from roll_core import openmp

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


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_users_way_to_wait_is_kept(given):
    assert openmp.environment(given | {"OTHER": "1"}) == given


def test_a_run_limits_spinning_before_torch_is_loaded(tmp_path):
    """The command is told to run a config that is not there: it ends before anything heavy is imported."""
    shown = "import os, sys; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    program = f"import atexit; atexit.register(lambda: exec({shown!r})); from roll_core.cli.main import main; main()"
    config = tmp_path / "run.yaml"
    config.write_text(
        "pipeline: sft\npretrain: none\nsft_train: {data_args: {file_name: none.jsonl}, world_size: 1,"
        " strategy_args: {strategy_name: hf_train}}\n"
    )
    env = {name: value for name, value in os.environ.items() if name not in openmp.SPIN_VARIABLES}
    words = [sys.executable, "-c", program, "run", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.stdout.split() == [str(openmp.SPIN_ROUNDS), "False"], done.stderr
