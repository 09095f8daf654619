"""Small models of every architecture of the bridge, each with what sets it apart from the others."""

from __future__ import annotations

from megatron_programs import DEEPSEEK

from roll_testing.models import QWEN3

ROTATION = {"rope_type": "default", "rope_theta": 500.0}
WITHOUT_HEAD_DIM = {key: value for key, value in QWEN3.items() if key != "head_dim"}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
BY_KIND = {"sliding_attention": ROTATION, "full_attention": {"rope_type": "default", "rope_theta": 3000.0}}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
SHARED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
GEMMA = QWEN3 | WINDOWS | {"query_pre_attn_scalar": 5, "tie_word_embeddings": True}
MODELS = {
    "seed_oss": QWEN3 | {"model_type": "seed_oss", "attention_bias": True, "residual_dropout": 0.0},
    "smollm3": WITHOUT_HEAD_DIM | {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "phi3": WITHOUT_HEAD_DIM
    | {"model_type": "phi3", "sliding_window": 4, "rope_parameters": ROTATION | {"partial_rotary_factor": 0.5}},
    "ernie4_5": QWEN3 | {"model_type": "ernie4_5"},
    "granite": WITHOUT_HEAD_DIM
    | {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "glm4": QWEN3
    | {
        "model_type": "glm4",
        "attention_bias": True,
        "rope_parameters": ROTATION | {"partial_rotary_factor": 0.5},
    },
    "gemma2": GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA | {"model_type": "gemma3_text", "rope_parameters": BY_KIND},
    "olmo2": WITHOUT_HEAD_DIM | {"model_type": "olmo2"},
    "olmo3": WITHOUT_HEAD_DIM
    | WINDOWS
    | {"model_type": "olmo3", "rope_parameters": {"sliding_attention": ROTATION, "full_attention": YARN}},
    "qwen2_moe": WITHOUT_HEAD_DIM
    | {
        "model_type": "qwen2_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20,
        "mlp_only_layers": [0],
    },
    "olmoe": WITHOUT_HEAD_DIM | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": QWEN3
    | WINDOWS
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.5,
        "rope_parameters": YARN,
    },
    "minimax_m2": QWEN3
    | {
        "model_type": "minimax_m2",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": ROTATION | {"partial_rotary_factor": 0.5},
    },
    "glm4_moe": QWEN3 | SHARED | {"model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True},
    "dots1": QWEN3 | SHARED | WINDOWS | {"model_type": "dots1"},
    "deepseek_v2": {key: value for key, value in DEEPSEEK.items() if not key.endswith("_group")}
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy", "num_hidden_layers": 2},
}
