"""Data parallel over gloo: the gradient of a batch is the same on 1 to 4 ranks, packed or padded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("replica_program.py")
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
SEQUENCES = [
    ([5, 17, 3, 44, 9], 2),
    ([8], 1),
    ([1, 60, 33, 2, 2, 19, 7, 21, 50], 1),
    ([4, 11, 12], 3),
    ([30, 31, 7, 9, 10, 55, 54, 53, 2, 6, 18, 19], 5),
    ([41, 42], 1),
]
SPLITS = {"1": (1, "auto"), "2": (2, "auto"), "3": (3, "auto"), "4": (4, "auto"), "3-padded": (3, "sdpa")}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each rank of each job found."""
    folder = tmp_path_factory.mktemp("replicas")
    job = {"model": MODEL, "sequences": SEQUENCES}
    jobs = {name: job | {"world_size": size, "attention": kind} for name, (size, kind) in SPLITS.items()}
    few = {"model": MODEL, "sequences": SEQUENCES[:1], "attention": "auto"}
    jobs |= {"few-1": few | {"world_size": 1}, "few-3": few | {"world_size": 3}}
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(PROGRAM), str(folder / "jobs.json"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {
        name: [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(each["world_size"])]
        for name, each in jobs.items()
    } | {"folder": folder}


def relative(gradient, expected):
    one, other = torch.tensor(gradient), torch.tensor(expected)
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", SPLITS)
def test_the_gradient_does_not_depend_on_the_number_of_ranks(found, name):
    alone = found["1"][0]
    for each in found[name]:
        assert relative(each["gradient"], alone["gradient"]) < 1e-6
        assert each["stats"][0]["grad_norm"] == pytest.approx(alone["stats"][0]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", SPLITS)
def test_all_ranks_hold_the_same_weights_to_the_last_bit(found, name):
    for each in found[name]:
        assert each["weights"] == found[name][0]["weights"]
        assert each["stats"] == found[name][0]["stats"]


@pytest.mark.parametrize("name", SPLITS)
def test_a_state_saved_by_all_ranks_continues_bit_for_bit(found, name):
    for rank, each in enumerate(found[name]):
        before, repeated = each["stats"][1:]
        assert before == repeated
        assert ("weights.safetensors" in each["files"]) == (rank == 0)
        assert each["data_rank"] == [rank, len(found[name]), True]
    assert (found["folder"] / name / "export" / "model.safetensors").is_file()


def test_ranks_with_nothing_to_do_take_part(found):
    for each in found["few-3"]:
        assert relative(each["gradient"], found["few-1"][0]["gradient"]) < 1e-6
