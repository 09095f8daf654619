"""Each environment is solved by its oracle, repeats with its seed, and rejects other replies without failing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from roll_core.spec.environment import Environment, Opening, Reply, Turn
from roll_core.spec.rollout import IMAGE
from roll_pipeline_agentic.environments.frozen_lake import FrozenLake
from roll_pipeline_agentic.environments.guess_number import GuessNumber
from roll_pipeline_agentic.environments.sokoban import Sokoban
from shared_tests.binary_search import BinarySearch

SEEDS = range(20)
MAKE = {
    "guess_number": lambda: GuessNumber(low=1, high=50),
    "frozen_lake": lambda: FrozenLake(size=5, holes=0.3),
    "sokoban": lambda: Sokoban(rows=6, columns=7, boxes=2, box_reward=0.25),
    "frozen_lake image": lambda: FrozenLake(size=5, holes=0.3, observation="image"),
    "sokoban image": lambda: Sokoban(rows=6, columns=7, boxes=2, box_reward=0.25, observation="image"),
}


async def solve(environment: Any, seed: int) -> tuple[Opening, list[Turn]]:
    opening = await environment.reset({}, seed)
    message, turns = opening.messages[-1]["content"], []
    search = BinarySearch(low=1, high=50)
    for _ in range(100):
        reply = search.reply(message) if isinstance(environment, GuessNumber) else environment.oracle()[0]
        turns.append(await environment.step(Reply(text=reply)))
        if turns[-1].done:
            break
        message = turns[-1].messages[-1]["content"]
    return opening, turns


@pytest.mark.parametrize("name", MAKE)
def test_its_oracle_solves_it(name: str) -> None:
    for seed in SEEDS:
        _, turns = asyncio.run(solve(MAKE[name](), seed))
        assert turns[-1].done
        assert turns[-1].metrics["success"] == 1
        assert sum(turn.reward or 0 for turn in turns) == pytest.approx(1.5 if "sokoban" in name else 1.0)


@pytest.mark.parametrize("name", MAKE)
def test_the_seed_determines_the_episode(name: str) -> None:
    found = {seed: asyncio.run(solve(MAKE[name](), seed)) for seed in SEEDS}
    assert found == {seed: asyncio.run(solve(MAKE[name](), seed)) for seed in SEEDS}
    assert len({str(turns) for _, turns in found.values()}) > len(SEEDS) / 2


@pytest.mark.parametrize(
    ("environment", "colours"),
    [
        (FrozenLake(size=3, holes=0.5, observation="image"), {"P": "blue", "G": "green", "O": "black"}),
        (Sokoban(observation="image"), {"#": "grey", "P": "blue", "X": "brown", "O": "white"}),
    ],
    ids=["frozen_lake", "sokoban"],
)
def test_a_picture_shows_each_field(environment: Any, colours: dict[str, str]) -> None:
    """The pixel in the middle of a field has the colour of what the text shows there; a ring is empty inside."""
    names = {"blue": (40, 90, 220), "green": (40, 165, 75), "black": (0, 0, 0), "grey": (70, 70, 80)}
    names |= {"brown": (150, 95, 45), "white": (235, 235, 225)}
    opening = asyncio.run(environment.reset({}, 1))
    (message,) = opening.messages
    (image,) = message["media"]
    assert message["content"].count(IMAGE) == 1
    board = opening.state.splitlines()
    assert image.size == (28 * len(board[0]), 28 * len(board))
    for y, row in enumerate(board):
        for x, sign in enumerate(row):
            expected = names[colours.get(sign, "white")]
            assert image.getpixel((28 * x + 14, 28 * y + 14)) == expected, (sign, x, y)
    (turn,) = [asyncio.run(environment.step(Reply(text="?")))]
    assert turn.messages[0]["media"][0] == image  # equal boards are one image of caches and states


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("reply", ["", "?", "\ufffd", "hello\n" * 50])
def test_a_useless_reply_is_a_turn_without_reward(name: str, reply: str) -> None:
    async def run() -> Turn:
        environment: Environment = MAKE[name]()
        await environment.reset({}, 0)  # type: ignore[misc]
        return await environment.step(Reply(text=reply))  # type: ignore[misc]

    turn = asyncio.run(run())
    assert not turn.done
    assert not turn.reward
    assert turn.metrics == {"valid": 0.0}
    assert turn.messages


def test_wrong_guesses_are_answered_and_cost_their_penalty() -> None:
    async def run() -> list[Turn]:
        environment = GuessNumber(low=1, high=8, step_penalty=0.125)
        await environment.reset({}, 0)
        environment.number = 6
        return [await environment.step(Reply(text=each)) for each in ("I guess 4", "not 6 but 8", "9", "6")]

    low, high, outside, right = asyncio.run(run())
    assert [low.messages[0]["content"], low.state, low.reward] == ["higher", "5-8", -0.125]
    assert [high.messages[0]["content"], high.state] == ["lower", "5-7"]
    assert [outside.messages[0]["content"], outside.state] == ["lower", "5-7"]
    assert (right.reward, right.done) == (1.0, True)


def test_a_step_into_a_hole_ends_the_episode() -> None:
    async def run() -> Turn:
        lake = FrozenLake(size=2, holes=0.0, hole_reward=-1.0)
        await lake.reset({}, 0)
        lake.agent, lake.goal, lake.holes = (0, 0), (1, 1), {(0, 1)}
        assert lake.oracle() == ["down", "right"]
        return await lake.step(Reply(text="I go RIGHT"))

    turn = asyncio.run(run())
    assert (turn.reward, turn.done, turn.metrics["success"]) == (-1.0, True, 0.0)


def test_a_slippery_lake_moves_to_the_sides() -> None:
    async def run() -> set[tuple[int, int]]:
        lake = FrozenLake(size=5, holes=0.0, slippery=1.0)
        found = set()
        for seed in SEEDS:
            await lake.reset({}, seed)
            lake.agent, lake.goal = (2, 2), (4, 4)
            await lake.step(Reply(text="up"))
            found.add(lake.agent)
        return found

    assert asyncio.run(run()) == {(2, 1), (2, 3)}


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_a_move_is_a_word_and_no_part_of_one(name: str) -> None:
    async def run(reply: str) -> Turn:
        environment: Any = MAKE[name]()
        await environment.reset({}, 0)
        return await environment.step(Reply(text=reply))  # type: ignore[no-any-return]

    assert asyncio.run(run("Left, alright? Update!")) == asyncio.run(run("left"))
    assert asyncio.run(run("**down**")) == asyncio.run(run("_Down_.")) == asyncio.run(run("down"))
    assert asyncio.run(run("bright")).metrics == {"valid": 0.0}


def test_boxes_are_pushed_and_block_each_other() -> None:
    room = Sokoban(rows=5, columns=7, boxes=2)
    room.targets = frozenset({(1, 5), (2, 5)})
    assert room.pushed((2, 1), frozenset({(2, 2)}), (0, 1)) == ((2, 2), frozenset({(2, 3)}))
    two = frozenset({(2, 2), (2, 3)})
    assert room.pushed((2, 1), two, (0, 1)) == ((2, 1), two)
    wall = frozenset({(2, 5)})
    assert room.pushed((2, 4), wall, (0, 1)) == ((2, 4), wall)
    assert room.pushed((1, 1), wall, (-1, 0)) == ((1, 1), wall)
