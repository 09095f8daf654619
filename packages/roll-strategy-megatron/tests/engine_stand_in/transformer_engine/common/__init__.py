"""Recipes for fp8."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
