"""Microbatches laid out from plain lists, so that a test shows its numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from roll_core.spec.train import MicroBatch
from roll_core.types import Totals

sys.path.append(str(Path(__file__).parent))  # for `ragged`


def lay_out(
    masks: Sequence[Sequence[int]],
    *,
    groups: Sequence[int] | None = None,
    totals: Totals | None = None,
    rollouts: Sequence[int] | None = None,
    max_length: int = 10,
    ids: Sequence[str] | None = None,
    **per_token: Sequence[Sequence[float]],
) -> MicroBatch:
    """One sequence per entry of `masks`; per-token fields by name without the suffix, one list per sequence."""
    lengths = tuple(len(mask) for mask in masks)
    groups = list(range(len(masks))) if groups is None else list(groups)
    taking_part = [group for group, mask in zip(groups, masks, strict=True) if any(mask)]
    rollouts = [-1 - at for at in range(len(masks))] if rollouts is None else list(rollouts)
    masked = [sum(map(int, mask)) for mask in masks]
    rollout_tokens = {each: sum(m for r, m in zip(rollouts, masked, strict=True) if r == each) for each in rollouts}
    if totals is None:
        totals = Totals(
            tokens=sum(masked),
            sequences=len(taking_part),
            rollouts=sum(count > 0 for count in rollout_tokens.values()),
            groups=len(set(taking_part)),
            max_length=max_length,
        )
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    fields = {
        f"{name}_T": torch.tensor([value for sequence in values for value in sequence], dtype=torch.float32)
        for name, values in per_token.items()
    }
    return MicroBatch(
        ids=tuple(ids or (f"s{index}" for index in range(len(masks)))),
        tokens_T=torch.zeros(bounds[-1], dtype=torch.int64),
        positions_T=torch.tensor([position for length in lengths for position in range(length)], dtype=torch.int64),
        segments_T=torch.tensor([s for s, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        lengths=lengths,
        loss_mask_T=torch.tensor([bool(m) for mask in masks for m in mask], dtype=torch.bool),
        rollouts_S=torch.tensor(rollouts, dtype=torch.int64),
        rollout_tokens_S=torch.tensor([rollout_tokens[each] for each in rollouts], dtype=torch.int64),
        units_S=torch.tensor([-1 - at for at in range(len(masks))], dtype=torch.int64),
        totals=totals,
        **fields,
    )


@pytest.fixture(scope="session")
def micro_of() -> Callable[..., MicroBatch]:
    return lay_out
