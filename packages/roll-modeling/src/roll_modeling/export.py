"""Writes a model as a directory that transformers loads, or what it is without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from roll_core.errors import UnsupportedError
from roll_modeling.model import empty_model, load_tokenizer, quiet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec


def check_exportable(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises `UnsupportedError` where the task has no form that transformers loads."""
    if spec.task != "causal_lm" and not hasattr(model, "score"):
        raise UnsupportedError(f"transformers has no scoring form of {type(model).__name__}, so it cannot be exported")


def write_model(model: PreTrainedModel, spec: ModelSpec, state: Mapping[str, Tensor], path: Path) -> None:
    """`state` are the whole tensors by the names of the model's `state_dict`, tied ones the same tensor twice; the
    model itself only says how it is configured. The tokenizer comes along."""
    check_exportable(model, spec)
    config = model.config
    usual, config._attn_implementation = config._attn_implementation, None
    try:
        with quiet():
            model.save_pretrained(path, state_dict=dict(state))
            written = state[next(name for name, _ in model.named_parameters())].dtype
            if model.dtype != written:
                # Of the tensors in the files, not of those from which a strategy made them.
                config.dtype = written
                config.save_pretrained(path)
    finally:
        config._attn_implementation = usual
    if spec.tokenizer or spec.path:
        load_tokenizer(spec).save_pretrained(path)


def write_description(spec: ModelSpec, path: Path) -> None:
    """All of such a directory but the weights: configs and tokenizer. Raises `ModelError` or `UnsupportedError` for a
    model that transformers could not be told to make from it."""
    with torch.random.fork_rng(devices=[]):
        model = empty_model(spec)
    check_exportable(model, spec)
    config = model.config
    config._attn_implementation, config.architectures = None, [type(model).__name__]
    with quiet():
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)
    if spec.tokenizer or spec.path:
        load_tokenizer(spec).save_pretrained(path)
