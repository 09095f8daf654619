"""Terms of the objectives of preference training and of reward models.

T flat tokens of a microbatch, S sequences, P pairs. The sequences of a pair are adjacent, the chosen one first. The
denominator is global: the number of pairs, or of labelled responses (`totals.groups`, one group each).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from roll_core.errors import DataError
from roll_core.spec.train import LossOutput, WantedOutputs
from roll_pipeline_preference.encode import DESIRABLE, MARGIN
from roll_pipeline_preference.losses import (
    LABELLED_LOSSES,
    PAIR_LOSSES,
    PreferenceParams,
    Responses,
    bradley_terry,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_core.spec.train import MicroBatch, TokenOutputs

Metrics = dict[str, "Tensor | float"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceTerm:
    """Weighted sum of preference losses, as a term of an `Objective`.

    Metrics:

    * `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies`: the implicit reward is `beta` times
      the log-ratio to the reference, or `beta` times the logprob without a reference.
    * `logps/chosen`, `logps/rejected`: mean over responses of the sum over tokens.
    * `loss/<name>` of each loss, if there are several.
    * `kl` with labelled responses: the estimate that `kto` subtracts.
    """

    losses: Mapping[str, float] = field(default_factory=lambda: {"sigmoid": 1.0})
    """Weight of each loss by name: all of pairs, or all of labelled responses."""
    params: PreferenceParams = field(default_factory=PreferenceParams)
    reference: bool = True
    """Read the batch's reference logprobs. If false, log-ratios are the policy's logprobs."""
    ld_alpha: float = 1.0
    """LD-DPO (arXiv:2409.06411 eq. 9): weight of a response's tokens beyond the length of the pair's shorter one."""
    use_weighting: bool = False
    """WPO (arXiv:2406.11827 eq. 2): weight each pair by `w_chosen w_rejected`, `w = exp(mean(logp - max logp))`.

    This is the paper's greedy alignment, which divides by the argmax token's probability. TRL has the sampled
    alignment, which divides by the sum of squared probabilities.
    """
    mean_rewards: bool = False
    """Report rewards per token (`simpo`, `orpo`)."""
    kl: float = 0.0
    """KL estimate of the whole optimizer step, at least 0 (`kto`)."""

    @property
    def labelled(self) -> bool:
        """True for losses on labelled responses, False for losses on pairs."""
        return any(name in LABELLED_LOSSES for name in self.losses)

    @property
    def want(self) -> WantedOutputs:
        """Logprobs of responses, and of argmax tokens with `use_weighting`."""
        return WantedOutputs(logprobs=True, masked_only=True, topk=int(self.use_weighting))

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share."""
        logprobs_T = _masked(outputs.logprobs_T, micro, "logprobs")
        losses, metrics = (self._labelled if self.labelled else self._pairs)(logprobs_T, outputs, micro)
        count = max(micro.totals.groups, 1)
        shares = {name: loss.sum() / count for name, loss in losses.items()}
        if len(shares) > 1:
            metrics |= {f"loss/{name}": share.detach() for name, share in shares.items()}
        loss = sum((self.losses[name] * share for name, share in shares.items()), 0.0 * logprobs_T.sum())
        return LossOutput(loss=loss, metrics=metrics)

    def _pairs(self, logprobs_T: Tensor, outputs: TokenOutputs, micro: MicroBatch) -> tuple[dict[str, Tensor], Metrics]:
        """Losses `[P]` by name, and metrics."""
        _check_pairs(micro)
        lengths_S = _sums(micro.loss_mask_T.long(), micro)
        weights_T = self._length_weights(micro, lengths_S)
        logps_S = _sums(weights_T * logprobs_T, micro)
        ratios_S = _sums(weights_T * (logprobs_T - self._reference(micro)), micro) if self.reference else logps_S
        chosen, rejected = (
            Responses(logps_P=logps_S[first::2], ratios_P=ratios_S[first::2], lengths_P=lengths_S[first::2])
            for first in (0, 1)
        )
        pair_weights_P = self._pair_weights(logprobs_T, outputs, micro, lengths_S) if self.use_weighting else 1.0
        losses = {name: pair_weights_P * PAIR_LOSSES[name](chosen, rejected, self.params) for name in self.losses}
        with torch.no_grad():
            better_P, worse_P = (r.mean_logps_P if self.mean_rewards else r.ratios_P for r in (chosen, rejected))
            metrics = _reward_metrics(self.params.beta * better_P, self.params.beta * worse_P, micro)
            metrics["logps/chosen"] = chosen.logps_P.sum() / max(micro.totals.groups, 1)
            metrics["logps/rejected"] = rejected.logps_P.sum() / max(micro.totals.groups, 1)
        return losses, metrics

    def _labelled(
        self, logprobs_T: Tensor, outputs: TokenOutputs, micro: MicroBatch
    ) -> tuple[dict[str, Tensor], Metrics]:
        """Losses `[S]` by name, and metrics."""
        logps_S = _sums(logprobs_T, micro)
        ratios_S = _sums(logprobs_T - self._reference(micro), micro) if self.reference else logps_S
        desirable_S = _sums(_stream(micro, DESIRABLE), micro) > 0
        losses = {name: LABELLED_LOSSES[name](ratios_S, desirable_S, self.kl, self.params) for name in self.losses}
        metrics: Metrics = {"kl": self.kl * len(ratios_S) / max(micro.totals.groups, 1)}
        num_desirable = micro.totals.streams.get(DESIRABLE, 0.0)
        for name, mine_S, count in (
            ("chosen", desirable_S, num_desirable),
            ("rejected", ~desirable_S, micro.totals.groups - num_desirable),
        ):
            if count:
                rewards_S = self.params.beta * torch.where(mine_S, ratios_S.detach(), 0.0)
                metrics[f"rewards/{name}"] = rewards_S.sum() / count
                metrics[f"logps/{name}"] = torch.where(mine_S, logps_S.detach(), 0.0).sum() / count
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return losses, metrics

    def _reference(self, micro: MicroBatch) -> Tensor:
        return _masked(micro.ref_logprobs_T, micro, "ref_logprobs")

    def _length_weights(self, micro: MicroBatch, lengths_S: Tensor) -> Tensor:
        """Weight of each token, `[T]`: `ld_alpha` beyond the length of the pair's shorter response, else 1."""
        if self.ld_alpha == 1.0:
            return torch.ones_like(micro.loss_mask_T, dtype=torch.float32)
        shared_S = torch.minimum(lengths_S[0::2], lengths_S[1::2]).repeat_interleave(2)
        total_T = micro.loss_mask_T.long().cumsum(0)
        before_S = lengths_S.cumsum(0) - lengths_S
        rank_T = total_T - before_S[micro.segments_T]  # from 1 at a response's first token
        return torch.where(rank_T <= shared_S[micro.segments_T], 1.0, self.ld_alpha)

    def _pair_weights(self, logprobs_T: Tensor, outputs: TokenOutputs, micro: MicroBatch, lengths_S: Tensor) -> Tensor:
        """WPO's weight of each pair, `[P]`, without gradient."""
        topk_TK = outputs.topk_logprobs_TK
        best_T = _masked(None if topk_TK is None else topk_TK[:, 0], micro, "logprobs of argmax tokens")
        weights_S = (_sums((logprobs_T - best_T).detach(), micro) / lengths_S).exp()
        return weights_S[0::2] * weights_S[1::2]


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerryTerm:
    """Bradley-Terry loss of a reward model, as a term of an `Objective`.

    The score of a response is the value at its last token. Metrics: `rewards/chosen`, `rewards/rejected`,
    `rewards/margins`, and `rewards/accuracies`, the share of pairs whose chosen response has the higher score.
    """

    center_rewards_coefficient: float = 0.0

    @property
    def want(self) -> WantedOutputs:
        """The scores of the head, as values of the tokens."""
        return WantedOutputs(values=True)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Compute this microbatch's share."""
        _check_pairs(micro)
        if outputs.values_T is None:
            raise DataError("the loss of a reward model needs values, but the outputs have none")
        scores_S = outputs.values_T[micro.cu_seqlens[1:].long() - 1]
        margins_P = _sums(_stream(micro, MARGIN), micro)[0::2]
        losses_P = bradley_terry(scores_S[0::2], scores_S[1::2], margins_P, self.center_rewards_coefficient)
        loss = losses_P.sum() / max(micro.totals.groups, 1)
        return LossOutput(loss=loss, metrics=_reward_metrics(scores_S[0::2].detach(), scores_S[1::2].detach(), micro))


def _reward_metrics(chosen_P: Tensor, rejected_P: Tensor, micro: MicroBatch) -> Metrics:
    count = max(micro.totals.groups, 1)
    return {
        "rewards/chosen": chosen_P.sum() / count,
        "rewards/rejected": rejected_P.sum() / count,
        "rewards/margins": (chosen_P - rejected_P).sum() / count,
        "rewards/accuracies": (chosen_P > rejected_P).sum() / count,
    }


def _check_pairs(micro: MicroBatch) -> None:
    if not torch.equal(micro.units_S[0::2], micro.units_S[1::2]):
        raise DataError(f"sequences {', '.join(micro.ids)} are not pairs: expected equal units of neighbours")


def _masked(values_T: Tensor | None, micro: MicroBatch, what: str) -> Tensor:
    """The values, 0 outside the mask. Raises `DataError` if there are none."""
    if values_T is None:
        raise DataError(f"the preference loss needs {what}, but the batch has none")
    return torch.where(micro.loss_mask_T, values_T, 0.0)


def _sums(values_T: Tensor, micro: MicroBatch) -> Tensor:
    """Sum over each sequence, `[S]`."""
    return values_T.new_zeros(micro.num_sequences).index_add_(0, micro.segments_T, values_T)


def _stream(micro: MicroBatch, name: str) -> Tensor:
    """Weights of a stream, `[T]`; 0 if no sequence of the step has it."""
    stream = micro.streams.get(name)
    return torch.zeros_like(micro.loss_mask_T, dtype=torch.float32) if stream is None else stream
