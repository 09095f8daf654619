"""Differences between the supported megatron-core versions, 0.16 to 0.19."""

from __future__ import annotations

from functools import partial
from typing import Any


def submodules(spec: Any) -> Any:
    """Submodules of a part of a layer's spec. Since 0.17, some parts are a `partial` instead of a `ModuleSpec`."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


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


def latent_attention_as_specified() -> None:
    """Let latent attention build the projections and norms of its spec, as up to 0.18.

    Otherwise a model without `q_lora_rank` fails with `ValueError` or `RuntimeError`, and with Transformer Engine has a
    norm before its queries' projection that its files lack. Affects megatron-core 0.19.
    """
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    if hasattr(MLASelfAttention, "_resolve_qk_norm_config"):
        MLASelfAttention._resolve_qk_norm_config = lambda _self, submodules: vars(submodules)
