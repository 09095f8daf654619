"""Importance weights and filters for tokens that the trained policy did not sample itself.

The sampling engine rounds differently, or its weights are some steps old.

    d      = old logprob (trainer, at the start of the update) - behaviour logprob (engine, at sampling)
    ratio  = exp(d at a level)

Levels:

* `token`: the token's own d.
* `geometric`: the mean over its rollout.
* `sequence`: the sum over its rollout.
* `segment`: the mean over its unbroken run of generated tokens (a turn).

Two kinds of correction:

* Weights multiply advantages. Every policy loss is linear in the advantage's size, and KL and entropy terms are
  unaffected. A weight of 0 leaves the loss's denominator as it is.
* Filters remove tokens from the loss mask: from KL and entropy terms too, and from the denominator. This is
  rejection sampling.

As in arXiv:2505.24298 §5.2, weights are decoupled from PPO's ratio: the clip uses the old policy, and the weight
compares the old policy with the behaviour policy.

T flat tokens, N masked tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from roll_core.algorithms.correction_options import Level
from roll_core.algorithms.kl import LOG_RATIO_CLAMP
from roll_core.algorithms.segments import dense, sums_by

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.algorithms.correction_options import CorrectionFilterConfig, ImportanceWeightConfig

FilterLevel = Level | Literal["max"]


def importance_weights(
    config: ImportanceWeightConfig,
    old_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    segments_T: Tensor,
    *,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
) -> Tensor:
    """Importance weight of each token, `[T]`; 0 outside the mask.

    `config.outside` selects truncated importance sampling (TIS; Yao et al. 2025), or masked importance sampling (MIS;
    Liu, Li et al. 2025). MIS at the levels `sequence` and `geometric` is TRL's `sequence_mask`; at level `token` it is
    IcePop (arXiv:2510.18855), verl's two-sided threshold.
    """
    low, high = config.lower_bound, config.upper_bound
    ratio_T = _log_ratio(old_T, behaviour_T, mask_T, segments_T, config.weight_type, log_ratio_clamp).exp()
    if config.outside == "truncate":
        return torch.where(mask_T, ratio_T.clamp(low, high), 0.0)
    return torch.where(mask_T & (ratio_T >= low) & (ratio_T <= high), ratio_T, 0.0)


def normalise_weights(weights_T: Tensor, mask_T: Tensor, segments_T: Tensor, level: Level) -> Tensor:
    """Divide weights by their mean over the batch's tokens, runs or rollouts, as the level says, `[T]`.

    Each run or rollout counts once, as in verl's `rollout_is_batch_normalize`. Weights that are all 0 stay 0.
    """
    if not weights_T.any():
        return weights_T
    weights_N = weights_T[mask_T].double()
    spans_N, num_spans = _spans(mask_T, segments_T, level)
    mean = (sums_by(weights_N, spans_N, num_spans) / torch.bincount(spans_N, minlength=num_spans)).mean()
    return (weights_T / mean).to(weights_T.dtype)


def inside(
    config: CorrectionFilterConfig,
    old_T: Tensor,
    behaviour_T: Tensor,
    mask_T: Tensor,
    segments_T: Tensor,
    *,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
) -> Tensor:
    """Masked tokens that the filter `config` keeps, `[T]` bool: values on a bound are kept.

    At the level `sequence`, the difference of probabilities is averaged, as at `geometric`.
    """
    kept_T = mask_T.clone()
    if config.ratio_enabled:
        ratio_T = _log_ratio(old_T, behaviour_T, mask_T, segments_T, config.agg_type, log_ratio_clamp).exp()
        kept_T &= (ratio_T >= config.ratio_low) & (ratio_T <= config.ratio_high)
    if config.diff_enabled:
        level: FilterLevel = "geometric" if config.agg_type == "sequence" else config.agg_type
        difference_T = torch.where(mask_T, old_T.exp() - behaviour_T.exp(), 0.0)
        spanned_T = _at_level(difference_T, mask_T, segments_T, level)
        kept_T &= (spanned_T >= config.diff_low) & (spanned_T <= config.diff_high)
    if config.k2_max is not None or config.k3_max is not None:
        d_T = _log_ratio(old_T, behaviour_T, mask_T, segments_T, "token", log_ratio_clamp)
        for bound, divergence_T in ((config.k2_max, d_T.square() / 2), (config.k3_max, torch.expm1(d_T) - d_T)):
            if bound is not None:
                kept_T &= _at_level(divergence_T, mask_T, segments_T, config.agg_type) <= bound
    return kept_T


def off_policy_mask(
    advantages_T: Tensor, old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, segments_T: Tensor, threshold: float
) -> Tensor:
    """Tokens with a negative advantage in rollouts that the policy no longer produces, `[T]` bool.

    A rollout is off-policy if the mean of `behaviour logprob - old logprob` over its tokens exceeds `threshold`
    (arXiv:2512.02556 eq. 9). Setting their advantage to 0 leaves the denominator as it is. The paper and TRL compare
    with the policy of each optimizer step; here it is the policy at the start of the update.
    """
    gap_T = torch.where(mask_T, behaviour_T - old_T, 0.0)
    return mask_T & (advantages_T < 0) & (_at_level(gap_T, mask_T, segments_T, "geometric") > threshold)


def _log_ratio(
    old_T: Tensor, behaviour_T: Tensor, mask_T: Tensor, segments_T: Tensor, level: FilterLevel, clamp: float
) -> Tensor:
    difference_T = torch.where(mask_T, old_T - behaviour_T, 0.0)
    return _at_level(difference_T, mask_T, segments_T, level).clamp(-clamp, clamp)


def _at_level(values_T: Tensor, mask_T: Tensor, segments_T: Tensor, level: FilterLevel) -> Tensor:
    """Each masked token's own value, or the mean, sum or maximum over its level's span, accumulated in float64."""
    if level == "token" or not mask_T.any():
        return values_T
    spans_N, num_spans = _spans(mask_T, segments_T, level)
    values_N = values_T[mask_T].double()
    if level == "max":
        per_span = values_N.new_full((num_spans,), -torch.inf).scatter_reduce_(0, spans_N, values_N, "amax")
    else:
        per_span = sums_by(values_N, spans_N, num_spans)
        per_span = per_span if level == "sequence" else per_span / torch.bincount(spans_N, minlength=num_spans)
    spread_T = torch.zeros_like(values_T)
    spread_T[mask_T] = per_span[spans_N].to(values_T.dtype)
    return spread_T


def _spans(mask_T: Tensor, segments_T: Tensor, level: FilterLevel) -> tuple[Tensor, int]:
    """Index of each masked token's span: itself, its run or its rollout, `[N]`; and the number of spans."""
    if level == "token":
        num_tokens = int(mask_T.sum())
        return torch.arange(num_tokens, device=mask_T.device), num_tokens
    return dense((_runs(mask_T, segments_T) if level == "segment" else segments_T)[mask_T])


def _runs(mask_T: Tensor, segments_T: Tensor) -> Tensor:
    """`[T]` number of each unbroken run of masked tokens within a rollout; valid at masked tokens only."""
    begins_T = mask_T.clone()
    begins_T[1:] &= ~mask_T[:-1] | (segments_T[1:] != segments_T[:-1])
    return begins_T.long().cumsum(0)
