"""GRPO from rewards to the gradient, against the paper's formula written as loops (arXiv:2402.03300 eq. 3)."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.algorithms.advantages import grpo
from roll_core.algorithms.losses import policy_objective
from roll_core.spec.algorithms import AdvantageInput
from roll_core.spec.train import TokenOutputs

CLIP, BETA = 0.2, 0.04


def paper(rewards, groups, responses):
    """`responses[i]` is a list of (logprob, old, ref) per token; returns the loss, the negated objective."""
    objective = 0.0
    for i, tokens in enumerate(responses):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
        deviation = statistics.stdev(members) if len(members) > 1 else 0.0
        advantage = (rewards[i] - statistics.fmean(members)) / (deviation + 1e-6) if deviation > 1e-6 else 0.0
        inner = 0.0
        for logprob, old, ref in tokens:
            ratio = math.exp(logprob - old)
            surrogate = min(ratio * advantage, min(max(ratio, 1 - CLIP), 1 + CLIP) * advantage)
            inner += surrogate - BETA * (math.exp(ref - logprob) - (ref - logprob) - 1)
        objective += inner / len(tokens)
    return -objective / len(responses)


LOGPROB = st.floats(-2, 0, width=32)
RESPONSE = st.lists(st.tuples(LOGPROB, LOGPROB, LOGPROB), min_size=1, max_size=5)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 2), RESPONSE), min_size=1, max_size=8))
def test_rewards_to_loss_is_the_papers_objective(micro_of, rows):
    rewards, groups, responses = ([row[i] for row in rows] for i in range(3))
    # A prompt token before each response, as in training.
    masks = [[0] + [1] * len(tokens) for tokens in responses]
    per_token = {
        name: [[0.0, *(token[at] for token in tokens)] for tokens in responses]
        for at, name in enumerate(("logprobs", "old_logprobs", "ref_logprobs"))
    }
    layout = micro_of(masks, groups=groups)
    mask_T, segments_T = layout.loss_mask_T, layout.segments_T
    scores_S, groups_S = torch.tensor(rewards), torch.tensor(groups)
    found = grpo(AdvantageInput(scores_S=scores_S, mask_T=mask_T, segments_T=segments_T, groups_S=groups_S))
    ends = [0]
    for mask in masks:
        ends.append(ends[-1] + len(mask))
    advantages = [found.advantages_T[a:b].tolist() for a, b in pairwise(ends)]
    logprobs_T = torch.tensor([value for row in per_token.pop("logprobs") for value in row])
    micro = micro_of(masks, groups=groups, advantages=advantages, **per_token)
    objective = policy_objective(kl_coef=BETA, entropy_metric=False)
    loss = objective(TokenOutputs(logprobs_T=logprobs_T), micro).loss.item()
    assert loss == pytest.approx(paper(rewards, groups, responses), rel=1e-4, abs=1e-5)
