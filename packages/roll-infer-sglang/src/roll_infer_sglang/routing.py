"""Routed experts of each token, read from SGLang's responses.

SGLang returns rows for all layers, including those without experts. It covers all tokens of a sequence but the last,
including tokens that were in its prefix cache.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import UnsupportedError
from roll_modeling.architectures import NUMBER_OF_EXPERTS
from roll_modeling.routing import compact

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.types import RoutedExperts


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Expert layout of one mixture-of-experts model."""

    num_layers: int
    layers: tuple[int, ...]
    """Indices of the layers that have experts."""
    top_k: int
    num_experts: int

    @classmethod
    def of(cls, config: Any) -> Routing:
        """Expert layout from a transformers config. Raises `UnsupportedError` if the model has no experts."""
        experts = next((found for name in NUMBER_OF_EXPERTS if (found := getattr(config, name, None))), 0)
        dense, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", None) or 1
        first = getattr(config, "first_k_dense_replace", None) or 0
        every = range(config.num_hidden_layers)
        layers = tuple(each for each in every if each >= first and each not in dense and (each + 1) % step == 0)
        if not experts or not layers:
            raise UnsupportedError(f"router_replay needs experts, and this {config.model_type} has none")
        return cls(num_layers=len(every), layers=layers, top_k=config.num_experts_per_tok, num_experts=experts)

    def read(self, meta: Mapping[str, Any]) -> RoutedExperts | None:
        """Routed experts `[tokens, M, K]` from a response's `meta_info`, M layers with experts; None if missing."""
        if not (text := meta.get("routed_experts")):
            return None
        every = np.frombuffer(base64.b64decode(text), dtype=np.int32).reshape(-1, self.num_layers, self.top_k)
        return compact(every[:, list(self.layers)], self.num_experts)
