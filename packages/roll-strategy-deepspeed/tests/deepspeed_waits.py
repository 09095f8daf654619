"""A program: how often the host waits for a simulated NPU in a step of `deepspeed_train`, by stage and microbatches."""

from __future__ import annotations

import json
from pathlib import Path

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_platform_sim.trace import Trace
from roll_strategy_deepspeed.config import DeepSpeedConfig
from roll_strategy_deepspeed.strategy import DeepSpeedStrategy
from roll_testing.models import QWEN3, make_batch

TRAINING = TrainingSpec(learning_rate=1e-3, num_steps=9, max_grad_norm=1.0)
MODEL = ModelSpec(random_init=QWEN3 | {"vocab_size": 64}, seed=0)
BATCH = make_batch(64, lengths=(9, 5, 3, 7, 4, 6))


def waits(stage: int) -> list[int]:
    """Waits of a step of one microbatch, and of one of three."""
    strategy = DeepSpeedStrategy(DeepSpeedConfig.model_validate({"zero_optimization": {"stage": stage}}), TRAINING)
    strategy.build(MODEL, MeshInfo(role="student", device="npu:0", backend="hccl"))

    def step(num_microbatches: int) -> int:
        with Trace() as trace:
            strategy.forward_backward(pack(BATCH, max_sequences=len(BATCH) // num_microbatches), sft_objective())
            strategy.optimizer_step()
        return sum(num for event, num in trace.events.items() if event.kind == "wait" or "blocking" in event.what)

    for _ in range(3):
        step(1)
    found = [step(1), step(3)]
    strategy.close()
    return found


if __name__ == "__main__":
    found = {stage: waits(stage) for stage in (0, 1, 2)}
    Path("results.json").write_text(json.dumps(found), encoding="utf-8")
