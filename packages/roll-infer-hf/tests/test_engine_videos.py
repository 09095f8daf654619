"""Prompts with videos: the engine beside transformers, with positions of its own, and beside the trainer."""

import asyncio

import numpy as np
import pytest

from roll_core.data.pack import pack
from roll_core.errors import DataError
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec, WantedOutputs
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.errors import raises_error
from roll_testing.image_models import VIDEO_TYPES, tiny_vision
from shared_tests.tiny_vision import transformers_logprobs, vision_batch


@pytest.fixture(scope="module", params=VIDEO_TYPES)
def folder(request, tmp_path_factory):
    return tiny_vision(tmp_path_factory.mktemp(request.param), request.param)


def request_of(sequence, **params):
    prompt = sequence.tokens[: int(sequence.loss_mask.argmax())]
    params = SamplingParams(**{"max_new_tokens": 9, "ignore_eos": True, **params})
    return GenerateRequest(id=sequence.id, prompt_ids=prompt, media=sequence.media, params=params, n=2)


def test_logprobs_after_videos_are_those_of_transformers(folder, with_engine):
    rows = [row for row in vision_batch(folder) if row.loss_mask.argmax() > 1]
    requests = [request_of(row, seed=index) for index, row in enumerate(rows)]

    async def act(engine):
        return await asyncio.gather(*map(engine.generate, requests))

    spec = ModelSpec(path=str(folder), dtype="fp32")
    sequences, sampled = [], []
    for request, completion in zip(requests, with_engine(act, spec=spec), strict=True):
        for output in completion.outputs:
            tokens = np.concatenate([request.prompt_ids, output.token_ids])
            mask = np.arange(len(tokens)) >= len(request.prompt_ids)
            sequences.append(TrainSequence(id=str(len(sequences)), tokens=tokens, media=request.media, loss_mask=mask))
            sampled.append(output.logprobs)
    (micro,) = pack(sequences)
    trainer = HFTrainStrategy(HFTrainConfig(), TrainingSpec(learning_rate=0.01))
    trainer.build(spec, MeshInfo(role="actor_train", num_threads=1))
    try:
        trained = trainer.forward(micro, WantedOutputs(logprobs=True)).logprobs_T.detach().numpy()
    finally:
        trainer.close()
    mask_T = micro.loss_mask_T.numpy()
    np.testing.assert_allclose(np.concatenate(sampled), trained[mask_T], atol=1e-4)
    expected = transformers_logprobs(folder, sequences).detach().numpy()
    np.testing.assert_allclose(np.concatenate(sampled), expected[mask_T], atol=1e-4)


def test_videos_that_do_not_fit_the_prompt_are_refused(folder, with_engine):
    video = next(row for row in vision_batch(folder) if row.id == "video")
    request = request_of(video)

    async def act(engine):
        for media in ((), request.media * 2):
            with raises_error(DataError, request.id):
                await engine.generate(
                    GenerateRequest(id=request.id, prompt_ids=request.prompt_ids, media=media, params=request.params)
                )

    with_engine(act, spec=ModelSpec(path=str(folder), dtype="fp32"))
