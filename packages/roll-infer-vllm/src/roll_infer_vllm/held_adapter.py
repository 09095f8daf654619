"""Read-back of the adapter loaded in an engine process, by Hugging Face names.

vLLM has one buffer per layer for A and one for B, sized for its maximum rank. A fused layer has one pair per part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_infer_vllm.held import find
from roll_modeling.adapter_updates import SIDES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

SLOT = 0
"""Slot of the adapter in vLLM's stacked buffers; the engine has only one (`max_loras` is 1)."""


def buffer(model: nn.Module, name: str) -> Tensor:
    """Buffer of this A `[R, I]` or B `[O, R]`, where R is vLLM's maximum rank. Raises `KeyError` if there is none."""
    layer, _, side = name.rpartition(".lora_")
    if f"lora_{side}" not in SIDES:
        raise KeyError(name)
    module, index = find(model, f"{layer}.weight")
    stacked: Any = getattr(module, "lora_a_stacked" if side.startswith("A") else "lora_b_stacked", None)
    if stacked is None:
        raise KeyError(name)
    found: Tensor = stacked[index or 0][SLOT, 0]
    return found


def held(model: nn.Module, name: str, shape: Sequence[int]) -> Tensor:
    """Adapter tensor `name` of this shape, as the engine computes with it."""
    rows, columns = shape
    return buffer(model, name)[:rows, :columns].contiguous()
