"""Module specs of Megatron's layers.

| Megatron's own (local) | Transformer Engine |
|---|---|
| norm -> linear | one module (two with adapters) |
| one module per local expert | one module for all local experts |
| `PackedAttention` | `TEDotProductAttention` |
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from roll_strategy_megatron.attention import PackedAttention
from roll_strategy_megatron.balancing import BalancedRouter, Balancing

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor

    from roll_strategy_megatron.engine import LayerSpec


class Norm(nn.RMSNorm):
    """RMSNorm that supports sequence parallelism; Megatron's wrapper of torch's norm rejects it.

    With sequence parallelism, gradients of norms must be summed over the tensor-parallel ranks. Megatron does this for
    weights with the attribute `sequence_parallel`.
    """

    def __init__(self, *, config: Any, hidden_size: int, eps: float, **_unused: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ScalarHead(nn.Module):
    """Linear layer with one output, replicated on each tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sequence_parallel: bool = config.sequence_parallel
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        # With sequence parallelism, each rank has the gradient of its own tokens. Megatron sums it for weights with
        # this attribute.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_L1H: Tensor) -> Tensor:
        """Scores `[L]` in float32; with sequence parallelism, gathered over the tensor-parallel ranks."""
        scores_L: Tensor = F.linear(hidden_L1H[:, 0], self.weight)[:, 0].float()
        if self.sequence_parallel:  # all ranks compute the same loss, so no gradients are summed
            scores_L = gather_from_sequence_parallel_region(scores_L, tensor_parallel_output_grad=False)
        return scores_L


class Down(nn.Module):
    """Linear layer that is replicated on all tensor-parallel ranks and applied to each rank's own tokens."""

    def __init__(self, config: Any, inputs: int, outputs: int, group: Any) -> None:
        super().__init__()
        self.config, self.tp_group = config, group
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # With this attribute, Megatron sums the gradient over ranks, each of which has that of its own tokens. The
        # gather of the outputs passes complete gradients back to each rank's tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """Return the output and None for the bias, like Megatron's linear layers."""
        return F.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1) with complete gradients.

    Without Transformer Engine, Megatron splits the two down-projections over tensor-parallel ranks and gathers their
    outputs. In the backward pass, each rank then has the gradient of the shared key from its own heads only, which
    Megatron does not sum. Here each rank has the full down-projections (`Down`), as Megatron with Transformer Engine.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        group, inputs = self.pg_collection.tp, config.hidden_size
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = Down(config, inputs, config.q_lora_rank, group)
        outputs = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = Down(config, inputs, outputs, group)


def mixtures(config: TransformerConfig) -> list[int]:
    """One entry per layer: 1 for MoE layers, 0 for dense ones."""
    if config.num_moe_experts is None:
        return [0] * config.num_layers
    return config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * config.num_layers


def block_spec(
    config: TransformerConfig,
    make: LayerSpec,
    run: int | None,
    balancing: Balancing | None,
    scale: float | None,
) -> TransformerBlockSubmodules:
    """Layer specs of one model chunk (`run`) of this rank.

    `scale` overrides Megatron's scale of the attention scores.
    """
    first, number = get_transformer_layer_offset(config, run), get_num_layers_to_build(config, run)
    spec = _engine_spec if make.engine else _local_spec
    layers = []
    for mixture in mixtures(config)[first : first + number]:
        layer = spec(config, make, scale, mixture=bool(mixture))
        if mixture and balancing is not None:
            layer.submodules.mlp.submodules.router = partial(BalancedRouter, balancing=balancing)
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=_engine().layer_norm() if make.engine else Norm)


def _local_spec(config: TransformerConfig, make: LayerSpec, scale: float | None, *, mixture: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if mixture else None,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    attention = layer.self_attention.submodules
    attention.core_attention = ModuleSpec(module=PackedAttention, params={"scale": scale})
    if config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = Norm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec


def _engine_spec(config: TransformerConfig, make: LayerSpec, scale: float | None, *, mixture: bool) -> ModuleSpec:
    from roll_strategy_megatron.engine_attention import EngineAttention

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if mixture else None,
        moe_grouped_gemm=make.grouped,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=EngineAttention, params={"scale": scale})
    if not make.fused_norms:
        _take_norms_apart(spec, config, mixture=mixture)
    return spec


def _take_norms_apart(spec: ModuleSpec, config: TransformerConfig, *, mixture: bool) -> None:
    norm, matrix = _engine().layer_norm(), _engine().column_parallel_linear()
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if not mixture:
        layer.mlp.submodules.linear_fc1 = matrix
    if config.multi_latent_attention:
        attention.linear_q_up_proj = attention.linear_kv_up_proj = matrix
        attention.q_layernorm = attention.kv_layernorm = norm
    else:
        attention.linear_qkv = matrix


def _engine() -> Any:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
