"""The teacher's most likely tokens and their logprobs, stored in the data set beside the responses.

    {"prompt": ..., "response": ..., "teacher_ids": [[5, 7], ...], "teacher_logprobs": [[-0.1, -2.5], ...]}

One list of K ids per trained token of the response, its end token included. R tokens of a response, K ids per token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.rows import need_column
from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from roll_core.data.rows import Row, Rows
    from roll_core.types import Floats, TokenIds, TrainSequence

MASS_TOLERANCE = 1e-3
"""Excess over 1 of the probability of K tokens that rounding may cause."""


def check_stored(rows: Rows, ids: str, logprobs: str) -> None:
    """Raise `DataError` unless every row has ids and logprobs of one shape `[R, K]`, with one K for all rows."""
    first: tuple[str, int] | None = None
    for row in rows:
        size = support_of(row, rows, ids, logprobs)[0].shape[1]
        where, expected = first = first or (row.where, size)
        if size != expected:
            raise DataError(
                f"{row.where}: column {ids!r} has {size} ids per token, {where} has {expected}: store the same number"
                " in all rows"
            )


def support_of(row: Row, rows: Rows, ids: str, logprobs: str) -> tuple[TokenIds, Floats]:
    """Ids and logprobs `[R, K]` of a row. Raises `DataError` with the row and the column."""
    for column in (ids, logprobs):
        need_column(column, rows)
    ids_RK = _matrix(row, ids, np.int64)
    logprobs_RK = _matrix(row, logprobs, np.float32)
    if ids_RK.shape != logprobs_RK.shape:
        raise DataError(
            f"{row.where}: column {logprobs!r} has shape {logprobs_RK.shape}, column {ids!r} {ids_RK.shape}: store one"
            " logprob per id"
        )
    mass_R = np.exp(logprobs_RK.astype(np.float64)).sum(axis=1)
    bad_R = ~np.isfinite(logprobs_RK).all(axis=1) | (logprobs_RK > MASS_TOLERANCE).any(axis=1)
    bad_R |= mass_R > 1 + MASS_TOLERANCE
    if bad_R.any():
        index = int(bad_R.argmax())
        shown = [round(logprob, 4) for logprob in logprobs_RK[index].tolist()]
        raise DataError(
            f"{row.where}: column {logprobs!r} has no logprobs at token {index}: {shown};"
            " expected finite numbers of at most 0, whose probabilities sum to at most 1"
        )
    sorted_RK = np.sort(ids_RK, axis=1)
    twice_R = (sorted_RK[:, 1:] == sorted_RK[:, :-1]).any(axis=1)
    if (ids_RK < 0).any() or twice_R.any():
        index = int(((ids_RK < 0).any(axis=1) | twice_R).argmax())
        raise DataError(
            f"{row.where}: column {ids!r} has {ids_RK[index].tolist()} at token {index},"
            " expected different ids of at least 0"
        )
    return ids_RK, logprobs_RK


def with_stored(
    sequences: Iterable[TrainSequence], rows: Rows, *, ids: str, logprobs: str, vocab_size: int
) -> list[TrainSequence]:
    """Sequences of rows with their stored support. Raises `DataError` with the row and the column."""
    check_stored(rows, ids, logprobs)
    by_id = {row.id: row for row in rows}
    extended = []
    for sequence in sequences:
        row = by_id[sequence.id]
        ids_RK, logprobs_RK = support_of(row, rows, ids, logprobs)
        num_trained = int(sequence.loss_mask.sum())
        if len(ids_RK) != num_trained:
            raise DataError(
                f"{row.where}: column {ids!r} has {len(ids_RK)} tokens, but {num_trained} tokens are trained, the end"
                " token included: store one list per trained token"
            )
        if ids_RK.max() >= vocab_size:
            raise DataError(
                f"{row.where}: column {ids!r} has the id {ids_RK.max()}, the vocabulary has ids 0 to {vocab_size - 1}"
            )
        gather_ids = np.zeros((len(sequence), ids_RK.shape[1]), dtype=np.int64)
        teacher_logprobs = np.zeros(gather_ids.shape, dtype=np.float32)
        gather_ids[sequence.loss_mask], teacher_logprobs[sequence.loss_mask] = ids_RK, logprobs_RK
        extended.append(replace(sequence, gather_ids=gather_ids, teacher_logprobs=teacher_logprobs))
    return extended


def _matrix(row: Row, column: str, dtype: type[np.generic]) -> Any:
    """A column as an array `[R, K]`."""
    value: Sequence[Sequence[float]] | None = row.values.get(column)
    try:
        sizes = {len(entries) for entries in value or ()}
        matrix = np.asarray(value)
    except (TypeError, ValueError):
        sizes, matrix = set(), np.zeros(0)
    kinds = "iu" if dtype is np.int64 else "fiu"
    if len(sizes) != 1 or 0 in sizes or matrix.ndim != 2 or matrix.dtype.kind not in kinds:
        shape = f"lists of {', '.join(map(str, sorted(sizes)))} values" if len(sizes) > 1 else f"{value!r:.60}"
        what = "ids" if dtype is np.int64 else "logprobs"
        raise DataError(
            f"{row.where}: column {column!r} has {shape}, expected a list with K {what} for each token of the response"
        )
    return matrix.astype(dtype)
