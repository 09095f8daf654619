"""The example: its conversations are episodes of guess_number, and its configs are accepted."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_core.config import load
from roll_core.data.media import received_message
from roll_core.plugins.registry import Registry
from roll_core.spec.agent import Session
from roll_core.spec.environment import Reply
from roll_pipeline_agentic.environments.guess_number import GuessNumber
from shared_tests.binary_search import BinarySearch
from shared_tests.hf_plugins import hf_plugins

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def module_of(example: str, name: str = "make_data") -> Any:
    spec = importlib.util.spec_from_file_location(f"{example}_{name}", EXAMPLES / example / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make_data() -> Any:
    return module_of("agentic")


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_conversations_are_episodes_of_the_environment(make_data: Any, noise: float) -> None:
    async def replay(messages: list[dict[str, str]]) -> bool:
        environment = GuessNumber(low=make_data.LOW, high=make_data.HIGH)
        opening = await environment.reset({}, 0)
        assert messages[0]["content"] == opening.messages[0]["content"]
        answers = {each["content"] for each in messages[1:] if each["role"] == "user"}
        assert answers <= {"higher", "lower"}
        ends = []
        for number in range(make_data.LOW, make_data.HIGH + 1):  # the number that the oracle may have had
            await environment.reset({}, 0)
            environment.number = number
            for at in range(1, len(messages), 2):
                turn = await environment.step(Reply(text=messages[at]["content"]))
                if at + 1 == len(messages):
                    ends.append(turn.done)
                elif turn.done or turn.messages[0]["content"] != messages[at + 1]["content"]:
                    break
        assert ends, "no number gives these answers"
        return any(ends)

    rng = random.Random(0)
    solved = [asyncio.run(replay(make_data.conversation(rng, noise))) for _ in range(100)]
    assert noise or all(solved)


def test_the_script_plays_the_game_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same seeds, same numbers, same messages, same rewards."""
    pytest.importorskip("openai")
    module = module_of("agentic", "agent_openai")

    async def of_environment(seed: int) -> tuple[list[str], float]:
        environment, oracle = GuessNumber(low=1, high=8), BinarySearch(low=1, high=8)
        messages = [str((await environment.reset({}, seed)).messages[0]["content"])]
        while True:
            turn = await environment.step(Reply(text=oracle.reply(messages[-1])))
            if turn.done:
                return messages, float(turn.reward or 0.0)
            messages.append(str(turn.messages[0]["content"]))

    async def of_script(seed: int) -> tuple[list[str], float]:
        oracle, messages = BinarySearch(low=1, high=8), []

        async def create(**given: Any) -> Any:
            messages.append(given["messages"][-1]["content"])
            message = SimpleNamespace(content=oracle.reply(messages[-1]))
            return SimpleNamespace(choices=[SimpleNamespace(message=message)])

        client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
        monkeypatch.setattr(module, "client", lambda url: SimpleNamespace(with_options=lambda **given: client))
        session = Session(base_url="", api_key="", seed=seed)
        return messages, await module.play({}, session)

    for seed in range(20):
        assert asyncio.run(of_script(seed)) == asyncio.run(of_environment(seed))


def test_the_oracle_without_noise_solves_most_lakes() -> None:
    """Paths of more than five moves are rare on nine fields."""
    frozen_lake, rng = module_of("frozen_lake"), random.Random(0)
    found = [asyncio.run(frozen_lake.conversation(rng, 0.0)) for _ in range(100)]
    assert all([each["role"] for each in messages[1::2]] == ["assistant"] * (len(messages) // 2) for messages in found)
    assert all(messages[-1]["role"] == "assistant" for messages in found)
    assert sum(len(messages) < 2 * frozen_lake.TURNS for messages in found) > 80
    longest = max(len(messages[0]["content"]) for messages in found)
    config = load(EXAMPLES / "frozen_lake" / "grpo.yaml", [], Registry(hf_plugins("roll-pipeline-agentic"))).config
    assert longest < config.prompt_length


def test_boards_are_won_by_the_oracle_and_by_no_blind_policy() -> None:
    """A policy that sees nothing chooses two moves in advance: it wins at most a third of the 24 boards."""
    board = module_of("vision_agentic", "board")
    fields = [(x, y) for x in range(2) for y in range(2)]

    async def won(place: Any, goal: Any, hole: Any, moves: Any) -> float:
        environment = board.Board(blank=True)
        await environment.reset({}, 0)
        environment.place, environment.goal, environment.hole = place, goal, hole
        for move in moves or (None, None):
            turn = await environment.step(Reply(text=move or environment.oracle()[0]))
            if turn.done:
                break
        return float(turn.reward or 0.0)

    def share(moves: Any) -> float:
        boards = list(itertools.permutations(fields, 3))
        return sum(asyncio.run(won(*places, moves)) for places in boards) / len(boards)

    assert share(None) == 1
    assert max(share(moves) for moves in itertools.product(board.MOVES, repeat=2)) == pytest.approx(1 / 3)


def test_pictures_of_a_board_show_its_squares() -> None:
    board = module_of("vision_agentic", "board")

    async def shown(seed: int, **options: Any) -> tuple[Any, Any]:
        environment = board.Board(**options)
        (message,) = (await environment.reset({}, seed)).messages
        return environment, received_message(message)["media"][0].image()

    for seed in range(20):
        environment, picture = asyncio.run(shown(seed))
        for (x, y), channels in ((environment.place, 3), (environment.goal, 1), (environment.hole, 1)):
            pixel = picture.getpixel((14 * x + 7, 14 * y + 7))
            assert sum(value >= 180 for value in pixel) == channels
    blank = {asyncio.run(shown(seed, blank=True))[1].tobytes() for seed in range(9)}
    assert len(blank) == 1


@pytest.mark.parametrize(
    ("example", "name", "run"),
    [
        ("agentic", "sft", "agentic-sft"),
        ("agentic", "agentic", "agentic-rl"),
        ("agentic", "agent_openai", "agentic-openai"),
        ("frozen_lake", "sft", "frozen-lake-sft"),
        ("frozen_lake", "grpo", "frozen-lake-grpo"),
        ("vision_agentic", "sft", "vision-agentic-sft"),
        ("vision_agentic", "grpo", "vision-agentic-grpo"),
    ],
)
def test_the_configs_are_accepted(example: str, name: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "agent_openai":
        pytest.importorskip("openai")
    monkeypatch.chdir(EXAMPLES.parent)
    config = load(EXAMPLES / example / f"{name}.yaml", [], Registry(hf_plugins("roll-pipeline-agentic"))).config
    assert config.exp_name == run
