"""What megatron-core 0.16 has to be helped with."""

from __future__ import annotations


def name_missing_kernel() -> None:
    """Without Transformer Engine the router of a mixture fails with `NameError: te_general_gemm`: the import that fails
    does not leave the name behind, which the code then compares with None. megatron-core 0.16.0 and 0.16.1."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
