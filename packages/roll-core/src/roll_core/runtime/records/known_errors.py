"""What to do about the error that ended a run: its first cause, looked up in the lists of all plugins."""

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
    from roll_core.spec.known_errors import KnownError

log = logging.getLogger(__name__)

PAGE = "docs/troubleshooting.md"

_CAUSE_IN_TRACE = re.compile(r"^(?:\w+\.)*(?P<name>[A-Z]\w*)(?:: (?P<message>.+))?$")
"""A line of a traceback that begins an exception; those of frames and of source are indented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What is known about an error."""

    known: KnownError
    seen: str
    """The cause by which it was recognised, `Type: message`."""

    def told(self, beside: str) -> str:
        """In lines, for whoever has just read the message `beside`."""
        heard = " ".join(beside.split())
        first = [] if self.seen.partition(": ")[2] in heard else [f"first cause: {self.seen}"]
        return "\n".join([*first, self.known.cause, f"what to do: {self.known.remedy}", f"see {PAGE}#{self.known.id}"])


def advise(error: BaseException, registry: Registry) -> Advice | None:
    """What is known about `error`, by the cause that lies deepest; None for one of ROLL's own, which says what to do
    itself, and for one that nobody knows."""
    method = _method(error)
    known = list(_known(registry))
    for cause in reversed(list(dict.fromkeys(_causes(error)))):
        matching = [each for each in known if re.search(each.pattern, cause)]
        fitting = [each for each in matching if method in each.during] or [each for each in matching if not each.during]
        if fitting:
            return Advice(known=fitting[0], seen=cause)
    return None


def _known(registry: Registry) -> Iterator[KnownError]:
    """Plugins' before the core's: they know their engine's errors better."""
    for record in reversed(registry.providers(KnownErrorsProvider)):
        try:
            yield from known_errors(record, owner=registry.owner(record))
        except PluginError as error:
            log.warning("%s", error)


def _method(error: BaseException) -> str:
    return next((each.method for each in chain(error) if isinstance(each, WorkerError)), "")


def _causes(ended_by: BaseException) -> Iterator[str]:
    """`Type: message` of the exception and of what it came from, the first cause last. ROLL's own about mistakes of the
    user's do not speak: they say what to do."""
    for error in chain(ended_by):
        if isinstance(error, WorkerError):
            yield error.cause
        elif not isinstance(error, RollError):
            yield _described(type(error).__name__, str(error))
        elif error.exit_code == 1:
            # A failure, not a mistake of the user's: it may pass on what another program said.
            yield from (f"{type(error).__name__}: {line.strip()}" for line in str(error).splitlines() if line.strip())
        if isinstance(error, RollError) and error.trace:
            yield from reversed(list(_causes_in_trace(error.trace)))


def _causes_in_trace(trace: str) -> Iterator[str]:
    """The exceptions of a traceback in its order, the first cause first; ROLL's own stay out."""
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
