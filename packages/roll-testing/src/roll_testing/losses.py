"""Losses, batch splits and training settings that the test groups share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from typing_extensions import override

from roll_core.algorithms.aggregate import Aggregation, stream_weights, weighted_sum
from roll_core.algorithms.kl import KLKind
from roll_core.algorithms.losses import (
    CrossEntropy,
    EntropyTerm,
    KLTerm,
    Objective,
    PolicyTerm,
    ValueObjective,
    policy_objective,
    sft_objective,
)
from roll_core.spec.train import Comparison, LossOutput, TrainingSpec, WantedOutputs
from roll_testing.bench import WHOLE, Split

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.spec.train import LossFn, MicroBatch, TokenOutputs

SPLITS = {
    "whole": WHOLE,
    "one by one": Split(max_sequences=1),
    "three at a time": Split(max_sequences=3),
    "by tokens": Split(max_tokens=13),
}

LOSSES: dict[str, LossFn] = {
    "sft": sft_objective(),
    "policy": policy_objective(entropy_coef=0.1, temperature=0.7, aggregation="seq-mean-token-mean"),
}
OF_TASK: dict[str, LossFn] = {
    "causal_lm": LOSSES["policy"],
    "value": ValueObjective(value_clip=0.3),
    "reward": ValueObjective(),
}
"""Loss for each task, which reads an output that the task's models have."""

EVERY_TERM = Objective(
    terms={
        **{f"policy {mode}": PolicyTerm(aggregation=mode) for mode in get_args(Aggregation)},
        **{f"kl {mode}": KLTerm(aggregation=mode) for mode in get_args(Aggregation)},
        **{f"kl {kind}": KLTerm(kind=kind) for kind in get_args(KLKind)},
        "kl unbiased": KLTerm(unbiased=True),
        **{f"entropy {mode}": EntropyTerm(aggregation=mode) for mode in get_args(Aggregation)},
        "prompt": CrossEntropy(stream="prompt"),
    },
    coefs={f"entropy {mode}": -0.1 for mode in get_args(Aggregation)},
)
"""Policy loss, KL and entropy in every aggregation mode, every estimator of the KL, and the likelihood of a stream's
tokens."""

TRAINING = TrainingSpec(
    learning_rate=1e-2,
    weight_decay=0.1,
    adam_beta1=0.8,
    adam_beta2=0.95,
    # Large enough that an entry whose gradient is only rounding does not take a full-size step.
    adam_epsilon=1e-3,
    lr_scheduler_type="constant",
    num_steps=20,
)

MAGNIFIED = 1e3
"""Factor between the step of `GRADIENT` and the gradient. It makes rounding of the weights negligible."""
GRADIENT = TrainingSpec(
    learning_rate=MAGNIFIED * 1e8,
    adam_beta1=0.0,
    adam_beta2=0.0,
    adam_epsilon=1e8,
    lr_scheduler_type="constant",
)
"""AdamW settings without moments, and with an epsilon far above the gradient. A step is then `-learning_rate * gradient
/ epsilon`, so the gradient can be read off the exported weights of any strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenIds:
    """Weighted sum of the logprobs of the sequences' `gather_ids`, minus the tokens' own logprobs."""

    @property
    def want(self) -> WantedOutputs:
        """Logprobs of the given ids and of the tokens."""
        return WantedOutputs(logprobs=True, gathered=True, temperature=0.7, masked_only=True)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Weigh each id differently, with both signs."""
        found_TK, logprobs_T = outputs.gathered_logprobs_TK, outputs.logprobs_T
        if found_TK is None or logprobs_T is None or micro.gather_ids_TK is None:
            raise AssertionError("the strategy returned no logprobs of given ids, although it declares them")
        weights_TK = (micro.gather_ids_TK % 7 - 3).float()
        per_token_T = (weights_TK * found_TK).sum(dim=1) - logprobs_T
        return LossOutput(loss=per_token_T[micro.loss_mask_T].sum() / max(micro.totals.tokens, 1))


TAUGHT = "taught"
"""Stream with the weights of `CrossEntropyOfTeacher`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropyOfTeacher:
    """Weighted mean of `- sum q log p` of this model q and another p. Without `head`, the entropy of q.

    If both models are equal, both are equal, and so are their gradients: `sum (dq) log q` is that of the entropy.
    """

    head: str = ""

    @property
    def want(self) -> WantedOutputs:
        """The comparison, or the entropy."""
        if not self.head:
            return WantedOutputs(entropy=True, temperature=0.7, masked_only=True)
        comparison = Comparison(head=self.head, function=cross_entropy, stream=TAUGHT)
        return WantedOutputs(comparison=comparison, temperature=0.7, masked_only=True)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Weigh tokens differently."""
        found_T = outputs.compared_T if self.head else outputs.entropy_T
        if found_T is None:
            raise AssertionError("the strategy returned no comparison, although it declares whole_vocabulary")
        return LossOutput(loss=weighted_sum(found_T, stream_weights(micro, TAUGHT)))


def cross_entropy(other_CV: Tensor, own_CV: Tensor) -> Tensor:
    """Cross-entropy of the other model's distributions relative to this model's."""
    return -(own_CV.exp() * other_CV).sum(dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoiltGradient:
    """Negative log-likelihood that is finite, but whose gradient is NaN for one sequence, on whichever rank it is."""

    sequence: str

    @property
    def want(self) -> WantedOutputs:
        """Logprobs of the tokens."""
        return WantedOutputs(logprobs=True)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Add the square root of 0, whose derivative is infinite."""
        sft = sft_objective()(outputs, micro)
        if self.sequence not in micro.ids or outputs.logprobs_T is None:
            return sft
        hit_T: Tensor = micro.segments_T == micro.ids.index(self.sequence)
        return LossOutput(loss=sft.loss + (outputs.logprobs_T[hit_T].sum() * 0.0).sqrt(), metrics=sft.metrics)


class SpoiltLoss(SpoiltGradient):
    """Negative log-likelihood that is NaN for a microbatch with one sequence."""

    __slots__ = ()

    @override
    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Return the loss without checking it, as losses of plugins may."""
        sft = sft_objective()(outputs, micro)
        factor = float("nan") if self.sequence in micro.ids else 1.0
        return LossOutput(loss=sft.loss * factor, metrics=sft.metrics)
