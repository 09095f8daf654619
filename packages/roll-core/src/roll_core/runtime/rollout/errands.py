"""What the dispatcher knows of a request, and of what of it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll_core.runtime.rollout.drafts import rest_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterator, Sequence

    from roll_core.runtime.rollout.drafts import Draft
    from roll_core.runtime.rollout.replica import Answered, Replica
    from roll_core.runtime.rollout.routing import Seat
    from roll_core.types import CompletionOutput, Floats, GenerateRequest


@dataclass(eq=False, slots=True)
class Errand:
    """One request that somebody waits for."""

    request: GenerateRequest
    order: int
    answered: Answered
    drafts: list[Draft]
    only_at: Replica | None = None
    """The replica that is asked and no other, whatever runs there; the request fails if it dies."""
    running: dict[str, Seat] = field(default_factory=dict)
    """Where its pieces run, by id of the request that the replica knows."""
    prompt_logprobs: Floats | None = None
    recalled: asyncio.Future[None] | None = None
    """Set while it is taken back: nothing of it begins any more."""
    over: bool = False


@dataclass(eq=False, slots=True)
class Piece:
    """Outputs of one request that are drawn together: all of them at first, single ones where they go on."""

    errand: Errand
    drafts: list[Draft]
    known: Sequence[CompletionOutput] = ()
    """In the order of `drafts`: what the replica told of its progress."""

    @property
    def size(self) -> int:
        """Outputs."""
        return len(self.drafts)

    @property
    def is_unwanted(self) -> bool:
        """Nobody waits for it, or it is taken back: nothing of it is to begin."""
        return self.errand.over or self.errand.recalled is not None

    @property
    def is_fresh(self) -> bool:
        """Nothing of the whole request is drawn yet: it may be asked as it is."""
        return self.size == self.errand.request.n and not any(draft.num_tokens for draft in self.drafts)

    def note(self, outputs: Sequence[CompletionOutput]) -> bool:
        """Remember them as far as they are drawn; whether that is farther than before."""
        before = sum(len(output.token_ids) for output in self.known)
        self.known = outputs
        return sum(len(output.token_ids) for output in outputs) > before

    def wire(self, attempts: Iterator[int]) -> GenerateRequest:
        """What a replica is asked for: the request itself, or what is left of one output under an id of its own."""
        request = self.errand.request
        if self.is_fresh:
            return request
        draft = self.drafts[0]
        return rest_of(request, draft, f"{request.id}#{draft.index}.{next(attempts)}")
