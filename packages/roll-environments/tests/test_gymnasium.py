"""Environments of gymnasium and GEM: real ones, and wrong ones of a user."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers_environments import called, play
from PIL import Image

from roll_core.data.media import received_message
from roll_core.spec.environment import Reply
from roll_core.spec.rollout import IMAGE
from roll_environments.gymnasium_adapter import GymnasiumAdapter, numbers
from roll_environments.targets import WrappedError
from roll_testing import EnvironmentConformance
from roll_testing.errors import mentions, raises_error

NAMES = ["left", "down", "right", "up"]
engine = pytest.mark.engine("gymnasium")


@engine
class TestFrozenLake(EnvironmentConformance):
    varies = False  # the map and the start are always the same

    def create(self) -> GymnasiumAdapter:
        options = {"is_slippery": False}
        return GymnasiumAdapter(id="FrozenLake-v1", options=options, actions=NAMES, observation="render")

    def replies(self, seed: int) -> Sequence[str]:
        return ["down", "I go down.", "RIGHT", "right", "down", "right"]


@engine
def test_a_lake_is_shown_as_text_and_reaches_its_goal() -> None:
    environment = TestFrozenLake().create()
    opening, turns, score = play(environment, list(TestFrozenLake().replies(0)))
    assert opening.messages[0]["content"].endswith("SFFF\nFHFH\nFFFH\nHFFG")
    assert [turn.reward for turn in turns] == [0, 0, 0, 0, 0, 1]
    assert (turns[-1].done, turns[-1].truncated, score) == (True, False, None)


@engine
def test_gymnasium_limit_truncates_the_episode() -> None:
    options = {"is_slippery": False, "max_episode_steps": 2}
    environment = GymnasiumAdapter(id="FrozenLake-v1", options=options)
    _, turns, _ = play(environment, ["0", "0", "0"])
    assert [(turn.done, turn.truncated) for turn in turns] == [(False, False), (False, True)]


@engine
def test_a_reply_without_an_action_steps_nothing() -> None:
    environment = GymnasiumAdapter(id="FrozenLake-v1", options={"is_slippery": False}, invalid_reward=-0.5)
    opening = called(environment, "reset", {}, 0)
    turns = [called(environment, "step", Reply(text=each)) for each in ("", "9", "1.5", "-1", "\x00" * 99, "1e99")]
    assert {(turn.reward, turn.done, turn.metrics["valid"]) for turn in turns} == {(-0.5, False, 0.0)}
    assert turns[0].messages[0]["content"] in opening.messages[0]["content"]
    assert called(environment, "step", Reply(text="1")).messages[0]["content"] == "4"
    called(environment, "close")


@engine
def test_the_seed_is_gymnasiums() -> None:
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    for seed in (0, 5):
        opening, _, _ = play(GymnasiumAdapter(id="CartPole-v1", prompt=""), [], seed=seed)
        expected, _ = env.reset(seed=seed)
        assert np.allclose(np.array(eval(opening.messages[0]["content"])), expected)
    env.close()


@engine
def test_a_box_takes_numbers_and_a_tuple_is_shown() -> None:
    environment = GymnasiumAdapter(id="Pendulum-v1")
    opening, turns, _ = play(environment, ["push with -1.5", "5"])
    assert "1" in opening.messages[0]["content"].splitlines()[0]
    assert [turn.metrics["valid"] for turn in turns] == [1.0, 0.0]  # 5 is outside of the space
    opening, _, _ = play(GymnasiumAdapter(id="Blackjack-v1", actions=["stick", "hit"]), ["stick"], seed=1)
    assert opening.messages[0]["content"].endswith("[20, 7, 0]")


@pytest.mark.parametrize(
    ("text", "count", "values"),
    [
        ("0.5 -0.25", 2, [0.5, -0.25]),
        (".5 -.25", 2, [0.5, -0.25]),
        ("[.5, -.25]", 2, [0.5, -0.25]),
        ("x=.5, y:-.25", 2, [0.5, -0.25]),
        ("+.5 1.", 2, [0.5, 1.0]),
        ("\u22120.5 0.5", 2, [-0.5, 0.5]),
        ("\u2013.5 \uff0d1", 2, [-0.5, -1.0]),
        ("1,234 5", 2, [1234, 5]),
        ("1,234", 1, [1234]),
        ("-1,234.5", 1, [-1234.5]),
        ("1\u202f234", 1, [1234]),
        ("1'234'567", 1, [1234567]),
        ("1,2", 2, [1, 2]),
        ("100,200", 2, [100, 200]),
        ("- 0.5\n- 0.25", 2, [0.5, 0.25]),
        ("In step 2 I choose **3**.", 1, [3]),
        ("\\boxed{7}", 1, [7]),
        ("1e-3", 1, [0.001]),
        ("0,5", 1, None),
        ("0,5 -0,25", 2, None),
        ("first 1,234 5 then", 1, None),
        ("0.5 - 0.25", 2, None),
        ("3-5", 1, None),
        ("1/2", 1, None),
        ("50%", 1, None),
        ("1_000", 1, None),
        ("0x10", 1, None),
        ("1.2.3", 1, None),
        ("level2", 1, None),
        ("1" * 40, 1, None),
        ("", 1, None),
    ],
)
def test_numbers_are_read_as_written_or_not_at_all(text: str, count: int, values: list[float] | None) -> None:
    assert numbers(text, count) == values


class Spaces:
    """An environment of a user with any action space, which keeps its actions."""

    def __init__(self, space: str) -> None:
        from gymnasium import spaces

        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = {
            "bytes": spaces.Box(0, 255, (1,), np.uint8),
            "floats": box,
            "tuple": spaces.Tuple((spaces.Discrete(3), box)),
            "dict": spaces.Dict({"turn": spaces.Discrete(3), "push": box, "say": spaces.Text(5)}),
            "sequence": spaces.Sequence(spaces.Discrete(3)),
            "text": spaces.Text(5),
        }[space]
        self.actions: list[Any] = []

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "go", {}

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert not hasattr(self.action_space, "n") or self.action_space.contains(action)
        self.actions.append(action)
        return "end", 0.0, False, False, {}


@engine
@pytest.mark.parametrize(
    ("space", "reply", "valid"),
    [
        ("bytes", "255", True),
        ("bytes", "-1", False),
        ("bytes", "300", False),
        ("floats", "1e-3 .5", True),
        ("floats", "1e99 .5", False),
        ("tuple", "I take [2, [0.5, -0.25]].", True),
        ("tuple", "[3, [0.5, -0.25]]", False),
        ("tuple", "[2, [0.5]]", False),
        ("tuple", "[2.5, [0.5, -0.25]]", False),
        ("tuple", "2 0.5 -0.25", False),
        ("dict", '```json\n{"turn": 1, "push": [0, 1e-3], "say": "hi"}\n```', True),
        ("dict", '{"turn": 1, "push": [0, 1]}', False),
        ("dict", '{"turn": 1, "push": ["a", 1], "say": "hi"}', False),
        ("dict", "turn left", False),
        ("sequence", "[1, 2]", False),
        ("text", "crane", True),
    ],
)
def test_an_action_is_contained_in_its_space(space: str, reply: str, valid: bool) -> None:
    environment = GymnasiumAdapter(make="test_gymnasium:Spaces", options={"space": space})
    _, (turn,), _ = play(environment, [reply])
    assert turn.metrics == {"valid": float(valid)}


@engine
def test_the_prompt_describes_spaces_of_several_parts() -> None:
    environment = GymnasiumAdapter(make="test_gymnasium:Spaces", options={"space": "dict"})
    opening = called(environment, "reset", {}, 0)
    assert mentions(opening.messages[0]["content"], "JSON", "turn", "push", "say")


@pytest.mark.engine("gem")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of cellpylib, at its first import
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_game_of_gem_is_played() -> None:
    environment = GymnasiumAdapter(make="gem:make", id="game:GuessTheNumber-v0-easy", options={"max_turns": 12})
    opening = called(environment, "reset", {}, 3)
    assert "number" in opening.messages[0]["content"]
    low, high, turns = environment.env.min_number, environment.env.max_number, []
    while not turns or not (turns[-1].done or turns[-1].truncated):
        guess = (low + high) // 2
        turns.append(called(environment, "step", Reply(text=f"I say \\boxed{{{guess}}}")))
        text = turns[-1].messages[0]["content"]
        low, high = (guess + 1, high) if "higher" in text else (low, guess - 1)
    called(environment, "close")
    assert turns[-1].done
    assert turns[-1].reward == 1


class Lines:
    """An environment of a user, without spaces. Raises where it is told."""

    def __init__(self, at: str = "") -> None:
        self.at = at
        self.closed = False

    def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        self._fail("reset")
        return {"seed": seed, "grid": np.eye(2, dtype=int)}, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._fail("step")
        return action.upper(), 0.25, action == "stop", True, {}

    def _fail(self, stage: str) -> None:
        if stage == self.at:
            raise ValueError("no such level")


def test_a_class_of_the_user_gets_texts() -> None:
    opening, turns, _ = play(GymnasiumAdapter(make="test_gymnasium:Lines"), ["stop"], seed=7)
    assert opening.messages[0]["content"] == '{"seed": 7, "grid": [[1, 0], [0, 1]]}'
    # Terminated and truncated at once is an end by the task.
    assert (turns[0].reward, turns[0].done, turns[0].truncated) == (0.25, True, False)


def shown(observation: Any) -> str:
    return f"seed {observation['seed']}" if isinstance(observation, dict) else observation


def first_word(text: str) -> str | None:
    return text.split()[0] if text.split() else None


def test_user_functions_show_observations_and_parse_actions() -> None:
    options = {
        "make": "test_gymnasium:Lines",
        "observation": "test_gymnasium:shown",
        "action": "test_gymnasium:first_word",
    }
    opening, turns, _ = play(GymnasiumAdapter(**options), ["", "go on"], seed=7)
    assert opening.messages[0]["content"] == "seed 7"
    assert [(turn.metrics["valid"], turn.messages[0]["content"]) for turn in turns][1] == (1.0, "GO")
    assert turns[0].metrics["valid"] == 0


@pytest.mark.parametrize(
    ("text", "action"),
    [("up", 0), ("go up left", 1), ("up-left", 2), ("+", 3), ("a + b", 3), ("upper", None), ("up, then UP LEFT.", 1)],
)
def test_an_action_is_the_longest_word_that_fits(text: str, action: int | None) -> None:
    environment = GymnasiumAdapter(make="test_gymnasium:Lines", actions=["up", "up left", "up-left", "+"])
    called(environment, "reset", {}, 0)
    assert environment._action(text) == action


@engine
def test_replies_with_more_words_than_actions_are_refused() -> None:
    with raises_error(WrappedError, "actions", "3", "2"):
        called(GymnasiumAdapter(id="CartPole-v1", actions=["left", "right", "stay"]), "reset", {}, 0)


@engine
def test_the_prompt_asks_for_all_numbers_of_a_space() -> None:
    from gymnasium import spaces

    for space, number in ((spaces.MultiBinary(3), 3), (spaces.Box(-1, 1, (2, 3)), 6), (spaces.Discrete(5), None)):
        environment = GymnasiumAdapter(make="test_gymnasium:Lines")
        called(environment, "reset", {}, 0)
        environment.space = space
        numbers = [int(word) for word in environment._instruction().rstrip(".").split() if word.isdigit()]
        assert numbers == ([0, 4] if number is None else [number])
        if number is not None:
            action = environment._action(" ".join(["1"] * number))
            assert space.contains(action)


@pytest.mark.parametrize("stage", ["reset", "step"])
def test_a_failure_names_the_class(stage: str) -> None:
    with pytest.raises(WrappedError, match=rf"test_gymnasium:Lines.*{stage}.*ValueError"):
        play(GymnasiumAdapter(make="test_gymnasium:Lines", options={"at": stage}), ["go"])


@engine
def test_a_failure_of_gymnasium_names_its_version() -> None:
    import gymnasium

    environment = GymnasiumAdapter(id="FrozenLake-v1")
    called(environment, "reset", {}, 0)
    environment.env = SimpleNamespace(unwrapped=environment.env.unwrapped, step=lambda action: 1 / 0)
    with raises_error(WrappedError, gymnasium.__version__, "FrozenLakeEnv", "ZeroDivisionError"):
        called(environment, "step", Reply(text="1"))


class Rendered:
    """An environment of a user whose `render` returns `frame`."""

    def __init__(self, *, frame: Any, render_mode: str | None = None) -> None:
        self.frame, self.render_mode = frame, render_mode
        self.action_space = SimpleNamespace(n=2)

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 1, 0.0, False, False, {}

    def render(self) -> Any:
        return np.asarray(self.frame) if self.render_mode == "rgb_array" else "text"


def make_picture(seed: int = 0) -> Any:
    return Image.new("RGB", (4, 2), (seed, 0, 0))


def as_picture(observation: int) -> Any:
    return make_picture(observation)


RED = np.full((2, 4, 3), [9, 0, 0], dtype=np.uint8)


def test_a_rendering_is_an_image_of_each_observation() -> None:
    environment = GymnasiumAdapter(make="test_gymnasium:Rendered", options={"frame": RED}, observation="image")
    opening, turns, _ = play(environment, ["1"])
    assert opening.messages[0]["content"] == f"{environment.instruction}\n{IMAGE}"
    assert turns[0].messages[0]["content"] == IMAGE
    for message in (opening.messages[0], turns[0].messages[0]):
        (media,) = received_message(message)["media"]
        assert np.array_equal(np.asarray(media.image()), RED)


def test_an_own_function_makes_an_image_of_an_observation() -> None:
    options = {"frame": RED}
    environment = GymnasiumAdapter(
        make="test_gymnasium:Rendered", options=options, observation="test_gymnasium:as_picture", prompt=""
    )
    opening, turns, _ = play(environment, ["1"])
    messages = [received_message(message) for message in (*opening.messages, *turns[0].messages)]
    assert [message["media"][0].image().getpixel((0, 0)) for message in messages] == [(0, 0, 0), (1, 0, 0)]


def test_a_rendering_without_pixels_is_an_error() -> None:
    options = {"frame": RED, "render_mode": "human"}
    with raises_error(WrappedError, "Rendered", "observation:", "rgb_array"):
        play(GymnasiumAdapter(make="test_gymnasium:Rendered", options=options, observation="image"), [])


@engine
def test_gymnasium_renders_its_environment_as_an_image() -> None:
    pytest.importorskip("pygame")
    environment = GymnasiumAdapter(id="CartPole-v1", observation="image", actions=["left", "right"])
    opening, _, _ = play(environment, ["left"])
    (media,) = received_message(opening.messages[0])["media"]
    assert (media.width, media.height) == (600, 400)
