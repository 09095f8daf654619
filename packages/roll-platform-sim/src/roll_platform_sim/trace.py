"""Counts of operators, copies between host and device, and waits of the host, by source line."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import roll_platform_sim.roll_sim as _native  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal["op", "h2d", "d2h", "d2d", "wait"]
"""An operator on a device; a copy from host to device, from device to host, or between devices; a wait of the host."""

_active: list[Trace] = []
_lock = threading.Lock()


class Event(NamedTuple):
    """What a trace counts."""

    kind: Kind
    what: str
    """Name of the operator, or how it is copied."""
    line: str
    """`file:line` of the copy or wait; empty for operators, `autograd` below backward passes."""


class Trace:
    """Events of all threads of this process, from `__enter__` to `__exit__`.

    with Trace() as trace:
        trainer.step()
    print(trace.num("wait"), trace.lines())
    """

    def __init__(self, packages: Sequence[str] = ("roll_",)) -> None:
        """Attribute events to the innermost line in a package whose name starts with one of `packages`.

        Otherwise to the innermost line outside torch.
        """
        self.events: Counter[Event] = Counter()
        self.num_bytes: Counter[Event] = Counter()
        self._packages = tuple(packages)

    def __enter__(self) -> Trace:
        with _lock:
            _active.append(self)
            _native.set_observer(_observe)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            _active.remove(self)
            _native.set_observer(_observe if _active else None)

    def num(self, *kinds: Kind) -> int:
        """Number of events of these kinds."""
        return sum(num for event, num in self.events.items() if event.kind in kinds)

    def lines(self) -> list[str]:
        """Readable lines, most frequent first: number, bytes, kind, operation, source line."""
        return ["\t".join((str(num), str(self.num_bytes[event]), *event)) for event, num in self.events.most_common()]

    def _add(self, kind: Kind, what: str, num_bytes: int) -> None:
        event = Event(kind, what, "" if kind == "op" else self._line())
        self.events[event] += 1
        self.num_bytes[event] += num_bytes

    def _line(self) -> str:
        outside_torch = ""
        for file, line in _frames():
            parts = Path(file).parts
            if any(part.startswith(self._packages) for part in parts) and "roll_platform_sim" not in parts:
                return f"{_short(parts)}:{line}"
            if not outside_torch and "torch" not in parts and "roll_platform_sim" not in parts:
                outside_torch = f"{_short(parts)}:{line}"
        return outside_torch or "autograd"


def trace_process(path: str) -> None:
    """Trace this process until it exits, then write the lines to `{path}.{pid}`."""
    trace = Trace().__enter__()

    def write() -> None:
        trace.__exit__()
        Path(f"{path}.{os.getpid()}").write_text("\n".join([*trace.lines(), ""]), encoding="utf-8")

    atexit.register(write)


def _observe(kind: Kind, what: str, num_bytes: int) -> None:
    with _lock:
        for trace in _active:
            trace._add(kind, what, num_bytes)


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


def _short(parts: tuple[str, ...]) -> str:
    """The path below `src` or `site-packages`."""
    for root in ("src", "site-packages"):
        if root in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(root) :])
    return "/".join(parts[-3:])
