"""Advantage estimators: from the reward of a rollout to the advantage of each of its tokens.

T flat tokens, S rollouts, N masked tokens (tokens that the policy generated), n members of a group.

Every recursion runs over masked tokens only. An environment's tokens in the middle of a response are no time steps and
add no discount. The successor of a turn's last token is the first token of the turn that was sampled next, whatever row
of the batch has it. Rewards of unmasked tokens are ignored.

`reinforce`, `reinforce_plus_plus`, `rloo` and `gae` receive rewards already normalised as configured
(`roll_core.algorithms.normalise`). The others compare a reward with its group themselves. Estimators that credit turns
are in `roll_pipeline_agentic.turn_advantages`.
"""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

import torch

from roll_core.algorithms.normalise import clip, divide_by_std, moments_by, whiten
from roll_core.algorithms.options import GDPOOptions, GRPOOptions, PassAtKOptions
from roll_core.algorithms.rewards import token_rewards
from roll_core.algorithms.segments import (
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
    """REINFORCE: the discounted return to go, `A_t = G_t = r_t + gamma * G_{t+1}`.

    Sources: Williams 1992; Sutton & Barto §13.3. Baselines come from the normalisation stage. With
    `norm_mean_type: group` and no `norm_std_type` this is the advantage of Dr. GRPO (arXiv:2503.20783).
    """
    rewards_T = token_rewards(batch)
    returns_T = _returns_to_go(rewards_T, batch)
    return AdvantageOutput(advantages_T=returns_T, returns_T=returns_T, token_rewards_T=rewards_T)


def reinforce_plus_plus(batch: AdvantageInput) -> AdvantageOutput:
    """REINFORCE++: the return to go, whitened over all masked tokens of the batch (arXiv:2501.03262 eq. 8-10).

    The KL in the token rewards (`add_token_level_kl`) is part of the return. Agrees with verl. OpenRLHF whitens with
    the biased variance, bounded below by 1e-8.
    """
    plain = reinforce(batch)
    whitened_T = whiten(plain.advantages_T, batch.mask_T, batch.whiten_epsilon)
    return AdvantageOutput(advantages_T=whitened_T, returns_T=plain.returns_T, token_rewards_T=plain.token_rewards_T)


def reinforce_plus_plus_baseline(batch: AdvantageInput) -> AdvantageOutput:
    """REINFORCE++-baseline: `R_i - mean(R)` of the group, whitened over all masked tokens of the batch.

    Source: arXiv:2501.03262; its KL is in the loss (k2). A group of one has baseline `R_i`; in verl it has none.
    """
    plain = _relative_credit(batch, _distance_from_mean(batch))
    whitened_T = whiten(plain.advantages_T, batch.mask_T, batch.whiten_epsilon)
    return AdvantageOutput(advantages_T=whitened_T, token_rewards_T=plain.token_rewards_T)


def grpo(batch: AdvantageInput) -> AdvantageOutput:
    """GRPO: `A_i = (R_i - mean(R)) / (std(R) + norm_epsilon)` over one prompt's samples, at each token of response `i`.

    Source: arXiv:2402.03300 §4.1.2. The standard deviation is unbiased. A group without spread gets advantage 0.

    With `adv_options.leave_one_out`, mean and deviation are those of the group's *other* samples, as in NeMo-RL's
    `use_leave_one_out_baseline`. The mean of the others alone, without a deviation, is `rloo`.

    With the KL in the reward, a token's advantage is the sum of the rewards from this token on, as in the paper's
    process supervision (§4.1.3). `gamma` below 1 discounts that sum, as in ROLL. Raises `NonFiniteError`.
    """
    require_finite("rewards", batch.scores_S)
    if GRPOOptions(**batch.options).leave_one_out:
        means_S, stds_S = _moments_of_others(batch.scores_S, batch.groups_S)
    else:
        means_S, stds_S = moments_by(batch.scores_S, batch.groups_S)
    relative_S = divide_by_std(batch.scores_S.double() - means_S, stds_S, batch.norm_epsilon)
    return _relative_credit(batch, relative_S)


def opo(batch: AdvantageInput) -> AdvantageOutput:
    """OPO: `A_i = R_i - sum_j(l_j R_j) / sum_j(l_j)`, the length-weighted mean of the group as baseline.

    Source: arXiv:2505.23585. `l_j` counts the masked tokens of rollout `j`. A group of one gets advantage 0; in verl
    its baseline is 0. Raises `NonFiniteError`.
    """
    groups_S, num_groups = dense(batch.groups_S)
    # Distances from the group's mean make equal rewards exactly 0, whatever the lengths.
    distance_S = _distance_from_mean(batch)
    lengths_S = torch.bincount(batch.segments_T[batch.mask_T], minlength=distance_S.numel()).double()
    weighted_G = sums_by(lengths_S * distance_S, groups_S, num_groups)
    baselines_S = (weighted_G / sums_by(lengths_S, groups_S, num_groups).clamp(min=1))[groups_S]
    return _relative_credit(batch, distance_S - baselines_S)


def max_rl(batch: AdvantageInput) -> AdvantageOutput:
    """MaxRL: `A_i = (R_i - mean(R)) / mean(R)` over the group (arXiv:2602.02710).

    For rewards of 0 and 1 its expectation approaches the gradient of the log-likelihood of a correct response. A group
    with mean 0 gets advantage 0; the unit of the rewards has no effect. Raises `UnsupportedError` for a negative
    reward, and `NonFiniteError`.
    """
    require_finite("rewards", batch.scores_S)
    if (batch.scores_S < 0).any():
        raise UnsupportedError(
            f"max_rl divides by the group's mean reward, but found a reward of {batch.scores_S.min():g}, expected at"
            " least 0: shift the rewards, or set adv_estimator to grpo"
        )
    means_S, _ = moments_by(batch.scores_S, batch.groups_S)
    solved_S = means_S > 0
    relative_S = torch.where(solved_S, _distance_from_mean(batch) / torch.where(solved_S, means_S, 1.0), 0.0)
    return _relative_credit(batch, relative_S)


def pass_at_k(batch: AdvantageInput) -> AdvantageOutput:
    """Pass@k: credit by the best of `adv_options.k` responses, over all subsets of `k` responses to the prompt.

    With `max(I)` the best reward of a subset `I`, `adv_options.baseline` selects:

    * `mean`: `(E[max(I) | i in I] - E[max(I)]) / (std[max(I)] + norm_epsilon)`, in closed form (arXiv:2508.10751,
      for rewards of 0 and 1; the same expectation for others). `k: 1` is GRPO with the biased deviation.
    * `leave_one_out`: `E[max(I) - max(I without i) | i in I]` (arXiv:2505.15201). With `k` equal to the group's size
      only the best response has an advantage, its distance to the second: verl's `grpo_passk` (arXiv:2503.19595)
      without the division by the rewards' deviation.

    A group of fewer than `k` members gets advantage 0; with `mean` also one of exactly `k`. Raises `NonFiniteError`.
    """
    require_finite("rewards", batch.scores_S)
    options = PassAtKOptions(**batch.options)
    scores_S = batch.scores_S.double()
    relative_S = torch.zeros_like(scores_S)
    groups_S, num_groups = dense(batch.groups_S)
    for group in range(num_groups):
        members = (groups_S == group).nonzero()[:, 0]
        relative_S[members] = _best_of_k(scores_S[members], options, batch.norm_epsilon)
    return _relative_credit(batch, relative_S)


def gdpo(batch: AdvantageInput) -> AdvantageOutput:
    """GDPO: normalise each component of the reward in its group, then weight, sum and normalise over the batch.

    `A_i = sum_c w_c (R_ci - mean(R_c)) / (std(R_c) + norm_epsilon)`, then `(A_i - mean(A)) / (std(A) + norm_epsilon)`
    over all rollouts of the batch (arXiv:2601.05242). verl normalises over tokens in the second step (`masked_whiten`),
    so long responses weigh more there.

    `adv_options.weights` names components (`Reward.detail`) and their weights. The reward's value itself is not read. A
    rollout without a component does not vote in that component's statistics and gets no credit for it. Raises
    `UnsupportedError` if no rollout has a component, and `NonFiniteError`.
    """
    require_finite("rewards", batch.scores_S)
    options = GDPOOptions(**batch.options)
    total_S = torch.zeros(batch.scores_S.shape, dtype=torch.float64, device=batch.scores_S.device)
    for name, weight in options.weights.items():
        values_S = batch.components_S.get(name)
        if values_S is None:
            raise UnsupportedError(
                f"gdpo: no reward of this batch has the component {name!r} (adv_options.weights); found"
                f" {', '.join(sorted(batch.components_S)) or 'none'}: return it in the detail of the reward"
            )
        given_S = ~values_S.isnan()
        means_X, stds_X = moments_by(values_S[given_S], batch.groups_S[given_S])
        total_S[given_S] += weight * divide_by_std(values_S[given_S].double() - means_X, stds_X, batch.norm_epsilon)
    if options.batch_norm:
        means_S, stds_S = moments_by(total_S, torch.zeros_like(batch.groups_S))
        total_S = divide_by_std(total_S - means_S, stds_S, batch.norm_epsilon)
    return _relative_credit(batch, total_S)


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
    takes_part_S = torch.bincount(segments_N, minlength=batch.groups_S.numel()) > 0
    num_S = sums_by(takes_part_S.long(), groups_S, num_groups)[groups_S]
    means_X, _ = moments_by(totals_S[takes_part_S], groups_S[takes_part_S])
    advantages_S = torch.zeros_like(totals_S)
    # The distance to the mean of the others is n / (n - 1) times that to the mean of all.
    advantages_S[takes_part_S] = totals_S[takes_part_S] - means_X
    advantages_S = torch.where(num_S > 1, advantages_S * num_S / (num_S - 1).clamp(min=1), 0.0)
    return AdvantageOutput(advantages_T=_scatter(advantages_S[segments_N], batch), token_rewards_T=rewards_T)


def remax(batch: AdvantageInput) -> AdvantageOutput:
    """ReMax: `A_i = R_i - R(greedy)`, with the reward of the greedy response to the same prompt (arXiv:2310.10505).

    The pipeline generates and scores that response, and does not train on it. Equal to verl's for `gamma` 1, also with
    the KL in the reward, which the greedy response's reward does not contain; verl does not discount. Raises
    `UnsupportedError` without baselines, and `NonFiniteError`.
    """
    if batch.baselines_S is None:
        raise UnsupportedError(
            "remax compares with the reward of a greedy response, but a group of this batch has none: recorded or saved"
            " rollouts have it only if their run had an estimator with a greedy baseline, set adv_estimator as there"
        )
    require_finite("rewards", batch.scores_S)
    require_finite("rewards of greedy responses", batch.baselines_S)
    return _relative_credit(batch, batch.scores_S.double() - batch.baselines_S)


def gae(batch: AdvantageInput) -> AdvantageOutput:
    """Generalised advantage estimation (arXiv:1506.02438 eq. 16) with the critic's target `returns = A + V`.

    `delta_t = r_t + gamma * V_{t+1} - V_t` and `A_t = delta_t + gamma * lambd * A_{t+1}`. `V_{t+1}` is the value before
    the next masked token, and 0 after the last one. A response truncated at the length limit therefore counts as
    terminated. With `critic_lambd` the critic's target uses this lambda instead of `lambd` (decoupled GAE,
    arXiv:2503.01491). Raises `UnsupportedError` for a batch without values, and `NonFiniteError`.
    """
    if batch.values_T is None:
        raise UnsupportedError("gae needs values, but the batch has none: configure the role critic")
    rewards_T = token_rewards(batch)
    rewards_N, segments_N = _masked(rewards_T, batch)
    values_N = batch.values_T[batch.order_N].double()
    require_finite("the critic's values", values_N)
    deltas_N = rewards_N + batch.gamma * next_in_segment(values_N, segments_N) - values_N
    advantages_N = reverse_discounted_sum(deltas_N, segments_N, batch.gamma * batch.lambd)
    critic_N = advantages_N
    if batch.critic_lambd is not None:
        critic_N = reverse_discounted_sum(deltas_N, segments_N, batch.gamma * batch.critic_lambd)
    return AdvantageOutput(
        advantages_T=_scatter(advantages_N, batch),
        returns_T=_scatter(critic_N + values_N, batch),
        token_rewards_T=rewards_T,
    )


def _relative_credit(batch: AdvantageInput, relative_S: Tensor) -> AdvantageOutput:
    """Each rollout's relative reward at its last token, less the KL of its tokens, as discounted returns to go."""
    rewards_T = token_rewards(batch, clip(relative_S, batch.reward_clip).float())
    return AdvantageOutput(advantages_T=_returns_to_go(rewards_T, batch), token_rewards_T=rewards_T)


def _distance_from_mean(batch: AdvantageInput) -> Tensor:
    require_finite("rewards", batch.scores_S)
    means_S, _ = moments_by(batch.scores_S, batch.groups_S)
    return batch.scores_S.double() - means_S


def _moments_of_others(scores_S: Tensor, groups_S: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased deviation of the other members of each element's group. A group of one: its own value, 0.

    Computed from the others themselves: as differences of sums over the group, they would be rounding where the others
    are equal.
    """
    means_S, stds_S = scores_S.double(), torch.zeros_like(scores_S, dtype=torch.float64)
    index_S, num_groups = dense(groups_S)
    for group in range(num_groups):
        members = (index_S == group).nonzero()[:, 0]
        n = len(members)
        if n > 1:
            is_other_nn = ~torch.eye(n, dtype=torch.bool, device=members.device)
            others = scores_S[members].expand(n, n)[is_other_nn]
            means, stds = moments_by(others, torch.arange(n, device=members.device).repeat_interleave(n - 1))
            means_S[members], stds_S[members] = means[:: n - 1], stds[:: n - 1]
    return means_S, stds_S


def _best_of_k(rewards_n: Tensor, options: PassAtKOptions, epsilon: float) -> Tensor:
    """`pass_at_k` for one group. Subsets are counted by the rank of their best member; ties have any order."""
    n, k = rewards_n.numel(), options.k
    if n < options.min_samples:
        return torch.zeros_like(rewards_n)
    order = rewards_n.argsort(stable=True)
    # Distances from the group's best make equal maxima exactly 0.
    ranked = rewards_n[order] - rewards_n.max()

    def share(subsets: list[int], total: int) -> Tensor:
        return torch.tensor(
            [num_subsets / total for num_subsets in subsets], dtype=rewards_n.dtype, device=rewards_n.device
        )

    with_i, ranks = comb(n - 1, k - 1), range(n)
    is_best = share([comb(rank, k - 1) for rank in ranks], with_i)
    if options.baseline == "leave_one_out":
        below = ranked * share([comb(rank, k - 2) for rank in ranks], with_i)
        credit = is_best * ranked - _sums_before(below)
    else:
        best = share([comb(rank, k - 1) for rank in ranks], comb(n, k))
        mean = (best * ranked).sum()
        std = (best * (ranked - mean).square()).sum().sqrt()
        above = ranked * share([comb(rank - 1, k - 2) if rank and k > 1 else 0 for rank in ranks], with_i)
        expected = is_best * ranked + _sums_before(above.flip(0)).flip(0)
        credit = divide_by_std(expected - mean, std, epsilon)
    relative_n = torch.empty_like(rewards_n)
    relative_n[order] = credit
    return relative_n


def _sums_before(values_n: Tensor) -> Tensor:
    """Sum of the elements before each one."""
    return torch.cat([values_n.new_zeros(1), values_n[:-1].cumsum(0)])


def _returns_to_go(rewards_T: Tensor, batch: AdvantageInput) -> Tensor:
    rewards_N, segments_N = _masked(rewards_T, batch)
    return _scatter(reverse_discounted_sum(rewards_N, segments_N, batch.gamma), batch)


def _masked(rewards_T: Tensor, batch: AdvantageInput) -> tuple[Tensor, Tensor]:
    order_N = batch.order_N
    return rewards_T[order_N].double(), batch.segments_T[order_N]


def _scatter(values_N: Tensor, batch: AdvantageInput) -> Tensor:
    flat_T = torch.zeros(batch.mask_T.shape, dtype=torch.float32, device=values_N.device)
    flat_T[batch.order_N] = values_N.float()
    return flat_T
