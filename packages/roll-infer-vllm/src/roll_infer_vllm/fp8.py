"""fp8 quantization method for vLLM: linear layers that compute with exactly the fp8 weights that the trainer sent.

vLLM's own fp8 methods quantize the loaded weights or change their layout for one of a dozen kernels. Then the digests
in a weight receipt could not be computed. Here the parameters stay as sent (`roll_core.spec.fp8`), and every
device computes the same product:

    y = (x8 · W8ᵀ) · s_x · s_W + b      x8, s_x = x quantized to E4M3 dynamically, per token

vLLM's parameter classes handle fused layers and tensor parallelism. This module imports vLLM.
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

from roll_core.spec.fp8 import is_layers_weight
from roll_infer_vllm.arguments import QUANTIZATION

MULTIPLE = 16
"""Required multiple of a weight's rows and columns for the fp8 matrix product on CUDA."""


@register_quantization_config(QUANTIZATION)
class RowwiseFp8(QuantizationConfig):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Row-wise fp8 for every linear layer of the transformer layers, not for embeddings and the output layer."""

    def get_name(self) -> str:
        """Name of the method in vLLM's registry."""
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Supported dtypes of activations."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Minimum CUDA compute capability: 8.9 (Ada)."""
        return 89

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Empty: the method reads no config files."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RowwiseFp8:
        """Create the method; it has no options."""
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Quantization method for the module named `prefix`. Raises `ValueError` for a mixture of experts."""
        if isinstance(layer, RoutedExperts):
            raise ValueError("quantization: fp8 does not support mixtures of experts, which need scales per block")
        if not isinstance(layer, LinearBase):
            return None
        return RowwiseLinear() if is_layers_weight(f"{prefix}.weight") else UnquantizedLinearMethod()


@register_weight_loader_v2_supported_method
class RowwiseLinear(LinearMethodBase):  # type: ignore[misc]
    """Linear method of one layer: fp8 weights with one scale per row, activations quantized per token."""

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
        """Register this rank's `weight` `[O, I]` (E4M3) and `weight_scale` `[O, 1]` (float32).

        Raises `ValueError` if a side is not a multiple of 16, except on a CPU.
        """
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if not current_platform.is_cpu() and (rows % MULTIPLE or columns % MULTIPLE):
            raise ValueError(
                f"quantization: fp8 needs matrices whose sides are multiples of {MULTIPLE} on each rank; found {rows} ×"
                f" {columns}"
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
        """Apply the layer: `[..., I]` to `[..., O]`, in the dtype of `x`."""
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
