"""Policy losses: the per-token objective to minimise. `policy_objective` masks and aggregates the result.

T flat tokens of a microbatch, S its sequences. Metrics are per token too. Names that end in `/max` or `/min` are
reduced by max or min.

Notation: `r = exp(logprob - old_logprob)`, `A` advantage, `sg` stop-gradient. `log r` is clamped to ±
`pg_options.log_ratio_clamp` (20) before an exponential, which keeps `r` finite; a clamped token has no gradient.
Without old logprobs in the batch, the policy is assumed unchanged since sampling. Then `r` is 1 and has the gradient
of `logprob`, which is exact for one optimizer step per batch.

A *sequence* is a rollout: one row of the batch, or the rows that share `TrainSequence.rollout`. Sequence-level losses
use all of its tokens in the loss, and no statistic of a microbatch: no loss depends on how the batch is split, or a
rollout is cut into rows. They need the rows of a rollout in one microbatch (`TrainSequence.unit`).

Every loss raises `DataError` for a batch without advantages and pydantic's `ValidationError` for invalid `pg_options`.
Sequence-level losses also raise it for a microbatch with only some rows of a rollout.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, TypeVar

import torch

from roll_core.algorithms import options
from roll_core.errors import DataError
from roll_core.spec.module_program import move_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.spec.algorithms import PolicyLossParams
    from roll_core.spec.train import MicroBatch

Found = tuple["Tensor", "dict[str, Tensor]"]
"""Loss and metrics per token."""
OptionsT = TypeVar("OptionsT", bound=options.PolicyLossOptions)

# -- ratios per token --------------------------------------------------------------------------------------------------


def ppo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """PPO's clipped surrogate (arXiv:1707.06347 eq. 7) with two clip ranges and an optional dual clip.

    `L = -min(r A, clip(r, 1 - pg_clip_low, 1 + pg_clip_high) A)`. Unequal ranges give clip-higher (DAPO,
    arXiv:2503.14476 §3.1). With `dual_clip` c > 1, the loss is at most `-c A` where `A < 0` (arXiv:1912.09729).
    ROLL's dual clip has c = 1 + 2 `pg_clip`; verl's is on by default (c = 3); TRL's `delta` bounds `r` for both signs.
    """
    _, _, log_ratio_T, advantages_T = _inputs(options.PPOOptions, logprobs_T, micro, params)
    loss_T, metrics = _clipped(log_ratio_T.exp(), advantages_T, params.pg_clip_low, params.pg_clip_high)
    if params.dual_clip is not None:
        bound_T = -params.dual_clip * advantages_T
        bounded_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(bounded_T, bound_T, loss_T)
        metrics["dual_clipfrac"] = bounded_T.float()
    return loss_T, _ratio_metrics(log_ratio_T) | metrics


def vanilla(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """Plain policy gradient, `L = -A * logprob` (Williams 1992), without a ratio or a clip.

    Suitable for one optimizer step per batch, or for steps that keep the policy close to the sampling policy. It is
    also the loss of GPG (arXiv:2504.02546), whose advantages are rewards less the group's mean. GPG's factor for
    groups without signal, `samples / samples with signal`, is not part of the loss; a `query_filter_config` that
    replaces such groups makes it 1. verl's is part of its estimator `gpg` and counts rewards other than 0. verl's and
    SkyRL's `vanilla` is PPO, ROLL's is this loss.
    """
    _, own_T, log_ratio_T, advantages_T = _inputs(options.PolicyLossOptions, logprobs_T, micro, params)
    return -advantages_T * own_T, _ratio_metrics(log_ratio_T)


def cispo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """CISPO (arXiv:2506.13585): clips the weight, so that clipped tokens keep a gradient.

    `L = -sg(clip(r, low, high)) A logprob`. `bounds: absolute`: `low = clip_low`, `high = clip_high`, default [0, 5].
    `bounds: relative`: `low = 1 - clip_low`, `high = 1 + clip_high`, as in verl, NeMo-RL and SkyRL. TRL has only an
    absolute upper bound. ROLL's `cispo` is relative with 0.1 and 0.1, its `tis` absolute with 0 and 1.
    """
    opts, own_T, log_ratio_T, advantages_T = _inputs(options.CISPOOptions, logprobs_T, micro, params)
    low, high = opts.interval
    ratio_T = log_ratio_T.detach().exp()
    metrics = _ratio_metrics(log_ratio_T) | {"clipfrac": ((ratio_T < low) | (ratio_T > high)).float()}
    return -ratio_T.clamp(low, high) * advantages_T * own_T, metrics


def sapo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """SAPO (arXiv:2511.20347): a smooth gate around `r = 1` instead of a clip.

    `L = -(4 / tau) sigmoid(tau (r - 1)) A` with `tau_pos` where `A > 0` and `tau_neg` elsewhere. At `r = 1` the
    gradient is the policy gradient. verl and TRL are equal; verl always aggregates by `seq-mean-token-mean`.
    """
    opts, _, log_ratio_T, advantages_T = _inputs(options.SAPOOptions, logprobs_T, micro, params)
    tau_T = torch.where(advantages_T > 0, opts.tau_pos, opts.tau_neg)
    gate_T = (4.0 / tau_T) * torch.sigmoid(tau_T * (log_ratio_T.exp() - 1.0))
    return -gate_T * advantages_T, _ratio_metrics(log_ratio_T)


def dppo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """DPPO (arXiv:2602.04879): masks tokens by the divergence of their probability instead of clipping ratios.

    With `p` the policy's and `q` the engine's probability of the token, `L = -keep sg(min(p / q, ratio_high)) A
    logprob`. `keep` is 0 where the token has moved in the direction of its advantage (`A > 0` and `p > q`, or `A < 0`
    and `p < q`) and its divergence is above `delta_high` (`A > 0`) or `delta_low` (`A < 0`). The divergence is of the
    event that this token is sampled: `tv` is `|p - q|`, `kl` is `q log(q / p) + (1 - q) log((1 - q) / (1 - p))`.

    The ratio is that to the engine, not to the policy at the start of the update. Raises `DataError` without the
    engine's logprobs. Equal to verl's `dppo_tv` and `dppo_kl` with the engine's logprobs as old ones (`bypass_mode`).
    SkyRL's and prime-rl's surrogate is `keep (p / q) A`: the same gradient up to `ratio_high`.
    """
    opts = options.DPPOOptions(**params.options)
    if micro.behaviour_logprobs_T is None:
        raise DataError("dppo needs the engine's logprobs of the sampled tokens, but the batch has none")
    logprobs_T, behaviour_T = _masked(logprobs_T, micro), _masked(micro.behaviour_logprobs_T, micro)
    log_ratio_T = (logprobs_T - behaviour_T).clamp(-opts.log_ratio_clamp, opts.log_ratio_clamp)
    advantages_T = _advantages(micro)
    with torch.no_grad():
        log_p_T = logprobs_T.clamp(max=0.0)
        if opts.divergence == "tv":
            divergence_T = (log_p_T.exp() - behaviour_T.exp()).abs()
        else:
            rest_p_T, rest_q_T = -torch.expm1(log_p_T), -torch.expm1(behaviour_T)
            rest_ratio_T = (rest_q_T + opts.probability_epsilon) / (rest_p_T + opts.probability_epsilon)
            divergence_T = behaviour_T.exp() * (behaviour_T - log_p_T) + rest_q_T * rest_ratio_T.log()
        moved_T = torch.sign(advantages_T) == torch.sign(log_p_T - behaviour_T)
        delta_T = torch.where(advantages_T > 0, opts.delta_high, opts.delta_low)
        dropped_T = moved_T & (divergence_T > delta_T)
        weight_T = log_ratio_T.exp().clamp(max=opts.ratio_high) * ~dropped_T
    return -weight_T * advantages_T * logprobs_T, _ratio_metrics(log_ratio_T) | {"clipfrac": dropped_T.float()}


def dro(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """Policy gradient with a quadratic penalty, as in DRO (arXiv:2405.19107) and Kimi k1.5 (arXiv:2501.12599).

    `L = -A logprob + beta / 2 (logprob - old_logprob)²`, without a clamp. The papers' penalty is of a whole response;
    per token as in verl, Tinker, and ROLL's `kimi15`, whose tau is `beta`. prime-rl's coefficient is `2 beta`.
    """
    opts, own_T, log_ratio_T, advantages_T = _inputs(options.DROOptions, logprobs_T, micro, params)
    distance_T = log_ratio(logprobs_T, micro, None)
    return -advantages_T * own_T + 0.5 * opts.beta * distance_T.square(), _ratio_metrics(log_ratio_T)


def raft_plus_plus(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """RAFT++ (arXiv:2504.11343): PPO's clipped surrogate of positive advantages only.

    `L = -min(r, clip(r, 1 - pg_clip_low, 1 + pg_clip_high)) max(A, 0)`. With `adv_estimator: reinforce` and rewards of
    0 and 1, `max(A, 0)` is the paper's indicator of the best responses, except in groups without a correct one, which
    the paper's indicator includes. ROLL's documented recipe keeps negative advantages.
    """
    _, _, log_ratio_T, advantages_T = _inputs(options.RAFTOptions, logprobs_T, micro, params)
    positive_T = advantages_T.clamp(min=0.0)
    loss_T, metrics = _clipped(log_ratio_T.exp(), positive_T, params.pg_clip_low, params.pg_clip_high)
    return loss_T, _ratio_metrics(log_ratio_T) | metrics


# -- ratios per sequence -----------------------------------------------------------------------------------------------


def gspo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """GSPO (arXiv:2507.18071 eq. 5): PPO's clipped surrogate of the sequence's ratio.

    `s = exp(mean of log r over the sequence)`, and for each of its tokens `L = -min(s A, clip(s, 1 - clip_low,
    1 + clip_high) A)`. `seq-mean-token-mean` gives the paper's objective. `log r` is clamped per token; verl clamps
    `log s` to at most 10, TRL not at all. verl's `gspo` is `gspo_token` here: gradients are equal if all tokens of a
    sequence have the same advantage.
    """
    return _gspo(logprobs_T, micro, params)


def gspo_token(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """GSPO-token (arXiv:2507.18071 eq. 13): the value of `gspo`, with a gradient per token.

    `s_t = sg(s) p / sg(p)` with the token's probability `p`, so each token's own advantage weighs its gradient. For
    advantages that differ within a sequence.
    """
    return _gspo(logprobs_T, micro, params, per_token=True)


def luspo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """LUSPO (arXiv:2602.05261): GSPO with each sequence's loss multiplied by its number of tokens in the loss.

    It removes GSPO's preference for short correct responses. `gspo` with `loss_agg_mode: seq-mean-token-sum` is the
    same objective. TRL has the same weights.
    """
    loss_T, metrics = _gspo(logprobs_T, micro, params)
    return loss_T * _rollout_lengths(micro), metrics


def gmpo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """GMPO (arXiv:2507.20673): the geometric mean of clipped ratios over the sequence.

    `L = -A exp(mean of c over the sequence)` with `c = min(log r, clip_high)` where `A >= 0` and
    `c = max(log r, -clip_low)` elsewhere. The clip is one-sided, as PPO's minimum is: it removes gradients only of
    tokens that have already moved in the direction of their advantage. verl's `geo_mean` is equal for rows of one
    advantage, as a mean over the rows of a microbatch.
    """
    opts, _, log_ratio_T, advantages_T = _inputs(options.GMPOOptions, logprobs_T, micro, params)
    below_T, above_T = log_ratio_T.clamp(min=-opts.clip_low), log_ratio_T.clamp(max=opts.clip_high)
    clipped_T = torch.where(advantages_T < 0, below_T, above_T)
    log_mean_T = _rollout_means(clipped_T, micro)
    metrics = _ratio_metrics(log_ratio_T) | _sequence_metrics(log_mean_T)
    metrics["clipfrac"] = (clipped_T != log_ratio_T).float()
    return -log_mean_T.exp() * advantages_T, metrics


def vespo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """VESPO (arXiv:2602.10693): weighs a sequence by a smooth function of the product of its ratios.

    `L = -sg(phi(w)) A logprob` with `w = prod of r over the sequence` and `phi(w) = exp(lambda) w^k exp(-lambda w)`,
    which is 1 at `w = 1`. `k` and `lambda` are `k_pos`, `lambda_pos` where `A >= 0` and `k_neg`, `lambda_neg`
    elsewhere. `log w` is clamped, too; TRL's lower clamp is log 1e-8. TRL also multiplies `w` by the correction of the
    engine's logprobs; here `train_infer_correction` weighs advantages.
    """
    opts, own_T, log_ratio_T, advantages_T = _inputs(options.VESPOOptions, logprobs_T, micro, params)
    with torch.no_grad():
        log_w_T = _rollout_sums(log_ratio_T, micro).clamp(-opts.log_ratio_clamp, opts.log_ratio_clamp)
        k_T = torch.where(advantages_T >= 0, opts.k_pos, opts.k_neg)
        lambda_T = torch.where(advantages_T >= 0, opts.lambda_pos, opts.lambda_neg)
        phi_T = (lambda_T + k_T * log_w_T - lambda_T * log_w_T.exp()).exp()
    metrics = _ratio_metrics(log_ratio_T) | {"sequence_weight": phi_T}
    return -phi_T * advantages_T * own_T, metrics


def topr(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """TOPR (arXiv:2503.14286): positives without a ratio, negatives with a ratio truncated at 1.

    `L = -positive_weight A logprob` where `A > 0`, `L = -negative_weight sg(clip(w, clip_low, clip_high)) A logprob`
    elsewhere. `w` is the product of `r` over the sequence (`level: sequence`, the paper) or `r` (`level: token`, ROLL).
    The paper's sign is that of the reward, here the advantage's.
    """
    opts, own_T, log_ratio_T, advantages_T = _inputs(options.TOPROptions, logprobs_T, micro, params)
    with torch.no_grad():
        log_w_T = log_ratio_T
        if opts.level == "sequence":
            log_w_T = _rollout_sums(log_ratio_T, micro).clamp(-opts.log_ratio_clamp, opts.log_ratio_clamp)
        truncated_T = opts.negative_weight * log_w_T.exp().clamp(opts.clip_low, opts.clip_high)
        weight_T = torch.where(advantages_T > 0, opts.positive_weight, truncated_T)
    return -weight_T * advantages_T * own_T, _ratio_metrics(log_ratio_T)


# -- covariances -------------------------------------------------------------------------------------------------------


def clip_cov(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """Clip-Cov (arXiv:2505.22617): PPO, where some tokens of high covariance have no gradient.

    Covariance of a token: `A (logprob - mean logprob of its sequence)`. Tokens between `cov_low` and `cov_high` that
    PPO does not clip lose their gradient with `probability`.

    The paper subtracts the batch's means of `A` and of logprobs, and selects a fixed share of all tokens at random;
    verl does both per microbatch and rank. Here nothing depends on the split. The mean of `A` is taken as 0, as that of
    normalized advantages is. Logprobs are compared with those of the same sequence. A hash of the row's id and the
    position replaces the random choice; other rows of a rollout lead to another choice.
    """
    opts, own_T, log_ratio_T, advantages_T = _inputs(options.ClipCovOptions, logprobs_T, micro, params)
    loss_T, metrics = _clipped(log_ratio_T.exp(), advantages_T, params.pg_clip_low, params.pg_clip_high)
    covariance_T = _covariance(own_T, advantages_T, micro)
    chosen_T = (covariance_T > opts.cov_low) & (covariance_T < opts.cov_high) & (metrics["clipfrac"] == 0)
    chosen_T &= _uniform(micro) < opts.probability
    metrics["cov_clipfrac"] = chosen_T.float()
    return torch.where(chosen_T, 0.0, loss_T), _ratio_metrics(log_ratio_T) | metrics


def kl_cov(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams) -> Found:
    """KL-Cov (arXiv:2505.22617): importance sampling with a penalty on tokens of high covariance.

    `L = -r A`, plus `kl_coef |log r|` where the covariance (see `clip_cov`) is above `cov_threshold`. The paper and
    verl penalize a fixed share of the tokens with the highest covariance, verl per microbatch and rank. A threshold
    does not depend on the split. Without old logprobs the penalty and its gradient are 0.
    """
    opts, own_T, log_ratio_T, advantages_T = _inputs(options.KLCovOptions, logprobs_T, micro, params)
    chosen_T = _covariance(own_T, advantages_T, micro) > opts.cov_threshold
    penalty_T = torch.where(chosen_T, opts.kl_coef * log_ratio_T.abs(), 0.0)
    metrics = _ratio_metrics(log_ratio_T) | {"cov_klfrac": chosen_T.float()}
    return -log_ratio_T.exp() * advantages_T + penalty_T, metrics


# -- shared terms ------------------------------------------------------------------------------------------------------


def log_ratio(logprobs_T: Tensor, micro: MicroBatch, clamp: float | None) -> Tensor:
    """`log r` of each token, clamped to ± `clamp`; 0 outside the mask."""
    old_T = logprobs_T.detach() if micro.old_logprobs_T is None else micro.old_logprobs_T
    log_ratio_T = _masked(logprobs_T - old_T, micro)
    return log_ratio_T if clamp is None else log_ratio_T.clamp(-clamp, clamp)


def _inputs(
    schema: type[OptionsT], logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams
) -> tuple[OptionsT, Tensor, Tensor, Tensor]:
    """Options, and of each token: logprob, `log r` and advantage, 0 outside the mask."""
    opts = schema(**params.options)
    return opts, _masked(logprobs_T, micro), log_ratio(logprobs_T, micro, opts.log_ratio_clamp), _advantages(micro)


def _masked(values_T: Tensor, micro: MicroBatch) -> Tensor:
    """Values in the loss, 0 elsewhere: values outside the mask are arbitrary and may be NaN."""
    return torch.where(micro.loss_mask_T, values_T, 0.0)


def _advantages(micro: MicroBatch) -> Tensor:
    if micro.advantages_T is None:
        raise DataError("the policy loss needs advantages, but the batch has none")
    return _masked(micro.advantages_T, micro)


def _clipped(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> Found:
    """PPO's clipped surrogate, and the tokens whose gradient the clip removes."""
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss_T = torch.maximum(-ratio_T * advantages_T, -ratio_T.clamp(low, high) * advantages_T)
    below_T = ((advantages_T < 0) & (ratio_T < low)).float()
    above_T = ((advantages_T > 0) & (ratio_T > high)).float()
    return loss_T, {"clipfrac_low": below_T, "clipfrac_high": above_T, "clipfrac": below_T + above_T}


def _gspo(logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams, *, per_token: bool = False) -> Found:
    opts, own_T, log_ratio_T, advantages_T = _inputs(options.GSPOOptions, logprobs_T, micro, params)
    log_mean_T = _rollout_means(log_ratio_T, micro)
    metrics = _ratio_metrics(log_ratio_T) | _sequence_metrics(log_mean_T)
    if per_token:
        log_mean_T = log_mean_T.detach() + own_T - own_T.detach()
    loss_T, clips = _clipped(log_mean_T.exp(), advantages_T, opts.clip_low, opts.clip_high)
    return loss_T, metrics | clips


def _rollout_sums(values_T: Tensor, micro: MicroBatch) -> Tensor:
    """Sum over the rollout of each token. `values_T` is 0 outside the mask.

    Raises `DataError` if other tokens of a rollout are in another microbatch.
    """
    if not micro.totals.rollout_tokens:  # each sequence is a rollout; the check below waits for the device
        return _sums(values_T, micro)
    counted_T = _sums(micro.loss_mask_T.float(), micro)
    apart_T = micro.loss_mask_T & (counted_T != micro.rollout_tokens_S[micro.segments_T])
    if apart_T.any():
        raise DataError(
            f"sequence {micro.ids[int(micro.segments_T[apart_T][0])]} is one row of a rollout whose other rows are in"
            " another microbatch, but this policy loss has one ratio per rollout: give the rows of a rollout the same"
            " TrainSequence.unit, or use a loss of tokens, such as ppo"
        )
    return _sums(values_T, micro)


def _sums(values_T: Tensor, micro: MicroBatch) -> Tensor:
    lengths_S = micro.cu_seqlens.diff().long()
    rows_S = torch.segment_reduce(values_T, "sum", lengths=lengths_S, unsafe=True)
    if micro.totals.rollout_tokens:
        joined_SS = micro.rollouts_S[:, None] == micro.rollouts_S
        rows_S = torch.where(joined_SS, rows_S, 0.0).sum(dim=1)
    return rows_S[micro.segments_T]


def _rollout_means(values_T: Tensor, micro: MicroBatch) -> Tensor:
    """Mean over the masked tokens of the rollout of each token. `values_T` is 0 outside the mask."""
    return _rollout_sums(values_T, micro) / _rollout_lengths(micro).clamp(min=1)


def _rollout_lengths(micro: MicroBatch) -> Tensor:
    """Number of masked tokens in the rollout of each token."""
    return micro.rollout_tokens_S[micro.segments_T]


def _covariance(own_T: Tensor, advantages_T: Tensor, micro: MicroBatch) -> Tensor:
    return advantages_T * (own_T.detach() - _rollout_means(own_T.detach(), micro))


def _uniform(micro: MicroBatch) -> Tensor:
    """Number in [0, 1) of each token: MurmurHash3's finalizer of its row's id and position."""
    seeds = {"S": torch.tensor([zlib.crc32(id.encode()) for id in micro.ids])}
    seeds_S = move_tensors(seeds, micro.segments_T.device)["S"]
    hash_T = (seeds_S[micro.segments_T] + micro.positions_T * 0x9E3779B1) & 0xFFFFFFFF
    hash_T = ((hash_T ^ (hash_T >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    hash_T = ((hash_T ^ (hash_T >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (hash_T ^ (hash_T >> 16)).double() / 2**32


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


def _sequence_metrics(log_ratio_T: Tensor) -> dict[str, Tensor]:
    """Ratios of whole sequences."""
    ratio_T = log_ratio_T.detach().exp()
    return {"sequence_ratio": ratio_T, "sequence_ratio/max": ratio_T, "sequence_ratio/min": ratio_T}
