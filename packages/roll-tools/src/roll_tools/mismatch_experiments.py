"""Experiments of `roll-core doctor mismatch`: each changes one thing and measures the gap again.

    trainer ◄── gap ──► engine          both build the model of the config; the engine has the trainer's weights
        \\                /
         gap      gap                   the side that is far from the reference is examined
          \\        /
         reference                      transformers, float32, the trainer's weights

weights ──► other requests ──► where the gap begins (activations) ──► edits of the reference, until it is explained

L tokens of a sequence, R response tokens.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from roll_core.data.pack import pack
from roll_core.errors import WeightSyncError
from roll_core.plugins.targets import load_target, schema_of
from roll_core.runtime.records.mismatch import Cause, Diagnosis
from roll_core.spec.config import StrategyConfig
from roll_core.spec.model import MeshInfo
from roll_core.spec.train import WantedOutputs
from roll_core.spec.weights import make_manifest
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence
from roll_modeling.model import empty_model
from roll_tools.mismatch_reference import Edits, Reference, ScoredTokens, kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.model import ModelSpec
    from roll_core.spec.train import TrainStrategy
    from roll_core.types import Completion, Floats, TokenIds

T = TypeVar("T")
FLOOR = 1e-5
"""Gap in nats below which float32 sides agree."""
NOISE_FACTOR = 2.5
"""The noise is this many times the gap that rounding alone causes: two sides round differently, and sequences vary."""
MIN_SHARE = 0.15
"""Smallest share of a side's gap that an edit must explain."""
SCANNED = 4
"""Number of sequences, those with the largest gap, on which the values of an experiment are tried."""
REFINEMENTS = 12
DEVICE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A strategy as a config names it, and its model."""

    provider: Any
    config: Mapping[str, Any]
    model: ModelSpec
    key: str
    """Its role in the config."""

    def build(self, *arguments: Any) -> Any:
        """Construct the strategy from its record."""
        owner = f"strategy {self.provider.name}"
        schema = schema_of(self.provider, StrategyConfig, owner=owner)
        return load_target(self.provider.target, owner=owner)(schema.model_validate(dict(self.config)), *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Trainer and engine whose logprobs differ, and the requests that show it."""

    trainer: Part
    engine: Part
    params: SamplingParams
    prompts: Sequence[TokenIds]
    device: str = DEVICE

    def diagnose(self) -> Diagnosis:
        """Build both, and examine why they disagree. Blocks."""
        with asyncio.Runner() as runner:
            return runner.run(self._diagnose())

    async def _diagnose(self) -> Diagnosis:
        trainer = Trainer(self.trainer, self.device)
        engine = await Engine.start(self, self.engine)
        try:
            return await Examination(self, trainer, engine).run()
        finally:
            await engine.strategy.stop()
            trainer.strategy.close()


class Trainer:
    """The trainer's side."""

    def __init__(self, part: Part, device: str) -> None:
        self.part = part
        self.strategy: TrainStrategy = part.build(None)
        self.strategy.build(part.model, MeshInfo(role=part.key, device=device))
        self.weights = {name: tensor.detach().cpu().clone() for name, tensor in self.strategy.export_weights()}
        self.weights |= {name: tensor.detach().cpu().clone() for name, tensor in self.strategy.export_buffers()}

    def logprobs(
        self, sequences: Sequence[ScoredTokens], params: SamplingParams, *, packed: bool = True
    ) -> list[Floats]:
        """Logprobs of the compared tokens, `[R]` each."""
        want = WantedOutputs(logprobs=True, temperature=params.temperature or 1.0)
        rows = [_train_sequence(index, sequence) for index, sequence in enumerate(sequences)]
        values: list[Floats] = []
        for micro in pack(rows, max_sequences=None if packed else 1):
            outputs = self.strategy.forward(micro, want)
            assert outputs.logprobs_T is not None  # noqa: S101 - they were wanted
            values += np.split(outputs.logprobs_T.cpu().numpy(), np.cumsum(micro.lengths)[:-1])
        return [value[sequence.begin :] for value, sequence in zip(values, sequences, strict=True)]

    def activations(self, sequence: ScoredTokens) -> Mapping[str, Tensor]:
        """Activations of one sequence."""
        (micro,) = pack([_train_sequence(0, sequence)])
        return self.strategy.activations(micro)


def _train_sequence(index: int, sequence: ScoredTokens) -> TrainSequence:
    mask = np.arange(len(sequence.tokens)) >= max(sequence.begin, 1)
    return TrainSequence(id=str(index), tokens=sequence.tokens, loss_mask=mask)


@dataclass
class Engine:
    """The engine's side."""

    strategy: InferStrategy
    part: Part
    num_requests: int = 0
    version: int = 0

    @classmethod
    async def start(cls, pair: Pair, part: Part) -> Self:
        """Start an engine with the model of its config."""
        engine = cls(part.build(), part)
        await engine.strategy.start(part.model, MeshInfo(role=part.key, device=pair.device))
        return engine

    async def publish(self, weights: Mapping[str, Tensor]) -> list[tuple[str, bool]]:
        """Send weights in the engine's dtype. Returns for each tensor whether the engine reports its digest.

        Raises `WeightSyncError`.
        """
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.part.model.dtype, torch.float32)
        sent = [(name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in weights.items()]
        self.version += 1
        manifest = make_manifest(self.version, sent)
        receipt = await self.strategy.update_weights(self.version, manifest, iter(sent))
        return [(entry.name, receipt.digests.get(entry.name) == entry.digest) for entry in manifest.tensors]

    async def sample(
        self, prompts: Sequence[TokenIds], params: SamplingParams, *, alone: bool = False
    ) -> tuple[list[ScoredTokens], list[Floats]]:
        """Sample two responses to each prompt, all at once or one request after the other."""
        requests = [self._request(prompt, params, n=2) for prompt in prompts]
        completions = await self._completions(requests, alone=alone)
        pairs = [
            (ScoredTokens(np.concatenate([prompt, output.token_ids]), len(prompt)), output.logprobs)
            for prompt, completion in zip(prompts, completions, strict=True)
            for output in completion.outputs
            if len(output.token_ids)
        ]
        return [sequence for sequence, _ in pairs], [logprobs for _, logprobs in pairs]

    async def prefill(self, sequences: Sequence[ScoredTokens]) -> list[Floats]:
        """Logprobs at temperature 1 of the same tokens, as prompts, one request after the other."""
        params = SamplingParams(max_new_tokens=1, temperature=1.0, ignore_eos=True)
        requests = [self._request(sequence.tokens[:-1], params, prompt_logprobs=True) for sequence in sequences]
        completions = await self._completions(requests, alone=True)
        rows = []
        for sequence, completion in zip(sequences, completions, strict=True):
            logprobs = completion.prompt_logprobs
            assert logprobs is not None  # noqa: S101 - they were requested
            number = len(sequence.tokens) - 1 - sequence.begin
            # From the end: an engine that changes the prompt has another number of tokens.
            rows.append(logprobs[max(1, len(logprobs) - number) :] if number else logprobs[:0])
        return rows

    def _request(self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, prompt_logprobs: bool = False) -> Any:
        self.num_requests += 1
        seed = self.num_requests if self.part.provider.capabilities.seeds else None
        return GenerateRequest(
            id=f"mismatch {self.num_requests}",
            prompt_ids=prompt,
            params=replace(params, seed=seed),
            n=n,
            prompt_logprobs=prompt_logprobs,
        )

    async def _completions(self, requests: Sequence[GenerateRequest], *, alone: bool) -> list[Completion]:
        if alone:
            return [await self.strategy.generate(request) for request in requests]
        return list(await asyncio.gather(*(self.strategy.generate(request) for request in requests)))


# -- edits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Experiment:
    """An edit of the reference with the values to try."""

    name: str
    kinds: tuple[str, ...]
    """Kinds of points at which it can begin; `any` is everywhere, `logits` after the model."""
    values: tuple[Any, ...]
    edit: Callable[[Edits, Any], Edits]
    fix: str
    refined: bool = False
    """Between the best value and its neighbours, the best one is searched."""


LOW = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn


def _set(name: str) -> Callable[[Edits, Any], Edits]:
    return lambda edits, value: replace(edits, **{name: value})


def _in(kind: str) -> Callable[[Edits, Any], Edits]:
    return lambda edits, dtype: replace(edits, computed_in={**edits.computed_in, kind: dtype})


def _grid(low: float, high: float, number: int) -> tuple[float, ...]:
    return tuple(float(value) for value in np.geomspace(low, high, number))


def experiments(reference: Reference, trainer: Trainer, params: SamplingParams) -> list[Experiment]:
    """The table of edits, with the smallest fix of each in config keys."""
    temperature = params.temperature or 1.0
    longest = 64
    token_ids = [_token_id(reference, name) for name in ("bos", "eos", "pad")]
    special = {token for token in token_ids if isinstance(token, int)}
    table = [
        Experiment(
            "sampling.temperature",
            ("logits",),
            (1.0, *(temperature * factor for factor in _grid(0.25, 4, 9))),
            _set("temperature"),
            "actor_infer.generating_args.temperature, equal on both sides, and logprobs after it",
            True,
        ),
        Experiment(
            "sampling.processed_logprobs",
            ("logits",),
            (True,),
            _set("processed"),
            "actor_infer.generating_args: {top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1}, or raw logprobs",
        ),
        Experiment(
            "sampling.top_p",
            ("logits",),
            (0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
            _set("top_p"),
            "actor_infer.generating_args.top_p: 1",
        ),
        Experiment(
            "sampling.repetition_penalty",
            ("logits",),
            _grid(0.5, 2, 8),
            _set("penalty"),
            "actor_infer.generating_args.repetition_penalty: 1",
            True,
        ),
        Experiment("inputs.shift", ("logits",), (1, -1), _set("shift"), "the engine's logprobs: one a sampled token"),
        Experiment(
            "model.logit_softcap",
            ("logits",),
            _grid(2, 64, 8),
            _set("softcap"),
            "model_config_kwargs.final_logit_softcapping, equal on both sides",
            True,
        ),
        Experiment(
            "arithmetic.logprobs", ("logits",), LOW, _in("logprobs"), "logprobs in float32, from float32 logits"
        ),
        Experiment("arithmetic.head", ("head",), LOW, _in("head"), "the head in float32, or model_args.dtype: fp32"),
        Experiment("arithmetic.norm", ("norm",), LOW, _in("norm"), "norms in float32, or model_args.dtype: fp32"),
        Experiment(
            "arithmetic.rope", ("rope", "attention"), LOW, _in("rope"), "rope in float32, or model_args.dtype: fp32"
        ),
        Experiment(
            "arithmetic.rope", ("rope", "attention"), LOW, _in("angles"), "positions and frequencies of rope in float32"
        ),
        Experiment("arithmetic.router", ("router",), LOW, _in("router"), "the router in float32"),
        Experiment("arithmetic.softmax", ("attention",), LOW, _set("softmax"), "softmax of attention in float32"),
        Experiment(
            "arithmetic.kv_dtype",
            ("attention",),
            (*LOW, FP8),
            _set("kv"),
            "actor_infer.strategy_args.strategy_config: the KV cache in the model's dtype",
        ),
        Experiment("arithmetic.linear", ("linear",), LOW, _in("linear"), "model_args.dtype, equal on both sides"),
        Experiment("arithmetic.dtype", ("any",), LOW, _in("all"), "model_args.dtype, equal on both sides"),
        Experiment(
            "weights.rounded",
            ("any",),
            (*LOW, FP8),
            _set("rounded"),
            "model_args.dtype and weight_format, equal on both sides",
        ),
        Experiment(
            "model.rope",
            ("rope", "attention"),
            tuple(math.log(base) / math.log(reference.base) for base in _grid(100, 1e8, 25)),
            _set("rope_base"),
            "model_config_kwargs.rope_parameters.rope_theta, equal on both sides",
            True,
        ),
        Experiment(
            "model.rope_scaling",
            ("rope", "attention"),
            (0.125, 0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0),
            _set("rope_factor"),
            "model_config_kwargs.rope_parameters: type and factor, equal on both sides",
            True,
        ),
        Experiment(
            "model.attention_scale",
            ("attention",),
            _grid(0.125, 8, 13),
            _set("scale"),
            "the model's config: head_dim, query_pre_attn_scalar, attention_multiplier",
            True,
        ),
        Experiment(
            "model.sliding_window",
            ("attention",),
            tuple(range(1, longest)),
            _set("window"),
            "model_config_kwargs.sliding_window, equal on both sides",
        ),
        Experiment(
            "model.norm_epsilon",
            ("norm",),
            _grid(1e-8, 1, 17),
            _set("epsilon"),
            "model_config_kwargs.rms_norm_eps, equal on both sides",
            True,
        ),
        Experiment(
            "inputs.truncation",
            ("inputs", "embedding"),
            tuple(range(1, longest)),
            _set("num_visible"),
            "prompt_length, and the engine's maximum length: equal on both sides",
        ),
        Experiment(
            "inputs.special_tokens",
            ("inputs", "embedding"),
            (*((token,) for token in sorted(special)), ()),
            lambda edits, ids: replace(edits, prepended=ids, dropped=0 if ids else 1),
            "prompts that begin with the special token once: the template, or the engine's add_special_tokens",
        ),
        Experiment(
            "inputs.positions",
            ("inputs", "rope", "embedding", "attention"),
            (True,),
            _set("restarted"),
            "positions that count through prompt and response",
        ),
        Experiment(
            "inputs.positions",
            ("inputs", "rope", "embedding", "attention"),
            tuple(range(-8, 0)) + tuple(range(1, 9)),
            _set("jump"),
            "positions that count through prompt and response",
        ),
        Experiment("inputs.positions", ("inputs", "rope", "embedding"), (1, -1), _set("offset"), "positions from 0"),
    ]
    if reference.initial:
        table.append(
            Experiment(
                "weights.stale",
                ("any",),
                (reference.initial,),
                _weights,
                "report to the engine: it computes with old weights",
            )
        )
        if trainer.part.model.lora is not None:
            change = {name: (value, reference.parameters[name].clone()) for name, value in reference.initial.items()}
            table.append(
                Experiment(
                    "model.lora_scale",
                    ("any",),
                    (0.25, 0.5, 2.0, 4.0, 8.0),
                    lambda edits, factor: _weights(
                        edits, {name: old + factor * (new - old) for name, (old, new) in change.items()}
                    ),
                    "lora_alpha, lora_rank and use_rslora, equal on both sides",
                    True,
                )
            )
    head, embedding = reference.model.get_output_embeddings(), reference.model.get_input_embeddings()
    names = {id(parameter): name for name, parameter in reference.parameters.items()}
    if head is not None and head.weight is not embedding.weight and head.weight.shape == embedding.weight.shape:
        tied = {names[id(head.weight)]: embedding.weight.detach().clone()}
        table.append(
            Experiment(
                "model.tied_head", ("head",), (tied,), _weights, "model_config_kwargs.tie_word_embeddings: false"
            )
        )
    return table


def _weights(edits: Edits, weights: dict[str, Tensor]) -> Edits:
    return replace(edits, weights={**edits.weights, **weights})


def _token_id(reference: Reference, name: str) -> Any:
    return getattr(reference.model.config.get_text_config(), f"{name}_token_id", None)


# -- examination -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Measured:
    """Tokens that the engine sampled, with the logprobs of all sides."""

    sequences: list[ScoredTokens]
    engine: list[Floats]
    trainer: list[Floats]
    reference: list[Floats]


def gap(one: Sequence[Floats], other: Sequence[Floats]) -> float:
    """Mean absolute difference in nats."""
    return float(np.abs(np.concatenate(one).astype(np.float64) - np.concatenate(other)).mean())


class Examination:
    """One examination of a pair. Collects causes, the largest share first."""

    def __init__(self, pair: Pair, trainer: Trainer, engine: Engine) -> None:
        self.pair, self.trainer, self.engine = pair, trainer, engine
        self.reference = Reference(pair.trainer.model, trainer.weights, pair.device)
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self.not_examined: list[str] = []
        self.first_gap = 0.0
        self.drops: dict[str, float] = {}
        """Share of a side's gap by kind of point, of the side examined last."""

    async def run(self) -> Diagnosis:
        """Examine weights, config keys, both sides, and whether the engine follows an update."""
        if not self.reference.edits_attention:
            self.not_examined.append("attention: the model's architecture has one of its own")
        await self._publish(self.engine)
        measured = await self._measure(self.engine)
        self.first_gap = current_gap = gap(measured.engine, measured.trainer)
        noise = self._noise(measured, self.pair.engine)
        num_tokens = sum(map(len, measured.engine))
        if current_gap > noise:
            part, measured = await self._differing_keys(measured, noise)
            noise = self._noise(measured, part)
            if self.engine.part is not part:
                await self._replace_engine(part)
            if gap(measured.engine, measured.trainer) > noise:
                await self._examine_engine(measured, noise)
                await self._examine_trainer(measured, noise)
        await self._follows_update(noise)
        self.causes.sort(key=lambda cause: -cause.share)
        rest = self.first_gap * max(0.0, 1 - sum(cause.share for cause in self.causes))
        return Diagnosis(
            gap=self.first_gap,
            noise=noise,
            num_tokens=num_tokens,
            causes=_in_order(self.causes, self.first_gap, rest),
            not_examined=tuple(self.not_examined),
            notes=tuple(self.notes),
        )

    # -- measuring -----------------------------------------------------------------------------------------------------

    async def _measure(self, engine: Engine, *, alone: bool = False, prompts: Any = None) -> Measured:
        sequences, logprobs = await engine.sample(prompts or self.pair.prompts, self.pair.params, alone=alone)
        params = self.pair.params
        return Measured(
            sequences,
            logprobs,
            self.trainer.logprobs(sequences, params),
            self.reference.logprobs(sequences, params),
        )

    def _noise(self, measured: Measured, engine: Part) -> float:
        """Gap that rounding alone causes if both sides compute in the less precise common dtype."""
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}
        dtypes = [low.get(part.model.dtype) for part in (self.pair.trainer, engine)]
        common = dtypes[0] if dtypes[0] == dtypes[1] else None
        if common is None:
            return FLOOR
        rounded = self.reference.logprobs(measured.sequences, self.pair.params, _in("all")(Edits(), common))
        noise = NOISE_FACTOR * gap(rounded, measured.reference)
        self.notes.append(
            f"noise: {engine.model.dtype} moves the logprobs of the reference by {noise / NOISE_FACTOR:.3g}"
        )
        return noise

    def _add(self, name: str, before: float, after: float, evidence: str, fix: str, scale: float = 1.0) -> None:
        share = min(1.0, scale * max(0.0, before - after) / self.first_gap) if self.first_gap else 1.0
        self.causes.append(Cause(name=name, share=share, before=before, after=after, evidence=evidence, fix=fix))

    # -- weights and keys ----------------------------------------------------------------------------------------------

    async def _publish(self, engine: Engine) -> None:
        """Send the trainer's weights and compare the digests that the engine reports."""
        try:
            equal = await engine.publish(self.trainer.weights)
        except WeightSyncError as error:
            self.notes.append(f"weights: the engine refuses them: {error}")
            return
        wrong = [name for name, is_equal in equal if not is_equal]
        told = (
            f"{len(wrong)} of {len(equal)} digests differ, first {wrong[0]}"
            if wrong
            else f"{len(equal)} digests are equal"
        )
        self.notes.append(f"weights: {told}")

    async def _differing_keys(self, measured: Measured, noise: float) -> tuple[Part, Measured]:
        """Give the engine each model key of the trainer that differs, one after the other, and keep what helps."""
        part = self.pair.engine
        for name, evidence, fix, model in _differences(self.pair.trainer.model, part):
            before = gap(measured.engine, measured.trainer)
            if before <= noise:
                break
            candidate = replace(part, model=model(part.model))
            remeasured = await self._with_part(candidate)
            after = gap(remeasured.engine, remeasured.trainer)
            if before - after > MIN_SHARE * self.first_gap:
                self._add(name, before, after, evidence, fix)
                part, measured = candidate, remeasured
        return part, measured

    async def _with_part(self, part: Part) -> Measured:
        """Measure with another engine."""
        engine = await Engine.start(self.pair, part)
        try:
            await engine.publish(self.trainer.weights)
            return await self._measure(engine)
        finally:
            await engine.strategy.stop()

    async def _replace_engine(self, part: Part) -> None:
        await self.engine.strategy.stop()
        started = await Engine.start(self.pair, part)
        self.engine.strategy, self.engine.part, self.engine.version = started.strategy, part, 0
        await self.engine.publish(self.trainer.weights)

    # -- sides ---------------------------------------------------------------------------------------------------------

    async def _examine_engine(self, measured: Measured, noise: float) -> None:
        self.drops = {}
        own_gap = gap(measured.engine, measured.reference)
        if own_gap <= noise:
            self.notes.append(f"engine: equals the reference (gap {own_gap:.3g})")
            return
        scale = own_gap / (own_gap + gap(measured.trainer, measured.reference))
        can, edits = self.engine.part.provider.capabilities, Edits()
        if can.activations:
            edits = await self._other_weights(measured, edits, scale)
        measured = await self._other_requests(measured, noise, scale, edits)
        kinds = {"everything"}
        if can.prompt_logprobs:
            sequences = [sequence for sequence in measured.sequences if len(sequence.tokens) - 1 > sequence.begin]
            prefilled = await self.engine.prefill(sequences)
            at_one = [part[:-1] for part in self.reference.logprobs(sequences, _at_one(self.pair.params), edits)]
            if any(len(own_gap) != len(other) for own_gap, other in zip(prefilled, at_one, strict=True)):
                kinds = {"inputs"}
                self.notes.append("engine: it returns logprobs of fewer tokens than the prompt has")
            elif gap(prefilled, at_one) <= noise:
                kinds = {"logits", "decode"}
            elif can.activations:
                kinds = await self._where(sequences, prefilled, at_one, edits, noise)
        if not can.activations:
            self.not_examined.append(f"layers of the engine: {self.engine.part.provider.name} returns no activations")
        await self._explain("engine", measured.sequences, measured.engine, edits, kinds, noise, scale)

    async def _examine_trainer(self, measured: Measured, noise: float) -> None:
        self.drops = {}
        own_gap = gap(measured.trainer, measured.reference)
        if own_gap <= noise:
            self.notes.append(f"trainer: equals the reference (gap {own_gap:.3g})")
            return
        scale = own_gap / (own_gap + gap(measured.engine, measured.reference))
        alone = self.trainer.logprobs(measured.sequences, self.pair.params, packed=False)
        logprobs = measured.trainer
        if gap(alone, measured.reference) < own_gap / 2:
            after = gap(alone, measured.reference)
            fix = "the trainer's batches: infer_batch_size: 1, or packing off"
            self._add("trainer.packing", own_gap, after, "sequences scored one by one instead of packed", fix, scale)
            logprobs = alone
        kinds = {"everything"}
        if self.trainer.part.provider.capabilities.activations:
            sequences = measured.sequences
            at_one = self.trainer.logprobs(sequences, _at_one(self.pair.params), packed=False)
            plain = self.reference.logprobs(sequences, _at_one(self.pair.params))
            index = _largest(at_one, plain)
            activations = self.trainer.activations(sequences[index])
            kinds = self._kinds(sequences[index], at_one[index], activations, Edits(), noise)
        else:
            self.not_examined.append(f"layers of the trainer: {self.trainer.part.provider.name} returns no activations")
        await self._explain("trainer", measured.sequences, logprobs, Edits(), kinds, noise, scale)

    async def _other_weights(self, measured: Measured, edits: Edits, scale: float) -> Edits:
        """Give the reference the engine's weights where they differ from the trainer's."""
        loaded = await self.engine.strategy.loaded_weights()
        low = self.engine.part.model.dtype != self.pair.trainer.model.dtype
        tolerance = 1e-2 if low else 0.0
        differing = {
            name: tensor.float()
            for name, tensor in loaded.items()
            if name in self.reference.parameters
            and not torch.allclose(tensor.float(), self.reference.parameters[name].cpu(), rtol=tolerance, atol=0.0)
        }
        if not differing:
            self.notes.append("weights: the engine computes with the trainer's; equal weights, different numbers")
            return edits
        changed = _weights(edits, differing)
        before = gap(measured.engine, measured.reference)
        after = gap(measured.engine, self.reference.logprobs(measured.sequences, self.pair.params, changed))
        old = all(
            name in self.reference.initial and torch.allclose(tensor, self.reference.initial[name].cpu())
            for name, tensor in differing.items()
        )
        if self.trainer.part.model.lora is not None and not old:
            return edits  # merged weights: the scale of the adapter may explain them
        dtypes = [
            dtype
            for dtype in (*LOW, FP8)
            if all(_is_rounded(self.reference.parameters[name], tensor, dtype) for name, tensor in differing.items())
        ]
        evidence = f"{len(differing)} of {len(loaded)} weights of the engine differ, first {min(differing)}"
        name, fix = "weights.differ", "report to the engine's plugin: it computes with other weights than it was sent"
        if old:
            name = "weights.stale"
        elif dtypes:
            name, fix = "weights.rounded", "model_args.dtype and weight_format, equal on both sides"
            evidence += f": rounded to {str(dtypes[0]).removeprefix('torch.')}"
        self._add(name, before, after, evidence, fix, scale)
        return changed

    async def _other_requests(self, measured: Measured, noise: float, scale: float, edits: Edits) -> Measured:
        """Send requests one by one, and without common prefixes."""

        def gap_of(sample: Measured) -> float:
            return gap(sample.engine, self.reference.logprobs(sample.sequences, self.pair.params, edits))

        before = gap_of(measured)
        alone = await self._measure(self.engine, alone=True)
        after = gap_of(alone)
        if before <= noise or after > before / 2:
            return measured
        distinct = [np.append(3 + index % 7, prompt[1:]) for index, prompt in enumerate(self.pair.prompts)]
        apart = await self._measure(self.engine, prompts=[distinct[index] for index in range(min(7, len(distinct)))])
        if gap_of(apart) < before / 2:
            fix = "actor_infer.strategy_args.strategy_config: prefix caching off (hf_infer: min_shared_prefix: 0)"
            self._add("engine.prefix_cache", before, gap_of(apart), "prompts without a common prefix", fix, scale)
        else:
            fix = "actor_infer.strategy_args.strategy_config.max_num_seqs: 1"
            self._add("engine.batch", before, after, "requests one after the other", fix, scale)
        return alone

    # -- where ---------------------------------------------------------------------------------------------------------

    async def _where(
        self, sequences: list[ScoredTokens], prefilled: list[Floats], at_one: list[Floats], edits: Edits, noise: float
    ) -> set[str]:
        index = _largest(prefilled, at_one)
        shorter = ScoredTokens(sequences[index].tokens[:-1], sequences[index].begin)
        activations = await self.engine.strategy.activations(shorter.tokens)
        return self._kinds(shorter, prefilled[index], activations, edits, noise)

    def _kinds(
        self, sequence: ScoredTokens, logprobs: Floats, activations: Mapping[str, Tensor], edits: Edits, noise: float
    ) -> set[str]:
        """Kinds of points at which the gap begins: the reference continues from the side's activations at each point,
        and the gap that this takes away is that point's."""
        points = self.reference.patched(sequence, activations, edits)
        gaps = [gap([values], [logprobs]) for _, values in points]
        drops: dict[str, float] = {}
        for (name, _), before, after in zip(points[1:], gaps, gaps[1:], strict=False):
            drops[kind_of(name)] = drops.get(kind_of(name), 0.0) + before - after
        last = points[-1][0]
        drops["logits" if kind_of(last) == "head" else "head"] = gaps[-1]
        self.drops = {kind: drop / gaps[0] for kind, drop in drops.items() if gaps[0] and drop > 0.1 * gaps[0]}
        if gaps[0] <= noise or (gaps[-1] > 0.5 * gaps[0] and kind_of(last) == "head"):
            self.drops = {}
            return {"inputs", "logits"}
        first = next(
            (
                name
                for (name, _), before, after in zip(points[1:], gaps, gaps[1:], strict=False)
                if before - after > 0.1 * gaps[0]
            ),
            last,
        )
        shares = ", ".join(
            f"{kind} {share:.0%}" for kind, share in sorted(self.drops.items(), key=lambda item: -item[1])
        )
        self.notes.append(f"layers: {shares}; the first point with a gap is {first}")
        return {*self.drops, "logits"}

    # -- edits ---------------------------------------------------------------------------------------------------------

    async def _explain(
        self,
        side: str,
        sequences: list[ScoredTokens],
        logprobs: list[Floats],
        edits: Edits,
        kinds: set[str],
        noise: float,
        scale: float,
    ) -> None:
        """Find the edits of the reference that reproduce a side's logprobs."""

        def measure(changed: Edits) -> float:
            return gap(logprobs, self.reference.logprobs(sequences, self.pair.params, changed))

        plain = self.reference.logprobs(sequences, self.pair.params, edits)
        by_gap = sorted(range(len(plain)), key=lambda index: -float(np.abs(plain[index] - logprobs[index]).sum()))[
            :SCANNED
        ]

        def scan(changed: Edits) -> float:
            """The gap of the worst sequences alone."""
            edited = self.reference.logprobs([sequences[index] for index in by_gap], self.pair.params, changed)
            return gap([logprobs[index] for index in by_gap], edited)

        table = experiments(self.reference, self.trainer, self.pair.params)
        first = left = measure(edits)
        chosen: list[tuple[Experiment, Any]] = []
        for allowed in (kinds & {"logits"}, {"everything"} if "decode" in kinds else kinds):
            if allowed and left > first / 2:
                chosen, left = _greedy(table, edits, allowed, measure, scan, noise, first)
        if left > first / 2:
            chosen, left = [], first  # nothing reproduces the side: accidental likeness
        alone = [
            measure(_applied(edits, [other for other in chosen if other is not choice])) - left for choice in chosen
        ]
        total = sum(alone) or 1.0
        factor = scale * min(1.0, self.first_gap / first) if scale == 1 else scale
        for (experiment, value), part in zip(chosen, alone, strict=True):
            after = first - (first - left) * part / total
            evidence = f"the reference reproduces the {side} with {_told(experiment, value)}"
            self._add(experiment.name, first, after, evidence, experiment.fix, factor)
        if chosen or left <= noise:
            return
        where = max(self.drops, key=self.drops.__getitem__, default="")
        name, fix = f"arithmetic.{where}" if where else "", f"compare the {side}'s code there with transformers'"
        evidence, after = f"no edit of the reference reproduces it; layers: {where or 'none in a prefill'}", noise
        if side == "engine" and not where and (key := await self._key_that_helps(edits, left)):
            name, after, evidence, fix = key
        if "decode" in kinds:
            name, evidence = (
                "engine.decode",
                f"only tokens that are decoded have the gap, not those of a prompt; {evidence}",
            )
        if name:
            self._add(name, left, after, evidence, fix, factor)

    async def _key_that_helps(self, edits: Edits, before: float) -> tuple[str, float, str, str] | None:
        """The key of the engine's strategy_config that causes most of the gap."""
        part = self.engine.part
        for key, value in part.config.items():
            config = {name: other for name, other in part.config.items() if name != key}
            remeasured = await self._with_part(replace(part, config=config))
            after = gap(remeasured.engine, self.reference.logprobs(remeasured.sequences, self.pair.params, edits))
            if after < before / 2:
                where = f"{part.key}.strategy_args.strategy_config.{key}"
                return f"engine.{key}", after, f"an engine without {where}: {value}", f"remove {where}"
        return None

    # -- updates -------------------------------------------------------------------------------------------------------

    async def _follows_update(self, noise: float) -> None:
        """Publish other weights: does every weight of the engine change?"""
        if any(cause.name.startswith("weights.") for cause in self.causes):
            return
        generator = torch.Generator().manual_seed(0)
        moved = {
            name: tensor + 0.1 * tensor.float().std() * torch.randn(tensor.shape, generator=generator).to(tensor)
            if tensor.is_floating_point() and tensor.ndim > 1
            else tensor
            for name, tensor in self.trainer.weights.items()
        }
        try:
            await self.engine.publish(moved)
        except WeightSyncError as error:
            self._add("weights.differ", self.first_gap or 1.0, 0.0, f"an update fails: {error}", "report to the engine")
            return
        params = self.pair.params
        sequences, logprobs = await self.engine.sample(self.pair.prompts, params, alone=True)

        def gap_to(weights: Mapping[str, Tensor]) -> float:
            known = {name: tensor for name, tensor in weights.items() if name in self.reference.parameters}
            return gap(logprobs, self.reference.logprobs(sequences, params, Edits(weights=known)))

        new, old = gap_to(moved), gap_to(self.trainer.weights)
        baseline = max(4 * noise, 2 * self.first_gap)
        if new <= baseline or new < old / 10:
            self.notes.append(
                f"updates: the engine follows (gap to the new weights {new:.3g}, to the old ones {old:.3g})"
            )
            return
        by_name = {name: gap_to({**moved, name: self.trainer.weights[name]}) for name in moved if old > new / 2}
        least = min(by_name, key=by_name.__getitem__, default="")
        if old <= min(by_name.values(), default=math.inf):
            evidence, after = f"after an update the engine computes with the old weights (gap {old:.3g})", old
        else:
            evidence, after = f"after an update {least} keeps its old value (gap {by_name[least]:.3g})", by_name[least]
        if after > new / 2:
            return
        self.first_gap = self.first_gap or new
        self.first_gap = max(self.first_gap, new)
        self._add("weights.stale", new, after, evidence, "report to the engine's plugin: an update leaves stale copies")


def _is_rounded(full: Tensor, rounded: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(full.cpu().to(dtype).float(), rounded)


def _at_one(params: SamplingParams) -> SamplingParams:
    return replace(params, temperature=1.0)


def _largest(one: list[Floats], other: list[Floats]) -> int:
    """Index of the sequence with the largest gap."""
    sums = [float(np.abs(a[: len(b)] - b[: len(a)]).sum()) for a, b in zip(one, other, strict=True)]
    return int(np.argmax(sums))


def _applied(edits: Edits, chosen: Sequence[tuple[Experiment, Any]]) -> Edits:
    for experiment, value in chosen:
        edits = experiment.edit(edits, value)
    return edits


def _greedy(
    table: Sequence[Experiment],
    edits: Edits,
    kinds: set[str],
    measure: Callable[[Edits], float],
    scan: Callable[[Edits], float],
    noise: float,
    first: float,
) -> tuple[list[tuple[Experiment, Any]], float]:
    """Experiments of these kinds that explain the gap together, and the gap that is left: at each turn the best one."""
    chosen: list[tuple[Experiment, Any]] = []
    left = first
    while left > noise:
        current, trials = _applied(edits, chosen), []
        for experiment in table:
            begins = {"any", *kinds} & set(experiment.kinds) or "everything" in kinds
            if not begins or experiment.name in {taken.name for taken, _ in chosen}:
                continue
            trials.append((*_best(experiment, current, scan), experiment))
            if trials[-1][0] <= noise:
                break
        if not trials:
            break
        _, value, experiment = min(trials, key=lambda trial: trial[0])
        after = measure(experiment.edit(current, value))
        if left - after < MIN_SHARE * first:
            break
        chosen.append((experiment, value))
        left = after
    return chosen, left


def _best(experiment: Experiment, edits: Edits, measure: Callable[[Edits], float]) -> tuple[float, Any]:
    """Smallest gap of an experiment, and its value."""
    tried = sorted((measure(experiment.edit(edits, value)), index) for index, value in enumerate(experiment.values))
    least, index = tried[0]
    value = experiment.values[index]
    if not experiment.refined:
        return least, value
    low = experiment.values[max(index - 1, 0)]
    high = experiment.values[min(index + 1, len(experiment.values) - 1)]
    for _ in range(REFINEMENTS):
        for middle in ((low + value) / 2, (value + high) / 2):
            if (nearer := measure(experiment.edit(edits, middle))) < least:
                low, high = (low, value) if middle < value else (value, high)
                least, value = nearer, middle
                break
        else:
            low, high = (low + value) / 2, (value + high) / 2
    return least, value


def _told(experiment: Experiment, value: Any) -> str:
    if isinstance(value, dict):
        return f"other values of {len(value)} weights"
    name = experiment.name.partition(".")[2].replace("_", " ")
    return f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {str(value).removeprefix('torch.')}"


def _in_order(causes: Sequence[Cause], first: float, rest: float) -> tuple[Cause, ...]:
    """Causes with the gap before and after each, if they are removed in this order."""
    ordered, left = [], first
    for cause in causes:
        after = max(rest, left - cause.share * first)
        ordered.append(replace(cause, before=left, after=after))
        left = after
    return tuple(ordered)


def _differences(trainer: ModelSpec, engine: Part) -> Iterator[tuple[str, str, str, Callable[[ModelSpec], ModelSpec]]]:
    """Name, evidence, fix and change of each key of the engine's model that differs from the trainer's."""
    role = engine.key
    if engine.model.dtype != trainer.dtype:
        evidence = f"{role}.model_args.dtype {engine.model.dtype} instead of {trainer.dtype}"
        fix = f"{role}.model_args.dtype: {trainer.dtype}"
        yield "arithmetic.dtype", evidence, fix, lambda spec: replace(spec, dtype=trainer.dtype)
    mine, others = (empty_model(spec).config.to_dict() for spec in (trainer, engine.model))
    for key in sorted(mine.keys() | others.keys()):
        if key in IGNORED or mine.get(key) == others.get(key):
            continue
        value = mine.get(key)
        name = next((name for part, name in KEY_NAMES if part in key), "model.config")
        evidence = f"{key} is {others.get(key)} in the engine's model, {value} in the trainer's"
        yield (
            name,
            evidence,
            f"{role}.model_args.model_config_kwargs.{key}: {value}",
            partial(_with_key, key=key, value=value),
        )
    if engine.model.attn_implementation != trainer.attn_implementation:
        yield (
            "arithmetic.attention_kernel",
            f"attn_implementation {engine.model.attn_implementation} instead of {trainer.attn_implementation}",
            f"{role}.model_args.attn_implementation: {trainer.attn_implementation}",
            lambda spec: replace(spec, attn_implementation=trainer.attn_implementation),
        )


def _with_key(spec: ModelSpec, key: str, value: Any) -> ModelSpec:
    if spec.random_init is not None:
        return replace(spec, random_init={**spec.random_init, key: value})
    return replace(spec, config_overrides={**spec.config_overrides, key: value})


IGNORED = frozenset({"dtype", "torch_dtype", "_name_or_path", "transformers_version", "use_cache", "architectures"})
KEY_NAMES = (
    ("rope", "model.rope"),
    ("tie_word", "model.tied_head"),
    ("window", "model.sliding_window"),
    ("norm_eps", "model.norm_epsilon"),
    ("softcap", "model.logit_softcap"),
    ("layer_types", "model.sliding_window"),
)
"""Cause by a part of the key of transformers' config."""
