"""Small models and batches for tests: small enough for a laptop, irregular enough to expose mistakes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.pack import FLOATS, GATHERED
from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig
from roll_core.spec.model import ModelSpec
from roll_core.types import TrainSequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from roll_core.spec.providers import Task

QWEN3: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
"""Grouped-query attention, normalized queries and keys, and a RoPE base that is not the default."""

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

LARGE: Mapping[str, Any] = {
    **QWEN3,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "initializer_range": 0.02,
}
"""A model with 8.7 million parameters."""

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
    "gemma3": {"model_type": "gemma3", "text_config": _TEXT | {"sliding_window": 4}, "vision_config": _VISION},
    "mistral3": {
        "model_type": "mistral3",
        "text_config": _TEXT | {"model_type": "mistral"},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8},
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": _TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": _QWEN_VISION,
    },
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": _TEXT
        | {
            "layer_types": ["full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "vision_config": _QWEN_VISION,
    },
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": _TEXT, "vision_config": _QWEN_VISION},
}
"""Models that also take images: a language model beside a vision tower. The vocabulary has 61 tokens."""

LENGTHS = (5, 1, 9, 3, 12, 2, 7, 4)
"""Lengths of a batch's sequences. One sequence has nothing to predict, another a single token."""
FIRST_CHARACTER = ord("0")
SPECIAL_TOKENS = 2
"""Number of special tokens in each of our tokenizers: padding and end."""
NUM_IDS = 3
"""Token ids of each token whose logprobs a loss may request."""
NO_LOSS = 3
"""Index of a sequence without any token in the loss."""


def write_checkpoint(folder: Path, architecture: Mapping[str, Any], *, task: Task, vocab_size: int) -> ModelSpec:
    """Write a Hugging Face directory with random float32 weights and a tokenizer of single characters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    labels = {} if task == "causal_lm" else {"num_labels": 1}
    config = AutoConfig.for_model(**architecture, **labels, vocab_size=vocab_size, pad_token_id=0)
    auto = AutoModelForCausalLM if task == "causal_lm" else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = auto.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # norms are initialized to 1, biases to 0: both would hide mistakes
            if parameter.ndim < 2:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
    return _written(model, folder, task, vocab_size)


def write_multimodal(folder: Path, model_type: str) -> ModelSpec:
    """Like `write_checkpoint`, for a causal language model of `MULTIMODAL`."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**MULTIMODAL[model_type]))
    return _written(model, folder, "causal_lm", _TEXT["vocab_size"])


def _written(model: PreTrainedModel, folder: Path, task: Task, vocab_size: int) -> ModelSpec:
    model.save_pretrained(folder)
    alphabet = "".join(chr(FIRST_CHARACTER + i) for i in range(min(vocab_size, 40) - SPECIAL_TOKENS))
    make_tokenizer(TokenizerConfig(kind="char", alphabet=alphabet), (), folder)
    return ModelSpec(task=task, path=str(folder))


def make_batch(vocab_size: int, *, seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[TrainSequence]:
    """Return sequences of different lengths with every field that a loss of this project reads."""
    rng = np.random.default_rng(seed)
    batch = []
    for index, length in enumerate(lengths):
        first = length if index == NO_LOSS else max(1, min(2, length - 1))
        mask = np.arange(length) >= first
        noise = rng.normal(size=(4, length)).astype(np.float32)
        batch.append(
            TrainSequence(
                id=f"batch-{seed}-{index}",
                tokens=rng.integers(0, vocab_size, length),
                loss_mask=mask,
                group=index // 2,
                old_logprobs=np.where(mask, -4.0 + 0.3 * noise[0], 0).astype(np.float32),
                advantages=np.where(mask, noise[1], 0).astype(np.float32),
                returns=np.where(mask, noise[2], 0).astype(np.float32),
                values=np.where(mask, noise[3], 0).astype(np.float32),
                gather_ids=np.random.default_rng([seed, index]).integers(0, vocab_size, (length, NUM_IDS)),
            )
        )
    return batch


def cut_rollouts(batch: Sequence[TrainSequence], *, seed: int = 0) -> list[TrainSequence]:
    """Cut each sequence into one to four rows of one rollout, and shuffle the rows.

    A row is a beginning of its sequence; every token of a loss mask or stream counts in exactly one of the rows.
    """
    rng = np.random.default_rng(seed)
    rows: list[TrainSequence] = []
    for index, sequence in enumerate(batch):
        ends = sorted({*rng.integers(1, len(sequence) + 1, rng.integers(0, 4)).tolist(), len(sequence)})
        for start, end in zip([0, *ends], ends, strict=False):
            new = np.arange(end) >= start
            fields = {
                name: values[:end] for name in (*FLOATS, *GATHERED) if (values := getattr(sequence, name)) is not None
            }
            rows.append(
                replace(
                    sequence,
                    id=f"{sequence.id}/{end}",
                    tokens=sequence.tokens[:end],
                    loss_mask=sequence.loss_mask[:end] & new,
                    rollout=index,
                    streams={name: weights[:end] * new for name, weights in sequence.streams.items()},
                    **fields,
                )
            )
    return [rows[i] for i in rng.permutation(len(rows))]
