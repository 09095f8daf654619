"""Strategy-independent training state: gather shards into full tensors and split them again, one parameter at a time.

The master weights are the parameters themselves, which are float32 for every compute dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from roll_core.spec.train import ParameterState
from roll_modeling.optimizer import moments
from roll_strategy_fsdp2.loading import held_of
from roll_strategy_fsdp2.optimizer import like

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.spec.train import PortableState
    from roll_strategy_fsdp2.optimizer import ShardedAdamW


def shapes(optimizer: ShardedAdamW) -> dict[str, tuple[int, ...]]:
    """Full shapes of the trained parameters, by name."""
    return {name: tuple(each.shape) for name, each in optimizer.parameters.items()}


@torch.no_grad()
def gather(optimizer: ShardedAdamW, name: str, device: torch.device | str) -> ParameterState:
    """Master weight and Adam moments of one parameter, as full tensors on every rank.

    Collective, on `device` even if the shards are in host memory.
    """
    parameter = optimizer.parameters[name]
    master, exp_avg, exp_avg_sq = (like(parameter, each.to(device)).full_tensor() for each in _shares(optimizer, name))
    return ParameterState(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


@torch.no_grad()
def take_over(optimizer: ShardedAdamW, state: PortableState) -> None:
    """Overwrite this rank's shards in place."""
    for name, parameter in optimizer.parameters.items():
        found = state.read(name)
        for share, whole in zip(_shares(optimizer, name), (found.master, found.exp_avg, found.exp_avg_sq), strict=True):
            share.copy_(_cut(whole, parameter))
    optimizer.restored(state.step_count)


def _shares(optimizer: ShardedAdamW, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's shards of master weight, first and second moment."""
    share = optimizer.shares[name]
    return share.detach(), *moments(optimizer.torch_optimizer, share)


def _cut(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a full tensor."""
    if not isinstance(parameter, DTensor):
        raise TypeError(f"a sharded model's tensor is a DTensor, not a {type(parameter).__name__}")
    return whole[held_of(parameter)]
