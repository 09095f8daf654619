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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.errors import DataError, WeightSyncError
from roll_core.runtime.records.mismatch import Cause, Diagnosis, LogprobBatch, LogprobRow
from roll_modeling.model import empty_model
from roll_modeling.model_table import has_experts
from roll_tools.mismatch_edits import MIN_SHARE, applied, compute_in, described, experiments, explain, fix_of
from roll_tools.mismatch_reference import FORMATS, Edits, Reference, ScoredTokens, kind_of, rounded
from roll_tools.mismatch_sides import AT_ONE, DTYPES, Engine, Part, Trainer, gap

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

    def distinct(self, number: int) -> list[Prompt]:
        """Prompts without images whose first tokens all differ, so that no two have a common prefix, nor one of another
        `number` with the same."""
        plain = [tokens for tokens, media in self.requests() if not media]
        if not plain:
            return self.requests()
        ids = np.roll(np.unique(np.concatenate(plain)), -number * len(plain))
        return [(np.append(ids[i], tokens[1:]), ()) for i, tokens in enumerate(plain[: len(ids)])]

    def diagnose(self) -> Diagnosis:
        """Build both, and examine why they disagree. Blocks."""
        return asyncio.run(self.examine())

    async def examine(self) -> Diagnosis:
        """Same as `diagnose`, on the running event loop."""
        trainer = Trainer(self.trainer, self.device)
        try:
            examination = Examination(self, trainer, await Engine.start(self.engine, self.device))
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


@dataclass(slots=True)
class Deviation:
    """The gap between a side and the reference."""

    side: Trainer | Engine
    sequences: list[ScoredTokens]
    logprobs: list[Floats]
    scale: float
    """The side's share of the gap between both sides."""
    edits: Edits = field(default_factory=Edits)
    """What is known about the side already: its weights."""
    kinds: set[str] = field(default_factory=lambda: {"everything"})
    """Kinds of points at which the gap begins; `logits` is after the model, `decode` only in decoded tokens."""
    layer: str = ""
    """Kind of layer with the largest part of the gap."""
    scored: tuple[list[ScoredTokens], list[Floats]] | None = None
    """Sequences and their logprobs at temperature 1, as the side scores them without sampling."""


class Examination:
    """One examination of a pair. Collects causes."""

    def __init__(self, pair: Pair, trainer: Trainer, engine: Engine) -> None:
        self.pair, self.trainer, self.engine = pair, trainer, engine
        self.reference = Reference(pair.trainer.model, trainer.weights, pair.device)
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self.not_examined: list[str] = []
        self.wrong_digests: list[str] = []
        self.located: set[str] = set()
        """Causes that no edit reproduces."""
        self.first_gap, self.noise = 0.0, FLOOR

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
        self.first_gap, num_tokens = measured.gap, sum(map(len, measured.engine))
        self._set_noise(measured)
        if measured.gap > self.noise:
            measured = await self._try_differing_keys(measured)
        if measured.gap > self.noise:
            await self._examine(self.engine, measured)
            await self._examine(self.trainer, measured)
            await self._try_router_replay(measured)
        await self._try_update()
        self.causes.sort(key=lambda cause: -cause.share)
        return Diagnosis(
            gap=self.first_gap,
            noise=self.noise,
            num_tokens=num_tokens,
            causes=_in_order(self.causes, self.first_gap),
            not_examined=tuple(self.not_examined),
            notes=tuple(self.notes),
        )

    # -- measuring -----------------------------------------------------------------------------------------------------

    async def _measure(
        self, engine: Engine, *, trainer: Trainer | None = None, prompts: list[Prompt] | None = None, **options: Any
    ) -> Measured:
        params = self.pair.params
        sequences, logprobs = await engine.sample(prompts or self.pair.requests(), params, **options)
        of_trainer = (trainer or self.trainer).logprobs(sequences, params)
        return Measured(sequences, logprobs, of_trainer, self.reference.logprobs(sequences, params))

    async def _measure_part(self, part: Part, trainer: Trainer | None = None) -> Measured:
        """Measure with another engine."""
        engine = await Engine.start(part, self.pair.device)
        try:
            await engine.publish(self.trainer)
            return await self._measure(engine, trainer=trainer)
        finally:
            await engine.strategy.stop()

    def _gap_to(self, measured: Measured, edits: Edits) -> float:
        """Gap between the engine and the edited reference."""
        return gap(measured.engine, self.reference.logprobs(measured.sequences, self.pair.params, edits))

    def _set_noise(self, measured: Measured) -> None:
        """Gap that rounding alone causes if both sides compute in the same low dtype."""
        name, self.noise = self.engine.part.model.dtype, FLOOR
        if name in DTYPES and name == self.pair.trainer.model.dtype:
            edits = compute_in("all")(Edits(), DTYPES[name])
            moved = gap(self.reference.logprobs(measured.sequences, self.pair.params, edits), measured.reference)
            self.noise = NOISE_FACTOR * moved
            self.notes.append(f"noise: {name} moves the logprobs of the reference by {moved:.3g}")

    def _add(self, name: str, before: float, after: float, evidence: str, *, fix: str = "", scale: float = 1.0) -> None:
        share = min(1.0, scale * max(0.0, before - after) / self.first_gap) if self.first_gap else 1.0
        cause = Cause(name=name, share=share, before=before, after=after, evidence=evidence, fix=fix or fix_of(name))
        self.causes.append(cause)

    # -- both sides are built otherwise --------------------------------------------------------------------------------

    async def _try_differing_keys(self, measured: Measured) -> Measured:
        """Give the engine each model key of the trainer that differs, one after the other, and keep what helps."""
        part = self.pair.engine
        for name, evidence, fix, model in _differences(self.pair.trainer.model, part):
            if measured.gap <= self.noise:
                break
            candidate = replace(part, model=model(part.model))
            remeasured = await self._measure_part(candidate)
            if measured.gap - remeasured.gap > MIN_SHARE * self.first_gap:
                self._add(name, measured.gap, remeasured.gap, evidence, fix=fix)
                part, measured = candidate, remeasured
        if part is not self.pair.engine:
            await self.engine.strategy.stop()
            self.engine = await Engine.start(part, self.pair.device)
            await self.engine.publish(self.trainer)
            self._set_noise(measured)
        return measured

    async def _try_router_replay(self, measured: Measured) -> None:
        """Let the trainer use the experts that the engine chose, if nothing else explains the gap."""
        sides, model = (self.pair.trainer, self.engine.part), self.pair.trainer.model
        if model.router_replay or not has_experts(self.reference.model.config.to_dict()):
            return
        if not (sides[0].provider.capabilities.router_replay and sides[1].provider.capabilities.routed_experts):
            self.not_examined.append("router replay: one side returns or replays no experts")
            return
        on = [replace(side, model=replace(side.model, router_replay=True)) for side in sides]
        replaying = Trainer(on[0], self.pair.device)
        try:
            replayed = await self._measure_part(on[1], replaying)
        except DataError as error:  # another number of experts
            self.notes.append(f"router replay: {error}")
            return
        finally:
            replaying.strategy.close()
        if {cause.name for cause in self.causes} <= self.located and replayed.gap < measured.gap / 2:
            evidence = "the trainer computes with the experts that the engine chose"
            self.causes = []
            self._add("model.router_replay", measured.gap, replayed.gap, evidence)
        else:
            self.notes.append(f"router replay: gap {measured.gap:.3g} → {replayed.gap:.3g}")

    # -- one side ------------------------------------------------------------------------------------------------------

    async def _examine(self, side: Trainer | Engine, measured: Measured) -> None:
        """Find out why a side is far from the reference."""
        gaps = {one.name: gap(getattr(measured, one.name), measured.reference) for one in (self.engine, self.trainer)}
        if (own_gap := gaps[side.name]) <= self.noise:
            self.notes.append(f"{side.name}: equals the reference (gap {own_gap:.3g})")
            return
        deviation = Deviation(side, measured.sequences, measured.trainer, own_gap / sum(gaps.values()))
        if isinstance(side, Engine):
            deviation.logprobs = measured.engine
            if side.part.provider.capabilities.activations:
                deviation.edits = await self._try_loaded_weights(measured, deviation.scale)
            await self._try_other_requests(measured, deviation)
        else:
            self._try_unpacked(measured, deviation)
        await self._locate(deviation)
        if not await self._is_random(deviation):
            await self._explain(deviation)

    async def _is_random(self, deviation: Deviation) -> bool:
        """Let a side score the same tokens twice. True if the difference is most of the gap."""
        side, first = deviation.side, deviation.scored
        if first is None or (twice := gap(first[1], await side.prefill(first[0]))) <= self.noise:
            return False
        before = gap(first[1], self.reference.logprobs(first[0], AT_ONE, deviation.edits))
        if twice > before / 2:
            evidence = f"the {side.name} scored the same tokens twice: {twice:.3g} nats apart"
            self._add(f"{side.name}.random", before, max(0.0, before - twice), evidence, scale=deviation.scale)
        return twice > before / 2

    async def _try_loaded_weights(self, measured: Measured, scale: float) -> Edits:
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

        def all_are(value: Callable[[str], Tensor | None]) -> bool:
            values = ((value(name), tensor) for name, tensor in differing.items())
            return all(other is not None and torch.allclose(tensor, other.cpu()) for other, tensor in values)

        is_old = all_are(self.reference.initial.get)
        if self.trainer.part.model.lora is not None and not is_old:
            return Edits()  # merged weights: the scale of the adapter may explain them
        formats = [form for form in FORMATS if all_are(lambda name: rounded(name, known[name].cpu(), form))]  # noqa: B023
        evidence = f"{len(differing)} of {len(loaded)} weights of the engine differ, first {min(differing)}"
        name = "weights.stale" if is_old else "weights.rounded" if formats else "weights.differ"
        if formats:
            evidence += f": rounded to {str(formats[0]).removeprefix('torch.')}"
        edits = Edits(weights=differing)
        self._add(name, gap(measured.engine, measured.reference), self._gap_to(measured, edits), evidence, scale=scale)
        return edits

    async def _try_other_requests(self, measured: Measured, deviation: Deviation) -> None:
        """Send prompts without common prefixes, and requests one by one."""
        edits = deviation.edits
        if self._gap_to(measured, edits) <= self.noise:
            return
        for name, evidence, alone in (
            ("engine.prefix_cache", "prompts that no other request shares", False),
            ("engine.batch", "requests one after the other", True),
        ):
            if not alone and any(self.pair.media):
                continue  # distinct prompts have no images
            before, after = math.inf, 0.0
            for number in range(2):  # twice: rare tokens with a large gap, as of routers, may be missing by chance
                prompts = self.pair.requests() if alone else self.pair.distinct(number)
                other = await self._measure(self.engine, prompts=prompts, alone=alone, n=2 if alone else 1)
                after = max(after, self._gap_to(other, edits))
                before = min(before, self._gap_to(measured, edits))
                if after > before / 2:
                    break
                measured = await self._measure(self.engine)
            else:
                self._add(name, before, after, evidence, scale=deviation.scale)
                deviation.sequences, deviation.logprobs = other.sequences, other.engine
                return

    def _try_unpacked(self, measured: Measured, deviation: Deviation) -> None:
        """Score rows one by one."""
        before = gap(measured.trainer, measured.reference)
        alone = self.trainer.logprobs(measured.sequences, self.pair.params, packed=False)
        if (after := gap(alone, measured.reference)) < before / 2:
            evidence = "sequences scored one by one instead of packed"
            self._add("trainer.packing", before, after, evidence, scale=deviation.scale)
            deviation.logprobs = alone

    # -- where ---------------------------------------------------------------------------------------------------------

    async def _locate(self, deviation: Deviation) -> None:
        """Where the gap begins: after the model, only while decoding, or at which kinds of layers."""
        side, edits, capabilities = deviation.side, deviation.edits, deviation.side.part.provider.capabilities
        if not capabilities.activations:
            name = side.part.provider.name
            self.not_examined.append(f"layers of the {side.name}: {name} returns no activations")
        if isinstance(side, Engine) and not capabilities.prompt_logprobs:
            return
        shorter = [replace(one, tokens=one.tokens[:-1]) for one in deviation.sequences]
        shorter = [one for one in shorter if len(one.tokens) > one.begin]
        logprobs, expected = await side.prefill(shorter), self.reference.logprobs(shorter, AT_ONE, edits)
        deviation.scored = (shorter, logprobs)
        if self.engine.num_surplus and side is self.engine:
            deviation.kinds = {"inputs", "logits"}
            self.notes.append(f"engine: {self.engine.num_surplus:+d} tokens in the prompt that it was sent")
        elif gap(logprobs, expected) <= self.noise:
            deviation.kinds = {"logits", "decode"} if isinstance(side, Engine) else {"logits"}
        elif capabilities.activations:
            index = _largest(logprobs, expected)[0]
            activations = await side.activations(shorter[index])
            self._compare_layers(deviation, shorter[index], logprobs[index], activations)

    def _compare_layers(
        self, deviation: Deviation, sequence: ScoredTokens, logprobs: Floats, activations: Mapping[str, Tensor]
    ) -> None:
        """The reference continues from the side's activations at each point. The gap that this takes away is that
        point's."""
        points = self.reference.patched(sequence, activations, deviation.edits)
        gaps = [gap([values], [logprobs]) for _, values in points]
        by_point = {name: before - after for (name, _), before, after in zip(points[1:], gaps, gaps[1:], strict=False)}
        drops: dict[str, float] = {}
        for name, drop in by_point.items():
            drops[kind_of(name)] = drops.get(kind_of(name), 0.0) + drop
        last = points[-1][0]
        ends_in_head = kind_of(last) == "head"
        drops["logits" if ends_in_head else "head"] = gaps[-1]
        if gaps[0] <= self.noise or (gaps[-1] > 0.5 * gaps[0] and ends_in_head):
            deviation.kinds = {"inputs", "logits"}
            return
        shares = {kind: drop / gaps[0] for kind, drop in drops.items() if drop > 0.1 * gaps[0]}
        deviation.kinds, deviation.layer = {*shares, "logits"}, max(shares, key=shares.__getitem__, default="")
        first = next((name for name, drop in by_point.items() if drop > 0.1 * gaps[0]), last)
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        told = ", ".join(f"{kind} {share:.0%}" for kind, share in ordered)
        self.notes.append(f"layers: {told}; the first point with a gap is {first}")

    # -- edits ---------------------------------------------------------------------------------------------------------

    async def _explain(self, deviation: Deviation) -> None:
        """Find the edits of the reference that reproduce a side's logprobs."""
        params, sequences, logprobs = self.pair.params, deviation.sequences, deviation.logprobs

        def gap_on(indices: Sequence[int], changed: Edits) -> float:
            edited = self.reference.logprobs([sequences[index] for index in indices], params, changed)
            return gap([logprobs[index] for index in indices], edited)

        ordered = _largest(logprobs, self.reference.logprobs(sequences, params, deviation.edits))
        measure, scan = partial(gap_on, range(len(sequences))), partial(gap_on, ordered[:SCANNED])
        longest = max(len(sequence.tokens) for sequence in sequences)
        table = experiments(self.reference, params, longest, self.trainer.adapters)
        first = left = measure(deviation.edits)
        chosen: list[Choice] = []
        decoded = "decode" in deviation.kinds
        for allowed in (deviation.kinds & {"logits"}, {"everything"} if decoded else deviation.kinds):
            if allowed and left > first / 2:
                chosen, left = explain(table, deviation.edits, allowed, measure, scan, self.noise)
        if left > first / 2:
            chosen, left = [], first  # nothing reproduces the side: accidental likeness
        others = [[other for other in chosen if other is not choice] for choice in chosen]
        alone = [measure(applied(deviation.edits, rest)) - left for rest in others]
        if deviation.scale == 1:
            deviation.scale = min(1.0, self.first_gap / first)
        for choice, part in zip(chosen, alone, strict=True):
            after = first - (first - left) * part / (sum(alone) or 1.0)
            evidence = f"the reference reproduces the {deviation.side.name} with {described(*choice)}"
            stale = choice[0].name == "weights.stale" and deviation.side is self.trainer
            self._add("weights.exported" if stale else choice[0].name, first, after, evidence, scale=deviation.scale)
        if not chosen and left > self.noise:
            await self._name_unreproduced(deviation, left)

    async def _name_unreproduced(self, deviation: Deviation, left: float) -> None:
        """Name what no edit reproduces: the weights whose digests differ, the engine's key, which tokens, or the kind
        of layer."""
        side, layer, after = deviation.side, deviation.layer, self.noise
        name, fix = f"arithmetic.{layer}" if layer else "", f"compare the {side.name}'s code there with transformers'"
        evidence = f"no edit of the reference reproduces it; layers: {layer or 'none in a prefill'}"
        decoded, on_engine = "decode" in deviation.kinds, isinstance(side, Engine)
        if on_engine and self.wrong_digests:
            name, evidence, fix = "weights.differ", f"the digest of {', '.join(self.wrong_digests[:3])} differs", ""
        elif on_engine and self.engine.num_surplus:
            told = f"the engine has {self.engine.num_surplus:+d} tokens in a prompt of those that it was sent"
            name, evidence, fix = "inputs.template", told, ""
        elif deviation.sequences[0].media and layer != "vision" and await self._agrees_without_images(side):
            name, evidence, fix = "inputs.images", "prompts without their images have no gap", ""
        elif on_engine and not layer and not decoded and (key := await self._try_without_keys(deviation, left)):
            name, after, evidence, fix = key
        elif on_engine and not layer and not decoded and (ids := await self._foreign_tokens(deviation)):
            told = f"prompt logprobs of the engine begin to differ at tokens {', '.join(map(str, sorted(ids)[:8]))}"
            name, evidence, fix = "inputs.template", f"{told}; none of them occurs before a gap", ""
        elif not layer and (cause := self._which_tokens(deviation)) is not None:
            name, after, evidence, fix = cause.name, cause.after, cause.evidence, cause.fix
        elif decoded:
            name, evidence = "engine.decode", f"only decoded tokens have the gap, not those of a prompt; {evidence}"
        if name:
            self.located.add(name)
            self._add(name, left, after, evidence, fix=fix, scale=deviation.scale)

    async def _agrees_without_images(self, side: Trainer | Engine) -> bool:
        """True if prompts without their images have no gap."""
        images = self.reference.image_tokens
        prompts: list[Prompt] = [(tokens[~np.isin(tokens, images)], ()) for tokens in self.pair.prompts]
        plain = await self._measure(self.engine, prompts=prompts)
        return gap(getattr(plain, side.name), plain.reference) <= self.noise

    async def _try_without_keys(self, deviation: Deviation, before: float) -> tuple[str, float, str, str] | None:
        """The key of the engine's strategy_config that causes most of the gap."""
        part = self.engine.part
        for key, value in part.config.items():
            others = {name: other for name, other in part.config.items() if name != key}
            after = self._gap_to(await self._measure_part(replace(part, config=others)), deviation.edits)
            if after < before / 2:
                where = f"{part.key}.strategy_args.strategy_config.{key}"
                return f"engine.{key}", after, f"an engine without {where}: {value}", f"remove {where}"
        return None

    async def _foreign_tokens(self, deviation: Deviation) -> set[int]:
        """Ids that the engine replaces: its gap begins at one of them in each prompt, and no token before is one."""
        sequences = [replace(one, begin=1) for one in deviation.scored[0]] if deviation.scored else []
        values = await deviation.side.prefill(sequences)
        expected = self.reference.logprobs(sequences, AT_ONE, deviation.edits)
        begins, equal = set[int](), set[int]()
        for one, ours, others in zip(sequences, values, expected, strict=True):
            differs = np.flatnonzero(np.abs(ours - others) > 10 * self.noise)
            first = 1 + int(differs[0]) if len(differs) else len(one.tokens)
            if first > 1:  # the gap of token 1 may be that of token 0
                equal.update(one.tokens[:first].tolist())
                begins.update(one.tokens[first : first + 1].tolist())
        return set() if begins & equal else begins

    def _which_tokens(self, deviation: Deviation) -> Cause | None:
        """The set of tokens that has most of the gap, as records of a run show it."""
        expected = self.reference.logprobs(deviation.sequences, self.pair.params, deviation.edits)
        rows = []
        for one, values, others in zip(deviation.sequences, deviation.logprobs, expected, strict=True):
            before = np.zeros(one.begin, np.float32)
            sampled = np.arange(len(one.tokens)) >= one.begin
            both = (np.append(before, logprobs) for logprobs in (values, others))
            engine, trainer = both
            versions = np.where(sampled, 0, -1).astype(np.int32)
            rows.append(
                LogprobRow(tokens=one.tokens, sampled=sampled, versions=versions, engine=engine, trainer=trainer)
            )
        end = self.reference.model.config.get_text_config().eos_token_id
        ends = tuple(end) if isinstance(end, list) else (end,)
        diagnosis = LogprobBatch(rows=tuple(rows), end_tokens=ends, image_tokens=self.reference.image_tokens).diagnose()
        named = [cause for cause in diagnosis.causes[:1] if cause.name.startswith("tokens.") and cause.share > 0.5]
        return named[0] if named else None

    # -- updates -------------------------------------------------------------------------------------------------------

    async def _try_update(self) -> None:
        """Publish other weights: does every weight of the engine change?"""
        if self.engine.part.model.lora is not None or any(cause.name.startswith("weights.") for cause in self.causes):
            return
        generator, old_weights = torch.Generator().manual_seed(0), self.trainer.weights

        def size(tensor: Tensor) -> float:
            return max(float(tensor.float().std()) if tensor.ndim > 1 else float(tensor.float().abs().mean()), 0.02)

        moved = {
            name: tensor + 0.1 * size(tensor) * torch.randn(tensor.shape, generator=generator).to(tensor)
            if tensor.is_floating_point()
            else tensor
            for name, tensor in old_weights.items()
        }
        try:
            await self.engine.publish(self.trainer, moved)
        except WeightSyncError as error:
            evidence = f"an update fails: {error}"
            self._add("weights.differ", self.first_gap or 1.0, 0.0, evidence, fix="report to the engine")
            return
        served = await self.engine.sample(self.pair.requests(), self.pair.params, alone=True)
        fresh = await self.engine.sample(self.pair.distinct(3), self.pair.params, alone=True)

        def gap_to(weights: Mapping[str, Tensor], sampled: Any = served) -> float:
            edits = Edits(weights={name: weights[name] for name in weights if name in self.reference.parameters})
            return gap(sampled[1], self.reference.logprobs(sampled[0], self.pair.params, edits))

        new, old = gap_to(moved), gap_to(old_weights)
        if new <= max(4 * self.noise, 2 * self.first_gap) or new < old / 10:
            told = f"the engine follows (gap to the new weights {new:.3g}, to the old ones {old:.3g})"
            self.notes.append(f"updates: {told}")
            return
        name, after, fix = "engine.stale_cache", self.noise, ""
        evidence = "after an update, prompts that were served before have the gap"
        if gap_to(moved, fresh) >= new / 10:
            stale = [name for name in moved if old > new / 2 and gap_to({**moved, name: old_weights[name]}) < new]
            some = gap_to(moved | {name: old_weights[name] for name in stale})
            name, after = "weights.stale", min(old, some)
            what = "the engine computes with the old weights"
            if some < old:
                what = f"{len(stale)} weights keep their old values, first {stale[0]}"
            evidence = f"after an update {what} (gap {after:.3g})"
            fix = "report to the engine's plugin: an update leaves stale copies"
        if after <= new / 2:
            self.first_gap = max(self.first_gap, new)
            self._add(name, new, after, evidence, fix=fix)


def _largest(one: list[Floats], other: list[Floats]) -> list[int]:
    """Indices of the sequences, the one with the largest gap first."""
    sums = [float(np.abs(a - b).sum()) for a, b in zip(one, other, strict=True)]
    return sorted(range(len(sums)), key=lambda index: -sums[index])


def _in_order(causes: Sequence[Cause], first: float) -> tuple[Cause, ...]:
    """Causes with the gap before and after each, if they are removed in this order."""
    ordered, left = [], first
    rest = first * max(0.0, 1 - sum(cause.share for cause in causes))
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
