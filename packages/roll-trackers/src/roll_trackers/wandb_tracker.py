"""Tracker `wandb`."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from roll_trackers.config import WandbOptions
from roll_trackers.remote_run import RemoteTracker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


class WandbTracker(RemoteTracker):
    """A run of Weights & Biases. `step` is a metric and the x axis, because a resumed run repeats steps.

    wandb's copy of the terminal is off unless `WANDB_CONSOLE` is set: the run directory has `log.txt`, without secrets.
    """

    name = "wandb"

    def open(self, run_name: str, options: dict[str, Any], run_id: str | None) -> str:
        """Open the run; wandb's own files are in the run directory."""
        import wandb

        valid = WandbOptions.model_validate(options)
        console = {} if "WANDB_CONSOLE" in os.environ else {"console": "off"}
        with _without_arguments():
            self._run = wandb.init(
                project=valid.project,
                entity=valid.entity,
                name=valid.name or run_name,
                group=valid.group,
                tags=valid.tags,
                notes=valid.notes,
                mode=valid.mode,
                settings=wandb.Settings(api_key=valid.api_key, **console),
                dir=str(self.run_dir),
                id=run_id,
                resume="allow" if run_id else None,
            )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the config as that of the run."""
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._run.log({**metrics, "step": step})

    def end(self, *, failed: bool, files: Sequence[Path]) -> None:
        """Upload files and finish, with exit code 1 if the run failed."""
        for path in files:
            self._run.save(str(path), base_path=str(self.run_dir), policy="now")
        self._run.finish(exit_code=int(failed))


@contextlib.contextmanager
def _without_arguments() -> Iterator[None]:
    """Hide the command line, which wandb uploads as it is: a `key=value` of it may be a secret."""
    before = sys.argv
    sys.argv = before[:1]
    try:
        yield
    finally:
        sys.argv = before
