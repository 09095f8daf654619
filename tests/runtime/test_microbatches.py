"""A worker cuts its share into microbatches as the role's limits and the strategy ask."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from roll_core.runtime.workers.train import BatchLimits, TrainWorker
from roll_core.spec.train import StepStats, TokenOutputs, WantedOutputs
from roll_core.types import Totals, TrainSequence


class Counting:
    """Notes the microbatches that it gets."""

    def __init__(self, multiple):
        self.microbatch_multiple, self.got = multiple, []

    def forward_backward(self, micros, _loss):
        self.got.append([each.lengths for each in micros])
        return [{} for _ in micros]

    def forward_all(self, micros, _want):
        self.got.append([each.lengths for each in micros])
        return iter([TokenOutputs(logprobs_T=each.tokens_T.float()) for each in micros])

    def optimizer_step(self):
        return StepStats(grad_norm=0.0, learning_rate=0.0)


def worker_of(multiple, **limits):
    found = TrainWorker.__new__(TrainWorker)
    found.strategy = Counting(multiple)
    found.deterministic, found.role = False, "actor_train"
    found.mesh = SimpleNamespace(device="cpu")
    found.limits = BatchLimits(train_sequences=2, infer_sequences=3, **limits)
    return found


ROWS = [
    TrainSequence(id=str(i), tokens=np.arange(length) + 10 * i, loss_mask=np.arange(length) > 0)
    for i, length in enumerate((4, 1, 1, 2, 4))
]


@pytest.mark.parametrize(
    ("multiple", "budgets", "trained", "scored"),
    [
        (2, {"train_tokens": None, "infer_tokens": None}, [(4, 1), (1, 2), (4,)], [(4, 1, 1), (2, 4)]),
        (1, {"train_tokens": 12, "infer_tokens": 6}, [(4, 1, 1, 2, 4)], [(4, 2), (1, 1, 4)]),
        (3, {"train_tokens": 12, "infer_tokens": 4}, [(4,), (4,), (1, 1, 2)], [(4,), (4,), (1, 1, 2)]),
    ],
)
def test_microbatches_are_filled_by_sequences_or_by_tokens(multiple, budgets, trained, scored):
    worker = worker_of(multiple, **budgets)
    worker.update(ROWS, None, Totals(tokens=7, sequences=3, rollouts=3, groups=1, max_length=4))
    found = worker.score(ROWS, WantedOutputs(logprobs=True))
    assert worker.strategy.got == [trained, scored]
    assert [each.tolist() for each in found.logprobs] == [each.tokens.tolist() for each in ROWS]
