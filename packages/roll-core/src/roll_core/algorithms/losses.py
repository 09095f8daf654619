"""Objectives that a train strategy minimises: picklable, pure, and independent of how the batch is split.

T flat tokens of a microbatch. All metrics are shares (see `roll_core.spec.train.LossMetrics`).
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch

from roll_core.algorithms.aggregate import Aggregation, aggregate, token_weights, weighted_sum
from roll_core.algorithms.kl import K3_CLAMP, LOG_RATIO_CLAMP, KLKind, approx_kl
from roll_core.errors import DataError, NonFiniteError
from roll_core.spec.algorithms import PolicyLoss, PolicyLossParams, bind_options
from roll_core.spec.train import LossOutput, WantedOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_core.spec.train import MicroBatch, TokenOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """Objective `policy loss + kl_coef * KL(policy || reference) - entropy_coef * entropy`, with one aggregation mode.

    Metrics:

    * `loss` and `policy_loss`.
    * `kl_loss`: aggregated like the loss, before its coefficient.
    * `entropy`: mean over tokens.
    * `logprob_gap`: mean over tokens of the distance to the engine's logprobs, if the batch has no old logprobs.
    * `routing_disagreement`: mean over tokens, if experts are replayed.
    * The metrics of the policy loss: mean over tokens, or max/min for names that end in `/max` or `/min`.
    """

    policy_loss: PolicyLoss | str = "roll_core.algorithms.policy_losses:ppo"
    """Module-level function, or its `"module:attribute"`."""
    params: PolicyLossParams = field(default_factory=PolicyLossParams)
    aggregation: Aggregation = "seq-mean-token-mean"
    entropy_coef: float = 0.0
    entropy_metric: bool = True
    """Report the entropy even if it is not part of the loss. It is then computed without gradients."""
    kl_coef: float = 0.0
    """Coefficient of the KL in the loss. With 0, reference logprobs are not read."""
    kl_kind: KLKind = "k3"
    log_ratio_clamp: float = LOG_RATIO_CLAMP
    k3_clamp: float = K3_CLAMP
    temperature: float = 1.0
    """Sampling temperature of the rollouts."""

    @property
    def want(self) -> WantedOutputs:
        """Outputs that the loss reads: logprobs, and the entropy if it is used or reported."""
        in_loss = self.entropy_coef != 0.0
        return WantedOutputs(
            logprobs=True,
            entropy=in_loss or self.entropy_metric,
            entropy_grad=in_loss,
            temperature=self.temperature,
            masked_only=True,
        )

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share. Raises `NonFiniteError`, which names the first non-finite value."""
        logprobs_T = _given("logprobs", outputs.logprobs_T)
        function = load_policy_loss(self.policy_loss) if isinstance(self.policy_loss, str) else self.policy_loss
        function = bind_options(function, PolicyLoss, self.params.options)
        per_token_T, token_metrics = function(logprobs_T, micro, self.params)
        loss = policy_loss = aggregate(per_token_T, micro, self.aggregation)
        metrics: dict[str, Tensor | float] = {"policy_loss": policy_loss.detach()}
        if self.kl_coef:
            kl_loss = aggregate(self._kl(logprobs_T, micro), micro, self.aggregation)
            loss = loss + self.kl_coef * kl_loss
            metrics["kl_loss"] = kl_loss.detach()
        if self.want.entropy:
            entropy_T = _given("entropy", outputs.entropy_T)
            metrics["entropy"] = aggregate(entropy_T.detach(), micro, "token-mean")
            if self.entropy_coef:
                loss = loss - self.entropy_coef * aggregate(entropy_T, micro, self.aggregation)
        _check(loss, micro, logprobs=logprobs_T, entropy=outputs.entropy_T)
        if micro.behaviour_logprobs_T is not None and micro.old_logprobs_T is None:
            # The policy has not changed since sampling, so engine and trainer should agree.
            gap_T = torch.where(micro.loss_mask_T, logprobs_T.detach() - micro.behaviour_logprobs_T, 0.0).abs()
            metrics["logprob_gap"] = aggregate(gap_T, micro, "token-mean")
        if outputs.routing_disagreement_T is not None:
            metrics["routing_disagreement"] = aggregate(outputs.routing_disagreement_T, micro, "token-mean")
        metrics["loss"] = loss.detach()
        metrics.update(_reduce(token_metrics, micro))
        return LossOutput(loss=loss, metrics=metrics)

    def _kl(self, logprobs_T: Tensor, micro: MicroBatch) -> Tensor:
        reference_T = _given("ref_logprobs", micro.ref_logprobs_T)
        return approx_kl(
            torch.where(micro.loss_mask_T, logprobs_T, 0.0),
            torch.where(micro.loss_mask_T, reference_T, 0.0),
            self.kl_kind,
            log_ratio_clamp=self.log_ratio_clamp,
            k3_clamp=self.k3_clamp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueObjective:
    """Critic loss: regression on the return, `0.5 * (V - R)²` per token.

    With `value_clip`, as in PPO's reference implementation: `0.5 * max((V - R)², (V_clip - R)²)`, where `V_clip` stays
    within `± value_clip` of the value at the start of the update. Metrics: `loss`, `value` and `return` (means over
    tokens), and `value_clipfrac` with `value_clip`.
    """

    value_clip: float | None = None
    aggregation: Aggregation = "token-mean"

    @property
    def want(self) -> WantedOutputs:
        """Outputs that the loss reads: values."""
        return WantedOutputs(values=True)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share. Raises `NonFiniteError`, which names the first non-finite value."""
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
        loss = aggregate(0.5 * squares_T, micro, self.aggregation)
        _check(loss, micro, values=outputs.values_T)
        return LossOutput(loss=loss, metrics=metrics | {"loss": loss.detach()})


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTObjective:
    """Negative log-likelihood of the masked tokens.

    Metrics:

    * `loss`.
    * `nll`: mean over tokens for any aggregation mode. Its exponential is the perplexity.
    * `token_accuracy` (optional): share of masked tokens that are the model's argmax token.
    """

    aggregation: Aggregation = "token-mean"
    token_accuracy: bool = False
    """Report `token_accuracy`. Requires a strategy with `capabilities.topk`."""

    @property
    def want(self) -> WantedOutputs:
        """Logprobs of the masked tokens only, so that logits of prompts are not computed."""
        return WantedOutputs(logprobs=True, masked_only=True, topk=int(self.token_accuracy))

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share. Raises `NonFiniteError`, which names the first non-finite value."""
        logprobs_T = _given("logprobs", outputs.logprobs_T)
        loss = aggregate(-logprobs_T, micro, self.aggregation)
        _check(loss, micro, logprobs=logprobs_T)
        metrics = {"loss": loss.detach(), "nll": aggregate(-logprobs_T.detach(), micro, "token-mean")}
        if self.token_accuracy:
            hits_T = (_given("top-1", outputs.topk_ids_TK)[:, 0] == micro.tokens_T) & micro.loss_mask_T
            metrics["token_accuracy"] = hits_T.sum() / max(micro.totals.tokens, 1)
        return LossOutput(loss=loss, metrics=metrics)


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
    """Per-token metrics as shares. Extrema of a microbatch without masked tokens are omitted."""
    weights_T = token_weights(micro, "token-mean")
    reduced: dict[str, Tensor | float] = {}
    for name, values_T in token_metrics.items():
        if not name.endswith(("/max", "/min")):
            reduced[name] = weighted_sum(values_T.detach(), weights_T)
            continue
        values_N = values_T.detach()[micro.loss_mask_T]
        if values_N.numel():
            reduced[name] = values_N.max() if name.endswith("/max") else values_N.min()
    return reduced


def _check(loss: Tensor, micro: MicroBatch, **outputs: Tensor | None) -> None:
    """Raise `NonFiniteError` for a non-finite loss, naming the sequence and its first non-finite input or output.

    Also checks the outputs themselves, because a clamp turns an infinite log-ratio into a finite loss.
    """
    probe = loss.detach()
    for values_T in outputs.values():
        if values_T is not None:
            probe = probe + torch.where(micro.loss_mask_T, values_T.detach(), 0.0).sum()
    if torch.isfinite(probe):
        return
    suspects = dict(outputs)
    for name in ("old_logprobs", "ref_logprobs", "advantages", "returns", "values"):
        suspects.setdefault(name, getattr(micro, f"{name}_T"))
    for name, values_T in suspects.items():
        if values_T is None:
            continue
        bad_T = (~torch.isfinite(values_T) & micro.loss_mask_T).nonzero()
        if bad_T.numel():
            token = int(bad_T[0])
            sequence = int(micro.segments_T[token])
            raise NonFiniteError(
                f"the loss is {loss.item()}: {name} is {values_T[token].item()} at token"
                f" {int(micro.positions_T[token])} of sequence {micro.ids[sequence]}"
            )
    raise NonFiniteError(
        f"the loss is {loss.item()}, although all its inputs are finite: the policy loss overflowed"
        f" on sequences {', '.join(micro.ids)}"
    )
