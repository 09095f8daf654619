"""What the conformance kit does not ask, because it is SGLang's own: on the real engine, where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from sglang_on_a_cpu import ON_A_CPU

from roll_core.errors import (
    ConfigError,
    CorruptTensorError,
    MissingTensorError,
    StaleWeightsError,
    UnexpectedTensorError,
)
from roll_core.modeling.model import load_model
from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_sglang.config import SglangConfig

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")

ARCHITECTURE = {
    "model_type": "qwen2",  # with biases, and more query than key heads
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


class Live:
    """A started engine, the loop that it lives on, and the trainer's model."""

    def __init__(self, spec, config):
        from roll_infer_sglang.strategy import SglangStrategy

        self.runner = asyncio.Runner()
        self.spec, self.version = spec, 0
        self.model = load_model(spec)
        self.strategy = SglangStrategy(SglangConfig.model_validate(config))
        mesh = MeshInfo(role="actor_infer", num_threads=1)
        try:
            self.runner.run(self.strategy.start(spec, mesh))
        except BaseException:
            self.close()
            raise

    def run(self, call):
        return self.runner.run(asyncio.wait_for(call, 120))

    def generate(self, name, prompt, **params):
        return self.run(self.strategy.generate(request(name, prompt, **params)))

    def publish(self, tensors=None, *, manifest=None, version=None):
        """The trainer's weights, or others in their place; returns the manifest and the receipt."""
        self.version = self.version + 1 if version is None else version
        tensors = list(self.model.named_parameters()) if tensors is None else tensors
        manifest = manifest or make_manifest(self.version, tensors)
        receipt = self.run(self.strategy.update_weights(self.version, manifest, iter(tensors)))
        return manifest, receipt

    def step(self):
        """Something that moves every weight of the trainer's."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(self.version))

    def logprobs(self, tokens, skip):
        with torch.no_grad():
            found = self.model(torch.as_tensor(tokens)[None]).logits[0].float().log_softmax(-1)
        return found[torch.arange(skip - 1, len(tokens) - 1), torch.as_tensor(tokens)[skip:]].numpy()

    def close(self):
        self.runner.run(self.strategy.stop())
        self.runner.close()


def request(name, prompt, *, prompt_logprobs=False, priority=0, **params):
    limits = {"max_new_tokens": 8, "ignore_eos": True, **params}
    return GenerateRequest(
        id=name,
        prompt_ids=np.asarray(prompt),
        params=SamplingParams(**limits),
        prompt_logprobs=prompt_logprobs,
        priority=priority,
    )


@pytest.fixture(scope="module")
def stand_ins():
    """Set before the engine of all these tests is made, which is before each test's own."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent / "cpu"), before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def live(stand_ins):
    engine = Live(ModelSpec(random_init=ARCHITECTURE, seed=1, dtype="fp32"), ON_A_CPU | {"bucket_mib": 1})
    yield engine
    engine.close()


def digests(manifest):
    return {entry.name: entry.digest for entry in manifest.tensors}


def test_the_arguments_that_check_knows_are_the_engines_own():
    from roll_infer_sglang.arguments import DECIDED_ELSEWHERE, PASSED_ON

    known = set(SglangConfig.model_fields) - {"bucket_mib"}
    assert known == set(PASSED_ON) | set(DECIDED_ELSEWHERE) | (set(SglangConfig.__annotations__) - {"bucket_mib"})
    program = "from sglang.srt.server_args import ServerArgs; print(*ServerArgs.__struct_fields__)"
    variables = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=variables)
    assert known == {name for name in done.stdout.splitlines()[-1].split() if not name.startswith("_")}


def test_fused_weights_are_read_back_to_the_bit(live):
    live.step()
    with torch.no_grad():
        live.model.model.layers[0].self_attn.k_proj.weight[0, :3] = torch.tensor([-0.0, 1e-40, -1e-42])
    manifest, receipt = live.publish()
    assert dict(receipt.digests) == digests(manifest)
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
    output = live.generate("after", prompt).outputs[0]
    np.testing.assert_allclose(output.logprobs, live.logprobs([*prompt, *output.token_ids], len(prompt)), atol=1e-4)
    assert live.strategy.metrics()["prefix_cache_queries"] > 0


def test_an_equal_prompt_is_computed_once(live):
    prompt = list(range(2, 90))
    live.publish()
    live.generate("first", prompt)
    assert live.strategy.metrics()["prefix_cache_hits"] == 0
    live.generate("second", prompt)
    assert live.strategy.metrics()["prefix_cache_hits"] >= len(prompt) - 1


def test_tokens_have_the_version_that_drew_them_and_its_logprobs(live):
    live.publish()
    old = live.version
    prompt = [5, 6, 7]

    async def update_meanwhile():
        running = asyncio.create_task(live.strategy.generate(request("long", prompt, max_new_tokens=240)))
        await live.strategy.generate(request("short", prompt, max_new_tokens=6))
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


def test_a_seeded_request_draws_the_same_tokens_over_an_update(live):
    """Its tokens depend on their place in the sequence, not on how often it was interrupted."""
    live.publish()
    asked = {"max_new_tokens": 200, "seed": 5}
    whole = live.generate("whole", [5, 6, 7], **asked).outputs[0]

    async def update_meanwhile():
        running = asyncio.create_task(live.strategy.generate(request("cut", [5, 6, 7], **asked)))
        await live.strategy.generate(request("short", [5], max_new_tokens=6))
        live.version += 1
        weights = list(live.model.named_parameters())
        await live.strategy.update_weights(live.version, make_manifest(live.version, weights), iter(weights))
        return await running

    cut = live.run(update_meanwhile()).outputs[0]
    assert len(set(cut.versions)) == 2
    assert cut.token_ids.tolist() == whole.token_ids.tolist()


def test_logprobs_of_masked_ends_are_the_models_own(live):
    ends = tuple(range(2, 60))
    asked = {"min_new_tokens": 6, "max_new_tokens": 6, "ignore_eos": False, "stop_token_ids": ends, "temperature": 0.7}
    live.publish()
    prompt = [5, 6, 7]
    output = live.generate("masked", prompt, seed=1, **asked).outputs[0]
    assert len(output.token_ids) == 6
    assert not set(output.token_ids.tolist()) & set(ends)
    with torch.no_grad():
        logits = live.model(torch.as_tensor([*prompt, *output.token_ids])[None]).logits[0].float() / 0.7
    right = logits.log_softmax(-1)[torch.arange(2, 8), torch.as_tensor(output.token_ids)]
    np.testing.assert_allclose(output.logprobs, right, atol=1e-4)


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
    assert receipt.digests == digests(manifest)


def test_a_transfer_that_ends_early_is_named_and_can_be_repeated(live):
    weights = list(live.model.named_parameters())
    manifest = make_manifest(live.version + 1, weights)
    with pytest.raises(MissingTensorError, match="was not sent of version"):
        live.publish(weights[:5], manifest=manifest)
    manifest, receipt = live.publish()
    assert receipt.digests == digests(manifest)


def test_requests_of_several_priorities_run_side_by_side(live):
    async def both():
        asked = [request(f"p{priority}", [4, 5], priority=priority) for priority in (3, 0, 3)]
        asked = [each if at < 2 else request("p", [4, 5]) for at, each in enumerate(asked)]
        return await asyncio.gather(*[live.strategy.generate(each) for each in asked])

    assert [len(each.outputs[0].token_ids) for each in live.run(both())] == [8, 8, 8]


def test_metrics_are_counted_between_two_looks(live):
    live.strategy.metrics()
    live.generate("counted", [94, 95, 96], max_new_tokens=7)
    found = live.strategy.metrics()
    assert (found["prompt_tokens"], found["generated_tokens"], found["preemptions"]) == (3, 7, 0)
    assert live.strategy.metrics()["generated_tokens"] == 0


def test_weights_are_out_of_reach_without_the_workers_key(live):
    """Of whoever can reach the endpoint."""

    def post(path):
        asked = urllib.request.Request(
            live.strategy.endpoint().removesuffix("/v1") + path,
            data=json.dumps({"abort_all": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(asked, timeout=30)
        caught.value.close()
        return caught.value.code

    async def attempts():
        paths = ("/update_weights_from_tensor", "/abort_request", "/pause_generation", "/flush_cache")
        return [await asyncio.to_thread(post, path) for path in paths]

    assert live.run(attempts()) == [401, 401, 401, 401]


def test_an_argument_that_the_installed_engine_lacks_is_named_with_the_nearest(stand_ins):
    from roll_infer_sglang.server import Server

    async def start():
        server = Server("actor_infer rank 0")
        try:
            await server.start({"host": "127.0.0.1", "page_sizes": 1}, {"SGLANG_USE_CPU_ENGINE": "1"})
        finally:
            await server.stop()

    with pytest.raises(ConfigError, match=r"page_sizes: the installed SGLang has no such argument[\s\S]*page_size\?"):
        asyncio.run(asyncio.wait_for(start(), 120))


def test_nothing_is_left_when_it_stops(stand_ins):
    engine = Live(ModelSpec(random_init=ARCHITECTURE, seed=1, dtype="fp32"), ON_A_CPU)
    processes = [psutil.Process(each) for each in engine.strategy._server.processes()]
    assert len(processes) >= 3
    engine.close()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
