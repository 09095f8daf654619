"""The groups of one tag that are not trained on yet, in prompt order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from roll_core.spec.pipeline import Prompt
    from roll_core.types import CompletionOutput, Group


@dataclass(eq=False, slots=True)
class Entry:
    """A group on its way: waiting, drawn (`request_id`), judged (`group`)."""

    prompt: Prompt
    position: int
    """Of the prompt in its tag's order."""
    born: int
    """Step in which its first token was drawn."""
    request_id: str = ""
    """From when it is asked until it is judged, or waits again."""
    drawn: Sequence[CompletionOutput | None] | None = None
    """What is drawn of a group that waits for the next batch, or for its judge."""
    group: Group | None = None
    dropped: bool = False
    """Another has its place."""

    @property
    def is_begun(self) -> bool:
        """Whether some of it may be older than the next token."""
        return self.group is not None or self.drawn is not None or bool(self.request_id)


@dataclass(eq=False, slots=True)
class Line:
    """What is the same for all of a tag's groups, and the groups. The first `count` are the next batch's."""

    tag: str
    count: int
    """Groups of a batch."""
    extra: int
    """Groups that may be ahead of it."""
    limit: int
    """Prompts that may join for one batch."""
    entries: list[Entry] = field(default_factory=list)
    next: int = 0
    """Position of the next prompt to join."""
    tried: int = 0
    """Prompts that joined for this batch."""
    ready: int = 0
    """Judged groups at the front."""
    unsettled: int = 0
    """Groups that are not judged."""

    @classmethod
    def of(cls, tag: str, count: int, *, ahead: float, max_tries: float) -> Line:
        """An empty one."""
        extra = math.floor(ahead * count)
        return cls(tag, count, extra, math.ceil(max_tries * count) + extra)

    @property
    def is_complete(self) -> bool:
        """Whether the batch has its groups of this tag, or all that it will get."""
        return self.ready >= self.count or (self.unsettled == 0 and self.tried >= self.limit)

    def joining(self, room: int, prompt: Callable[[str, int], Prompt], step: int) -> list[Entry]:
        """The next prompts, until the line has `room` groups."""
        joined = []
        while len(self.entries) < room and self.tried < self.limit:
            joined.append(Entry(prompt(self.tag, self.next), self.next, step))
            self.entries.append(joined[-1])
            self.next += 1
            self.tried += 1
        self.unsettled += len(joined)
        return joined

    def settle(self, entry: Entry, group: Group | None) -> None:
        """A group is judged; None leaves it out."""
        self.unsettled -= 1
        if group is None:
            self.entries.remove(entry)
            return
        entry.group, entry.drawn, entry.request_id = group, None, ""
        self._advance()

    def take(self) -> list[Entry]:
        """The batch, which leaves the line."""
        taken, self.entries = self.entries[: self.count], self.entries[self.count :]
        self.ready = 0
        self._advance()
        return taken

    def replace(self, entries: Sequence[Entry]) -> None:
        """Have these groups instead."""
        self.entries = list(entries)
        self.unsettled = sum(entry.group is None for entry in entries)
        self.ready = 0
        self._advance()

    def _advance(self) -> None:
        while self.ready < len(self.entries) and self.entries[self.ready].group is not None:
            self.ready += 1
