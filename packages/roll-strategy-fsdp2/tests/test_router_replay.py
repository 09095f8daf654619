"""The engine's experts, however the model is spread."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fsdp2_programs import MOE

from roll_core.spec.providers import TrainProvider
from roll_strategy_fsdp2.config import FSDP2Config
from roll_testing.bench import Case
from roll_testing.errors import raises_error
from roll_testing.losses import TRAINING
from roll_testing.models import write_checkpoint
from roll_testing.train_kit import registry
from shared_tests.replaying import check_replay

pytestmark = pytest.mark.engine

MIXTURE = {key: value for key, value in MOE.items() if key != "vocab_size"}
SPREAD = {
    "2, checkpointed": (2, {}, {"gradient_checkpointing": True}),
    "padded": (2, {}, {"attn_implementation": "sdpa"}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}, {}),
    "experts 2": (2, {"ep_size": 2}, {}),
    "ulysses 2": (2, {"ulysses_size": 2}, {}),
    "ring 2, two copies": (4, {"ring_size": 2, "fsdp_size": 2}, {}),
}


@pytest.mark.parametrize("name", SPREAD)
def test_experts_are_replayed_as_in_one_process(ranks, tmp_path, name):
    num_ranks, config, model = SPREAD[name]
    written = write_checkpoint(tmp_path, MIXTURE, task="causal_lm", vocab_size=61)
    case = Case(
        provider=registry().find(TrainProvider, "fsdp2_train"),
        strategy_config=config,
        model=replace(written, **model),
        training=TRAINING,
        world_size=num_ranks,
        devices=("cpu",) * num_ranks,
    )
    check_replay(ranks, case, MIXTURE, 61)


def test_routers_that_are_not_known_are_named():
    with raises_error(ValueError, "gpt_oss"):
        FSDP2Config().check_router_replay({"model_type": "gpt_oss"})
    FSDP2Config().check_router_replay({"model_type": "qwen3_moe"})
