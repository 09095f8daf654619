"""The engine's experts at every stage of ZeRO."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roll_testing.models import QWEN3, write_checkpoint
from shared_tests.replaying import check_replay

MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(("stage", "world_size", "recomputed"), [(0, 1, False), (2, 2, False), (3, 2, True)])
def test_experts_are_replayed_as_in_one_process(ranks, case, tmp_path, stage, world_size, recomputed):
    written = write_checkpoint(tmp_path, MIXTURE, task="causal_lm", vocab_size=61)
    spread = case.with_(
        model=replace(written, gradient_checkpointing=recomputed),
        strategy_config={"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}},
        world_size=world_size,
    )
    check_replay(ranks, spread, MIXTURE, 61)
