"""Attributes an error to the plugin part that raised it, from tracebacks of this process and of workers.

Each traceback is searched from its innermost frame outwards. The first frame in a plugin's package identifies the
plugin. A frame of ROLL's runtime ends the search, because the plugin only called it. Executors are part of the runtime
in this respect if the error is one of ROLL's: they report exits of workers and missing slots. Frames of libraries and
of ROLL's toolkit for plugins are skipped.
"""

from __future__ import annotations

import os
import re
import traceback
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from roll_core.errors import RollError, chain
from roll_core.plugins.records import described
from roll_core.spec.providers import ExecutorProvider, InferProvider, RewardProvider, TrainProvider

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from roll_core.plugins.loader import Plugin
    from roll_core.spec.providers import Provider

_BEGIN = "Traceback (most recent call last):"
_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<number>\d+), in (?P<function>.+)$', re.MULTILINE)
_CORE = "roll_core"
_RUNTIME = ("roll_core.runtime.", "roll_core.api", "roll_core.cli.")
_CALLERS: dict[str, type[Provider]] = {
    "roll_core.runtime.workers.train": TrainProvider,
    "roll_core.runtime.workers.infer": InferProvider,
    "roll_core.runtime.workers.reward": RewardProvider,
}
"""Runtime modules, and the kind of part that each one calls."""


@dataclass(frozen=True, slots=True)
class _Frame:
    file: str
    line: int
    function: str
    """Qualified name (`Loss.step`) in a traceback of this process; the bare name in one from a worker."""

    def module(self, package: str) -> str:
        """Dotted module name that begins with the top-level `package`; empty if the file is not in that package."""
        parts = PurePath(os.path.splitext(self.file)[0]).parts  # generated code may have no file name
        if package not in parts:
            return ""
        inside = parts[len(parts) - 1 - parts[::-1].index(package) :]
        return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def raised_by(error: BaseException, plugins: Iterable[Plugin]) -> str:
    """Describe the plugin part that raised `error` or one of its causes; empty if no plugin's code raised it.

    Example: `policy loss 'acme_pg' of roll-acme 1.2 (roll_acme/losses.py:12 in loss)`. The first cause is searched
    first. roll-core's own parts do not count as plugin code.
    """
    foreign = {plugin: packages for plugin in plugins if (packages := _packages(plugin))}
    executors = {
        package
        for plugin, packages in foreign.items()
        if isinstance(error, RollError) and any(isinstance(record, ExecutorProvider) for record in plugin.providers)
        for package in packages
    }
    for frames in _tracebacks(error):
        if part := _part(frames, foreign, executors):
            return part
    return ""


def _packages(plugin: Plugin) -> frozenset[str]:
    """Top-level packages that the plugin's records and entry point name, except `roll_core`."""
    targets = [plugin.target, *(record.target for record in plugin.providers)]
    return frozenset(re.split(r"[.:]", target)[0] for target in targets) - {_CORE}


def _tracebacks(error: BaseException) -> Iterator[list[_Frame]]:
    """Yield the tracebacks of each exception, first cause first; frames are ordered outermost first."""
    for cause in reversed(list(chain(error))):
        sent = cause.trace if isinstance(cause, RollError) else ""
        for block in sent.split(_BEGIN)[1:]:
            yield [_Frame(line["file"], int(line["number"]), line["function"]) for line in _LINE.finditer(block)]
        walked = traceback.walk_tb(cause.__traceback__)
        yield [_Frame(frame.f_code.co_filename, line, frame.f_code.co_qualname) for frame, line in walked]


def _part(frames: Sequence[_Frame], foreign: dict[Plugin, frozenset[str]], executors: set[str]) -> str:
    for frame in reversed(frames):
        if any(frame.module(package) for package in executors):
            return ""
        for plugin, packages in foreign.items():
            for package in packages:
                if module := frame.module(package):
                    part = _names(plugin, package, module, frames)
                    file = module.replace(".", "/")
                    return f"{part} of {plugin} ({file}.py:{frame.line} in {frame.function})"
        if frame.module(_CORE).startswith(_RUNTIME):
            return ""
    return ""


def _names(plugin: Plugin, package: str, module: str, frames: Sequence[_Frame]) -> str:
    """Name the innermost hook or part in the traceback.

    If there is none, name all parts that `module` defines, limited to the kind that the runtime called if possible.
    """
    for frame in reversed(frames):
        if frame.module(package) and frame.function in plugin.hooks:
            return f"hook {frame.function}"
        target = f"{frame.module(package)}:{frame.function.partition('.')[0]}"
        if records := [record for record in plugin.providers if record.target == target]:
            return " or ".join(map(described, records))
    called = tuple(_CALLERS[name] for frame in frames if (name := frame.module(_CORE)) in _CALLERS)
    records = [record for record in plugin.providers if record.target.partition(":")[0] == module]
    return (
        " or ".join(map(described, [record for record in records if isinstance(record, called)] or records)) or "code"
    )
