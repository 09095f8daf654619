"""Models are trained on images at each stage, also by ranks without any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roll_testing.image_models import tiny_vision
from shared_tests.vision_ranks import check_images_on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vision(tmp_path_factory.mktemp("model"), "qwen3_vl")


@pytest.mark.parametrize("freeze", [("vision", "projector"), ()])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_without_images_does_not_block_the_others(ranks, case, folder, stage, freeze):
    model = replace(case.model, path=str(folder), tokenizer=str(folder), freeze=freeze)
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    two = case.with_(model=model, strategy_config={"zero_optimization": zero}, world_size=2)
    check_images_on_ranks(ranks, two, folder)
