"""Acme's advantage estimator and loss term, written without ROLL's helpers.

The estimator is outcome-supervised GRPO (arXiv:2402.03300 §4.1.2).
"""

from dataclasses import dataclass

import torch

from roll_core.spec.algorithms import AdvantageInput, AdvantageOutput
from roll_core.spec.train import LossOutput, MicroBatch, TokenOutputs, WantedOutputs


def relative_to_group(batch: AdvantageInput) -> AdvantageOutput:
    """Each token gets `(R - mean) / (std + 1e-6)` of its response's group; 0 for a group without spread."""
    scores_S = batch.scores_S.double()
    advantages_S = torch.zeros_like(scores_S)
    for group in batch.groups_S.unique():
        members = batch.groups_S == group
        rewards = scores_S[members]
        if len(rewards) > 1 and rewards.std() > 1e-6:
            advantages_S[members] = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return AdvantageOutput(advantages_T=torch.where(batch.mask_T, advantages_S[batch.segments_T], 0.0).float())


@dataclass(frozen=True)
class Unlikelihood:
    """`-log(1 - p)` of a stream's tokens (arXiv:1908.04319 eq. 4), averaged by their weights over the step."""

    stream: str

    @property
    def want(self) -> WantedOutputs:
        return WantedOutputs(logprobs=True, masked_only=True)

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        weights_T = micro.streams[self.stream] / (micro.totals.streams[self.stream] or 1.0)
        loss = -(weights_T * torch.log1p(-outputs.logprobs_T.exp().clamp(max=1 - 1e-6))).sum()
        return LossOutput(loss=loss, metrics={"unlikelihood": loss.detach()})
