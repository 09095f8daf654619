"""Megatron's model as a strategy needs it: packed sequences in, hidden states out; the head is computed in chunks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from roll_core.errors import ModelError
from roll_strategy_megatron.balancing import Balancing
from roll_strategy_megatron.layers import block_spec, mixtures
from roll_strategy_megatron.scalar_head import ScalarHead

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec
    from roll_strategy_megatron.bridge.transforms import Sizes
    from roll_strategy_megatron.config import MegatronConfig
    from roll_strategy_megatron.engine import Make
    from roll_strategy_megatron.packing import Packing
    from roll_strategy_megatron.parallel import Parallel
    from roll_strategy_megatron.router_replay import RouterReplay


class PackedModel(GPTModel):  # type: ignore[misc]
    """Without its output layer, whose weight is there."""

    replay: RouterReplay | None = None
    """Of its routers, where these are told what to choose."""
    padding_id: int | None = None
    """A token from whose row of the embedding transformers keeps gradients away."""

    def forward(self, packing: Packing) -> Tensor:
        """Hidden states of this rank's tokens (L, or its share of them with sequence parallel), `[., 1, H]`; of an
        inner stage what the next one takes."""
        embedded = self._embedded(packing.tokens_1L) if self.pre_process else None
        with (
            nullcontext() if self.replay is None else self.replay.forward(packing.routed_experts, trains=self.training)
        ):
            found: Tensor = self.decoder(
                hidden_states=embedded,
                attention_mask=None,
                rotary_pos_emb=self._rotation(packing),
                packed_seq_params=packing.packed,
                padding_mask=self._members(packing.members_SL),
            )
        return found

    def _members(self, members_SL: Tensor | None) -> Tensor | None:
        """Of the tokens that go through this rank's layers. Megatron hands padding masks on to routers, also where
        layers are computed again; what it does not hand on is which tokens make a sequence."""
        if members_SL is None or not self.config.sequence_parallel:
            return members_SL
        group = self.pg_collection.tp
        share: Tensor = members_SL.chunk(group.size(), dim=1)[group.rank()]
        return share

    def _rotation(self, packing: Packing) -> Tensor | None:
        """Of all layers; latent attention makes its own."""
        if self.config.multi_latent_attention:
            return None
        found: Tensor = self.rotary_pos_emb(packing.packed.max_seqlen_q, packed_seq=True)
        return found

    def _embedded(self, tokens_1L: Tensor) -> Tensor:
        found: Tensor = self.embedding(input_ids=tokens_1L, position_ids=None)
        if torch.is_grad_enabled() and not found.requires_grad:
            # Beside adapters. Layers that are computed again give gradients only where their input has one.
            return found.requires_grad_()
        if self.padding_id is None:
            return found
        # With sequence parallel each tensor parallel rank goes on with a run of the tokens.
        start = self.pg_collection.tp.rank() * len(found) if self.config.sequence_parallel else 0
        mine = tokens_1L[0, start : start + len(found)]
        return torch.where((mine == self.padding_id)[:, None, None], found.detach(), found)

    def head_weight(self) -> Tensor:
        """Of the last stage: this rank's rows."""
        if self.share_embeddings_and_output_weights:
            shared: Tensor = self.shared_embedding_or_output_weight()
            return shared
        weight: Tensor = self.output_layer.weight
        return weight


def make_config(
    settings: Mapping[str, Any], config: MegatronConfig, spec: ModelSpec, dtype: torch.dtype, make: Make
) -> TransformerConfig:
    """Megatron's own. Raises `ModelError` for what it refuses."""
    try:
        config.check_sequence_parallel(
            experts=bool(settings.get("num_moe_experts")), latent=bool(settings.get("multi_latent_attention"))
        )
    except ValueError as error:
        raise ModelError(str(error)) from error
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
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
            # A loss's value is its own share of the objective: nothing is averaged over microbatches and ranks.
            calculate_per_token_loss=True,
            # Of microbatches that are passed on from stage to stage.
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
    interleaved = config.runs_per_stage > 1
    return {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": config.runs_per_stage if interleaved else None,
        "pipeline_model_parallel_layout": config.pipeline_model_parallel_layout,
        # Megatron's schedule for several runs of layers on a stage sends in each direction apart from the other.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": config.context_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "expert_tensor_parallel_size": config.expert_tensor_parallel_size,
        "sequence_parallel": config.sequence_parallel,
        "account_for_embedding_in_pipeline_split": config.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": config.account_for_loss_in_pipeline_split,
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
    """Of the routers' losses, where there are any. Raises `ModelError` where there are no routers."""
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
    make: Make,
    num_runs: int,
    sizes: Sizes,
    hf: PreTrainedModel,
    parallel: Parallel,
    balancing: Balancing | None = None,
    *,
    scalar: bool,
) -> list[PackedModel]:
    """This rank's layers, run by run, without numbers but those of rotary frequencies, which are transformers' own.
    `scalar` models end in a layer with one output."""
    return [
        _make_run(config, make, run, num_runs, sizes, hf, parallel, balancing, scalar=scalar) for run in range(num_runs)
    ]


def _make_run(
    config: TransformerConfig,
    make: Make,
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
    model = PackedModel(
        config=config,
        transformer_layer_spec=block_spec(config, make, virtual, balancing, _scale(config, hf)),
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
    own_frequencies(model, hf, parallel.device)
    model.padding_id = hf.get_input_embeddings().padding_idx
    placed: PackedModel = model.to(parallel.device)
    return placed


def own_frequencies(model: PackedModel, hf: PreTrainedModel, device: torch.device) -> None:
    """The rotation that transformers computes, in the places where Megatron's own is."""
    found = frequencies(hf).to(device)
    if not model.config.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = found
        return
    for layer in model.decoder.layers:
        layer.self_attention.rotary_pos_emb.inv_freq = found


def _scale(config: TransformerConfig, hf: PreTrainedModel) -> float | None:
    """Of the scores of latent attention, which some rotations change."""
    if not config.multi_latent_attention:
        return None
    attention: Any = hf.get_submodule("model.layers.0.self_attn")
    return float(attention.scaling)


def frequencies(hf: PreTrainedModel) -> Tensor:
    """Of the rotation of queries and keys, as transformers computes them from its config, scaled or not."""
    rotary: Any = hf.get_submodule("model.rotary_emb")
    if rotary.attention_scaling != 1.0 or rotary.rope_type not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(
            f"{hf.config.model_type}: rotary embeddings of type {rotary.rope_type!r} are not supported; the bridge"
            " knows default, linear, llama3, and yarn where it only changes frequencies"
        )
    found: Tensor = rotary.inv_freq.detach().clone().float()
    return found
