"""Compares the vocabularies of student and teachers. Reads JSON files of models, never a model.

A teacher must give each token the student's id: logprobs and hidden states belong to ids.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.spec.model import is_hub_id, model_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import ModelArguments

Vocabulary = dict[str, int]
"""Id of each token."""


def stored_vocabulary(path: str) -> Vocabulary | None:
    """Vocabulary in `tokenizer.json` of a directory; None without such a file."""
    file = Path(path).expanduser() / "tokenizer.json"
    try:
        return _read(file, file.stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=4)
def _read(file: Path, changed: int) -> Vocabulary | None:
    """Vocabulary in a file that was last changed at this time."""
    try:
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        vocab = stored["model"]["vocab"]
        pairs = vocab.items() if isinstance(vocab, dict) else ((token, index) for index, (token, _) in enumerate(vocab))
        return {**dict(pairs), **{token["content"]: token["id"] for token in stored.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def vocabulary_size(model: ModelArguments, pretrain: str | None) -> int | None:
    """Number of ids of a model; None if its config is not local."""
    keys: Mapping[str, Any] = model_keys(model.model_dump(), pretrain)
    text = keys.get("text_config")
    size = keys.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def hub_vocabulary_size(path: str, *, trust_remote_code: bool) -> int | None:
    """Number of ids of a model on the Hub; None for other models, and if its config cannot be loaded."""
    if not is_hub_id(path) or Path(path).exists():
        return None
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError):
        return None
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else None


def difference(ours: Vocabulary | None, theirs: Vocabulary | None, own_size: int | None, their_size: int | None) -> str:
    """Why a teacher's vocabulary differs from the student's; empty if it does not, as far as is known.

    Equal tokenizers may have padded vocabularies of different sizes, so sizes count only without a tokenizer.
    """
    if ours is not None and theirs is not None:
        if ours == theirs:
            return ""
        token, number = min(ours.items() ^ theirs.items())
        whose = "the student" if ours.get(token) == number else "the teacher"
        return (
            f"its tokenizer has {len(theirs)} tokens and differs from the student's {len(ours)}: only {whose} has token"
            f" {token!r} with id {number}"
        )
    if None not in (own_size, their_size) and own_size != their_size:
        return f"its vocabulary has {their_size} ids, the student's {own_size}"
    return ""
