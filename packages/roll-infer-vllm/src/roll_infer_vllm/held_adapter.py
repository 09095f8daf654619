"""The adapter that an engine's process holds, read back under its Hugging Face names.

vLLM has one buffer for each layer and side, with room for its largest rank; a fused layer has one for each part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_infer_vllm.held import find
from roll_modeling.adapter_updates import SIDES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

SLOT = 0
"""Of the one adapter for which there is room."""


def buffer(model: nn.Module, name: str) -> Tensor:
    """The room of this A `[R, I]` or B `[O, R]`, R being the largest rank. Raises `KeyError` where there is none."""
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
    """What the engine computes with."""
    rows, columns = shape
    return buffer(model, name)[:rows, :columns].contiguous()
