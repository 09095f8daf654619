"""Base of trackers with a run elsewhere: its id is a file of the run directory, so that a resumed run continues it.

first run    open(None) ─► id ─► trackers/<name>.json
resumed run  trackers/ is copied from the run that it continues ─► open(id)
"""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from roll_core.spec.pipeline import Tracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class RemoteTracker(Tracker):
    """A tracker whose run has an id. Subclasses implement `open`, `log` and `end`."""

    name: ClassVar[str]

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        """Open the run, or continue the one whose id the run directory has."""
        self.run_dir = run_dir
        self._failed = True
        self._files: Sequence[Path] = ()
        file = run_dir / "trackers" / f"{self.name}.json"
        saved = json.loads(file.read_text(encoding="utf-8"))["id"] if file.is_file() else None
        opened_id = self.open(run_name, dict(options), saved)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"id": opened_id}), encoding="utf-8")

    @abstractmethod
    def open(self, run_name: str, options: dict[str, Any], run_id: str | None) -> str:
        """Open the run with the id `run_id`, or a new one for None, and return its id."""

    @abstractmethod
    def end(self, *, failed: bool, files: Sequence[Path]) -> None:
        """Upload the files of the run directory, if the library stores files, and end the run."""

    def run_finished(self, *, failed: bool, files: Sequence[Path]) -> None:
        """Keep both for `close`."""
        self._failed, self._files = failed, files

    def close(self) -> None:
        """End the run. It failed unless `run_finished` was called with `failed=False`."""
        self.end(failed=self._failed, files=self._files)
