"""Adapters on the real engine, where it is installed: what the conformance kit does not ask."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
from vllm_live import CACHE

from roll_core.errors import CorruptTensorError, MissingTensorError, StaleWeightsError, UnexpectedTensorError
from roll_core.spec.model import LoraSpec
from roll_core.testing.infer.adapters import RANK, drawn, merged
from roll_core.testing.infer.live import Live, biased, request
from roll_infer_vllm.config import VllmConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
LAYERS = [
    f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
]


class Adapted(Live):
    """Publishes adapters; the trainer's model has them merged."""

    def __init__(self):
        from roll_infer_vllm.strategy import VllmStrategy

        lora = LoraSpec(targets=("all-linear",), rank=RANK, alpha=6.0)
        config = VllmConfig.model_validate({**CACHE, "enable_lora": True})
        super().__init__(VllmStrategy(config), dataclasses.replace(biased(), lora=lora))
        self.base = {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def take(self, adapter):
        with torch.no_grad():
            for name, each in merged(self.base, adapter).items():
                self.model.get_parameter(name).copy_(each)


@pytest.fixture(scope="module")
def live():
    engine = Adapted()
    yield engine
    engine.close()


def test_requests_go_on_under_the_next_adapter(live):
    adapters = [drawn(live.base, LAYERS, seed) for seed in (1, 2)]
    live.publish(list(adapters[0].items()))
    old, prompt = live.version, [5, 6, 7]

    async def update_meanwhile():
        running = asyncio.create_task(live.strategy.generate(request("long", prompt, max_new_tokens=240)))
        while live.strategy.metrics()["generated_tokens"] == 0:
            await asyncio.sleep(0.01)
        await live.update(list(adapters[1].items()))
        return await running

    output = live.run(update_meanwhile()).outputs[0]
    first = int((output.versions == old).sum())
    assert output.versions.tolist() == [old] * first + [old + 1] * (240 - first)
    assert 0 < first < 240
    tokens = [*prompt, *output.token_ids]
    live.take(adapters[0])
    np.testing.assert_allclose(output.logprobs[:first], live.logprobs(tokens, len(prompt))[:first], atol=1e-4)
    live.take(adapters[1])
    np.testing.assert_allclose(output.logprobs[first:], live.logprobs(tokens, len(prompt))[first:], atol=1e-4)


def test_the_endpoint_serves_the_adapter_under_the_roles_name_and_the_model_beneath_under_another(live):
    adapter = drawn(live.base, LAYERS, 3)
    live.publish(list(adapter.items()))
    for model, weights in (("actor_infer", adapter), ("actor_infer-base", {})):
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 5, "temperature": 1.0, "ignore_eos": True}
        ids = {"logprobs": 1, "return_token_ids": True, "return_tokens_as_token_ids": True}
        (choice,) = live.post("completions", body | ids)["choices"]
        live.take(weights)
        right = live.logprobs([5, 6, 7, *choice["token_ids"]], 3)
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], right, atol=1e-4)


def test_what_is_no_adapter_of_this_rank_is_refused_and_changes_nothing(live):
    adapter = drawn(live.base, LAYERS, 4)
    live.publish(list(adapter.items()))
    half = {name: each for name, each in adapter.items() if name != f"{LAYERS[0]}.lora_B.weight"}
    with pytest.raises(MissingTensorError, match=rf"{LAYERS[0]}\.lora_B\.weight is not in the manifest"):
        live.publish(list(half.items()))
    doubled = {name: torch.cat([each, each], dim=0 if ".lora_A." in name else 1) for name, each in adapter.items()}
    with pytest.raises(CorruptTensorError, match=f"has rank {2 * RANK}, the adapter {RANK}"):
        live.publish(list(doubled.items()))
    with pytest.raises(UnexpectedTensorError, match=r"model\.norm\.weight"):
        live.publish([("model.norm.weight", live.base["model.norm.weight"])])
    with pytest.raises(StaleWeightsError):
        live.publish(list(adapter.items()), version=0)
    live.version = 60
    live.publish(list(adapter.items()))
    live.take(adapter)
    output = live.generate("after", [5, 6, 7]).outputs[0]
    np.testing.assert_allclose(output.logprobs, live.logprobs([5, 6, 7, *output.token_ids], 3), atol=1e-4)
