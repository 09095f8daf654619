"""Multi-turn rollouts: from a tree of turns to training rows.

    turn 0 ── turn 1 ── turn 2        row 0: turns 0, 1 and 2
         └─── turn 3                  row 1: turns 0 and 3; turn 0 is context there, because row 0 trains on it

A row ends at each turn that no other turn continues. Every sampled token belongs to exactly one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.pack import sequence_of
from roll_core.errors import DataError
from roll_core.types import Rollout, Sample, TrainSequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from roll_core.types import Bools, FinishReason, Floats, Media, Reward, RoutedExperts, TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A path of turns as one sequence of length L."""

    tokens: TokenIds
    """`[L]`."""
    loss_mask: Bools
    """`[L]`, True for the sampled tokens that this row trains."""
    sampled_mask: Bools
    """`[L]`, True for the sampled tokens of this row, in the loss or not; False for those that another row has."""
    logprobs: Floats
    """`[L]`, as reported by the engine; 0 for tokens that the model read."""
    versions: npt.NDArray[np.int32]
    """`[L]`; -1 for tokens that the model read."""
    observation_mask: Bools
    """`[L]`, True for the text of messages after the first turn's; in one row each."""
    turns: npt.NDArray[np.int64]
    """`[L]`, index of the turn that read or sampled the token."""
    media: tuple[Media, ...]
    """Images of its turns, in the order of their tokens."""
    routed_experts: RoutedExperts | None
    """`[L - 1, M, K]` or fewer rows."""


def path_to(rollout: Rollout, index: int) -> list[int]:
    """Indices of the turns from the first one to turn `index`. Raises `DataError` if a parent is no earlier turn."""
    path = [index]
    while (parent := _parent(rollout, path[-1])) is not None:
        path.append(parent)
    return path[::-1]


def _parent(rollout: Rollout, index: int) -> int | None:
    parent = rollout.turns[index].parent
    if parent is not None and not 0 <= parent < index:
        raise DataError(f"turn {index} of a rollout has parent {parent}, expected an earlier turn")
    return parent


def tokens_of(rollout: Rollout, index: int) -> TokenIds:
    """Whole sequence that ends with turn `index`: the prompt of the next turn begins with it."""
    turns = [rollout.turns[turn_index] for turn_index in path_to(rollout, index)]
    return np.concatenate([ids for turn in turns for ids in (turn.context_ids, turn.sampled_ids)])


def rows(rollout: Rollout) -> list[RolloutRow]:
    """Training rows of a rollout, in the order of their last turns. Raises `DataError` for an invalid turn.

    Each sampled token is in the sampled mask of exactly one row, and in its loss mask unless the turn masks it. A row
    without a sampled token of its own is left out, unless it is the only one.
    """
    continued = {_parent(rollout, index) for index in range(len(rollout.turns))}
    candidates: list[RolloutRow] = []
    assigned: set[int] = set()
    for leaf in range(len(rollout.turns)):
        if leaf not in continued:
            path = path_to(rollout, leaf)
            candidates.append(_row(rollout, path, assigned))
            assigned.update(path)
    return [row for row in candidates if row.sampled_mask.any()] or candidates[:1]


def _row(rollout: Rollout, path: list[int], assigned: set[int]) -> RolloutRow:
    pieces: dict[str, list[npt.NDArray[Any]]] = {
        name: []
        for name in ("tokens", "loss_mask", "sampled_mask", "logprobs", "versions", "observation_mask", "turns")
    }
    experts: list[RoutedExperts] = []
    complete = True
    for index in path:
        turn = rollout.turns[index]
        num_read, num_sampled = len(turn.context_ids), len(turn.sampled_ids)
        for name in ("logprobs", "versions", "loss_mask"):
            if len(getattr(turn, name)) != num_sampled:
                raise DataError(
                    f"turn {index} of a rollout has {num_sampled} sampled tokens but {len(getattr(turn, name))} {name}"
                )
        sampled_mask = np.full(num_sampled, index not in assigned)
        observed = turn.observation_mask if index not in assigned else None
        observed = np.zeros(num_read, dtype=np.bool_) if observed is None else observed
        pieces["tokens"] += [turn.context_ids, turn.sampled_ids]
        pieces["loss_mask"] += [np.zeros(num_read, dtype=np.bool_), turn.loss_mask & sampled_mask]
        pieces["sampled_mask"] += [np.zeros(num_read, dtype=np.bool_), sampled_mask]
        pieces["logprobs"] += [np.zeros(num_read, dtype=np.float32), turn.logprobs.astype(np.float32)]
        pieces["versions"] += [np.full(num_read, -1, dtype=np.int32), turn.versions]
        pieces["observation_mask"] += [observed, np.zeros(num_sampled, dtype=np.bool_)]
        pieces["turns"] += [np.full(num_read + num_sampled, index, dtype=np.int64)]
        if complete and turn.routed_experts is not None:
            experts.append(turn.routed_experts)
        # Experts of later turns have their positions only if those of this turn are complete.
        num_processed = num_read + num_sampled - (turn.parent is None)
        complete &= turn.routed_experts is not None and len(turn.routed_experts) >= num_processed
    return RolloutRow(
        **{name: np.concatenate(arrays) for name, arrays in pieces.items()},
        media=tuple(media for index in path for media in rollout.turns[index].media),
        routed_experts=np.concatenate(experts) if experts else None,
    )


def sample_of_rollout(
    rollout: Rollout,
    *,
    id: str,
    group_id: str,
    finish_reason: FinishReason,
    reward: Reward | None = None,
    tag: str = "",
    metadata: Mapping[str, Any] | None = None,
    player: str = "",
) -> Sample:
    """The sample of a rollout. Its response is a transcript of the turns after the first turn's prompt."""
    none = np.zeros(0, dtype=np.int64)
    read = [turn.context_ids if index else none for index, turn in enumerate(rollout.turns)]
    pairs = list(zip(read, rollout.turns, strict=True))

    def joined(name: str, fill: Any, dtype: Any) -> npt.NDArray[Any]:
        arrays = [array for ids, turn in pairs for array in (np.full(len(ids), fill, dtype=dtype), getattr(turn, name))]
        return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)

    return Sample(
        id=id,
        group_id=group_id,
        prompt_ids=rollout.turns[0].context_ids if rollout.turns else none,
        media=tuple(media for turn in rollout.turns for media in turn.media),
        response_ids=np.concatenate([none, *(ids for read, turn in pairs for ids in (read, turn.sampled_ids))]),
        logprobs=joined("logprobs", 0.0, np.float32),
        loss_mask=joined("loss_mask", False, np.bool_),
        versions=joined("versions", -1, np.int32),
        finish_reason=finish_reason,
        tag=tag,
        reward=reward,
        metadata=metadata or {},
        rollout=rollout,
        player=player,
    )


def num_read(rollout: Rollout) -> int:
    """Tokens of the prompts of all turns."""
    lengths: list[int] = []
    total = 0
    for turn in rollout.turns:
        prompt = len(turn.context_ids) + (0 if turn.parent is None else lengths[turn.parent])
        lengths.append(prompt + len(turn.sampled_ids))
        total += prompt
    return total


def sequences_of(sample: Sample, *, group: int, rollout: int) -> list[TrainSequence]:
    """Training sequences of a sample: one, or the rows of its rollout, which then name `rollout`."""
    if sample.rollout is None:
        return [sequence_of(sample, group=group)]
    training_rows = rows(sample.rollout)
    return [
        TrainSequence(
            id=sample.id if len(training_rows) == 1 else f"{sample.id}#{index}",
            tokens=row.tokens,
            media=row.media,
            loss_mask=row.loss_mask,
            sampled_mask=None if np.array_equal(row.loss_mask, row.sampled_mask) else row.sampled_mask,
            behaviour_logprobs=row.logprobs,
            routed_experts=row.routed_experts,
            group=group,
            rollout=rollout,
        )
        for index, row in enumerate(training_rows)
    ]
