"""A program: steps of `megatron_train` on a simulated device, to which Megatron's CUDA calls are sent.

Writes the gradient norms of the steps, those of `hf_train` on the CPU, and how often the host waited for the device.
"""

from __future__ import annotations

import json
from pathlib import Path

import megatron_on_cpu
import torch

from roll_core.algorithms.losses import policy_objective, sft_objective
from roll_core.data.pack import pack
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec, TrainStrategy
from roll_platform_sim.trace import Trace
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_strategy_megatron.config import MegatronConfig
from roll_strategy_megatron.strategy import MegatronStrategy
from roll_testing.models import QWEN3, make_batch

TRAINING = TrainingSpec(learning_rate=1e-3, num_steps=9, max_grad_norm=1.0)
MODEL = ModelSpec(random_init=QWEN3 | {"vocab_size": 64}, seed=0)
MICROBATCHES = pack(make_batch(64, lengths=(9, 5, 3, 7, 4, 6)), max_sequences=2)
LOSSES = {"sft": sft_objective(), "grpo": policy_objective()}


def steps(strategy: TrainStrategy, mesh: MeshInfo) -> tuple[list[float], list[int]]:
    """Gradient norm of a step of each loss, and numbers of waits of a second step of each."""
    strategy.build(MODEL, mesh)
    norms, waits = [], []
    for loss in LOSSES.values():
        strategy.forward_backward(MICROBATCHES, loss)
        norms.append(strategy.optimizer_step().grad_norm)
    for loss in LOSSES.values():
        with Trace(("roll_", "megatron")) as trace:
            strategy.forward_backward(MICROBATCHES, loss)
            strategy.optimizer_step()
        blocking = (event for event in trace.events if event.kind == "wait" or "blocking" in event.what)
        waits.append(sum(trace.events[event] for event in blocking))
    strategy.close()
    return norms, waits


if __name__ == "__main__":
    megatron_on_cpu.DEVICE = torch.device("sim:0")
    mesh = MeshInfo(role="student", device="sim:0", backend="simccl")
    norms, waits = steps(MegatronStrategy(MegatronConfig(), TRAINING), mesh)
    expected, _ = steps(HFTrainStrategy(HFTrainConfig(), TRAINING), MeshInfo(role="student"))
    found = {"norms": norms, "expected": expected, "waits": waits}
    Path("results.json").write_text(json.dumps(found), encoding="utf-8")
