"""The words in which an architecture is described to the bridge."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roll_strategy_megatron.bridge.transforms import Transform


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which tensors of a Hugging Face model are one of Megatron's. In names, `{layer}` and `{expert}` are numbers."""

    mcore: str
    """Name in Megatron's model, numbers counted over all stages and ranks."""
    hf: tuple[str, ...]
    """Names in transformers' model. Where `mcore` has `{expert}`, tensors whose first dimension is the experts'."""
    transform: Transform
    stored: tuple[str, ...] = ()
    """Names in files, where these keep experts apart and transformers' model does not."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Of `mcore`."""
        text = re.escape(self.mcore).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
        return re.compile(text)

    @property
    def is_expert(self) -> bool:
        """Whether experts have one each."""
        return "{expert}" in self.mcore


@dataclass(frozen=True, kw_only=True)
class BufferRule:
    """A tensor that is read and not learned, whole on every rank of its stage."""

    mcore: str
    hf: str
    """Also its name in files."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A `model_type` of transformers."""

    rules: tuple[Rule, ...]
    settings: Callable[[Any], Mapping[str, Any]]
    """From transformers' config: arguments of Megatron's `TransformerConfig`. Raises `ModelError` for what Megatron's
    layers cannot compute."""
    buffers: tuple[BufferRule, ...] = ()
    ignored: tuple[str, ...] = field(default=())
    """Regular expressions of names in files that hold nothing to learn."""
