"""Objectives that a train strategy minimises: picklable, pure, and independent of how the batch is split.

T flat tokens of a microbatch. All metrics are shares (see `roll_core.spec.train.LossMetrics`).
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from roll_core.algorithms.aggregate import Aggregation, aggregate, stream_weights, token_weights, weighted_sum
from roll_core.algorithms.kl import K3_CLAMP, LOG_RATIO_CLAMP, KLKind, approx_kl
from roll_core.algorithms.policy_losses import log_ratio
from roll_core.errors import DataError, UnsupportedError
from roll_core.spec.algorithms import PolicyLoss, PolicyLossParams, bind_options
from roll_core.spec.train import LossOutput, WantedOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_core.spec.train import LossFn, MicroBatch, TokenOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Sum of named terms, each times its coefficient.

    A term is a `LossFn`. Its `want` names the outputs it reads, its loss is a share with a denominator of its own: by
    the loss mask (`token_weights`) or by a stream of weights (`stream_weights`). Adding a term therefore changes
    neither value nor gradient of the others. Terms need no check for non-finite values: the strategy checks the sum.

    Metrics: `loss`, and the metrics of the terms. If several terms report the same name, the last one counts.
    """

    terms: Mapping[str, LossFn]
    coefs: Mapping[str, float] = field(default_factory=dict)
    """Coefficient of each term, by default 1. Terms with coefficient 0 are not trained on, but report their metrics."""
    temperature: float = 1.0
    """Divisor of the logits for all terms. Overrides the terms' own."""

    def __post_init__(self) -> None:
        """Raise `ValueError` if a coefficient has no term, or if no term has a coefficient other than 0."""
        if unknown := sorted(set(self.coefs) - set(self.terms)):
            raise ValueError(f"coefficients of {', '.join(unknown)}, but the terms are {', '.join(self.terms)}")
        if not any(self.coefs.get(name, 1.0) for name in self.terms):
            raise ValueError(f"all terms have coefficient 0: {', '.join(self.terms) or 'there are none'}")

    @property
    def want(self) -> WantedOutputs:
        """Outputs that some term reads. The entropy has no gradients if only terms with coefficient 0 read it.

        Raises `UnsupportedError` for terms with different comparisons: a strategy computes one.
        """
        wants = {name: term.want for name, term in self.terms.items()}
        compared = {name: want.comparison for name, want in wants.items() if want.comparison is not None}
        comparison = next(iter(compared.values()), None)
        if others := [name for name, other in compared.items() if other != comparison]:
            raise UnsupportedError(
                f"the terms {next(iter(compared))} and {others[0]} compare with other models in different ways, but"
                " only one comparison is computed: train on them in runs of their own"
            )
        return WantedOutputs(
            logprobs=any(want.logprobs for want in wants.values()),
            entropy=any(want.entropy for want in wants.values()),
            entropy_grad=any(
                want.entropy and want.entropy_grad and self.coefs.get(name, 1.0) for name, want in wants.items()
            ),
            values=any(want.values for want in wants.values()),
            topk=max(want.topk for want in wants.values()),
            gathered=any(want.gathered for want in wants.values()),
            hidden=any(want.hidden for want in wants.values()),
            comparison=comparison,
            masked_only=all(want.masked_only for want in wants.values()),
            temperature=self.temperature,
        )

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share. It is NaN if an output that it reads is not finite."""
        shares: list[Tensor] = []
        metrics: dict[str, Tensor | float] = {}
        for name, term in self.terms.items():
            output = term(outputs, micro)
            metrics.update(output.metrics)
            if coef := self.coefs.get(name, 1.0):
                shares.append(output.loss if coef == 1.0 else coef * output.loss)
        loss = reduce(torch.add, shares)
        loss = _spoil(loss, micro, outputs.logprobs_T, outputs.entropy_T, outputs.values_T)
        return LossOutput(loss=loss, metrics=metrics | {"loss": loss.detach()})


def policy_objective(
    *,
    policy_loss: PolicyLoss | str = "roll_core.algorithms.policy_losses:ppo",
    params: PolicyLossParams | None = None,
    aggregation: Aggregation = "seq-mean-token-mean",
    entropy_coef: float = 0.0,
    entropy_metric: bool = True,
    kl_coef: float = 0.0,
    kl_kind: KLKind = "k3",
    kl_unbiased: bool = False,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
    k3_clamp: float = K3_CLAMP,
    temperature: float = 1.0,
    terms: Mapping[str, LossFn] | None = None,
    coefs: Mapping[str, float] | None = None,
) -> Objective:
    """Objective `policy loss + kl_coef * KL(policy || reference) - entropy_coef * entropy + further terms`.

    Its terms are `policy` (`PolicyTerm`), `kl` (`KLTerm`), `entropy` (`EntropyTerm`) and the further `terms`, by other
    names, with their `coefs`, by default 1. Policy loss, KL and entropy have one aggregation mode. With `kl_coef` 0,
    reference logprobs are not read. `entropy_metric` reports the entropy even if it is not part of the loss; it is then
    computed without gradients. `temperature` is that of the rollouts.
    """
    losses: dict[str, LossFn] = {
        "policy": PolicyTerm(policy_loss=policy_loss, params=params or PolicyLossParams(), aggregation=aggregation)
    }
    weights: dict[str, float] = {}
    if kl_coef:
        weights["kl"] = kl_coef
        losses["kl"] = KLTerm(
            kind=kl_kind,
            unbiased=kl_unbiased,
            aggregation=aggregation,
            log_ratio_clamp=log_ratio_clamp,
            k3_clamp=k3_clamp,
        )
    if entropy_coef or entropy_metric:
        weights["entropy"] = -entropy_coef
        losses["entropy"] = EntropyTerm(aggregation=aggregation)
    return Objective(terms={**losses, **(terms or {})}, coefs={**weights, **(coefs or {})}, temperature=temperature)


def sft_objective(*, aggregation: Aggregation = "token-mean", token_accuracy: bool = False) -> Objective:
    """Objective of supervised fine-tuning: `CrossEntropy` of the masked tokens."""
    return Objective(terms={"nll": CrossEntropy(aggregation=aggregation, token_accuracy=token_accuracy)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerm:
    """The policy loss, aggregated over the tokens of the loss mask.

    Metrics:

    * `policy_loss`.
    * `logprob_gap`: mean over tokens of the distance to the engine's logprobs, if the batch has no old logprobs.
    * `routing_disagreement`: mean over tokens, if experts are replayed.
    * The metrics of the policy loss: mean over tokens, or max/min for names that end in `/max` or `/min`.
    """

    policy_loss: PolicyLoss | str = "roll_core.algorithms.policy_losses:ppo"
    """Module-level function, or its `"module:attribute"`."""
    params: PolicyLossParams = field(default_factory=PolicyLossParams)
    aggregation: Aggregation = "seq-mean-token-mean"

    want: ClassVar[WantedOutputs] = WantedOutputs(logprobs=True, masked_only=True)
    """Logprobs of the masked tokens."""

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share."""
        logprobs_T = _given("logprobs", outputs.logprobs_T)
        function = load_policy_loss(self.policy_loss) if isinstance(self.policy_loss, str) else self.policy_loss
        function = bind_options(function, PolicyLoss, self.params.options)
        per_token_T, token_metrics = function(logprobs_T, micro, self.params)
        loss = aggregate(per_token_T, micro, self.aggregation)
        metrics: dict[str, Tensor | float] = {"policy_loss": loss.detach()}
        if micro.behaviour_logprobs_T is not None and micro.old_logprobs_T is None:
            # The policy has not changed since sampling, so engine and trainer should agree.
            gap_T = torch.where(micro.loss_mask_T, logprobs_T.detach() - micro.behaviour_logprobs_T, 0.0).abs()
            metrics["logprob_gap"] = aggregate(gap_T, micro, "token-mean")
        if outputs.routing_disagreement_T is not None:
            metrics["routing_disagreement"] = aggregate(outputs.routing_disagreement_T, micro, "token-mean")
        return LossOutput(loss=loss, metrics=metrics | _reduce(token_metrics, micro))


@dataclass(frozen=True, slots=True, kw_only=True)
class KLTerm:
    """`KL(policy || reference)` over the tokens of the loss mask. Metric: `kl_loss`, before the coefficient."""

    kind: KLKind = "k3"
    unbiased: bool = False
    """Multiply each estimate by `r = exp(logprob - old_logprob)` (DeepSeek-V3.2, arXiv:2512.02556).

    `r` is clamped as in policy losses and has a gradient. The term's gradient is then that of the KL for tokens of the
    old policy, for k1 and k3. Without old logprobs `r` is 1, with the gradient of the logprob. TRL's
    `use_bias_correction_kl` is equal for token-level ratios.
    """
    aggregation: Aggregation = "seq-mean-token-mean"
    log_ratio_clamp: float = LOG_RATIO_CLAMP
    k3_clamp: float = K3_CLAMP

    want: ClassVar[WantedOutputs] = WantedOutputs(logprobs=True, masked_only=True)
    """Logprobs of the masked tokens."""

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share. Raises `DataError` if the batch has no reference logprobs."""
        reference_T = _given("ref_logprobs", micro.ref_logprobs_T)
        logprobs_T = _given("logprobs", outputs.logprobs_T)
        kl_T = approx_kl(
            torch.where(micro.loss_mask_T, logprobs_T, 0.0),
            torch.where(micro.loss_mask_T, reference_T, 0.0),
            self.kind,
            log_ratio_clamp=self.log_ratio_clamp,
            k3_clamp=self.k3_clamp,
        )
        if self.unbiased:
            kl_T = kl_T * log_ratio(logprobs_T, micro, self.log_ratio_clamp).exp()
        loss = aggregate(kl_T, micro, self.aggregation)
        return LossOutput(loss=loss, metrics={"kl_loss": loss.detach()})


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyTerm:
    """Entropy over the tokens of the loss mask. A negative coefficient raises it.

    Metric: `entropy`, mean over tokens.
    """

    aggregation: Aggregation = "seq-mean-token-mean"

    want: ClassVar[WantedOutputs] = WantedOutputs(entropy=True, masked_only=True)
    """Entropies of the masked tokens."""

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share."""
        entropy_T = _given("entropy", outputs.entropy_T)
        mean = aggregate(entropy_T.detach(), micro, "token-mean")
        return LossOutput(loss=aggregate(entropy_T, micro, self.aggregation), metrics={"entropy": mean})


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Negative log-likelihood of the tokens of the loss mask, or of a stream's tokens by their weights.

    Metrics:

    * `nll`: mean over tokens for any aggregation mode. Its exponential is the perplexity.
    * `<stream>_nll`, of a stream: the mean by its weights.
    * `token_accuracy` (optional): share of masked tokens that are the model's argmax token.
    """

    stream: str | None = None
    """Name in `TrainSequence.streams`; None: the loss mask."""
    aggregation: Aggregation = "token-mean"
    """Aggregation over the loss mask. A stream has its own weights."""
    token_accuracy: bool = False
    """Report `token_accuracy` of the loss mask. Requires a strategy with `capabilities.topk`."""

    @property
    def want(self) -> WantedOutputs:
        """Logprobs of the tokens with a weight only, so that logits of prompts are not computed."""
        return WantedOutputs(logprobs=True, masked_only=True, topk=int(self.token_accuracy))

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share. Raises `DataError` if the batch has no such stream."""
        nll_T = -_given("logprobs", outputs.logprobs_T)
        if self.stream is not None:
            loss = weighted_sum(nll_T, stream_weights(micro, self.stream))
            return LossOutput(loss=loss, metrics={f"{self.stream}_nll": loss.detach()})
        metrics: dict[str, Tensor | float] = {"nll": aggregate(nll_T.detach(), micro, "token-mean")}
        if self.token_accuracy:
            hits_T = (_given("top-1", outputs.topk_ids_TK)[:, 0] == micro.tokens_T) & micro.loss_mask_T
            metrics["token_accuracy"] = hits_T.sum() / max(micro.totals.tokens, 1)
        return LossOutput(loss=aggregate(nll_T, micro, self.aggregation), metrics=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """Critic loss: regression on the return, `coef * (V - R)²` per token.

    With `value_clip`, as in PPO's reference implementation: `coef * max((V - R)², (V_clip - R)²)`, where `V_clip` stays
    within `± value_clip` of the value at the start of the update. Metrics: `loss`, `value` and `return` (means over
    tokens), and `value_clipfrac` with `value_clip`.
    """

    value_clip: float | None = None
    coef: float = 0.5
    aggregation: Aggregation = "token-mean"

    want: ClassVar[WantedOutputs] = WantedOutputs(values=True)
    """Outputs that the loss reads: values."""

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share. It is NaN if an output that it reads is not finite."""
        mask_T = micro.loss_mask_T
        values_T = torch.where(mask_T, _given("values", outputs.values_T), 0.0)
        returns_T = torch.where(mask_T, _given("returns", micro.returns_T), 0.0)
        squares_T = (values_T - returns_T).square()
        metrics: dict[str, Tensor | float] = {
            "value": aggregate(values_T.detach(), micro, "token-mean"),
            "return": aggregate(returns_T, micro, "token-mean"),
        }
        if self.value_clip is not None:
            old_T = torch.where(mask_T, _given("values at the start of the update", micro.values_T), 0.0)
            # Clamping the value (not the difference) keeps values within the bounds bit-identical.
            near_T = values_T.clamp(old_T - self.value_clip, old_T + self.value_clip)
            clipped_T = (near_T - returns_T).square()
            metrics["value_clipfrac"] = aggregate((clipped_T > squares_T).float(), micro, "token-mean")
            squares_T = torch.maximum(squares_T, clipped_T)
        loss = aggregate(self.coef * squares_T, micro, self.aggregation)
        loss = _spoil(loss, micro, outputs.values_T)
        return LossOutput(loss=loss, metrics=metrics | {"loss": loss.detach()})


@lru_cache(maxsize=64)
def load_policy_loss(target: str) -> PolicyLoss:
    """Import the function named by `"module:attribute"`. Raises `DataError` if this fails."""
    try:
        return cast("PolicyLoss", pkgutil.resolve_name(target))
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(f"policy loss {target!r} cannot be loaded: {error}") from error


def _given(what: str, tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise DataError(f"the loss needs {what}, but the batch has none")
    return tensor


def _reduce(token_metrics: Mapping[str, Tensor], micro: MicroBatch) -> dict[str, Tensor | float]:
    """Per-token metrics as shares. Without masked tokens, maxima are -inf and minima inf (`LossMetrics`)."""
    weights_T = token_weights(micro, "token-mean")
    reduced: dict[str, Tensor | float] = {}
    for name, values_T in token_metrics.items():
        if name.endswith("/max"):
            reduced[name] = values_T.detach().masked_fill(~micro.loss_mask_T, -torch.inf).max()
        elif name.endswith("/min"):
            reduced[name] = values_T.detach().masked_fill(~micro.loss_mask_T, torch.inf).min()
        else:
            reduced[name] = weighted_sum(values_T.detach(), weights_T)
    return reduced


def _spoil(loss: Tensor, micro: MicroBatch, *outputs_T: Tensor | None) -> Tensor:
    """`loss`, or NaN if an output that a loss reads is not finite: a clamp would hide an infinite log-ratio."""
    read_T = micro.read_T
    for values_T in outputs_T:
        if values_T is not None:
            total = torch.where(read_T, values_T.detach(), 0.0).sum()
            loss = loss + (total - total)
    return loss
