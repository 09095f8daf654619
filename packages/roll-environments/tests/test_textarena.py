"""Games of the real TextArena."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from helpers_environments import called, play

from roll_environments.targets import WrappedError
from roll_environments.textarena_adapter import TextArena
from roll_testing import EnvironmentConformance

pytestmark = pytest.mark.engine("textarena")


class TestGuessTheNumber(EnvironmentConformance):
    timeout_s = 120.0

    def create(self) -> TextArena:
        return TextArena(id="GuessTheNumber-v0-raw")

    def replies(self, seed: int) -> Sequence[str]:
        environment = self.create()
        called(environment, "reset", {}, seed)
        return [
            "[1]" if environment._game().state.game_state["game_number"] != 1 else "[2]",
            f"[{environment._game().state.game_state['game_number']}]",
        ]


def test_an_opponent_plays_the_other_player() -> None:
    environment = TextArena(id="TicTacToe-v0-raw", num_players=2, opponent="test_textarena:last_free")
    opening, turns, score = play(environment, ["[0]", "[1]", "[2]"])
    assert "Player 0" in opening.messages[0]["content"]
    assert turns[-1].done
    assert score is not None
    assert score.value == 1


def last_free(observation: str) -> str:
    """An opponent that takes the last free square."""
    return re.findall(r"\[\d\]", observation.rpartition("Available Moves")[2])[-1]


def test_the_policy_may_be_the_second_player() -> None:
    environment = TextArena(id="TicTacToe-v0-raw", num_players=2, player=1, opponent="test_textarena:last_free")
    opening, turns, score = play(environment, ["[0]", "[1]", "[3]"])
    assert "Player 1" in opening.messages[0]["content"]
    assert score is not None
    assert score.value in (-1, 0, 1)
    assert turns


class TestTicTacToe(EnvironmentConformance):
    """Both players are the policy. The opening is the same for all seeds."""

    timeout_s = 120.0
    varies = False

    def create(self) -> TextArena:
        return TextArena(id="TicTacToe-v0-raw", num_players=2, self_play=True)

    def replies(self, seed: int) -> Sequence[str]:
        return ["[0]", "[3]", "[1]", "[4]", "[2]"]


def test_the_policy_plays_both_players() -> None:
    """The player who begins takes the first row."""
    environment = TestTicTacToe().create()
    opening, turns, score = play(environment, ["[0]", "[3]", "[1]", "[4]", "[2]"])
    first, second = opening.player, turns[0].player
    assert {first, second} == set(opening.players) == {"0", "1"}
    assert [turn.player for turn in turns[:-1]] == [second, first, second, first]
    assert (turns[-1].reward, turns[-1].rewards) == (1.0, {second: -1.0})
    assert score is not None
    assert (score.value, score.detail) == (0.0, {"finished": 1.0})


def test_games_leave_the_random_numbers_of_the_process() -> None:
    random.seed(1)
    expected = random.Random(1).random()
    called(environment := TextArena(id="GuessTheNumber-v0-raw"), "reset", {}, 7)
    called(environment, "close")
    assert random.random() == expected


def test_an_unfinished_game_says_so() -> None:
    _, _, score = play(TextArena(id="GuessTheNumber-v0-raw"), ["[1]"], seed=3)
    assert score is not None
    assert score.detail["finished"] in (0.0, 1.0)


def fails(observation: str) -> str:
    raise ValueError("no such move")


def test_a_failing_opponent_is_named() -> None:
    environment = TextArena(id="TicTacToe-v0-raw", num_players=2, opponent="test_textarena:fails")
    with pytest.raises(WrappedError, match=r"test_textarena:fails.*ValueError"):
        play(environment, ["[0]"])


def test_an_unknown_game_is_named() -> None:
    with pytest.raises(WrappedError, match="NoSuchGame-v0"):
        play(TextArena(id="NoSuchGame-v0"), [])
