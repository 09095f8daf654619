"""A real engine with one fault at a time, for tests of `roll-core doctor mismatch`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.plugins.registry import load_registry
from roll_core.runtime.records.mismatch import LogprobBatch, LogprobRow
from roll_core.spec.model import LoraSpec
from roll_core.spec.providers import InferProvider, TrainProvider
from roll_core.spec.weights import make_manifest
from roll_core.types import SamplingParams
from roll_strategy_hf.train import HFTrainStrategy
from roll_tools.mismatch_experiments import Pair
from roll_tools.mismatch_sides import Part
from shared_tests.live_engine import request as live_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import pytest
    from torch import Tensor

    from roll_core.runtime.records.mismatch import Diagnosis
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.types import Completion, GenerateRequest, WeightManifest, WeightReceipt
    from shared_tests.live_engine import Live

    Tensors = Iterable[tuple[str, Tensor]]

LORA = LoraSpec(targets=("q_proj", "down_proj"), rank=4, alpha=8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedPart(Part):
    """A part whose strategy is started already. With another model it is built as usual."""

    strategy: Any
    started: ModelSpec

    def build(self, *arguments: Any) -> Any:
        """The started strategy."""
        return self.strategy if self.model == self.started else Part.build(self, *arguments)


class Mismatched:
    """A started engine. `pair` gives it a fault, which the next `pair` removes."""

    def __init__(self, live: Live, name: str, config: Mapping[str, Any]) -> None:
        self.live, self.config = live, config
        self.provider = load_registry().find(InferProvider, name)
        self.version = 0
        self.request: Callable[[GenerateRequest], GenerateRequest] = lambda request: request
        self.weight: Callable[[int, str, Tensor], Tensor] = lambda update, name, tensor: tensor
        self.updated: Callable[[], Any] | None = None

    def diagnose(
        self,
        *,
        request: Any = None,
        weight: Any = None,
        updated: Any = None,
        engine: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        prompts: Any = None,
        **params: Any,
    ) -> Diagnosis:
        """Examine this engine with a trainer of the same model.

        `request` changes requests, `weight` the tensors of the update with a number, and `updated` is awaited after
        each update. `engine` and `trainer` have other values of the side's model.
        """
        self.request = request or (lambda value: value)
        self.weight = weight or (lambda update, name, tensor: tensor)
        self.updated, self.num_updates = updated, 0
        spec = self.live.spec
        rng = np.random.default_rng(0)
        common = rng.integers(3, 60, 34)
        shared = [np.append(common, rng.integers(3, 60, 4)) for _ in range(2)]
        pair = Pair(
            trainer=Part(
                provider=load_registry().find(TrainProvider, "hf_train"),
                config={},
                model=replace(spec, **(trainer or {})),
                key="actor_train",
            ),
            engine=StartedPart(
                provider=self.provider,
                config=self.config,
                model=replace(spec, **(engine or {})),
                key="actor_infer",
                strategy=self,
                started=spec,
            ),
            params=SamplingParams(**{"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True, **params}),
            prompts=prompts or [*(rng.integers(3, 60, length) for length in (5, 9, 14, 30)), *shared],
        )
        return self.live.run(pair.examine(), limit_s=1500)

    def updated_in_flight(self) -> Diagnosis:
        """Examine records of responses, during some of which all weights changed."""
        live = self.live
        live.publish()
        prompts = [[5, 6, 7, 8 + index] for index in range(6)]

        def requests(name: str, num_tokens: int) -> list[Any]:
            return [
                asyncio.ensure_future(
                    live.strategy.generate(live_request(name + str(i), prompt, max_new_tokens=num_tokens))
                )
                for i, prompt in enumerate(prompts)
            ]

        async def responses() -> list[Completion]:
            running = requests("cut", 200)
            await live.strategy.generate(live_request("short", [5], max_new_tokens=60))
            live.step()
            await live.update()
            return [*(await asyncio.gather(*running)), *(await asyncio.gather(*requests("fresh", 100)))]

        rows = []
        for prompt, completion in zip(2 * prompts, live.run(responses()), strict=True):
            output, skip = completion.outputs[0], len(prompt)
            tokens = np.append(prompt, output.token_ids)
            rows.append(
                LogprobRow(
                    tokens=tokens,
                    sampled=np.arange(len(tokens)) >= skip,
                    versions=np.append(np.full(skip, -1), output.versions).astype(np.int32),
                    engine=np.append(np.zeros(skip, np.float32), output.logprobs),
                    trainer=np.append(np.zeros(skip, np.float32), live.logprobs(tokens.tolist(), skip)),
                )
            )
        return LogprobBatch(rows=tuple(rows), version=live.version).diagnose()

    async def start(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """It is started already."""

    async def stop(self) -> None:
        """The fixture stops it."""

    async def update_weights(self, version: int, manifest: WeightManifest, tensors: Tensors) -> WeightReceipt:
        """Load changed weights. The receipt has the digests of the loaded ones, by the names of the manifest."""
        self.num_updates += 1
        self.live.version += 1
        sent = [(name, self.weight(self.num_updates, name, tensor).contiguous()) for name, tensor in tensors]
        receipt = await self.live.strategy.update_weights(
            self.live.version, make_manifest(self.live.version, sent), iter(sent)
        )
        if self.updated is not None:
            await self.updated()
        return receipt

    async def generate(self, request: GenerateRequest) -> Completion:
        """Serve the changed request."""
        return await self.live.strategy.generate(self.request(request))


def prompt_of(change: Callable[[Any], Any]) -> Callable[[GenerateRequest], GenerateRequest]:
    """A change of the prompt."""
    return lambda request: replace(request, prompt_ids=np.asarray(change(request.prompt_ids), np.int64))


def temperature_of(value: float) -> Callable[[GenerateRequest], GenerateRequest]:
    """Another temperature of sampled tokens."""

    def change(request: GenerateRequest) -> GenerateRequest:
        return (
            request if request.prompt_logprobs else replace(request, params=replace(request.params, temperature=value))
        )

    return change


def corrupted(update: int, name: str, tensor: Tensor) -> Tensor:
    """One tensor is moved."""
    return tensor + 0.1 if name == "model.layers.1.mlp.down_proj.weight" else tensor


class ScaledAdapter:
    """The merged adapter is applied twice."""

    def __init__(self, base: Mapping[str, Tensor]) -> None:
        self.base = {name: tensor.detach().clone() for name, tensor in base.items()}

    def __call__(self, update: int, name: str, tensor: Tensor) -> Tensor:
        """The tensor with twice its distance to the base model."""
        return 2 * tensor - self.base[name] if name in self.base else tensor


def train_adapters(patch: pytest.MonkeyPatch) -> None:
    """The trainer's adapters are not zero."""
    import torch

    build = HFTrainStrategy.build

    def built(self: HFTrainStrategy, *args: Any, **named: Any) -> None:
        build(self, *args, **named)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))

    patch.setattr(HFTrainStrategy, "build", built)


def export_base(patch: pytest.MonkeyPatch) -> None:
    """The trainer exports its weights without the adapters."""
    import torch

    export = HFTrainStrategy.export_weights

    def exported(self: HFTrainStrategy) -> Any:
        with torch.no_grad():
            factors = [parameter for name, parameter in self.model.named_parameters() if ".lora_B." in name]
            trained = [factor.clone() for factor in factors]
            for factor in factors:
                factor.zero_()
            weights = [(name, tensor.clone()) for name, tensor in export(self)]
            for factor, value in zip(factors, trained, strict=True):
                factor.copy_(value)
        return iter(weights)

    patch.setattr(HFTrainStrategy, "export_weights", exported)


class Stale:
    """Updates after the first one are ignored for tensors whose names have a prefix."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix, self.first = prefix, dict[str, Any]()

    def __call__(self, update: int, name: str, tensor: Tensor) -> Tensor:
        """The tensor of the first update."""
        first = self.first.setdefault(name, tensor.clone())
        return first if name.startswith(self.prefix) else tensor


def first(diagnosis: Diagnosis) -> str:
    """Name of the first cause; empty if there is none."""
    return diagnosis.causes[0].name if diagnosis.causes else ""
