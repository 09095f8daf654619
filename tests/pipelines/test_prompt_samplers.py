"""Rows that samplers choose, and shares of domains that change with the step."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.errors import CheckpointMismatchError, ContractError, DataError
from roll_core.pipelines.prompt_order import PromptOrder, SampledOrder
from roll_core.pipelines.prompt_samplers import PassRateSampler
from roll_core.spec.pipeline import batch_counts
from roll_core.spec.rollout import Prompt, PromptSampler
from roll_core.types import Group, Reward, Sample
from roll_testing.errors import raises_error


def rows(rates, tag=""):
    return [
        Prompt(id=f"{tag}{i}", tokens=np.array([i]), text="", tag=tag, metadata={"pass_rate": rate})
        for i, rate in enumerate(rates)
    ]


def order(prompts, **options):
    return SampledOrder(lambda: PassRateSampler(**options), prompts, size=4, shares={}, seed=3)


def group(prompt, scores):
    samples = [
        Sample(
            id=f"{prompt.id}/{i}", group_id=prompt.id, prompt_ids=prompt.tokens, response_ids=np.array([1]),
            logprobs=np.zeros(1, np.float32), loss_mask=np.ones(1, bool), versions=np.zeros(1, np.int32),
            finish_reason="stop", tag=prompt.tag, metadata={}, reward=Reward(value=score),
        )
        for i, score in enumerate(scores)
    ]  # fmt: skip
    return Group(id=prompt.id, samples=tuple(samples))


rates = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0])), min_size=1, max_size=12)


@given(rates)
def test_a_pass_has_each_row_of_the_window_once(given_rates):
    inside = {i for i, rate in enumerate(given_rates) if rate is None or 0 < rate < 1}
    sampler = PassRateSampler(revisit=0)
    sampler.start(rows(given_rates), seed=1)
    for epoch in range(3 if inside else 0):
        chosen = [sampler.choose(epoch * len(inside) + i) for i in range(len(inside))]
        assert sorted(chosen) == sorted(inside)


def test_without_a_row_in_the_window_the_next_is_taken():
    sampler = PassRateSampler(revisit=0)
    sampler.start(rows([0.0, 1.0]), seed=1)
    assert sorted(sampler.choose(i) for i in range(2)) == [0, 1]


def test_measured_rates_replace_those_of_the_column():
    sampler = PassRateSampler(revisit=0, momentum=0.5)
    sampler.start(rows([0.5, 0.5]), seed=1)
    sampler.observe(0, [1, 1, 1, 1])
    assert sampler.pass_rate(0) == 0.75  # half of each
    sampler.observe(1, [])  # all rewards failed
    assert sampler.pass_rate(1) == 0.5
    sampler.momentum = 0
    sampler.observe(0, [1, 1])
    assert {sampler.choose(i) for i in range(4)} == {1}
    assert sampler.metrics() == {"measured_share": 1, "inside_share": 0.5}


def test_revisited_rows_are_a_share_of_those_outside():
    sampler = PassRateSampler(revisit=0.25)
    sampler.start(rows([0.5] * 100 + [0.0] * 100), seed=1)
    chosen = Counter(sampler.choose(i) >= 100 for i in range(10_000))
    assert 0.17 < chosen[True] / 10_000 < 0.23  # 25 of 125, with a standard deviation of about 0.4 points


def test_a_restored_order_continues_with_the_same_prompts():
    def play(steps, order, begin=0):
        ids = []
        for position in range(begin, begin + steps):
            prompt = order.prompt("", position)
            order.observe("", group(prompt, [position % 3 == 0, position % 5 == 0]))
            ids.append(prompt.id)
        return ids

    prompts = rows([None] * 7)
    whole, half = order(prompts), order(prompts)
    expected = play(60, whole)
    play(25, half)
    restored = order(prompts)
    restored.load_state("", json.loads(json.dumps(half.state(""))))
    assert play(35, restored, 25) == expected[25:]
    assert len(set(expected)) == 60  # ids are unique, requests get their seeds from them
    assert restored.restore("", expected[0]).tokens == prompts[int(expected[0].partition("/")[0])].tokens
    with raises_error(CheckpointMismatchError, "8"):
        order(rows([None] * 8)).load_state("", half.state(""))


def test_missing_pass_rates_are_not_measured():
    assert [rates.pass_rate(0) for rates in order(rows([float("nan")])).samplers.values()] == [None]
    assert [rates.is_inside(0) for rates in order(rows([float("nan")])).samplers.values()] == [True]


def test_a_damaged_pass_rate_is_located():
    with raises_error(DataError, "row 1", "pass_rate"):
        order(rows([0.5, "many"]))


def test_an_index_out_of_range_is_located():
    class Wrong(PromptSampler):
        def start(self, rows, seed):
            pass

        def choose(self, position):
            return -1

    wrong = SampledOrder(Wrong, rows([1.0]), size=1, shares={}, seed=0)
    with raises_error(ContractError, "Wrong", "-1"):
        wrong.prompt("", 0)


def test_shares_are_linear_between_scheduled_steps():
    prompts = [*rows([None] * 5, "easy"), *rows([None] * 5, "hard")]
    schedule = {0: {"easy": 1}, 4: {"easy": 1, "hard": 3}, 8: {"hard": 5}}
    scheduled = PromptOrder(prompts, size=16, shares={}, seed=0, schedule=schedule)
    counts = list(islice(batch_counts(scheduled.counts, scheduled.counts_at), 11))
    # From 1 to a quarter in steps 0 to 4, then to 0 in step 8.
    assert [step["easy"] for step in counts] == [16, 13, 10, 7, 4, 3, 2, 1, 0, 0, 0]
    assert all(sum(step.values()) == 16 for step in counts)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_scheduled_batches_keep_their_size(size):
    prompts = [*rows([None], "a"), *rows([None], "b"), *rows([None], "c")]
    schedule = {0: {"a": 0.3, "b": 0.7}, 7: {"c": 1.0}, 20: {"a": 1.0, "c": 2.0}}
    scheduled = PromptOrder(prompts, size=size, shares={}, seed=0, schedule=schedule)
    total = Counter()
    expected = Counter()
    for step, counts in enumerate(islice(batch_counts(scheduled.counts, scheduled.counts_at), 40)):
        total.update(counts)
        expected.update(scheduled.counts_at(step))
        assert sum(counts.values()) == size
        assert all(abs(total[tag] - expected[tag]) < 1.5 for tag in "abc")
