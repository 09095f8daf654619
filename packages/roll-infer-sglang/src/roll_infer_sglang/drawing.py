"""One output of a request on its way: what is drawn of it, over interruptions, and whether that is its end."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.types import CompletionOutput
from roll_infer_sglang.sampling import logprobs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.types import FinishReason, Floats, GenerateRequest, RoutedExperts

    End = tuple[int, FinishReason, str | int | None]
    """Of an output: how many tokens it has, why it ended, and by which stop."""


@dataclass(slots=True, eq=False)
class Draw:
    """Lives as long as the call of `generate`."""

    request: GenerateRequest
    index: int
    answer: asyncio.Future[dict[str, Any] | None]
    """SGLang's last word on what was asked last; None where it was hung up on before it had one."""
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it may enter, and once it is aborted."""
    name: str = ""
    """Under which SGLang knows what was asked last; no other begins so."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: Floats | None = None
    routed_experts: RoutedExperts | None = None
    """Of the prompt's tokens and of those drawn, but the last."""
    entered: int = 0
    """How many of them were there when it entered last."""
    outcome: CompletionOutput | None = None
    """Once it has ended."""
    asked: bool = False
    """Whether `answer` is on its way, or was."""
    aborted: bool = False
    """By who asked for it; an update interrupts too."""

    @property
    def prompt(self) -> list[int]:
        """All that is there."""
        return [*self.request.prompt_ids.tolist(), *self.tokens]

    def take(self, said: Mapping[str, Any]) -> None:
        """Add what SGLang has drawn since it spoke last. Tokens and logprobs are of that alone, counts and versions of
        all that it has drawn since the draw entered."""
        meta = said["meta_info"]
        if self.request.prompt_logprobs and self.index == 0 and meta.get("input_token_logprobs"):
            self.prompt_logprobs = logprobs_of(meta["input_token_logprobs"])
        # The abort of one that waits, drawn in part, says its last tokens once more.
        num = meta.get("completion_tokens", 0) - (len(self.tokens) - self.entered)
        if num > 0:
            self.tokens += said["output_ids"][:num]
            self.logprobs += logprobs_of(meta["output_token_logprobs"][:num]).tolist()
            self.versions += [int(meta["weight_version"])] * num
        for span in meta.get("weight_versions") or ():
            start, end = (min(self.entered + span[side], len(self.tokens)) for side in ("start", "end"))
            self.versions[start:end] = [int(span["version"])] * (end - start)

    def note_experts(self, told: RoutedExperts | None) -> None:
        """Of all tokens that are there. Those that were computed before an interruption keep theirs."""
        if told is None:
            return
        known = self.routed_experts
        self.routed_experts = told if known is None else np.concatenate([known, told[len(known) :]])

    def end(self, end_ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None) -> End | None:
        """Where what is drawn ends; None if it does not. `decode` is needed for stop strings.

        SGLang looks for stop strings among as many tokens as it would write them with, and not at all at a token that
        was drawn while the request was interrupted.
        """
        params = self.request.params
        found: list[End] = []
        if not params.ignore_eos:
            ends = {*end_ids, *params.stop_token_ids}
            at = next((at for at, token in enumerate(self.tokens) if token in ends), None)
            if at is not None:
                found.append((at + 1, "stop", self.tokens[at]))
            if params.stop and decode is not None:
                found += _stop_strings(self.tokens, params.stop, decode)
        if len(self.tokens) >= params.max_new_tokens:
            found.append((params.max_new_tokens, "length", None))
        return min(found, key=lambda each: each[0], default=None)

    def output(self, num: int, reason: FinishReason, stop: str | int | None) -> CompletionOutput:
        """The first `num` tokens, as the contract has them."""
        experts = self.routed_experts
        return CompletionOutput(
            token_ids=np.asarray(self.tokens[:num], np.int64),
            logprobs=np.asarray(self.logprobs[:num], np.float32),
            versions=np.asarray(self.versions[:num], np.int32),
            finish_reason=reason,
            stop=stop,
            routed_experts=None if experts is None else experts[: len(self.request.prompt_ids) + num - 1],
        )


def _stop_strings(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> list[End]:
    """The end by the first stop string to be complete."""
    text = decode(tokens)
    if not any(stop in text for stop in stops):
        return []
    num = bisect_left(range(len(tokens) + 1), True, key=lambda num: any(stop in decode(tokens[:num]) for stop in stops))
    text = decode(tokens[:num])
    _, _, stop = min((text.find(stop), order, stop) for order, stop in enumerate(stops) if stop in text)
    return [(num, "stop", stop)]
