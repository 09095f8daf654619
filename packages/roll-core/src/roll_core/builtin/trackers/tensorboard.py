"""Metrics for TensorBoard, by its own event writer: no torch, no TensorFlow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from roll_core.spec.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class TensorBoardTracker(Tracker):
    """Writes event files into `tensorboard/` of the run directory.

    Options: `log_dir`, another place for them; `flush_secs` (30), the longest that a step stays in memory.
    """

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        unknown = set(options) - {"log_dir", "flush_secs"}
        if unknown:
            raise ValueError(
                f"tracker_kwargs.tensorboard takes log_dir and flush_secs, not {', '.join(sorted(unknown))}"
            )
        log_dir = options.get("log_dir") or run_dir / "tensorboard"
        self._writer = EventFileWriter(str(log_dir), flush_secs=int(options.get("flush_secs", 30)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with a scalar for each metric."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step, Summary(value=values))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """The config as YAML, under the Text tab."""
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # a code block, as Markdown has it
        self._write(0, text_pb("config", indented))

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()

    def _write(self, step: int, summary: Summary) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
