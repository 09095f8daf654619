"""A trained adapter on its way into an engine that serves it: held against the engine's room, and written as peft
stores it.

engine's processes   compare_adapter(...)  names and shapes, by the room that each process has
worker               refuse_adapter(...)   the first thing that is wrong, in words
                     collected(...)        A and B of each layer
                     write_adapter(...)    for engines that read folders

Shapes: I inputs and O outputs of a layer, R rank; A [R, I], B [O, R] with the scale in it.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from roll_core.types import WeightManifest
    from roll_modeling.buckets import Incoming

SIDES = ("lora_A.weight", "lora_B.weight")
"""How the names of A and B end."""


def compare_adapter(
    announced: Iterable[tuple[str, Sequence[int]]], room: Callable[[str], Sequence[int]]
) -> dict[str, Any]:
    """What of the announced tensors this process has no room for; plain values.

    `room` says the shape of the room for a tensor, whose rank may be larger, and raises `KeyError` where there is none.
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
    """Raise for the first thing that is wrong in the answers of `compare_adapter`, and for a layer of which A or B is
    not announced or is not of `rank`: `UnexpectedTensorError`, `CorruptTensorError`, `MissingTensorError`."""
    sent = {entry.name: list(entry.shape) for entry in manifest.tensors}
    for answer in answers:
        if unknown := answer["unknown"]:
            raise UnexpectedTensorError(
                f"{who}: was sent {unknown[0]}, for which {engine}'s model has no adapter ({len(unknown)} such tensors)"
            )
        for name, found in answer["shapes"].items():
            raise CorruptTensorError(f"{who}: {name} is {sent[name]} in the manifest; {engine}'s model takes {found}")
    for name, shape in sent.items():
        layer, _, side = name.rpartition(".lora_")
        other = f"{layer}.lora_{'B' if side.startswith('A') else 'A'}.weight"
        if other not in sent:
            raise MissingTensorError(f"{who}: {other} is not in the manifest, but {name} is")
        found = shape[_rank_of(name)]
        if found != rank:
            raise CorruptTensorError(f"{who}: {name} has rank {found}, the adapter {rank}")


def collected(incoming: Incoming) -> dict[str, Tensor]:
    """All of it, on the host, and copied: a transport may fill what it hands out again. Raises `WeightSyncError`."""
    found = {name: each.detach().to("cpu", copy=True).contiguous() for name, each in incoming}
    incoming.refuse_missing()
    return found


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """As peft would have it. The scale is in B already: so alpha is the rank, and B is held as it came."""
    from safetensors.torch import save_file

    stored, written = folder / "adapter_model.safetensors", folder / "written"
    save_file({f"base_model.model.{name}": each for name, each in tensors.items()}, written)
    os.replace(written, stored)  # who has mapped the file before keeps what it has
    layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _fits(room: Sequence[int], name: str, shape: Sequence[int]) -> bool:
    """Only the rank may be smaller."""
    if len(shape) != 2:
        return False
    rank = _rank_of(name)
    return shape[rank] <= room[rank] and shape[1 - rank] == room[1 - rank]


def _rank_of(name: str) -> int:
    """The dimension of the rank."""
    return 0 if name.endswith(SIDES[0]) else 1
