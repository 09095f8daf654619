"""Test group *holding*: engines that keep weights in a layout of their own, in their own processes.

Tests cover digests of fused matrices, checks of the manifest before any change, prefix caching, and freed cache memory.
For engines that support all of it, beside the conformance kit, on a model with biases.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import psutil
import pytest
import torch

from roll_core.errors import CorruptTensorError, MissingTensorError, StaleWeightsError, UnexpectedTensorError
from roll_testing.bounds import BOUNDS
from roll_testing.errors import raises_error
from shared_tests.live_engine import Live, request

if TYPE_CHECKING:
    from roll_core.types import WeightManifest

PROMPT = [5, 6, 7]
LONG = range(2, 90)
"""A prompt of several blocks of any KV cache."""
CLOSE = 1e-4
"""Bound on the difference of logprobs of the same weights in fp32."""


class LoadedEngineTests:
    """Tests use the engine of the author's fixture `live`, and leave it with weights loaded."""

    cache_bytes: ClassVar[int]
    """Size of the engine's KV cache in bytes."""

    def test_fused_weights_are_read_back_to_the_bit(self, live: Live) -> None:
        """Digests of fused weights must equal the manifest's.

        This includes negative zeros and subnormal numbers, which a multiplication would lose.
        """
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

    def test_manifest_of_another_model_is_refused_without_change(self, live: Live) -> None:
        """An unknown, missing or misshapen tensor must be refused by an error that names it.

        An old version must be refused, too. A refused publish must change nothing.
        """
        live.publish()
        weights = dict(live.model.named_parameters())
        with raises_error(UnexpectedTensorError, "actor_infer rank 0", "model.layers.9."):
            live.publish([*weights.items(), ("model.layers.9.mlp.up_proj.weight", torch.zeros(96, 64))])
        gone = "model.layers.0.mlp.up_proj.weight"
        with raises_error(MissingTensorError, gone):
            live.publish([(name, each) for name, each in weights.items() if name != gone])
        half = "model.layers.0.self_attn.q_proj.weight"
        with raises_error(CorruptTensorError, half, "[32, 64]", "[64, 64]"):
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
        """The prefix of a repeated prompt must be found in the cache, but not after a weight update."""
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
        """Metrics must count all tokens since the previous call of `metrics`, to the last one."""
        live.strategy.metrics()
        live.generate("counted", [94, 95, 96], max_new_tokens=7)
        found = live.strategy.metrics()
        assert (found["prompt_tokens"], found["generated_tokens"], found["preemptions"]) == (3, 7, 0)
        assert set(live.strategy.metrics()) == set(found)
        assert live.strategy.metrics()["generated_tokens"] == 0

    def test_sleep_frees_the_memory_of_the_cache(self, live: Live) -> None:
        """`sleep` must free most of the KV cache that different prompts have filled: at least 40 % of its size.

        On a CPU, the memory of the engine's processes shows it.
        """
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

    def test_an_engine_that_slept_refuses_requests_before_a_publish(self, live: Live) -> None:
        """An engine must refuse weights while it sleeps.

        After `wake`, it must refuse requests until weights are published.
        """
        live.run(live.strategy.sleep())
        with raises_error(RuntimeError):
            live.publish()
        live.run(live.strategy.wake())
        with raises_error(RuntimeError):
            live.generate("early", PROMPT)
        live.publish()
        live.generate("late", PROMPT)


TOKEN_BYTES = 2 * 2 * 32 * 4
"""Bytes of keys and values per token: two layers, one head of 32 in fp32."""


def digests(manifest: WeightManifest) -> dict[str, str]:
    """Return the manifest's digests by tensor name."""
    return {entry.name: entry.digest for entry in manifest.tensors}


def _resident() -> int:
    """Return the resident bytes of all processes below this one."""
    return sum(each.memory_info().rss for each in psutil.Process().children(recursive=True))


def check_in_fp16(live: Live) -> None:
    """Check that fp16 weights are read back, and that the logprobs are near those of the same weights in fp32."""
    live.step()
    live.model.half()
    manifest, receipt = live.publish()
    assert {entry.dtype for entry in manifest.tensors} == {"F16"}
    assert dict(receipt.digests) == digests(manifest)
    output = live.generate("half", PROMPT, max_new_tokens=20).outputs[0]
    live.model.float()
    expected = live.logprobs([*PROMPT, *output.token_ids], len(PROMPT))
    np.testing.assert_allclose(output.logprobs, expected, atol=BOUNDS["fp16"].outputs)
