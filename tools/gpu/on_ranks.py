"""What parts of `./run gpu` do on each rank of a role: functions for `roll_testing.ranks.RankHost`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.train import TrainStrategy
    from roll_core.types import TrainSequence

PRELOAD = ("torch._dynamo", "transformers.optimization", "transformers.models.qwen3.modeling_qwen3")
"""Modules that the host of the ranks imports once. None uses a device, which a forked process could not."""


def make_sequences(count: int, length: int, vocabulary: int) -> list[TrainSequence]:
    """Random tokens, every token but a sequence's first one trained."""
    import numpy as np

    from roll_core.types import TrainSequence

    rng = np.random.default_rng(0)
    return [
        TrainSequence(id=str(i), tokens=rng.integers(3, vocabulary, length), loss_mask=np.arange(length) > 0)
        for i in range(count)
    ]


def mesh_of(platform: str, rank: int, num_ranks: int, port: int) -> MeshInfo:
    """A rank on the platform's device of the same index."""
    from roll_core.plugins.registry import load_registry
    from roll_core.runtime.cluster.platform import select_platform
    from roll_core.spec.model import MeshInfo

    found = select_platform(load_registry(), platform)
    return MeshInfo(
        role="actor_train",
        rank=rank,
        world_size=num_ranks,
        local_rank=rank,
        device=found.device(rank),
        backend=found.collective_backend,
        master_port=port,
    )


def built(strategy_name: str, keys: dict[str, Any], model: ModelSpec, mesh: MeshInfo) -> TrainStrategy:
    """A train strategy by name, built."""
    from roll_core.config.loading import strategy_config
    from roll_core.plugins.registry import load_registry
    from roll_core.plugins.targets import load_target
    from roll_core.spec.providers import TrainProvider
    from roll_core.spec.train import TrainingSpec

    provider = load_registry().find(TrainProvider, strategy_name)
    config = strategy_config(provider, keys, owner=strategy_name)
    cls = load_target(provider.target, owner=strategy_name)
    strategy: TrainStrategy = cls(config, TrainingSpec(learning_rate=1e-3, num_steps=100))
    strategy.build(model, mesh)
    return strategy


def resumed(rank: int, platform: str, model: ModelSpec, ports: Sequence[int], folder: str) -> bool:
    """True if a step after `load` gives the bits of the same step without it."""
    import torch

    from roll_core.algorithms.losses import sft_objective
    from roll_core.data.pack import pack

    sequences = make_sequences(4, 32, 500)[rank::2]
    path = Path(folder) / str(rank)
    path.mkdir()

    def step(strategy: TrainStrategy) -> None:
        strategy.forward_backward(pack(sequences, max_tokens=64), sft_objective())
        strategy.optimizer_step()

    found = []
    for port in ports:
        strategy = built("hf_train", {}, model, mesh_of(platform, rank, 2, port))
        if not found:
            step(strategy)
            strategy.save(path)
        else:
            strategy.load(path)
        step(strategy)
        found.append({name: tensor.clone().cpu() for name, tensor in strategy.export_weights()})
        strategy.close()
        del strategy
    return all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def peaks(
    rank: int, platform: str, strategy_name: str, model: ModelSpec, tokens: tuple[int, int], port: int
) -> dict[str, int]:
    """Peak bytes of each activity on a rank's device. `tokens` are the number and the length of its sequences."""
    import torch

    from roll_core.algorithms.losses import sft_objective
    from roll_core.data.pack import pack
    from roll_core.spec.train import WantedOutputs

    mesh = mesh_of(platform, rank, 2, port)
    torch.accelerator.set_device_index(rank)
    sequences = make_sequences(*tokens, 500)
    micros = pack(sequences, max_tokens=tokens[0] * tokens[1])
    found: dict[str, int] = {}

    def watched(act: str, call: Any) -> Any:
        torch.accelerator.reset_peak_memory_stats(mesh.device)
        value = call()
        torch.accelerator.synchronize(mesh.device)
        found[act] = max(found.get(act, 0), torch.accelerator.max_memory_allocated(mesh.device))
        return value

    strategy = watched("start", lambda: built(strategy_name, {}, replace(model, tokenizer=""), mesh))
    for _ in range(2):
        watched("score", lambda: list(strategy.forward_all(micros, WantedOutputs(logprobs=True))))
        watched("backward", lambda: strategy.forward_backward(micros, sft_objective()))
        watched("step", strategy.optimizer_step)
        watched("publish", lambda: [None for _ in strategy.export_weights()])
    strategy.close()
    return found
