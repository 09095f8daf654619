"""From samples to training sequences, and from these to flat microbatches, balanced over data-parallel ranks.

    CompletionOutput ── sample_of ──► Sample ── sequence_of ──► TrainSequence ── balance, pack ──► MicroBatch

T flat tokens of a microbatch, S sequences.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import DataError
from roll_core.types import Sample, Totals, TrainSequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.train import MicroBatch
    from roll_core.types import CompletionOutput, Floats, Media, TokenIds

FLOATS = ("old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "returns", "values")
"""Per-token fields that a microbatch has as float32 tensors `<name>_T`, if all its sequences have them."""
GATHERED: dict[str, tuple[str, type[np.generic]]] = {
    "gather_ids": ("gather_ids_TK", np.int64),
    "teacher_logprobs": ("teacher_logprobs_TK", np.float32),
    "teacher_hidden": ("teacher_hidden_TH", np.float32),
}
"""Fields `[L, K]`, with the names and dtypes of their tensors in a microbatch."""


def sample_of(
    output: CompletionOutput,
    *,
    id: str,
    group_id: str,
    prompt_ids: TokenIds,
    media: tuple[Media, ...] = (),
    tag: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """Convert one output of a completion to a sample whose loss mask covers every generated token."""
    return Sample(
        id=id,
        group_id=group_id,
        prompt_ids=prompt_ids,
        media=media,
        response_ids=output.token_ids,
        logprobs=output.logprobs,
        loss_mask=np.ones(len(output.token_ids), dtype=np.bool_),
        versions=output.versions,
        finish_reason=output.finish_reason,
        routed_experts=output.routed_experts,
        tag=tag,
        metadata=metadata or {},
    )


def sequence_of(sample: Sample, *, group: int) -> TrainSequence:
    """Convert a sample to one sequence of length L = P + R. Raises `DataError` if its arrays have different lengths."""
    num_response = len(sample.response_ids)
    for name in ("logprobs", "loss_mask", "versions"):
        if len(getattr(sample, name)) != num_response:
            raise DataError(
                f"sample {sample.id}: {num_response} response tokens but {len(getattr(sample, name))} {name}"
            )
    if len(sample.prompt_ids) == 0:
        raise DataError(f"sample {sample.id} has an empty prompt: a response's first token needs context")
    num_prompt = len(sample.prompt_ids)
    # A loss mask may exclude sampled tokens: tokens from an environment have version -1.
    sampled_mask = sample.loss_mask | (sample.versions >= 0)
    partial = bool((sampled_mask != sample.loss_mask).any())
    return TrainSequence(
        id=sample.id,
        tokens=np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64, copy=False),
        media=sample.media,
        loss_mask=np.concatenate([np.zeros(num_prompt, dtype=np.bool_), sample.loss_mask]),
        sampled_mask=np.concatenate([np.zeros(num_prompt, dtype=np.bool_), sampled_mask]) if partial else None,
        behaviour_logprobs=np.concatenate([np.zeros(num_prompt, dtype=np.float32), sample.logprobs.astype(np.float32)]),
        routed_experts=sample.routed_experts,
        group=group,
    )


def count_totals(sequences: Sequence[TrainSequence], max_length: int = 1) -> Totals:
    """Denominators of one optimizer step, from all of its `sequences` on all ranks."""
    trained = [sequence for sequence in sequences if sequence.loss_mask.any()]
    rollout_tokens: dict[int, int] = {}
    streams: dict[str, float] = {}
    for sequence in sequences:
        if sequence.rollout is not None:
            rollout_tokens[sequence.rollout] = rollout_tokens.get(sequence.rollout, 0) + int(sequence.loss_mask.sum())
        for name, weights in sequence.streams.items():
            streams[name] = streams.get(name, 0.0) + float(weights.sum(dtype=np.float64))
    return Totals(
        tokens=sum(int(sequence.loss_mask.sum()) for sequence in trained),
        sequences=len(trained),
        rollouts=len(set(_keys([sequence.rollout for sequence in trained]))),
        groups=len({sequence.group for sequence in trained}),
        max_length=max_length,
        rollout_tokens=rollout_tokens,
        streams=streams,
    )


def units(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Indices of the sequences of each unit, in the order of the units' first sequences."""
    indices_of_units: dict[int, list[int]] = {}
    for index, unit in enumerate(_keys([sequence.unit for sequence in sequences])):
        indices_of_units.setdefault(unit, []).append(index)
    return list(indices_of_units.values())


def rollouts(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """Indices of the rows of each rollout, in the order of the rollouts' first rows; a unit's rollouts are joined.

    Raises `DataError` if a rollout has rows in several units, or only some of its rows have a unit.
    """
    unit_of: dict[int, int | None] = {}
    indices_of_rollouts: dict[tuple[str, int], list[int]] = {}
    for index, sequence in enumerate(sequences):
        if sequence.rollout is not None and unit_of.setdefault(sequence.rollout, sequence.unit) != sequence.unit:
            raise DataError(
                f"sequence {sequence.id} of rollout {sequence.rollout} has unit {sequence.unit}, another has unit"
                f" {unit_of[sequence.rollout]}: give all rows of a rollout the same unit"
            )
        if sequence.unit is not None:
            key = ("unit", sequence.unit)
        else:
            key = ("row", index) if sequence.rollout is None else ("rollout", sequence.rollout)
        indices_of_rollouts.setdefault(key, []).append(index)
    return list(indices_of_rollouts.values())


def balance(sequences: Sequence[TrainSequence], ranks: int) -> list[list[int]]:
    """Assign sequences to data-parallel ranks, units as a whole; returns each rank's indices in ascending order.

    The longest unit goes first, each to the rank with the fewest tokens so far (Graham's rule). The fullest rank
    then has at most 4/3 of the optimum. The result depends only on lengths, units and order, so all processes compute
    the same. Raises `ValueError` for fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"sequences cannot be shared by {ranks} ranks")
    all_units = units(sequences)
    shares = balance_sizes([sum(len(sequences[i]) for i in unit) for unit in all_units], ranks)
    return [sorted(i for unit in share for i in all_units[unit]) for share in shares]


def pack(
    sequences: Sequence[TrainSequence],
    *,
    totals: Totals | None = None,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
) -> list[MicroBatch]:
    """Pack the units in order into flat microbatches of at most `max_tokens` tokens and `max_sequences` sequences.

    A limit of None is unlimited. A unit above a limit is neither truncated nor split: it gets its own microbatch.
    `totals` are those of the whole optimizer step; by default those of `sequences`. Without sequences the result is
    empty. Raises `DataError` for invalid sequences.
    """
    denominators = count_totals(sequences) if totals is None else totals
    batches: list[list[TrainSequence]] = []
    tokens = 0
    for indices in units(sequences):
        unit = [sequences[i] for i in indices]
        for sequence in unit:
            _check(sequence)
        length = sum(len(sequence) for sequence in unit)
        full = (
            not batches
            or (max_tokens is not None and tokens + length > max_tokens)
            or (max_sequences is not None and len(batches[-1]) + len(unit) > max_sequences)
        )
        if full:
            batches.append([])
            tokens = 0
        batches[-1] += unit
        tokens += length
    return [_flatten(batch, denominators) for batch in batches]


def pack_evenly(
    sequences: Sequence[TrainSequence], *, max_tokens: int, multiple: int = 1, totals: Totals | None = None
) -> list[MicroBatch]:
    """Pack like `pack`, but with similar token counts, so that pipeline stages idle less.

    Returns as few microbatches as `max_tokens` permits, and a multiple of `multiple` if there are enough units.
    """
    denominators = count_totals(sequences) if totals is None else totals
    for sequence in sequences:
        _check(sequence)
    all_units = units(sequences)
    lengths = [sum(len(sequences[i]) for i in unit) for unit in all_units]
    # No two units longer than half of the budget fit into one microbatch.
    fewest = max(-(-sum(lengths) // max_tokens), sum(2 * length > max_tokens for length in lengths))
    for number in range(min(fewest, len(all_units)), len(all_units) + 1) if all_units else ():
        shares = balance_sizes(lengths, min(number + -number % multiple, len(all_units)))
        if all(len(share) == 1 or sum(lengths[i] for i in share) <= max_tokens for share in shares):
            return [
                _flatten([sequences[i] for unit in share for i in all_units[unit]], denominators) for share in shares
            ]
    return []


def balance_sizes(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """Distribute units of these lengths by Graham's rule (see `balance`); returns each share's ascending units."""
    units_of_shares: list[list[int]] = [[] for _ in range(shares)]
    load = [(0, 0, share) for share in range(shares)]
    for unit in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tokens, count, share = heapq.heappop(load)
        units_of_shares[share].append(unit)
        heapq.heappush(load, (tokens + lengths[unit], count + 1, share))
    return [sorted(share) for share in units_of_shares]


def _keys(indices: Sequence[int | None]) -> list[int]:
    """Replace each None by a distinct negative number."""
    return [-1 - position if index is None else index for position, index in enumerate(indices)]


def _check(sequence: TrainSequence) -> None:
    length = len(sequence.tokens)
    if length == 0:
        raise DataError(f"sequence {sequence.id} has no tokens: drop such rows before training")
    per_token = {name: getattr(sequence, name) for name in ("loss_mask", *FLOATS)}
    per_token |= {f"stream {name}": weights for name, weights in sequence.streams.items()}
    for name, values in per_token.items():
        if values is not None and len(values) != length:
            raise DataError(f"sequence {sequence.id}: {name} has length {len(values)}, its tokens {length}")
    for name, weights in sequence.streams.items():
        if not (np.isfinite(weights) & (weights >= 0)).all():
            raise DataError(f"sequence {sequence.id}: stream {name} has a negative or non-finite weight")
    for name in GATHERED:
        rows = getattr(sequence, name)
        if rows is not None and (rows.ndim != 2 or len(rows) != length):
            raise DataError(f"sequence {sequence.id}: {name} has shape {rows.shape}; expected ({length}, K)")
    routed = sequence.routed_experts
    if routed is not None and (routed.ndim != 3 or len(routed) > length):
        raise DataError(
            f"sequence {sequence.id}: routed_experts has shape {routed.shape}; expected [tokens, layers, top-k] of at"
            f" most {length} tokens"
        )
    for name in ("loss_mask", *(f"stream {name}" for name in sequence.streams)):
        if per_token[name][0]:
            raise DataError(
                f"sequence {sequence.id}: its first token is in the loss, but has no context to predict it from: set"
                f" {name}[0] to 0"
            )


def _routed_experts(batch: Sequence[TrainSequence]) -> np.ndarray[Any, np.dtype[np.int16]] | None:
    """Routed experts of the batch, `[T, M, K]`, -1 for unknown tokens; None if no sequence has any."""
    known = [sequence.routed_experts for sequence in batch if sequence.routed_experts is not None]
    shapes = {experts.shape[1:] for experts in known}
    if not known:
        return None
    if len(shapes) > 1:
        raise DataError(f"sequences of one batch have routed_experts of several shapes [layers, top-k]: {shapes}")
    flat = np.full((sum(map(len, batch)), *shapes.pop()), -1, dtype=np.int16)
    start = 0
    for sequence in batch:
        if sequence.routed_experts is not None:
            flat[start : start + len(sequence.routed_experts)] = sequence.routed_experts
        start += len(sequence)
    return flat


def _flat_rows(batch: Sequence[TrainSequence], name: str, dtype: type[np.generic]) -> Tensor:
    """A field `[L, K]` of all sequences, `[T, K]`. Raises `DataError` if K differs."""
    import torch

    shapes = {sequence.id: getattr(sequence, name).shape for sequence in batch}
    if len({num_ids for _, num_ids in shapes.values()}) > 1:
        raise DataError(f"sequences of one batch have {name} with different numbers of ids per token: {shapes}")
    return torch.from_numpy(np.concatenate([np.asarray(getattr(sequence, name), dtype) for sequence in batch]))


def _flatten(batch: Sequence[TrainSequence], totals: Totals) -> MicroBatch:
    import torch

    from roll_core.spec.train import MicroBatch

    lengths = tuple(len(sequence) for sequence in batch)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.repeat(bounds[:-1], lengths)

    def flat(name: str, dtype: type[np.generic]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(getattr(sequence, name), dtype) for sequence in batch]))

    optional: dict[str, Tensor] = {}
    for name in (*FLOATS, *GATHERED):
        with_it = [sequence for sequence in batch if getattr(sequence, name) is not None]
        if with_it and len(with_it) < len(batch):
            lacking = next(sequence.id for sequence in batch if getattr(sequence, name) is None)
            raise DataError(f"sequence {lacking} has no {name}, but sequence {with_it[0].id} of the same batch has")
        if with_it and name in FLOATS:
            optional[f"{name}_T"] = flat(name, np.float32)
        elif with_it:
            tensor, dtype = GATHERED[name]
            optional[tensor] = _flat_rows(batch, name, dtype)
    if (routed_TMK := _routed_experts(batch)) is not None:
        optional["routed_experts_TMK"] = torch.from_numpy(routed_TMK)
    return MicroBatch(
        ids=tuple(sequence.id for sequence in batch),
        tokens_T=flat("tokens", np.int64),
        positions_T=torch.from_numpy(np.arange(bounds[-1], dtype=np.int64) - starts),
        segments_T=torch.from_numpy(np.repeat(np.arange(len(batch), dtype=np.int64), lengths)),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        lengths=lengths,
        loss_mask_T=flat("loss_mask", np.bool_),
        rollouts_S=torch.tensor(_keys([sequence.rollout for sequence in batch]), dtype=torch.int64),
        rollout_tokens_S=torch.tensor(
            [
                int(sequence.loss_mask.sum()) if sequence.rollout is None else totals.rollout_tokens[sequence.rollout]
                for sequence in batch
            ],
            dtype=torch.int64,
        ),
        units_S=torch.tensor(_keys([sequence.unit for sequence in batch]), dtype=torch.int64),
        streams={name: torch.from_numpy(_stream(batch, name)) for name in totals.streams},
        totals=totals,
        media_S=tuple(sequence.media for sequence in batch) if any(sequence.media for sequence in batch) else (),
        **optional,
    )


def _stream(batch: Sequence[TrainSequence], name: str) -> Floats:
    """Weights `[T]` of a stream, 0 in sequences without it."""
    return np.concatenate([sequence.streams.get(name, np.zeros(len(sequence))) for sequence in batch], dtype=np.float32)
