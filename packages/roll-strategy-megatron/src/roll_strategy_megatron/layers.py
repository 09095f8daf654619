"""Module specs of Megatron's layers.

| Megatron's own (local) | Transformer Engine |
|---|---|
| norm -> linear | one module (two with adapters) |
| one module per local expert | one module for all local experts |
| `PackedAttention` | `TEDotProductAttention` |

A layer with post-norms (`DecoderConfig.post_norms`); without `pre_norms` the first norm of each line is missing:

    x + norm(attention(norm(x)))
    x + norm(feed_forward(norm(x)))
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from roll_strategy_megatron.attention import PackedAttention
from roll_strategy_megatron.balancing import BalancedRouter, Balancing
from roll_strategy_megatron.versions import submodules

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roll_strategy_megatron.engine import LayerSpec


@dataclass
class LayerOptions:
    """Properties of models for which Megatron's `TransformerConfig` has no argument."""

    pre_norms: bool = True
    """Norm the inputs of attention and feed-forward layers."""
    post_norms: bool = False
    """Norm the outputs of attention and feed-forward layers before they are added to the residual."""
    norm_whole_projections: bool = False
    """Norm the queries of all heads together, and the keys of all heads, instead of each head by itself."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and feed-forward layers."""
    embedding_multiplier: float = 1.0
    """Factor of the embeddings, rounded to their dtype."""
    attention_softcap: float = 0.0
    """Bound of the attention scores' soft-cap; 0 disables it."""
    rotations: list[str] | None = None
    """Name of each layer's rotary embedding in transformers' model; None if all layers have the same."""


@dataclass
class DecoderConfig(LayerOptions, TransformerConfig):  # type: ignore[misc]
    """Megatron's config of a model with query, key and value projections."""


@dataclass
class LatentDecoderConfig(LayerOptions, MLATransformerConfig):  # type: ignore[misc]
    """Megatron's config of a model with latent attention."""


class Norm(nn.RMSNorm):
    """RMSNorm that supports sequence parallelism and zero-centered weights; Megatron's wrapper rejects both.

    With sequence parallelism, gradients of norms must be summed over the tensor-parallel ranks. Megatron does this for
    weights with the attribute `sequence_parallel`.
    """

    def __init__(self, *, config: Any, hidden_size: int, eps: float, **_unused: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension. Zero-centered weights (Gemma) are multiplied as 1 + w, in float32."""
        if not self.zero_centered:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class ProjectionNorm(nn.Module):
    """RMSNorm over all heads of a token together (OLMo 2, arXiv:2501.00656, 3.2). Each rank has its own heads' part."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float, heads: int) -> None:
        """`heads` of all ranks, of `hidden_size` each."""
        super().__init__()
        self.size, self.eps = heads * hidden_size, eps
        local_size = self.size // get_tensor_model_parallel_group().size()
        self.weight = nn.Parameter(torch.empty(local_size, dtype=config.params_dtype))

    def forward(self, x_L1HD: Tensor) -> Tensor:
        """Normalize this rank's heads by the mean square over the heads of all ranks."""
        x_L1P = x_L1HD.flatten(-2).float()
        # Sums over ranks in the forward and in the backward pass: each rank's outputs depend on every rank's inputs.
        squares_L11 = reduce_from_tensor_model_parallel_region(x_L1P.square().sum(-1, keepdim=True))
        squares_L11 = copy_to_tensor_model_parallel_region(squares_L11)
        scaled_L1P = x_L1P * torch.rsqrt(squares_L11 / self.size + self.eps)
        return (scaled_L1P * self.weight).to(x_L1HD.dtype).view(x_L1HD.shape)


class Residual(nn.Module):
    """Addition of a layer's output to the residual: x + multiplier · norm(output).

    Takes the place of Megatron's `get_bias_dropout_add`, which returns a function as well.
    """

    def __init__(self, config: DecoderConfig, norm: Any) -> None:
        """`norm` is the norms' class."""
        super().__init__()
        self.multiplier = config.residual_multiplier
        self.norm: nn.Module | None = None
        if config.post_norms:
            self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        """Return the function that adds."""
        del training, fused
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        del dropout
        output, bias = output_with_bias
        # Megatron enables gradients here in every pass.
        with torch.set_grad_enabled(output.requires_grad):
            if bias is not None:
                output = output + bias
            if self.norm is not None:
                output = self.norm(output)
            return residual + output * self.multiplier


class BiasedDown(RowParallelLinear):  # type: ignore[misc]
    """An expert's second layer with a bias, which Megatron adds in place.

    Autograd rejects that on the output of a layer that is not sharded, which is a view: here it is a copy.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a copy of the output, and the bias."""
        output, bias = super().forward(x)
        return output.clone(), bias


class DecoderAttention(SelfAttention):  # type: ignore[misc]
    """Attention with norms over all heads together, and with different rotary embeddings by layer (Gemma 3)."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        if config.norm_whole_projections:
            # Not by the spec: since 0.18, Megatron accepts norms there only with `qk_layernorm`. It would then sum
            # gradients of these weights over tensor-parallel ranks, although each rank has a part of its own.
            self.q_layernorm, self.k_layernorm = (
                ProjectionNorm(
                    config=config,
                    hidden_size=self.hidden_size_per_attention_head,
                    eps=config.layernorm_epsilon,
                    heads=heads,
                )
                for heads in (config.num_attention_heads, config.num_query_groups)
            )

    def forward(self, hidden_states: Tensor, *, rotary_pos_emb: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """With `rotations`, `rotary_pos_emb` has those of all kinds of layers, in the order of their names."""
        kinds: list[str] | None = self.config.rotations
        if kinds is not None:
            rotary_pos_emb = rotary_pos_emb[sorted(set(kinds)).index(kinds[self.layer_number - 1])]
        outputs: tuple[Tensor, Tensor | None] = super().forward(hidden_states, rotary_pos_emb=rotary_pos_emb, **options)
        return outputs


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
    scales: Sequence[float],
) -> TransformerBlockSubmodules:
    """Layer specs of one model chunk (`run`) of this rank.

    `scales` multiply the attention scores of each layer of the model.
    """
    first, number = get_transformer_layer_offset(config, run), get_num_layers_to_build(config, run)
    norm = _engine().layer_norm() if make.engine else Norm
    layers = []
    for index in range(first, first + number):
        mixture = bool(mixtures(config)[index])
        layer = (_engine_spec if make.engine else _local_spec)(config, make, scales[index], mixture=mixture)
        _adapt(layer, config, norm)
        if mixture and balancing is not None:
            submodules(layer.submodules.mlp).router = partial(BalancedRouter, balancing=balancing)
        if mixture and config.add_bias_linear:
            experts = submodules(layer.submodules.mlp).experts
            submodules(experts).linear_fc2 = BiasedDown
        layers.append(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _adapt(spec: ModuleSpec, config: TransformerConfig, norm: Any) -> None:
    """Change a layer's spec by the config's `LayerOptions`."""
    layer = spec.submodules
    if not config.pre_norms:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
    if config.post_norms or config.residual_multiplier != 1.0:
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(module=Residual, params={"config": config, "norm": norm})
    if config.norm_whole_projections or config.rotations is not None:
        layer.self_attention.module = DecoderAttention


def _local_spec(config: TransformerConfig, make: LayerSpec, scale: float, *, mixture: bool) -> ModuleSpec:
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


def _engine_spec(config: TransformerConfig, make: LayerSpec, scale: float, *, mixture: bool) -> ModuleSpec:
    from roll_strategy_megatron.engine_attention import EngineAttention

    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if mixture else None,
        moe_grouped_gemm=make.grouped,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(module=EngineAttention, params={"scale": scale})
    if not make.fused_norms or not config.pre_norms:
        _take_norms_apart(spec, config, mixture=mixture)
    return spec


def _take_norms_apart(spec: ModuleSpec, config: TransformerConfig, *, mixture: bool) -> None:
    norm, matrix = _engine().layer_norm(), _engine().column_parallel_linear()
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if not mixture:
        submodules(layer.mlp).linear_fc1 = matrix
    if config.multi_latent_attention:
        attention.linear_q_up_proj = attention.linear_kv_up_proj = matrix
        attention.q_layernorm = attention.kv_layernorm = norm
    else:
        attention.linear_qkv = matrix


def _engine() -> Any:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
