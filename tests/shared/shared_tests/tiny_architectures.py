"""Configs of tiny models whose layers differ from those of `roll_testing.models`, for tests of strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_testing.models import QWEN3, save_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from roll_core.spec.model import ModelSpec

DEEPSEEK: Mapping[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "initializer_range": 0.2,
}
"""Latent attention whose values are smaller than its keys, grouped experts, and one layer without experts. The choice
of experts depends on the router's scores and on a bias that is not trained here: a buffer."""

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXER = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_MAMBA = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "initializer_range": 0.2}
MIXERS: Mapping[str, Mapping[str, Any]] = {
    "mamba": {"model_type": "mamba", **_MAMBA},
    "mamba2": {"model_type": "mamba2", **_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "falcon_h1": {"model_type": "falcon_h1", **_SIZES, **_MIXER, "head_dim": 8, "mamba_d_ssm": 64},
    "bamba": {"model_type": "bamba", **_SIZES, **_MIXER, "attn_layer_indices": [1]},
    "nemotron_h": {
        "model_type": "nemotron_h",
        **{key: value for key, value in _SIZES.items() if key != "num_hidden_layers"},
        "head_dim": 8,
        "layers_block_type": ["mamba", "moe", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
}
"""Models with state-space mixers, alone or beside attention and experts."""
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v3": {**DEEPSEEK, "vocab_size": 61},
    "qwen3_next": {
        "model_type": "qwen3_next",
        **_SIZES,
        **_EXPERTS,
        "head_dim": 8,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "hunyuan_v1_moe": {"model_type": "hunyuan_v1_moe", **_SIZES, "head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "phimoe": {"model_type": "phimoe", **_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Mixtures of experts that also have layers with the names of the experts' layers, or a router that is a subclass of
`torch.nn.Linear`."""

LONGROPE: Mapping[str, Any] = {
    "model_type": "phi3",
    "pad_token_id": 0,
    "original_max_position_embeddings": 6,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 2.5, 3.0],
        "original_max_position_embeddings": 6,
        "factor": 1.0,
    },
}
"""Sequences of more than 6 tokens have other rotary frequencies. To be completed by sizes with 8 units per head."""

_TEXT = {key: value for key, value in QWEN3.items() if key not in ("model_type", "rope_parameters")} | {
    "vocab_size": 61
}
_ENGINE_TEXT = _TEXT | {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "initializer_range": 0.1,
}
"""Sizes that engines compute on a CPU."""
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
MULTIMODAL: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"model_type": "gemma3", "text_config": _ENGINE_TEXT | {"sliding_window": 4}, "vision_config": _VISION},
    "mistral3": {
        "model_type": "mistral3",
        "text_config": _ENGINE_TEXT | {"model_type": "mistral"},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": _ENGINE_TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4]}},
        "vision_config": _QWEN_VISION | {"intermediate_size": 64, "out_hidden_size": 64},
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": _ENGINE_TEXT
        | {
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        "vision_config": _QWEN_VISION | {"out_hidden_size": 64},
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": _ENGINE_TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4]}},
        "vision_config": _QWEN_VISION | {"intermediate_size": 64, "out_hidden_size": 64},
    },
}
"""Models that also take images: a language model beside a vision tower. The vocabulary has 61 tokens."""


def write_multimodal(folder: Path, model_type: str) -> ModelSpec:
    """Like `write_checkpoint`, for a causal language model of `MULTIMODAL`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**MULTIMODAL[model_type]))
    return save_model(model, folder, "causal_lm", _TEXT["vocab_size"])
