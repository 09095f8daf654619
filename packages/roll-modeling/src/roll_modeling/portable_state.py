"""Checks that a portable state belongs to a role's model, and access to the model's stored buffers.

Every strategy runs these checks before it resumes from a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import CheckpointError
from roll_modeling.lora import ADAPTER, base_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.train import PortableState
    from roll_modeling.lora import Adapters

PLACE = "the portable state"
ROUTER_BUFFERS = ("e_score_correction_bias", "expert_bias")
"""Last parts of the names of transformers' buffers that routers add to their scores."""


def check_same(
    state: PortableState,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    adapters: Adapters | None = None,
    identity: dict[str, Any] | None = None,
) -> None:
    """Raise `CheckpointError` unless `state` has exactly the parameters trained here, on the same base model.

    `shapes` are the trained parameters' shapes by name. `identity` is that of `adapters`, if adapters are trained;
    sharded strategies compute it from whole tensors.
    """
    check_adapters(state.adapters, adapters, identity, PLACE)
    if odd := state.shapes.keys() ^ shapes.keys():
        raise CheckpointError(f"{PLACE}: parameter {min(odd)} is in only one of the checkpoint and the model")
    for name, shape in shapes.items():
        if tuple(state.shapes[name]) != tuple(shape):
            raise CheckpointError(
                f"{PLACE}: {name} has shape {tuple(state.shapes[name])}, the model's has {tuple(shape)}"
            )


def check_adapters(
    saved: Mapping[str, Any] | None, adapters: Adapters | None, identity: dict[str, Any] | None, place: object
) -> None:
    """Raise `CheckpointError` unless the state at `place` has the adapters trained here, or none for a whole model.

    `saved` is the adapters' identity in the state, `identity` the identity here.
    """
    if adapters is not None and identity is not None:
        adapters.check_identity(saved, identity, place)
    elif saved is not None:
        raise CheckpointError(f"{place}: has adapters, but this role trains the whole model (lora_target)")


def stored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Buffers that transformers stores, by its names; those of the base model if `model` has adapters."""
    persistent = {name for name in model.state_dict() if f".modules_to_save.{ADAPTER}." not in name}
    return {base_name(name): buffer for name, buffer in model.named_buffers() if name in persistent}


def router_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The stored buffers that routers of experts add to their scores, for `TrainStrategy.export_buffers`."""
    return ((name, buffer) for name, buffer in stored_buffers(model).items() if name.endswith(ROUTER_BUFFERS))


@torch.no_grad()
def take_buffers(state: PortableState, buffers: Mapping[str, Tensor]) -> None:
    """Overwrite `buffers` with those of `state`.

    A state without buffers leaves them as loaded from the model's files. Raises `CheckpointError` if the state has
    buffers of another model.
    """
    if not state.buffers:
        return
    if odd := state.buffers.keys() ^ buffers.keys():
        raise CheckpointError(f"{PLACE}: buffer {min(odd)} is in only one of the checkpoint and the model")
    for name, buffer in buffers.items():
        if state.buffers[name].shape != buffer.shape:
            raise CheckpointError(
                f"{PLACE}: {name} has shape {tuple(state.buffers[name].shape)}, the model's has {tuple(buffer.shape)}"
            )
        buffer.copy_(state.buffers[name])
