import asyncio
from dataclasses import replace

import numpy as np
import pytest

from roll_core.errors import NonFiniteError, StaleWeightsError, WeightSyncError
from roll_core.runtime.run.probe import Compared, ProbeReading, check_follows, logprob_probe
from roll_core.spec.pipeline import ScoredSequences
from roll_core.spec.providers import InferCapabilities
from roll_core.types import Completion, CompletionOutput
from roll_testing.errors import raises_error

TOKENS = np.array([5, 6, 7, 8], np.int64)


class Trainer:
    name = "actor_train"

    def __init__(self, *logprobs):
        self.logprobs = np.array(logprobs, np.float32)

    async def score(self, sequences, want):
        """Its own of the fixed tokens; minus their ids of those that an engine sampled."""
        fixed, *sampled = sequences
        assert want.logprobs
        assert fixed.tokens.tolist() == TOKENS.tolist()
        return ScoredSequences(logprobs=[self.logprobs, *(-each.tokens.astype(np.float32) for each in sampled)])


class Engine:
    name = "actor_infer"

    def __init__(self, *replicas, sampled=(), logprobs=()):
        self.replicas, self.sampled, self.logprobs = replicas, sampled, logprobs
        self.seeds = set()

    async def generate_on_each(self, request):
        assert request.params.temperature == 1
        assert request.priority < 0
        self.seeds.add(request.params.seed)
        if not request.prompt_logprobs:
            assert TOKENS[: len(request.prompt_ids)].tolist() == request.prompt_ids.tolist()
            ids, logprobs = np.array(self.sampled, np.int64), np.array(self.logprobs, np.float32)
            output = CompletionOutput(
                token_ids=ids, logprobs=logprobs, versions=np.zeros(len(ids), np.int32), finish_reason="length"
            )
            return {rank: Completion(id=request.id, outputs=(output,)) for rank in range(len(self.replicas))}
        return {
            rank: Completion(
                id=request.id,
                outputs=(),
                prompt_logprobs=None if answer is None else np.array(answer, np.float32),
            )
            for rank, answer in enumerate(self.replicas)
        }


def readings(trainer, engine, *, vocab_size=9, replays_experts=False, **can):
    capabilities = InferCapabilities(**{"prompt_logprobs": True, **can})
    options = {"can": capabilities, "vocab_size": vocab_size, "replays_experts": replays_experts}
    return asyncio.run(logprob_probe(trainer, engine, TOKENS, max_length=64, **options))


def probe(trainer, engine):
    return {rank: reading.fixed.gap for rank, reading in readings(trainer, engine).items()}


def test_the_gap_is_the_mean_over_all_tokens_but_the_first():
    # |-1 - -1.5|, |-2 - -2|, |-3 - -2.75|: 0.75 over 3 tokens.
    assert probe(Trainer(0, -1, -2, -3), Engine([9, -1.5, -2, -2.75])) == {0: pytest.approx(0.25)}


def test_equal_logprobs_have_no_gap():
    assert probe(Trainer(0, -1, -2, -3), Engine([0, -1, -2, -3])) == {0: 0}


class ReplayingTrainer(Trainer):
    """The logprob of a token is minus the expert of the token before it, and far from any engine's without experts."""

    async def score(self, sequences, want):
        return ScoredSequences(
            logprobs=[
                np.full(len(each), -99, np.float32)
                if each.routed_experts is None
                else -np.array([0, *each.routed_experts[: len(each) - 1, 0, 0]], np.float32)
                for each in sequences
            ]
        )


class RoutingEngine(Engine):
    """Each replica has another expert for the third token."""

    async def generate_on_each(self, request):
        found = await super().generate_on_each(request)
        assert request.routed_experts
        for rank, completion in found.items():
            output = CompletionOutput(
                token_ids=np.array([2], np.int64),
                logprobs=np.array([-2.5], np.float32),
                versions=np.zeros(1, np.int32),
                finish_reason="length",
                routed_experts=np.array([1, 2, 3 + rank, 9], np.uint8)[: len(request.prompt_ids), None, None],
            )
            found[rank] = replace(completion, outputs=(output,))
        return found


def test_with_router_replay_tokens_have_the_experts_of_each_replica():
    engine = RoutingEngine([0, -1, -2, -3], [0, -1, -2, -4], [0, -1, -2, -3.5])
    found = readings(ReplayingTrainer(), engine, replays_experts=True)
    assert {rank: reading.fixed.gap for rank, reading in found.items()} == {0: 0, 1: 0, 2: pytest.approx(0.5)}
    assert {rank: reading.sampled.gap for rank, reading in found.items()} == {0: 0.5, 1: 1.5, 2: 2.5}


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
    with raises_error(NonFiniteError, role):
        probe(trainer, engine)


@pytest.mark.parametrize("answer", [None, [0, -1]])
def test_an_engine_that_does_not_answer_the_probe_is_an_error(answer):
    with raises_error(WeightSyncError, "actor_infer rank 0", "4"):
        probe(Trainer(0, -1, -2, -3), Engine(answer))


@pytest.mark.parametrize(("seeds", "sent"), [(True, {0}), (False, {None})])
def test_an_engine_without_seeds_gets_none(seeds, sent):
    engine = Engine([0, -1, -2, -3], sampled=[2, 1], logprobs=[-2, -1])
    readings(Trainer(0, -1, -2, -3), engine, seeds=seeds)
    assert engine.seeds == sent


def test_tokens_that_an_engine_sampled_are_compared_also_without_prompt_logprobs():
    # |-4 - -2|, |-2 - -1|: logprobs that are doubled.
    engine = Engine([], sampled=[2, 1], logprobs=[-4, -2])
    (reading,) = readings(Trainer(0, -1, -2, -3), engine, prompt_logprobs=False).values()
    assert reading.fixed is None
    assert reading.sampled.gap == pytest.approx(1.5)


@pytest.mark.parametrize("sampled", [[], [9], [-1]])
def test_sampled_ids_that_the_trainer_does_not_have_are_left_to_the_rollouts_checks(sampled):
    engine = Engine([0, -1, -2, -3], sampled=sampled, logprobs=[-1.0] * len(sampled))
    assert readings(Trainer(0, -1, -2, -3), engine)[0].sampled is None


def compared(engine, trainer, ids=(1, 2)):
    return Compared(np.array(ids), np.array(engine, np.float32), np.array(trainer, np.float32))


@pytest.mark.parametrize(
    ("before", "now", "stale"),
    [
        pytest.param(compared([-1, -2], [-1, -2]), compared([-1, -2], [-1.01, -2]), True, id="the trainer alone moved"),
        pytest.param(compared([-1, -2], [-1, -2]), compared([-1.01, -2], [-1.01, -2]), False, id="both moved"),
        pytest.param(compared([-1, -2], [-1, -2]), compared([-1, -2], [-1.0001, -2]), False, id="rounding"),
        pytest.param(compared([-1, -2], [-1.01, -2]), compared([-1, -2], [-1.02, -2]), False, id="within the noise"),
        pytest.param(compared([-1, -2], [-1, -2]), compared([-1, -2], [-3, -2], ids=(1, 3)), False, id="other tokens"),
    ],
)
@pytest.mark.parametrize("part", ["fixed", "sampled"])
def test_an_engine_that_does_not_follow_the_trainer_is_stale(before, now, stale, part):
    both = [ProbeReading(**({"fixed": None, "sampled": None} | {part: each})) for each in (before, now)]
    if not stale:
        return check_follows("actor_infer rank 0", 3, *both)
    with raises_error(StaleWeightsError, "actor_infer rank 0", "3", "0.005", "0"):
        check_follows("actor_infer rank 0", 3, *both)
