"""Trees of turns as training rows: every sampled token is trained once, and prefixes are those of the turns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.data.rollouts import rows, sample_of_rollout, sequences_of, tokens_of
from roll_core.errors import DataError
from roll_core.types import Reward, Rollout, TurnRecord


def turn(read: list[int], sampled: list[int], parent: int | None = None, *, masked: bool = False) -> TurnRecord:
    return TurnRecord(
        parent=parent,
        context_ids=np.array(read, dtype=np.int64),
        sampled_ids=np.array(sampled, dtype=np.int64),
        logprobs=np.array([-each / 100 for each in sampled], dtype=np.float32),
        versions=np.full(len(sampled), 3, dtype=np.int32),
        loss_mask=np.full(len(sampled), not masked, dtype=np.bool_),
        finish_reason="stop",
    )


TREE = Rollout(turns=(turn([1, 2], [10, 11]), turn([3], [12], 0), turn([4, 5], [13, 14], 0), turn([6], [15], None)))


def test_a_row_ends_at_each_turn_that_no_turn_continues() -> None:
    first, second, third = rows(TREE)
    assert first.tokens.tolist() == [1, 2, 10, 11, 3, 12]
    assert first.loss_mask.tolist() == [False, False, True, True, False, True]
    assert second.tokens.tolist() == [1, 2, 10, 11, 4, 5, 13, 14]
    assert second.loss_mask.tolist() == [False] * 6 + [True, True]
    assert second.turns.tolist() == [0, 0, 0, 0, 2, 2, 2, 2]
    assert second.versions.tolist() == [-1, -1, 3, 3, -1, -1, 3, 3]
    assert second.logprobs[2:4] == pytest.approx([-0.10, -0.11])
    assert third.tokens.tolist() == [6, 15]


def test_a_transcript_has_all_turns_in_order() -> None:
    sample = sample_of_rollout(TREE, id="a/0", group_id="a", finish_reason="stop", reward=Reward(value=1.0))
    assert sample.prompt_ids.tolist() == [1, 2]
    assert sample.response_ids.tolist() == [10, 11, 3, 12, 4, 5, 13, 14, 6, 15]
    assert sample.loss_mask.tolist() == [True, True, False, True, False, False, True, True, False, True]
    assert [row.id for row in sequences_of(sample, group=4, rollout=7)] == ["a/0#0", "a/0#1", "a/0#2"]
    assert {(row.group, row.rollout) for row in sequences_of(sample, group=4, rollout=7)} == {(4, 7)}


def test_a_rollout_without_turns_is_an_empty_sample() -> None:
    sample = sample_of_rollout(Rollout(turns=()), id="a/0", group_id="a", finish_reason="stop")
    assert len(sample.prompt_ids) == len(sample.response_ids) == len(sample.versions) == 0


@st.composite
def trees(draw: st.DrawFn) -> Rollout:
    """Any tree whose sampled tokens are all different."""
    turns: list[TurnRecord] = []
    names = iter(range(100, 10_000))
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        read = draw(st.lists(st.integers(1, 9), min_size=parent is None, max_size=3))
        sampled = [next(names) for _ in range(draw(st.integers(1, 3)))]
        turns.append(turn(read, sampled, parent, masked=draw(st.booleans())))
    return Rollout(turns=tuple(turns))


@given(trees())
def test_every_sampled_token_is_trained_once_on_its_own_prefix(tree: Rollout) -> None:
    found = rows(tree)
    trained = [
        (int(token), tuple(row.tokens[:at].tolist()))
        for row in found
        for at, token in enumerate(row.tokens)
        if row.loss_mask[at]
    ]
    expected = []
    for index, each in enumerate(tree.turns):
        whole = tokens_of(tree, index)
        begin = len(whole) - len(each.sampled_ids)
        expected += [
            (int(whole[at]), tuple(whole[:at].tolist())) for at in range(begin, len(whole)) if each.loss_mask.all()
        ]
    assert sorted(trained) == sorted(expected)
    for row in found:
        assert all(tree.turns[index].logprobs is not None for index in set(row.turns.tolist()))
        sampled = row.versions >= 0
        assert row.logprobs[sampled] == pytest.approx(-row.tokens[sampled] / 100)


def test_a_parent_that_is_no_earlier_turn_is_an_error() -> None:
    with pytest.raises(DataError):
        rows(Rollout(turns=(turn([1], [2], 1), turn([1], [2], 0))))
