"""A tiny config of each model type that the tables of supported models (`models.json` of the plugins) have.

A tiny model has two layers, or one of each kind of layer that the type has, and sizes that the kernels of all engines
accept on a CPU: heads of 32 units, and expert sizes that are multiples of 32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shared_tests.tiny_architectures import MULTIMODAL

if TYPE_CHECKING:
    from collections.abc import Mapping

VOCABULARY = 64
_NAMES = """
    afmoe apertus arcee axk1 axk2 bailing_hybrid bamba biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl cwm
    dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 dots3_note_text ernie4_5 ernie4_5_moe
    exaone exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
    gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_oss gptj granite
    granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text inkling2_text internlm3 iquestcoder jais2 jamba jetmoe
    kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash mamba mamba2 mellum
    mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral
    modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp_text
    recurrent_gemma rwkv sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm xlstm
    youtu zamba zamba2 zaya
"""
TEXT_TYPES: tuple[str, ...] = tuple(_NAMES.split())
"""Language models of transformers that can be trained on text: all of its causal language models, without encoders
(BERT), decoders of translation (Marian) and models of audio."""
TYPES: tuple[str, ...] = tuple(sorted((*TEXT_TYPES, *MULTIMODAL)))
"""All types of the tables."""

WIDTH, INNER, LAYERS, HEADS, KEY_HEADS, HEAD = 128, 96, 2, 4, 2, 32
EXPERTS, CHOSEN, EXPERT = 4, 2, 32
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_dim", "word_embed_proj_dim", "lru_width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), INNER),
    **dict.fromkeys(("dff", "dense_intermediate_size", "prefix_dense_intermediate_size"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), KEY_HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "v_head_dim", "qk_nope_head_dim"), HEAD),
    "swa_num_attention_heads": HEADS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), CHOSEN),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), EXPERT),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), EXPERT),
    **dict.fromkeys(("n_group", "topk_group", "num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    "num_expert_group": 1,
    "zero_expert_num": CHOSEN,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "index_head_dim", "indexer_head_dim"), 16),
    **dict.fromkeys(
        ("index_n_heads", "indexer_n_heads"), 16
    ),  # with few heads many scores are 0, and their order chance
    "index_topk": 5,
    "index_block_size": 4,
    "index_topk_blocks": 1,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "block_size"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 8),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("vocab_size_per_layer_input", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "context_length", "max_seq_len"), 512),
    **dict.fromkeys(("eos_token_id", "bos_token_id"), 1),
    **dict.fromkeys(("initializer_range", "init_std"), 0.1),
}
"""Values of config keys, for the types that have the key."""
LATENT = {"num_key_value_heads": HEADS, "head_dim": SIZES["qk_rope_head_dim"]}
"""Values of the types with latent attention."""
WINDOWS = ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention")
"""Keys with the number of tokens that a query sees; null in types without windows."""
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
"""Keys with the kind of each layer."""
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "codegen": {"rotary_dim": 16},
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {
        "attn_config": {"kv_n_heads": KEY_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": CHOSEN},
    },
    "dots3_note_text": {"layer_types": ["indexed_attention"] * 2},
    "dots1": {"norm_topk_prob": True},
    "falcon_h1": {"mamba_d_ssm": 256},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "glm4_moe": {"head_dim": HEAD},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 16},
    "granitemoeshared": {"shared_intermediate_size": EXPERT},
    "granitemoehybrid": {"shared_intermediate_size": EXPERT, "layer_types": ["mamba", "attention"]},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "minimax_m3_vl_text": {"rotary_dim": 16, "shared_intermediate_size": EXPERT},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv": {"num_attention_heads": HEADS},  # SGLang reads it before it rejects the type
    "xlstm": {"num_attention_heads": HEADS},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}
"""Keys of single types."""


def tiny_config(model_type: str) -> dict[str, Any]:
    """Keys of a tiny model's transformers config, without `vocab_size`. Imports transformers."""
    if model_type in MULTIMODAL:
        return dict(MULTIMODAL[model_type])
    from transformers import CONFIG_MAPPING

    default = vars(CONFIG_MAPPING[model_type]())
    keys = {key: value for key, value in SIZES.items() if key in default}
    keys |= {key: 8 for key in WINDOWS if default.get(key)}
    kinds = {key: list(dict.fromkeys(default[key])) for key in KINDS if default.get(key)}
    if default.get("kv_lora_rank"):  # latent attention has no groups of heads, and `head_dim` is the rotary part
        keys |= {key: value for key, value in LATENT.items() if key in default}
    num_layers = max(LAYERS, *map(len, kinds.values())) if kinds else LAYERS
    if num_layers > LAYERS:
        keys["num_hidden_layers"] = num_layers
    for key, each in kinds.items():
        keys[key] = [each[i % len(each)] for i in range(num_layers)]
    return {"model_type": model_type, **keys, **SPECIAL.get(model_type, {})}
