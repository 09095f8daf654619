import asyncio

import numpy as np
import pytest

from roll_core.errors import NonFiniteError, WeightSyncError
from roll_core.runtime.weight_sync.probe import logprob_probe
from roll_core.spec.pipeline import ScoredSequences
from roll_core.types import Completion

TOKENS = np.array([5, 6, 7, 8], np.int64)


class Trainer:
    name = "actor_train"

    def __init__(self, *logprobs):
        self.logprobs = np.array(logprobs, np.float32)

    async def score(self, sequences, *, logprobs=False, **_):
        (sequence,) = sequences
        assert logprobs
        assert sequence.tokens.tolist() == TOKENS.tolist()
        return ScoredSequences(logprobs=[self.logprobs])


class Engine:
    name = "actor_infer"

    def __init__(self, *replicas):
        self.replicas = replicas

    async def generate(self, requests, on_completion=None):
        assert all(request.prompt_logprobs and request.params.temperature == 1 for request in requests)
        assert len({request.id for request in requests}) == len(requests)
        answers = [self.replicas[at % len(self.replicas)] for at in range(len(requests))]
        return [
            Completion(
                id=request.id,
                outputs=(),
                prompt_logprobs=None if answer is None else np.array(answer, np.float32),
            )
            for request, answer in zip(requests, answers, strict=True)
        ]


def probe(trainer, engine, **options):
    return asyncio.run(logprob_probe(trainer, engine, TOKENS, **options))


def test_the_gap_is_the_mean_over_all_tokens_but_the_first():
    # |-1 - -1.5|, |-2 - -2|, |-3 - -2.75|: 0.75 over 3 tokens.
    assert probe(Trainer(0, -1, -2, -3), Engine([9, -1.5, -2, -2.75])) == pytest.approx(0.25)


def test_equal_logprobs_have_no_gap():
    assert probe(Trainer(0, -1, -2, -3), Engine([0, -1, -2, -3])) == 0


def test_the_worst_replica_counts():
    engine = Engine([0, -1, -2, -3], [0, -1, -2, -6])
    assert probe(Trainer(0, -1, -2, -3), engine, num_requests=2) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("trainer", "engine", "role"),
    [
        (Trainer(0, np.nan, -2, -3), Engine([0, -1, -2, -3]), "actor_train"),
        (Trainer(0, -1, -2, -3), Engine([0, -1, -np.inf, -3]), "actor_infer"),
    ],
)
def test_a_logprob_that_is_not_a_number_names_its_role(trainer, engine, role):
    with pytest.raises(NonFiniteError, match=f"{role} gives probe token"):
        probe(trainer, engine)


@pytest.mark.parametrize("answer", [None, [0, -1]])
def test_an_engine_that_does_not_answer_the_probe_is_an_error(answer):
    with pytest.raises(WeightSyncError, match=r"actor_infer returned .* for the 4 probe tokens"):
        probe(Trainer(0, -1, -2, -3), Engine(answer))
