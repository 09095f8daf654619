"""Advantage estimators: how the reward of a sequence becomes credit for each of its tokens.

T flat tokens, S sequences, N masked tokens (those that the model drew).

Every recursion runs over masked tokens only: a token that an environment wrote in the middle of a response is neither
a step in time nor discounted over, so the successor of a turn's last token is the next turn's first. Rewards of tokens
that are not masked are not read.

Normalising rewards is a stage of its own, `roll_core.algorithms.normalise`, that runs before an estimator.
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
from roll_core.errors import UnsupportedError
from roll_core.spec.algorithms import AdvantageOutput

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.spec.algorithms import AdvantageInput


def reinforce(batch: AdvantageInput) -> AdvantageOutput:
    """The discounted return to go, `A_t = G_t = r_t + gamma * G_{t+1}` (Williams 1992; Sutton & Barto §13.3).

    Baselines come from the normalisation stage: with `norm_mean_type: group` and no `norm_std_type` this is Dr. GRPO's
    advantage (arXiv:2503.20783). With the KL in the reward of each token, and advantages whitened over the batch
    (`whiten_advantages`), it is REINFORCE++ (arXiv:2501.03262 eq. 8-10).
    """
    rewards_N, segments_N = _masked_rewards(batch)
    returns_T = _scatter(reverse_discounted_sum(rewards_N, segments_N, batch.gamma), batch)
    return AdvantageOutput(advantages_T=returns_T, returns_T=returns_T)


def grpo(batch: AdvantageInput) -> AdvantageOutput:
    """The group-relative reward of the sequence, for each of its tokens (arXiv:2402.03300 §4.1.2).

    `(R_i - mean(group)) / std(group)` is computed by the normalisation stage, which the pipeline sets to the group
    for this estimator. Without per-token penalties and with `gamma` 1 every token gets exactly that number; with
    penalties in the reward, or rewards at several tokens, the sum of those from the token on, as the paper has it for
    process supervision (§4.1.3). `gamma` below 1 discounts that sum, as ROLL does.
    """
    rewards_N, segments_N = _masked_rewards(batch)
    advantages_T = _scatter(reverse_discounted_sum(rewards_N, segments_N, batch.gamma), batch)
    return AdvantageOutput(advantages_T=advantages_T)


def rloo(batch: AdvantageInput) -> AdvantageOutput:
    """The sequence's total reward less the mean of the *other* samples of its prompt (arXiv:2402.14740).

    `A_i = R_i - sum_{j != i} R_j / (n - 1)`, the same for each token of a sequence, where `R_i` sums the sequence's
    token rewards: penalties count. A group of one has nothing to compare with and gets 0, so it does not train.
    The response is one action, so a `gamma` other than 1 has no meaning here and is refused.
    """
    if batch.gamma != 1.0:
        raise UnsupportedError(
            f"rloo takes the whole response as one action, so gamma {batch.gamma:g} cannot be honoured: set gamma to 1,"
            " or adv_estimator to reinforce"
        )
    rewards_N, segments_N = _masked_rewards(batch)
    totals_S = sums_by(rewards_N, segments_N, batch.groups_S.numel())
    groups_S, num_groups = dense(batch.groups_S)
    # Sequences without a masked token take no part: they have no reward to compare with.
    takes_part_S = counts_by(segments_N, batch.groups_S.numel()) > 0
    totals_S = torch.where(takes_part_S, totals_S, 0.0)
    others_S = sums_by(takes_part_S.long(), groups_S, num_groups)[groups_S] - 1
    baselines_S = (sums_by(totals_S, groups_S, num_groups)[groups_S] - totals_S) / others_S.clamp(min=1)
    advantages_S = torch.where(others_S > 0, totals_S - baselines_S, 0.0)
    return AdvantageOutput(advantages_T=_scatter(advantages_S[segments_N], batch))


def gae(batch: AdvantageInput) -> AdvantageOutput:
    """Generalised advantage estimation (arXiv:1506.02438 eq. 16) with the critic's target `returns = A + V`.

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = delta_t + gamma * lambd * A_{t+1}`, where `V_{t+1}` is the value
    before the next masked token and 0 after the last: a response that was cut at the length limit counts as ended.
    """
    if batch.values_T is None:
        raise UnsupportedError("gae reads the critic's values, and there are none: give the run the role critic")
    rewards_N, segments_N = _masked_rewards(batch)
    values_N = batch.values_T[batch.mask_T].double()
    require_finite("the critic's values", values_N)
    deltas_N = rewards_N + batch.gamma * next_in_segment(values_N, segments_N) - values_N
    advantages_N = reverse_discounted_sum(deltas_N, segments_N, batch.gamma * batch.lambd)
    return AdvantageOutput(
        advantages_T=_scatter(advantages_N, batch), returns_T=_scatter(advantages_N + values_N, batch)
    )


def _masked_rewards(batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    rewards_N = batch.token_rewards_T[batch.mask_T].double()
    require_finite("token rewards", rewards_N)
    return rewards_N, batch.segments_T[batch.mask_T]


def _scatter(values_N: Tensor, batch: AdvantageInput) -> Tensor:
    flat_T = torch.zeros(batch.mask_T.shape, dtype=torch.float32, device=values_N.device)
    flat_T[batch.mask_T] = values_N.float()
    return flat_T
