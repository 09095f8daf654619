"""Stand-ins for the modules of Transformer Engine."""

from transformer_engine.pytorch import distributed, fp8, ops
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.module.linear import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "ops",
]

quantized_model_init = None
"""For fp8."""
