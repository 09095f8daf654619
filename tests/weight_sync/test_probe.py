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

    async def generate_on_each(self, request):
        assert request.prompt_logprobs
        assert request.params.temperature == 1
        assert request.priority < 0
        return {
            rank: Completion(
                id=request.id,
                outputs=(),
                prompt_logprobs=None if answer is None else np.array(answer, np.float32),
            )
            for rank, answer in enumerate(self.replicas)
        }


def probe(trainer, engine):
    return asyncio.run(logprob_probe(trainer, engine, TOKENS))


def test_the_gap_is_the_mean_over_all_tokens_but_the_first():
    # |-1 - -1.5|, |-2 - -2|, |-3 - -2.75|: 0.75 over 3 tokens.
    assert probe(Trainer(0, -1, -2, -3), Engine([9, -1.5, -2, -2.75])) == {0: pytest.approx(0.25)}


def test_equal_logprobs_have_no_gap():
    assert probe(Trainer(0, -1, -2, -3), Engine([0, -1, -2, -3])) == {0: 0}


def test_each_replica_has_a_gap_of_its_own():
    engine = Engine([0, -1, -2, -3], [0, -1, -2, -6], [0, -1.3, -2, -3])
    assert probe(Trainer(0, -1, -2, -3), engine) == {0: 0, 1: pytest.approx(1.0), 2: pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("trainer", "engine", "role"),
    [
        (Trainer(0, np.nan, -2, -3), Engine([0, -1, -2, -3]), "actor_train"),
        (Trainer(0, -1, -2, -3), Engine([0, -1, -2, -3], [0, -1, -np.inf, -3]), "actor_infer rank 1"),
    ],
)
def test_a_logprob_that_is_not_a_number_names_its_role(trainer, engine, role):
    with pytest.raises(NonFiniteError, match=f"{role} gives probe token"):
        probe(trainer, engine)


@pytest.mark.parametrize("answer", [None, [0, -1]])
def test_an_engine_that_does_not_answer_the_probe_is_an_error(answer):
    with pytest.raises(WeightSyncError, match=r"actor_infer rank 0 returned .* for the 4 probe tokens"):
        probe(Trainer(0, -1, -2, -3), Engine(answer))
