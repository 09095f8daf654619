"""Atomic checkpoints: `checkpoints/step-N/`, with a manifest of digests, is complete or does not exist.

    writing(N):  .step-N.tmp-<host>-<pid>-<x>/  --fsync, manifest.json-->  rename  -->  step-N/

`BestCheckpoint` is the best one by a metric (`save_best`): which step it is, and where it is after a resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from roll_core.errors import CheckpointError, ConfigError, ConfigProblem, RollError, closest
from roll_core.runtime.records.manifest import MANIFEST, STEP, read_manifest, verify, write_flushed, write_manifest
from roll_core.runtime.records.run_files import disk_is_full
from roll_core.runtime.records.tracking import is_lower_better

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from roll_core.spec.config import BestCheckpointConfig

logger = logging.getLogger(__name__)
T = TypeVar("T")

STATE = "state.json"
"""File of a checkpoint with the `state` that was passed to `CheckpointDirectory.writing`."""

_WORKING = re.compile(r"\.step-\d+\.(?:tmp|old)-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
_MINE: set[str] = set()
"""Names of the working directories that this process is writing."""
_FOREIGN_AGE_S = 24 * 3600.0
"""Age in seconds at which another host's working directory is swept; its processes cannot be checked from here."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path
    origin: str = ""
    """URL of which `path` is a copy; empty for a checkpoint of a run directory."""

    def __str__(self) -> str:
        return self.origin or str(self.path)

    @property
    def run(self) -> Path:
        """Directory of the run that wrote it, or of the files that were downloaded with it."""
        return self.path.parent.parent


class CheckpointDirectory:
    """The checkpoints of one run. One process writes; any process may read."""

    def __init__(self, directory: Path, keep: int = 0) -> None:
        """`keep`: number of newest checkpoints to retain, 0 for all. Accesses no files."""
        self.directory = directory
        self.keep = keep
        self.best: int | None = None
        """Step of the best checkpoint, which is retained too."""
        self.pinned: set[int] = set()
        """Steps that are retained until their upload has ended."""
        self.after = 0.0
        """Unix time of the newest checkpoint of the run that this one continues: later ones are newer on any clock."""
        self.earlier: Sequence[tuple[CheckpointDirectory, int]] = ()
        """Checkpoints of the attempts that this run continues, each up to a step. `keep` counts them too."""

    @staticmethod
    def is_checkpoint(path: Path) -> bool:
        """True if `path` has a manifest or is a directory named `step-N`. The checkpoint may be damaged."""
        return (path / MANIFEST).is_file() or (STEP.fullmatch(path.name) is not None and path.is_dir())

    @staticmethod
    def open(path: Path) -> Checkpoint:
        """Verify and return the checkpoint at `path`. Raises `CheckpointError` that lists the damage."""
        problems = verify(path)
        if problems:
            others = [c for c in CheckpointDirectory(path.parent).list() if c.path != path and not verify(c.path)]
            newest = f"resume from the newest intact one, {others[-1].path}" if others else "the run has no intact one"
            raise CheckpointError(f"checkpoint {path} is damaged: {_enumerate(problems)}; {newest}")
        return Checkpoint(read_manifest(path).step, path)

    def path(self, step: int) -> Path:
        """Path of the checkpoint of `step`, which need not exist."""
        return self.directory / f"step-{step}"

    def list(self) -> list[Checkpoint]:
        """All complete checkpoints, oldest first; not verified."""
        if not self.directory.is_dir():
            return []
        checkpoints = []
        for path in self.directory.iterdir():
            match = STEP.fullmatch(path.name)
            if match and path.is_dir():
                checkpoints.append(Checkpoint(int(match[1]), path))
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    def latest_good(self) -> Checkpoint | None:
        """The newest checkpoint that is intact, verified in full. None if there are no checkpoints.

        Skips damaged checkpoints with a warning. Raises `CheckpointError` if all are damaged.
        """
        damaged = []
        for checkpoint in reversed(self.list()):
            problems = verify(checkpoint.path)
            if not problems:
                return checkpoint
            damaged.append(f"{checkpoint.path.name} ({_enumerate(problems)})")
            logger.warning("checkpoint %s is damaged and is skipped: %s", checkpoint.path, _enumerate(problems))
        if damaged:
            raise CheckpointError(f"every checkpoint in {self.directory} is damaged: {', '.join(damaged)}")
        return None

    @contextlib.contextmanager
    def writing(self, step: int, state: Mapping[str, Any], *, stop: threading.Event | None = None) -> Iterator[Path]:
        """Yield a directory to write into. It becomes `step-<step>` when the block ends, and is removed if it raises.

        `state` is stored as JSON beside the block's files. The exit blocks until all files are flushed and digested,
        then removes the oldest checkpoints beyond `keep`, except the best one. Raises `CheckpointError` for a
        full disk and other `OSError`s; earlier checkpoints stay intact. If another thread sets `stop`, the exit raises
        `CheckpointError` soon.
        """
        self.sweep()
        working = self._working(step, "tmp")
        try:
            _MINE.add(working.name)
            working.mkdir(parents=True)
            write_flushed(working / STATE, json.dumps(state, allow_nan=False, indent=1))
            yield working
            write_manifest(working, step, stop, after=self.after)
            _flush_directories(working)
            self._publish(working, step)
        except BaseException as error:
            shutil.rmtree(working, ignore_errors=True)
            if disk_is_full(error):
                raise CheckpointError(self._full(step)) from error
            if isinstance(error, OSError) and not isinstance(error, RollError):
                raise CheckpointError(f"checkpoint of step {step} could not be written: {error}") from error
            raise
        finally:
            _MINE.discard(working.name)
        self.retire()

    @contextlib.asynccontextmanager
    async def writing_aside(self, step: int, state: Mapping[str, Any]) -> AsyncIterator[Path]:
        """As `writing`, but the exit flushes and digests in a thread, without blocking the event loop. Cancellable."""
        stop = threading.Event()
        with contextlib.ExitStack() as stack:
            yield stack.enter_context(self.writing(step, state, stop=stop))
            writing = stack.pop_all()
        await _in_thread(writing.close, stop)

    def retire(self) -> None:
        """Remove the oldest checkpoints beyond `keep`, except the best one and those in `pinned`.

        Those of `earlier` attempts are older. A failed removal is a warning, and is repeated after the next checkpoint.
        """
        if not self.keep:
            return
        stored = [
            (directory, checkpoint)
            for directory, last in self.earlier
            for checkpoint in directory.list()
            if checkpoint.step <= last
        ]
        stored += [(self, checkpoint) for checkpoint in self.list()]
        for directory, checkpoint in sorted(stored, key=lambda entry: entry[1].step)[: -self.keep]:
            if checkpoint.step == self.best or checkpoint.step in self.pinned:
                continue
            try:
                shutil.rmtree(directory._move_aside(checkpoint.path, checkpoint.step), ignore_errors=True)
            except OSError as error:
                logger.warning("%s could not be removed: %s", checkpoint.path, error)

    def sweep(self) -> None:
        """Remove incomplete checkpoints of processes that no longer exist."""
        if not self.directory.is_dir():
            return
        for path in self.directory.iterdir():
            match = _WORKING.fullmatch(path.name)
            if match and _abandoned(path, match["host"], int(match["pid"])):
                logger.info("removing %s: the process that wrote it exited before it was complete", path)
                shutil.rmtree(path, ignore_errors=True)

    def _working(self, step: int, kind: str) -> Path:
        return self.directory / f".step-{step}.{kind}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    def _publish(self, working: Path, step: int) -> None:
        target = self.path(step)
        # A rename does not replace a directory that has files.
        replaced = self._move_aside(target, step) if target.exists() else None
        os.rename(working, target)
        # The rename itself must survive a power failure before the old checkpoint is removed.
        _fsync(self.directory)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _move_aside(self, target: Path, step: int) -> Path:
        """Rename a checkpoint atomically before its removal, so that an interrupted removal leaves no `step-N`."""
        aside = self._working(step, "old")
        os.rename(target, aside)
        return aside

    def _full(self, step: int) -> str:
        free = shutil.disk_usage(self.directory).free if self.directory.is_dir() else 0
        before = self.list()
        last = f"the last checkpoint is {before[-1].path}" if before else "there is no earlier checkpoint"
        return (
            f"no space for the checkpoint of step {step} in {self.directory} ({free / 2**20:.0f} MiB free); {last};"
            " make room, lower max_ckpt_to_keep or set output_dir to another disk"
        )


async def _in_thread(function: Callable[[], T], stop: threading.Event) -> T:
    """Run `function` in a thread and return its result. Cancellation sets `stop` and waits for the thread to end."""
    working = asyncio.create_task(asyncio.to_thread(function))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({working})
        if working.exception() is not None:
            logger.debug("writing a checkpoint was stopped: %s", working.exception())
        raise


def _flush_directories(root: Path) -> None:
    for path in [root, *(p for p in root.rglob("*") if p.is_dir())]:
        _fsync(path)


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _abandoned(path: Path, host: str, pid: int) -> bool:
    if host == socket.gethostname():
        # In a restarted container, a process often has the same id as the killed one.
        return path.name not in _MINE if pid == os.getpid() else not psutil.pid_exists(pid)
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _FOREIGN_AGE_S
    return False


def _enumerate(problems: list[str], limit: int = 3) -> str:
    shown = "; ".join(problems[:limit])
    return shown if len(problems) <= limit else f"{shown}; and {len(problems) - limit} more"


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCheckpoint:
    """The checkpoint with the best value of a metric."""

    metric: str
    mode: str
    """`max` or `min`."""
    value: float
    step: int
    path: str

    @classmethod
    def read(cls, best: Mapping[str, Any] | None, beside: Path, origin: str = "") -> BestCheckpoint | None:
        """The best checkpoint that the state of the checkpoint `beside` names; None if it does not exist any more.

        A run may have been moved: the checkpoint is also searched beside that checkpoint. If `beside` is a download of
        the URL `origin`, it is deleted after the resume, and the best checkpoint is beside the URL.
        """
        try:
            saved = cls(**best) if best else None
            if saved is None or not math.isfinite(saved.value):
                return None
            if "://" in saved.path:
                return saved
            step = int(saved.step)
            places = [Path(saved.path)] if origin else [Path(saved.path), beside.parent / f"step-{step}"]
        except (TypeError, ValueError):
            return None
        place = next((folder for folder in places if folder.is_dir()), None)
        if place is None and origin:
            return replace(saved, path=f"{origin.rpartition('/')[0]}/step-{step}")
        if place is None:
            logger.warning(
                "the best checkpoint, %s with %s %g, does not exist",
                saved.path,
                saved.metric,
                saved.value,
            )
            return None
        return replace(saved, path=str(place))


class BestMetric:
    """Compares the metric of `save_best` between steps. Without `save_best`, no step is the best."""

    def __init__(self, config: BestCheckpointConfig | None, source: str) -> None:
        """`source`: the config that messages name."""
        self.metric = config.metric if config is not None else ""
        self.mode = (config is not None and config.mode) or ("min" if is_lower_better(self.metric) else "max")
        self._source = source
        self._seen = False
        self._offered: list[str] | None = None
        """Metrics of the first step that should have had the metric and lacked it."""

    def resumed(self, checkpoint: Checkpoint, saved: Mapping[str, Any] | None) -> BestCheckpoint | None:
        """The best checkpoint that the state of `checkpoint` names, `saved`. None if this is not its metric."""
        if not self.metric:
            return None
        best = BestCheckpoint.read(saved, checkpoint.path, checkpoint.origin)
        if best is not None and (best.metric, best.mode) != (self.metric, self.mode):
            logger.info("save_best: the best checkpoint by %s (%s) is not retained further", best.metric, best.mode)
            return None
        return best

    def improved(
        self, step: int, metrics: Mapping[str, float], best: BestCheckpoint | None, path: str
    ) -> BestCheckpoint | None:
        """The checkpoint of `step` at `path` if its value is better than that of `best`; otherwise None.

        Equal values do not improve, so the earlier step stays the best. NaN and infinities never do. Step 0, the
        initial model, is not compared: it is no checkpoint.
        """
        if not self.metric:
            return None
        if self.metric not in metrics:
            evaluated = any(name.startswith("val/") for name in metrics)
            if not self._seen and (evaluated if self.metric.startswith("val/") else step > 0):
                self._offered = sorted(metrics)
            return None
        self._seen = True
        value = float(metrics[self.metric])
        if not math.isfinite(value):
            logger.warning("save_best: %s is %s at step %d, which cannot be the best", self.metric, value, step)
            return None
        if step == 0:
            return None
        sign = 1 if self.mode == "max" else -1
        if best is not None and sign * value <= sign * best.value:
            return None
        return BestCheckpoint(metric=self.metric, mode=self.mode, value=value, step=step, path=path)

    def check(self) -> None:
        """Raise `ConfigError` if the first evaluation, or step, did not have the metric."""
        if self._offered is None:
            return
        prefix = "val/" if self.metric.startswith("val/") else ""
        names = [name for name in self._offered if name.startswith(prefix) and not name.startswith("time/")]
        close = closest(self.metric, names)
        hint = f"did you mean {close}?" if close else f"available: {', '.join(names) or 'none'}"
        message = f"found {self.metric}, which {'the evaluation' if prefix else 'the step'} did not measure"
        problem = ConfigProblem(where=self._source, key="save_best", message=message, hint=hint, code="ROLL-C013")
        raise ConfigError([problem])
