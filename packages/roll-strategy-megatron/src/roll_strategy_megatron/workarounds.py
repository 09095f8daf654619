"""Workarounds for megatron-core 0.16."""

from __future__ import annotations


def name_missing_kernel() -> None:
    """Define `te_general_gemm` for MoE routers without Transformer Engine.

    Otherwise they fail with `NameError: te_general_gemm`: Megatron compares the name with None, but its failed import
    does not define it. Affects megatron-core 0.16.0 and 0.16.1.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def latent_attention_without_engine() -> None:
    """Disable Megatron's use of Transformer Engine in latent attention if Transformer Engine is missing.

    Otherwise it fails with `TypeError: isinstance() arg 2 must be a type`: Megatron's wrapper module can be imported
    without Transformer Engine but contains no class. Affects megatron-core 0.16.0 and 0.16.1.
    """
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
