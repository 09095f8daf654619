"""Auxiliary losses of routers, however the model is spread."""

from __future__ import annotations

import pytest
from fsdp2_programs import MIXTURES, MOE, mixture_case

from roll_strategy_fsdp2.config import FSDP2Config
from roll_testing.errors import raises_error
from shared_tests.router_losses import ROUTER_LOSSES, check_router_losses

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", MIXTURES)
def test_router_losses_equal_those_of_one_sequence(ranks, tmp_path, name):
    check_router_losses(ranks, mixture_case(tmp_path, name, **ROUTER_LOSSES), MOE["vocab_size"])


def test_router_losses_need_known_routers():
    config = FSDP2Config(moe_z_loss_coeff=0.1)
    with raises_error(ValueError, "moe_z_loss_coeff", "qwen3"):
        config.check_model({"model_type": "qwen3"})
    config.check_model({"model_type": "qwen3_moe"})
    with raises_error(ValueError, "fp16"):
        config.check_model_args({"dtype": "fp16"})
    with raises_error(ValueError, "torch_compile"):
        FSDP2Config(moe_aux_loss_coeff=0.1, torch_compile=True)
