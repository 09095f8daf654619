"""Read-back of the adapter loaded in an engine process, by Hugging Face names.

SGLang has one pool for A and one for B per module type, with a slot for each active adapter. In a slot of a fused
module the parts are concatenated: A by rows `[parts · R, I]`, B by outputs `[O of all parts, R]`.
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
"""Attribute of the model with the slot of the adapter that was loaded last."""
POOLS = ("A_buffer", "B_buffer"), ("A_buffer_qkv", "B_buffer_qkv")
"""Attribute names of the pools of A and B in SGLang's modules."""


def buffer(model: nn.Module, name: str) -> Tensor:
    """Buffer of this A `[R, I]` or B `[O, R]`. Raises `KeyError` if there is none."""
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
    """Adapter tensor `name` of this shape, as the engine computes with it."""
    rows, columns = shape
    return buffer(model, name)[:rows, :columns].contiguous()


def partners(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of tensors missing in `names` for fused modules that `names` cover only in part.

    SGLang requires adapters for all parts of a fused module or for none.
    """
    given = set(names)
    for layer in sorted({name.rpartition(".lora_")[0] for name in given}):
        parent = layer.rpartition(".")[0]
        for member in _module(model, layer)[1]:
            for side in SIDES:
                name = f"{parent}.{member}.{side}"
                if name not in given:
                    yield name, list(buffer(model, name).shape)


def _module(model: nn.Module, layer: str) -> tuple[Any, Sequence[str]]:
    """LoRA module that computes this layer, and the last name components of all layers that it computes.

    The module is None if there is no such module.
    """
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
