"""The contract of metrics trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Tracker(ABC):
    """Receives a run's metrics in the driver. Several may be active at once."""

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        """Open the tracker; `options` are `tracker_kwargs.<name>`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the resolved configuration, secrets already removed."""

    @abstractmethod
    def close(self) -> None:
        """Write what is left. Called exactly once, also after an error."""
