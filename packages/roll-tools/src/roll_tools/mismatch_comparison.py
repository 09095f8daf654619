"""Trainer, engine and reference of `roll-core doctor mismatch`: they score the same tokens; causes are collected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.runtime.records.mismatch import Cause
from roll_tools.mismatch_edits import fix_of
from roll_tools.mismatch_reference import Reference
from roll_tools.mismatch_sides import Engine, Part, Trainer, gap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.types import Floats, Media, SamplingParams, TokenIds
    from roll_tools.mismatch_reference import Edits, ScoredTokens
    from roll_tools.mismatch_sides import Prompt

FLOOR = 1e-5
"""Gap in nats below which float32 sides agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPair:
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


class Comparison:
    """A started pair, and what is known about its gap."""

    def __init__(self, pair: ComparedPair, trainer: Trainer, engine: Engine) -> None:
        self.pair, self.trainer, self.engine = pair, trainer, engine
        self.reference = Reference(pair.trainer.model, trainer.weights, pair.device)
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self.not_examined: list[str] = []
        self.wrong_digests: list[str] = []
        self.unreproduced: set[str] = set()
        """Names of causes that no edit reproduces."""
        self.first_gap, self.noise = 0.0, FLOOR
        self.edits: Edits = {}
        """The dtype of the reference, if both sides compute in the same low one."""

    def add(self, name: str, before: float, after: float, evidence: str, *, fix: str = "", scale: float = 1.0) -> None:
        """Name a cause that moves the gap of a side, which is `scale` of the whole gap, from `before` to `after`."""
        share = min(1.0, scale * max(0.0, before - after) / self.first_gap) if self.first_gap else 1.0
        cause = Cause(name=name, share=share, before=before, after=after, evidence=evidence, fix=fix or fix_of(name))
        self.causes.append(cause)

    async def measure(
        self, engine: Engine, *, trainer: Trainer | None = None, prompts: list[Prompt] | None = None, **options: Any
    ) -> Measured:
        """Sample, and score with all sides."""
        params = self.pair.params
        sequences, logprobs = await engine.sample(prompts or self.pair.requests(), params, **options)
        of_trainer = (trainer or self.trainer).logprobs(sequences, params)
        return Measured(sequences, logprobs, of_trainer, self.reference.logprobs(sequences, params, self.edits))

    async def measure_part(self, part: Part, trainer: Trainer | None = None) -> Measured:
        """Measure with another engine."""
        engine = await Engine.start(part, self.pair.device)
        try:
            await engine.publish(self.trainer)
            return await self.measure(engine, trainer=trainer)
        finally:
            await engine.strategy.stop()

    def gap_to(self, measured: Measured, edits: Edits) -> float:
        """Gap between the engine and the edited reference."""
        return gap(measured.engine, self.reference.logprobs(measured.sequences, self.pair.params, edits))
