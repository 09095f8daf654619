"""A plugin with a tracker that records how it is opened and closed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.pipeline import Tracker
from roll_core.spec.providers import TrackerProvider

ROLL_HOOK_API = 1


class RecordingTracker(Tracker):
    def __init__(self, run_dir, run_name, options):
        self.file = run_dir / "trackers" / "recording.json"
        self.events = json.loads(self.file.read_text()) if self.file.is_file() else []
        self.file.parent.mkdir(exist_ok=True)
        self._add(f"open {run_name}")

    def log(self, step, metrics):
        self._add(f"step {step}")

    def close(self):
        self._add(f"close {type(sys.exception()).__name__}")

    def _add(self, event):
        self.events.append(event)
        self.file.write_text(json.dumps(self.events))


@hookimpl
def roll_trackers() -> Iterator[TrackerProvider]:
    yield TrackerProvider(name="recording", target="roll_tracked:RecordingTracker", summary="Records its calls")
