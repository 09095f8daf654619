"""Acme's advantage estimator: outcome-supervised GRPO (arXiv:2402.03300 §4.1.2), written without ROLL's helpers."""

import torch

from roll_core.spec.algorithms import AdvantageInput, AdvantageOutput


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
