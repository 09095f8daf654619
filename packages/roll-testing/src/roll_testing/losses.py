"""Losses, splits and training settings that the layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.algorithms.losses import PolicyObjective, SFTObjective, ValueObjective
from roll_core.spec.train import LossOutput, TrainingSpec, Want
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
    "sft": SFTObjective(),
    "policy": PolicyObjective(entropy_coef=0.1, temperature=0.7, aggregation="seq-mean-token-mean"),
}
OF_TASK: dict[str, LossFn] = {
    "causal_lm": LOSSES["policy"],
    "value": ValueObjective(value_clip=0.3),
    "reward": ValueObjective(),
}
"""A loss that reads what models of the task have."""

TRAINING = TrainingSpec(
    learning_rate=1e-2,
    weight_decay=0.1,
    adam_beta1=0.8,
    adam_beta2=0.95,
    # So large that an entry whose gradient is nothing but rounding does not move as far as any other.
    adam_epsilon=1e-3,
    lr_scheduler_type="constant",
    num_steps=20,
)

MAGNIFIED = 1e3
"""By how much the step of `GRADIENT` is larger than the gradient: the weights' own rounding is lost beside it."""
GRADIENT = TrainingSpec(
    learning_rate=MAGNIFIED * 1e8,
    adam_beta1=0.0,
    adam_beta2=0.0,
    adam_epsilon=1e8,
    lr_scheduler_type="constant",
)
"""Without memory, and with an epsilon beside which the gradient is nothing, AdamW steps by `-learning_rate * gradient /
epsilon`: the gradient can be read off the exported weights of any strategy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoiltGradient:
    """The negative log-likelihood, finite, with a gradient that is NaN for one sequence, on whichever rank it is."""

    sequence: str

    @property
    def want(self) -> Want:
        """Logprobs."""
        return Want(logprobs=True)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Adds the square root of nothing, whose slope is infinite."""
        found = SFTObjective()(outputs, micro)
        if self.sequence not in micro.ids or outputs.logprobs_T is None:
            return found
        hit_T: Tensor = micro.segments_T == micro.ids.index(self.sequence)
        return LossOutput(loss=found.loss + (outputs.logprobs_T[hit_T].sum() * 0.0).sqrt(), metrics=found.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoiltLoss:
    """The negative log-likelihood, or NaN for a microbatch with one sequence."""

    sequence: str

    @property
    def want(self) -> Want:
        """Logprobs."""
        return Want(logprobs=True)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """Does not look at what it returns, as losses of plugins may not."""
        found = SFTObjective()(outputs, micro)
        factor = float("nan") if self.sequence in micro.ids else 1.0
        return LossOutput(loss=found.loss * factor, metrics=found.metrics)
