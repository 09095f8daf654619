"""State of one running output: its tokens across interruptions, and detection of its end."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.types import CompletionOutput
from roll_infer_sglang.sampling import logprobs_of, prompt_logprobs, top_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.types import FinishReason, Floats, GenerateRequest, RoutedExperts, TopTokens

    End = tuple[int, FinishReason, str | int | None]
    """End of an output: number of tokens, finish reason, and the stop string or end token."""


@dataclass(slots=True, eq=False)
class SglangOutput:
    """One output of a running request; exists during the call of `generate`."""

    request: GenerateRequest
    index: int
    response: asyncio.Future[dict[str, Any] | None]
    """SGLang's final response to the last submission; None if the connection was closed before."""
    may_submit: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the output may be submitted, and once it is aborted."""
    name: str = ""
    """Request id of the last submission in SGLang, not a prefix of any other id; empty before the first submission."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: Floats | None = None
    prompt_topk: TopTokens | None = None
    routed_experts: RoutedExperts | None = None
    """`[tokens, M, K]` experts of the prompt tokens and all but the last generated token; None if not returned."""
    num_submitted: int = 0
    """Number of generated tokens at the last submission."""
    final: CompletionOutput | None = None
    """Final output; None while it is running."""
    aborted: bool = False
    """True if the caller aborted it. Interruptions by weight updates do not set this."""

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt followed by the generated tokens."""
        return [*self.request.prompt_ids.tolist(), *self.tokens]

    def append(self, message: Mapping[str, Any]) -> None:
        """Append the tokens of a partial output.

        Its tokens and logprobs are deltas since the previous one. Its counts and weight versions cover all tokens since
        the last submission.
        """
        meta = message["meta_info"]
        if self.request.prompt_logprobs and self.index == 0 and meta.get("input_token_logprobs"):
            of_images = meta.get("input_token_ids_logprobs") or ()
            self.prompt_logprobs = prompt_logprobs(self.request.prompt_ids, meta["input_token_logprobs"], of_images)
            if self.request.prompt_topk:
                self.prompt_topk = top_tokens(meta["input_top_logprobs"], self.request.prompt_topk)
        # The abort of a waiting, partly generated request repeats its last tokens.
        num = meta.get("completion_tokens", 0) - (len(self.tokens) - self.num_submitted)
        if num > 0:
            self.tokens += message["output_ids"][:num]
            self.logprobs += logprobs_of(meta["output_token_logprobs"][:num]).tolist()
            self.versions += [int(meta["weight_version"])] * num
        for span in meta.get("weight_versions") or ():
            start, end = (min(self.num_submitted + span[side], len(self.tokens)) for side in ("start", "end"))
            self.versions[start:end] = [int(span["version"])] * (end - start)

    def add_experts(self, experts: RoutedExperts | None) -> None:
        """Store the routed experts of all tokens; tokens computed before an interruption keep their experts."""
        if experts is not None:
            known = self.routed_experts
            self.routed_experts = experts if known is None else np.concatenate([known, experts[len(known) :]])

    def end(self, end_ids: Sequence[int], decode: Callable[[Sequence[int]], str] | None) -> End | None:
        """End of the output in its tokens so far; None if it has not ended. `decode` is needed for stop strings.

        Needed because SGLang can miss stop strings. It searches only as many last tokens as its own encoding of the
        stop string has. It does not search at a token that is sampled while the request is interrupted.
        """
        params = self.request.params
        candidates: list[End] = []
        if not params.ignore_eos:
            ends = {*end_ids, *params.stop_token_ids}
            index = next((index for index, token in enumerate(self.tokens) if token in ends), None)
            if index is not None:
                candidates.append((index + 1, "stop", self.tokens[index]))
            if params.stop and decode is not None:
                candidates += _stop_strings(self.tokens, params.stop, decode)
        if len(self.tokens) >= params.max_new_tokens:
            candidates.append((params.max_new_tokens, "length", None))
        return min(candidates, key=lambda end: end[0], default=None)

    def completion(self, end: End | None = None) -> CompletionOutput:
        """Completion output up to `end`; with all tokens and finish reason `abort` without it."""
        num, reason, stop = end or (len(self.tokens), "abort", None)
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
    """End by the stop string that is completed first, as a list of at most one element."""
    text = decode(tokens)
    if not any(stop in text for stop in stops):
        return []
    num = bisect_left(range(len(tokens) + 1), True, key=lambda num: any(stop in decode(tokens[:num]) for stop in stops))
    text = decode(tokens[:num])
    _, _, stop = min((text.find(stop), order, stop) for order, stop in enumerate(stops) if stop in text)
    return [(num, "stop", stop)]
