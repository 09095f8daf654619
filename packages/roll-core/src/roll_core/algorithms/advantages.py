"""Advantage estimators: from the reward of a sequence to the advantage of each of its tokens.

T flat tokens, S sequences, N masked tokens (tokens that the policy generated).

Every recursion runs over masked tokens only. An environment's tokens in the middle of a response are no time steps and
add no discount. The successor of a turn's last token is the next turn's first token. Rewards of unmasked tokens are
ignored.

`reinforce`, `rloo` and `gae` receive rewards already normalised as configured (`roll_core.algorithms.normalise`).
`grpo` normalises them itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roll_core.algorithms._segments import (
    counts_by,
    dense,
    next_in_segment,
    require_finite,
    reverse_discounted_sum,
    sums_by,
)
from roll_core.algorithms.normalise import clip, divide_by_std, moments_by
from roll_core.algorithms.rewards import token_rewards
from roll_core.errors import UnsupportedError
from roll_core.spec.algorithms import AdvantageOutput

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.spec.algorithms import AdvantageInput


def reinforce(batch: AdvantageInput) -> AdvantageOutput:
    """REINFORCE: the discounted return to go, `A_t = G_t = r_t + gamma * G_{t+1}`.

    Sources: Williams 1992; Sutton & Barto §13.3. Baselines come from the normalisation stage. With
    `norm_mean_type: group` and no `norm_std_type` this is the advantage of Dr. GRPO (arXiv:2503.20783). With the KL in
    the token rewards and advantages whitened over the batch (`whiten_advantages`) it is REINFORCE++
    (arXiv:2501.03262 eq. 8-10).
    """
    rewards_T = token_rewards(batch)
    returns_T = _returns_to_go(rewards_T, batch)
    return AdvantageOutput(advantages_T=returns_T, returns_T=returns_T, token_rewards_T=rewards_T)


def grpo(batch: AdvantageInput) -> AdvantageOutput:
    """GRPO: `A_i = (R_i - mean(R)) / (std(R) + 1e-6)` over the samples of one prompt, for each token of response `i`.

    Source: arXiv:2402.03300 §4.1.2. The standard deviation is unbiased. A group without spread gets advantage 0.

    With the KL in the reward, a token's advantage is the sum of the rewards from this token on, as in the paper's
    process supervision (§4.1.3). `gamma` below 1 discounts that sum, as in ROLL. Raises `NonFiniteError`.
    """
    require_finite("rewards", batch.scores_S)
    means_S, stds_S = moments_by(batch.scores_S, batch.groups_S)
    relative_S = divide_by_std(batch.scores_S.double() - means_S, stds_S)
    rewards_T = token_rewards(batch, clip(relative_S, batch.reward_clip).float())
    return AdvantageOutput(advantages_T=_returns_to_go(rewards_T, batch), token_rewards_T=rewards_T)


def rloo(batch: AdvantageInput) -> AdvantageOutput:
    """RLOO: the sequence's total reward minus the mean of the *other* samples of its prompt (arXiv:2402.14740).

    `A_i = R_i - sum_{j != i} R_j / (n - 1)`, the same for each token of a sequence. `R_i` sums the sequence's token
    rewards, so it includes penalties. A group of one has no baseline; its advantage is 0 and it does not train.
    The whole response is one action. Raises `UnsupportedError` if `gamma` is not 1.
    """
    if batch.gamma != 1.0:
        raise UnsupportedError(
            f"rloo treats the whole response as one action and does not support gamma {batch.gamma:g}: set gamma to 1,"
            " or adv_estimator to reinforce"
        )
    rewards_T = token_rewards(batch)
    rewards_N, segments_N = _masked(rewards_T, batch)
    totals_S = sums_by(rewards_N, segments_N, batch.groups_S.numel())
    groups_S, num_groups = dense(batch.groups_S)
    # Sequences without a masked token have no reward, so they do not count in the baseline.
    takes_part_S = counts_by(segments_N, batch.groups_S.numel()) > 0
    totals_S = torch.where(takes_part_S, totals_S, 0.0)
    others_S = sums_by(takes_part_S.long(), groups_S, num_groups)[groups_S] - 1
    baselines_S = (sums_by(totals_S, groups_S, num_groups)[groups_S] - totals_S) / others_S.clamp(min=1)
    advantages_S = torch.where(others_S > 0, totals_S - baselines_S, 0.0)
    return AdvantageOutput(advantages_T=_scatter(advantages_S[segments_N], batch), token_rewards_T=rewards_T)


def gae(batch: AdvantageInput) -> AdvantageOutput:
    """Generalised advantage estimation (arXiv:1506.02438 eq. 16) with the critic's target `returns = A + V`.

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = delta_t + gamma * lambd * A_{t+1}`. `V_{t+1}` is the value before
    the next masked token, and 0 after the last one. A response truncated at the length limit therefore counts as
    terminated. Raises `UnsupportedError` for a batch without values, and `NonFiniteError`.
    """
    if batch.values_T is None:
        raise UnsupportedError("gae needs values, but the batch has none: configure the role critic")
    rewards_T = token_rewards(batch)
    rewards_N, segments_N = _masked(rewards_T, batch)
    values_N = batch.values_T[batch.mask_T].double()
    require_finite("the critic's values", values_N)
    deltas_N = rewards_N + batch.gamma * next_in_segment(values_N, segments_N) - values_N
    advantages_N = reverse_discounted_sum(deltas_N, segments_N, batch.gamma * batch.lambd)
    return AdvantageOutput(
        advantages_T=_scatter(advantages_N, batch),
        returns_T=_scatter(advantages_N + values_N, batch),
        token_rewards_T=rewards_T,
    )


def _returns_to_go(rewards_T: Tensor, batch: AdvantageInput) -> Tensor:
    rewards_N, segments_N = _masked(rewards_T, batch)
    return _scatter(reverse_discounted_sum(rewards_N, segments_N, batch.gamma), batch)


def _masked(rewards_T: Tensor, batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    return rewards_T[batch.mask_T].double(), batch.segments_T[batch.mask_T]


def _scatter(values_N: Tensor, batch: AdvantageInput) -> Tensor:
    flat_T = torch.zeros(batch.mask_T.shape, dtype=torch.float32, device=values_N.device)
    flat_T[batch.mask_T] = values_N.float()
    return flat_T
