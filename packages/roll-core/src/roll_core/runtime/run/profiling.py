"""Profiles the steps that `profile` selects: one timeline per rank of the selected roles, in the run directory."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from roll_core.errors import UnsupportedError
from roll_core.runtime.records.run_files import writing

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.runtime.run.active_run import ActiveRun
    from roll_core.spec.config import ProfileConfig

log = logging.getLogger(__name__)


class StepProfiler:
    """Starts and stops the workers' profilers between steps."""

    def __init__(self, config: ProfileConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._first: int | None = None

    def check(self, run: ActiveRun, steps: range) -> None:
        """Raise `UnsupportedError` if profiled roles share a process, in which torch has one profiler.

        Warn if none of the run's `steps` is profiled.
        """
        first, last = self._config.steps
        if steps and (first >= steps.stop or last < steps.start):
            log.warning("profile: this run does steps %d to %d, none of %d to %d", steps[0], steps[-1], first, last)
        processes: dict[tuple[str, int], str] = {}
        for name in self._config.roles:
            for member in run.train_role(name).group.members:
                other = processes.setdefault((member.host, member.pid), name)
                if other != name:
                    raise UnsupportedError(
                        f"profile.roles: {other} and {name} share a process, which has one profiler: name one of them"
                    )

    async def before_step(self, run: ActiveRun) -> None:
        """Start profiling if the next step is the first selected one, or the first after a resume."""
        first, last = self._config.steps
        if self._first is None and first <= run.step + 1 <= last:
            self._first = run.step + 1
            for name in self._config.roles:
                await run.train_role(name).start_profile(memory=self._config.memory)

    async def after_step(self, run: ActiveRun, *, last: bool) -> None:
        """Write the timelines after the last selected step, or after the last step of the run."""
        if self._first is None or not (last or run.step == self._config.steps[1]):
            return
        if run.step > self._config.steps[1]:
            return
        with run.stage("profile"), writing(self._folder / "timelines"):
            self._folder.mkdir(exist_ok=True)
            for name in self._config.roles:
                file = self._folder / f"{name}-steps-{self._first}-{run.step}"
                await run.train_role(name).stop_profile(file)
        log.info("profile of steps %d to %d: %s", self._first, run.step, self._folder)
