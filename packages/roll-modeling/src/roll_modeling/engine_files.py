"""A role's model as inference engines take it: a folder of files, its tokenizer, its sizes and the ids that end a
response."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import ModelError
from roll_modeling.model import end_token_ids, load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    """What an engine is started with."""

    model: str
    """A folder, or a hub id."""
    overrides: Mapping[str, Any]
    """Of the config that is stored there."""
    tokenizer: str
    """A folder, or a hub id; empty where the model has none."""
    end_ids: tuple[int, ...]
    """End-of-sequence ids."""
    config: Any
    """transformers' config, with the overrides."""
    scratch: Path
    """For further files; gone when the engine has started."""

    @property
    def text_config(self) -> Any:
        """Of the language model, where there are others beside it."""
        return self.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Of the embeddings."""
        return int(self.text_config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the model takes."""
        return int(self.text_config.max_position_embeddings)

    @property
    def head_size(self) -> int:
        """Of attention."""
        text = self.text_config
        return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


@contextmanager
def engine_files(spec: ModelSpec, engine: str) -> Iterator[EngineFiles]:
    """The files of `spec` for as long as an engine starts, which errors call `engine`. Raises `ModelError`."""
    if spec.attn_implementation != "auto":
        raise ModelError(
            f"model_args.attn_implementation is {spec.attn_implementation}, but {engine} has attention of its own:"
            f" leave it out here; strategy_config.attention_backend chooses among {engine}'s"
        )
    with tempfile.TemporaryDirectory(prefix="roll-engine-") as scratch:
        stored = spec
        if spec.random_init is not None:
            stored = replace(spec, path=str(Path(scratch, "model")), random_init=None, config_overrides={})
            load_model(spec).save_pretrained(stored.path)
        config = load_config(stored)
        tokenizer = spec.tokenizer or (spec.path if _has_tokenizer(spec.path) else "")
        ends = end_token_ids(config, _generation_config(stored), int(config.get_text_config().vocab_size))
        if not ends and tokenizer:
            end = load_tokenizer(spec).eos_token_id
            ends = (end,) if isinstance(end, int) else ()
        yield EngineFiles(
            model=stored.path,
            overrides=stored.config_overrides,
            tokenizer=tokenizer,
            end_ids=ends,
            config=config,
            scratch=Path(scratch),
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
