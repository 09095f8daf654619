"""A role's model as SGLang wants it: a folder of files, and the ids that end a response."""

from __future__ import annotations

import json
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError
from roll_core.modeling.model import end_token_ids, load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What the engine is started with."""

    arguments: dict[str, Any]
    """Of the engine: where model and tokenizer are."""
    end_ids: tuple[int, ...]
    """End-of-sequence ids."""
    vocab_size: int
    max_positions: int
    """Tokens of the longest sequence that the model takes."""


@contextmanager
def model_files(spec: ModelSpec) -> Iterator[ModelFiles]:
    """The files of `spec`, for as long as the engine starts. Raises `ModelError`."""
    with tempfile.TemporaryDirectory(prefix="roll-sglang-") as scratch:
        if spec.attn_implementation != "auto":
            raise ModelError(
                f"model_args.attn_implementation is {spec.attn_implementation}, but SGLang has attention of its own:"
                " leave it out here; strategy_config.attention_backend chooses among SGLang's"
            )
        stored = spec
        if spec.random_init is not None:
            stored = replace(spec, path=str(Path(scratch, "model")), random_init=None, config_overrides={})
            load_model(spec).save_pretrained(stored.path)
        config = load_config(stored)
        arguments: dict[str, Any] = {"model_path": stored.path}
        if stored.config_overrides:
            arguments["json_model_override_args"] = json.dumps(stored.config_overrides)
        tokenizer = spec.tokenizer or (spec.path if _has_tokenizer(spec.path) else "")
        arguments |= {"tokenizer_path": tokenizer} if tokenizer else {"skip_tokenizer_init": True}
        text = config.get_text_config()
        vocab_size = int(text.vocab_size)
        ends = end_token_ids(config, _generation_config(stored), vocab_size)
        if not ends and tokenizer:
            end = load_tokenizer(spec).eos_token_id
            ends = (end,) if isinstance(end, int) else ()
        yield ModelFiles(
            arguments=arguments,
            end_ids=ends,
            vocab_size=vocab_size,
            max_positions=int(text.max_position_embeddings),
        )


def _generation_config(stored: ModelSpec) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(stored.path)
    except OSError:  # the model has none
        return None


def _has_tokenizer(path: str) -> bool:
    """A hub id is taken to have one."""
    folder = Path(path)
    return bool(path) and (not folder.is_dir() or any(folder.glob("tokenizer*")))
