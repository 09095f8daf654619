"""Conversations of a noisy oracle for `frozen_lake`: 60 % of its moves are random, the others on a shortest path."""

import argparse
import asyncio
import json
import random
from pathlib import Path

from roll_core.spec.environment import Reply
from roll_pipeline_agentic.environments.frozen_lake import MOVES, FrozenLake

SIZE, HOLES, TURNS = 3, 0.2, 5


async def conversation(rng: random.Random, noise: float) -> list[dict[str, str]]:
    """Messages of one episode, at most `TURNS` moves."""
    lake = FrozenLake(size=SIZE, holes=HOLES)
    opening = await lake.reset({}, rng.getrandbits(31))
    messages = [dict(message) for message in opening.messages]
    for _ in range(TURNS):
        move = rng.choice(list(MOVES)) if rng.random() < noise else lake.oracle()[0]
        messages.append({"role": "assistant", "content": move})
        turn = await lake.step(Reply(text=move))
        if turn.done:
            break
        messages += [dict(message) for message in turn.messages]
    while messages[-1]["role"] != "assistant":
        messages.pop()
    return messages


async def main() -> None:
    """Write `data/sft.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=20_000)
    parser.add_argument("--noise", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    folder = Path(__file__).parent / "data"
    folder.mkdir(exist_ok=True)
    with (folder / "sft.jsonl").open("w", encoding="utf-8") as file:
        for index in range(given.episodes):
            file.write(json.dumps({"id": index, "messages": await conversation(rng, given.noise)}) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
