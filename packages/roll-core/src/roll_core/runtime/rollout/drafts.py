"""Outputs that are drawn in several pieces: cut short where weights change or a replica dies, and continued.

The tokens drawn so far become part of the prompt of what continues them, so what has been paid for is kept, and long
answers are no rarer than they should be: to draw a cut answer anew would favour short ones, which are cut less often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from roll_core.runtime.rollout.groups import stable_seed
from roll_core.types import CompletionOutput, GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from roll_core.types import RoutedExperts, TokenIds

    FindStop = Callable[[TokenIds, int, Sequence[str]], "tuple[int, str] | None"]
    """Tokens, how many of them there were before the cut, and stop strings: where a stop string that reaches over the
    cut is complete, and which."""


@dataclass(eq=False, slots=True)
class Draft:
    """One output of a request."""

    index: int
    drawn: CompletionOutput | None = None
    """Its tokens so far."""
    complete: bool = False

    @classmethod
    def of(cls, index: int, drawn: CompletionOutput | None, max_new_tokens: int) -> Self:
        """As far as it was drawn before: complete where it had ended, or may not be longer."""
        draft = cls(index)
        if drawn is not None:
            draft.add(drawn, max_new_tokens)
        return draft

    @property
    def num_tokens(self) -> int:
        """Drawn so far."""
        return 0 if self.drawn is None else len(self.drawn.token_ids)

    def add(self, part: CompletionOutput, max_new_tokens: int) -> None:
        """Append what was drawn since. A part that was cut short leaves the draft incomplete."""
        self.drawn = part if self.drawn is None else joined(self.drawn, part)
        if part.finish_reason != "abort":
            self.complete = True
        elif self.num_tokens >= max_new_tokens:
            self.drawn = replace(self.drawn, finish_reason="length")
            self.complete = True


def joined(first: CompletionOutput, then: CompletionOutput) -> CompletionOutput:
    """Two parts of one output; it ends as the second does. The second part's engine computed the first one's tokens
    again: of their experts those count under which the first part was drawn."""
    return CompletionOutput(
        token_ids=np.concatenate([first.token_ids, then.token_ids]),
        logprobs=np.concatenate([first.logprobs, then.logprobs]),
        versions=np.concatenate([first.versions, then.versions]),
        finish_reason=then.finish_reason,
        stop=then.stop,
        routed_experts=joined_experts(first.routed_experts, then.routed_experts),
    )


def joined_experts(first: RoutedExperts | None, then: RoutedExperts | None) -> RoutedExperts | None:
    """Both count from the prompt's first token."""
    if first is None or then is None:
        return then if first is None else first
    return np.concatenate([first, then[len(first) :]])


def cut_at(output: CompletionOutput, num_tokens: int, stop: str) -> CompletionOutput:
    """The output as it would have ended at a stop string."""
    routed = output.routed_experts
    return CompletionOutput(
        token_ids=output.token_ids[:num_tokens],
        logprobs=output.logprobs[:num_tokens],
        versions=output.versions[:num_tokens],
        finish_reason="stop",
        stop=stop,
        routed_experts=None if routed is None else routed[: len(routed) - len(output.token_ids) + num_tokens],
    )


def rest_of(request: GenerateRequest, draft: Draft, id: str) -> GenerateRequest:
    """A request for what is left of one output.

    It has a seed of its own: with the old one it would use the numbers again that drew its first tokens.
    """
    params, drawn = request.params, draft.num_tokens
    seed = params.seed
    if seed is not None:
        seed = stable_seed(seed, "output", draft.index, "from", drawn)
    prompt = request.prompt_ids
    if draft.drawn is not None:
        prompt = np.concatenate([prompt, draft.drawn.token_ids])
    return replace(
        request,
        id=id,
        prompt_ids=prompt,
        params=replace(
            params,
            seed=seed,
            max_new_tokens=params.max_new_tokens - drawn,
            min_new_tokens=max(0, params.min_new_tokens - drawn),
        ),
        n=1,
        prompt_logprobs=False,
    )


def stop_finder(decode: Callable[[list[int]], str]) -> FindStop:
    """Finds stop strings that an engine could not see because it drew only the end of them."""

    def find(tokens: TokenIds, seam: int, stops: Sequence[str]) -> tuple[int, str] | None:
        if not 0 < seam < len(tokens):
            return None
        before = decode(tokens[:seam].tolist())
        for end in range(seam + 1, len(tokens) + 1):
            text = decode(tokens[:end].tolist())
            for stop in stops:
                # What lies in the continuation alone the engine has seen; what lay before the cut, too.
                at = text.find(stop, max(0, len(before) - len(stop) + 1))
                if 0 <= at < len(before):
                    return end, stop
            if len(text) >= len(before) + max(map(len, stops)):
                break
        return None

    return find
