"""The closing lines of a run: error, remedy, results, and the command that resumes the run.

The remedy is that of a known error: the root cause of the error is looked up in the lists of all plugins.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll_core.errors import ConfigError, DataError, PluginError, RollError, WorkerError, chain, one_line
from roll_core.plugins.attribution import raised_by
from roll_core.plugins.targets import known_errors
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.record import read_record
from roll_core.spec.providers import KnownErrorsProvider

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roll_core.config import LoadedConfig
    from roll_core.config.secrets import Redactor
    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.run_dir import RunDir
    from roll_core.spec.diagnostics import KnownError

log = logging.getLogger(__name__)

PAGE = "docs/troubleshooting.md"

_CAUSE_IN_TRACE = re.compile(r"^(?:\w+\.)*(?P<name>[A-Z]\w*)(?:: (?P<message>.+))?$")
"""Matches a line of a traceback that names an exception; lines of frames and source code are indented."""


def advice(error: Exception, registry: Registry, run_dir: RunDir) -> str:
    """Name the code that raised `error` and the remedy of the matching known error. Empty if neither is known.

    The code is omitted for wrong rows and configs: their message names file and row, or the key.
    """
    source = "" if isinstance(error, ConfigError | DataError) else raised_by(error, registry.plugins)
    lines = [f"raised by {source}; the traceback is in {relative(run_dir.log)}"] if source else []
    if (known := advise(error, registry)) is not None:
        lines.append(known.told(beside=str(error)))
    return "\n".join(lines)


def described(error: BaseException) -> str:
    """`code message` of a `RollError`; `Type: message` of any other exception."""
    return error.described().rstrip() if isinstance(error, RollError) else one_line(error)


def how_to_resume(
    loaded: LoadedConfig, argv: Sequence[str], run_dir: RunDir, redactor: Redactor
) -> list[tuple[str, str]]:
    """The command that resumes an unfinished run, or the reason why there is none. Empty for a finished run."""
    record = read_record(run_dir.record)
    if record.get("outcome") == "finished":
        return []
    saved = CheckpointDirectory(run_dir.checkpoints).list()
    step = saved[-1].step if saved else record.get("resumed_step", 0)
    if not step:
        return [("resume", f"no checkpoint was saved (save_steps: {loaded.config.save_steps})")]
    source = "true" if saved else record["resumed_from"]  # `true` does not search other experiments and URLs
    overrides = [
        argument
        for argument in argv[1:]
        if "=" in argument and not argument.startswith(("-", "resume_from_checkpoint="))
    ]
    config = loaded.sources[0] if loaded.sources else relative(run_dir.config)
    command = ["roll-core", "run", str(config), *overrides, f"resume_from_checkpoint={source}"]
    return [("resume", f"{redactor.text(shlex.join(command))}   (step {step} is saved)")]


def results(run_dir: RunDir, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Closing lines with the last held-out metrics, the best checkpoint and the path of the exported model."""
    lines = []
    if "val/score/mean" in metrics:
        lines.append(("held-out score", f"{metrics['val/score/mean']:.3f}  (val/score/mean)"))
    if "val/loss" in metrics:
        lines.append(("held-out loss", f"{metrics['val/loss']:.4f}  (val/loss)"))
    if "val/token_accuracy" in metrics:
        lines.append(("token accuracy", f"{metrics['val/token_accuracy']:.1%}  (val/token_accuracy)"))
    if "val/rewards/accuracies" in metrics:
        lines.append(("reward accuracy", f"{metrics['val/rewards/accuracies']:.1%}  (val/rewards/accuracies)"))
    record = read_record(run_dir.record)
    best = record.get("best_checkpoint")
    if best is not None:
        path = best["path"] if "://" in best["path"] else relative(best["path"])
        lines.append(("best checkpoint", f"{path}  ({best['metric']} {best['value']:.4g})"))
    if record.get("checkpoint_store"):
        lines.append(("checkpoint copies", record["checkpoint_store"]))
    if run_dir.profile.is_dir():
        lines.append(("profile", relative(run_dir.profile)))
    if run_dir.export.is_dir():
        lines.append(("model", relative(run_dir.export)))
    return lines


def relative(path: Any) -> str:
    """`path` relative to the working directory if it is below it; unchanged otherwise."""
    try:
        relative = os.path.relpath(path)
    except OSError:  # the working directory is gone
        return str(path)
    return str(path) if relative.startswith(os.pardir) else relative


# -- known errors ------------------------------------------------------------------------------------------------------


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
        matching = [entry for entry in known if re.search(entry.pattern, cause)]
        fitting = [entry for entry in matching if method in entry.during] or [
            entry for entry in matching if not entry.during
        ]
        if fitting:
            return Advice(known=fitting[0], seen=cause)
    return None


def _known(registry: Registry) -> Iterator[KnownError]:
    """Known errors, general ones last: other entries are more specific to an engine."""
    records = registry.providers(KnownErrorsProvider)[::-1]
    for record in sorted(records, key=lambda record: record.general):
        try:
            yield from known_errors(record, owner=registry.owner(record))
        except PluginError as error:
            log.warning("%s", error)


def _method(error: BaseException) -> str:
    return next((cause.method for cause in chain(error) if isinstance(cause, WorkerError)), "")


def _causes(ended_by: BaseException) -> Iterator[str]:
    """Yield `Type: message` of the exception and its causes, the root cause last.

    Skips ROLL's errors about user mistakes, which state their own remedy.
    """
    for error in chain(ended_by):
        if isinstance(error, WorkerError):
            yield error.cause
        elif not isinstance(error, RollError):
            yield _first_line(type(error).__name__, str(error))
        elif error.exit_code == 1:
            # A failure, not a user mistake: its message may contain another program's output.
            yield from (f"{type(error).__name__}: {line.strip()}" for line in str(error).splitlines() if line.strip())
        if isinstance(error, RollError) and error.trace:
            yield from reversed(list(_causes_in_trace(error.trace)))


def _causes_in_trace(trace: str) -> Iterator[str]:
    """Exceptions in a traceback, in its order, with the root cause first; without ROLL's own."""
    our_errors = {cls.__name__ for cls in _subclasses(RollError)}
    for line in trace.splitlines():
        match = _CAUSE_IN_TRACE.match(line)
        if match is not None and match["name"] not in our_errors:
            yield _first_line(match["name"], match["message"] or "")


def _subclasses(cls: type[BaseException]) -> Iterator[type[BaseException]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _subclasses(subclass)


def _first_line(name: str, message: str) -> str:
    lines = message.strip().splitlines()
    return f"{name}: {' '.join(lines[0].split())}" if lines else name
