"""Environment `rewarded_task`: episodes that a reward scores."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from roll_core.errors import DataError
from roll_core.plugins.registry import load_registry
from roll_core.spec.environment import Reply
from roll_core.spec.providers import EnvironmentProvider
from roll_rewards import sandbox
from roll_rewards.config import RewardedTaskConfig
from roll_rewards.task import RewardedTask

NEEDS_ISOLATION = pytest.mark.skipif(bool(sandbox.probe()), reason=f"no isolation on this host: {sandbox.probe()}")
TASK = {
    "id": "7",
    "prompt": "Double a number.",
    "test_cases": [{"input": "2", "output": "4"}, {"input": "3", "output": "6"}],
}


def environment(**options):
    return RewardedTask(**RewardedTaskConfig.model_validate(options).model_dump(mode="json"))


@NEEDS_ISOLATION
def test_episode_of_programs_ends_with_full_marks():
    episode = environment(reward={"reward": "code", "reward_type": "soft", "weight": 2.0}, max_attempts=3)
    assert episode.reset(TASK, 0).messages == [{"role": "user", "content": "Double a number."}]
    first = episode.step(Reply(text="```\nprint(int(input()) ** 2)\n```"))
    assert (first.done, first.metrics) == (False, {"full_marks": 0.0})
    assert "test 2 of 2" in first.messages[0]["content"]
    assert episode.score().value == 1.0  # one of two tests, weight 2
    second = episode.step(Reply(text="```\nprint(int(input()) * 2)\n```"))
    assert (second.done, second.metrics) == (True, {"full_marks": 1.0})
    assert episode.score().value == 2.0
    episode.close()


def test_the_last_attempt_ends_the_episode():
    episode = environment(reward={"reward": "exact_match"}, max_attempts=2)
    episode.reset({"messages": [{"role": "user", "content": "Who?"}], "ground_truth": "me"}, 0)
    assert not episode.step(Reply(text="you")).done
    assert episode.step(Reply(text="they")).done
    assert episode.score().value == 0.0


def test_a_failure_of_the_reward_fails_the_episode():
    episode = environment(reward={"reward": "exact_match"})
    with pytest.raises(DataError):
        episode.reset({"other": 1}, 0)
    episode.reset({"prompt": "Who?"}, 0)
    with pytest.raises(DataError):
        episode.step(Reply(text="me"))


def test_a_reward_of_tokens_is_refused():
    penalty = {"reward": "length_penalty", "free_length": 1, "max_length": 2}
    for reward in (penalty, {"reward": "composite", "components": {"a": penalty}}):
        with pytest.raises(ValidationError):
            RewardedTaskConfig.model_validate({"reward": reward})


def test_the_environment_is_listed():
    registry = load_registry()
    assert "roll-rewards" in registry.owner(registry.find(EnvironmentProvider, "rewarded_task"))
