"""A plugin whose engine hangs once, in the middle of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import InferProvider
from roll_infer_hf.config import HFInferConfig
from roll_infer_hf.engine import HFInferStrategy
from roll_infer_hf.plugin import CAPABILITIES

ROLL_HOOK_API = 1


class HangingConfig(HFInferConfig):
    """As the embedded engine's."""

    how: Literal["engine", "process", "idle"] = "engine"
    """What hangs: the thread that computes, or all of its process, while it samples or (`idle`) after a step."""
    rank: int = 0
    mark: str = ""
    """A file that is there once it has hung."""


class HangingEngine(HFInferStrategy):
    def _work(self, commands):
        core = self._ready_core
        if self.config.how != "idle" and self._mesh.rank == self.config.rank and core.version >= 2 and core.busy:
            with contextlib.suppress(FileExistsError):
                Path(self.config.mark).touch(exist_ok=False)
                if self.config.how == "process":
                    os.kill(os.getpid(), signal.SIGSTOP)
                while Path(self.config.mark).exists():
                    time.sleep(0.05)
        return super()._work(commands)

    def metrics(self):
        """Metrics are read once a step, after the requests."""
        if self.config.how == "idle" and self._mesh.rank == self.config.rank and self._ready_core.version >= 2:
            with contextlib.suppress(FileExistsError):
                Path(self.config.mark).touch(exist_ok=False)
                asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGSTOP)
        return super().metrics()


@hookimpl
def roll_infer_strategies() -> Iterator[InferProvider]:
    yield InferProvider(
        name="hanging_engine",
        target="roll_hanging:HangingEngine",
        config="roll_hanging:HangingConfig",
        summary="Hangs once",
        capabilities=CAPABILITIES,
    )
