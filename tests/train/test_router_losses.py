"""Losses of routers of `hf_train`: those of each sequence by itself, however the batch is split."""

from dataclasses import replace

import pytest

from roll_core.spec.providers import TrainProvider
from roll_testing.bench import Case
from roll_testing.kit import registry
from roll_testing.losses import TRAINING
from roll_testing.models import QWEN3, write_checkpoint
from shared_tests.router_losses import ROUTER_LOSSES, check_router_losses

MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("losses", "model"),
    [
        (ROUTER_LOSSES, {}),
        (ROUTER_LOSSES, {"gradient_checkpointing": True}),
        ({"moe_aux_loss_coeff": 0.5}, {"attn_implementation": "sdpa"}),
        ({"moe_z_loss_coeff": 0.05}, {}),
    ],
    ids=["both", "recomputed", "balance alone, padded", "z alone"],
)
def test_router_losses_equal_those_of_one_sequence(tmp_path, losses, model):
    written = write_checkpoint(tmp_path, MIXTURE, task="causal_lm", vocab_size=61)
    case = Case(
        provider=registry().find(TrainProvider, "hf_train"),
        strategy_config=losses,
        model=replace(written, **model),
        training=TRAINING,
    )
    check_router_losses(lambda function, case, *arguments: (function(0, case, *arguments),), case, 61)
