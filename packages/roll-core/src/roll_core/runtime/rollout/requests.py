"""A request for n outputs: its state and its partial outputs.

    submitted ──► QUEUED ◄───────► RUNNING ──► FINISHED   completed, failed or cancelled (from every state)
                  ▲    │ pause     ▲  │ pause
           resume │    ▼    resume │  ▼
                  PAUSED ◄───────── PAUSING    aborts are under way

A replica receives sub-requests: the whole request at first, single outputs once tokens are sampled. Tokens of an
interrupted output become part of the prompt of the sub-request that continues it. Regenerating interrupted outputs
instead would bias sampling toward short responses, which are interrupted less often.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import RollError
from roll_core.types import Completion, CompletionOutput, GenerateRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeAlias

    from roll_core.types import Floats, TokenIds, TopTokens

    FindStop: TypeAlias = Callable[[TokenIds, int, Sequence[str]], "tuple[int, str] | None"]
    """Takes tokens, the number of tokens before the interruption, and stop strings. Returns the end of a stop string
    that spans the interruption, and the string."""
    Outputs: TypeAlias = Sequence[CompletionOutput | None]
    """Outputs of a request; None before the first token. Partial outputs have `finish_reason == "abort"`."""


class RequestState(Enum):
    """State of a request; the diagram in this module's docstring has the transitions."""

    QUEUED = "queued"
    """Waiting in the queue; no replica is running any of its outputs."""
    RUNNING = "running"
    """A replica is running at least one of its outputs."""
    PAUSING = "pausing"
    PAUSED = "paused"
    FINISHED = "finished"


QUEUED, RUNNING, PAUSING, PAUSED, FINISHED = RequestState
TRANSITIONS = {
    QUEUED: {RUNNING, PAUSED, FINISHED},
    RUNNING: {QUEUED, PAUSING, FINISHED},
    PAUSING: {PAUSED, RUNNING, FINISHED},
    PAUSED: {QUEUED, FINISHED},
    FINISHED: set[RequestState](),
}


@dataclass(eq=False, slots=True)
class PartialOutput:
    """One output of a request, possibly incomplete."""

    index: int
    sampled: CompletionOutput | None = None
    """The output's tokens so far; None before the first."""
    complete: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return 0 if self.sampled is None else len(self.sampled.token_ids)

    def add(self, part: CompletionOutput, max_new_tokens: int) -> None:
        """Append newly sampled tokens. An interrupted part leaves the output incomplete."""
        self.sampled = part if self.sampled is None else joined(self.sampled, part)
        if part.finish_reason != "abort":
            self.complete = True
        # Interrupted at its last token: a request for the rest would ask for 0 tokens.
        elif self.num_tokens >= max_new_tokens:
            self.sampled = replace(self.sampled, finish_reason="length")
            self.complete = True


@dataclass(eq=False, slots=True)
class PendingRequest:
    """A submitted request. Its queue owns all fields except `done`."""

    request: GenerateRequest
    order: int
    """Requests of one priority run in this order."""
    outputs: list[PartialOutput]
    done: asyncio.Future[Completion]
    """Future of the completion or the error."""
    replica: object | None = None
    """The only replica that may run it, if the caller chose one."""
    state: RequestState = QUEUED
    running: dict[str, Any] = field(default_factory=dict)
    """`ReplicaSlot` of each running sub-request, by the request id that the replica received."""
    prompt_logprobs: Floats | None = None
    prompt_topk: TopTokens | None = None
    on_progress: Callable[[Outputs], None] | None = None
    """Receives the outputs so far, including what replicas report of running ones."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a pausing request is paused or finished."""

    @property
    def sampled(self) -> list[CompletionOutput | None]:
        """The outputs so far, possibly partial or None."""
        return [output.sampled for output in self.outputs]

    @property
    def reported(self) -> list[CompletionOutput | None]:
        """The outputs with what replicas report of running ones."""
        outputs = self.sampled
        for id, slot in self.running.items():
            sub: SubRequest = slot.running[id]
            for output, part in zip(sub.outputs, sub.reported, strict=False):
                outputs[output.index] = part if output.sampled is None else joined(output.sampled, part)
        return outputs

    @property
    def interrupted(self) -> list[PartialOutput]:
        """The outputs that no replica is running."""
        running = {output for id, slot in self.running.items() for output in slot.running[id].outputs}
        return [output for output in self.outputs if output not in running]

    @property
    def wants_tokens(self) -> bool:
        """True unless the request is pausing, paused or finished."""
        return self.state in (QUEUED, RUNNING)

    def started(self, id: str, slot: Any) -> None:
        """Record that a sub-request was placed in `slot` under the request id `id`."""
        if not self.running:
            self.move(RUNNING)
        self.running[id] = slot

    def returned(self, id: str) -> None:
        """Record that the sub-request `id` ended or was lost."""
        del self.running[id]
        if not self.running and self.state in (RUNNING, PAUSING):
            self.move(QUEUED if self.state is RUNNING else PAUSED)

    def move(self, state: RequestState) -> None:
        """Change the state. Raises `RollError` for a transition that the diagram does not contain."""
        if state not in TRANSITIONS[self.state]:
            raise RollError(
                f"internal error: request {self.request.id} cannot change from {self.state.value} to {state.value};"
                " please report"
            )
        self.state = state
        (self.stopped.set if state in (PAUSED, FINISHED) else self.stopped.clear)()


@dataclass(eq=False, slots=True)
class SubRequest:
    """Outputs of one request that a replica generates together."""

    parent: PendingRequest
    outputs: list[PartialOutput]
    reported: Sequence[CompletionOutput] = ()
    """Last progress report of the replica, in the order of `outputs`."""

    @property
    def is_whole(self) -> bool:
        """True if it covers the whole request and no token is sampled. Replicas then receive the request unchanged."""
        return len(self.outputs) == self.parent.request.n and not any(output.num_tokens for output in self.outputs)

    def report(self, outputs: Sequence[CompletionOutput]) -> bool:
        """Store progress. True if it has more tokens than the report before."""
        before, after = (sum(len(output.token_ids) for output in report) for report in (self.reported, outputs))
        if after >= before:  # two polls may be answered in the other order
            self.reported = outputs
        if after <= before:
            return False
        if self.parent.on_progress is not None:
            self.parent.on_progress(self.parent.reported)
        return True


def joined(first: CompletionOutput, then: CompletionOutput) -> CompletionOutput:
    """Concatenate two parts of one output; the finish reason is that of the second part.

    The replica of the second part recomputed the tokens of the first part, possibly with other experts. The result has
    the experts under which the tokens were sampled. The rows of both parts start at the prompt's first token.
    """
    experts = then.routed_experts if first.routed_experts is None else first.routed_experts
    if first.routed_experts is not None and then.routed_experts is not None:
        experts = np.concatenate([first.routed_experts, then.routed_experts[len(first.routed_experts) :]])
    return CompletionOutput(
        token_ids=np.concatenate([first.token_ids, then.token_ids]),
        logprobs=np.concatenate([first.logprobs, then.logprobs]),
        versions=np.concatenate([first.versions, then.versions]),
        finish_reason=then.finish_reason,
        stop=then.stop,
        routed_experts=experts,
    )


def cut_at(output: CompletionOutput, num_tokens: int, stop: str) -> CompletionOutput:
    """The output truncated to `num_tokens`, which end in the stop string."""
    routed = output.routed_experts
    return CompletionOutput(
        token_ids=output.token_ids[:num_tokens],
        logprobs=output.logprobs[:num_tokens],
        versions=output.versions[:num_tokens],
        finish_reason="stop",
        stop=stop,
        routed_experts=None if routed is None else routed[: len(routed) - len(output.token_ids) + num_tokens],
    )


def rest_of(request: GenerateRequest, output: PartialOutput, id: str) -> GenerateRequest:
    """A request for the rest of one output. It has a new seed: the old one would repeat the first random numbers."""
    params, num = request.params, output.num_tokens
    seed = params.seed
    if seed is not None:
        seed = stable_seed(seed, "output", output.index, "from", num)
    prompt = request.prompt_ids
    if output.sampled is not None:
        prompt = np.concatenate([prompt, output.sampled.token_ids])
    return replace(
        request,
        id=id,
        prompt_ids=prompt,
        params=replace(
            params,
            seed=seed,
            max_new_tokens=params.max_new_tokens - num,
            min_new_tokens=max(0, params.min_new_tokens - num),
        ),
        n=1,
        # The first part had them; here the prompt includes sampled tokens.
        prompt_logprobs=False,
        prompt_topk=0,
    )


def stop_finder(decode: Callable[[list[int]], str]) -> FindStop:
    """Finds stop strings that span an interruption: the engine that continued saw only their end."""

    def find(tokens: TokenIds, seam: int, stops: Sequence[str]) -> tuple[int, str] | None:
        if not 0 < seam < len(tokens):
            return None
        before = decode(tokens[:seam].tolist())
        for end in range(seam + 1, len(tokens) + 1):
            text = decode(tokens[:end].tolist())
            for stop in stops:
                # Engines have found stop strings that lie entirely before or after the interruption.
                position = text.find(stop, max(0, len(before) - len(stop) + 1))
                if 0 <= position < len(before):
                    return end, stop
            if len(text) >= len(before) + max(map(len, stops)):
                break
        return None

    return find


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed that is the same for the same parts on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
