"""The interface of metrics trackers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Tracker(ABC):
    """Receives the metrics of a run, in the driver. Several trackers may be active at once."""

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        """Open the tracker; `options` are `tracker_kwargs.<name>`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the resolved configuration, with secrets removed."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close. Called exactly once, also after an error."""
