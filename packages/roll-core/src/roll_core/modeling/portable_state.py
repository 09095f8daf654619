"""Whether a `PortableState` belongs to the model of a role: what every strategy asks before it imports one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.modeling.lora import Adapters
    from roll_core.spec.train import PortableState

PLACE = "the portable state"


def check_same(
    state: PortableState,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    adapters: Adapters | None = None,
    identity: dict[str, Any] | None = None,
) -> None:
    """Raise `CheckpointError` unless `state` has the very parameters that are trained here, by their `shapes`, on top
    of the same model. Where adapters are trained, `identity` is theirs, which sharded strategies make of whole
    tensors."""
    if adapters is not None and identity is not None:
        adapters.refuse_other(dict(state.adapters) if state.adapters is not None else None, identity, PLACE)
    elif state.adapters is not None:
        raise CheckpointError(f"{PLACE}: holds adapters, but this role trains the whole model (lora_target)")
    if odd := state.shapes.keys() ^ shapes.keys():
        raise CheckpointError(f"{PLACE}: parameter {min(odd)} is in only one of the checkpoint and the model")
    for name, shape in shapes.items():
        if tuple(state.shapes[name]) != tuple(shape):
            raise CheckpointError(
                f"{PLACE}: {name} has shape {tuple(state.shapes[name])}, the model's has {tuple(shape)}"
            )
