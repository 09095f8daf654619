"""What the engine knows of a request, and of each of its outputs, while it is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from roll_core.types import Completion, CompletionOutput

if TYPE_CHECKING:
    from roll_core.types import FinishReason, Floats, GenerateRequest, RoutedExperts, SamplingParams, TokenIds
    from roll_infer_hf.stopping import StopStrings

UNIFORMS = 128
"""Uniform numbers drawn at once for one sequence."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of a request."""

    request: RunningRequest
    index: int
    uniforms: np.random.Generator
    """Counter-based (Philox, arXiv SC'11 10.1145/2063384.2063405) with key `(seed, index)`: token `t` uses its `t`-th
    number whatever else is in the batch."""
    slot: int = -1
    """Where its tokens are recorded while it runs; -1 before and after."""
    routed_experts: list[RoutedExperts] = field(default_factory=list)
    """Of its tokens from the prompt's first on, in pieces `[tokens, M, K]`, where they are asked for."""
    output: CompletionOutput | None = None

    @property
    def params(self) -> SamplingParams:
        """Of its request."""
        return self.request.request.params

    def note_experts(self, computed: RoutedExperts | None) -> None:
        """Of its tokens from the first on; those that were computed before under other weights keep theirs, under which
        what follows them was drawn."""
        if computed is not None and self.request.request.routed_experts:
            self.routed_experts.append(computed[sum(map(len, self.routed_experts)) :])

    def computed_experts(self, num_drawn: int) -> RoutedExperts | None:
        """Of all its tokens but the last of `num_drawn`; None where they are not asked for, or nothing was computed."""
        if not self.routed_experts:
            return None
        return np.concatenate(self.routed_experts)[: len(self.request.request.prompt_ids) + num_drawn - 1]


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A request from its arrival to its completion."""

    request: GenerateRequest
    order: tuple[int, int]
    """Priority and arrival: lower is served first."""
    end_ids: tuple[int, ...]
    """Ids that end an output."""
    stops: StopStrings | None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: Floats | None = None
    error: Exception | None = None

    @classmethod
    def make(
        cls,
        request: GenerateRequest,
        order: tuple[int, int],
        end_ids: tuple[int, ...],
        stops: StopStrings | None,
        seed: int,
    ) -> RunningRequest:
        """With its `n` outputs to come."""
        made = cls(request, order, end_ids, stops)
        key = seed % 2**64
        made.sequences = [
            Sequence(made, index, np.random.Generator(np.random.Philox(key=np.array([key, index], dtype=np.uint64))))
            for index in range(request.n)
        ]
        return made

    @property
    def done(self) -> bool:
        """Whether there is nothing left to compute."""
        return self.error is not None or all(each.output is not None for each in self.sequences)

    def completion(self) -> Completion:
        """The answer; every sequence has its output."""
        outputs = tuple(each.output for each in self.sequences if each.output is not None)
        return Completion(id=self.request.id, outputs=outputs, prompt_logprobs=self.prompt_logprobs)


def make_output(
    tokens: TokenIds,
    logprobs: Floats,
    versions: np.ndarray[tuple[int], np.dtype[np.int32]],
    reason: FinishReason,
    stop: str | int | None = None,
    routed_experts: RoutedExperts | None = None,
) -> CompletionOutput:
    """An output that owns its arrays."""
    return CompletionOutput(
        token_ids=tokens.astype(np.int64),
        logprobs=logprobs.astype(np.float32),
        versions=versions.astype(np.int32),
        finish_reason=reason,
        stop=stop,
        routed_experts=routed_experts,
    )
