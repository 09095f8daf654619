"""The kit compares an engine with a train strategy, which an author's own reference cannot talk out of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roll_core.spec.providers import InferProvider
from roll_core.types import Completion, CompletionOutput
from roll_testing.errors import raises_error
from roll_testing.infer.engine import Setup, ask
from roll_testing.infer.models import SMALL, Oracle
from roll_testing.infer.trainer import check_against_trainer, trains_in
from roll_testing.kit import registry
from roll_testing.models import write_checkpoint
from roll_testing.reference import TransformersModel

VOCABULARY = 40


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def setup(request, tmp_path_factory):
    model = write_checkpoint(tmp_path_factory.mktemp("model"), SMALL, task="causal_lm", vocab_size=VOCABULARY)
    provider = registry().find(InferProvider, "hf_infer")
    return Setup(provider=provider, strategy_config={}, model=replace(model, dtype=request.param))


def answered(setup, request, spoil=lambda logprobs: logprobs):
    """What an engine would answer whose logprobs are the reference's, or those spoiled."""
    answers = Oracle(TransformersModel(setup.model))
    outputs = []
    for index in range(request.n):
        tokens = np.random.default_rng((index, len(request.prompt_ids))).integers(2, VOCABULARY, 6 + index)
        logprobs = spoil(answers.logprobs(request.prompt_ids, tokens, request.params.temperature))
        outputs.append(
            CompletionOutput(
                token_ids=tokens, logprobs=logprobs, versions=np.zeros(len(tokens), np.int32), finish_reason="length"
            )
        )
    return Completion(id=request.id, outputs=tuple(outputs))


def requests(**params):
    return [ask(np.arange(2, 2 + length), n=2, **params) for length in (1, 5, 30)]


def test_the_references_logprobs_are_the_train_strategys(setup):
    asked = requests(temperature=0.7)
    check_against_trainer("hf_train", setup, asked, [answered(setup, each) for each in asked])


@pytest.mark.parametrize(
    "spoil",
    [lambda logprobs: np.roll(logprobs, 1), lambda logprobs: logprobs / 2, lambda logprobs: logprobs + 0.5],
    ids=["off by one", "halved", "shifted"],
)
def test_other_logprobs_are_not(setup, spoil):
    asked = requests(temperature=0.7)
    found = [answered(setup, each) for each in asked[:2]] + [answered(setup, asked[2], spoil)]
    with raises_error(AssertionError, "hf_train", asked[2].id):
        check_against_trainer("hf_train", setup, asked, found)


def test_the_temperature_is_that_of_the_requests(setup):
    asked = requests(temperature=0.3)
    found = [answered(setup, each) for each in asked]
    warmer = [replace(each, params=replace(each.params, temperature=1.0)) for each in asked]
    with raises_error(AssertionError, "hf_train"):
        check_against_trainer("hf_train", setup, warmer, found)


def test_trainer_is_tested_only_in_its_dtypes():
    assert trains_in("hf_train", "bf16")
    assert not trains_in("hf_train", "fp8")
