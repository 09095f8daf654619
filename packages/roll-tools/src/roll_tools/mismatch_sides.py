"""Both sides of `roll-core doctor mismatch`: a trainer that scores tokens and an engine that samples them.

L tokens of a sequence, R response tokens.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.data.pack import pack
from roll_core.errors import UnsupportedError
from roll_core.plugins.targets import load_target, schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.model import MeshInfo
from roll_core.spec.train import WantedOutputs
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence
from roll_tools.mismatch_reference import ScoredTokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.train import TrainStrategy
    from roll_core.types import Completion, Floats, Media, TokenIds

    Prompt = tuple[TokenIds, tuple[Media, ...]]

AT_ONE = SamplingParams(max_new_tokens=1, temperature=1.0, ignore_eos=True)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def gap(one: Sequence[Floats], other: Sequence[Floats]) -> float:
    """Mean absolute difference in nats."""
    return float(np.abs(np.concatenate(one).astype(np.float64) - np.concatenate(other)).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A strategy as a config names it, and its model."""

    provider: Any
    config: Mapping[str, Any]
    model: ModelSpec
    key: str
    """Its role in the config."""

    @property
    def replays(self) -> bool:
        """True if it returns or replays the experts of routers."""
        return self.model.router_replay

    def build(self, *arguments: Any) -> Any:
        """Construct the strategy from its record."""
        owner = f"strategy {self.provider.name}"
        schema = schema_of(self.provider, StrategyConfig, owner=owner)
        return load_target(self.provider.target, owner=owner)(schema.model_validate(dict(self.config)), *arguments)


class Trainer:
    """The trainer's side."""

    name = "trainer"

    def __init__(self, part: Part, device: str) -> None:
        self.part = part
        self.strategy: TrainStrategy = part.build(None)
        self.strategy.build(part.model, MeshInfo(role=part.key, device=device))
        exported = (*self.strategy.export_weights(), *self.strategy.export_buffers())
        self.weights = {name: tensor.detach().cpu().clone() for name, tensor in exported}
        self.adapters: dict[str, Tensor] = {}
        """LoRA factors by layer and side; empty without adapters, and if they cannot be exported."""
        if part.model.lora is not None and part.provider.capabilities.adapter_export:
            with suppress(UnsupportedError):  # adapters that merge in another way, such as DoRA
                self.adapters = {
                    name: tensor.detach().cpu().clone() for name, tensor in self.strategy.export_adapters()
                }

    def logprobs(
        self, sequences: Sequence[ScoredTokens], params: SamplingParams, *, packed: bool = True
    ) -> list[Floats]:
        """Logprobs of the compared tokens, `[R]` each."""
        want = WantedOutputs(logprobs=True, temperature=params.temperature or 1.0)
        rows = [self._row(index, sequence) for index, sequence in enumerate(sequences)]
        values: list[Floats] = []
        for micro in pack(rows, max_sequences=None if packed else 1):
            outputs = self.strategy.forward(micro, want)
            assert outputs.logprobs_T is not None  # noqa: S101 - they were wanted
            values += np.split(outputs.logprobs_T.cpu().numpy(), np.cumsum(micro.lengths)[:-1])
        return [value[sequence.begin :] for value, sequence in zip(values, sequences, strict=True)]

    async def prefill(self, sequences: Sequence[ScoredTokens]) -> list[Floats]:
        """Logprobs at temperature 1, one sequence after the other."""
        return self.logprobs(sequences, AT_ONE, packed=False)

    async def activations(self, sequence: ScoredTokens) -> Mapping[str, Tensor]:
        """Activations of one sequence."""
        (micro,) = pack([self._row(0, sequence)])
        return self.strategy.activations(micro)

    def _row(self, index: int, sequence: ScoredTokens) -> TrainSequence:
        return TrainSequence(
            id=str(index),
            tokens=sequence.tokens,
            media=sequence.media,
            loss_mask=np.arange(len(sequence.tokens)) >= max(sequence.begin, 1),
            routed_experts=sequence.experts if self.part.replays else None,
        )


class Engine:
    """The engine's side."""

    name = "engine"

    def __init__(self, part: Part) -> None:
        self.part, self.num_requests, self.version = part, 0, 0
        self.num_surplus = 0
        """Prompt tokens that it had more than it was sent, at the last `prefill`."""
        self.strategy: InferStrategy = part.build()

    @classmethod
    async def start(cls, part: Part, device: str) -> Engine:
        """Start an engine with the model of its config."""
        engine = cls(part)
        await engine.strategy.start(part.model, MeshInfo(role=part.key, device=device))
        return engine

    async def publish(self, trainer: Trainer, weights: Mapping[str, Tensor] | None = None) -> list[str]:
        """Send the trainer's weights, its adapters alone if the engine serves these, or `weights` instead, in the
        engine's dtype. Returns the names whose digests the engine reports otherwise.

        Raises `WeightSyncError`.
        """
        dtype = DTYPES.get(self.part.model.dtype, torch.float32)
        tensors: Any = (weights or trainer.weights).items()
        if self.part.model.lora is not None:
            tensors = trainer.adapters.items()
        tensors = ((name, tensor.detach().cpu().contiguous()) for name, tensor in tensors)
        sent = [(name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in tensors]
        self.version += 1
        manifest = make_manifest(self.version, sent)
        receipt = await self.strategy.update_weights(self.version, manifest, iter(sent))
        return [entry.name for entry in manifest.tensors if receipt.digests.get(entry.name) != entry.digest]

    async def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, n: int = 2, alone: bool = False
    ) -> tuple[list[ScoredTokens], list[Floats]]:
        """Sample `n` responses to each prompt, all at once or one request after the other."""
        requests = [self._request(tokens, params, media=media, n=n) for tokens, media in prompts]
        completions = await self._completions(requests, alone=alone)
        pairs = [
            (
                ScoredTokens(np.concatenate([tokens, output.token_ids]), len(tokens), media, output.routed_experts),
                output.logprobs,
            )
            for (tokens, media), completion in zip(prompts, completions, strict=True)
            for output in completion.outputs
            if len(output.token_ids)
        ]
        return [sequence for sequence, _ in pairs], [logprobs for _, logprobs in pairs]

    async def prefill(self, sequences: Sequence[ScoredTokens]) -> list[Floats]:
        """Logprobs at temperature 1 of the same tokens, as prompts, one request after the other."""
        requests = [
            self._request(sequence.tokens, AT_ONE, media=sequence.media, prompt_logprobs=True) for sequence in sequences
        ]
        rows = []
        for sequence, completion in zip(sequences, await self._completions(requests, alone=True), strict=True):
            logprobs = completion.prompt_logprobs
            assert logprobs is not None  # noqa: S101 - they were requested
            # From the end: an engine that changes the prompt has another number of tokens.
            self.num_surplus = len(logprobs) - len(sequence.tokens)
            rows.append(logprobs[max(1, len(logprobs) - len(sequence.tokens) + sequence.begin) :])
        return rows

    async def activations(self, sequence: ScoredTokens) -> Mapping[str, Tensor]:
        """Activations of one sequence."""
        return await self.strategy.activations(sequence.tokens, sequence.media)

    def _request(self, prompt: TokenIds, params: SamplingParams, **options: Any) -> GenerateRequest:
        self.num_requests += 1
        seed = self.num_requests if self.part.provider.capabilities.seeds else None
        params = replace(params, seed=seed)
        experts = self.part.replays and not options.get("prompt_logprobs")
        name = f"mismatch {self.num_requests}"
        return GenerateRequest(id=name, prompt_ids=prompt, params=params, routed_experts=experts, **options)

    async def _completions(self, requests: Sequence[GenerateRequest], *, alone: bool) -> list[Completion]:
        if alone:
            return [await self.strategy.generate(request) for request in requests]
        return list(await asyncio.gather(*(self.strategy.generate(request) for request in requests)))
