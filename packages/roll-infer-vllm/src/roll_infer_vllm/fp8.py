"""fp8 quantization methods for vLLM: layers that compute with exactly the fp8 weights that the trainer sent.

vLLM's own fp8 methods quantize the loaded weights or change their layout for one of a dozen kernels. Then the digests
in a weight receipt could not be computed. Here the parameters stay as sent (`roll_core.spec.fp8`), and every
device computes the same product:

    fp8            y = (x8 · W8ᵀ) · s_x · s_W + b     x8, s_x = x quantized to E4M3 dynamically, per token
    fp8_per_block  y = (Σ_k (x8_k · W8_kᵀ) · s_x,k · s_W,k) + b     the same per token and group k of 128 columns

vLLM's parameter classes handle fused layers and tensor parallelism, and its Triton kernels multiply blocks on an
accelerator. This module imports vLLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn.functional import ScalingType, scaled_mm
from vllm.model_executor.kernels.linear.scaled_mm import triton as _triton  # noqa: F401 - registers its operator
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts, fused_experts
from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, fp8_w8a8_moe_quant_config
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    validate_fp8_block_shape,
    validate_fp8_block_shape_moe,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.parameter import BlockQuantScaleParameter, ChannelQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from roll_core.spec.fp8 import BLOCK, is_layers_weight
from roll_infer_vllm.arguments import QUANTIZATION

MULTIPLE = 16
"""Required multiple of a weight's rows and columns for the fp8 matrix product on CUDA."""


CPU_ROWS = 1024
"""Rows of a matrix that a CPU decodes at a time, which bounds the memory of float32 copies."""


@register_quantization_config(QUANTIZATION["fp8"])
class RowwiseFp8(QuantizationConfig):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Row-wise fp8 for every linear layer of the transformer layers, not for embeddings and the output layer."""

    name: ClassVar[str] = QUANTIZATION["fp8"]

    def get_name(self) -> str:
        """Name of the method in vLLM's registry."""
        return self.name

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
            raise ValueError("quantization: fp8 does not support mixtures of experts: use quantization: fp8_per_block")
        if not isinstance(layer, LinearBase):
            return None
        return RowwiseLinear() if is_layers_weight(f"{prefix}.weight") else UnquantizedLinearMethod()


@register_quantization_config(QUANTIZATION["fp8_per_block"])
class BlockFp8(RowwiseFp8):
    """fp8 with scales per block for the same linear layers, and for experts."""

    name = QUANTIZATION["fp8_per_block"]

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Quantization method for the module named `prefix`."""
        if isinstance(layer, RoutedExperts):
            return BlockExperts(layer.moe_config)
        if isinstance(layer, LinearBase) and is_layers_weight(f"{prefix}.weight"):
            return BlockLinear()
        return super().get_quant_method(layer, prefix)


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


@register_weight_loader_v2_supported_method
class BlockLinear(LinearMethodBase):  # type: ignore[misc]
    """Linear method of one layer: fp8 weights with one scale per block, activations quantized per token and group."""

    def __init__(self) -> None:
        self._quantise = _group_quantizer()

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register this rank's `weight` `[O, I]` (E4M3) and `weight_scale_inv` `[⌈O/128⌉, I/128]` (float32).

        Raises `ValueError` if columns are not a multiple of 128, or if an edge between ranks or fused matrices is not
        between two blocks.
        """
        rows, columns, size = sum(output_partition_sizes), input_size_per_partition, [BLOCK, BLOCK]
        validate_fp8_block_shape(layer, input_size, output_size, columns, output_partition_sizes, size)
        if columns % BLOCK:
            raise ValueError(f"quantization: fp8_per_block needs inputs of a multiple of {BLOCK}; found {columns}")
        loader = extra_weight_attrs["weight_loader"]
        weight_OI = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scale_NM = torch.empty(-(-rows // BLOCK), columns // BLOCK, dtype=torch.float32)
        layer.weight_block_size = size  # vLLM's loader divides offsets by it
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight_OI, input_dim=1, output_dim=0, weight_loader=loader)
        )
        layer.register_parameter(
            "weight_scale_inv",
            BlockQuantScaleParameter(data=scale_NM, input_dim=1, output_dim=0, weight_loader=loader),
        )

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the layer: `[..., I]` to `[..., O]`, in the dtype of `x`."""
        x8_TI, scale_TM = self._quantise(x.reshape(-1, x.shape[-1]))
        product_TO = _block_product(x8_TI, scale_TM, layer.weight, layer.weight_scale_inv, x.dtype)
        if bias is not None:
            product_TO = product_TO + bias
        return product_TO.view(*x.shape[:-1], layer.weight.shape[0])


class BlockExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """Method of one layer's experts: fp8 weights with one scale per block, activations as in `BlockLinear`."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        self._quantise = _group_quantizer()

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register `w13_weight` `[E, 2I, H]`, `w2_weight` `[E, H, I]` (E4M3) and their `…_scale_inv` (float32).

        Raises `ValueError` for biases, and for sizes on this rank that are not multiples of 128.
        """
        size = [BLOCK, BLOCK]
        validate_fp8_block_shape_moe(intermediate_size_per_partition, size)
        if hidden_size % BLOCK or self.moe.has_bias or not self.moe.is_act_and_mul:
            raise ValueError(
                f"quantization: fp8_per_block needs gated experts without biases and a hidden_size of a multiple of"
                f" {BLOCK}; found {hidden_size}"
            )
        layer.weight_block_size = size
        sizes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for name, (rows, columns) in sizes.items():
            weight_EOI = torch.empty(num_experts, rows, columns, dtype=torch.float8_e4m3fn)
            scale_ENM = torch.empty(num_experts, rows // BLOCK, columns // BLOCK, dtype=torch.float32)
            weight = torch.nn.Parameter(weight_EOI, requires_grad=False)
            scale = torch.nn.Parameter(scale_ENM, requires_grad=False)
            layer.register_parameter(f"{name}_weight", weight)
            layer.register_parameter(f"{name}_weight_scale_inv", scale)
            set_weight_attrs(weight, extra_weight_attrs)
            set_weight_attrs(scale, {**extra_weight_attrs, "quant_method": FusedMoeWeightScaleSupported.BLOCK.value})

    def get_fused_moe_quant_config(self, layer: Any) -> FusedMoEQuantConfig:
        """Scales of the layer, for vLLM's kernels."""
        return fp8_w8a8_moe_quant_config(
            w1_scale=layer.w13_weight_scale_inv, w2_scale=layer.w2_weight_scale_inv, block_shape=[BLOCK, BLOCK]
        )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """Weighted sum of this rank's experts: `[T, H]` to `[T, H]`, for `topk_ids` `[T, K]`."""
        if not current_platform.is_cpu():
            output_TH: torch.Tensor = fused_experts(
                x,
                layer.w13_weight,
                layer.w2_weight,
                topk_weights,
                topk_ids,
                activation=layer.activation,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                quant_config=self.get_fused_moe_quant_config(layer),
            )
            return output_TH
        local_ids = topk_ids.long() if layer.expert_map is None else layer.expert_map[topk_ids.long()].long()
        summed_TH = torch.zeros(x.shape, dtype=torch.float32)
        for expert in local_ids.unique().tolist():
            if expert < 0:  # an expert of another rank
                continue
            tokens, slots = (local_ids == expert).nonzero(as_tuple=True)
            weights_T1 = topk_weights[tokens, slots].unsqueeze(1)
            inputs = x[tokens]
            if layer.apply_router_weight_on_input:
                inputs, weights_T1 = (inputs * weights_T1).to(x.dtype), torch.ones_like(weights_T1)
            gate_up = self._product(inputs, layer.w13_weight[expert], layer.w13_weight_scale_inv[expert])
            hidden = gate_up.new_empty(len(tokens), gate_up.shape[1] // 2)
            apply_moe_activation(layer.activation, hidden, gate_up)
            output = self._product(hidden, layer.w2_weight[expert], layer.w2_weight_scale_inv[expert])
            summed_TH.index_add_(0, tokens, output.float() * weights_T1)
        return summed_TH.to(x.dtype)

    def _product(self, x: torch.Tensor, weight_OI: torch.Tensor, scale_NM: torch.Tensor) -> torch.Tensor:
        x8_TI, scale_TM = self._quantise(x)
        return _block_product(x8_TI, scale_TM, weight_OI, scale_NM, x.dtype)


def _group_quantizer() -> QuantFP8:
    return QuantFP8(static=False, group_shape=GroupShape(1, BLOCK), use_ue8m0=False)


def _block_product(
    x8_TI: torch.Tensor,
    scale_TM: torch.Tensor,
    weight_OI: torch.Tensor,
    scale_NM: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Product `[T, O]` of quantized activations and weights; on a CPU of the decoded numbers, in float32."""
    if not x8_TI.is_cpu:
        product: torch.Tensor = torch.ops.vllm.w8a8_triton_block_scaled_mm_func(
            x8_TI, weight_OI, scale_TM, scale_NM, [BLOCK, BLOCK], dtype
        )
        return product
    x_TI = x8_TI.float() * scale_TM.repeat_interleave(BLOCK, 1)
    product = torch.empty(len(x_TI), len(weight_OI), dtype=dtype)
    for start in range(0, len(weight_OI), CPU_ROWS):
        rows = slice(start, start + CPU_ROWS)
        blocks = scale_NM[start // BLOCK : (start + CPU_ROWS) // BLOCK]
        decoded = weight_OI[rows].float()
        decoded *= blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: len(decoded)]
        product[:, rows] = x_TI @ decoded.t()
    return product
