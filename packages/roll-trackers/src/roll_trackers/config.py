"""Options of the trackers: `tracker_kwargs.<name>`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll_core.spec.config import Config


class RunOptions(Config):
    """Options that all remote trackers have."""

    project: str = "roll"
    """Project or experiment of the tracker that contains the run."""
    name: str | None = None
    """Name of the run. Default: `<exp_name>/<number>`."""


class WandbOptions(RunOptions):
    """Options of the tracker `wandb`."""

    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""
    notes: str | None = None
    """Description of the run."""
    entity: str | None = None
    """User or team. Default: that of the login."""
    group: str | None = None
    """Group that the service lists the run in."""
    api_key: str | None = None
    """Key of the account, preferably `${oc.env:NAME}`. Default: that of the login or of `WANDB_API_KEY`."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes files for `wandb sync`. Default: `WANDB_MODE`, else online."""


class MlflowOptions(RunOptions):
    """Options of the tracker `mlflow`."""

    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run."""
    notes: str | None = None
    """Description of the run."""
    tracking_uri: str | None = None
    """Server or store. Default: `MLFLOW_TRACKING_URI`, else `mlflow.db` (SQLite) in `output_dir`."""


class PrometheusOptions(Config):
    """Options of the tracker `prometheus`."""

    port: int = Field(default=9464, ge=0, lt=65536)
    """Port of the endpoint. 0 chooses a free one, which `trackers/prometheus.txt` names."""
    host: str = "127.0.0.1"
    """Address to listen on. The endpoint has no authentication: other hosts can read it with `0.0.0.0`."""


class OpenTelemetryOptions(Config):
    """Options of the tracker `opentelemetry`."""

    exporter: Literal["otlp", "file"] = "otlp"
    """`otlp` sends spans to a collector by HTTP; `file` writes `spans.jsonl` in the run directory."""
    endpoint: str | None = None
    """URL of the collector's traces. Default: `OTEL_EXPORTER_OTLP_ENDPOINT`, else `http://localhost:4318/v1/traces`."""
    service_name: str = "roll"
    """The attribute `service.name` of all spans."""


class SwanlabOptions(RunOptions):
    """Options of the tracker `swanlab`."""

    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""
    notes: str | None = None
    """Description of the run."""
    workspace: str | None = None
    """User or team. Default: that of the login."""
    group: str | None = None
    """Group that the service lists the run in."""
    api_key: str | None = None
    """Key of the account, preferably `${oc.env:NAME}`. Default: that of the login or of `SWANLAB_API_KEY`."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes files for `swanlab sync`. Default: `SWANLAB_MODE`, else online."""


class TrackioOptions(RunOptions):
    """Options of the tracker `trackio`."""

    space_id: str | None = None
    """Space of the hub that shows the run. Default: only local."""


class TensorBoardOptions(Config):
    """Options of the TensorBoard tracker (`tracker_kwargs.tensorboard`)."""

    log_dir: str | None = None
    """Directory of the event files. Default: `tensorboard/` of the run directory."""
