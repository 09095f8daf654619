"""What megatron-core 0.16 has to be helped with."""

from __future__ import annotations


def name_missing_kernel() -> None:
    """Without Transformer Engine the router of a mixture fails with `NameError: te_general_gemm`: the import that fails
    does not leave the name behind, which the code then compares with None. megatron-core 0.16.0 and 0.16.1."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def latent_attention_without_engine() -> None:
    """Without Transformer Engine latent attention fails with `TypeError: isinstance() arg 2 must be a type`: it takes
    the engine to be there because the module that wraps it can be imported, and finds no class in it. megatron-core
    0.16.0 and 0.16.1."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
