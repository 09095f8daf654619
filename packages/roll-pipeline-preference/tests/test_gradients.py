"""The gradient of a batch of pairs through a model is the same however its pairs are split into microbatches."""

import numpy as np
import pytest

from roll_core.algorithms.losses import CrossEntropy, Objective
from roll_core.data.pack import count_totals, pack
from roll_core.types import TrainSequence
from roll_pipeline_preference.encode import CHOSEN, DESIRABLE, MARGIN
from roll_pipeline_preference.terms import BradleyTerryTerm, PreferenceTerm

TERMS = {
    "dpo": PreferenceTerm(losses={"sigmoid": 1.0}),
    "ipo, wpo": PreferenceTerm(losses={"ipo": 1.0}, use_weighting=True, ld_alpha=0.5),
    "orpo": PreferenceTerm(losses={"orpo": 1.0}, reference=False),
    "kto": PreferenceTerm(losses={"kto": 1.0}, kl=0.3),
    "reward model": BradleyTerryTerm(center_rewards_coefficient=0.01),
}


def batch(*, paired):
    rng = np.random.default_rng(0)
    found = []
    for at in range(8):
        length = int(rng.integers(4, 13))
        mask = np.arange(length) >= rng.integers(1, length)
        last = (np.arange(length) == length - 1).astype(np.float32)
        chosen = at % 2 == 0
        number = at // 2 if paired else at
        found.append(
            TrainSequence(
                id=str(at),
                tokens=rng.integers(0, 61, length),
                loss_mask=mask,
                group=number,
                unit=number,
                streams={CHOSEN: mask.astype(np.float32), DESIRABLE: last, MARGIN: last} if chosen else {},
                ref_logprobs=-rng.random(length).astype(np.float32),
            )
        )
    return found


@pytest.mark.parametrize("name", TERMS)
def test_the_gradient_does_not_depend_on_the_split(build, name):
    task = "reward" if name == "reward model" else "causal_lm"
    strategy = build(task)
    sft = {} if task == "reward" else {"sft": CrossEntropy(stream=CHOSEN)}
    objective = Objective(terms={"preference": TERMS[name], **sft})
    sequences = batch(paired=name != "kto")
    gradients, losses = [], []
    for split in ({}, {"max_sequences": 2}, {"max_sequences": 4}, {"max_tokens": 20}):
        micros = pack(sequences, totals=count_totals(sequences), **split)
        assert bool(split) == (len(micros) > 1)
        metrics = strategy.forward_backward(micros, objective)
        gradients.append(strategy.optimizer.flat_grad.clone())
        losses.append(sum(each["loss"] for each in metrics))
        strategy.optimizer.flat_grad.zero_()
    assert gradients[0].norm() > 0
    for gradient, loss in zip(gradients[1:], losses[1:], strict=True):
        assert float((gradient - gradients[0]).norm() / gradients[0].norm()) < 1e-5
        assert loss == pytest.approx(losses[0], abs=1e-6)
