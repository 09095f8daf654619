"""Writes metrics in TensorBoard's record format, without torch and TensorFlow.

TensorBoard's `EventFileWriter` is not used: it writes on a thread. If the disk is full, this thread prints a traceback
and `close` does not report the error.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import yaml
from tensorboard.compat import tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from roll_core.spec.pipeline import Tracker
from roll_trackers.config import TensorBoardOptions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


FLUSH_S = 30.0
"""Seconds after which events are written to the disk."""
_NUMBERS = itertools.count()
"""Serial numbers, which make the names of this process's event files unique."""


class TensorBoardTracker(Tracker):
    """Writes event files into `tensorboard/` of the run directory. Options: `TensorBoardOptions`."""

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        valid = TensorBoardOptions.model_validate(dict(options))
        log_dir = valid.log_dir or run_dir / "tensorboard"
        self._flushed = 0.0
        tf.io.gfile.makedirs(str(log_dir))
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._writer = RecordWriter(tf.io.gfile.GFile(os.path.join(log_dir, name), "wb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one event with a scalar for each metric."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the config as YAML, which TensorBoard shows under the Text tab."""
        text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # a Markdown code block
        self._write(Event(wall_time=time.time(), step=0, summary=text_pb("config", indented)))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.flush()
        self._writer.close()

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()
