"""The state that all strategies read, gathered of shares and cut into them: one parameter at a time.

Masters are the parameters, which are kept in float32 whatever computes.
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
    """Of the whole parameters that are trained."""
    return {name: tuple(each.shape) for name, each in optimizer.parameters.items()}


@torch.no_grad()
def gather(optimizer: ShardedAdamW, name: str, device: torch.device | str) -> ParameterState:
    """What is kept of a parameter, whole on every rank. Collective, on `device` wherever the shares lie."""
    parameter = optimizer.parameters[name]
    master, exp_avg, exp_avg_sq = (like(parameter, each.to(device)).full_tensor() for each in _shares(optimizer, name))
    return ParameterState(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


@torch.no_grad()
def take_over(optimizer: ShardedAdamW, state: PortableState) -> None:
    """Overwrite this rank's shares in place."""
    for name, parameter in optimizer.parameters.items():
        found = state.read(name)
        for share, whole in zip(_shares(optimizer, name), (found.master, found.exp_avg, found.exp_avg_sq), strict=True):
            share.copy_(_cut(whole, parameter))
    optimizer.restored(state.step_count)


def _shares(optimizer: ShardedAdamW, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of master and moments."""
    share = optimizer.shares[name]
    return share.detach(), *moments(optimizer.torch_optimizer, share)


def _cut(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's share of what every rank has."""
    if not isinstance(parameter, DTensor):
        raise TypeError(f"a sharded model's tensor is a DTensor, not a {type(parameter).__name__}")
    return whole[held_of(parameter)]
