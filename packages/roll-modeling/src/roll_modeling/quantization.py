"""Frozen linear layers in 4 bits (NF4), below adapters (QLoRA, arXiv:2305.14314).

    block of 64 weights  ->  64 × 4 bits, and their largest absolute value in float32

bitsandbytes stores the layers, and dequantizes a weight to the inputs' dtype in each pass. Blocks are quantized
independently and without sums, so equal weights give equal bits for any number of threads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import UnsupportedError, install_command
from roll_modeling.model_table import NUMBER_OF_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn
    from transformers import PreTrainedModel


def quantize_linears(model: PreTrainedModel, paths: Iterable[str], device: str) -> None:
    """Replace the linear layers at `paths` by layers with 4-bit weights on `device`, one at a time.

    Routers, and gates with one output, are unchanged. Raises `UnsupportedError` without bitsandbytes.
    """
    bitsandbytes = _bitsandbytes()
    config: Any = model.config.get_text_config()
    of_routers = {1, *(getattr(config, name, None) for name in NUMBER_OF_EXPERTS)}
    for path in paths:
        layer = model.get_submodule(path)
        if type(layer) is torch.nn.Linear and layer.out_features not in of_routers:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _quantized(layer, device, bitsandbytes))
    model.is_loaded_in_4bit = True  # peft reads it


def _bitsandbytes() -> Any:
    """The module, which has no complete type hints."""
    try:
        return import_module("bitsandbytes")
    except ImportError as error:
        install = install_command("roll-modeling[qlora]")
        raise UnsupportedError(f"load_in_4bit needs bitsandbytes, which is not installed: {install}") from error


def _quantized(layer: nn.Linear, device: str, bitsandbytes: Any) -> nn.Module:
    quantized = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=False,
        compress_statistics=False,  # quantizing the scales needs their mean, which depends on the number of threads
        quant_type="nf4",
        device="meta",
    )
    weight = layer.weight.detach()
    parameter = bitsandbytes.nn.Params4bit(weight, compress_statistics=False, quant_type="nf4", module=quantized)
    quantized.weight = parameter.to(device)
    quantized.bias = layer.bias
    # Otherwise a pass without gradients repacks the weight in place, for a kernel that has no backward pass.
    quantized.support_avx512bf16_for_cpu = False
    replacement: nn.Module = quantized.train(layer.training)
    return replacement


def quant_states(model: nn.Module) -> dict[str, Any]:
    """State of bitsandbytes, with shape and scales, of each quantized weight, by the weight's name in `model`."""
    layers = ((path, getattr(layer, "quant_state", None)) for path, layer in model.named_modules())
    return {f"{path}.weight": state for path, state in layers if state is not None}


def dequantized(packed: Tensor, state: Any | None) -> Tensor:
    """The weight that the layer computes with, in the dtype that it had before, or `packed` itself without state."""
    if state is None:
        return packed
    weight: Tensor = _bitsandbytes().functional.dequantize_4bit(packed, state)
    return weight
