"""Hook that provides the trackers. Imports no tracker's library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import TrackerProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_trackers() -> Iterator[TrackerProvider]:
    """One tracker for each library, and CSV."""
    for name, tracker, options, needs, summary in (
        (
            "tensorboard",
            "TensorBoardTracker",
            "TensorBoardOptions",
            "tensorboard>=2.16",
            "Event files for TensorBoard, in the run directory",
        ),
        ("wandb", "WandbTracker", "WandbOptions", "wandb>=0.19", "Weights & Biases, online or offline"),
        ("mlflow", "MlflowTracker", "MlflowOptions", "mlflow>=2.14", "MLflow: a server, or SQLite in output_dir"),
        ("swanlab", "SwanlabTracker", "SwanlabOptions", "swanlab>=0.10", "SwanLab, online or offline"),
        ("trackio", "TrackioTracker", "TrackioOptions", "trackio>=0.43", "Trackio: local, or a Space of the hub"),
        (
            "prometheus",
            "PrometheusTracker",
            "PrometheusOptions",
            "prometheus-client>=0.20",
            "HTTP endpoint with the last metrics",
        ),
    ):
        yield TrackerProvider(
            name=name,
            target=f"roll_trackers.{name}_tracker:{tracker}",
            config=f"roll_trackers.config:{options}",
            needs=(needs,),
            summary=summary,
        )
    yield TrackerProvider(
        name="opentelemetry",
        target="roll_trackers.opentelemetry_tracker:OpenTelemetryTracker",
        config="roll_trackers.config:OpenTelemetryOptions",
        needs=("opentelemetry-sdk>=1.27", "opentelemetry-exporter-otlp-proto-http>=1.27"),
        summary="spans of run, steps, stages and workers, to a collector (OTLP) or a file",
    )
    yield TrackerProvider(
        name="csv",
        target="roll_trackers.csv_tracker:CsvTracker",
        summary="metrics.csv in the run directory, one row per step",
    )
