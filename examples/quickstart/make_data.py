"""Make the quick start's data: prompts of five digits, and responses with the digits sorted.

    python examples/quickstart/make_data.py [DIRECTORY]

SFT responses are noisy: 62 % have the last two digits swapped. A model that fits them perfectly is correct on about
half of the prompts. GRPO rewards correct responses only.

    sft.jsonl     prompts with noisy responses
    train.jsonl   the same prompts with the ground truth, for the reward
    val.jsonl     prompts that are in neither file
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 2026
SWAP_PROBABILITY = 0.62
NUM_TRAIN, NUM_VALIDATION, DIGITS = 24_000, 500, 5


def noisy_response(digits: str, rng: random.Random) -> str:
    """Sort the digits, and swap the last two with probability `SWAP_PROBABILITY`."""
    correct = "".join(sorted(digits))
    return correct[:-2] + correct[-1] + correct[-2] if rng.random() < SWAP_PROBABILITY else correct


def main(directory: Path) -> None:
    """Write the three files. Their contents are the same every time."""
    rng = random.Random(SEED)
    # Sampled without replacement, so validation prompts are never trained on.
    prompts = [f"{number:0{DIGITS}d}" for number in rng.sample(range(10**DIGITS), NUM_TRAIN + NUM_VALIDATION)]
    train, validation = prompts[:NUM_TRAIN], prompts[NUM_TRAIN:]
    directory.mkdir(parents=True, exist_ok=True)
    write(
        directory / "sft.jsonl",
        [row(i, each) | {"response": noisy_response(each, rng)} for i, each in enumerate(train)],
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
