"""The worker with which `ExecutorConformance` tests executors. Workers' processes import it, so it needs no torch."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import CorruptTensorError

if TYPE_CHECKING:
    from roll_core.runtime.cluster.executors.base import Peers, Place


class ProbeWorker:
    """Reports where it runs, and returns, fails and waits on demand."""

    def __init__(self, *, place: Place, peers: Peers, greeting: str, folder: str, fails: bool = False) -> None:
        """`folder` gets a file per worker that was constructed, `<rank>.pid`, and one per closed worker."""
        self.place, self.greeting, self.folder = place, greeting, Path(folder)
        self.thread = threading.get_ident()
        self.numbers: list[int] = []
        self.all_arrived, self.cancelled, self.freed = asyncio.Event(), asyncio.Event(), threading.Event()
        self.arrived = 0
        if fails:
            raise ValueError("this worker cannot be constructed")
        (self.folder / f"{place.rank}.pid").write_text(str(os.getpid()), encoding="utf-8")

    def facts(self, variable: str) -> tuple[int, int, int, str, str | None]:
        """Rank, world size, process id, greeting and the value of an environment variable."""
        return self.place.rank, self.place.world_size, os.getpid(), self.greeting, os.environ.get(variable)

    def echo(self, value: Any) -> Any:
        """Return the argument."""
        return value

    def note(self, number: int) -> bool:
        """Append to `numbers`. True if called on the thread of the constructor."""
        self.numbers.append(number)
        return threading.get_ident() == self.thread

    def noted(self) -> list[int]:
        """The noted numbers so far."""
        return self.numbers

    async def meet(self, count: int) -> int:
        """Return once `count` calls have arrived."""
        self.arrived += 1
        if self.arrived == count:
            self.all_arrived.set()
        await self.all_arrived.wait()
        return self.arrived

    def hold(self, seconds: float) -> bool:
        """Occupy the thread until `free` is called. False after `seconds`."""
        return self.freed.wait(seconds)

    async def free(self) -> None:
        """End `hold`."""
        self.freed.set()

    async def wait_forever(self) -> None:
        """Never return."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def until_cancelled(self) -> bool:
        """Return once a call of `wait_forever` was cancelled."""
        return await self.cancelled.wait()

    def corrupt(self) -> None:
        """Raise an error of ROLL."""
        raise CorruptTensorError("layer.0.weight: digest differs")

    def divide(self) -> float:
        """Raise another error."""
        return 1 / 0

    def fail(self, rank: int) -> None:
        """Raise the cause on `rank`, and earlier on other ranks what looks like its consequence."""
        if self.place.rank != rank:
            raise ConnectionResetError("Connection reset by peer")
        time.sleep(0.2)
        raise ValueError("the cause")

    def exit(self) -> None:
        """End the process without a word."""
        os._exit(7)

    def close(self) -> None:
        """Leave a file, or raise if there is one."""
        (self.folder / f"{self.place.rank}.closed").touch(exist_ok=False)
