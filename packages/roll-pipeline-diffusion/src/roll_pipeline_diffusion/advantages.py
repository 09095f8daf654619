"""Advantages of samples from their rewards.

Shapes: S samples of a batch, also of several prompts; G groups: the samples of one prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch

from roll_core.algorithms.normalise import clip, divide_by_std, moments_by
from roll_core.errors import ContractError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_pipeline_diffusion.algorithm_config import BoundFunction


class FlowAdvantage(Protocol):
    """Computes advantages. Parameters after `weights` receive the options of the same names."""

    def __call__(self, scores: Mapping[str, Tensor], groups_S: Tensor, weights: Mapping[str, float]) -> Tensor:
        """Advantages `[S]`.

        `scores` has each reward's scores `[S]`, finite, as scored; `groups_S` an integer per prompt; `weights` a number
        per reward. Samples that failed are absent.
        """
        ...


def group(
    scores: Mapping[str, Tensor],
    groups_S: Tensor,
    weights: Mapping[str, float],
    *,
    std: Literal["global", "group", "none"] = "global",
    normalise: Literal["sum", "separate"] = "sum",
    epsilon: float = 1e-4,
    adv_clip_max: float | None = 5.0,
) -> Tensor:
    """Distance from the group's mean in standard deviations: `clip((R - mean_G) / (std + epsilon), ± adv_clip_max)`.

    With `std: global` as in Flow-GRPO (arXiv:2505.05470), the deviation of all rewards of the batch divides. With
    `normalise: sum`, R is the weighted sum of the rewards. With `separate`, each reward is normalised by itself, and
    the results are summed with the weights, as in GDPO (arXiv:2601.05242).

    Standard deviations are unbiased as everywhere in ROLL; Flow-GRPO, DanceGRPO and verl-omni divide by S instead of
    S - 1. A deviation of at most `epsilon` does not divide.
    """
    if normalise == "sum":
        total_S = torch.stack([weights[name] * score_S.double() for name, score_S in scores.items()]).sum(0)
        advantages_S = _relative(total_S, groups_S, std, epsilon)
    else:
        parts = [
            weights[name] * _relative(score_S.double(), groups_S, std, epsilon) for name, score_S in scores.items()
        ]
        advantages_S = torch.stack(parts).sum(0)
    return clip(advantages_S, adv_clip_max).float()


def _relative(rewards_S: Tensor, groups_S: Tensor, std: str, epsilon: float) -> Tensor:
    """Rewards minus their group's mean, over a standard deviation."""
    means_S, stds_S = moments_by(rewards_S, groups_S)
    if std == "none":
        return rewards_S - means_S
    if std == "global":
        _, stds_S = moments_by(rewards_S, torch.zeros_like(groups_S))
    return divide_by_std(rewards_S - means_S, stds_S, epsilon)


def flow_advantages(
    function: BoundFunction, scores: Mapping[str, Tensor], groups_S: Tensor, weights: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """Advantages `[S]` float32, and which samples count `[S]` bool.

    A sample with a NaN among its scores failed: it does not count, has advantage 0, and affects no statistics. Raises
    `DataError` for infinite scores, or if the names of scores and weights differ, and `ContractError` if the function
    does not return finite advantages.
    """
    if not scores or set(scores) != set(weights):
        raise DataError(
            f"scores of {', '.join(sorted(scores)) or 'no reward'}, weights of {', '.join(sorted(weights))}"
        )
    for name, each_S in scores.items():
        if torch.isinf(each_S).any():
            raise DataError(f"the reward {name} has infinite scores: expected finite ones, or NaN for failed samples")
    counts_S = ~torch.stack([each_S.isnan() for each_S in scores.values()]).any(0)
    advantages_S = torch.zeros(len(groups_S), dtype=torch.float32)
    if bool(counts_S.any()):
        result = function({name: each_S[counts_S] for name, each_S in scores.items()}, groups_S[counts_S], weights)
        num = int(counts_S.sum())
        if not isinstance(result, torch.Tensor) or result.shape != (num,) or not bool(result.isfinite().all()):
            what = f"shape {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            raise ContractError(f"the advantage {function.target} returned {what}, expected {num} finite numbers")
        advantages_S[counts_S] = result.float()
    return advantages_S, counts_S
