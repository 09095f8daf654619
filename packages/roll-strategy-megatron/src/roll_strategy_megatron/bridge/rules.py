"""Declarative description of an architecture for the bridge."""

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
    """Mapping of Hugging Face's tensors to one of Megatron's. Names contain `{layer}` and `{expert}` for indices."""

    mcore: str
    """Name in Megatron's model, with indices counted over all stages and ranks."""
    hf: tuple[str, ...]
    """Names in transformers' model. If `mcore` has `{expert}`, the first dimension of these tensors is the expert."""
    transform: Transform
    stored: tuple[str, ...] = ()
    """Names in checkpoint files, if these store experts separately and transformers' model does not."""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression that matches `mcore`."""
        text = re.escape(self.mcore).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
        return re.compile(text)

    @property
    def is_expert(self) -> bool:
        """True if the rule describes one tensor per expert."""
        return "{expert}" in self.mcore


@dataclass(frozen=True, kw_only=True)
class BufferRule:
    """Mapping of a buffer: loaded, not trained, and replicated on every rank of its stage."""

    mcore: str
    hf: str
    """Name in transformers' model."""
    stored: str = ""
    """Name in checkpoint files, if it differs."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Rules and settings of one `model_type` of transformers."""

    rules: tuple[Rule, ...]
    settings: Callable[[Any], Mapping[str, Any]]
    """Function from transformers' config to arguments of `layers.DecoderConfig`.

    Raises `ModelError` for settings that Megatron's layers cannot compute.
    """
    buffers: tuple[BufferRule, ...] = ()
    ignored: tuple[str, ...] = field(default=())
    """Regular expressions of tensor names in checkpoint files that are ignored."""
