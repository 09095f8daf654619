"""Logprobs of a teacher that rows store: wrong ones are errors with row and column."""

import math

import numpy as np
import pytest

from roll_core.data.rows import Rows
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments
from roll_core.types import TrainSequence
from roll_pipeline_distill.stored import check_stored, with_stored
from roll_testing.errors import raises_error

HALF, QUARTER = math.log(0.5), math.log(0.25)
ROW = {"prompt": "1", "teacher_ids": [[3, 1], [0, 2]], "teacher_logprobs": [[HALF, QUARTER], [QUARTER, QUARTER]]}
NAMES = ("teacher_ids", "teacher_logprobs")


def rows_of(*values):
    return Rows([("rows.jsonl", list(values))], DataArguments())


def sequences(*masks):
    return [
        TrainSequence(id=str(at), tokens=np.arange(len(mask)), loss_mask=np.array(mask, dtype=bool))
        for at, mask in enumerate(masks)
    ]


def test_ids_and_logprobs_are_at_the_trained_tokens():
    (found,) = with_stored(sequences([0, 0, 1, 1]), rows_of(ROW), ids=NAMES[0], logprobs=NAMES[1], vocab_size=4)
    assert found.gather_ids.tolist() == [[0, 0], [0, 0], [3, 1], [0, 2]]
    assert found.teacher_logprobs.tolist() == [
        [0, 0],
        [0, 0],
        pytest.approx([HALF, QUARTER]),
        pytest.approx([QUARTER, QUARTER]),
    ]


@pytest.mark.parametrize(
    ("column", "value", "facts"),
    [
        ("teacher_ids", [[3, 1]], ("teacher_logprobs", "(1, 2)", "(2, 2)")),
        ("teacher_ids", [[3, 1], [0]], ("teacher_ids", 1, 2)),
        ("teacher_ids", "3 1", ("teacher_ids",)),
        ("teacher_ids", None, ("teacher_ids",)),
        ("teacher_ids", [], ("teacher_ids",)),
        ("teacher_ids", [3, 1], ("teacher_ids",)),
        ("teacher_ids", [[3.5, 1.0], [0.0, 2.0]], ("teacher_ids",)),
        ("teacher_ids", [[3, 3], [0, 2]], ("teacher_ids", 3)),
        ("teacher_ids", [[3, -1], [0, 2]], ("teacher_ids", -1)),
        ("teacher_logprobs", [[0.5, 0.25], [0.25, 0.25]], ("teacher_logprobs", 0.5)),
        ("teacher_logprobs", [[HALF, HALF], [HALF, -0.1]], ("teacher_logprobs", -0.1)),
        ("teacher_logprobs", [[HALF, -math.inf], [HALF, QUARTER]], ("teacher_logprobs",)),
        ("teacher_logprobs", [["a", "b"], ["c", "d"]], ("teacher_logprobs",)),
    ],
)
def test_wrong_columns_are_errors_of_their_row(column, value, facts):
    with raises_error(DataError, "rows.jsonl row 2", *facts):
        check_stored(rows_of(ROW, ROW | {column: value}), *NAMES)


def test_every_row_has_the_same_number_of_ids():
    one = ROW | {"teacher_ids": [[3], [1]], "teacher_logprobs": [[HALF], [HALF]]}
    with raises_error(DataError, "rows.jsonl row 2", "rows.jsonl row 1", 1, 2):
        check_stored(rows_of(ROW, one), *NAMES)


def test_a_missing_column_is_named():
    with raises_error(DataError, "teacher_tokens"):
        check_stored(rows_of(ROW), "teacher_tokens", NAMES[1])


@pytest.mark.parametrize(("mask", "vocab_size", "facts"), [([0, 1, 1, 1], 4, (2, 3)), ([0, 1, 1], 3, (3, 2))])
def test_tokens_and_vocabulary_must_fit(mask, vocab_size, facts):
    with raises_error(DataError, "rows.jsonl row 1", "teacher_ids", *facts):
        with_stored(sequences(mask), rows_of(ROW), ids=NAMES[0], logprobs=NAMES[1], vocab_size=vocab_size)
