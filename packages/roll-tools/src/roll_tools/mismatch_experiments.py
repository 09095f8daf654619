"""Experiments of `roll-core doctor mismatch`: each changes one thing and measures the gap again.

    trainer ◄── gap ──► engine          both build the model of the config; the engine has the trainer's weights
        \\                /
         gap      gap                   the side that is far from the reference is examined
          \\        /
         reference                      transformers, float32, the trainer's weights

weights ──► other requests ──► where the gap begins (activations) ──► edits of the reference, until it is explained
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.errors import WeightSyncError
from roll_core.runtime.records.mismatch import Cause, Diagnosis
from roll_modeling.model import empty_model
from roll_modeling.model_table import has_experts
from roll_tools.mismatch_edits import (
    LOW,
    MIN_SHARE,
    applied,
    compute_in,
    described,
    experiments,
    explain,
    fix_of,
    with_weights,
)
from roll_tools.mismatch_reference import FP8, ROWS, Edits, Reference, ScoredTokens, kind_of, rounded
from roll_tools.mismatch_sides import DTYPES, Engine, Part, Trainer, gap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.model import ModelSpec
    from roll_core.types import Floats, Media, SamplingParams, TokenIds
    from roll_tools.mismatch_edits import Choice
    from roll_tools.mismatch_sides import Prompt

FLOOR = 1e-5
"""Gap in nats below which float32 sides agree."""
NOISE_FACTOR = 2.5
"""The noise is this many times the gap that rounding alone causes: two sides round differently, and sequences vary."""
SCANNED = 4
"""Number of sequences, those with the largest gap, on which the values of an experiment are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Trainer and engine whose logprobs differ, and the requests that show it."""

    trainer: Part
    engine: Part
    params: SamplingParams
    prompts: Sequence[TokenIds]
    media: Sequence[tuple[Media, ...]] = ()
    """Images of each prompt; empty if none has any."""
    device: str = "cpu"

    def requests(self) -> list[Prompt]:
        """Tokens and images of the prompts."""
        return list(zip(self.prompts, self.media or ((),) * len(self.prompts), strict=True))

    def distinct(self, shift: int) -> list[Prompt]:
        """Prompts without images whose first tokens all differ, so that no two have a common prefix. Another `shift`
        gives other first tokens."""
        plain = [tokens for tokens, media in self.requests() if not media]
        if not plain:
            return self.requests()
        ids = np.unique(np.concatenate(plain))
        return [(np.append(np.roll(ids, -shift)[i], tokens[1:]), ()) for i, tokens in enumerate(plain[: len(ids)])]

    def diagnose(self) -> Diagnosis:
        """Build both, and examine why they disagree. Blocks."""
        return asyncio.run(self.examine())

    async def examine(self) -> Diagnosis:
        """Same as `diagnose`, on the running event loop."""
        trainer = Trainer(self.trainer, self.device)
        try:
            engine = await Engine.start(self.engine, self.device)
            examination = Examination(self, trainer, engine)
            try:
                return await examination.run()
            finally:
                await examination.engine.strategy.stop()
        finally:
            trainer.strategy.close()


@dataclass(slots=True)
class Measured:
    """Tokens that the engine sampled, with the logprobs of all sides."""

    sequences: list[ScoredTokens]
    engine: list[Floats]
    trainer: list[Floats]
    reference: list[Floats]

    @property
    def gap(self) -> float:
        """Gap between both sides."""
        return gap(self.engine, self.trainer)


class Examination:
    """One examination of a pair. Collects causes, the largest share first."""

    def __init__(self, pair: Pair, trainer: Trainer, engine: Engine) -> None:
        self.pair, self.trainer, self.engine = pair, trainer, engine
        self.reference = Reference(pair.trainer.model, trainer.weights, pair.device)
        self.at_one = replace(pair.params, temperature=1.0)
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self.not_examined: list[str] = []
        self.wrong_digests: list[str] = []
        self.located: set[str] = set()
        """Causes that no edit reproduces."""
        self.first_gap, self.noise = 0.0, FLOOR
        self.drops: dict[str, float] = {}
        """Share of a side's gap by kind of point, of the side examined last."""

    async def run(self) -> Diagnosis:
        """Examine weights, config keys, both sides, and whether the engine follows an update."""
        if not self.reference.edits_attention:
            self.not_examined.append("attention: the model's architecture has one of its own")
        try:
            self.wrong_digests = await self.engine.publish(self.trainer)
            told = f", first {self.wrong_digests[0]}" if self.wrong_digests else ""
            self.notes.append(f"weights: {len(self.wrong_digests) or 'no'} digests differ{told}")
        except WeightSyncError as error:
            self.notes.append(f"weights: the engine refuses them: {error}")
        measured = await self._measure(self.engine)
        self.first_gap = measured.gap
        self._set_noise(measured)
        num_tokens = sum(map(len, measured.engine))
        if measured.gap > self.noise:
            measured = await self._differing_keys(measured)
        if measured.gap > self.noise:
            await self._examine_engine(measured)
            await self._examine_trainer(measured)
            await self._replayed(measured)
        await self._follows_update()
        self.causes.sort(key=lambda cause: -cause.share)
        rest = self.first_gap * max(0.0, 1 - sum(cause.share for cause in self.causes))
        return Diagnosis(
            gap=self.first_gap,
            noise=self.noise,
            num_tokens=num_tokens,
            causes=_in_order(self.causes, self.first_gap, rest),
            not_examined=tuple(self.not_examined),
            notes=tuple(self.notes),
        )

    # -- measuring -----------------------------------------------------------------------------------------------------

    async def _measure(self, engine: Engine, *, alone: bool = False, prompts: list[Prompt] | None = None) -> Measured:
        params = self.pair.params
        sequences, logprobs = await engine.sample(prompts or self.pair.requests(), params, alone=alone)
        trainer = self.trainer.logprobs(sequences, params)
        return Measured(sequences, logprobs, trainer, self.reference.logprobs(sequences, params))

    def _gap_to(self, measured: Measured, edits: Edits) -> float:
        """Gap between the engine and the edited reference."""
        return gap(measured.engine, self.reference.logprobs(measured.sequences, self.pair.params, edits))

    def _set_noise(self, measured: Measured) -> None:
        """Gap that rounding alone causes if both sides compute in the same low dtype."""
        name = self.engine.part.model.dtype
        if name not in DTYPES or name != self.pair.trainer.model.dtype:
            self.noise = FLOOR
            return
        edits = compute_in("all")(Edits(), DTYPES[name])
        moved = gap(self.reference.logprobs(measured.sequences, self.pair.params, edits), measured.reference)
        self.noise = NOISE_FACTOR * moved
        self.notes.append(f"noise: {name} moves the logprobs of the reference by {moved:.3g}")

    def _add(self, name: str, before: float, after: float, evidence: str, *, fix: str = "", scale: float = 1.0) -> None:
        share = min(1.0, scale * max(0.0, before - after) / self.first_gap) if self.first_gap else 1.0
        cause = Cause(name=name, share=share, before=before, after=after, evidence=evidence, fix=fix or fix_of(name))
        self.causes.append(cause)

    # -- keys ----------------------------------------------------------------------------------------------------------

    async def _differing_keys(self, measured: Measured) -> Measured:
        """Give the engine each model key of the trainer that differs, one after the other, and keep what helps."""
        part = self.pair.engine
        for name, evidence, fix, model in _differences(self.pair.trainer.model, part):
            if measured.gap <= self.noise:
                break
            candidate = replace(part, model=model(part.model))
            remeasured = await self._with_part(candidate)
            if measured.gap - remeasured.gap > MIN_SHARE * self.first_gap:
                self._add(name, measured.gap, remeasured.gap, evidence, fix=fix)
                part, measured = candidate, remeasured
        if part is not self.pair.engine:
            await self.engine.strategy.stop()
            self.engine = await Engine.start(part, self.pair.device)
            await self.engine.publish(self.trainer)
            self._set_noise(measured)
        return measured

    async def _with_part(self, part: Part) -> Measured:
        """Measure with another engine."""
        engine = await Engine.start(part, self.pair.device)
        try:
            await engine.publish(self.trainer)
            return await self._measure(engine)
        finally:
            await engine.strategy.stop()

    async def _replayed(self, measured: Measured) -> None:
        """Let the trainer use the experts that the engine chose, if nothing else explains the gap."""
        sides, model = (self.pair.trainer, self.engine.part), self.pair.trainer.model
        can = sides[0].provider.capabilities.router_replay and sides[1].provider.capabilities.routed_experts
        if model.router_replay or not has_experts(self.reference.model.config.to_dict()):
            return
        if not can:
            self.not_examined.append("router replay: one side returns or replays no experts")
            return
        on = [replace(side, model=replace(side.model, router_replay=True)) for side in sides]
        original, self.trainer = self.trainer, Trainer(on[0], self.pair.device)
        try:
            replayed = await self._with_part(on[1])
        finally:
            self.trainer.strategy.close()
            self.trainer = original
        reproduced = {cause.name for cause in self.causes} - self.located
        if not reproduced and replayed.gap < measured.gap / 2:
            evidence = "the trainer computes with the experts that the engine chose"
            self.causes = []
            self._add("model.router_replay", measured.gap, replayed.gap, evidence)
        else:
            self.notes.append(f"router replay: gap {measured.gap:.3g} → {replayed.gap:.3g}")

    # -- sides ---------------------------------------------------------------------------------------------------------

    async def _examine_engine(self, measured: Measured) -> None:
        self.drops = {}
        own_gap = gap(measured.engine, measured.reference)
        if own_gap <= self.noise:
            self.notes.append(f"engine: equals the reference (gap {own_gap:.3g})")
            return
        scale = own_gap / (own_gap + gap(measured.trainer, measured.reference))
        provider, edits = self.engine.part.provider, Edits()
        if provider.capabilities.activations:
            edits = await self._other_weights(measured, scale)
        else:
            self.not_examined.append(f"layers of the engine: {provider.name} returns no activations")
        measured = await self._other_requests(measured, scale, edits)
        kinds = {"everything"}
        if provider.capabilities.prompt_logprobs:
            sequences = [sequence for sequence in measured.sequences if len(sequence.tokens) - 1 > sequence.begin]
            prefilled = await self.engine.prefill(sequences)
            at_one = [part[:-1] for part in self.reference.logprobs(sequences, self.at_one, edits)]
            if any(len(values) != len(others) for values, others in zip(prefilled, at_one, strict=True)):
                kinds = {"inputs"}
                self.notes.append("engine: it returns logprobs of fewer tokens than the prompt has")
            elif gap(prefilled, at_one) <= self.noise:
                kinds = {"logits", "decode"}
            elif provider.capabilities.activations:
                index = _largest(prefilled, at_one)
                shorter = replace(sequences[index], tokens=sequences[index].tokens[:-1])
                if not shorter.media:
                    activations = await self.engine.strategy.activations(shorter.tokens)
                    kinds = self._kinds(shorter, prefilled[index], activations, edits)
        await self._explain("engine", measured.sequences, measured.engine, edits, kinds, scale)

    async def _examine_trainer(self, measured: Measured) -> None:
        self.drops = {}
        own_gap = gap(measured.trainer, measured.reference)
        if own_gap <= self.noise:
            self.notes.append(f"trainer: equals the reference (gap {own_gap:.3g})")
            return
        scale = own_gap / (own_gap + gap(measured.engine, measured.reference))
        sequences, logprobs = measured.sequences, measured.trainer
        alone = self.trainer.logprobs(sequences, self.pair.params, packed=False)
        if (after := gap(alone, measured.reference)) < own_gap / 2:
            evidence = "sequences scored one by one instead of packed"
            self._add("trainer.packing", own_gap, after, evidence, scale=scale)
            logprobs = alone
        kinds, provider = {"everything"}, self.trainer.part.provider
        if provider.capabilities.activations:
            at_one = self.trainer.logprobs(sequences, self.at_one, packed=False)
            index = _largest(at_one, self.reference.logprobs(sequences, self.at_one))
            if not sequences[index].media:
                activations = self.trainer.activations(sequences[index])
                kinds = self._kinds(sequences[index], at_one[index], activations, Edits())
        else:
            self.not_examined.append(f"layers of the trainer: {provider.name} returns no activations")
        await self._explain("trainer", sequences, logprobs, Edits(), kinds, scale)

    async def _other_weights(self, measured: Measured, scale: float) -> Edits:
        """Give the reference the engine's weights where they differ from the trainer's."""
        loaded, known = await self.engine.strategy.loaded_weights(), self.reference.parameters
        tolerance = 1e-2 if self.engine.part.model.dtype != self.pair.trainer.model.dtype else 0.0
        differing = {
            name: tensor.float()
            for name, tensor in loaded.items()
            if name in known and not torch.allclose(tensor.float(), known[name].cpu(), rtol=tolerance, atol=0.0)
        }
        if not differing:
            self.notes.append("weights: the engine computes with the trainer's; equal weights, different numbers")
            return Edits()
        initial = self.reference.initial
        is_old = all(
            name in initial and torch.allclose(tensor, initial[name].cpu()) for name, tensor in differing.items()
        )
        if self.trainer.part.model.lora is not None and not is_old:
            return Edits()  # merged weights: the scale of the adapter may explain them
        formats = [
            form
            for form in (*LOW, FP8, ROWS)
            if all(torch.equal(rounded(name, known[name].cpu(), form), tensor) for name, tensor in differing.items())
        ]
        evidence = f"{len(differing)} of {len(loaded)} weights of the engine differ, first {min(differing)}"
        name = "weights.stale" if is_old else "weights.rounded" if formats else "weights.differ"
        if formats:
            evidence += f": rounded to {str(formats[0]).removeprefix('torch.')}"
        edits = with_weights(Edits(), differing)
        self._add(name, gap(measured.engine, measured.reference), self._gap_to(measured, edits), evidence, scale=scale)
        return edits

    async def _other_requests(self, measured: Measured, scale: float, edits: Edits) -> Measured:
        """Send requests one by one, and without common prefixes."""
        if self._gap_to(measured, edits) <= self.noise:
            return measured
        before, after = math.inf, 0.0
        for _ in range(2):  # twice: rare tokens with a large gap, as of routers, may be missing by chance
            alone = await self._measure(self.engine, alone=True)
            after = max(after, self._gap_to(alone, edits))
            before = min(before, self._gap_to(measured, edits))
            if after > before / 2:
                return measured
            measured = await self._measure(self.engine)
        apart = self._gap_to(await self._measure(self.engine, prompts=self.pair.distinct(0)), edits)
        if apart < before / 2:
            self._add("engine.prefix_cache", before, apart, "prompts without a common prefix", scale=scale)
        else:
            self._add("engine.batch", before, after, "requests one after the other", scale=scale)
        return alone

    # -- where ---------------------------------------------------------------------------------------------------------

    def _kinds(
        self, sequence: ScoredTokens, logprobs: Floats, activations: Mapping[str, Tensor], edits: Edits
    ) -> set[str]:
        """Kinds of points at which the gap begins: the reference continues from the side's activations at each point,
        and the gap that this takes away is that point's."""
        points = self.reference.patched(sequence, activations, edits)
        gaps = [gap([values], [logprobs]) for _, values in points]
        by_point = {name: before - after for (name, _), before, after in zip(points[1:], gaps, gaps[1:], strict=False)}
        drops: dict[str, float] = {}
        for name, drop in by_point.items():
            drops[kind_of(name)] = drops.get(kind_of(name), 0.0) + drop
        last = points[-1][0]
        ends_in_head = kind_of(last) == "head"
        drops["logits" if ends_in_head else "head"] = gaps[-1]
        if gaps[0] <= self.noise or (gaps[-1] > 0.5 * gaps[0] and ends_in_head):
            return {"inputs", "logits"}
        self.drops = {kind: drop / gaps[0] for kind, drop in drops.items() if drop > 0.1 * gaps[0]}
        first = next((name for name, drop in by_point.items() if drop > 0.1 * gaps[0]), last)
        ordered = sorted(self.drops.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in ordered)
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
        scale: float,
    ) -> None:
        """Find the edits of the reference that reproduce a side's logprobs."""
        params = self.pair.params

        def gap_on(indices: Sequence[int], changed: Edits) -> float:
            edited = self.reference.logprobs([sequences[index] for index in indices], params, changed)
            return gap([logprobs[index] for index in indices], edited)

        plain = self.reference.logprobs(sequences, params, edits)
        sums = [-float(np.abs(one - other).sum()) for one, other in zip(plain, logprobs, strict=True)]
        measure, scan = partial(gap_on, range(len(sums))), partial(gap_on, np.argsort(sums)[:SCANNED].tolist())
        longest = max(len(sequence.tokens) for sequence in sequences)
        table = experiments(self.reference, params, longest, self.trainer.adapters)
        first = left = measure(edits)
        chosen: list[Choice] = []
        for allowed in (kinds & {"logits"}, {"everything"} if "decode" in kinds else kinds):
            if allowed and left > first / 2:
                chosen, left = explain(table, edits, allowed, measure, scan, self.noise)
        if left > first / 2:
            chosen, left = [], first  # nothing reproduces the side: accidental likeness
        alone = [
            measure(applied(edits, [other for other in chosen if other is not choice])) - left for choice in chosen
        ]
        factor = scale * min(1.0, self.first_gap / first) if scale == 1 else scale
        for choice, part in zip(chosen, alone, strict=True):
            after = first - (first - left) * part / (sum(alone) or 1.0)
            evidence = f"the reference reproduces the {side} with {described(*choice)}"
            self._add(choice[0].name, first, after, evidence, scale=factor)
        if not chosen and left > self.noise:
            await self._locate(side, edits, "decode" in kinds, left, factor)

    async def _locate(self, side: str, edits: Edits, decoded: bool, left: float, scale: float) -> None:
        """Name what no edit reproduces: the weights whose digests differ, the engine's key, or the kind of layer."""
        where, after = max(self.drops, key=self.drops.__getitem__, default=""), self.noise
        name, fix = f"arithmetic.{where}" if where else "", f"compare the {side}'s code there with transformers'"
        evidence = f"no edit of the reference reproduces it; layers: {where or 'none in a prefill'}"
        if side == "engine" and self.wrong_digests:
            name, evidence, fix = "weights.differ", f"the digest of {', '.join(self.wrong_digests[:3])} differs", ""
        elif decoded:
            name, evidence = "engine.decode", f"only decoded tokens have the gap, not those of a prompt; {evidence}"
        elif side == "engine" and not where and (key := await self._key_that_helps(edits, left)):
            name, after, evidence, fix = key
        if name:
            self.located.add(name)
            self._add(name, left, after, evidence, fix=fix, scale=scale)

    async def _key_that_helps(self, edits: Edits, before: float) -> tuple[str, float, str, str] | None:
        """The key of the engine's strategy_config that causes most of the gap."""
        part = self.engine.part
        for key, value in part.config.items():
            others = {name: other for name, other in part.config.items() if name != key}
            after = self._gap_to(await self._with_part(replace(part, config=others)), edits)
            if after < before / 2:
                where = f"{part.key}.strategy_args.strategy_config.{key}"
                return f"engine.{key}", after, f"an engine without {where}: {value}", f"remove {where}"
        return None

    # -- updates -------------------------------------------------------------------------------------------------------

    async def _follows_update(self) -> None:
        """Publish other weights: does every weight of the engine change?"""
        if self.engine.part.model.lora is not None or any(cause.name.startswith("weights.") for cause in self.causes):
            return
        generator = torch.Generator().manual_seed(0)
        old_weights = self.trainer.weights
        moved = {
            name: tensor + 0.1 * tensor.float().std() * torch.randn(tensor.shape, generator=generator).to(tensor)
            if tensor.is_floating_point() and tensor.ndim > 1
            else tensor
            for name, tensor in old_weights.items()
        }
        try:
            await self.engine.publish(self.trainer, moved)
        except WeightSyncError as error:
            evidence = f"an update fails: {error}"
            self._add("weights.differ", self.first_gap or 1.0, 0.0, evidence, fix="report to the engine")
            return
        params = self.pair.params
        sequences, logprobs = await self.engine.sample(self.pair.requests(), params, alone=True)
        fresh = await self.engine.sample(self.pair.distinct(3), params, alone=True)

        def gap_to(weights: Mapping[str, Tensor]) -> float:
            return gap(logprobs, self.reference.logprobs(sequences, params, _known(weights, self.reference)))

        new, old = gap_to(moved), gap_to(old_weights)
        if new <= max(4 * self.noise, 2 * self.first_gap) or new < old / 10:
            told = f"the engine follows (gap to the new weights {new:.3g}, to the old ones {old:.3g})"
            self.notes.append(f"updates: {told}")
            return
        if gap(fresh[1], self.reference.logprobs(fresh[0], params, _known(moved, self.reference))) < new / 10:
            self.first_gap = max(self.first_gap, new)
            self._add(
                "engine.stale_cache", new, self.noise, "after an update, prompts that were served before have the gap"
            )
            return
        by_name = {name: gap_to({**moved, name: old_weights[name]}) for name in moved if old > new / 2}
        least = min(by_name, key=by_name.__getitem__, default="")
        after = min(old, by_name.get(least, math.inf))
        if after > new / 2:
            return
        what = "the engine computes with the old weights" if after == old else f"{least} keeps its old value"
        self.first_gap = max(self.first_gap, new)
        fix = "report to the engine's plugin: an update leaves stale copies"
        self._add("weights.stale", new, after, f"after an update {what} (gap {after:.3g})", fix=fix)


def _known(weights: Mapping[str, Tensor], reference: Reference) -> Edits:
    return Edits(weights={name: tensor for name, tensor in weights.items() if name in reference.parameters})


def _largest(one: list[Floats], other: list[Floats]) -> int:
    """Index of the sequence with the largest gap."""
    sums = [float(np.abs(a[: len(b)] - b[: len(a)]).sum()) for a, b in zip(one, other, strict=True)]
    return int(np.argmax(sums))


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
    for name, key in (("arithmetic.dtype", "dtype"), ("arithmetic.attention_kernel", "attn_implementation")):
        value, other = getattr(trainer, key), getattr(engine.model, key)
        if value != other:
            where = f"{engine.key}.model_args.{key}"
            yield name, f"{where} {other} instead of {value}", f"{where}: {value}", partial(replace, **{key: value})
    mine, others = (empty_model(spec).config.to_dict() for spec in (trainer, engine.model))
    for key in sorted(mine.keys() | others.keys()):
        if key in IGNORED or mine.get(key) == others.get(key):
            continue
        value, where = mine.get(key), f"{engine.key}.model_args.model_config_kwargs.{key}"
        name = next((name for part, name in KEY_NAMES if part in key), "model.config")
        evidence = f"{key} is {others.get(key)} in the engine's model, {value} in the trainer's"
        yield name, evidence, f"{where}: {value}", partial(_with_key, key=key, value=value)


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
    ("final_logit_softcap", "model.logit_softcap"),
    ("attn_logit_softcap", "model.attention_softcap"),
    ("layer_types", "model.sliding_window"),
)
"""Cause by a part of the key of transformers' config."""
