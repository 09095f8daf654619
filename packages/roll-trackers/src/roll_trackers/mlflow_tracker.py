"""Tracker `mlflow`."""

from __future__ import annotations

import json
import os
import posixpath
import re
import time
from typing import TYPE_CHECKING, Any

from roll_trackers.config import MlflowOptions
from roll_trackers.remote_run import RemoteTracker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_MOST_PARAMETERS = 100
"""Parameters per request that a server of MLflow accepts."""
_MOST_METRICS = 1000
_MOST_CHARS = 6000
_MOST_CHARS_OF_A_NAME = 250


class MlflowTracker(RemoteTracker):
    """A run of MLflow, by its client: no global run of the process is touched."""

    name = "mlflow"

    def open(self, run_name: str, options: dict[str, Any], run_id: str | None) -> str:
        """Open the run in the experiment `project`."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        valid = MlflowOptions.model_validate(options)
        runs_dir = self.run_dir.parent.parent
        remote = valid.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(remote or f"sqlite:///{runs_dir / 'mlflow.db'}")
        if run_id is not None:
            self._client.set_terminated(run_id, "RUNNING")
            self._id = run_id
            return run_id
        experiment = self._client.get_experiment_by_name(valid.project)
        if experiment is None:
            try:
                # A store without a server would put artifacts into the working directory.
                artifacts = None if remote else (runs_dir / "mlartifacts").absolute().as_uri()
                experiment_id = self._client.create_experiment(valid.project, artifact_location=artifacts)
            except MlflowException:  # another run has created it since
                experiment = self._client.get_experiment_by_name(valid.project)
                if experiment is None:
                    raise
                experiment_id = experiment.experiment_id
        else:
            experiment_id = experiment.experiment_id
        tags = valid.tags | ({"mlflow.note.content": valid.notes} if valid.notes else {})
        self._id = str(self._client.create_run(experiment_id, tags=tags, run_name=valid.name or run_name).info.run_id)
        return self._id

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the config as parameters with dotted names. A resumed run keeps the values of the first."""
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params
        flat = ((_valid(key), text) for key, text in _flat(config))
        params = [Param(key, text[:_MOST_CHARS]) for key, text in flat if key not in known]
        for begin in range(0, len(params), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=params[begin : begin + _MOST_PARAMETERS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(_valid(name), float(value), now, step) for name, value in metrics.items()]
        for begin in range(0, len(rows), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=rows[begin : begin + _MOST_METRICS])

    def end(self, *, failed: bool, files: Sequence[Path]) -> None:
        """Upload files and end the run as `FINISHED` or `FAILED`."""
        try:
            for path in files:
                self._client.log_artifact(self._id, str(path))
        finally:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _valid(name: str) -> str:
    """Name that MLflow accepts: it rejects some characters, which tags of a data set may have, and names of paths such
    as `a//b`."""
    return posixpath.normpath(re.sub(r"[^\w/. :-]", "_", name))[:_MOST_CHARS_OF_A_NAME]


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)
