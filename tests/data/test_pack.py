"""Packing loses, doubles and reorders nothing; denominators and balance are what they say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.data.pack import balance, count_totals, pack, pack_evenly, rollouts, units
from roll_core.errors import DataError
from roll_core.pipelines.prompt_order import RowOrder
from roll_core.types import Totals, TrainSequence
from roll_testing.errors import raises_error


def sequence(name, length, masked=1, group=0, **fields):
    return TrainSequence(
        id=name,
        tokens=np.arange(length) + 100 * int(name),
        loss_mask=np.arange(length) >= max(1, length - masked),
        group=group,
        **fields,
    )


def test_a_microbatch_by_hand():
    rows = [
        sequence("1", 3, masked=2, group=4, advantages=np.array([0, 0.5, 0.25], np.float32)),
        sequence("2", 1, masked=0, group=5, advantages=np.array([9], np.float32)),
        sequence("3", 2, masked=1, group=4, advantages=np.array([0, -1], np.float32)),
    ]
    (micro,) = pack(rows)
    assert micro.ids == ("1", "2", "3")
    assert micro.tokens_T.tolist() == [100, 101, 102, 200, 300, 301]
    assert micro.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert micro.segments_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert micro.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert micro.lengths == (3, 1, 2)
    assert micro.loss_mask_T.tolist() == [False, True, True, False, False, True]
    assert micro.advantages_T.tolist() == [0, 0.5, 0.25, 9, 0, -1]
    assert micro.old_logprobs_T is None
    assert micro.totals == Totals(tokens=3, sequences=2, rollouts=2, groups=1, max_length=1)
    assert (micro.tokens_T.dtype, micro.cu_seqlens.dtype) == (torch.int64, torch.int32)


def test_no_sequences_make_no_microbatches():
    assert pack([]) == []
    assert count_totals([], max_length=7) == Totals(tokens=0, sequences=0, rollouts=0, groups=0, max_length=7)
    assert balance([], 3) == [[], [], []]


def test_rows_of_a_rollout_and_rollouts_of_a_unit_stay_together():
    rows = [
        sequence("1", 2, rollout=5),
        sequence("2", 2),
        sequence("3", 2, rollout=0, unit=1),
        sequence("4", 2, rollout=5),
        sequence("5", 2, unit=1),
        sequence("6", 2, rollout=0, unit=1),
    ]
    assert rollouts(rows) == [[0, 3], [1], [2, 4, 5]]
    with raises_error(DataError, "7", "5", "unit 1"):
        rollouts([*rows, sequence("7", 2, rollout=5, unit=1)])


def test_rollouts_units_and_streams_by_hand():
    rows = [
        sequence("1", 3, masked=2, rollout=7, streams={"nll": np.array([0, 1, 0.5], np.float32)}),
        sequence("2", 2, masked=1),
        sequence("3", 2, masked=0, rollout=4, unit=0),
        sequence("4", 4, masked=3, rollout=7, unit=0, streams={"aux": np.array([0, 2, 2, 0], np.float32)}),
    ]
    denominators = count_totals(rows)
    assert (denominators.sequences, denominators.rollouts, denominators.tokens) == (3, 2, 6)
    assert denominators.rollout_tokens == {7: 5, 4: 0}
    assert denominators.streams == {"nll": 1.5, "aux": 4.0}
    first, second = pack(rows, max_sequences=2)
    assert (first.ids, second.ids) == (("1", "2"), ("3", "4"))
    assert first.rollouts_S.tolist() == [7, -2]
    assert second.rollouts_S.tolist() == [4, 7]
    assert first.rollout_tokens_S.tolist() == [5, 1]  # also those of the second microbatch
    assert second.rollout_tokens_S.tolist() == [0, 5]
    assert first.units_S.tolist() == [-1, -2]
    assert second.units_S.tolist() == [0, 0]
    assert first.streams["nll"].tolist() == [0, 1, 0.5, 0, 0]
    assert first.streams["aux"].tolist() == [0] * 5
    assert second.streams["aux"].tolist() == [0, 0, 0, 2, 2, 0]
    assert second.streams["nll"].dtype is torch.float32
    moved = second.to("meta")
    assert moved.streams["nll"].is_meta
    assert moved.rollout_tokens_S.is_meta


@given(
    rows=st.lists(st.tuples(st.integers(1, 20), st.none() | st.integers(0, 6)), max_size=24),
    limits=st.tuples(st.integers(1, 40), st.none() | st.integers(1, 6), st.integers(1, 4), st.integers(1, 5)),
)
def test_units_are_not_split_over_ranks_and_respect_the_limits(rows, limits):
    max_tokens, max_sequences, multiple, ranks = limits
    made = [sequence(str(i), length, unit=unit) for i, (length, unit) in enumerate(rows)]
    tuples = {tuple(made[i].id for i in unit) for unit in units(made)}
    shares = balance(made, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(made)))
    for share in shares:
        inside = {made[i].id for i in share}
        assert all(inside.issuperset(unit) or inside.isdisjoint(unit) for unit in tuples)
    for micros in (
        pack(made, max_tokens=max_tokens, max_sequences=max_sequences),
        pack_evenly(made, max_tokens=max_tokens, multiple=multiple),
    ):
        assert sorted(name for micro in micros for name in micro.ids) == sorted(each.id for each in made)
        for micro in micros:
            inside = [unit for unit in tuples if set(unit) & set(micro.ids)]
            assert sum(map(len, inside)) == micro.num_sequences
            for unit in inside:  # adjacent
                at = micro.ids.index(unit[0])
                assert micro.ids[at : at + len(unit)] == unit
            assert micro.num_tokens <= max_tokens or len(inside) == 1


def test_given_ids_are_concatenated_and_checked():
    rows = [sequence(str(n), n, gather_ids=np.arange(3 * n).reshape(n, 3)) for n in (1, 2)]
    (micro,) = pack(rows)
    assert micro.gather_ids_TK.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert micro.gather_ids_TK.dtype is torch.int64
    for bad in (sequence("777", 2), sequence("777", 2, gather_ids=np.zeros((2, 4), np.int64))):
        with raises_error(DataError, "777", "gather_ids"):
            pack([*rows, bad])
    for shape in ((2,), (3, 3)):
        with raises_error(DataError, "777", "gather_ids", str(shape)):
            pack([sequence("777", 2, gather_ids=np.zeros(shape, np.int64))])


def test_sequence_over_the_budget_gets_its_own_microbatch():
    micros = pack([sequence("1", 2), sequence("2", 9), sequence("3", 2), sequence("4", 2)], max_tokens=4)
    assert [micro.ids for micro in micros] == [("1",), ("2",), ("3", "4")]


@given(
    lengths=st.lists(st.integers(1, 20), max_size=30),
    max_tokens=st.none() | st.integers(1, 40),
    max_sequences=st.none() | st.integers(1, 6),
)
def test_packing_keeps_every_token_in_order_within_the_limits(lengths, max_tokens, max_sequences):
    rows = [sequence(str(i), length) for i, length in enumerate(lengths)]
    micros = pack(rows, max_tokens=max_tokens, max_sequences=max_sequences)
    tokens = [token for micro in micros for token in micro.tokens_T.tolist()]
    assert tokens == [token for row in rows for token in row.tokens.tolist()]
    for micro in micros:
        assert micro.num_sequences > 0
        assert max_sequences is None or micro.num_sequences <= max_sequences
        assert max_tokens is None or micro.num_tokens <= max_tokens or micro.num_sequences == 1
        assert micro.totals == count_totals(rows)


@pytest.mark.parametrize(
    ("lengths", "multiple", "ids"),
    [
        ([4, 4, 1, 1], 1, [("0", "2"), ("1", "3")]),
        ([7, 3, 2, 2], 1, [("0",), ("1", "2", "3")]),
        ([2, 2, 2, 2], 2, [("0", "2"), ("1", "3")]),
        ([2, 2, 2, 2], 3, [("0", "3"), ("1",), ("2",)]),
        ([9, 2, 1], 1, [("0",), ("1", "2")]),
        ([9, 2, 1], 4, [("0",), ("1",), ("2",)]),
        ([], 2, []),
    ],
)
def test_microbatches_of_a_budget_of_8_by_hand(lengths, multiple, ids):
    rows = [sequence(str(i), length) for i, length in enumerate(lengths)]
    assert [each.ids for each in pack_evenly(rows, max_tokens=8, multiple=multiple)] == ids


@given(lengths=st.lists(st.integers(1, 20), max_size=30), max_tokens=st.integers(1, 40), multiple=st.integers(1, 4))
def test_microbatches_are_even_and_keep_to_the_budget(lengths, max_tokens, multiple):
    rows = [sequence(str(i), length) for i, length in enumerate(lengths)]
    micros = pack_evenly(rows, max_tokens=max_tokens, multiple=multiple)
    assert sorted((name for micro in micros for name in micro.ids), key=int) == [row.id for row in rows]
    assert len(micros) % multiple == 0 or len(micros) == len(rows)
    for micro in micros:
        assert micro.num_tokens <= max_tokens or micro.num_sequences == 1
        assert micro.totals == count_totals(rows)
        # What a microbatch has more than another is at most the shortest of its sequences.
        assert micro.num_tokens - min(micro.lengths) <= min(each.num_tokens for each in micros)


@pytest.mark.parametrize(
    ("bad", "facts"),
    [
        (TrainSequence(id="x", tokens=np.arange(0), loss_mask=np.zeros(0, np.bool_)), ("x", "tokens")),
        (
            TrainSequence(id="x", tokens=np.arange(2), loss_mask=np.ones(2, np.bool_)),
            ("x", "loss"),
        ),
        (TrainSequence(id="x", tokens=np.arange(2), loss_mask=np.zeros(3, np.bool_)), ("loss_mask", "3")),
        (sequence("1", 2, streams={"nll": np.ones(3, np.float32)}), ("nll", "3")),
        (sequence("1", 2, streams={"nll": np.ones(2, np.float32)}), ("1", "nll[0]")),
    ],
)
def test_sequences_that_make_no_sense_are_named(bad, facts):
    with raises_error(DataError, *facts):
        pack([bad])


def test_a_field_that_only_some_sequences_have_is_named():
    with raises_error(DataError, "sequence 2", "sequence 1"):
        pack([sequence("1", 2, values=np.zeros(2, np.float32)), sequence("2", 2)])


@given(lengths=st.lists(st.integers(1, 1000), max_size=60), ranks=st.integers(1, 8))
def test_balance_assigns_every_sequence_to_one_rank(lengths, ranks):
    rows = [sequence(str(i), length) for i, length in enumerate(lengths)]
    shares = balance(rows, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(rows)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[i] for i in share) for share in shares]
    # What came last to the fullest rank, its shortest, came when no other rank had less.
    fullest = max(range(ranks), key=loads.__getitem__)
    assert loads[fullest] - min((lengths[i] for i in shares[fullest]), default=0) <= min(loads)


@given(num_rows=st.integers(1, 40), seed=st.integers(0, 2**32), size=st.integers(1, 50), step=st.integers(0, 20))
def test_row_order_visits_every_row_once_per_epoch(num_rows, seed, size, step):
    order = RowOrder(num_rows, seed)
    straight = [row for at in range(step + 1) for row in order.batch(at, size)]
    assert RowOrder(num_rows, seed).batch(step, size) == straight[-size:]
    for epoch in range(len(straight) // num_rows):
        assert sorted(straight[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


def test_row_order_differs_by_seed_and_epoch():
    order = RowOrder(100, 1)
    assert order.batch(0, 100) != order.batch(1, 100)
    assert order.batch(0, 100) != RowOrder(100, 2).batch(0, 100)
    assert RowOrder(5, 1, shuffle=False).batch(1, 3) == [3, 4, 0]


def test_an_order_of_no_rows_is_refused():
    with raises_error(DataError):
        RowOrder(0, 1)
