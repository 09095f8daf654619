"""Tracker `swanlab`."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Any

from roll_trackers.config import SwanlabOptions
from roll_trackers.remote_run import RemoteTracker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


class SwanlabTracker(RemoteTracker):
    """A run of SwanLab. Its copy of the terminal is off: the run directory has `log.txt`, without secrets."""

    name = "swanlab"

    def open(self, run_name: str, options: dict[str, Any], run_id: str | None) -> str:
        """Open the run; SwanLab's own files are in the run directory."""
        import swanlab

        valid = SwanlabOptions.model_validate(options)
        credentials = {"api_key": valid.api_key} if valid.api_key else {}
        settings = swanlab.Settings(
            terminal={"proxy_type": "none"},
            probe={"runtime": False},  # it has the command line, of which a `key=value` may be a secret
            interactive=False,
            **credentials,
        )
        with _keeping_sigint():
            self._run = swanlab.init(
                project=valid.project,
                workspace=valid.workspace,
                name=valid.name or run_name,
                group=valid.group,
                tags=valid.tags,
                description=valid.notes,
                mode=valid.mode,
                log_dir=str(self.run_dir / "swanlab"),
                settings=settings,
                id=run_id,
                resume="allow" if run_id else None,
                reinit=True,
            )
        return str(self._run.id)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the config as that of the run."""
        self._run.config.update(dict(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step."""
        self._run.log(dict(metrics), step=step)

    def end(self, *, failed: bool, files: Sequence[Path]) -> None:
        """Save the files and finish, as crashed if the run failed."""
        for path in files:
            self._run.save(str(path), base_path=str(self.run_dir), policy="end")
        with _keeping_sigint():
            self._run.finish(state="crashed" if failed else "success", error="the run failed" if failed else None)


@contextlib.contextmanager
def _keeping_sigint() -> Iterator[None]:
    """Restore the handler of Ctrl-C, which SwanLab replaces at its start and end: it belongs to the run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
