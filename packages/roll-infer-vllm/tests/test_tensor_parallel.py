"""Weights of an engine that is spread over two processes: each takes its part, and together they show the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from vllm_live import CACHE

from roll_core.errors import WeightSyncError
from roll_infer_vllm.config import VllmConfig
from roll_testing.errors import raises_error
from roll_weight_transports.buckets import BucketWriter
from shared_tests.live_engine import Live, biased
from shared_tests.loaded_engine import CLOSE, PROMPT, digests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine("vllm"),
]


@pytest.mark.parametrize(
    "spec", [biased(), biased(model_type="phi3", pad_token_id=0)], ids=["qwen2", "phi3, fused in transformers"]
)
def test_ranks_load_the_published_weights_and_compute(spec, monkeypatch):
    """One key head for both, tied embeddings, and biases. After a bucket that they cannot read, too."""
    from roll_infer_vllm.strategy import VllmStrategy

    config = VllmConfig.model_validate({**CACHE, "bucket_mib": 1, "tensor_parallel_size": 2})
    live = Live(VllmStrategy(config), spec, num_slots=2)
    try:
        for _ in range(2):
            live.step()
            manifest, receipt = live.publish()
            assert dict(receipt.digests) == digests(manifest)
            output = live.generate(f"version {live.version}", PROMPT).outputs[0]
            expected = live.logprobs([*PROMPT, *output.token_ids], len(PROMPT))
            np.testing.assert_allclose(output.logprobs, expected, atol=CLOSE)
            with monkeypatch.context() as broken:
                break_buckets(broken)
                with raises_error(WeightSyncError, "FileNotFoundError"):
                    live.publish()
    finally:
        live.close()


def break_buckets(monkeypatch):
    """Each leads to memory that is not there."""
    fill = BucketWriter.fill

    def elsewhere(self, tensors, first):
        bucket, following = fill(self, tensors, first)
        return replace(bucket, path="/nowhere"), following

    monkeypatch.setattr(BucketWriter, "fill", elsewhere)
