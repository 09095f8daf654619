"""Which prompts a step takes."""

from collections import Counter
from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from roll_core.errors import DataError
from roll_core.pipelines.prompt_order import PromptOrder, mean_counts
from roll_core.spec.pipeline import batch_counts
from roll_core.spec.rollout import Prompt
from roll_testing.errors import raises_error


def rows(**counts: int) -> list[Prompt]:
    return [
        Prompt(id=f"{tag}{i}", tokens=np.array([i]), text="", tag=tag)
        for tag, count in counts.items()
        for i in range(count)
    ]


def batch(order: PromptOrder, step: int) -> list[Prompt]:
    """What a step takes where nothing is left out."""
    *before, counts = islice(batch_counts(order.counts), step + 1)
    begins = sum(map(Counter, before), Counter())
    return [order.prompt(tag, begins[tag] + place) for tag, count in counts.items() for place in range(count)]


weights_by_tag = st.dictionaries(st.text(max_size=3), st.floats(0.001, 10), min_size=1, max_size=6)


@given(st.integers(1, 300), weights_by_tag)
def test_batches_keep_size_and_shares_within_one_group(size, weights):
    total, means = Counter(), mean_counts(size, weights)
    for step, counts in enumerate(islice(batch_counts(means), 30), start=1):
        assert sum(counts.values()) == size
        assert min(counts.values()) >= 0
        total.update(counts)
        shares = {tag: step * size * weight / sum(weights.values()) for tag, weight in weights.items()}
        assert all(abs(total[tag] - share) < 1.1 for tag, share in shares.items())


def test_domain_below_one_prompt_per_batch_is_in_some_batches():
    order = PromptOrder(rows(a=999, b=1), size=128, shares={}, seed=0)
    tags = Counter(prompt.tag for step in range(125) for prompt in batch(order, step))
    assert tags == {"a": 125 * 128 - 16, "b": 16}  # a thousandth of 16000


def test_equal_shares_reach_more_domains_than_batch_prompts():
    counts = islice(batch_counts(mean_counts(128, dict.fromkeys(map(str, range(200)), 1.0))), 25)
    assert set(sum(map(Counter, counts), Counter()).values()) == {25 * 128 // 200}


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 9))
def test_divisible_shares_are_equal_in_every_batch(counts, divisor):
    means = mean_counts(sum(counts.values()), {tag: number / divisor for tag, number in counts.items()})
    assert list(islice(batch_counts(means), 50)) == [counts] * 50


def test_domains_get_their_configured_share():
    order = PromptOrder(rows(a=50, b=50, c=50), size=10, shares={"a": 0.5, "b": 0.3, "c": 0.2}, seed=0)
    assert Counter(prompt.tag for prompt in batch(order, 0)) == {"a": 5, "b": 3, "c": 2}


def test_share_may_name_a_reward_of_several_tags():
    names = {"gsm8k": "math", "aime": "math", "kodcode": "code"}
    order = PromptOrder(
        rows(gsm8k=30, aime=10, kodcode=20, chat=5), size=8, shares={"math": 0.75, "code": 0.25}, seed=0, domains=names
    )
    tags = Counter(prompt.tag for step in range(20) for prompt in batch(order, step))
    assert tags["kodcode"] == 20 * 2
    assert tags["gsm8k"] + tags["aime"] == 20 * 6
    assert tags["aime"] == 30  # three epochs of the 40 rows of math
    assert "chat" not in tags


def test_a_share_by_tag_wins_over_the_domain_of_the_tag():
    order = PromptOrder(
        rows(gsm8k=9, aime=9),
        size=4,
        shares={"aime": 0.5, "math": 0.5},
        seed=0,
        domains={"gsm8k": "math", "aime": "math"},
    )
    assert Counter(prompt.tag for prompt in batch(order, 0)) == {"aime": 2, "gsm8k": 2}


def test_default_shares_are_proportional_to_domain_rows():
    order = PromptOrder(rows(a=30, b=10), size=8, shares={}, seed=0)
    assert Counter(prompt.tag for prompt in batch(order, 3)) == {"a": 6, "b": 2}


def test_epoch_visits_every_row_once_in_a_new_order():
    order = PromptOrder(rows(a=12), size=4, shares={}, seed=0)
    epochs = [[p for step in range(3 * e, 3 * e + 3) for p in batch(order, step)] for e in range(2)]
    names = [[prompt.id.split("/")[0] for prompt in epoch] for epoch in epochs]
    assert sorted(names[0]) == sorted(names[1]) == sorted(f"a{i}" for i in range(12))
    assert names[0] != names[1]
    assert {prompt.id.split("/")[1] for prompt in epochs[1]} == {"1"}


def test_batch_larger_than_the_data_has_unique_ids():
    ids = [prompt.id for prompt in batch(PromptOrder(rows(a=3), size=8, shares={}, seed=0), 0)]
    assert len(set(ids)) == 8


def test_the_prompt_at_a_position_depends_on_nothing_before_it():
    one, other = (PromptOrder(rows(a=20, b=5), size=6, shares={}, seed=7) for _ in range(2))
    assert [p.id for p in batch(one, 9)] == [p.id for p in batch(other, 9)]


def test_a_share_for_a_tag_without_rows_names_the_tags_there_are():
    with raises_error(DataError, "'x'", "'a'", "'b'"):
        PromptOrder(rows(a=1, b=1), size=2, shares={"x": 1.0}, seed=0)


def test_rows_without_a_share_are_named_and_counted(caplog):
    order = PromptOrder(rows(a=2, b=3, c=4), size=2, shares={"a": 1.0, "c": 0.0}, seed=0)
    assert list(order.rows) == ["a"]
    (record,) = caplog.records
    assert record.args == ("domain_interleave_probs", "'b'", 3, 9)
    caplog.clear()
    PromptOrder(rows(a=2, b=3), size=2, shares={}, seed=0)
    assert not caplog.records


def test_shares_that_are_all_zero_are_refused():
    with raises_error(DataError, "0"):
        PromptOrder(rows(a=1), size=2, shares={"a": 0.0}, seed=0)


def test_row_of_a_prompt_is_equal_in_every_epoch():
    order = PromptOrder(rows(a=5), size=5, shares={}, seed=0)
    passes = [[order.prompt("a", 5 * number + at) for at in range(5)] for number in range(3)]
    for number, prompts in enumerate(passes):
        assert {prompt.row for prompt in prompts} == {f"a{i}" for i in range(5)}
        assert all(prompt.id == f"{prompt.row}/{number}" for prompt in prompts)
