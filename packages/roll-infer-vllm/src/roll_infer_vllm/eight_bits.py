"""Linear layers that compute in 8 bits with the very weights that a trainer sent: a quantisation method of vLLM's.

vLLM's own methods for fp8 quantise what they load, or lay it out for one of a dozen kernels; either way a receipt could
not say what the engine holds. Here the parameters are those of `roll_core.weights.eight_bits`, as they came, and the
same product on every device:

    y = (x8 · W8ᵀ) · s_x · s_W + b      x8, s_x = x rounded to E4M3 by token, as it comes

Fusing and sharing over ranks is vLLM's, by its classes of parameters. Imported where vLLM is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import ScalingType, scaled_mm
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter
from vllm.platforms import current_platform

from roll_core.weights.eight_bits import is_layers_weight
from roll_infer_vllm.arguments import EIGHT_BITS
from roll_infer_vllm.config import NO_EXPERTS

MULTIPLE = 16
"""Of rows and columns, which the product on CUDA wants."""


@register_quantization_config(EIGHT_BITS)
class RowwiseFp8(QuantizationConfig):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Every linear layer of the transformer's layers; embeddings and the output layer stay."""

    def get_name(self) -> str:
        """In vLLM's registry."""
        return EIGHT_BITS

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What activations are between the products."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """8.9, Ada."""
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        """There is nothing to read."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RowwiseFp8:
        """There is nothing to choose."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """`prefix` is the module's name."""
        if isinstance(layer, RoutedExperts):
            raise ValueError(NO_EXPERTS)
        if not isinstance(layer, LinearBase):
            return None
        return RowwiseLinear() if is_layers_weight(f"{prefix}.weight") else UnquantizedLinearMethod()


@register_weight_loader_v2_supported_method
class RowwiseLinear(LinearMethodBase):  # type: ignore[misc]
    """Of one layer."""

    def __init__(self) -> None:
        self._quantise = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN, use_ue8m0=False)

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """`weight` [O, I] and `weight_scale` [O, 1] of this rank."""
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if not current_platform.is_cpu() and (rows % MULTIPLE or columns % MULTIPLE):
            raise ValueError(
                f"quantization: fp8 takes matrices whose sides are multiples of {MULTIPLE} on each rank; here is one of"
                f" {rows} × {columns}"
            )
        loader = extra_weight_attrs["weight_loader"]
        weight_OI = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scale_O1 = torch.empty(rows, 1, dtype=torch.float32)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight_OI, input_dim=1, output_dim=0, weight_loader=loader)
        )
        layer.register_parameter(
            "weight_scale", ChannelQuantScaleParameter(data=scale_O1, output_dim=0, weight_loader=loader)
        )

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., I]` to `[..., O]`, in the dtype of `x`."""
        x8_TI, scale_T1 = self._quantise(x.reshape(-1, x.shape[-1]))
        product_TO = scaled_mm(
            x8_TI,
            layer.weight.t(),
            scale_T1,
            ScalingType.RowWise,
            layer.weight_scale.t(),
            ScalingType.RowWise,
            bias=bias,
            output_dtype=x.dtype,
        )
        return product_TO.view(*x.shape[:-1], layer.weight.shape[0])
