"""DeepSeek-V3: latent attention, grouped experts with a selection bias, a shared expert, and dense first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError
from roll_strategy_megatron.bridge.architectures import COMMON, DENSE_MLP, HF, MCORE, dense, experts
from roll_strategy_megatron.bridge.rules import Architecture, BufferRule, Rule
from roll_strategy_megatron.bridge.transforms import Copy, FuseGateUp

if TYPE_CHECKING:
    from collections.abc import Mapping

ATTENTION = {
    "linear_q_proj": ("q_proj", Copy(tp_dim=0)),
    "linear_q_down_proj": ("q_a_proj", Copy()),
    "q_layernorm": ("q_a_layernorm", Copy()),
    "linear_q_up_proj": ("q_b_proj", Copy(tp_dim=0)),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa", Copy()),
    "kv_layernorm": ("kv_a_layernorm", Copy()),
    "linear_kv_up_proj": ("kv_b_proj", Copy(tp_dim=0)),
}
"""Megatron's name of each module: transformers' name, and its transform."""

RULES = (
    *(each for each in COMMON if "linear_qkv" not in each.mcore),
    *(
        Rule(mcore=f"{MCORE}self_attention.{mcore}.weight", hf=(f"{HF}self_attn.{hf}.weight",), transform=transform)
        for mcore, (hf, transform) in ATTENTION.items()
    ),
    *DENSE_MLP,
    *experts(f"{HF}mlp", "gate_proj", "up_proj", "down_proj"),
    Rule(
        mcore=f"{MCORE}mlp.shared_experts.linear_fc1.weight",
        hf=(f"{HF}mlp.shared_experts.gate_proj.weight", f"{HF}mlp.shared_experts.up_proj.weight"),
        transform=FuseGateUp(),
    ),
    Rule(
        mcore=f"{MCORE}mlp.shared_experts.linear_fc2.weight",
        hf=(f"{HF}mlp.shared_experts.down_proj.weight",),
        transform=Copy(tp_dim=1),
    ),
)
BIAS = BufferRule(mcore=f"{MCORE}mlp.router.expert_bias", hf=f"{HF}mlp.gate.e_score_correction_bias")


def settings(config: Any) -> Mapping[str, Any]:
    """Arguments of Megatron's `TransformerConfig` from a DeepSeek-V3 config.

    Megatron scores a group of experts by its best `num_experts_per_tok / topk_group` experts, the model by its best
    two. Raises `ModelError` if these differ, and for other settings that Megatron cannot compute. If all groups are
    chosen, as in models with one group, the scores do not matter.
    """
    if not config.rope_interleave:
        raise ModelError("deepseek_v3: rope_interleave is false; the bridge supports only true")
    if not config.norm_topk_prob:
        raise ModelError("deepseek_v3: norm_topk_prob is false; the bridge supports only true")
    if config.topk_group < config.n_group and config.num_experts_per_tok != 2 * config.topk_group:
        raise ModelError(
            f"deepseek_v3: num_experts_per_tok {config.num_experts_per_tok} is not twice topk_group"
            f" {config.topk_group}, and Megatron would choose other groups"
        )
    if config.rms_norm_eps != 1e-6:
        raise ModelError(
            f"deepseek_v3: rms_norm_eps is {config.rms_norm_eps}; transformers norms latents with 1e-06, and Megatron"
            " has one number for all"
        )
    first, layers = config.first_k_dense_replace, config.num_hidden_layers
    return {
        **dense(config),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "num_moe_experts": config.num_local_experts,
        "moe_layer_freq": [0] * first + [1] * (layers - first),
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # As in transformers, training does not change the bias.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


DEEPSEEK_V3 = Architecture(
    rules=RULES,
    buffers=(BIAS,),
    settings=settings,
    ignored=(r"model\.layers\.61\..*",),  # the multi-token prediction layer, which transformers omits
)
