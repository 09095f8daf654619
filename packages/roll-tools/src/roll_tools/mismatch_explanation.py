"""Why one side of `roll-core doctor mismatch` is far from the reference.

other requests, rows one by one ──► where the gap begins ──► scored twice ──► edits of the reference ──► what is left:
digests, number of tokens, images, keys of strategy_config, replaced tokens, which tokens, kind of layer
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.errors import ModelError
from roll_core.runtime.records.mismatch import LogprobBatch, LogprobRow
from roll_tools.mismatch_edits import Experiment, applied, experiments, explain, fitted_bias, fix_of
from roll_tools.mismatch_points import Located, locate
from roll_tools.mismatch_reference import FORMATS, rounded
from roll_tools.mismatch_sides import AT_ONE, Engine, Trainer, gap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roll_core.types import Floats
    from roll_tools.mismatch_comparison import Comparison, Measured
    from roll_tools.mismatch_edits import Choice
    from roll_tools.mismatch_reference import Edits, ScoredTokens
    from roll_tools.mismatch_sides import Prompt

Named = tuple[str, float, str, str]
"""Name of a cause, gap without it, evidence and fix."""
SCANNED = 4
"""Number of sequences, those with the largest gap, on which the values of an experiment are tried."""
EVERYWHERE = Located(kinds=frozenset({"everything"}))


@dataclass(slots=True)
class Explanation:
    """The search for the causes of one side's gap to the reference. Adds them to the examination."""

    examination: Comparison
    side: Trainer | Engine
    sequences: list[ScoredTokens]
    logprobs: list[Floats]
    scale: float
    """The side's share of the gap between both sides."""
    edits: Edits = field(default_factory=dict)
    """What is known about the side already: its dtype and weights."""
    located: Located = EVERYWHERE
    decoded: bool = False
    """True if only decoded tokens have the gap, not those of a prompt."""
    scored: tuple[list[ScoredTokens], list[Floats]] = ((), ())  # type: ignore[assignment]
    """Sequences and their logprobs at temperature 1, as the side scores them without sampling."""

    async def run(self, measured: Measured) -> None:
        """Examine the side, until its gap is explained."""
        if isinstance(self.side, Engine):
            if self.side.part.provider.capabilities.activations:
                await self._try_loaded_weights(measured)
            await self._try_other_requests(measured)
        else:
            self._try_unpacked(measured)
        await self._locate()
        if not await self._is_random():
            await self._explain()

    def _add(self, name: str, before: float, after: float, evidence: str, fix: str = "") -> None:
        self.examination.add(name, before, after, evidence, fix=fix, scale=self.scale)

    def _expected(self, sequences: Sequence[ScoredTokens], params: Any = AT_ONE) -> list[Floats]:
        return self.examination.reference.logprobs(sequences, params, self.edits)

    # -- other requests ------------------------------------------------------------------------------------------------

    async def _try_loaded_weights(self, measured: Measured) -> None:
        """Give the reference the engine's weights where they differ from the trainer's."""
        examination, engine = self.examination, self.examination.engine
        loaded, known = await engine.strategy.loaded_weights(), examination.reference.parameters
        tolerance = 1e-2 if engine.part.model.dtype != examination.trainer.part.model.dtype else 0.0
        differing = {
            name: tensor.float()
            for name, tensor in loaded.items()
            if name in known and not torch.allclose(tensor.float(), known[name].cpu(), rtol=tolerance, atol=0.0)
        }
        if not differing:
            examination.notes.append("weights: the engine computes with the trainer's; equal weights, other numbers")
            return

        def all_are(value: Callable[[str], Tensor | None]) -> bool:
            values = ((value(name), tensor) for name, tensor in differing.items())
            return all(other is not None and torch.allclose(tensor, other.cpu()) for other, tensor in values)

        is_old = all_are(examination.reference.initial.get)
        if examination.trainer.part.model.lora is not None and not is_old:
            return  # merged weights: the scale of the adapter may explain them
        forms = [form for form in FORMATS if all_are(lambda name: rounded(name, known[name].cpu(), form))]  # noqa: B023
        evidence = f"{len(differing)} of {len(loaded)} weights of the engine differ, first {min(differing)}"
        name = "weights.stale" if is_old else "weights.rounded" if forms else "weights.differ"
        if forms:
            evidence += f": rounded to {str(forms[0]).removeprefix('torch.')}"
        elif all(
            torch.equal(one.flatten().sort()[0], known[n].cpu().flatten().sort()[0]) for n, one in differing.items()
        ):
            evidence += ": the same values in another order"
        self.edits = {**self.edits, "weights.loaded": differing}
        before = gap(measured.engine, measured.reference)
        self._add(name, before, examination.gap_to(measured, self.edits), evidence)

    async def _try_other_requests(self, measured: Measured) -> None:
        """Send prompts without common prefixes, and requests one by one."""
        examination = self.examination
        pair, engine = examination.pair, examination.engine
        if examination.gap_to(measured, self.edits) <= examination.noise:
            return
        for name, evidence, alone in (
            ("engine.prefix_cache", "prompts that no other request shares", False),
            ("engine.batch", "requests one after the other", True),
        ):
            if not alone and any(pair.media):
                continue  # distinct prompts have no images
            before, after = math.inf, 0.0
            for number in range(2):  # twice: rare tokens with a large gap, as of routers, may be missing by chance
                prompts = pair.requests() if alone else pair.distinct(number)
                other = await examination.measure(engine, prompts=prompts, alone=alone, n=2 if alone else 1)
                after = max(after, examination.gap_to(other, self.edits))
                before = min(before, examination.gap_to(measured, self.edits))
                if after > before / 2:
                    break
                measured = await examination.measure(engine)
            else:
                self._add(name, before, after, evidence)
                self.sequences, self.logprobs = other.sequences, other.engine
                return

    def _try_unpacked(self, measured: Measured) -> None:
        """Score rows one by one."""
        before = gap(measured.trainer, measured.reference)
        trainer, params = self.examination.trainer, self.examination.pair.params
        alone = trainer.logprobs(measured.sequences, params, packed=False)
        if (after := gap(alone, measured.reference)) < before / 2:
            self._add("trainer.packing", before, after, "sequences scored one by one instead of packed")
            self.logprobs = alone

    async def _is_random(self) -> bool:
        """Let a side score the same tokens twice. True if the difference is most of the gap."""
        sequences, logprobs = self.scored
        if not sequences or (twice := gap(logprobs, await self.side.prefill(sequences))) <= self.examination.noise:
            return False
        before = gap(logprobs, self._expected(sequences))
        if twice > before / 2:
            evidence = f"the {self.side.name} scored the same tokens twice: {twice:.3g} nats apart"
            self._add(f"{self.side.name}.random", before, max(0.0, before - twice), evidence)
        return twice > before / 2

    # -- where ---------------------------------------------------------------------------------------------------------

    async def _locate(self) -> None:
        """Where the gap begins: after the model, only while decoding, or at which kinds of layers."""
        examination, side, on_engine = self.examination, self.side, isinstance(self.side, Engine)
        capabilities, after_model = side.part.provider.capabilities, Located(kinds=frozenset({"logits"}))
        if not capabilities.activations:
            name = side.part.provider.name
            examination.not_examined.append(f"layers of the {side.name}: {name} returns no activations")
        if on_engine and not capabilities.prompt_logprobs:
            return
        shorter = [replace(one, tokens=one.tokens[:-1]) for one in self.sequences]
        shorter = [one for one in shorter if len(one.tokens) > one.begin]
        logprobs, expected = await side.prefill(shorter), self._expected(shorter)
        self.scored = shorter, logprobs
        if on_engine and examination.engine.num_surplus:
            self.located = Located(kinds=frozenset({"inputs", "logits"}))
        elif gap(logprobs, expected) <= examination.noise:
            self.located, self.decoded = after_model, on_engine
        elif capabilities.activations:
            index = largest(logprobs, expected)[0]
            activations = await side.activations(shorter[index])
            self.located = locate(
                examination.reference, shorter[index], logprobs[index], activations, self.edits, examination.noise
            )
            if self.located.layer:
                examination.notes.append(f"layers: {self.located}")

    # -- edits ---------------------------------------------------------------------------------------------------------

    async def _explain(self) -> None:
        """Find the edits of the reference that reproduce the side's logprobs."""
        examination, sequences, logprobs = self.examination, self.sequences, self.logprobs
        reference, params = examination.reference, examination.pair.params

        def gap_on(indices: Sequence[int], edits: Edits) -> float:
            try:
                edited = reference.logprobs([sequences[index] for index in indices], params, edits)
            except (ModelError, RuntimeError):  # a model that cannot have this key, or whose sizes then differ
                return math.inf
            return gap([logprobs[index] for index in indices], edited)

        ordered = largest(logprobs, self._expected(sequences, params))
        measure, scan = partial(gap_on, range(len(sequences))), partial(gap_on, ordered[:SCANNED])
        table = [self._bias(), *experiments(reference, params, sequences, examination.trainer.adapters)]
        first = left = measure(self.edits)
        chosen: list[Choice] = []
        kinds = set(self.located.kinds)
        for allowed in (kinds & {"logits"}, {"everything"} if self.decoded else kinds):
            if allowed and left > first / 2:
                chosen, left = explain(table, self.edits, allowed, measure, scan, examination.noise)
        if left > first / 2:
            chosen, left = [], first  # nothing reproduces the side: accidental likeness
        others = [[other for other in chosen if other is not choice] for choice in chosen]
        alone = [measure(applied(self.edits, rest)) - left for rest in others]
        if self.scale == 1:
            self.scale = min(1.0, examination.first_gap / first)
        for (experiment, value), part in zip(chosen, alone, strict=True):
            after = first - (first - left) * part / (sum(alone) or 1.0)
            evidence = f"the reference reproduces the {self.side.name} with {experiment.described(value)}"
            stale = experiment.name == "weights.stale" and self.side is examination.trainer
            name = "weights.exported" if stale else experiment.name
            self._add(name, first, after, evidence, fix_of(name, experiment.key))
        if not chosen and left > examination.noise:
            await self._name_unreproduced(left)

    def _bias(self) -> Experiment:
        """The experiment of a bias of logits, fitted to the side's logprobs."""
        params, sequences = self.examination.pair.params, self.sequences[: 2 * SCANNED]
        logits = torch.cat(self.examination.reference.logits(sequences, self.edits)) / (params.temperature or 1.0)
        chosen = torch.from_numpy(np.concatenate([one.tokens[one.begin :] for one in sequences]))
        biases = fitted_bias(logits, chosen, np.concatenate(self.logprobs[: len(sequences)]))
        biases = {token: bias * (params.temperature or 1.0) for token, bias in biases.items()}
        return Experiment("sampling.logit_bias", "logits", "bias", (biases,))

    # -- what no edit reproduces ---------------------------------------------------------------------------------------

    async def _name_unreproduced(self, left: float) -> None:
        """Name what no edit reproduces. The first test that applies has the name."""
        examination, layer = self.examination, self.located.layer
        tests: tuple[Any, ...] = (self._digests, self._surplus, self._images, self._rounded_export)
        if not layer:
            tests += (self._strategy_key, self._replaced_tokens, self._which_tokens)
        for test in (*tests, self._layer):
            if (result := await test(left)) is not None:
                name, after, evidence, fix = result
                examination.unreproduced.add(name)
                self._add(name, left, after, evidence, fix)
                return

    async def _digests(self, left: float) -> Named | None:
        wrong = self.examination.wrong_digests
        if not isinstance(self.side, Engine) or not wrong:
            return None
        return "weights.differ", self.examination.noise, f"the digest of {', '.join(wrong[:3])} differs", ""

    async def _surplus(self, left: float) -> Named | None:
        number = self.examination.engine.num_surplus
        if not isinstance(self.side, Engine) or not number:
            return None
        told = f"the engine has {number:+d} tokens in a prompt of those that it was sent"
        return "inputs.template", self.examination.noise, told, ""

    async def _images(self, left: float) -> Named | None:
        """Images, if prompts without theirs have no gap."""
        examination = self.examination
        if not self.sequences[0].media or self.located.layer == "vision":
            return None
        images = examination.reference.image_tokens
        prompts: list[Prompt] = [(tokens[~np.isin(tokens, images)], ()) for tokens in examination.pair.prompts]
        plain = await examination.measure(examination.engine, prompts=prompts)
        if (rest := gap(getattr(plain, self.side.name), plain.reference)) > examination.noise:
            return None
        return "inputs.images", rest, "prompts without their images have no gap", ""

    async def _rounded_export(self, left: float) -> Named | None:
        """A trainer in float32 that exports values of a less precise dtype."""
        if not isinstance(self.side, Trainer) or self.side.part.model.dtype != "fp32":
            return None
        weights = [weight for weight in self.side.weights.values() if weight.is_floating_point()]
        for dtype in (torch.bfloat16, torch.float16):
            if all(torch.equal(weight.to(dtype).to(weight.dtype), weight) for weight in weights):
                told = f"the trainer computes in float32, and all weights that it exports have values of {dtype}"
                return "weights.exported", self.examination.noise, told.replace("torch.", ""), ""
        return None

    async def _strategy_key(self, left: float) -> Named | None:
        """The key of the engine's strategy_config that causes most of the gap."""
        examination, part = self.examination, self.examination.engine.part
        if not isinstance(self.side, Engine) or self.decoded:
            return None
        for key, value in part.config.items():
            others = {name: other for name, other in part.config.items() if name != key}
            after = examination.gap_to(await examination.measure_part(replace(part, config=others)), self.edits)
            if after < left / 2:
                where = f"{part.key}.strategy_args.strategy_config.{key}"
                return f"engine.{key}", after, f"an engine without {where}: {value}", f"remove {where}"
        return None

    async def _replaced_tokens(self, left: float) -> Named | None:
        """Prompts that begin to differ at the same ids, or at the same distance from their end.

        A gap at token 1 may be that of token 0, which has no logprob.
        """
        if not isinstance(self.side, Engine) or self.decoded:
            return None
        sequences = [replace(one, begin=1) for one in self.scored[0]]
        begins, equal, ends = list[set[int]](), set[int](), set[int]()
        for one, ours, others in zip(
            sequences, await self.side.prefill(sequences), self._expected(sequences), strict=True
        ):
            differs = np.flatnonzero(np.abs(ours - others) > 10 * self.examination.noise)
            first = 1 + int(differs[0]) if len(differs) else len(one.tokens)
            equal.update(one.tokens[: first if first > 1 else 0].tolist())
            if first < len(one.tokens):
                begins.append(set(one.tokens[first - (first == 1) : first + 1].tolist()))
                ends.add(first - len(one.tokens) if first > 1 else 0)
        suspects = [ids - equal for ids in begins]
        if begins and all(suspects):
            told = f"prompt logprobs of the engine begin to differ at tokens {sorted(set().union(*suspects))[:8]}"
            return "inputs.template", self.examination.noise, f"{told}; none of them occurs before a gap", ""
        if len(ends) == 1 and (distance := -ends.pop()):
            told = f"prompt logprobs of the engine differ in the last {distance} tokens of each prompt"
            return "inputs.template", self.examination.noise, told, ""
        return None

    async def _which_tokens(self, left: float) -> Named | None:
        """The set of tokens that has most of the gap, as records of a run show it."""
        reference, rows = self.examination.reference, []
        expected = self._expected(self.sequences, self.examination.pair.params)
        for one, values, others in zip(self.sequences, self.logprobs, expected, strict=True):
            before, sampled = np.zeros(one.begin, np.float32), np.arange(len(one.tokens)) >= one.begin
            engine, trainer = (np.append(before, logprobs) for logprobs in (values, others))
            versions = np.where(sampled, 0, -1).astype(np.int32)
            rows.append(
                LogprobRow(tokens=one.tokens, sampled=sampled, versions=versions, engine=engine, trainer=trainer)
            )
        end = reference.config.eos_token_id
        ends = tuple(end) if isinstance(end, list) else (end,)
        diagnosis = LogprobBatch(rows=tuple(rows), end_tokens=ends, image_tokens=reference.image_tokens).diagnose()
        for cause in diagnosis.causes[:1]:
            if cause.name.startswith(("tokens.", "masks.")) and cause.share > 0.5:
                return cause.name, cause.after, cause.evidence, cause.fix
        return None

    async def _layer(self, left: float) -> Named | None:
        """The kind of layer where the gap begins, or decoding."""
        located, noise, nothing = self.located, self.examination.noise, "no edit of the reference reproduces it"
        if located.layer:
            scaled = located.layer == "embedding" and "times" in located.function
            name = "model.embedding_scale" if scaled else f"arithmetic.{located.layer}"
            fix = "" if scaled else f"compare the {self.side.name}'s code there with transformers'"
            return name, noise, f"{nothing}; {located}", fix
        if self.decoded:
            told = f"only decoded tokens have the gap, not those of a prompt; {nothing}"
            return "engine.decode", noise, told, "compare the engine's decoding with its prefill"
        return None


def largest(one: Sequence[Floats], other: Sequence[Floats]) -> list[int]:
    """Indices of the sequences, the one with the largest gap first."""
    sums = [float(np.abs(a - b).sum()) for a, b in zip(one, other, strict=True)]
    return sorted(range(len(sums)), key=lambda index: -sums[index])
