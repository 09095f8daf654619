"""Strategy-independent training state: the full master weights and moments of `state`, one parameter at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roll_core.spec.train import ParameterState

if TYPE_CHECKING:
    from roll_core.spec.train import PortableState
    from roll_strategy_deepspeed.held_state import HeldState


def shapes(held: HeldState) -> dict[str, tuple[int, ...]]:
    """Full shapes of the trained parameters, by name."""
    return {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in held.parameters.items()}


def gather(held: HeldState, name: str) -> ParameterState:
    """Master weight and Adam moments of one parameter, as full tensors on every rank. Collective."""
    return ParameterState(**{kind: each.detach() for kind, each in held.read(name)})


@torch.no_grad()
def take_over(held: HeldState, state: PortableState) -> None:
    """Overwrite master weights and moments. Collective."""
    held.begin_writing(state.step_count)
    for name in held.parameters:
        found = state.read(name)
        held.write(name, {"master": found.master, "exp_avg": found.exp_avg, "exp_avg_sq": found.exp_avg_sq})
    held.end_writing()
