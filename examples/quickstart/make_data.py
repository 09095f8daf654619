"""Make the quick start's data: digits to be sorted, as a teacher would who confuses the last two.

    python examples/quickstart/make_data.py [DIRECTORY]

The teacher sorts five digits and then, more often than not, swaps the last two. A model that imitates him perfectly is
right on about half of the problems. What is right is never shown to it: that it has to find out by reinforcement
learning.

    sft.jsonl     problems with the teacher's answers
    train.jsonl   the same problems with the true answers, to be rewarded
    val.jsonl     problems that are in neither file
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 2026
SWAPS_THE_LAST_TWO = 0.62
NUM_TRAIN, NUM_VALIDATION, DIGITS = 24_000, 500, 5


def teacher_sorts(digits: str, rng: random.Random) -> str:
    """The digits in order, the last two of them too often the wrong way round."""
    right = "".join(sorted(digits))
    return right[:-2] + right[-1] + right[-2] if rng.random() < SWAPS_THE_LAST_TWO else right


def main(directory: Path) -> None:
    """Write the three files; the same ones every time."""
    rng = random.Random(SEED)
    # Drawn without replacement, so no problem of the validation is among those that are trained on.
    problems = [f"{number:0{DIGITS}d}" for number in rng.sample(range(10**DIGITS), NUM_TRAIN + NUM_VALIDATION)]
    train, validation = problems[:NUM_TRAIN], problems[NUM_TRAIN:]
    directory.mkdir(parents=True, exist_ok=True)
    write(
        directory / "sft.jsonl", [row(i, each) | {"response": teacher_sorts(each, rng)} for i, each in enumerate(train)]
    )
    write(directory / "train.jsonl", [row(i, each) for i, each in enumerate(train)])
    write(directory / "val.jsonl", [row(i, each) for i, each in enumerate(validation)])


def row(number: int, digits: str) -> dict[str, object]:
    """One line of a file."""
    return {"id": number, "prompt": f"{digits}>", "ground_truth": "".join(sorted(digits))}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
