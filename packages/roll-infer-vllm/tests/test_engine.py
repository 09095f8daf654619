"""What the conformance kit does not ask, because it is vLLM's own: on the real engine, where it is installed."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util

import numpy as np
import pytest
import torch
from vllm_live import ARCHITECTURE, CACHE, Live, request

from roll_core.errors import (
    CorruptTensorError,
    MissingTensorError,
    StaleWeightsError,
    UnexpectedTensorError,
)
from roll_core.spec.model import ModelSpec
from roll_core.spec.weights import digest, make_manifest
from roll_infer_vllm.config import VllmConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture(scope="module")
def live():
    engine = Live(ModelSpec(random_init=ARCHITECTURE, seed=1, dtype="fp32"), CACHE | {"bucket_mib": 1})
    yield engine
    engine.close()


def test_the_arguments_that_check_knows_are_the_engines_own():
    from vllm.engine.arg_utils import AsyncEngineArgs

    from roll_infer_vllm.arguments import DECIDED_ELSEWHERE, PASSED_ON

    ours = {"bucket_mib", "sleep_level", "endpoint_host"}
    known = set(VllmConfig.model_fields) - ours
    assert known == set(PASSED_ON) | set(DECIDED_ELSEWHERE) | (set(VllmConfig.__annotations__) - ours)
    own = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
    assert known == {name for name in own if not name.startswith("_")}


def test_heads_that_the_cpus_attention_does_not_take_are_refused_at_the_start():
    from roll_core.errors import ModelError

    with pytest.raises(ModelError, match=r"actor_infer rank 0: .* heads have size 16; on a CPU vLLM takes 32, 64"):
        Live(ModelSpec(random_init={**ARCHITECTURE, "num_attention_heads": 4}, dtype="fp32"), CACHE)


def test_fused_and_packed_weights_are_read_back_to_the_bit(live):
    live.step()
    with torch.no_grad():
        # What the product with the identity alone would not give back.
        live.model.model.layers[0].self_attn.k_proj.weight[0, :3] = torch.tensor([-0.0, 1e-40, -1e-42])
        live.model.model.layers[1].mlp.up_proj.weight[5, 7] = -0.0
    manifest, receipt = live.publish()
    assert dict(receipt.digests) == {entry.name: entry.digest for entry in manifest.tensors}
    names = set(receipt.digests)
    assert {f"model.layers.0.self_attn.{each}_proj.bias" for each in "qkv"} <= names
    assert "model.layers.1.mlp.gate_proj.weight" in names


def test_a_matrix_that_the_engine_has_otherwise_has_another_digest(live):
    sent = dict(live.model.named_parameters())
    name = "model.layers.1.self_attn.v_proj.weight"
    other = {**sent, name: sent[name] + torch.eye(32, 64) * 1e-3}
    manifest, receipt = live.publish(list(other.items()), manifest=make_manifest(live.version + 1, sent.items()))
    wrong = [entry.name for entry in manifest.tensors if receipt.digests[entry.name] != entry.digest]
    assert wrong == [name]


def test_cached_beginnings_of_prompts_do_not_outlive_the_weights(live):
    prompt = list(range(2, 90))
    live.publish()
    live.generate("before", prompt)
    live.step()
    live.publish()
    completion = live.generate("after", prompt)
    output = completion.outputs[0]
    np.testing.assert_allclose(output.logprobs, live.logprobs([*prompt, *output.token_ids], len(prompt)), atol=1e-4)
    assert live.strategy.metrics()["prefix_cache_queries"] > 0


def test_an_equal_prompt_is_computed_once(live):
    prompt = list(range(2, 90))
    live.publish()
    live.generate("first", prompt)
    live.strategy.metrics()
    live.generate("second", prompt)
    assert live.strategy.metrics()["prefix_cache_hits"] > 0


def test_tokens_have_the_version_that_drew_them_and_its_logprobs(live):
    live.publish()
    old = live.version
    prompt = [5, 6, 7]

    async def update_meanwhile():
        running = asyncio.create_task(live.strategy.generate(request("long", prompt, max_new_tokens=240)))
        while live.strategy.metrics().get("generated_tokens", 0) == 0:
            await asyncio.sleep(0.01)
        manifest = make_manifest(old + 1, live.model.named_parameters())
        await live.strategy.update_weights(old + 1, manifest, iter(list(live.model.named_parameters())))
        return await running

    live.step()
    output = live.run(update_meanwhile()).outputs[0]
    live.version = old + 1
    assert set(output.versions) == {old, old + 1}
    assert (np.diff(output.versions) >= 0).all()
    first = int((output.versions == old).sum())
    sequence = [*prompt, *output.token_ids]
    right = live.logprobs(sequence, len(prompt))
    np.testing.assert_allclose(output.logprobs[first:], right[first:], atol=1e-4)
    assert np.abs(output.logprobs[:first] - right[:first]).max() > 1e-2


def test_a_manifest_of_another_model_is_refused_and_changes_nothing(live):
    live.publish()
    weights = dict(live.model.named_parameters())
    with pytest.raises(UnexpectedTensorError, match=r"actor_infer rank 0: was sent model\.layers\.9\."):
        live.publish([*weights.items(), ("model.layers.9.mlp.up_proj.weight", torch.zeros(96, 64))])
    gone = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(MissingTensorError, match=f"{gone} is not in the manifest"):
        live.publish([(name, each) for name, each in weights.items() if name != gone])
    with pytest.raises(CorruptTensorError, match=r"q_proj.weight is \[32, 64\] in the manifest, and \[64, 64\]"):
        live.publish(
            [(n, each[:32] if n.endswith("0.self_attn.q_proj.weight") else each) for n, each in weights.items()]
        )
    with pytest.raises(StaleWeightsError):
        live.publish(version=0)
    live.version = 50
    manifest, receipt = live.publish()
    assert receipt.digests == {entry.name: entry.digest for entry in manifest.tensors}


def test_a_transfer_that_ends_early_is_named_and_can_be_repeated(live):
    weights = list(live.model.named_parameters())
    manifest = make_manifest(live.version + 1, weights)
    with pytest.raises(MissingTensorError, match="was not sent of version"):
        live.publish(weights[:5], manifest=manifest)
    manifest, receipt = live.publish()
    assert receipt.digests == {entry.name: entry.digest for entry in manifest.tensors}


def test_metrics_are_counted_between_two_looks(live):
    live.strategy.metrics()
    live.generate("counted", [4, 5, 6], max_new_tokens=7)
    found = live.strategy.metrics()
    assert (found["prompt_tokens"], found["generated_tokens"], found["preemptions"]) == (3, 7, 0)
    assert 0.5 < found["running/mean"] <= found["running/max"] == 1  # of the last step vLLM says that nothing runs
    assert 0 < found["kv_cache_usage/mean"] <= found["kv_cache_usage/max"] < 1
    assert set(live.strategy.metrics()) == set(found)
    assert live.strategy.metrics()["generated_tokens"] == 0


def test_vllm_still_has_no_logprobs_at_the_temperature():
    """When this fails, `workarounds.TemperedSampler` may be no longer needed."""
    from typing import get_args

    from vllm.config.model import LogprobsMode

    assert set(get_args(LogprobsMode)) == {"raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"}


def test_vllm_still_leaves_a_tied_head_as_it_was(live, tmp_path):
    """When this fails, `workarounds.pack_tied_heads` is no longer needed. The receipt would tell, besides."""
    live.publish()
    live.step()
    live.model.save_pretrained(tmp_path)
    name = "model.embed_tokens.weight"

    async def reload_as_vllm_does():
        engine = live.strategy._engine
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
        return await engine.collective_rpc("roll_digests", args=([name, "model.norm.weight"],))

    (digests,) = live.run(reload_as_vllm_does())
    assert digests["model.norm.weight"] == digest(live.model.get_parameter("model.norm.weight"))
    assert digests[name] != digest(live.model.get_parameter(name))
    manifest, receipt = live.publish()
    assert receipt.digests == {entry.name: entry.digest for entry in manifest.tensors}
