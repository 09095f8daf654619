"""The provider of GPT models, as far as the template reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer import TransformerConfig


def default_layer_spec(config: Any) -> Any:
    raise NotImplementedError


@dataclass
class GPTModelProvider(TransformerConfig):
    transformer_layer_spec: Any = default_layer_spec
    vocab_size: int | None = None
