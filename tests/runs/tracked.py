"""A plugin with a tracker that records how it is opened and closed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from contextvars import ContextVar

from roll_core.spec.config import Config
from roll_core.spec.hooks import hookimpl
from roll_core.spec.pipeline import Tracker
from roll_core.spec.providers import TrackerProvider

ROLL_HOOK_API = 1


class Options(Config):
    breaks: str = ""
    api_key: str = ""
    notes: str = ""


class RecordingTracker(Tracker):
    def __init__(self, run_dir, run_name, options):
        self.file = run_dir / "trackers" / "recording.json"
        self.events = json.loads(self.file.read_text()) if self.file.is_file() else []
        self.file.parent.mkdir(exist_ok=True)
        self.breaks = options.get("breaks", "")
        self.open_stage = ContextVar("open_stage", default="")
        self.stages = []
        self._add(f"open {run_name}")

    def log(self, step, metrics):
        self._add(f"step {step}")
        if self.breaks == "log":
            raise ConnectionError("no route to host")

    @contextlib.contextmanager
    def stage(self, name):
        outer = self.open_stage.get()
        self.open_stage.set(path := f"{outer}/{name}")
        if self.breaks == "stage":
            raise ConnectionError("no route to host")
        try:
            yield
        finally:
            self.open_stage.set(outer)
            self.stages.append(path)
            (self.file.parent / "stages.json").write_text(json.dumps(self.stages))

    def log_config(self, config):
        (self.file.parent / "config.json").write_text(json.dumps(config))

    def run_finished(self, *, failed, files):
        self._add(f"{'failed' if failed else 'finished'} with {' '.join(each.name for each in files)}")

    def close(self):
        self._add("close")
        if self.breaks == "close":
            raise ConnectionError("no route to host")

    def _add(self, event):
        self.events.append(event)
        written = self.file.with_suffix(".new")
        written.write_text(json.dumps(self.events))
        written.replace(self.file)  # at once, for readers beside the run


@hookimpl
def roll_trackers() -> Iterator[TrackerProvider]:
    yield TrackerProvider(
        name="recording",
        target="roll_tracked:RecordingTracker",
        config="roll_tracked:Options",
        summary="Records its calls",
    )
