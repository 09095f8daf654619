"""Writes a model as a directory that transformers loads, with or without weights."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import torch

from roll_core.errors import UnsupportedError, one_line
from roll_modeling.lora import base_name
from roll_modeling.model import empty_model, load_tokenizer, quiet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import ModelSpec

log = logging.getLogger(__name__)

PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def check_exportable(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raise `UnsupportedError` if transformers cannot load the task's model."""
    if spec.task != "causal_lm" and not hasattr(model, "score"):
        raise UnsupportedError(f"transformers has no scoring form of {type(model).__name__}, so it cannot be exported")


def write_model(model: PreTrainedModel, spec: ModelSpec, state: Mapping[str, Tensor], path: Path) -> None:
    """Write the model's config, `state`, tokenizer and the settings of its image processor to `path`.

    `state` has the whole tensors under the names of the model's `state_dict`, with tied tensors under both names.
    `model` provides only the config; it may have adapters, which `state` has not. Raises `UnsupportedError`.
    """
    check_exportable(model, spec)
    config = model.config
    parts = (getattr(config, key, None) for key in config.sub_configs)
    configs = [config, *(part for part in parts if part is not None)]
    usual = [part._attn_implementation for part in configs]
    config._attn_implementation = None
    try:
        with quiet():
            model.save_pretrained(path, state_dict=dict(state))
            written = state[base_name(next(name for name, _ in model.named_parameters()))].dtype
            if model.dtype != written:
                # The dtype of the stored tensors, which may differ from the strategy's parameters.
                config.dtype = written
                config.save_pretrained(path)
    finally:
        for part, name in zip(configs, usual, strict=True):  # an image encoder has another one than the rest
            part._attn_implementation = name
    _write_inputs(spec, path)


def write_description(spec: ModelSpec, path: Path) -> None:
    """Write a model's configs and tokenizer, without weights, as transformers loads them.

    Raises `ModelError` or `UnsupportedError` for a model that transformers cannot build from it.
    """
    with torch.random.fork_rng(devices=[]):
        model = empty_model(spec)
    check_exportable(model, spec)
    config = model.config
    config._attn_implementation, config.architectures = None, [type(model).__name__]
    with quiet():
        config.save_pretrained(path)
        if model.can_generate():
            model.generation_config.save_pretrained(path)
    _write_inputs(spec, path)


def _write_inputs(spec: ModelSpec, path: Path) -> None:
    """Write the tokenizer, and copy the settings of the processors of images and video that the model has."""
    from transformers.utils import cached_file

    if spec.tokenizer or spec.path:
        load_tokenizer(spec).save_pretrained(path)
    source = spec.path or spec.tokenizer  # the processor of a new model is beside its tokenizer
    for name in PROCESSORS if source else ():
        try:
            if file := cached_file(source, name, _raise_exceptions_for_missing_entries=False):
                shutil.copyfile(file, path / name)
        except OSError as error:  # the hub cannot be reached; the weights are worth more than this file
            log.warning("%s: %s is not in the export: %s", source, name, one_line(error))
