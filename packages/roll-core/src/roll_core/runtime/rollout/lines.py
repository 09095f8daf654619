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
    left_out: bool = False
    """It has no place any more."""
    waited: bool = False
    """It was in the line when the batch was asked for."""

    @property
    def is_begun(self) -> bool:
        """Whether some of it may be older than the next token."""
        return self.group is not None or self.drawn is not None or bool(self.request_id)


@dataclass(eq=False, slots=True)
class Line:
    """What is the same for all of a tag's groups, and the groups.

    The first `count` are the next batch's. With `first_ready` it is those that waited when the batch was asked for, and
    then whichever are judged first: so long as `extra` is less than `count`, none is passed over twice.
    """

    tag: str
    count: int
    """Groups of a batch."""
    extra: int
    """Groups that may be ahead of it."""
    limit: int
    """Prompts that may join for one batch."""
    first_ready: bool = False
    next: int = 0
    """Position of the next prompt to join."""
    tried: int = 0
    """Prompts that joined for this batch."""
    unsettled: int = 0
    """Groups that are not judged."""
    _order: list[Entry] = field(default_factory=list)
    """The groups, and those that were left out since the last batch."""
    _num_left_out: int = 0
    _front: int = 0
    """Where in `_order` the first group is that is not judged."""
    _num_in_front: int = 0
    """Judged groups before that place."""
    _num_awaited: int = 0
    """Groups that waited and are not judged."""

    @classmethod
    def of(cls, tag: str, count: int, *, ahead: float, max_tries: float, first_ready: bool = False) -> Line:
        """An empty one."""
        extra = math.floor(ahead * count)
        return cls(tag, count, extra, math.ceil(max_tries * count) + extra, first_ready)

    def __len__(self) -> int:
        return len(self._order) - self._num_left_out

    @property
    def entries(self) -> list[Entry]:
        """The groups, in prompt order."""
        return [entry for entry in self._order if not entry.left_out]

    @property
    def is_complete(self) -> bool:
        """Whether the batch has its groups of this tag, or all that it will get."""
        if self.unsettled == 0 and self.tried >= self.limit:
            return True
        if self.first_ready:
            return len(self) - self.unsettled >= self.count and not self._num_awaited
        return self._num_in_front >= self.count

    def begin(self) -> None:
        """A batch is asked for."""
        self.tried = 0
        for entry in self._order:
            entry.waited = True
        self._num_awaited = self.unsettled

    def joining(self, room: int, prompt: Callable[[str, int], Prompt], step: int) -> list[Entry]:
        """The next prompts, until the line has `room` groups."""
        joined = []
        for _ in range(min(room - len(self), self.limit - self.tried)):
            joined.append(Entry(prompt(self.tag, self.next), self.next, step))
            self.next += 1
            self.tried += 1
        self._order += joined
        self.unsettled += len(joined)
        return joined

    def settle(self, entry: Entry, group: Group | None) -> None:
        """A group is judged; None leaves it out."""
        self.unsettled -= 1
        self._num_awaited -= entry.waited
        if group is None:
            entry.left_out = True
            self._num_left_out += 1
        else:
            entry.group, entry.drawn, entry.request_id = group, None, ""
        self._advance()

    def take(self) -> tuple[list[Entry], int]:
        """The batch, which leaves the line, and how many of those that stay it has passed over."""
        entries = self.entries
        taken = entries[: self.count]
        if self.first_ready:
            judged = [entry for entry in entries if entry.group is not None]
            taken = sorted(judged, key=lambda entry: not entry.waited)[: self.count]
            taken.sort(key=lambda entry: entry.position)
        gone = {entry.position for entry in taken}
        left = [entry for entry in entries if entry.position not in gone]
        self.replace(left)
        return taken, sum(entry.position < taken[-1].position for entry in left) if taken else 0

    def replace(self, entries: Sequence[Entry]) -> None:
        """Have these groups instead."""
        self._order = list(entries)
        self.unsettled = sum(entry.group is None for entry in entries)
        self._num_awaited = sum(entry.group is None and entry.waited for entry in entries)
        self._num_left_out = self._front = self._num_in_front = 0
        self._advance()

    def _advance(self) -> None:
        while self._front < len(self._order):
            entry = self._order[self._front]
            if entry.group is None and not entry.left_out:
                break
            self._num_in_front += not entry.left_out
            self._front += 1
