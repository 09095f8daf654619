"""Advantage estimators of multi-turn rollouts: all generated tokens of a turn have the same advantage.

T flat tokens, N masked tokens, S rollouts, U turns of all rollouts, V turns with a masked token.

They start from the rewards of turns, and do not change them to rewards of tokens. With the KL in the reward,
`step_reinforce` and `gigpo` subtract from each token's advantage the discounted KL from this token on.
`agentic_reinforce` and `turn_gae` subtract a turn's KL from the turn's reward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from roll_core.algorithms.advantages import reinforce
from roll_core.algorithms.normalise import clip, divide_by_std, moments_by
from roll_core.algorithms.segments import (
    dense,
    next_in_segment,
    require_finite,
    reverse_discounted_sum,
    sums_by,
)
from roll_core.errors import UnsupportedError
from roll_core.spec.algorithms import AdvantageOutput
from roll_pipeline_agentic.config import GiGPOOptions, StepReinforceOptions

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.spec.algorithms import AdvantageInput, RolloutTurns


def step_reinforce(batch: AdvantageInput) -> AdvantageOutput:
    """Discounted return of each turn, `G_k = sum_{j >= k} step_reward_gamma^(j-k) r_j`, optionally normalised.

    Source: ROLL's `step_reinforce`, with its options in `adv_options`: `method` (`identity`, `mean`, `mean_std`)
    normalises `G_k` over the turns of `grouping` (`batch`; `group`: all turns of the prompt's rollouts; `state`: those
    of the group that began in the same state). ROLL makes a training row of each turn; here `grouping` counts turns
    however they are cut into rows. Raises `UnsupportedError` without turns, and `NonFiniteError`.
    """
    turns = _turns(batch, "step_reinforce")
    options = StepReinforceOptions(**batch.options)
    returns_U = reverse_discounted_sum(turns.rewards_U, turns.rollouts_U, options.step_reward_gamma)
    if options.method != "identity":
        index_U = torch.zeros_like(turns.rollouts_U)
        if options.grouping != "batch":
            index_U = _same_state(turns, batch) if options.grouping == "state" else batch.groups_S[turns.rollouts_U]
        returns_U = _normalised(returns_U, index_U, batch, by_std=options.method == "mean_std")
    return _credit(returns_U, turns, batch)


def gigpo(batch: AdvantageInput) -> AdvantageOutput:
    """GiGPO: `A = episode_reward_weight A_E + step_reward_weight A_S` (arXiv:2505.10978).

    `A_E = (R_i - mean(R)) / F` over the rollouts of the group. `A_S = (G_k - mean(G)) / F` over the group's turns that
    began in the same state, with `G_k` as in `step_reinforce`. `F` is 1 (`mode: mean_norm`) or the standard deviation
    plus `norm_epsilon` (`mean_std_norm`). A turn whose state occurs once has `A_S = 0`.

    verl-agent counts an episode once per turn in `mean(R)` by default, so long episodes move the mean; here it counts
    once. There, a group of one keeps its raw reward; here `A_E` is 0. Raises `UnsupportedError` without turns or their
    states, and `NonFiniteError`.
    """
    turns = _turns(batch, "gigpo")
    require_finite("rewards", batch.scores_S)
    options = GiGPOOptions(**batch.options)
    by_std = options.mode == "mean_std_norm"
    episode_S = _normalised(batch.scores_S.double(), batch.groups_S, batch, by_std=by_std)
    returns_U = reverse_discounted_sum(turns.rewards_U, turns.rollouts_U, options.step_reward_gamma)
    step_U = _normalised(returns_U, _same_state(turns, batch), batch, by_std=by_std)
    episode_U = options.episode_reward_weight * episode_S[turns.rollouts_U]
    return _credit(episode_U + options.step_reward_weight * step_U, turns, batch)


def agentic_reinforce(batch: AdvantageInput) -> AdvantageOutput:
    """Return of each turn with the pipeline's discount: `G_k = r_k + gamma G_{k+1}`.

    Source: ROLL's `agentic_reinforce`. ROLL reads only the reward of a turn's last token, so it ignores the KL of the
    other tokens; here a turn's reward contains the KL of all its tokens. Raises `UnsupportedError` without turns, and
    `NonFiniteError`.
    """
    turns = _turns(batch, "agentic_reinforce")
    returns_U = reverse_discounted_sum(_turn_rewards(turns, batch), turns.rollouts_U, batch.gamma)
    flat_T = _scatter(returns_U, turns, batch)
    return AdvantageOutput(advantages_T=flat_T, returns_T=flat_T)


def turn_gae(batch: AdvantageInput) -> AdvantageOutput:
    """GAE over turns: `delta_k = r_k + gamma V_{k+1} - V_k`, `A_k = delta_k + gamma lambd A_{k+1}`.

    One turn is one action (arXiv:1506.02438 eq. 16 with turns as time steps). `V_k` is the critic's value before the
    turn's first masked token, and 0 after the last turn. The critic's target at each token of the turn is `A_k + V_k`,
    with `critic_lambd` in `A_k` if it is given. The reward of a turn without a masked token belongs to the turn before
    it. Raises `UnsupportedError` without turns or values, and `NonFiniteError`.
    """
    turns = _turns(batch, "turn_gae")
    if batch.values_T is None:
        raise UnsupportedError("turn_gae needs values, but the batch has none: configure the role critic")
    index_N = turns.index_T[batch.mask_T]
    values_N = batch.values_T[batch.mask_T].double()
    require_finite("the critic's values", values_N)
    rewards_U = _turn_rewards(turns, batch)
    positions_N = torch.arange(index_N.numel(), device=index_N.device)
    first_U = torch.full(rewards_U.shape, index_N.numel(), device=index_N.device)
    first_U.scatter_reduce_(0, index_N, positions_N, "amin")
    kept_U = first_U < index_N.numel()
    if not kept_U.any():
        zeros_T = torch.zeros(batch.mask_T.shape, dtype=torch.float32, device=index_N.device)
        return AdvantageOutput(advantages_T=zeros_T, returns_T=zeros_T)
    rollouts_V, values_V = turns.rollouts_U[kept_U], values_N[first_U[kept_U]]
    # Each turn's nearest kept turn, itself or before it; -1 before the first one.
    kept_before_U = kept_U.long().cumsum(0) - 1
    earns_U = (kept_before_U >= 0) & (turns.rollouts_U[kept_U.nonzero()[:, 0]][kept_before_U] == turns.rollouts_U)
    rewards_V = sums_by(rewards_U[earns_U], kept_before_U[earns_U], values_V.numel())
    deltas_V = rewards_V + batch.gamma * next_in_segment(values_V, rollouts_V) - values_V

    def advantages(lambd: float) -> Tensor:
        spread_U = torch.zeros_like(rewards_U)
        spread_U[kept_U] = reverse_discounted_sum(deltas_V, rollouts_V, batch.gamma * lambd)
        return spread_U

    values_U = torch.zeros_like(rewards_U)
    values_U[kept_U] = values_V
    target_U = advantages(batch.lambd if batch.critic_lambd is None else batch.critic_lambd) + values_U
    return AdvantageOutput(
        advantages_T=_scatter(advantages(batch.lambd), turns, batch), returns_T=_scatter(target_U, turns, batch)
    )


def _turns(batch: AdvantageInput, name: str) -> RolloutTurns:
    if batch.turns is None:
        raise UnsupportedError(f"{name} credits turns, but the rollouts have none: set another adv_estimator")
    if batch.whiten_rewards:
        raise UnsupportedError(f"{name} credits turns and does not whiten token rewards: set whiten_rewards to false")
    require_finite("rewards of turns", batch.turns.rewards_U)
    return batch.turns


def _turn_rewards(turns: RolloutTurns, batch: AdvantageInput) -> Tensor:
    """Reward of each turn, less the KL of its masked tokens; clamped to ± `reward_clip`. float64."""
    rewards_U = turns.rewards_U.double()
    if batch.kl_T is not None:
        kl_N = batch.kl_T[batch.mask_T].double()
        require_finite("the KL between policy and reference", kl_N)
        rewards_U = rewards_U - batch.kl_coef * sums_by(kl_N, turns.index_T[batch.mask_T], rewards_U.numel())
    return clip(rewards_U, batch.reward_clip)


def _same_state(turns: RolloutTurns, batch: AdvantageInput) -> Tensor:
    """Index of each turn's group and anchor state, `[U]`."""
    if turns.states_U is None:
        raise UnsupportedError("the environment names no states of turns, which gigpo and grouping: state compare")
    states_U, num_states = dense(turns.states_U)
    return dense(batch.groups_S)[0][turns.rollouts_U] * num_states + states_U


def _normalised(values: Tensor, index: Tensor, batch: AdvantageInput, *, by_std: bool) -> Tensor:
    """Distance to the mean of the entries with the same index, optionally divided by their deviation."""
    means, stds = moments_by(values, index)
    return divide_by_std(values - means, stds, batch.norm_epsilon) if by_std else values - means


def _credit(values_U: Tensor, turns: RolloutTurns, batch: AdvantageInput) -> AdvantageOutput:
    """A value for each token of a turn, less the discounted KL from the token on."""
    flat_T = _scatter(clip(values_U, batch.reward_clip), turns, batch)
    if batch.kl_T is not None:
        flat_T = flat_T + reinforce(replace(batch, scores_S=torch.zeros_like(batch.scores_S))).advantages_T
    return AdvantageOutput(advantages_T=flat_T)


def _scatter(values_U: Tensor, turns: RolloutTurns, batch: AdvantageInput) -> Tensor:
    flat_T = torch.zeros(batch.mask_T.shape, dtype=torch.float32, device=values_U.device)
    flat_T[batch.mask_T] = values_U[turns.index_T[batch.mask_T]].float()
    return flat_T
