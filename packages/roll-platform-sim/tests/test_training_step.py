"""A training step on a device: what is copied, and which operators run."""

import numpy as np
import torch
from sim_process import on_devices

from roll_core.algorithms.losses import sft_objective
from roll_core.data.pack import pack
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_core.types import TrainSequence
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.train import HFTrainStrategy
from roll_testing.models import QWEN3

LAYERS, NUM_TOKENS = 6, 20 * 30


def built(**keys):
    spec = QWEN3 | {"vocab_size": 61, "num_hidden_layers": LAYERS}
    strategy = HFTrainStrategy(HFTrainConfig(**keys), TrainingSpec(learning_rate=1e-2, num_steps=10))
    strategy.build(ModelSpec(random_init=spec, gradient_checkpointing=True), MeshInfo(role="x", device="sim:0"))
    return strategy


def train(strategy):
    """Peak in bytes, and trace of a pass."""
    from roll_platform_sim.trace import Trace  # only in processes with devices

    rng = np.random.default_rng(0)
    rows = [
        TrainSequence(id=str(at), tokens=rng.integers(0, 61, 30), loss_mask=np.arange(30) > 0)
        for at in range(NUM_TOKENS // 30)
    ]
    before = torch.accelerator.memory_allocated(0)
    torch.accelerator.reset_peak_memory_stats(0)
    with Trace() as trace:
        strategy.forward_backward(pack(rows), sft_objective())
    return torch.accelerator.max_memory_allocated(0) - before, trace


@on_devices()
def test_offloaded_inputs_leave_the_device():
    kept, moved = built(), built(activation_offloading=True)
    (peak, plain), (lower, trace) = train(kept), train(moved)
    assert torch.equal(moved.optimizer.flat_grad.cpu(), kept.optimizer.flat_grad.cpu())
    size = NUM_TOKENS * QWEN3["hidden_size"] * 4
    # While the model's last layer is recomputed, its input is on the device, and those of all others are not.
    assert peak - lower == (LAYERS - 1) * size
    for kind in ("d2h", "h2d"):
        copies = [sum(each.num_bytes[event] for event in each.events if event.kind == kind) for each in (plain, trace)]
        assert copies[1] - copies[0] == LAYERS * size
    assert trace.num("wait") == plain.num("wait")


@on_devices()
def test_the_optimizer_updates_all_parameters_in_fused_kernels():
    from roll_platform_sim.trace import Trace

    strategy = built()
    train(strategy)
    with Trace() as trace:
        strategy.optimizer_step()
    kernels = {event.what: num for event, num in trace.events.items() if "adamw" in event.what}
    assert kernels == {"aten::_fused_adamw_": 2}  # matrices, and vectors without weight decay
