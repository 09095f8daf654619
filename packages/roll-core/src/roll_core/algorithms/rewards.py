"""From a score per rollout to a reward per token, and masks that exclude rollouts from the loss.

T flat tokens, S rollouts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roll_core.algorithms.normalise import clip, moments_by, whiten
from roll_core.algorithms.segments import is_last_in_segment, require_finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.spec.algorithms import AdvantageInput
    from roll_core.types import FinishReason


def token_rewards(batch: AdvantageInput, scores_S: Tensor | None = None) -> Tensor:
    """Token rewards, `[T]` float32; 0 outside the mask.

    In this order:

    1. Put each score at the masked token of its rollout that was sampled last.
    2. Subtract `kl_coef * kl_T` at every masked token. This is the config's `add_token_level_kl` (arXiv:1909.08593
       eq. 2, spread over tokens).
    3. Clamp to `± reward_clip`.
    4. Whiten, if `whiten_rewards`.

    `scores_S` replaces the batch's scores, for an estimator that normalises them. The score of a rollout without a
    masked token is ignored. Raises `NonFiniteError`.
    """
    scores_S = batch.scores_S if scores_S is None else scores_S
    order_N, kl_T = batch.order_N, batch.kl_T
    require_finite("scores", scores_S)
    segments_N = batch.segments_T[order_N]
    rewards_N = torch.where(is_last_in_segment(segments_N), scores_S.double()[segments_N], 0.0)
    if kl_T is not None:
        kl_N = kl_T[order_N].double()
        require_finite("the KL between policy and reference", kl_N)
        rewards_N = rewards_N - batch.kl_coef * kl_N
    rewards_T = torch.zeros(batch.mask_T.shape, dtype=torch.float32, device=scores_S.device)
    rewards_T[order_N] = clip(rewards_N, batch.reward_clip).float()
    return whiten(rewards_T, batch.mask_T, batch.whiten_epsilon) if batch.whiten_rewards else rewards_T


def soft_overlong_penalty(lengths_S: Tensor, *, max_length: int, cache_length: int, factor: float = 1.0) -> Tensor:
    """Penalty of DAPO for long responses, `[S]` float64 in [-factor, 0] (arXiv:2503.14476 eq. 13).

    With `L` the response's length: 0 up to `max_length - cache_length`, -1 above `max_length`, and
    `(max_length - cache_length - L) / cache_length` between, times `factor`. verl (`overlong_buffer`) and NeMo-RL do
    not bound the penalty; there, responses are never longer than `max_length`.
    """
    return factor * ((max_length - cache_length - lengths_S.double()) / cache_length).clamp(-1.0, 0.0)


def max_len_mask(finish_reasons: Sequence[FinishReason]) -> Tensor:
    """Mask out responses truncated at the length limit, `[S]` bool.

    This is DAPO's overlong filtering (arXiv:2503.14476 §3.4). A response that ends by itself at exactly the limit is
    kept.
    """
    return torch.tensor([reason != "length" for reason in finish_reasons], dtype=torch.bool)


def difficulty_mask(scores_S: Tensor, groups_S: Tensor, *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Keep samples of groups with `low < mean raw score < high`, `[S]` bool: neither unsolvable nor always solved."""
    means_S, _ = moments_by(scores_S, groups_S)
    return (means_S > low) & (means_S < high)


def error_max_len_clip(scores_S: Tensor, lengths_S: Tensor, *, threshold: int, correct: float) -> Tensor:
    """Mask out wrong responses (score < `correct`) of at least `threshold` tokens, `[S]` bool."""
    return (scores_S >= correct) | (lengths_S < threshold)
