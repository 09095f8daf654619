"""Tracker `prometheus`: an HTTP endpoint with the run's last metrics, for Prometheus to scrape."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from roll_core.errors import TrackerError
from roll_core.spec.pipeline import Tracker
from roll_trackers.config import PrometheusOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


class PrometheusTracker(Tracker):
    """Serves `http://<host>:<port>/metrics` while the run is in progress.

    `roll_metric{run="grpo/001", name="score/mean"}` is the last value of a metric, and `roll_step{run="grpo/001"}` the
    last step. A metric that later steps lack keeps its last value.
    """

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        """Start the server. Raises `TrackerError` if the port is in use."""
        from prometheus_client import CollectorRegistry, start_http_server

        valid = PrometheusOptions(**options)
        self._run, self._step = run_name, 0
        self._values: dict[str, float] = {}
        self._lock = threading.Lock()  # requests are served by other threads
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(valid.port, valid.host, registry)
        except OSError as error:
            raise TrackerError(
                f"prometheus: {valid.host}:{valid.port} cannot be served: {error.strerror or error}; set"
                " tracker_kwargs.prometheus.port to a free port, or 0 for any"
            ) from error
        self.port: int = self._server.server_port
        (run_dir / "trackers").mkdir(exist_ok=True)
        (run_dir / "trackers" / "prometheus.txt").write_text(
            f"http://{valid.host}:{self.port}/metrics\n", encoding="utf-8"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the values of `metrics`."""
        with self._lock:
            self._step = step
            self._values.update(metrics)

    def close(self) -> None:
        """Stop the server. Prometheus marks the series as stale."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Metric families of one scrape, as prometheus_client calls it."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            step, values = self._step, dict(self._values)
        steps = GaugeMetricFamily("roll_step", "Last recorded step", labels=["run"])
        steps.add_metric([self._run], step)
        yield steps
        family = GaugeMetricFamily("roll_metric", "Last value of a metric of the run", labels=["run", "name"])
        for name, value in sorted(values.items()):
            family.add_metric([self._run, name], value)
        yield family
