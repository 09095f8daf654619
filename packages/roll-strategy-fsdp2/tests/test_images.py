"""Sharded models are trained on images, also by ranks without any."""

from __future__ import annotations

import pytest

from roll_core.errors import UnsupportedError
from roll_core.spec.model import ModelSpec
from roll_core.spec.train import WantedOutputs
from roll_strategy_fsdp2.plugin import FSDP2_TRAIN
from roll_testing.bench import WHOLE, Case
from roll_testing.image_models import tiny_vision
from roll_testing.losses import TRAINING
from roll_testing.programs import raised, score
from shared_tests.tiny_vision import vision_batch
from shared_tests.vision_ranks import check_images_on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vision(tmp_path_factory.mktemp("model"), "qwen3_vl")


def case_of(folder, freeze, **config):
    model = ModelSpec(path=str(folder), tokenizer=str(folder), freeze=freeze, gradient_checkpointing=not freeze)
    return Case(
        provider=FSDP2_TRAIN,
        strategy_config=config,
        model=model,
        training=TRAINING,
        world_size=2,
        devices=("cpu", "cpu"),
    )


@pytest.mark.parametrize("freeze", [("vision", "projector"), ("vision",), ()])
def test_a_rank_without_images_does_not_block_the_others(ranks, folder, freeze):
    check_images_on_ranks(ranks, case_of(folder, freeze), folder)


def refused(rank, case, sequences):
    return raised(lambda: score(rank, case, sequences, WantedOutputs(logprobs=True), WHOLE))


@pytest.mark.parametrize("key", ["ulysses_size", "ring_size"])
def test_images_with_context_parallelism_are_refused(ranks, folder, key):
    case = case_of(folder, ("vision", "projector"), **{key: 2})
    for error in ranks(refused, case, vision_batch(folder)):
        assert error.is_a(UnsupportedError)
