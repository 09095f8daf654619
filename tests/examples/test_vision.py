"""The example of images: its data, and two steps of each run."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import roll_core as roll
from roll_core.data.encode import encode_prompts
from roll_core.data.rows import read_rows
from roll_core.runtime.run.tokenizer import load_tokenizer
from roll_core.spec.config import DataArguments

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = ("max_steps=2", "eval_steps=0", "executor=local", "platform=cpu")


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with the example's data, the first rows of each file."""
    folder = tmp_path_factory.mktemp("vision")
    data = folder / "examples" / "vision" / "data"
    make_data = runpy.run_path(str(EXAMPLES / "vision" / "make_data.py"))
    make_data["main"].__globals__.update(NUM_TRAIN=96, NUM_VALIDATION=16)
    make_data["main"](data)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(EXAMPLES.parent))
        yield folder


def test_rows_differ_in_their_pictures_alone(here):
    data = DataArguments(file_name="examples/vision/data/val.jsonl", images="images")
    prompts, counts = encode_prompts(
        read_rows(data), data, load_tokenizer("examples/vision/data/model"), prompt_length=48
    )
    assert counts.kept == 16
    assert len({prompt.tokens.tobytes() for prompt in prompts}) == 1
    assert len({prompt.media[0].digest for prompt in prompts}) == 16
    blank = Path("examples/vision/data/blank-val.jsonl").read_text(encoding="utf-8").splitlines()
    assert {tuple(json.loads(line)["images"]) for line in blank} == {("images/blank.png",)}


def test_short_runs_see_the_pictures(here):
    sft = roll.run(EXAMPLES / "vision" / "sft.yaml", [*SMALL, "sft_train.training_args.per_device_train_batch_size=16"])
    assert [line["train/grad_norm"] > 0 for line in sft.history if line["step"]] == [True, True]
    grpo = roll.run(
        EXAMPLES / "vision" / "grpo.yaml",
        [
            *SMALL,
            *("seeded_rollouts=true", "rollout_batch_size=8", "num_return_sequences_in_group=4"),
            "actor_train.training_args.per_device_train_batch_size=16",
            "rewards.digits.function=parity:parity",
        ],
    )
    steps = [line for line in grpo.history if line["step"]]
    assert all(line["actor/grad_norm"] > 0 for line in steps)
    assert all(line["actor/logprob_gap"] < 1e-5 for line in steps)


@pytest.fixture(autouse=True)
def parity(here):
    """A reward that differs between responses of a model that has learned nothing."""
    code = "def parity(prompt, response, images, **row):\n    return float(len(response) % 2) + 0 * images[0].width\n"
    (here / "parity.py").write_text(code, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(here))
        yield
