"""A started engine beside the model of a trainer that publishes to it, for tests of one engine's own features."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from roll_core.spec.model import MeshInfo, ModelSpec
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams
from roll_modeling.model import load_model
from roll_modeling.portable_state import router_buffers
from roll_testing.infer.interrupting import settle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.types import Completion, Floats, WeightManifest, WeightReceipt

    Tensors = Iterable[tuple[str, Tensor]]

T = TypeVar("T")

BIASED: Mapping[str, Any] = {
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
"""An architecture with features that the conformance kit's own model does not have."""
ANSWER_S = 120.0
"""Time limit in seconds for every call of a started engine."""


def biased(**changes: Any) -> ModelSpec:
    """Return a model of that architecture, with random weights."""
    return ModelSpec(random_init={**BIASED, **changes}, seed=1, dtype="fp32")


class Live:
    """A started engine on its own event loop, which runs only during a call."""

    def __init__(self, strategy: InferStrategy, spec: ModelSpec, num_slots: int = 1) -> None:
        """Start the engine on `num_slots` slots."""
        self.strategy, self.spec, self.version = strategy, spec, 0
        self.model = load_model(spec)
        self._runner = asyncio.Runner()
        try:
            self.start(strategy, num_slots)
        except BaseException:
            self.close()
            raise
        settle()

    def start(self, strategy: InferStrategy, num_slots: int = 1) -> None:
        """Start an engine with the model of `spec`; this may take minutes."""
        mesh = MeshInfo(role="actor_infer", num_threads=1, num_slots=num_slots)
        self._runner.run(strategy.start(self.spec, mesh))

    def run(self, call: Awaitable[T], limit_s: float = ANSWER_S) -> T:
        """Run a coroutine and return its result. Raises `TimeoutError` after `limit_s`."""

        async def limited() -> T:
            return await asyncio.wait_for(call, limit_s)

        return self._runner.run(limited())

    def generate(self, name: str, prompt: Sequence[int], **params: Any) -> Completion:
        """Send one request and return its completion; see `request`."""
        return self.run(self.strategy.generate(request(name, prompt, **params)))

    def place_of_the_urgent(self, num_others: int) -> int:
        """Return how many of the other requests finish before one that has a higher priority and is submitted last."""
        ended: list[str] = []

        async def ended_after(name: str, priority: int = 0) -> None:
            await self.strategy.generate(request(name, [4, 5], priority=priority))
            ended.append(name)

        async def together() -> None:
            await asyncio.gather(
                *[ended_after(f"r{number}") for number in range(num_others)], ended_after("urgent", -2)
            )

        self.run(together())
        return ended.index("urgent")

    def publish(
        self,
        tensors: Sequence[tuple[str, Tensor]] | None = None,
        *,
        manifest: WeightManifest | None = None,
        version: int | None = None,
    ) -> tuple[WeightManifest, WeightReceipt]:
        """Publish the trainer's weights, or `tensors` instead. Return the manifest and the receipt."""
        return self.run(self.update(tensors, manifest=manifest, version=version))

    async def update(
        self,
        tensors: Sequence[tuple[str, Tensor]] | None = None,
        *,
        manifest: WeightManifest | None = None,
        version: int | None = None,
    ) -> tuple[WeightManifest, WeightReceipt]:
        """Same as `publish`, for callers on the engine's event loop."""
        self.version = self.version + 1 if version is None else version
        sent = [*self.model.named_parameters(), *router_buffers(self.model)] if tensors is None else tensors
        manifest = manifest or make_manifest(self.version, sent)
        return manifest, await self.strategy.update_weights(self.version, manifest, iter(sent))

    def step(self) -> None:
        """Change every weight of the trainer's model."""
        with torch.no_grad():
            for parameter in (*self.model.parameters(), *(each for _, each in router_buffers(self.model))):
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(self.version))

    def logprobs(self, tokens: Sequence[int], skip: int, temperature: float = 1.0) -> Floats:
        """Return `[L - skip]`, the logprob of each token after the first `skip`, by the trainer's model."""
        ids = torch.as_tensor(tokens)
        with torch.no_grad():
            logits = self.model(ids[None]).logits[0].float()
        rows = (logits / temperature).log_softmax(-1)
        found: Floats = rows[torch.arange(skip - 1, len(tokens) - 1), ids[skip:]].numpy()
        return found

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Call `ask` on a thread. The event loop, on which the endpoint may run, continues meanwhile."""
        return self.run(asyncio.to_thread(self.ask, path, body))

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a POST request to the engine's endpoint and return its JSON response. Blocks."""
        headers = {"Content-Type": "application/json"}
        sent = urllib.request.Request(f"{self.strategy.endpoint()}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(sent, timeout=ANSWER_S / 2) as answer:
            return json.load(answer)

    def close(self) -> None:
        """Stop the engine."""
        self._runner.run(self.strategy.stop())
        self._runner.close()


def request(
    name: str, prompt: Sequence[int], *, prompt_logprobs: bool = False, priority: int = 0, **params: Any
) -> GenerateRequest:
    """Return a request. By default it generates 8 tokens and ignores end tokens."""
    limits = {"max_new_tokens": 8, "ignore_eos": True, **params}
    return GenerateRequest(
        id=name,
        prompt_ids=np.asarray(prompt),
        params=SamplingParams(**limits),
        prompt_logprobs=prompt_logprobs,
        priority=priority,
    )
