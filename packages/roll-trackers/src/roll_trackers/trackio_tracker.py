"""Tracker `trackio`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_trackers.config import TrackioOptions
from roll_trackers.remote_run import RemoteTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class TrackioTracker(RemoteTracker):
    """A run of Trackio. Its name is its id."""

    name = "trackio"

    def open(self, run_name: str, options: dict[str, Any], run_id: str | None) -> str:
        """Open the run, or continue the one of that name."""
        import trackio

        valid = TrackioOptions.model_validate(options)
        name = run_id or (valid.name or run_name).replace("/", "-")
        self._run = trackio.init(project=valid.project, name=name, space_id=valid.space_id, resume="allow", embed=False)
        return name

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the config as that of the run."""
        self._run.config.update(dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._run.log(dict(metrics), step=step)

    def end(self, *, failed: bool, files: Sequence[Path]) -> None:
        """Log the files as an artifact of the run, and write what is queued."""
        import trackio

        if files:
            artifact = trackio.Artifact(f"{self._run.name}-files", type="run")
            for path in files:
                artifact.add_file(str(path), name=path.name)
            self._run.log_artifact(artifact)
        self._run.finish()
