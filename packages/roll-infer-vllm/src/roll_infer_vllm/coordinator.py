"""Main function of vLLM's process that coordinates data-parallel ranks: it exits with the worker.

vLLM loads no plugins in this process, so `registration.register` does not run there. The process imports this module at
its start.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import coordinator

from roll_infer_vllm.watchdog import exit_with_parent


class WatchedCoordinator(coordinator.DPCoordinatorProc):  # type: ignore[misc]  # vLLM is untyped to mypy
    """vLLM's coordinator, in a process that exits with the worker."""

    @staticmethod
    def run_coordinator(*args: Any, **kwargs: Any) -> None:
        """Coordinate until the process is terminated."""
        exit_with_parent()
        WatchedCoordinator.__base__.run_coordinator(*args, **kwargs)


def watch_coordinator() -> None:
    """Make vLLM start `WatchedCoordinator`. Idempotent."""
    coordinator.DPCoordinatorProc = WatchedCoordinator
