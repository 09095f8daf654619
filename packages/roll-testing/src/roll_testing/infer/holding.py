"""The layer *holding*: what engines do that keep weights in a form of their own, in processes of their own.

Fused matrices are read back, models are compared before they are touched, prefixes are kept, memory is given back. For
engines that have all of it, beside the conformance kit, on a model with biases.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import psutil
import pytest
import torch

from roll_core.errors import CorruptTensorError, MissingTensorError, StaleWeightsError, UnexpectedTensorError
from roll_testing.errors import refused
from roll_testing.infer.live import Live, request

if TYPE_CHECKING:
    from roll_core.types import WeightManifest

PROMPT = [5, 6, 7]
LONG = range(2, 90)
"""A prompt of several blocks of any cache."""
CLOSE = 1e-4
"""Between logprobs of the same weights in fp32."""


class HoldingTests:
    """Tests find the engine of the fixture `live`, which is the author's, and leave it with weights."""

    cache_bytes: ClassVar[int]
    """Of keys and values that the engine has room for."""

    def test_fused_weights_are_read_back_to_the_bit(self, live: Live) -> None:
        """Signs of zeros and subnormal numbers too, which a multiplication would lose."""
        live.step()
        with torch.no_grad():
            live.model.get_parameter("model.layers.0.self_attn.k_proj.weight")[0, :3] = torch.tensor(
                [-0.0, 1e-40, -1e-42]
            )
            live.model.get_parameter("model.layers.1.mlp.up_proj.weight")[5, 7] = -0.0
        manifest, receipt = live.publish()
        assert dict(receipt.digests) == digests(manifest)
        names = set(receipt.digests)
        assert {f"model.layers.0.self_attn.{each}_proj.bias" for each in "qkv"} <= names
        assert "model.layers.1.mlp.gate_proj.weight" in names

    def test_a_manifest_of_another_model_is_refused_and_changes_nothing(self, live: Live) -> None:
        """What is unknown, missing or of another shape is named; and so is a version of the past."""
        live.publish()
        weights = dict(live.model.named_parameters())
        with refused(UnexpectedTensorError, "actor_infer rank 0", "model.layers.9."):
            live.publish([*weights.items(), ("model.layers.9.mlp.up_proj.weight", torch.zeros(96, 64))])
        gone = "model.layers.0.mlp.up_proj.weight"
        with refused(MissingTensorError, gone):
            live.publish([(name, each) for name, each in weights.items() if name != gone])
        half = "model.layers.0.self_attn.q_proj.weight"
        with refused(CorruptTensorError, half, "[32, 64]", "[64, 64]"):
            live.publish([(name, each[:32] if name == half else each) for name, each in weights.items()])
        with pytest.raises(StaleWeightsError):
            live.publish(version=0)
        output = live.generate("as before", PROMPT).outputs[0]
        np.testing.assert_allclose(
            output.logprobs, live.logprobs([*PROMPT, *output.token_ids], len(PROMPT)), atol=CLOSE
        )
        live.version += 50
        manifest, receipt = live.publish()
        assert receipt.digests == digests(manifest)

    def test_an_equal_prompt_is_computed_once(self, live: Live) -> None:
        """Its beginning is found in the cache, and not after an update."""
        live.step()
        live.publish()
        live.strategy.metrics()
        live.generate("first", LONG)
        assert live.strategy.metrics()["prefix_cache_hits"] == 0
        live.generate("second", LONG)
        assert live.strategy.metrics()["prefix_cache_hits"] > len(LONG) / 2
        live.publish()
        live.generate("third", LONG)
        assert live.strategy.metrics()["prefix_cache_hits"] == 0

    def test_metrics_are_counted_between_two_looks(self, live: Live) -> None:
        """Tokens to the last one."""
        live.strategy.metrics()
        live.generate("counted", [94, 95, 96], max_new_tokens=7)
        found = live.strategy.metrics()
        assert (found["prompt_tokens"], found["generated_tokens"], found["preemptions"]) == (3, 7, 0)
        assert set(live.strategy.metrics()) == set(found)
        assert live.strategy.metrics()["generated_tokens"] == 0

    def test_a_sleeping_engine_gives_the_memory_of_its_cache_back(self, live: Live) -> None:
        """On a CPU, where the processes' memory says so; most of what different prompts have filled."""
        live.publish()
        prompts = np.random.default_rng(1).integers(2, 100, (2 * self.cache_bytes // (200 * TOKEN_BYTES), 200))

        async def fill() -> None:
            await asyncio.gather(
                *[live.strategy.generate(request(f"r{i}", each)) for i, each in enumerate(prompts.tolist())]
            )

        live.run(fill())
        before = _resident()
        live.run(live.strategy.sleep())
        assert before - _resident() > 0.4 * self.cache_bytes
        live.run(live.strategy.wake())
        live.publish()
        assert len(live.generate("after", PROMPT).outputs[0].token_ids) == 8

    def test_an_engine_that_slept_answers_nobody_before_weights_are_published(self, live: Live) -> None:
        """And takes no weights before it is awake."""
        live.run(live.strategy.sleep())
        with refused(RuntimeError):
            live.publish()
        live.run(live.strategy.wake())
        with refused(RuntimeError):
            live.generate("early", PROMPT)
        live.publish()
        live.generate("late", PROMPT)


TOKEN_BYTES = 2 * 2 * 32 * 4
"""Of a token's keys and values: two layers, one head of 32 in fp32."""


def digests(manifest: WeightManifest) -> dict[str, str]:
    """By name."""
    return {entry.name: entry.digest for entry in manifest.tensors}


def _resident() -> int:
    """Bytes of the processes below this one."""
    return sum(each.memory_info().rss for each in psutil.Process().children(recursive=True))
