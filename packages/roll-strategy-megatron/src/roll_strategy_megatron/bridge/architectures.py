"""Llama and related architectures: Mistral, Qwen2, Qwen3, and the MoE models Qwen3-MoE and Mixtral."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError
from roll_strategy_megatron.bridge.rules import Architecture, Rule
from roll_strategy_megatron.bridge.transforms import Copy, FuseGateUp, FuseQKV, Vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

HF, MCORE = "model.layers.{layer}.", "decoder.layers.{layer}."
ATTENTION = tuple(f"{HF}self_attn.{each}_proj" for each in "qkv")

COMMON = (
    Rule(mcore="embedding.word_embeddings.weight", hf=("model.embed_tokens.weight",), transform=Vocabulary()),
    Rule(mcore="output_layer.weight", hf=("lm_head.weight",), transform=Vocabulary()),
    Rule(mcore="decoder.final_layernorm.weight", hf=("model.norm.weight",), transform=Copy()),
    Rule(mcore=f"{MCORE}input_layernorm.weight", hf=(f"{HF}input_layernorm.weight",), transform=Copy()),
    Rule(mcore=f"{MCORE}pre_mlp_layernorm.weight", hf=(f"{HF}post_attention_layernorm.weight",), transform=Copy()),
    Rule(
        mcore=f"{MCORE}self_attention.linear_qkv.weight",
        hf=tuple(f"{each}.weight" for each in ATTENTION),
        transform=FuseQKV(),
    ),
    Rule(
        mcore=f"{MCORE}self_attention.linear_proj.weight",
        hf=(f"{HF}self_attn.o_proj.weight",),
        transform=Copy(tp_dim=1),
    ),
)
QKV_BIAS = (
    Rule(
        mcore=f"{MCORE}self_attention.linear_qkv.bias",
        hf=tuple(f"{each}.bias" for each in ATTENTION),
        transform=FuseQKV(),
    ),
)
QK_NORM = tuple(
    Rule(
        mcore=f"{MCORE}self_attention.{each}_layernorm.weight",
        hf=(f"{HF}self_attn.{each}_norm.weight",),
        transform=Copy(),
    )
    for each in "qk"
)
DENSE_MLP = (
    Rule(
        mcore=f"{MCORE}mlp.linear_fc1.weight",
        hf=(f"{HF}mlp.gate_proj.weight", f"{HF}mlp.up_proj.weight"),
        transform=FuseGateUp(),
    ),
    Rule(mcore=f"{MCORE}mlp.linear_fc2.weight", hf=(f"{HF}mlp.down_proj.weight",), transform=Copy(tp_dim=1)),
)


def experts(stored: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules of MoE layers.

    `stored` is the module's prefix in checkpoint files; `gate`, `up` and `down` are the names of an expert's matrices
    there.
    """
    mcore = f"{MCORE}mlp.experts.local_experts.{{expert}}."
    return (
        Rule(mcore=f"{MCORE}mlp.router.weight", hf=(f"{HF}mlp.gate.weight",), transform=Copy(), stored=_router(stored)),
        Rule(
            mcore=f"{mcore}linear_fc1.weight",
            hf=(f"{HF}mlp.experts.gate_up_proj",),
            transform=FuseGateUp(),
            stored=(f"{stored}.experts.{{expert}}.{gate}.weight", f"{stored}.experts.{{expert}}.{up}.weight"),
        ),
        Rule(
            mcore=f"{mcore}linear_fc2.weight",
            hf=(f"{HF}mlp.experts.down_proj",),
            transform=Copy(tp_dim=1),
            stored=(f"{stored}.experts.{{expert}}.{down}.weight",),
        ),
    )


def _router(stored: str) -> tuple[str, ...]:
    return () if stored == f"{HF}mlp" else (f"{stored}.gate.weight",)


# -- settings ----------------------------------------------------------------------------------------------------------


def dense(config: Any) -> Mapping[str, Any]:
    """Settings of a dense model: RMSNorm, SiLU-gated feed-forward layers, no biases, grouped-query attention.

    Raises `ModelError` for other activations, for biases, and for different kinds of attention among the layers.
    """
    import torch.nn.functional as F

    if config.hidden_act not in ("silu", "swish"):
        raise ModelError(f"{config.model_type}: hidden_act is {config.hidden_act!r}; the bridge supports only silu")
    if getattr(config, "mlp_bias", False):
        raise ModelError(f"{config.model_type}: mlp_bias is true; the bridge supports only false")
    if getattr(config, "attention_bias", False):
        raise ModelError(f"{config.model_type}: attention_bias is true; the bridge supports only false")
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
        "activation_func": F.silu,
        "add_bias_linear": False,
        "window_size": _window(config),
    }


def _window(config: Any) -> tuple[int, int] | None:
    """Sliding window as Megatron's `window_size`; None for full attention. All layers must have the same kind."""
    size = getattr(config, "sliding_window", None)
    if size is None or not getattr(config, "use_sliding_window", True):
        return None
    kinds = set(getattr(config, "layer_types", None) or ("sliding_attention",))
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ModelError(f"{config.model_type}: its layers attend in different ways ({', '.join(sorted(kinds))})")
    return size - 1, 0


def qwen2(config: Any) -> Mapping[str, Any]:
    """Settings of Qwen2: a dense model with biases of queries, keys and values."""
    return {**dense(config), "add_qkv_bias": True}


def qwen3(config: Any) -> Mapping[str, Any]:
    """Settings of Qwen3: a dense model with normalized queries and keys."""
    return {**dense(config), "qk_layernorm": True}


def mixture(config: Any, *, num_experts: int, expert_size: int, renormalised: bool) -> Mapping[str, Any]:
    """Settings of MoE layers without shared experts; softmax after top-k if `renormalised`, otherwise before."""
    return {
        "num_moe_experts": num_experts,
        "moe_ffn_hidden_size": expert_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not renormalised,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def qwen3_moe(config: Any) -> Mapping[str, Any]:
    """Settings of Qwen3-MoE, in which every layer is an MoE layer."""
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ModelError("qwen3_moe: only some layers have experts; the bridge supports only models in which all have")
    return {
        **qwen3(config),
        **mixture(
            config,
            num_experts=config.num_local_experts,
            expert_size=config.moe_intermediate_size,
            renormalised=config.norm_topk_prob,
        ),
    }


def mixtral(config: Any) -> Mapping[str, Any]:
    """Settings of Mixtral, in which every layer is an MoE layer."""
    return {
        **dense(config),
        **mixture(
            config,
            num_experts=config.num_local_experts,
            expert_size=config.intermediate_size,
            renormalised=True,
        ),
    }


QWEN_EXPERTS = experts(f"{HF}mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERTS = experts(f"{HF}block_sparse_moe", "w1", "w3", "w2")
LLAMA = Architecture(
    rules=(*COMMON, *DENSE_MLP), settings=dense, ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
)
BUILTIN: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": Architecture(rules=(*COMMON, *QKV_BIAS, *DENSE_MLP), settings=qwen2),
    "qwen3": Architecture(rules=(*COMMON, *QK_NORM, *DENSE_MLP), settings=qwen3),
    "qwen3_moe": Architecture(rules=(*COMMON, *QK_NORM, *QWEN_EXPERTS), settings=qwen3_moe),
    "mixtral": Architecture(rules=(*COMMON, *MIXTRAL_EXPERTS), settings=mixtral),
}
