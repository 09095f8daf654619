"""Dynamic sampling: which groups are worth training on."""

import numpy as np
import pytest
from pydantic import ValidationError

from roll_core.pipelines.prompt_order import domains, group_filter, passes
from roll_core.spec.config import QueryFilterConfig, RewardConfig
from roll_core.types import Group, Reward, Sample
from roll_testing.errors import raises_error


def group(*values, tag=""):
    samples = tuple(
        Sample(
            id=str(i),
            group_id="g",
            prompt_ids=np.array([1]),
            response_ids=np.array([1]),
            logprobs=np.zeros(1, dtype=np.float32),
            loss_mask=np.ones(1, dtype=bool),
            versions=np.zeros(1, dtype=np.int32),
            finish_reason="stop",
            tag=tag,
            reward=Reward(value=None, failure="broken") if value is None else Reward(value=value),
        )
        for i, value in enumerate(values)
    )
    return Group(id="g", samples=samples)


def config(kind, **args):
    return QueryFilterConfig(type=kind, filter_args=args)


MEAN = config("mean_filter", threshold_down=0.25, threshold_up=0.75)
STD = config("std_filter", std_threshold=0.5)


@pytest.mark.parametrize(
    ("found", "chosen", "kept"),
    [
        (group(0, 1), MEAN, True),
        (group(0, 0, 0, 1), MEAN, False),  # exactly at the lower threshold
        (group(1, 1, 1, 0), MEAN, False),
        (group(0, 0, 0, 0), MEAN, False),
        (group(0, 1, None, None), MEAN, True),  # failures are no zeros
        (group(None, None), MEAN, False),
        (group(None, None), config("no_filter"), True),
        (group(0), MEAN, True),
        (group(None), MEAN, False),
        (group(0, 1), STD, True),  # unbiased: 0.707; the biased one is 0.5
        (group(0, 0.5), STD, False),
        (group(1, 1, 1), STD, False),
        (group(1, None), STD, False),  # one value has no spread
        (group(1), STD, True),
    ],
)
def test_groups_pass_by_their_rewards_alone(found, chosen, kept):
    assert passes(found, chosen) is kept


def test_filters_apply_per_domain_or_to_every_tag():
    math = RewardConfig(reward="r", query_filter_config=MEAN)
    code = RewardConfig(reward="r", tag_included=["python"])
    keep = group_filter({"math": math, "code": code})
    assert not keep(group(0, 0, tag="math"))
    assert keep(group(0, 0, tag="code"))
    assert keep(group(0, 0, tag="python"))
    assert not group_filter({"math": math})(group(0, 0, tag="anything"))


def test_groups_that_no_reward_scores_are_kept():
    rewards = {name: RewardConfig(reward="function", query_filter_config=MEAN) for name in ("math", "code")}
    keep = group_filter(rewards)
    assert keep(group(1, 1, tag="an_environment"))
    assert not keep(group(1, 1, tag="math"))


def test_a_band_in_which_nothing_lies_is_refused():
    with raises_error(ValidationError, "threshold_down", "0.8", "threshold_up", "0.2"):
        config("mean_filter", threshold_down=0.8, threshold_up=0.2)


def test_domain_of_a_tag_is_the_reward_entry_that_scores_it():
    rewards = {"math": RewardConfig(reward="r", tag_included=["aime"]), "code": RewardConfig(reward="r")}
    assert domains(rewards, ["math", "aime", "code", "chat"]) == {"math": "math", "aime": "math", "code": "code"}
    assert domains({"math": rewards["math"]}, ["chat", ""]) == {"chat": "math", "": "math"}
