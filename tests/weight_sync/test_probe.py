import asyncio
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from roll_core.data.processor import processor_of
from roll_core.errors import NonFiniteError, StaleWeightsError, WeightSyncError
from roll_core.runtime.run.probe import (
    Compared,
    ProbeReading,
    check_follows,
    image_prompt,
    logprob_probe,
    mean_gap,
)
from roll_core.runtime.run.weight_sync import probe_tokens
from roll_core.spec.pipeline import ScoredSequences
from roll_core.spec.providers import InferCapabilities
from roll_core.types import Completion, CompletionOutput
from roll_testing.errors import raises_error
from roll_testing.image_models import IDS, IMAGE_TOKEN, write_processor

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

    async def generate_on_each(self, requests):
        answers = [await self.answer(request) for request in requests]
        return {rank: [each[rank] for each in answers] for rank in range(len(self.replicas))}

    async def answer(self, request):
        """Completions of one request by rank."""
        assert request.params.temperature == 1
        assert request.priority < 0
        self.seeds.add(request.params.seed)
        if not request.prompt_logprobs:
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


CAN = InferCapabilities(prompt_logprobs=True)


def readings(trainer, engine, *, vocab_size=9, replays_experts=False, **can):
    capabilities = InferCapabilities(**{"prompt_logprobs": True, **can})
    options = {"can": capabilities, "vocab_size": vocab_size, "replays_experts": replays_experts}
    return asyncio.run(logprob_probe(trainer, engine, TOKENS, max_length=64, **options))


def probe(trainer, engine):
    return {rank: mean_gap(reading.fixed) for rank, reading in readings(trainer, engine).items()}


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

    async def answer(self, request):
        found = await super().answer(request)
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


def test_router_replay_tokens_have_the_experts_of_every_replica():
    engine = RoutingEngine([0, -1, -2, -3], [0, -1, -2, -4], [0, -1, -2, -3.5])
    found = readings(ReplayingTrainer(), engine, replays_experts=True)
    assert {rank: mean_gap(reading.fixed) for rank, reading in found.items()} == {0: 0, 1: 0, 2: pytest.approx(0.5)}
    assert {rank: mean_gap(reading.sampled) for rank, reading in found.items()} == {0: 0.5, 1: 1.5, 2: 2.5}


def test_every_replica_has_a_separate_gap():
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


def test_sampled_tokens_are_compared_without_prompt_logprobs():
    # |-4 - -2|, |-2 - -1|: logprobs that are doubled.
    engine = Engine([], sampled=[2, 1], logprobs=[-4, -2])
    (reading,) = readings(Trainer(0, -1, -2, -3), engine, prompt_logprobs=False).values()
    assert reading.fixed == ()
    assert mean_gap(reading.sampled) == pytest.approx(1.5)


@pytest.mark.parametrize("sampled", [[], [9], [-1]])
def test_unknown_sampled_ids_are_not_compared(sampled):
    engine = Engine([0, -1, -2, -3], sampled=sampled, logprobs=[-1.0] * len(sampled))
    assert readings(Trainer(0, -1, -2, -3), engine)[0].sampled == (None,)


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
    both = [ProbeReading(**({"fixed": (), "sampled": ()} | {part: (each,)})) for each in (before, now)]
    if not stale:
        return check_follows("actor_infer rank 0", 3, *both)
    with raises_error(StaleWeightsError, "actor_infer rank 0", "3", "0.005", "0"):
        check_follows("actor_infer rank 0", 3, *both)


NOISE = np.array([0.01, -0.01, 0.01, -0.01, 0.01])
"""Differences of an engine in bf16, which are others after each update."""


def test_another_expert_of_one_token_is_not_stale():
    """The trainer's router chose another expert for the last token, whose logprob moved by 2 nats: 0.4 on average."""
    start, ids = np.full(5, -3.0), range(5)
    before = compared(start + NOISE, start, ids)
    now = compared(start - NOISE, start + np.array([0.002, 0.003, -0.002, 0.001, -2]), ids)
    assert np.abs(now.engine - before.engine).mean() < np.abs(now.trainer - before.trainer).mean() / 10
    check_follows("actor_infer rank 0", 3, ProbeReading((before,), ()), ProbeReading((now,), ()))


@pytest.mark.parametrize(("num_moved", "stale"), [(2, False), (3, True), (4, True)])
def test_stale_engine_is_detected_by_most_sampled_sequences(num_moved, stale):
    """Another expert for a token of a prompt moves all later tokens of its sequence, and of no other."""
    ids, start = range(5), np.full(5, -3.0)
    before = compared(start + NOISE, start, ids)
    moved, still = compared(start + NOISE, start - 1, ids), compared(start + NOISE, start, ids)
    other_tokens, nothing = compared(start, start, range(1, 6)), None
    now = (*[moved] * num_moved, *[still, other_tokens, nothing][: 4 - num_moved])
    both = ProbeReading((), (before,) * 4), ProbeReading((), now)
    if not stale:
        return check_follows("actor_infer rank 0", 3, *both)
    with raises_error(StaleWeightsError, "actor_infer rank 0"):
        check_follows("actor_infer rank 0", 3, *both)


def test_sampled_sequences_have_distinct_prompts():
    class Listening(Engine):
        async def generate_on_each(self, requests):
            self.prompts = [each.prompt_ids.tolist() for each in requests]
            return await super().generate_on_each(requests)

    class AnyTokens(Trainer):
        async def score(self, sequences, want):
            return ScoredSequences(logprobs=[np.zeros(len(each.tokens), np.float32) for each in sequences])

    engine, tokens = Listening([0.0] * 32, sampled=[2], logprobs=[-2]), np.arange(32)
    asyncio.run(logprob_probe(AnyTokens(), engine, tokens, max_length=64, can=CAN, vocab_size=32))
    assert engine.prompts == [tokens.tolist(), *(list(range(i, i + 8)) for i in (0, 8, 16, 24))]


TEXT = np.arange(1, 11)


@pytest.fixture
def tokenizer(tmp_path):
    write_processor(tmp_path, "qwen2_5_vl")
    return AutoTokenizer.from_pretrained(tmp_path)


def test_probe_of_text_has_no_tokens_of_images(tokenizer):
    # All but the last tokens belong to images, so that random ids would have some of them.
    processor = processor_of(tokenizer)
    processor.media_token_ids = tuple(range(1, len(tokenizer)))
    assert set(probe_tokens(tokenizer, 64)) == {0}


def test_image_of_the_probe_is_between_text(tokenizer):
    prompt = image_prompt(TEXT, tokenizer, 64)
    # 96 x 64 pixels are 3 x 2 features of 28 x 28.
    assert prompt.tokens.tolist() == [1, 2, 3, 4, *[IDS[IMAGE_TOKEN]] * 6, 5, 6, 7, 8]
    assert (prompt.end, prompt.media.width, prompt.media.height) == (10, 96, 64)
    assert image_prompt(TEXT, tokenizer, 15) is not None
    assert image_prompt(TEXT, tokenizer, 14) is None


class SeeingTrainer(Trainer):
    """The logprob of every token is -1, and -2 for tokens after an image that it has."""

    async def score(self, sequences, want):
        def logprobs(sequence):
            is_image = sequence.tokens == IDS[IMAGE_TOKEN]
            assert is_image.any() == bool(sequence.media)
            return np.where(np.cumsum(is_image) == 6, -2, -1).astype(np.float32)

        return ScoredSequences(logprobs=[logprobs(sequence) for sequence in sequences])


class SeeingEngine:
    """Likewise, but tokens after an image have these logprobs."""

    name = "actor_infer"

    def __init__(self, after_image, num_sampled=3):
        self.after_image, self.num_sampled = after_image, num_sampled

    async def generate_on_each(self, requests):
        return {0: [self.answer(request) for request in requests]}

    def answer(self, request):
        logprob = self.after_image if request.media else -1
        prompt = np.full(len(request.prompt_ids), logprob, np.float32)
        output = CompletionOutput(
            token_ids=np.full(self.num_sampled, 9),
            logprobs=np.full(self.num_sampled, logprob, np.float32),
            versions=np.zeros(self.num_sampled, np.int32),
            finish_reason="length",
        )
        return Completion(id=request.id, outputs=(output,), prompt_logprobs=prompt if request.prompt_logprobs else None)


@pytest.mark.parametrize("prompt_logprobs", [True, False])
@pytest.mark.parametrize(("after_image", "gap"), [(-2.0, 0.0), (-1.25, 0.75)])
def test_engine_that_sees_another_image_has_a_gap_after_it(tokenizer, after_image, gap, prompt_logprobs):
    can = InferCapabilities(prompt_logprobs=prompt_logprobs, images=True)
    image = image_prompt(TEXT, tokenizer, 64)
    reading = asyncio.run(
        logprob_probe(
            SeeingTrainer(), SeeingEngine(after_image), TEXT, can=can, vocab_size=264, max_length=64, image=image
        )
    )[0]
    assert mean_gap(reading.image) == pytest.approx(gap)
    assert mean_gap(reading.sampled) == 0
    (compared,) = reading.image
    assert compared.tokens.tolist() == [*([5, 6, 7, 8] if prompt_logprobs else []), 9, 9, 9]
