"""Updates of a trained adapter in a serving engine: checks against the engine's capacity, and files in peft's format.

engine's processes   compare_adapter(...)  compares names and shapes with each process's adapter slots
worker               refuse_adapter(...)   raises for the first mismatch
                     collected(...)        collects A and B of each layer
                     write_adapter(...)    writes a directory, for engines that read directories

Shapes: I inputs and O outputs of a layer, R rank; A [R, I], B [O, R] already scaled.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from roll_core.errors import CorruptTensorError, MissingTensorError
from roll_modeling.comparing import entries, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from roll_core.types import WeightManifest
    from roll_modeling.buckets import Incoming

SIDES = ("lora_A.weight", "lora_B.weight")
"""Name suffixes of A and B."""


def compare_adapter(
    announced: Iterable[tuple[str, Sequence[int]]], room: Callable[[str], Sequence[int]]
) -> dict[str, Any]:
    """Compare announced tensors with the adapter slots of this process; returns plain values for `refuse_adapter`.

    The result has `unknown` names and `shapes` that do not fit (the slot's shape by name). `room` returns the shape of
    a tensor's slot, whose rank may be larger, and raises `KeyError` if there is no slot.
    """
    unknown: list[str] = []
    shapes: dict[str, list[int]] = {}
    for name, shape in announced:
        try:
            found = room(name)
        except KeyError:
            unknown.append(name)
            continue
        if not _fits(found, name, shape):
            shapes[name] = list(found)
    return {"unknown": unknown, "shapes": shapes}


def refuse_adapter(
    who: str, engine: str, manifest: WeightManifest, rank: int, answers: Iterable[Mapping[str, Any]]
) -> None:
    """Raise for the first mismatch in the results of `compare_adapter`.

    Also raises if A or B of a layer is not announced, or has another rank than `rank`. The errors are those of
    `refuse`.
    """
    refuse(who, engine, manifest, answers)
    sent = dict(entries(manifest))
    for name, shape in sent.items():
        layer, _, side = name.rpartition(".lora_")
        other = f"{layer}.lora_{'B' if side.startswith('A') else 'A'}.weight"
        if other not in sent:
            raise MissingTensorError(f"{who}: {other} is not in the manifest, but {name} is")
        found = shape[_rank_of(name)]
        if found != rank:
            raise CorruptTensorError(f"{who}: {name} has rank {found}, the adapter {rank}")


def collected(incoming: Incoming) -> dict[str, Tensor]:
    """Copy all incoming tensors to the host; transports may reuse their buffers. Raises `WeightSyncError`."""
    found = {name: each.detach().to("cpu", copy=True).contiguous() for name, each in incoming}
    incoming.refuse_missing()
    return found


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write the adapter as peft does. B already contains the scale, so `lora_alpha` equals the rank."""
    from safetensors.torch import save_file

    stored, written = folder / "adapter_model.safetensors", folder / "written"
    save_file({f"base_model.model.{name}": each for name, each in tensors.items()}, written)
    os.replace(written, stored)  # processes that have mapped the old file keep its content
    layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _fits(room: Sequence[int], name: str, shape: Sequence[int]) -> bool:
    """True if `shape` equals the slot's shape, except that its rank may be smaller."""
    if len(shape) != 2:
        return False
    rank = _rank_of(name)
    return shape[rank] <= room[rank] and shape[1 - rank] == room[1 - rank]


def _rank_of(name: str) -> int:
    """Index of the rank dimension."""
    return 0 if name.endswith(SIDES[0]) else 1
