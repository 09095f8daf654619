"""The embedded engine keeps the contract of infer strategies."""

from __future__ import annotations

from roll_core.testing import InferStrategyConformance


class TestHFInfer(InferStrategyConformance):
    name = "hf_infer"
