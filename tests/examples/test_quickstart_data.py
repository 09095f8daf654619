"""The quick start's data: repeatable, disjoint, and wrong as often as it says."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "make_data.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], check=True)
    return {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in folder.glob("*.jsonl")
    }


def test_evaluation_problems_are_in_no_training_file(data):
    trained = {row["prompt"] for row in data["sft"] + data["train"]}
    held_out = {row["prompt"] for row in data["val"]}
    assert len(held_out) == len(data["val"]) == 500
    assert not trained & held_out


def test_true_answers_are_the_digits_in_order(data):
    for row in data["train"] + data["val"]:
        assert row["ground_truth"] == "".join(sorted(row["prompt"][:-1]))
        assert "response" not in row


def test_about_half_of_the_sft_responses_are_correct(data):
    right = sum(row["response"] == row["ground_truth"] for row in data["sft"]) / len(data["sft"])
    assert 0.45 < right < 0.6


def test_the_same_files_every_time(data, tmp_path):
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True)
    again = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text(encoding="utf-8").splitlines()]
    assert again == data["sft"]


@pytest.mark.parametrize(
    ("response", "in_order", "same_digits"),
    [("01233", 1.0, 1.0), ("01332", 0.0, 1.0), ("01234", 1.0, 0.0), ("43210", 0.0, 0.0), ("", 1.0, 0.0)],
)
def test_the_components_of_the_reward_are_those_of_its_value(response, in_order, same_digits):
    rewards = runpy.run_path(str(SCRIPT.with_name("rewards.py")))
    row = {"prompt": "32013>", "response": response, "ground_truth": "01233"}
    found = rewards["sorted_in_parts"](**row)
    assert found == {"value": rewards["sorted_digits"](**row), "in_order": in_order, "same_digits": same_digits}
