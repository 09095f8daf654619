"""The data of the reward model's example: pairs of a right and a wrong answer, and problems kept apart."""

import json
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    quickstart, folder = tmp_path_factory.mktemp("quickstart"), tmp_path_factory.mktemp("data")
    runpy.run_path(str(EXAMPLES / "quickstart" / "make_data.py"))["main"](quickstart)
    script = runpy.run_path(str(EXAMPLES / "reward_model" / "make_data.py"))
    script["main"](folder, quickstart)
    return {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in folder.glob("*.jsonl")
    }


def test_the_chosen_answer_is_right_and_the_rejected_one_is_not(data):
    for row in data["pairs"] + data["val_pairs"]:
        assert row["chosen"] == "".join(sorted(row["prompt"][:-1])) != row["rejected"]


def test_no_problem_is_in_two_files(data):
    problems = [{row["prompt"] for row in data[name]} for name in ("pairs", "train", "val")]
    assert sum(map(len, problems)) == len(set().union(*problems)) == 24_500
    assert problems[2] == {row["prompt"] for row in data["val_pairs"]}


def test_training_rows_have_the_reward_models_tag_and_no_answer(data):
    assert {tuple(row) for row in data["train"]} == {("id", "prompt", "tag")}
    assert {row["tag"] for row in data["train"]} == {"preference"}
    assert {row["tag"] for row in data["val"]} == {"sorting"}
