"""Advantage estimator `acme`. S rollouts, T tokens of all their rows."""

import torch

from roll_core.spec.algorithms import AdvantageInput, AdvantageOutput
from roll_estimator_acme.config import AcmeEstimatorOptions


def acme(batch: AdvantageInput) -> AdvantageOutput:
    """Rank each reward in its group: the share that is worse, less the share that is better, in [-1, 1]."""
    options = AcmeEstimatorOptions(**batch.options)
    same_SS = batch.groups_S[:, None] == batch.groups_S
    better_SS = torch.sign(batch.scores_S[:, None] - batch.scores_S)
    advantages_S = options.scale * (better_SS * same_SS).sum(dim=1) / same_SS.sum(dim=1)
    return AdvantageOutput(advantages_T=advantages_S[batch.segments_T] * batch.mask_T)
