"""Experiments of `roll-core doctor mismatch`: each changes one thing and measures the gap again.

trainer ◄── gap ──► engine          both build the model of the config; the engine has the trainer's weights
     \\                /
     gap      gap                   the side that is far from the reference is examined (`mismatch_explanation`)
      \\        /
     reference                      transformers, float32, the trainer's weights
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import DataError, ModelError, UnsupportedError, WeightSyncError
from roll_core.runtime.records.mismatch import Cause, Diagnosis
from roll_modeling.model import empty_model
from roll_modeling.model_table import has_experts
from roll_tools.mismatch_comparison import FLOOR, ComparedPair, Comparison, Measured
from roll_tools.mismatch_edits import MIN_SHARE, cause_of
from roll_tools.mismatch_explanation import Explanation
from roll_tools.mismatch_sides import DTYPES, Engine, Part, Trainer, gap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.model import ModelSpec

NOISE_FACTOR = 2.5
"""The noise is this many times the gap that rounding alone causes: two sides round differently, and sequences vary."""
IGNORED = frozenset({"dtype", "torch_dtype", "_name_or_path", "transformers_version", "use_cache", "architectures"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(ComparedPair):
    """Trainer and engine that can be examined."""

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


class Examination(Comparison):
    """One examination of a pair."""

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
        measured = self._with_noise(await self.measure(self.engine))
        self.first_gap, num_tokens = measured.gap, sum(map(len, measured.engine))
        if measured.gap > self.noise:
            measured = await self._try_differing_keys(measured)
        if measured.gap > self.noise:
            for side in (self.engine, self.trainer):
                await self._examine(side, measured)
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

    def _with_noise(self, measured: Measured) -> Measured:
        """Set the noise. If both sides compute in the same low dtype, the reference does, too."""
        name, self.noise, self.edits = self.engine.part.model.dtype, FLOOR, {}
        if name in DTYPES and name == self.pair.trainer.model.dtype:
            self.edits = {"dtype.all": DTYPES[name]}
            plain = measured.reference
            measured.reference = self.reference.logprobs(measured.sequences, self.pair.params, self.edits)
            moved = gap(measured.reference, plain)
            self.noise = NOISE_FACTOR * moved
            self.notes.append(f"noise: {name} moves the logprobs of the reference by {moved:.3g}")
        return measured

    async def _examine(self, side: Trainer | Engine, measured: Measured) -> None:
        """Find out why a side is far from the reference, if it is."""
        gaps = {one.name: gap(getattr(measured, one.name), measured.reference) for one in (self.engine, self.trainer)}
        if gaps[side.name] <= self.noise:
            self.notes.append(f"{side.name}: equals the reference (gap {gaps[side.name]:.3g})")
            return
        logprobs, scale = getattr(measured, side.name), gaps[side.name] / sum(gaps.values())
        await Explanation(self, side, measured.sequences, logprobs, scale, self.edits).run(measured)

    # -- both sides are built otherwise --------------------------------------------------------------------------------

    async def _try_differing_keys(self, measured: Measured) -> Measured:
        """Give the engine each model key of the trainer that differs, one after the other, and keep what helps."""
        part = self.pair.engine
        for name, evidence, fix, model in _differences(self.pair.trainer.model, part):
            if measured.gap <= self.noise:
                break
            candidate = replace(part, model=model(part.model))
            remeasured = await self.measure_part(candidate)
            if measured.gap - remeasured.gap > MIN_SHARE * self.first_gap:
                self.add(name, measured.gap, remeasured.gap, evidence, fix=fix)
                part, measured = candidate, remeasured
        if part is not self.pair.engine:
            await self.engine.strategy.stop()
            self.engine = await Engine.start(part, self.pair.device)
            await self.engine.publish(self.trainer)
            measured = self._with_noise(measured)
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
        try:
            replaying = Trainer(on[0], self.pair.device)
            try:
                replayed = await self.measure_part(on[1], replaying)
            finally:
                replaying.strategy.close()
        except (DataError, ModelError, UnsupportedError) as error:  # such as another number of experts
            self.notes.append(f"router replay: {error}")
            return
        if {cause.name for cause in self.causes} <= self.unreproduced and replayed.gap < measured.gap / 2:
            self.causes = []
            evidence = "the trainer computes with the experts that the engine chose"
            self.add("model.router_replay", measured.gap, replayed.gap, evidence)
        else:
            self.notes.append(f"router replay: gap {measured.gap:.3g} → {replayed.gap:.3g}")

    # -- updates -------------------------------------------------------------------------------------------------------

    async def _try_update(self) -> None:
        """Publish other weights: does every weight of the engine change?"""
        if self.engine.part.model.lora is not None or any(cause.name.startswith("weights.") for cause in self.causes):
            return
        old_weights = self.trainer.weights
        moved = _moved(old_weights)
        try:
            await self.engine.publish(self.trainer, moved)
        except WeightSyncError as error:
            evidence = f"an update fails: {error}"
            self.add("weights.differ", self.first_gap or 1.0, 0.0, evidence, fix="report to the engine")
            return
        served = await self.engine.sample(self.pair.requests(), self.pair.params, alone=True)
        fresh = await self.engine.sample(self.pair.distinct(3), self.pair.params, alone=True)

        def gap_to(weights: Mapping[str, Tensor], sampled: Any = served) -> float:
            edits = {**self.edits, "weights.update": weights}
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
            self.add(name, new, after, evidence, fix=fix)


def _moved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights after an update that changes all of them."""
    generator = torch.Generator().manual_seed(0)

    def size(tensor: Tensor) -> float:
        return max(float(tensor.float().std()) if tensor.ndim > 1 else float(tensor.float().abs().mean()), 0.02)

    return {
        name: tensor + 0.1 * size(tensor) * torch.randn(tensor.shape, generator=generator).to(tensor)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in weights.items()
    }


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
        evidence = f"{key} is {others.get(key)} in the engine's model, {value} in the trainer's"
        yield cause_of(key), evidence, f"{where}: {value}", partial(_with_key, key=key, value=value)


def _with_key(spec: ModelSpec, key: str, value: Any) -> ModelSpec:
    if spec.random_init is not None:
        return replace(spec, random_init={**spec.random_init, key: value})
    return replace(spec, config_overrides={**spec.config_overrides, key: value})
