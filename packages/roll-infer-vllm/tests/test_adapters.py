"""Adapters on the real engine, where it is installed: what the conformance kit does not ask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm_live import CACHE

from roll_core.spec.model import LoraSpec
from roll_infer_vllm.config import VllmConfig
from roll_testing.infer.adapters import merged, random_adapter
from roll_testing.infer.kit import RANK
from shared_tests.adapted_engine import PROMPT, Adapted, AdaptedTests
from shared_tests.live_engine import Live, biased, request
from shared_tests.loaded_engine import CLOSE, digests

pytestmark = pytest.mark.engine("vllm")


class TestAdapted(AdaptedTests):
    @pytest.fixture(scope="class")
    @classmethod
    def live(cls):
        from roll_infer_vllm.strategy import VllmStrategy

        engine = Adapted(VllmStrategy(VllmConfig.model_validate({**CACHE, "enable_lora": True})))
        yield engine
        engine.close()


FUSED = [f"model.layers.{number}.mlp.gate_up_proj" for number in range(2)]


@pytest.mark.slow
def test_adapters_of_layers_that_transformers_fuses_are_split():
    """vLLM has an adapter for each part of glm4's `gate_up_proj`."""
    from roll_infer_vllm.strategy import VllmStrategy

    lora = LoraSpec(targets=("gate_up_proj",), rank=RANK, alpha=2.0 * RANK)
    spec = replace(biased(model_type="glm4", head_dim=32, pad_token_id=0), lora=lora)
    live = Live(VllmStrategy(VllmConfig.model_validate({**CACHE, "enable_lora": True})), spec)
    try:
        base = {name: parameter.detach().clone() for name, parameter in live.model.named_parameters()}
        for seed in (1, 2):
            adapter = random_adapter(base, FUSED, seed)
            manifest, receipt = live.publish(list(adapter.items()))
            assert dict(receipt.digests) == digests(manifest)
            completion = live.run(live.strategy.generate(request("one", PROMPT, max_new_tokens=12)))
            with torch.no_grad():
                for name, weight in merged(base, adapter).items():
                    live.model.get_parameter(name).copy_(weight)
            output = completion.outputs[0]
            expected = live.logprobs([*PROMPT, *output.token_ids], len(PROMPT))
            np.testing.assert_allclose(output.logprobs, expected, atol=CLOSE)
    finally:
        live.close()
