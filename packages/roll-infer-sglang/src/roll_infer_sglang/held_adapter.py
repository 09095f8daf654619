"""The adapter that an engine's process holds, read back under its Hugging Face names.

SGLang has one pool for A and one for B of each kind of module, with a slot for each adapter that computes; in a fused
module's slot its parts stand one after the other, A by rows `[parts · R, I]`, B by outputs `[O of all parts, R]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.lora.layers import BaseLayerWithLoRA

from roll_infer_sglang.held import FUSED, find, local_sizes
from roll_modeling.adapter_updates import SIDES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor, nn

SLOT = "_roll_adapter_slot"
"""Attribute of the model: the slot of the adapter that was loaded last."""
POOLS = ("A_buffer", "B_buffer"), ("A_buffer_qkv", "B_buffer_qkv")
"""What SGLang's modules call A's and B's."""


def buffer(model: nn.Module, name: str) -> Tensor:
    """The room of this A `[R, I]` or B `[O, R]`. Raises `KeyError` where there is none."""
    layer, _, side = name.rpartition(".lora_")
    if f"lora_{side}" not in SIDES:
        raise KeyError(name)
    module, members = _module(model, layer)
    if module is None:
        raise KeyError(name)
    index = members.index(layer.rpartition(".")[2])
    of_a, of_b = next((found for found in (_pools(module, names) for names in POOLS) if found), (None, None))
    if of_a is None or of_b is None:
        raise KeyError(name)
    slot = getattr(model, SLOT, 0)
    if side.startswith("A"):
        return of_a[slot].chunk(len(members))[index]
    return torch.split(of_b[slot], local_sizes(module.base_layer))[index] if len(members) > 1 else of_b[slot]


def held(model: nn.Module, name: str, shape: Sequence[int]) -> Tensor:
    """What the engine computes with."""
    rows, columns = shape
    return buffer(model, name)[:rows, :columns].contiguous()


def partners(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of what `names` lack of a fused module of which they have some: SGLang takes all or nothing."""
    given = set(names)
    for layer in sorted({name.rpartition(".lora_")[0] for name in given}):
        parent = layer.rpartition(".")[0]
        for member in _module(model, layer)[1]:
            for side in SIDES:
                name = f"{parent}.{member}.{side}"
                if name not in given:
                    yield name, list(buffer(model, name).shape)


def _module(model: nn.Module, layer: str) -> tuple[Any, Sequence[str]]:
    """The module with room for adapters that computes this layer, and all layers that it computes, by the ends of their
    names; None where there is no such module."""
    parent, _, last = layer.rpartition(".")
    for fused, (_, members) in FUSED.items():
        if last in members:
            module = find(model, f"{parent}.{fused}")
            if isinstance(module, BaseLayerWithLoRA):
                return module, members
    module = find(model, layer)
    return (module if isinstance(module, BaseLayerWithLoRA) else None), (last,)


def _pools(module: Any, names: tuple[str, str]) -> tuple[Tensor, Tensor] | None:
    of_a, of_b = (getattr(module, name, None) for name in names)
    return (of_a, of_b) if of_a is not None and of_b is not None else None
