"""Architectures as tables of rules: Llama and its relatives, with or without experts.

Each row of `BUILTIN` names the rules of a model type's tensors, and the function that turns its config into Megatron's.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError
from roll_strategy_megatron.bridge.rules import Architecture, BufferRule, Rule
from roll_strategy_megatron.bridge.transforms import Copy, FuseGateUp, FuseQKV, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

HF, MCORE = "model.layers.{layer}.", "decoder.layers.{layer}."


# -- rules -------------------------------------------------------------------------------------------------------------


def _copied(names: Mapping[str, str], tp_dim: int | None = None) -> tuple[Rule, ...]:
    """Rules of a layer's tensors that are copied, from Megatron's names to transformers'."""
    return tuple(
        Rule(mcore=f"{MCORE}{mcore}", hf=(f"{HF}{hf}",), transform=Copy(tp_dim=tp_dim)) for mcore, hf in names.items()
    )


def _qkv(kind: str) -> tuple[Rule, ...]:
    return (
        Rule(
            mcore=f"{MCORE}self_attention.linear_qkv.{kind}",
            hf=tuple(f"{HF}self_attn.{letter}_proj.{kind}" for letter in "qkv"),
            transform=FuseQKV(),
        ),
    )


ENDS = (
    Rule(mcore="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), transform=Vocabulary()),
    Rule(mcore="output_layer.weight", hf=("lm_head.weight",), transform=Vocabulary()),
    Rule(mcore="decoder.final_layernorm.weight", hf=("model.norm.weight",), transform=Copy()),
)
PROJECTION = _copied({"self_attention.linear_proj.weight": "self_attn.o_proj.weight"}, tp_dim=1)
PRE_NORMS = _copied(
    {
        "input_layernorm.weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    }
)
POST_NORMS = _copied(
    {
        "self_attn_bda.norm.weight": "post_attention_layernorm.weight",
        "mlp_bda.norm.weight": "post_feedforward_layernorm.weight",
    }
)
GEMMA_NORMS = (
    *_copied(
        {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "pre_feedforward_layernorm.weight",
        }
    ),
    *POST_NORMS,
)
GLM4_NORMS = (
    *PRE_NORMS,
    *_copied(
        {
            "self_attn_bda.norm.weight": "post_self_attn_layernorm.weight",
            "mlp_bda.norm.weight": "post_mlp_layernorm.weight",
        }
    ),
)
ATTENTION = (*_qkv("weight"), *PROJECTION)
FUSED_ATTENTION = (
    Rule(
        mcore=f"{MCORE}self_attention.linear_qkv.weight",
        hf=(f"{HF}self_attn.qkv_proj.weight",),
        transform=FuseQKV(),
    ),
    *PROJECTION,
)
COMMON = (*ENDS, *PRE_NORMS, *ATTENTION)
QKV_BIAS = _qkv("bias")
QK_NAMES = {f"self_attention.{letter}_layernorm.weight": f"self_attn.{letter}_norm.weight" for letter in "qk"}
QK_NORM = _copied(QK_NAMES)
WHOLE_QK_NORM = _copied(QK_NAMES, tp_dim=0)
SINKS = _copied({"self_attention.core_attention.softmax_offset": "self_attn.sinks"}, tp_dim=0)
DOWN = _copied({"mlp.linear_fc2.weight": "mlp.down_proj.weight"}, tp_dim=1)
DENSE_MLP = (
    Rule(
        mcore=f"{MCORE}mlp.linear_fc1.weight",
        hf=(f"{HF}mlp.gate_proj.weight", f"{HF}mlp.up_proj.weight"),
        transform=FuseGateUp(),
    ),
    *DOWN,
)
FUSED_MLP = (
    Rule(mcore=f"{MCORE}mlp.linear_fc1.weight", hf=(f"{HF}mlp.gate_up_proj.weight",), transform=FuseGateUp()),
    *DOWN,
)
EXPERT = f"{MCORE}mlp.experts.local_experts.{{expert}}."


def experts(stored: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of MoE layers.

    `stored` is the module's prefix in checkpoint files; `gate`, `up` and `down` are the names of an expert's matrices
    there.
    """
    return (
        Rule(mcore=f"{MCORE}mlp.router.weight", hf=(f"{HF}mlp.gate.weight",), transform=Copy(), stored=_router(stored)),
        Rule(
            mcore=f"{EXPERT}linear_fc1.weight",
            hf=(f"{HF}mlp.experts.gate_up_proj",),
            transform=FuseGateUp(),
            stored=(f"{stored}.experts.{{expert}}.{gate}.weight", f"{stored}.experts.{{expert}}.{up}.weight"),
        ),
        Rule(
            mcore=f"{EXPERT}linear_fc2.weight",
            hf=(f"{HF}mlp.experts.down_proj",),
            transform=Copy(tp_dim=1),
            stored=(f"{stored}.experts.{{expert}}.{down}.weight",),
        ),
    )


def _router(stored: str) -> tuple[str, ...]:
    return () if stored == f"{HF}mlp" else (f"{stored}.gate.weight",)


def shared_experts(name: str) -> tuple[Rule, ...]:
    """Rules of the experts that compute every token, which Megatron has as one module; `name` is transformers'."""
    return (
        Rule(
            mcore=f"{MCORE}mlp.shared_experts.linear_fc1.weight",
            hf=(f"{HF}mlp.{name}.gate_proj.weight", f"{HF}mlp.{name}.up_proj.weight"),
            transform=FuseGateUp(),
        ),
        *_copied({"mlp.shared_experts.linear_fc2.weight": f"mlp.{name}.down_proj.weight"}, tp_dim=1),
        *_copied({"mlp.shared_experts.gate_weight": f"mlp.{name}_gate.weight"}),
    )


EXPERTS = experts(f"{HF}mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERTS = experts(f"{HF}block_sparse_moe", "w1", "w3", "w2")
GPT_OSS_EXPERTS = (
    *_copied({f"mlp.router.{kind}": f"mlp.router.{kind}" for kind in ("weight", "bias")}),
    Rule(
        mcore=f"{EXPERT}linear_fc1.weight",
        hf=(f"{HF}mlp.experts.gate_up_proj",),
        transform=FuseGateUp(transposed=True, interleaved=True),
    ),
    Rule(
        mcore=f"{EXPERT}linear_fc1.bias",
        hf=(f"{HF}mlp.experts.gate_up_proj_bias",),
        transform=FuseGateUp(interleaved=True),
    ),
    Rule(
        mcore=f"{EXPERT}linear_fc2.weight",
        hf=(f"{HF}mlp.experts.down_proj",),
        transform=Copy(tp_dim=1, transposed=True),
    ),
    Rule(mcore=f"{EXPERT}linear_fc2.bias", hf=(f"{HF}mlp.experts.down_proj_bias",), transform=Copy()),
)
SELECTION_BIAS = BufferRule(mcore=f"{MCORE}mlp.router.expert_bias", hf=f"{HF}mlp.gate.e_score_correction_bias")
"""The bias by which experts are chosen, which training does not change."""
MINIMAX_BIAS = BufferRule(
    mcore=SELECTION_BIAS.mcore,
    hf=f"{HF}mlp.e_score_correction_bias",
    stored=f"{HF}block_sparse_moe.e_score_correction_bias",
)
LATENT = {
    "linear_q_proj": ("q_proj", Copy(tp_dim=0)),
    "linear_q_down_proj": ("q_a_proj", Copy()),
    "q_layernorm": ("q_a_layernorm", Copy()),
    "linear_q_up_proj": ("q_b_proj", Copy(tp_dim=0)),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa", Copy()),
    "kv_layernorm": ("kv_a_layernorm", Copy()),
    "linear_kv_up_proj": ("kv_b_proj", Copy(tp_dim=0)),
}
"""Megatron's name of each module of latent attention: transformers' name, and its transform."""
DEEPSEEK = (
    *ENDS,
    *PRE_NORMS,
    *PROJECTION,
    *(
        Rule(mcore=f"{MCORE}self_attention.{mcore}.weight", hf=(f"{HF}self_attn.{hf}.weight",), transform=transform)
        for mcore, (hf, transform) in LATENT.items()
    ),
    *DENSE_MLP,
    *EXPERTS,
    *shared_experts("shared_experts"),
)


# -- settings ----------------------------------------------------------------------------------------------------------


def dense(config: Any) -> Mapping[str, Any]:
    """Settings of a dense model: RMSNorm, gated feed-forward layers, grouped-query attention.

    Biases of queries, keys and values follow `attention_bias`. Raises `ModelError` for unknown activations and kinds of
    layers.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": _activation(config),
        "add_bias_linear": False,
        "add_qkv_bias": bool(getattr(config, "attention_bias", False)),
        "rotations": _rotations(config),
        **_windows(config),
    }


def _activation(config: Any) -> Callable[..., Any]:
    import torch.nn.functional as F

    known: dict[str, Callable[..., Any]] = {
        "silu": F.silu,
        "swish": F.silu,
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    }
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in known:
        raise ModelError(f"{config.model_type}: hidden_act is {name!r}; the bridge supports only {', '.join(known)}")
    return known[name]


def _rotations(config: Any) -> list[str] | None:
    """Kind of each layer's rotary embedding; None if all layers have the same."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return list(config.layer_types) if any(isinstance(value, dict) for value in parameters.values()) else None


def _windows(config: Any) -> dict[str, Any]:
    """Size of the sliding window, and which layers have one."""
    size = getattr(config, "sliding_window", None)
    if size is None or not getattr(config, "use_sliding_window", True):
        return {}
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers)
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ModelError(f"{config.model_type}: the bridge does not support layers of {', '.join(sorted(unknown))}")
    windowed = [int(kind == "sliding_attention") for kind in kinds]
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": windowed} if any(windowed) else {}


def qwen2(config: Any) -> Mapping[str, Any]:
    """Settings of Qwen2: a dense model with biases of queries, keys and values."""
    return {**dense(config), "add_qkv_bias": True}


def qwen3(config: Any) -> Mapping[str, Any]:
    """Settings of Qwen3: a dense model with normalized queries and keys."""
    return {**dense(config), "qk_layernorm": True}


def interleaved(config: Any) -> Mapping[str, Any]:
    """Settings of ERNIE 4.5: a dense model that rotates neighboring units."""
    return {**dense(config), "rotary_interleaved": True}


def glm4(config: Any) -> Mapping[str, Any]:
    """Settings of GLM-4: norms before and after each layer, and rotation of neighboring units in half of each head."""
    return {**interleaved(config), "post_norms": True}


def smollm3(config: Any) -> Mapping[str, Any]:
    """Settings of SmolLM3, some layers of which have no rotation."""
    return {**dense(config), "no_rope_freq": [int(not rotated) for rotated in config.no_rope_layers]}


def granite(config: Any) -> Mapping[str, Any]:
    """Settings of Granite, which multiplies embeddings and the outputs of layers."""
    return {
        **dense(config),
        "embedding_multiplier": float(config.embedding_multiplier),
        "residual_multiplier": float(config.residual_multiplier),
    }


def gemma(config: Any) -> Mapping[str, Any]:
    """Settings of Gemma 2 and 3: norms before and after each layer, with zero-centered weights; scaled embeddings."""
    return {
        **dense(config),
        "post_norms": True,
        "layernorm_zero_centered_gamma": True,
        "embedding_multiplier": config.hidden_size**0.5,
        "attention_softcap": config.attn_logit_softcapping or 0.0,
        "qk_layernorm": config.model_type == "gemma3_text",
    }


def olmo2(config: Any) -> Mapping[str, Any]:
    """Settings of OLMo 2 and 3: norms after each layer only, and of all heads' queries together."""
    return {**dense(config), "pre_norms": False, "post_norms": True, "norm_whole_projections": True}


def mixture(
    config: Any, *, num_experts: int, expert_size: int, renormalised: bool, dense_layers: Collection[int] = ()
) -> Mapping[str, Any]:
    """Settings of MoE layers; softmax after top-k if `renormalised`, otherwise before.

    `dense_layers` have no experts.
    """
    layers = range(config.num_hidden_layers)
    return {
        "num_moe_experts": num_experts,
        "moe_layer_freq": [int(layer not in dense_layers) for layer in layers] if dense_layers else 1,
        "moe_ffn_hidden_size": expert_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def _qwen_mixture(config: Any) -> Mapping[str, Any]:
    """MoE layers of Qwen2-MoE and Qwen3-MoE; `mlp_only_layers` and `decoder_sparse_step` select dense ones."""
    named, step = config.mlp_only_layers or [], config.decoder_sparse_step
    return mixture(
        config,
        num_experts=config.num_experts,
        expert_size=config.moe_intermediate_size,
        renormalised=config.norm_topk_prob,
        dense_layers=[layer for layer in range(config.num_hidden_layers) if layer in named or (layer + 1) % step],
    )


def qwen2_moe(config: Any) -> Mapping[str, Any]:
    """Settings of Qwen2-MoE, whose shared expert has a gate."""
    return {
        **dense(config),
        **_qwen_mixture(config),
        "add_qkv_bias": config.qkv_bias,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def qwen3_moe(config: Any) -> Mapping[str, Any]:
    """Settings of Qwen3-MoE."""
    return {**qwen3(config), **_qwen_mixture(config)}


def mixtral(config: Any) -> Mapping[str, Any]:
    """Settings of Mixtral, in which every layer is an MoE layer."""
    return {
        **dense(config),
        **mixture(
            config, num_experts=config.num_local_experts, expert_size=config.intermediate_size, renormalised=True
        ),
    }


def olmoe(config: Any) -> Mapping[str, Any]:
    """Settings of OLMoE, which normalizes all heads' queries together."""
    return {
        **dense(config),
        **mixture(
            config,
            num_experts=config.num_experts,
            expert_size=config.intermediate_size,
            renormalised=config.norm_topk_prob,
        ),
        "norm_whole_projections": True,
    }


def gpt_oss(config: Any) -> Mapping[str, Any]:
    """Settings of gpt-oss: biases everywhere, attention sinks, and clamped feed-forward activations."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return {
        **mixtral(config),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.swiglu_limit,
    }


def _by_sigmoid(config: Any) -> Mapping[str, Any]:
    """Routers that choose experts by sigmoid scores and a bias, which training does not change (DeepSeek-V3)."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": getattr(config, "routed_scaling_factor", None),
    }


def minimax_m2(config: Any) -> Mapping[str, Any]:
    """Settings of MiniMax-M2: sigmoid routers, and norms of all heads' queries together."""
    return {**mixtral(config), **_by_sigmoid(config), "norm_whole_projections": True}


def _shared_and_grouped(config: Any) -> Mapping[str, Any]:
    """MoE layers after dense ones, with groups of experts and shared experts (DeepSeek).

    If all groups are chosen, the groups do not matter.
    """
    shared = config.n_shared_experts
    grouped = (config.topk_group or 0) < (config.n_group or 0)
    return {
        **mixture(
            config,
            num_experts=config.n_routed_experts,
            expert_size=config.moe_intermediate_size,
            renormalised=False,
            dense_layers=range(config.first_k_dense_replace),
        ),
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * shared if shared else None,
        "moe_router_num_groups": config.n_group if grouped else None,
        "moe_router_group_topk": config.topk_group if grouped else None,
    }


def glm4_moe(config: Any) -> Mapping[str, Any]:
    """Settings of GLM-4.5: DeepSeek-V3's routers with grouped-query attention."""
    return {
        **dense(config),
        **_shared_and_grouped(config),
        **_by_sigmoid(config),
        "qk_layernorm": getattr(config, "use_qk_norm", True),
    }


def deepseek_v2(config: Any) -> Mapping[str, Any]:
    """Settings of DeepSeek-V2: latent attention and softmax routers.

    Raises `ModelError` if Megatron would norm latents otherwise than transformers.
    """
    if config.rms_norm_eps != 1e-6:
        raise ModelError(
            f"{config.model_type}: rms_norm_eps is {config.rms_norm_eps}; transformers norms latents with 1e-06, and"
            " Megatron has one number for all"
        )
    return {
        **dense(config),
        **_shared_and_grouped(config),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
    }


def deepseek_v3(config: Any) -> Mapping[str, Any]:
    """Settings of DeepSeek-V3: latent attention and sigmoid routers."""
    return {**deepseek_v2(config), **_by_sigmoid(config)}


LLAMA = Architecture(
    rules=(*COMMON, *DENSE_MLP), settings=dense, ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
)
BUILTIN: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture(rules=(*COMMON, *QKV_BIAS, *DENSE_MLP), settings=qwen2),
    "qwen3": Architecture(rules=(*COMMON, *QK_NORM, *DENSE_MLP), settings=qwen3),
    "seed_oss": Architecture(rules=(*COMMON, *QKV_BIAS, *DENSE_MLP), settings=dense),
    "smollm3": Architecture(rules=(*COMMON, *DENSE_MLP), settings=smollm3),
    "phi3": Architecture(rules=(*ENDS, *PRE_NORMS, *FUSED_ATTENTION, *FUSED_MLP), settings=dense),
    "ernie4_5": Architecture(rules=(*COMMON, *DENSE_MLP), settings=interleaved),
    "granite": Architecture(rules=(*COMMON, *DENSE_MLP), settings=granite),
    "glm4": Architecture(rules=(*ENDS, *GLM4_NORMS, *ATTENTION, *QKV_BIAS, *FUSED_MLP), settings=glm4),
    "gemma2": Architecture(rules=(*ENDS, *GEMMA_NORMS, *ATTENTION, *DENSE_MLP), settings=gemma),
    "gemma3_text": Architecture(rules=(*ENDS, *GEMMA_NORMS, *ATTENTION, *QK_NORM, *DENSE_MLP), settings=gemma),
    "olmo2": Architecture(rules=(*ENDS, *POST_NORMS, *ATTENTION, *WHOLE_QK_NORM, *DENSE_MLP), settings=olmo2),
    "olmo3": Architecture(rules=(*ENDS, *POST_NORMS, *ATTENTION, *WHOLE_QK_NORM, *DENSE_MLP), settings=olmo2),
    "mixtral": Architecture(rules=(*COMMON, *MIXTRAL_EXPERTS), settings=mixtral),
    "qwen2_moe": Architecture(
        rules=(*COMMON, *QKV_BIAS, *DENSE_MLP, *EXPERTS, *shared_experts("shared_expert")), settings=qwen2_moe
    ),
    "qwen3_moe": Architecture(rules=(*COMMON, *QK_NORM, *DENSE_MLP, *EXPERTS), settings=qwen3_moe),
    "olmoe": Architecture(rules=(*COMMON, *WHOLE_QK_NORM, *EXPERTS), settings=olmoe),
    "gpt_oss": Architecture(
        rules=(
            *COMMON,
            *QKV_BIAS,
            *_copied({"self_attention.linear_proj.bias": "self_attn.o_proj.bias"}),
            *SINKS,
            *GPT_OSS_EXPERTS,
        ),
        settings=gpt_oss,
    ),
    "minimax_m2": Architecture(
        rules=(*COMMON, *WHOLE_QK_NORM, *MIXTRAL_EXPERTS), buffers=(MINIMAX_BIAS,), settings=minimax_m2
    ),
    "glm4_moe": Architecture(
        rules=(*COMMON, *QKV_BIAS, *QK_NORM, *DENSE_MLP, *EXPERTS, *shared_experts("shared_experts")),
        buffers=(SELECTION_BIAS,),
        settings=glm4_moe,
    ),
    "dots1": Architecture(
        rules=(*COMMON, *QK_NORM, *DENSE_MLP, *EXPERTS, *shared_experts("shared_experts")),
        buffers=(SELECTION_BIAS,),
        settings=glm4_moe,
    ),
    "deepseek_v2": Architecture(rules=DEEPSEEK, settings=deepseek_v2),
    "deepseek_v3": Architecture(rules=DEEPSEEK, buffers=(SELECTION_BIAS,), settings=deepseek_v3),
}
