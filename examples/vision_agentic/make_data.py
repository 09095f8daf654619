"""Make the data of the example: conversations of a noisy oracle, and the tokenizer of a tiny model.

    python examples/vision_agentic/make_data.py [DIRECTORY]

40 % of the moves are random; the others bring the white square nearer to the goal.

    images/      the boards
    sft.jsonl    conversations with one or two boards
    model/       tokenizer and image processor; the runs make the model's weights
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.vision.make_data import save_tokenizer
from examples.vision_agentic.board import MOVES, Board

from roll_core.spec.environment import Reply

NUM_EPISODES, NOISE, SEED = 4_000, 0.4, 2026


async def conversation(name: str, images: Path, rng: random.Random) -> list[dict[str, Any]]:
    """Messages of one episode. Writes its boards."""
    board = Board()
    messages: list[dict[str, Any]] = []
    turn: Any = await board.reset({}, rng.getrandbits(31))
    while not messages or not turn.done:
        (message,) = turn.messages
        file = f"{name}-{board.moves}.png"
        message["media"][0].save(images / file)
        move = rng.choice([*MOVES]) if rng.random() < NOISE else rng.choice(board.oracle())
        messages.append({"role": "user", "content": [{"type": "image", "image": f"images/{file}"}]})
        messages.append({"role": "assistant", "content": move})
        turn = await board.step(Reply(text=move))
    return messages


def main(directory: Path) -> None:
    """Write all files. Their contents are the same every time."""
    rng = random.Random(SEED)
    (directory / "images").mkdir(parents=True, exist_ok=True)
    with (directory / "sft.jsonl").open("w", encoding="utf-8") as file:
        for index in range(NUM_EPISODES):
            messages = asyncio.run(conversation(f"{index:04d}", directory / "images", rng))
            file.write(json.dumps({"id": index, "messages": messages}) + "\n")
    save_tokenizer(directory / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")
