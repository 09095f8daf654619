"""A real engine on an event loop of its own, beside the model of a trainer that publishes to it."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import numpy as np
import torch

from roll_core.modeling.model import load_model
from roll_core.spec.model import MeshInfo
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_vllm.config import VllmConfig

ARCHITECTURE = {
    "model_type": "qwen2",  # with biases, and more query than key heads
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
CACHE = {"kv_cache_memory_bytes": 32 << 20, "block_size": 32}


WAIT_S = 60.0


class Live:
    """A started engine, the loop that it lives on, and the trainer's model."""

    def __init__(self, spec, config):
        from roll_infer_vllm.strategy import VllmStrategy

        self.runner = asyncio.Runner()
        self.spec, self.version = spec, 0
        self.model = load_model(spec)
        self.strategy = VllmStrategy(VllmConfig.model_validate(config))
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

    async def update(self):
        """A publish of the trainer's weights, for those who are on the engine's loop."""
        self.version += 1
        tensors = list(self.model.named_parameters())
        await self.strategy.update_weights(self.version, make_manifest(self.version, tensors), iter(tensors))

    def logprobs(self, tokens, skip, temperature=1.0):
        with torch.no_grad():
            logits = self.model(torch.as_tensor(tokens)[None]).logits[0].float()
        found = (logits / temperature).log_softmax(-1)
        return found[torch.arange(skip - 1, len(tokens) - 1), torch.as_tensor(tokens)[skip:]].numpy()

    def close(self):
        self.runner.run(self.strategy.stop())
        self.runner.close()


def request(name, prompt, **params):
    limits = {"max_new_tokens": 8, "ignore_eos": True, **params}
    return GenerateRequest(id=name, prompt_ids=np.asarray(prompt), params=SamplingParams(**limits))


def ask(live, path, body):
    """The answer of the engine's endpoint; blocks."""
    sent = urllib.request.Request(
        f"{live.strategy.endpoint()}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(sent, timeout=WAIT_S) as answer:
        return json.load(answer)


def post(live, path, body):
    """The same, while the event loop turns that serves it."""
    return live.run(asyncio.to_thread(ask, live, path, body))
