"""Auxiliary losses of routers at stages of ZeRO."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roll_testing.models import QWEN3, write_checkpoint
from shared_tests.router_losses import ROUTER_LOSSES, check_router_losses

MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(("stage", "world_size", "recomputed"), [(1, 2, True), (3, 2, False)])
def test_router_losses_equal_those_of_one_sequence(ranks, case, tmp_path, stage, world_size, recomputed):
    written = write_checkpoint(tmp_path, MIXTURE, task="causal_lm", vocab_size=61)
    spread = case.with_(
        model=replace(written, gradient_checkpointing=recomputed),
        strategy_config={"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        | ROUTER_LOSSES,
        world_size=world_size,
    )
    check_router_losses(ranks, spread, 61)
