"""A role's model as inference engines load it: model directory, tokenizer, sizes and end-of-sequence ids."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.data.processor import loaded_processor, save_processor
from roll_core.errors import ModelError
from roll_modeling.model import end_token_ids, layer_configs, load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.data.processor import Processor
    from roll_core.spec.model import ModelSpec


INTERLEAVED = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Types whose rotary frequencies are dealt to the axes of image positions in turn, not in sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    """Inputs for starting an engine."""

    model: str
    """Directory or hub id."""
    overrides: Mapping[str, Any]
    """Overrides of the stored config."""
    tokenizer: str
    """Directory or hub id; empty if the model has no tokenizer."""
    end_ids: tuple[int, ...]
    """End-of-sequence ids of the model."""
    processor: Processor | None
    """Processor of images; None if the model reads text alone."""
    config: Any
    """Config of transformers, with the overrides applied."""
    scratch: Path
    """Directory for further files; deleted after the engine's start."""

    @property
    def text_config(self) -> Any:
        """Config of the language model inside a multimodal config, or the config itself."""
        return self.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the embeddings."""
        return int(self.text_config.vocab_size)

    @property
    def max_positions(self) -> int:
        """Maximum sequence length of the model, in tokens."""
        return int(self.text_config.max_position_embeddings)

    @property
    def head_sizes(self) -> set[int]:
        """Sizes of attention heads: one, unless layers differ."""
        return {
            int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)
            for layer in layer_configs(self.config)
        }


@contextmanager
def engine_files(spec: ModelSpec, engine: str) -> Iterator[EngineFiles]:
    """Prepare the files of `spec` for the duration of an engine's start. `engine` is its name in error messages.

    Models of `random_init` are created and saved to a temporary directory. Raises `ModelError`.
    """
    if spec.attn_implementation != "auto":
        raise ModelError(
            f"model_args.attn_implementation is {spec.attn_implementation}, but {engine} has its own attention:"
            f" remove the key; strategy_config.attention_backend selects one of {engine}'s kernels"
        )
    with tempfile.TemporaryDirectory(prefix="roll-engine-") as scratch:
        stored = spec
        if spec.random_init is not None:
            stored = replace(spec, path=str(Path(scratch, "model")), random_init=None, config_overrides={})
            load_model(spec).save_pretrained(stored.path)
            if spec.tokenizer:
                save_processor(spec.tokenizer, Path(stored.path))
        config = load_config(stored)
        tokenizer = spec.tokenizer or (spec.path if _has_tokenizer(spec.path) else "")
        loaded = load_tokenizer(spec) if tokenizer else None
        text = config.get_text_config()
        vocab_size, has_parts = int(text.vocab_size), text is not config
        yield EngineFiles(
            model=stored.path,
            overrides=stored.config_overrides,
            tokenizer=tokenizer,
            end_ids=end_token_ids(config, _generation_config(stored), vocab_size, loaded),
            processor=loaded_processor(loaded) if loaded is not None and has_parts else None,
            config=config,
            scratch=Path(scratch),
        )


def interleaved_rope(config: Any) -> dict[str, Any]:
    """Keys of the language model's config without which engines deal frequencies to the axes of positions in sections.

    transformers does not need them, so that a model of `random_init` lacks them. Empty for other types.
    """
    if config.model_type not in INTERLEAVED:
        return {}
    return {"rope_parameters": {"mrope_interleaved": True, **(config.get_text_config().rope_parameters or {})}}


def _generation_config(stored: ModelSpec) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(stored.path)
    except OSError:  # the model has no generation config
        return None


def _has_tokenizer(path: str) -> bool:
    """True if `path` has tokenizer files. Hub ids are assumed to have them."""
    folder = Path(path)
    return bool(path) and (not folder.is_dir() or any(folder.glob("tokenizer*")))
