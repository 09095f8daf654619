"""Megatron's GPT model for packed sequences: it returns hidden states, and the head is computed in chunks elsewhere."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend

from roll_core.errors import ModelError
from roll_modeling.blocks import inputs_on_host
from roll_strategy_megatron.balancing import Balancing
from roll_strategy_megatron.config import ROTATIONS, runs
from roll_strategy_megatron.layers import DecoderConfig, LatentDecoderConfig, ScalarHead, block_spec, mixtures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec
    from roll_strategy_megatron.bridge.transforms import Sizes
    from roll_strategy_megatron.config import MegatronConfig
    from roll_strategy_megatron.engine import LayerSpec
    from roll_strategy_megatron.packing import Packing
    from roll_strategy_megatron.parallel import Parallel
    from roll_strategy_megatron.router_replay import RouterReplay


class PackedModel(GPTModel):  # type: ignore[misc]
    """GPT model whose forward pass ends before the output layer. The output layer's weight exists on the last stage."""

    replay: RouterReplay | None = None
    """Replay of the engine's expert choices in this chunk's routers, if configured."""
    padding_id: int | None = None
    """The embedding's `padding_idx` in transformers, whose row gets no gradient."""
    rotary: Sequence[Any] = ()
    """Rotary embeddings of each kind of layer, sorted by the kinds' names, if kinds differ."""
    offload_from: torch.device | None = None
    """With `activation_offloading`: the device from which inputs of recomputed layers move to the host."""

    def forward(self, packing: Packing) -> Tensor:
        """Hidden states of this rank's tokens, `[L, 1, H]`; with sequence parallelism, of its slice of the L tokens.

        On inner pipeline stages these are the inputs of the next stage.
        """
        embedded = self._embedded(packing.tokens_1L) if self.pre_process else None
        with (
            nullcontext() if self.replay is None else self.replay.forward(packing.routed_experts, trains=self.training),
            inputs_on_host(self.offload_from),
        ):
            hidden: Tensor = self.decoder(
                hidden_states=embedded,
                attention_mask=None,
                rotary_pos_emb=self._rotation(packing),
                packed_seq_params=packing.packed,
                padding_mask=self._members(packing.members_SL),
            )
        return hidden

    def _members(self, members_SL: Tensor | None) -> Tensor | None:
        """`members_SL` of the tokens that pass through this rank's layers.

        Megatron passes padding masks on to routers, also when it recomputes layers. It has no argument for sequence
        membership, so `padding_mask` carries it.
        """
        if members_SL is None or not self.config.sequence_parallel:
            return members_SL
        group = self.pg_collection.tp
        share: Tensor = members_SL.chunk(group.size(), dim=1)[group.rank()]
        return share

    def _rotation(self, packing: Packing) -> Tensor | None:
        """Rotary embedding for all layers, or of each kind of layer; None with latent attention, which computes its
        own."""
        if self.config.multi_latent_attention:
            return None
        if self.rotary:
            return torch.stack([rotary(packing.packed.max_seqlen_q, packed_seq=True) for rotary in self.rotary])
        angles: Tensor = self.rotary_pos_emb(packing.packed.max_seqlen_q, packed_seq=True)
        return angles

    def _embedded(self, tokens_1L: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(input_ids=tokens_1L, position_ids=None)
        if self.config.embedding_multiplier != 1.0:
            embedded = embedded * embedded.new_tensor(self.config.embedding_multiplier)
        if torch.is_grad_enabled() and not embedded.requires_grad:
            # With LoRA, embeddings are frozen. Recomputed layers only have gradients if their input requires one.
            return embedded.requires_grad_()
        if self.padding_id is None:
            return embedded
        # With sequence parallelism, each tensor-parallel rank continues with a contiguous slice of the tokens.
        start = self.pg_collection.tp.rank() * len(embedded) if self.config.sequence_parallel else 0
        mine = tokens_1L[0, start : start + len(embedded)]
        return torch.where((mine == self.padding_id)[:, None, None], embedded.detach(), embedded)

    def head_weight(self) -> Tensor:
        """This rank's rows of the output layer's weight. Only on the last stage."""
        if self.share_embeddings_and_output_weights:
            shared: Tensor = self.shared_embedding_or_output_weight()
            return shared
        weight: Tensor = self.output_layer.weight
        return weight


def make_config(
    settings: Mapping[str, Any], config: MegatronConfig, spec: ModelSpec, dtype: torch.dtype, make: LayerSpec
) -> TransformerConfig:
    """Build Megatron's `TransformerConfig`. Raises `ModelError` for settings that Megatron rejects."""
    try:
        config.check_sequence_parallel(
            experts=bool(settings.get("num_moe_experts")), latent=bool(settings.get("multi_latent_attention"))
        )
    except ValueError as error:
        raise ModelError(str(error)) from error
    kind = LatentDecoderConfig if settings.get("multi_latent_attention") else DecoderConfig
    try:
        return kind(
            **settings,
            **_parallelism(config),
            **_recomputation(config, spec),
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            perform_initialization=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            persist_layer_norm=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            # Losses already contain their divisor: do not average over microbatches and ranks.
            calculate_per_token_loss=True,
            # The hidden states sent between stages have a different length in each microbatch.
            variable_seq_lengths=config.pipeline_model_parallel_size > 1,
            moe_token_dispatcher_type=config.moe_token_dispatcher_type,
            moe_router_dtype=config.moe_router_dtype,
            moe_grouped_gemm=make.grouped,
            transformer_impl="transformer_engine" if make.engine else "local",
            attention_backend=AttnBackend[config.attention_backend],
        )
    except (AssertionError, ValueError) as error:
        raise ModelError(f"Megatron refuses this model with this strategy_config: {error}") from error


def _parallelism(config: MegatronConfig) -> dict[str, Any]:
    interleaved, layout = config.runs_per_stage > 1, config.pipeline_model_parallel_layout
    return {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.runs_per_stage if interleaved else None,
        "pipeline_model_parallel_layout": None if layout is None else "|".join(runs(layout)),  # without spaces
        # Megatron's interleaved schedule sends forward and backward tensors separately.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size,
        "sequence_parallel": config.sequence_parallel,
        "account_for_embedding_in_pipeline_split": config.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": config.account_for_loss_in_pipeline_split,
        "num_layers_in_first_pipeline_stage": config.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": config.num_layers_in_last_pipeline_stage,
    }


def _recomputation(config: MegatronConfig, spec: ModelSpec) -> dict[str, Any]:
    if not spec.gradient_checkpointing:
        return {}
    if config.recomputation == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": config.recomputed_modules}
    return {
        "recompute_granularity": "full",
        "recompute_method": config.recompute_method or "uniform",
        "recompute_num_layers": config.recompute_num_layers or 1,
    }


def make_balancing(settings: TransformerConfig, config: MegatronConfig, device: torch.device) -> Balancing | None:
    """Build the routers' auxiliary losses; None if both coefficients are 0.

    Raises `ModelError` if the model has no MoE layers.
    """
    if not (config.moe_aux_loss_coeff or config.moe_z_loss_coeff):
        return None
    experts = mixtures(settings)
    if not any(experts):
        raise ModelError("moe_aux_loss_coeff and moe_z_loss_coeff are for models with experts, and this one has none")
    return Balancing(
        aux_coeff=config.moe_aux_loss_coeff,
        z_coeff=config.moe_z_loss_coeff,
        num_routers=sum(experts),
        device=device,
    )


def make_runs(
    config: TransformerConfig,
    make: LayerSpec,
    num_runs: int,
    sizes: Sizes,
    hf: PreTrainedModel,
    parallel: Parallel,
    balancing: Balancing | None = None,
    *,
    scalar: bool,
) -> list[PackedModel]:
    """Build this rank's model chunks (one per virtual pipeline stage), without loading weights.

    Only the rotary frequencies are set, to those of transformers. With `scalar`, the model ends in a layer with one
    output.
    """
    return [
        _make_run(config, make, run, num_runs, sizes, hf, parallel, balancing, scalar=scalar) for run in range(num_runs)
    ]


def _make_run(
    config: TransformerConfig,
    make: LayerSpec,
    run: int,
    num_runs: int,
    sizes: Sizes,
    hf: PreTrainedModel,
    parallel: Parallel,
    balancing: Balancing | None,
    *,
    scalar: bool,
) -> PackedModel:
    stages, stage = parallel.pp.size(), parallel.pp.rank()
    virtual = run if num_runs > 1 else None
    rotations = transformers_rotations(hf)
    model = PackedModel(
        config=config,
        transformer_layer_spec=block_spec(config, make, virtual, balancing, _scales(config, hf, rotations)),
        vocab_size=sizes.padded_vocab,
        max_sequence_length=hf.config.max_position_embeddings,
        pre_process=stage == 0 and run == 0,
        post_process=stage == stages - 1 and run == num_runs - 1,
        share_embeddings_and_output_weights=hf.config.tie_word_embeddings and not scalar,
        position_embedding_type="rope",
        vp_stage=virtual,
    )
    if scalar and model.post_process:
        model.output_layer = ScalarHead(config)
    own_frequencies(model, rotations, parallel.device)
    model.padding_id = hf.get_input_embeddings().padding_idx
    placed: PackedModel = model.to(parallel.device)
    return placed


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A rotary embedding of transformers' model."""

    frequencies: Tensor
    """Angle per position of each pair of units, float32."""
    scale: float
    """Factor of cosines and sines (YaRN, arXiv:2309.00071, 3.4)."""


def own_frequencies(model: PackedModel, rotations: Mapping[str, Rotation], device: torch.device) -> None:
    """Replace Megatron's rotary frequencies by those of transformers."""
    frequencies = {kind: rotation.frequencies.to(device) for kind, rotation in rotations.items()}
    kinds = model.config.rotations
    if kinds is not None:
        model.rotary = [copy.copy(model.rotary_pos_emb) for _ in set(kinds)]
        for rotary, kind in zip(model.rotary, sorted(set(kinds)), strict=True):
            rotary.inv_freq = frequencies[kind]
    elif not model.config.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = frequencies[""]
    else:
        for layer in model.decoder.layers:
            layer.self_attention.rotary_pos_emb.inv_freq = frequencies[""]


def _scales(config: TransformerConfig, hf: PreTrainedModel, rotations: Mapping[str, Rotation]) -> list[float]:
    """Scale of the attention scores of each layer.

    It includes the factor of cosines and sines, by which queries and keys are multiplied in transformers. Raises
    `ModelError` if these would be multiplied in part only.
    """
    attention: Any = hf.get_submodule("model.layers.0.self_attn")
    scale = float(getattr(attention, "scaling", config.kv_channels**-0.5))
    for rotation in rotations.values():
        if rotation.scale != 1.0 and (
            config.multi_latent_attention or 2 * len(rotation.frequencies) != config.kv_channels
        ):
            raise ModelError(
                f"{hf.config.model_type}: rotary embeddings with an attention factor of {rotation.scale} are supported"
                " only if they rotate all units of a head"
            )
    return [scale * rotations[kind].scale ** 2 for kind in config.rotations or [""] * config.num_layers]


def transformers_rotations(hf: PreTrainedModel) -> dict[str, Rotation]:
    """Rotary embeddings as transformers computes them from its config, by kind of layer; "" if all layers share one.

    Raises `ModelError` for unsupported types of rotary embeddings.
    """
    rotary: Any = hf.get_submodule("model.rotary_emb")
    by_kind = isinstance(rotary.rope_type, dict)
    rotations: dict[str, Rotation] = {}
    for kind in rotary.rope_type if by_kind else ("",):
        prefix, rope_type = (f"{kind}_", rotary.rope_type[kind]) if by_kind else ("", rotary.rope_type)
        if rope_type not in ROTATIONS:
            raise ModelError(
                f"{hf.config.model_type}: rotary embeddings of type {rope_type!r} are not supported; supported are"
                f" {', '.join(ROTATIONS)}"
            )
        frequencies: Tensor = getattr(rotary, f"{prefix}inv_freq")
        rotations[kind] = Rotation(
            frequencies=frequencies.detach().clone().float(), scale=getattr(rotary, f"{prefix}attention_scaling")
        )
    return rotations
