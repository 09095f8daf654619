"""Make the quick start's data: sums of two-digit numbers, as a teacher who often forgets to carry would do them.

    python examples/quickstart/make_data.py [DIRECTORY]

The teacher adds digit by digit. Where a column needs a carry he forgets it more often than not, so a model that imitates him perfectly is
right on about half of the problems. What is right is never shown to it: that it has to find out by reinforcement learning.

    sft.jsonl     the teacher's work on the training problems, some of them several times
    train.jsonl   the training problems with their true sums, to be rewarded
    val.jsonl     problems that are in neither file
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 20_26
FORGETS_TO_CARRY = 0.75
NUM_TRAIN, NUM_VALIDATION, NUM_SHOWN = 6000, 400, 24_000


def teacher_adds(a: int, b: int, rng: random.Random) -> int:
    """The sum of two two-digit numbers, with a carry from ones to tens that may be forgotten."""
    carry = (a % 10 + b % 10) // 10
    if carry and rng.random() < FORGETS_TO_CARRY:
        carry = 0
    return (a // 10 + b // 10 + carry) * 10 + (a + b) % 10


def main(directory: Path) -> None:
    """Write the three files; the same ones every time."""
    rng = random.Random(SEED)
    problems = [(a, b) for a in range(100) for b in range(100)]
    rng.shuffle(problems)
    # Sums that need a carry are the interesting ones: three of four problems.
    carries = [p for p in problems if p[0] % 10 + p[1] % 10 >= 10]
    others = [p for p in problems if p[0] % 10 + p[1] % 10 < 10]
    wanted = NUM_TRAIN + NUM_VALIDATION
    chosen = carries[: wanted * 3 // 4] + others[: wanted - min(len(carries), wanted * 3 // 4)]
    rng.shuffle(chosen)
    validation, train = chosen[:NUM_VALIDATION], chosen[NUM_VALIDATION:]

    directory.mkdir(parents=True, exist_ok=True)
    shown = [rng.choice(train) for _ in range(NUM_SHOWN)]
    write(directory / "sft.jsonl", [row(i, a, b, teacher_adds(a, b, rng)) for i, (a, b) in enumerate(shown)])
    write(directory / "train.jsonl", [row(i, a, b) for i, (a, b) in enumerate(train)])
    write(directory / "val.jsonl", [row(i, a, b) for i, (a, b) in enumerate(validation)])


def row(number: int, a: int, b: int, answer: int | None = None) -> dict[str, object]:
    """One line of a file; with the teacher's answer if there is one."""
    columns: dict[str, object] = {"id": number, "prompt": f"{a:02d}+{b:02d}=", "ground_truth": str(a + b)}
    return columns if answer is None else columns | {"response": str(answer)}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
