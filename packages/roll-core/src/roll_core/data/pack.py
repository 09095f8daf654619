"""Packs `TrainSequence`s end to end into flat microbatches, balanced over data-parallel ranks.

T flat tokens of a microbatch, S sequences.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import DataError
from roll_core.types import Totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.spec.train import MicroBatch
    from roll_core.types import TrainSequence

FLOATS = ("old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "returns", "values")
"""Per-token fields that a microbatch has as float32 tensors `<name>_T`, if all its sequences have them."""


def totals(sequences: Sequence[TrainSequence], max_length: int = 1) -> Totals:
    """Denominators of one optimizer step, from all of its `sequences` on all ranks."""
    trained = [each for each in sequences if each.loss_mask.any()]
    return Totals(
        tokens=sum(int(each.loss_mask.sum()) for each in trained),
        sequences=len(trained),
        groups=len({each.group for each in trained}),
        max_length=max_length,
    )


totals_of = totals
"""Alias of `totals`, for functions with an argument of that name."""


def balance(sequences: Sequence[TrainSequence], ranks: int) -> list[list[int]]:
    """Assign sequences to data-parallel ranks; returns each rank's indices in ascending order.

    The longest sequence goes first, each to the rank with the fewest tokens so far (Graham's rule). The fullest rank
    then has at most 4/3 of the optimum. The result depends only on lengths and order, so all processes compute the
    same. Raises `ValueError` for fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"sequences cannot be shared by {ranks} ranks")
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, 0, rank) for rank in range(ranks)]
    for index in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
        tokens, count, rank = heapq.heappop(load)
        shares[rank].append(index)
        heapq.heappush(load, (tokens + len(sequences[index]), count + 1, rank))
    return [sorted(share) for share in shares]


def pack(
    sequences: Sequence[TrainSequence],
    *,
    totals: Totals | None = None,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
) -> list[MicroBatch]:
    """Pack the sequences in order into flat microbatches of at most `max_tokens` tokens and `max_sequences` sequences.

    A limit of None is unlimited. A sequence longer than `max_tokens` is not truncated: it gets its own microbatch.
    `totals` are those of the whole optimizer step; by default those of `sequences`. Without sequences the result is
    empty. Raises `DataError` for invalid sequences.
    """
    denominators = totals_of(sequences) if totals is None else totals
    batches: list[list[TrainSequence]] = []
    tokens = 0
    for each in sequences:
        _check(each)
        full = (
            not batches
            or (max_tokens is not None and tokens + len(each) > max_tokens)
            or (max_sequences is not None and len(batches[-1]) >= max_sequences)
        )
        if full:
            batches.append([])
            tokens = 0
        batches[-1].append(each)
        tokens += len(each)
    return [_flatten(batch, denominators) for batch in batches]


def pack_evenly(
    sequences: Sequence[TrainSequence], *, max_tokens: int, multiple: int = 1, totals: Totals | None = None
) -> list[MicroBatch]:
    """Pack like `pack`, but with similar token counts, so that pipeline stages idle less.

    Returns as few microbatches as `max_tokens` permits, and a multiple of `multiple` if there are enough sequences.
    """
    denominators = totals_of(sequences) if totals is None else totals
    for each in sequences:
        _check(each)
    lengths = [len(each) for each in sequences]
    # No two sequences longer than half of the budget fit into one microbatch.
    fewest = max(-(-sum(lengths) // max_tokens), sum(2 * each > max_tokens for each in lengths))
    for number in range(min(fewest, len(sequences)), len(sequences) + 1) if sequences else ():
        shares = balance(sequences, min(number + -number % multiple, len(sequences)))
        if all(len(share) == 1 or sum(lengths[i] for i in share) <= max_tokens for share in shares):
            return [_flatten([sequences[i] for i in share], denominators) for share in shares]
    return []


def _check(sequence: TrainSequence) -> None:
    length = len(sequence.tokens)
    if length == 0:
        raise DataError(f"sequence {sequence.id} has no tokens: drop such rows before training")
    for name in ("loss_mask", *FLOATS):
        values = getattr(sequence, name)
        if values is not None and len(values) != length:
            raise DataError(f"sequence {sequence.id}: {name} has length {len(values)}, its tokens {length}")
    ids = sequence.gather_ids
    if ids is not None and (ids.ndim != 2 or len(ids) != length):
        raise DataError(f"sequence {sequence.id}: gather_ids has shape {ids.shape}; expected ({length}, K)")
    routed = sequence.routed_experts
    if routed is not None and (routed.ndim != 3 or len(routed) > length):
        raise DataError(
            f"sequence {sequence.id}: routed_experts has shape {routed.shape}; expected [tokens, layers, top-k] of at"
            f" most {length} tokens"
        )
    if sequence.loss_mask[0]:
        raise DataError(
            f"sequence {sequence.id}: its first token is in the loss, but has no context to predict it from: set"
            " loss_mask[0] to False"
        )


def _routed_experts(batch: Sequence[TrainSequence]) -> np.ndarray[Any, np.dtype[np.int16]] | None:
    """Routed experts of the batch, `[T, M, K]`, -1 for unknown tokens; None if no sequence has any."""
    known = [each.routed_experts for each in batch if each.routed_experts is not None]
    shapes = {each.shape[1:] for each in known}
    if not known:
        return None
    if len(shapes) > 1:
        raise DataError(f"sequences of one batch have routed_experts of several shapes [layers, top-k]: {shapes}")
    flat = np.full((sum(map(len, batch)), *shapes.pop()), -1, dtype=np.int16)
    start = 0
    for each in batch:
        if each.routed_experts is not None:
            flat[start : start + len(each.routed_experts)] = each.routed_experts
        start += len(each)
    return flat


def _gather_ids(batch: Sequence[TrainSequence]) -> Tensor:
    import torch

    every = [each.gather_ids for each in batch if each.gather_ids is not None]
    if len({each.shape[1] for each in every}) > 1:
        shapes = {each.id: each.gather_ids.shape for each in batch if each.gather_ids is not None}
        raise DataError(f"sequences of one batch have gather_ids with different numbers of ids per token: {shapes}")
    return torch.from_numpy(np.concatenate([np.asarray(each, np.int64) for each in every]))


def _flatten(batch: Sequence[TrainSequence], totals: Totals) -> MicroBatch:
    import torch

    from roll_core.spec.train import MicroBatch

    lengths = tuple(len(each) for each in batch)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.repeat(bounds[:-1], lengths)

    def flat(name: str, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(getattr(each, name), dtype) for each in batch]))

    optional: dict[str, Tensor] = {}
    for name in (*FLOATS, "gather_ids"):
        with_it = [each for each in batch if getattr(each, name) is not None]
        if with_it and len(with_it) < len(batch):
            lacking = next(each.id for each in batch if getattr(each, name) is None)
            raise DataError(f"sequence {lacking} has no {name}, but sequence {with_it[0].id} of the same batch has")
        if with_it and name in FLOATS:
            optional[f"{name}_T"] = flat(name, np.float32)
        elif with_it:
            optional["gather_ids_TK"] = _gather_ids(batch)
    if (routed_TMK := _routed_experts(batch)) is not None:
        optional["routed_experts_TMK"] = torch.from_numpy(routed_TMK)
    return MicroBatch(
        ids=tuple(each.id for each in batch),
        tokens_T=flat("tokens", np.int64),
        positions_T=torch.from_numpy(np.arange(bounds[-1], dtype=np.int64) - starts),
        segments_T=torch.from_numpy(np.repeat(np.arange(len(batch), dtype=np.int64), lengths)),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        lengths=lengths,
        loss_mask_T=flat("loss_mask", np.bool_),
        groups_S=torch.tensor([each.group for each in batch], dtype=torch.int64),
        totals=totals,
        **optional,
    )
