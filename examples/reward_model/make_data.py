"""Make the data of the reward model's example: pairs of right and wrong answers to problems of the quick start.

    python examples/quickstart/make_data.py
    python examples/reward_model/make_data.py [DIRECTORY]

    pairs.jsonl        problems, each with the right answer and a wrong one, for the reward model
    train.jsonl        other problems without answers, for PPO
    val.jsonl          problems that are in neither file, with their right answers
    val_pairs.jsonl    the same problems as pairs, for the reward model's accuracy

A third of the wrong answers are the quick start's teacher's: the last two digits are swapped. A third are in order, but
with a digit that the problem does not have: without these, the reward model ignores the problem, and PPO finds answers
that are only in order. The others have any two digits swapped, or one digit too few or too many.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 2027
NUM_PAIRS = 16_000
QUICKSTART = Path(__file__).parents[1] / "quickstart" / "data"


def wrong_answer(right: str, rng: random.Random) -> str:
    """Return an answer that differs from `right`."""
    while True:
        digits = list(right)
        first, second = rng.sample(range(len(digits)), 2)
        kind = rng.choice(("teacher", "teacher", "other digits", "other digits", "swap", "length"))
        if kind == "teacher":
            digits[-2:] = digits[:-3:-1]
        elif kind == "swap":
            digits[first], digits[second] = digits[second], digits[first]
        elif kind == "other digits":
            digits[first] = rng.choice("0123456789")
            digits.sort()
        elif rng.random() < 0.5:
            del digits[first]
        else:
            digits.insert(first, rng.choice("0123456789"))
        if (wrong := "".join(digits)) != right:
            return wrong


def main(directory: Path, source: Path = QUICKSTART) -> None:
    """Write the four files, the same ones every time, from the quick start's in `source`."""
    rng = random.Random(SEED)
    problems, held_out = (read(source / f"{name}.jsonl") for name in ("train", "val"))
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "pairs.jsonl", [pair(each, rng) for each in problems[:NUM_PAIRS]])
    write(
        directory / "train.jsonl",
        [{"id": each["id"], "prompt": each["prompt"], "tag": "preference"} for each in problems[NUM_PAIRS:]],
    )
    write(directory / "val.jsonl", [each | {"tag": "sorting"} for each in held_out])
    write(directory / "val_pairs.jsonl", [pair(each, rng) for each in held_out])


def pair(row: dict[str, str], rng: random.Random) -> dict[str, str]:
    """Add a wrong answer to a problem."""
    right = row["ground_truth"]
    return {"id": row["id"], "prompt": row["prompt"], "chosen": right, "rejected": wrong_answer(right, rng)}


def read(path: Path) -> list[dict[str, str]]:
    """Read rows of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
