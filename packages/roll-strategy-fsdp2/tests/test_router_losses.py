"""Auxiliary losses of routers, however the model is spread."""

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
from shared_tests.router_losses import ROUTER_LOSSES, check_router_losses

pytestmark = pytest.mark.engine

MIXTURE = {key: value for key, value in MOE.items() if key != "vocab_size"}
SPREAD = {
    "2, checkpointed": (2, {}, {"gradient_checkpointing": True}),
    "padded": (2, {}, {"attn_implementation": "sdpa"}),
    "tensor 2": (2, {"tensor_model_parallel_size": 2}, {}),
    "experts 2": (2, {"ep_size": 2}, {}),
    "ulysses 2, checkpointed": (2, {"ulysses_size": 2}, {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize("name", SPREAD)
def test_router_losses_equal_those_of_one_sequence(ranks, tmp_path, name):
    num_ranks, config, model = SPREAD[name]
    written = write_checkpoint(tmp_path, MIXTURE, task="causal_lm", vocab_size=61)
    case = Case(
        provider=registry().find(TrainProvider, "fsdp2_train"),
        strategy_config=config | ROUTER_LOSSES,
        model=replace(written, **model),
        training=TRAINING,
        world_size=num_ranks,
        devices=("cpu",) * num_ranks,
    )
    check_router_losses(ranks, case, 61)


def test_router_losses_need_known_routers():
    config = FSDP2Config(moe_z_loss_coeff=0.1)
    with raises_error(ValueError, "moe_z_loss_coeff", "qwen3"):
        config.check_model({"model_type": "qwen3"})
    config.check_model({"model_type": "qwen3_moe"})
    with raises_error(ValueError, "fp16"):
        config.check_model_args({"dtype": "fp16"})
    with raises_error(ValueError, "torch_compile"):
        FSDP2Config(moe_aux_loss_coeff=0.1, torch_compile=True)
