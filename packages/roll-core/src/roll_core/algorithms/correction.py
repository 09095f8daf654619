"""Importance weights and ratio filters for tokens that the trained policy did not sample itself.

The sampling engine rounds differently, or its weights are some steps old.

    d      = old logprob (trainer, at the start of the update) - behaviour logprob (engine, at sampling)
    ratio  = exp(d at a level)          weight = min(ratio, upper_bound)

Levels:

* `token`: the token's own d.
* `geometric`: the mean over its sequence.
* `sequence`: the sum over its sequence.
* `segment`: the mean over its unbroken run of generated tokens (a turn).

Truncated importance sampling is `token` or `sequence` with a bound. As in arXiv:2505.24298 §5.2 it is decoupled from
PPO's ratio: the clip uses the old policy, and the weight compares the old policy with the behaviour policy.
Weights multiply advantages. Every policy loss is linear in the advantage's size, and KL and entropy terms are
unaffected.

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
    """Range filter: tokens outside of it do not contribute to the loss."""

    level: Level
    ratio: tuple[float, float] | None = None
    """Smallest and largest ratio that is kept, inclusive."""
    difference: tuple[float, float] | None = None
    """Inclusive bounds on the difference of probabilities, old minus behaviour.

    The difference is averaged over the token, run or sequence of the level; `sequence` averages like `geometric`.
    """


def importance_weights(
    old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, segments_T: Tensor, *, level: Level, upper_bound: float
) -> Tensor:
    """Importance weight of each token, `[T]`, at most `upper_bound`; 0 outside the mask."""
    ratio_T = _log_ratio(old_T, behaviour_T, mask_T, segments_T, level).exp()
    return torch.where(mask_T, ratio_T.clamp(max=upper_bound), 0.0)


def inside(band: Band, old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, segments_T: Tensor) -> Tensor:
    """Masked tokens that `band` keeps, `[T]` bool."""
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
    """Each masked token's own value, or the mean or sum over its level's span, accumulated in float64."""
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
    """`[T]` number of each unbroken run of masked tokens within a sequence; valid at masked tokens only."""
    begins_T = mask_T.clone()
    begins_T[1:] &= ~mask_T[:-1] | (segments_T[1:] != segments_T[:-1])
    return begins_T.long().cumsum(0)
