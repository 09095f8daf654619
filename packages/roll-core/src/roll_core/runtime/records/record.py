"""`run.json`, the record of a run: config facts, versions, hardware, progress and outcome, to reproduce the run.

Written when the run begins and after each change, always atomically. A killed run leaves a complete record with outcome
`running` and the id of a process that no longer exists.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from roll_core.config.secrets import Redactor
from roll_core.errors import RollError, RunFileError, RunPreemptedError
from roll_core.runtime.records.checkpoint_directory import CheckpointDirectory
from roll_core.runtime.records.provenance import git_state, host_facts, requirements, versions
from roll_core.runtime.records.run_dir import experiment_runs
from roll_core.runtime.records.run_files import safe, writing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.runtime.records.checkpoint_directory import Checkpoint
    from roll_core.runtime.records.guards import GuardEvent
    from roll_core.runtime.records.run_dir import RunDir

logger = logging.getLogger(__name__)

Outcome = Literal["running", "finished", "failed", "interrupted", "preempted"]

FORMAT = 1
_STEP_WRITE_INTERVAL_S = 1.0
_EVENTS_PER_GUARD = 20
"""Events stored per guard. Later events are only counted, so that frequent warnings do not bloat the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run that are known when it starts; `RunRecord.update` may set some later."""

    name: str
    """Experiment and number of the run, such as `grpo/001`."""
    pipeline: str
    executor: str = ""
    platform: str = ""
    seed: int | None = None
    argv: Sequence[str] = ()
    plugins: Sequence[Mapping[str, Any]] = ()
    """Installed plugins, each with at least `package`, `version` and `hook_api`."""
    steps_asked: int | None = None
    resumed_from: str = ""
    """Path of the checkpoint from which the run resumed; empty if it did not."""
    resumed_step: int = 0
    started: float = field(default_factory=time.time)
    """Start of the run, in Unix seconds."""


class RunRecord:
    """The record of one run, kept by its driver."""

    def __init__(self, path: Path, facts: RunFacts, redactor: Redactor | None = None) -> None:
        """Collect versions, git state and host facts, and write the record with outcome `running`."""
        self._path = path
        self._redactor = redactor or Redactor.of(os.environ)
        self._data: dict[str, Any] = {}
        known = asdict(facts) | {"started": round(facts.started, 3)}
        self._set(
            format=FORMAT,
            **known,
            outcome="running",
            error=None,
            ended=None,
            steps_done=facts.resumed_step,
            weight_transports={},
            guards={"counts": {}, "events": []},
            time=None,
            memory=None,
            best_checkpoint=None,
            checkpoint_store="",
            versions=versions(name for plugin in facts.plugins for name in requirements(plugin["package"])),
            environments={},
            git=git_state(Path.cwd()),
            host=host_facts(),
            process={"pid": os.getpid(), "created": psutil.Process().create_time()},
            cwd=str(Path.cwd()),
        )
        self._write()

    def _set(self, **changes: Any) -> None:
        """Set fields, without secrets and as plain values: redacting them in each write would take 5 ms."""
        self._data |= safe(self._redactor.value(changes))

    def update(self, **changes: Any) -> None:
        """Set fields (`steps_asked`, `executor`, `platform`, …) and write the record."""
        self._set(**changes)
        self._write()

    def weight_transport(self, source: str, target: str, transport: str) -> None:
        """Record the transport that carries weights from `source` to `target`."""
        self.update(weight_transports={**self._data["weight_transports"], f"{source} -> {target}": transport})

    def guard_event(self, event: GuardEvent) -> None:
        """Record that a guard tripped. Events of consecutive steps replace each other; all are counted."""
        guards = self._data["guards"]
        guards["counts"][event.guard] = guards["counts"].get(event.guard, 0) + 1
        events = guards["events"]
        same = [i for i, other in enumerate(events) if (other["guard"], other["since"]) == (event.guard, event.since)]
        if same:
            events[same[0]] = asdict(event)
        elif sum(other["guard"] == event.guard for other in events) < _EVENTS_PER_GUARD:
            events.append(asdict(event))
        self.update(guards=guards)

    def step(self, steps_done: int) -> None:
        """Set the number of completed steps. Writes at most once a second: short steps must not block on the disk."""
        self._data["steps_done"] = steps_done
        if time.monotonic() - self._written >= _STEP_WRITE_INTERVAL_S:
            self._write()

    def finish(
        self,
        error: BaseException | None = None,
        *,
        advice: str = "",
        time_rows: Sequence[Mapping[str, Any]] = (),
    ) -> Outcome:
        """Record the end of the run and return its outcome: `finished` without an `error`.

        `advice` is the remedy for `error`. `time_rows` are the rows of the ledger.
        """
        outcome: Outcome = "finished"
        if error is not None:
            outcome = _outcome_of(error)
            failure = {"type": type(error).__name__, "message": str(error)}
            failure |= {"code": error.code} if isinstance(error, RollError) else {}
            self._set(error=failure | ({"advice": advice} if advice else {}))
        self._set(outcome=outcome, ended=round(time.time(), 3), time=[dict(row) for row in time_rows] or None)
        try:
            self._write()
        except RunFileError as lost:
            if not self._overwrite():
                logger.error("run.json lacks the outcome of the run: %s", lost)
        return outcome

    def _overwrite(self) -> bool:
        """For a full disk: overwrite the record in place, within its current size. Returns True on success.

        Drops the indentation, and if needed the longest fields.
        """
        try:
            space = self._path.stat().st_size
            for left_out in ((), ("time",), ("time", "guards"), ("time", "guards", "plugins", "argv")):
                text = json.dumps({k: v for k, v in self._data.items() if k not in left_out}, default=str).encode()
                if len(text) <= space:
                    with self._path.open("r+b", buffering=0) as stream:
                        stream.write(text.ljust(space))
                    return True
        except OSError as error:
            logger.debug("run.json cannot be overwritten: %s", error)
        return False

    def _write(self) -> None:
        text = json.dumps(self._data, ensure_ascii=False, indent=1, default=str)
        write_atomically(self._path, text)
        self._written = time.monotonic()


def _outcome_of(error: BaseException) -> Outcome:
    if isinstance(error, RunPreemptedError):
        return "preempted"
    return "interrupted" if isinstance(error, (KeyboardInterrupt, SystemExit)) else "failed"


def read_record(path: Path) -> dict[str, Any]:
    """Read the record at `path`; empty if it is missing or cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        logger.debug("no record in %s: %s", path, error)
        return {}
    return record if isinstance(record, dict) else {}


def finished_run(checkpoint: Checkpoint, current: RunDir) -> Path | None:
    """Path of a run that finished at the step of `checkpoint`, which it wrote or resumed from; None if there is none.

    Searches the experiment of the checkpoint and the experiment of the run `current`.
    """
    writer = checkpoint.run
    for run in (run for experiment in {writer.parent, current.experiment} for run in experiment_runs(experiment)):
        record = read_record(run.record)
        at_step = record.get("outcome") == "finished" and record.get("steps_done") == checkpoint.step
        if at_step and (run.path == writer or record.get("resumed_from") == str(checkpoint)):
            return run.path
    return None


def earlier_checkpoints(experiment: Path, attempts: Mapping[str, int]) -> list[tuple[CheckpointDirectory, int]]:
    """Checkpoints of the runs of an experiment whose ids are in `attempts`, each with its last step there."""
    directories = []
    for run in experiment_runs(experiment) if attempts else ():
        id = read_record(run.record).get("id")
        if isinstance(id, str) and isinstance(step := attempts.get(id), int):
            directories.append((CheckpointDirectory(run.checkpoints), step))
    return directories


def write_atomically(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old or the new text. Raises `RunFileError`."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")
    with writing(path):
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
