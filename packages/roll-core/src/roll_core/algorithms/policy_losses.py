"""Policy losses: the per-token objective to minimise. `PolicyObjective` masks and aggregates the result.

T flat tokens of a microbatch. Metrics are per token too. Names that end in `/max` or `/min` are reduced by max or min.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roll_core.algorithms.kl import LOG_RATIO_CLAMP
from roll_core.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_core.spec.algorithms import PolicyLossParams
    from roll_core.spec.train import MicroBatch


def ppo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> tuple[Tensor, Mapping[str, Tensor]]:
    """PPO's clipped surrogate (arXiv:1707.06347 eq. 7) with two clip ranges and an optional dual clip.

    `r = exp(logprob - old_logprob)` and `L = -min(r A, clip(r, 1 - pg_clip_low, 1 + pg_clip_high) A)`. Unequal ranges
    give clip-higher (DAPO, arXiv:2503.14476 §3.1). With `dual_clip` c > 1, the loss is at most `-c A` where `A < 0`
    (arXiv:1912.09729). `log r` is clamped to ± `pg_options.log_ratio_clamp` (20), which keeps `r` finite. A clamped
    token has no gradient.

    Without old logprobs in the batch, the policy is assumed unchanged since sampling. Then `r` is 1 and has the
    gradient of `logprob`, which is exact for one optimizer step per batch.

    Raises `UnsupportedError` for unknown `pg_options` and `DataError` for a batch without advantages.
    """
    log_ratio_T = _log_ratio(logprobs_T, micro, params, known={"log_ratio_clamp"})
    advantages_T = _advantages(micro)
    low, high = 1.0 - params.pg_clip_low, 1.0 + params.pg_clip_high
    ratio_T = log_ratio_T.exp()
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(low, high) * advantages_T
    loss_T = torch.maximum(plain_T, clipped_T)
    with torch.no_grad():
        metrics = _ratio_metrics(log_ratio_T)
        metrics["clipfrac_low"] = ((advantages_T < 0) & (ratio_T < low)).float()
        metrics["clipfrac_high"] = ((advantages_T > 0) & (ratio_T > high)).float()
        metrics["clipfrac"] = metrics["clipfrac_low"] + metrics["clipfrac_high"]
    if params.dual_clip is not None:
        bound_T = -params.dual_clip * advantages_T
        bounded_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(bounded_T, bound_T, loss_T)
        metrics["dual_clipfrac"] = bounded_T.float()
    return loss_T, metrics


def vanilla(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Plain policy gradient, `L = -A * logprob` (Williams 1992), without a ratio or a clip.

    Suitable for one optimizer step per batch, or for steps that keep the policy close to the sampling policy. Raises
    `UnsupportedError` for unknown `pg_options` and `DataError` for a batch without advantages.
    """
    log_ratio_T = _log_ratio(logprobs_T, micro, params, known={"log_ratio_clamp"})
    with torch.no_grad():
        metrics = _ratio_metrics(log_ratio_T)
    masked_T = torch.where(micro.loss_mask_T, logprobs_T, 0.0)
    return -_advantages(micro) * masked_T, metrics


def _log_ratio(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams, *, known: set[str]) -> Tensor:
    unknown = sorted(set(params.options) - known)
    if unknown:
        raise UnsupportedError(f"unknown pg_options {', '.join(unknown)}, expected {sorted(known)}")
    old_T = logprobs_T.detach() if micro.old_logprobs_T is None else micro.old_logprobs_T
    bound = params.options.get("log_ratio_clamp", LOG_RATIO_CLAMP)
    # Values outside the mask are arbitrary. Their exp() must not reach the loss or the gradient.
    return torch.where(micro.loss_mask_T, logprobs_T - old_T, 0.0).clamp(-bound, bound)


def _advantages(micro: MicroBatch) -> Tensor:
    if micro.advantages_T is None:
        raise DataError("the policy loss needs advantages, but the batch has none")
    return torch.where(micro.loss_mask_T, micro.advantages_T, 0.0)


def _ratio_metrics(log_ratio_T: Tensor) -> dict[str, Tensor]:
    """Distance from the policy that sampled the tokens; `approx_kl` is k3 of KL(old || new)."""
    log_ratio_T = log_ratio_T.detach()
    ratio_T = log_ratio_T.exp()
    return {
        "ratio": ratio_T,
        "ratio/max": ratio_T,
        "ratio/min": ratio_T,
        "approx_kl": torch.expm1(log_ratio_T) - log_ratio_T,
    }
