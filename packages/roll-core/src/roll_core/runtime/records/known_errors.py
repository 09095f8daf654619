"""Remedies for known errors: the root cause of the error that ended a run, looked up in the lists of all plugins."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_core.errors import PluginError, RollError, WorkerError, chain
from roll_core.plugins.targets import known_errors
from roll_core.spec.providers import KnownErrorsProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.plugins.registry import Registry
    from roll_core.spec.diagnostics import KnownError

log = logging.getLogger(__name__)

PAGE = "docs/troubleshooting.md"

_CAUSE_IN_TRACE = re.compile(r"^(?:\w+\.)*(?P<name>[A-Z]\w*)(?:: (?P<message>.+))?$")
"""Matches a line of a traceback that names an exception; lines of frames and source code are indented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A known error that matches the error of a run."""

    known: KnownError
    seen: str
    """The cause that matched the known error, as `Type: message`."""

    def told(self, beside: str) -> str:
        """Format as lines: root cause, explanation, remedy and documentation link.

        Omits the root cause if the error message `beside`, printed next to the advice, already contains it.
        """
        heard = " ".join(beside.split())
        first = [] if self.seen.partition(": ")[2] in heard else [f"first cause: {self.seen}"]
        return "\n".join([*first, self.known.cause, f"what to do: {self.known.remedy}", f"see {PAGE}#{self.known.id}"])


def advise(error: BaseException, registry: Registry) -> Advice | None:
    """The known error that matches the deepest cause of `error`; None if none matches.

    Messages of ROLL's own user errors are not matched: they state their remedy.
    """
    method = _method(error)
    known = list(_known(registry))
    for cause in reversed(list(dict.fromkeys(_causes(error)))):
        matching = [each for each in known if re.search(each.pattern, cause)]
        fitting = [each for each in matching if method in each.during] or [each for each in matching if not each.during]
        if fitting:
            return Advice(known=fitting[0], seen=cause)
    return None


def _known(registry: Registry) -> Iterator[KnownError]:
    """Known errors, general ones last: other entries are more specific to an engine."""
    records = registry.providers(KnownErrorsProvider)[::-1]
    for record in sorted(records, key=lambda each: each.general):
        try:
            yield from known_errors(record, owner=registry.owner(record))
        except PluginError as error:
            log.warning("%s", error)


def _method(error: BaseException) -> str:
    return next((each.method for each in chain(error) if isinstance(each, WorkerError)), "")


def _causes(ended_by: BaseException) -> Iterator[str]:
    """Yield `Type: message` of the exception and its causes, the root cause last.

    Skips ROLL's errors about user mistakes, which state their own remedy.
    """
    for error in chain(ended_by):
        if isinstance(error, WorkerError):
            yield error.cause
        elif not isinstance(error, RollError):
            yield _described(type(error).__name__, str(error))
        elif error.exit_code == 1:
            # A failure, not a user mistake: its message may contain another program's output.
            yield from (f"{type(error).__name__}: {line.strip()}" for line in str(error).splitlines() if line.strip())
        if isinstance(error, RollError) and error.trace:
            yield from reversed(list(_causes_in_trace(error.trace)))


def _causes_in_trace(trace: str) -> Iterator[str]:
    """Exceptions in a traceback, in its order, with the root cause first; without ROLL's own."""
    own = {each.__name__ for each in _subclasses(RollError)}
    for line in trace.splitlines():
        found = _CAUSE_IN_TRACE.match(line)
        if found is not None and found["name"] not in own:
            yield _described(found["name"], found["message"] or "")


def _subclasses(cls: type[BaseException]) -> Iterator[type[BaseException]]:
    yield cls
    for each in cls.__subclasses__():
        yield from _subclasses(each)


def _described(name: str, message: str) -> str:
    lines = message.strip().splitlines()
    return f"{name}: {' '.join(lines[0].split())}" if lines else name
