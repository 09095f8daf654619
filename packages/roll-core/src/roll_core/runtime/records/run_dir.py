"""Run directories, `<output_dir>/<exp_name>/<NNN>`, and the search for the checkpoint that a run resumes from.

output/grpo/001/  config.yaml  run.json  metrics.jsonl  samples.jsonl  images.jsonl  log.txt  report.html
                  checkpoints/step-10/  tokenizer/  export/  media/  tensorboard/
output/grpo/latest -> 001
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from roll_core.errors import CheckpointError, NoCheckpointError, RunDirectoryError
from roll_core.runtime.records.checkpoint_directory import Checkpoint, CheckpointDirectory

logger = logging.getLogger(__name__)

LATEST = "latest"
AUTO = "auto"


class _Entry:
    """Attribute of `RunDir`: the path of a file or directory with a fixed name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run's files."""

    path: Path

    @classmethod
    def create(cls, output_dir: str | Path, exp_name: str) -> RunDir:
        """Create the next numbered directory of the experiment and point `latest` at it.

        Concurrent processes get different directories. Raises `RunDirectoryError` if the directory cannot be created.
        """
        experiment = Path(os.path.expanduser(output_dir)).absolute() / exp_name
        try:
            experiment.mkdir(parents=True, exist_ok=True)
            number = max(_numbers(experiment), default=0)
            while True:
                number += 1
                path = experiment / f"{number:03d}"
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                break
        except OSError as error:
            raise RunDirectoryError(
                f"cannot make a run directory in {experiment}: {error.strerror or error};"
                " set output_dir to a place that can be written to"
            ) from error
        _point_latest_at(path)
        return cls(path)

    @property
    def experiment(self) -> Path:
        """The directory of the run's experiment."""
        return self.path.parent

    @property
    def name(self) -> str:
        """Experiment and number, such as `grpo/001`."""
        return f"{self.path.parent.name}/{self.path.name}"

    config = _Entry("config.yaml")
    """The resolved configuration."""
    record = _Entry("run.json")
    """Record of the run; see `RunRecord`."""
    metrics = _Entry("metrics.jsonl")
    """Metrics, one line per step."""
    samples = _Entry("samples.jsonl")
    """First samples of each step, as text."""
    scores = _Entry("scores.jsonl")
    """Scores of all held-out responses, for runs that have any."""
    images = _Entry("images.jsonl")
    """Images of samples, for runs that have any."""
    media = _Entry("media")
    """Directory of the images of samples, by digest."""
    log = _Entry("log.txt")
    """Log of the run."""
    report = _Entry("report.html")
    """HTML report, a single file."""
    checkpoints = _Entry("checkpoints")
    """Directory of the checkpoints `step-N/`."""
    profile = _Entry("profile")
    """Directory of timelines and memory snapshots."""
    tokenizer = _Entry("tokenizer")
    """Directory of the run's tokenizer."""
    export = _Entry("export")
    """Exported model in the format of transformers."""

    def uploads(self) -> list[Path]:
        """Existing files for trackers that store files: config, report and samples."""
        return [path for path in (self.config, self.report, self.samples) if path.is_file()]


def find_checkpoint(
    spec: bool | str, *, output_dir: str | Path, exp_name: str, current: RunDir | None = None
) -> Checkpoint | None:
    """The checkpoint that `resume_from_checkpoint` selects.

    * `false`: None.
    * `true`: the newest intact checkpoint of the experiment, over all runs except `current`. Raises
      `NoCheckpointError` if there is none.
    * `auto`: as `true`, but None if there is none, so that the same command starts and resumes a run.
    * A path: a checkpoint, or the newest intact checkpoint of a run directory, a directory of checkpoints, or an
      experiment. Raises `NoCheckpointError` if there is none.

    Raises `CheckpointError` if a checkpoint given by its own path is damaged, or if all found checkpoints are.
    """
    if spec is False:
        return None
    if spec is True or spec == AUTO:
        experiment = Path(os.path.expanduser(output_dir)).absolute() / exp_name
        checkpoint = _newest_of_experiment(experiment, current)
        if checkpoint is None and spec is True:
            raise NoCheckpointError(
                f"resume_from_checkpoint is true, but no run in {experiment} has a checkpoint: give the path of a run"
                " or a checkpoint, or set it to auto to start from the beginning"
            )
        return checkpoint
    place = Path(os.path.expanduser(spec)).absolute()
    if not place.is_dir():
        raise NoCheckpointError(f"resume_from_checkpoint: {place} does not exist or is not a directory")
    if CheckpointDirectory.is_checkpoint(place):
        return CheckpointDirectory.open(place)
    for directory in (place / "checkpoints", place):
        newest = CheckpointDirectory(directory).latest_good()
        if newest is not None:
            return newest
    checkpoint = _newest_of_experiment(place, current)
    if checkpoint is None:
        raise NoCheckpointError(
            f"resume_from_checkpoint: {place} has no checkpoint: give a checkpoint (checkpoints/step-N), or a run that"
            " has one"
        )
    return checkpoint


def sweep_checkpoints(experiment: Path, checkpoint: Checkpoint | None) -> None:
    """Remove incomplete checkpoints of exited processes from all runs of an experiment and the run of `checkpoint`.

    Checkpoints that a live process is writing stay.
    """
    elsewhere = {checkpoint.path.parent} if checkpoint is not None else set()
    for directory in elsewhere | {run.checkpoints for run in experiment_runs(experiment)}:
        CheckpointDirectory(directory).sweep()


def experiment_runs(experiment: Path) -> list[RunDir]:
    """The runs of an experiment, oldest first."""
    return [RunDir(experiment / f"{number:03d}") for number in sorted(_numbers(experiment))]


def _newest_of_experiment(experiment: Path, current: RunDir | None) -> Checkpoint | None:
    all_damaged: CheckpointError | None = None
    for run in reversed(experiment_runs(experiment)):
        if run == current:
            continue
        try:
            checkpoint = CheckpointDirectory(run.checkpoints).latest_good()
        except CheckpointError as error:  # an older run may still have a good one
            all_damaged = all_damaged or error
            continue
        if checkpoint is not None:
            return checkpoint
    if all_damaged is not None:
        raise all_damaged
    return None


def _numbers(experiment: Path) -> list[int]:
    if not experiment.is_dir():
        return []
    return [int(p.name) for p in experiment.iterdir() if p.name.isdecimal() and p.name.isascii() and p.is_dir()]


def _point_latest_at(run: Path) -> None:
    """Point `latest` at a run. The link is relative, so that the experiment can be moved.

    Errors are only logged: the link is a convenience, and some file systems do not support links.
    """
    link = run.parent / LATEST
    temporary = run.parent / f".{LATEST}-{secrets.token_hex(4)}"
    try:
        temporary.symlink_to(run.name, target_is_directory=True)
        os.replace(temporary, link)
    except OSError as error:
        logger.debug("no link %s: %s", link, error)
        temporary.unlink(missing_ok=True)
