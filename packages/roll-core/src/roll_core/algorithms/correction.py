"""Corrections for tokens that were not drawn by the very policy that is trained: by an engine that rounds differently,
or under weights of some steps ago.

    d      = old logprob (trainer, at the start of the update) - behaviour logprob (engine, when it was drawn)
    ratio  = exp(d at a level)          weight = min(ratio, upper_bound)

Levels: `token` takes each token's own d, `geometric` the mean over its sequence, `sequence` the sum over its sequence,
`segment` the mean over its unbroken run of drawn tokens (a turn). Truncated importance sampling is `token` or
`sequence` with a bound (arXiv:2505.24298 §5.2 decouples it from PPO's ratio as is done here: the clip compares with the
old policy, the weight compares the old policy with the behaviour). Weights multiply advantages: every policy loss is
linear in the advantage's size, and KL and entropy terms stay what they are.

T flat tokens, N masked tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from roll_core.algorithms.kl import LOG_RATIO_CLAMP

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "segment", "geometric", "sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Tokens outside of it take no part in the loss."""

    level: Level
    ratio: tuple[float, float] | None = None
    """Smallest and largest ratio that is kept."""
    difference: tuple[float, float] | None = None
    """The same of the difference of probabilities, old less behaviour, averaged over what the level spans."""


def importance_weights(
    old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, segments_T: Tensor, *, level: Level, upper_bound: float
) -> Tensor:
    """`[T]`, at most `upper_bound`; 0 off the mask."""
    ratio_T = _log_ratio(old_T, behaviour_T, mask_T, segments_T, level).exp()
    return torch.where(mask_T, ratio_T.clamp(max=upper_bound), 0.0)


def inside(band: Band, old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, segments_T: Tensor) -> Tensor:
    """`[T]`, the masked tokens that the band keeps."""
    kept_T = mask_T.clone()
    if band.ratio is not None:
        ratio_T = _log_ratio(old_T, behaviour_T, mask_T, segments_T, band.level).exp()
        kept_T &= (ratio_T >= band.ratio[0]) & (ratio_T <= band.ratio[1])
    if band.difference is not None:
        level: Level = "geometric" if band.level == "sequence" else band.level
        difference_T = torch.where(mask_T, old_T.exp() - behaviour_T.exp(), 0.0)
        spanned_T = _at_level(difference_T, mask_T, segments_T, level)
        kept_T &= (spanned_T >= band.difference[0]) & (spanned_T <= band.difference[1])
    return kept_T


def _log_ratio(old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, segments_T: Tensor, level: Level) -> Tensor:
    difference_T = torch.where(mask_T, old_T - behaviour_T, 0.0)
    return _at_level(difference_T, mask_T, segments_T, level).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def _at_level(values_T: Tensor, mask_T: Tensor, segments_T: Tensor, level: Level) -> Tensor:
    """Each masked token's value: its own, or the mean or sum over what its level spans. In float64 where it adds up."""
    if level == "token" or not mask_T.any():
        return values_T
    spans_N = (_runs(mask_T, segments_T) if level == "segment" else segments_T)[mask_T]
    _, spans_N = torch.unique(spans_N, return_inverse=True)
    values_N = values_T[mask_T].double()
    sums = values_N.new_zeros(int(spans_N.max()) + 1).index_add_(0, spans_N, values_N)
    if level != "sequence":
        sums = sums / torch.bincount(spans_N)
    spread_T = torch.zeros_like(values_T)
    spread_T[mask_T] = sums[spans_N].to(values_T.dtype)
    return spread_T


def _runs(mask_T: Tensor, segments_T: Tensor) -> Tensor:
    """`[T]`, a number for each unbroken run of masked tokens within a sequence."""
    begins_T = mask_T.clone()
    begins_T[1:] &= ~mask_T[:-1] | (segments_T[1:] != segments_T[:-1])
    return begins_T.long().cumsum(0)
