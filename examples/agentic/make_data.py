"""Conversations of a noisy oracle for `guess_number`: half of its guesses are random, the others halve the range."""

import argparse
import json
import random
from pathlib import Path

LOW, HIGH, TURNS = 1, 8, 4


def conversation(rng: random.Random, noise: float) -> list[dict[str, str]]:
    """Messages of one episode, at most `TURNS` guesses."""
    number, low, high = rng.randint(LOW, HIGH), LOW, HIGH
    messages = [{"role": "user", "content": f"Guess a number from {LOW} to {HIGH}."}]
    for turn in range(TURNS):
        guess = rng.randint(LOW, HIGH) if rng.random() < noise else (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number or turn == TURNS - 1:
            break
        messages.append({"role": "user", "content": "higher" if guess < number else "lower"})
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
    return messages


def main() -> None:
    """Write `data/sft.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--noise", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    with (folder / "sft.jsonl").open("w", encoding="utf-8") as file:
        for index in range(given.episodes):
            file.write(json.dumps({"id": index, "messages": conversation(rng, given.noise)}) + "\n")


if __name__ == "__main__":
    main()
