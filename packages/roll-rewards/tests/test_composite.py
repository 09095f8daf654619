"""Weighted sums of rewards."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from roll_core.errors import RewardFailure
from roll_rewards import sandbox
from roll_rewards.composite import CLASSES, CompositeReward
from roll_rewards.config import CompositeConfig

NEEDS_ISOLATION = pytest.mark.skipif(bool(sandbox.probe()), reason=f"no isolation on this host: {sandbox.probe()}")


def composite(reward, **components):
    return reward(CompositeReward, CompositeConfig, "composite", components=components)


def test_value_is_the_weighted_sum_and_detail_has_the_parts(reward, requesting):
    made = composite(
        reward,
        right={"reward": "exact_match", "weight": 2.0},
        words={"reward": "f1"},
        style={"reward": "format", "format_pattern": "<answer>.*", "weight": 0.5},
        length={"reward": "length_penalty", "free_length": 0, "max_length": 2, "weight": 0.1},
    )
    found = made.score(requesting("<answer>red dog</answer>", ground_truth="dog"))
    # 2 · 0 + 2 · 1 / 3 + 0.5 · 1 + 0.1 · (-1 / 2)
    assert found.value == pytest.approx(2 / 3 + 0.5 - 0.05)
    assert dict(found.detail) == {
        "right": 0.0,
        "right/answer": "red dog",
        "words": pytest.approx(2 / 3),
        "words/answer": "red dog",
        "style": 1.0,
        "length": -0.5,
    }


def test_a_failed_component_fails_the_sample_and_is_named(reward, requesting):
    made = composite(
        reward, style={"reward": "format", "format_pattern": ".*"}, ask={"reward": "http", "url": "http://127.0.0.1:1/"}
    )
    with pytest.raises(RewardFailure) as caught:
        made.score(requesting("x"))
    assert str(caught.value).startswith("ask: ")


@NEEDS_ISOLATION
def test_programs_and_rewards_of_the_core_are_components(reward, requesting, tmp_path, monkeypatch):
    (tmp_path / "composite_function.py").write_text("def f(prompt, response): return len(response)")
    monkeypatch.chdir(tmp_path)
    made = composite(
        reward,
        code={"reward": "code", "case_timeout_s": 1},
        math={"reward": "math_rule", "ground_truth": "answer"},
        own={"reward": "function", "function": "composite_function:f", "weight": 0.001},
    )
    text = "```\nprint(3)\n```\nso \\boxed{\\frac{6}{2}}"
    found = made.score(requesting(text, test_cases=[{"input": "", "output": "3"}], answer="3"))
    assert found.value == pytest.approx(2 + len(text) / 1000)


def test_components_have_their_classes():
    union = CompositeConfig.model_json_schema()["properties"]["components"]["additionalProperties"]
    assert set(union["discriminator"]["mapping"]) == set(CLASSES)


@pytest.mark.parametrize(
    ("components", "location"),
    [
        ({}, ("components",)),
        ({"a": {"reward": "no_such"}}, ("components", "a")),
        ({"a": {"reward": "composite", "components": {}}}, ("components", "a")),
        ({"a": {"reward": "format"}}, ("components", "a", "format", "format_pattern")),
        ({"a": {"reward": "f1", "colour": 1}}, ("components", "a", "f1", "colour")),
        ({"a": {"reward": "f1", "max_retries": 9}}, ()),
        ({"a": {"reward": "f1", "timeout_s": 900}}, ()),
    ],
)
def test_components_that_cannot_work_are_errors(components, location):
    with pytest.raises(ValidationError) as caught:
        CompositeConfig.model_validate({"reward": "composite", "components": components})
    assert caught.value.errors()[0]["loc"] == location


def test_a_saved_config_loads_again():
    given = {"reward": "composite", "components": {"code": {"reward": "code", "reward_type": "soft"}}}
    config = CompositeConfig.model_validate(given)
    again = CompositeConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert again.components["code"].reward_type == "soft"
