"""Weights of an engine that is spread over two processes: each takes its part, and together they show the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from vllm_live import CACHE
from vllm_mixtures import remote_functions, second_rank

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
    """One key head for both, tied embeddings, and biases. After a bucket that they cannot read, too.

    The digests show a copy on the second rank that differs: of the key head, and of a norm.
    """
    from roll_infer_vllm.strategy import VllmStrategy

    on_ranks = remote_functions(monkeypatch)

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
        manifest, receipt = live.publish()
        on_ranks(live, change_copies)
        found = live.run(live.strategy._weights.digests(manifest))
        wrong = {name for name, digest in receipt.digests.items() if found[name] != digest}
        has_bias = "model.layers.0.self_attn.v_proj.bias" in receipt.digests
        assert wrong == {"model.norm.weight", *["model.layers.0.self_attn.v_proj.bias"] * has_bias}
    finally:
        live.close()


@second_rank
def change_copies(worker, model):
    model.model.norm.weight.data[3] += 1
    if (bias := model.model.layers[0].self_attn.qkv_proj.bias) is not None:
        bias.data[-1] += 1  # of the value head


def break_buckets(monkeypatch):
    """Each leads to memory that is not there."""
    fill = BucketWriter.fill

    def elsewhere(self, tensors, first):
        bucket, following = fill(self, tensors, first)
        return replace(bucket, path="/nowhere"), following

    monkeypatch.setattr(BucketWriter, "fill", elsewhere)
