"""Tasks of the real reasoning-gym."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers_environments import called, play

from roll_environments.reasoning_gym_adapter import ReasoningGym
from roll_environments.targets import WrappedError
from roll_testing import EnvironmentConformance

pytestmark = [
    pytest.mark.engine("reasoning_gym"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),  # of cellpylib, at its first import
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class TestChainSum(EnvironmentConformance):
    timeout_s = 120.0  # the first episode imports matplotlib

    def create(self) -> ReasoningGym:
        return ReasoningGym(dataset="chain_sum", options={"min_terms": 3, "max_terms": 5})

    def replies(self, seed: int) -> Sequence[str]:
        environment = self.create()
        called(environment, "reset", {}, seed)
        return environment.oracle()


@pytest.mark.parametrize("dataset", ["leg_counting", "family_relationships", "countdown", "zebra_puzzles", "sudoku"])
def test_datasets_are_asked_and_scored(dataset: str) -> None:
    for seed in range(3):
        environment = ReasoningGym(dataset=dataset)
        called(environment, "reset", {}, seed)
        _, (turn,), _ = play(ReasoningGym(dataset=dataset), environment.oracle(), seed=seed)
        assert (turn.reward, turn.done, turn.metrics["success"]) == (1.0, True, 1.0)


def test_the_score_is_that_of_the_dataset() -> None:
    import reasoning_gym

    data = reasoning_gym.create_dataset("countdown", size=1, seed=5)
    for answer in ("1 + 1", "no idea", data[0]["answer"]):
        _, (turn,), _ = play(ReasoningGym(dataset="countdown"), [f"So <answer>{answer}</answer>"], seed=5)
        assert turn.reward == data.score_answer(answer, data[0])
    _, (turn,), _ = play(ReasoningGym(dataset="countdown"), [str(data[0]["answer"])], seed=5)
    assert (turn.reward, turn.metrics["valid"]) == (0.0, 0.0)


def test_an_unknown_dataset_is_named() -> None:
    with pytest.raises(WrappedError, match="no_such_dataset"):
        play(ReasoningGym(dataset="no_such_dataset"), [])
