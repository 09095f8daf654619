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

LARGE: Mapping[str, Any] = {
    **QWEN3,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "initializer_range": 0.02,
}
"""A model with 8.7 million parameters."""

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
    return save_model(model, folder, task, vocab_size)


def save_model(model: PreTrainedModel, folder: Path, task: Task, vocab_size: int) -> ModelSpec:
    """Write a model, and a tokenizer of single characters beside it."""
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
