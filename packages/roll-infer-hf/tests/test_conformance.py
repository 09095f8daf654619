"""The embedded engine keeps the contract of infer strategies."""

from __future__ import annotations

from roll_testing import InferStrategyConformance


class TestHFInfer(InferStrategyConformance):
    name = "hf_infer"
    tight_config = {"kv_cache_gib": 2**-10}  # noqa: RUF012
    adapter_config = {"enable_lora": True}  # noqa: RUF012


class TestHFInferInPieces(InferStrategyConformance):
    """Few rows, so that requests wait; prompts computed in pieces that others share; keys and values made anew."""

    name = "hf_infer"
    adapter_config = {"enable_lora": True}  # noqa: RUF012
    variants = {  # noqa: RUF012
        "pieces": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 16,
            "min_shared_prefix": 4,
            "pack_weights": False,
            "kv_after_update": "recompute",
        }
    }
