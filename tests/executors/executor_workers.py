"""Workers for the tests of executors. Imported by name in the workers' own processes, like a user's module."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

from roll_core.errors import CorruptTensorError, EngineDiedError, GuardTrippedError
from roll_core.runtime.cluster.executors.base import Peers, Place


class CannotTravel(Exception):
    """An exception that does not survive pickling: its constructor wants more than it keeps."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Recorder:
    """Answers, fails and waits on demand."""

    def __init__(self, place: Place, peers: Peers, greeting: str = "hello", notes: str = "") -> None:
        self.place = place
        self.peers = peers
        self.greeting = greeting
        self.notes = notes
        self.order: list[int] = []
        self.arrived = 0
        self.everyone_is_here = asyncio.Event()
        self.was_cancelled = asyncio.Event()
        self.is_waiting = asyncio.Event()
        self.held, self.freed = threading.Event(), threading.Event()

    def greet(self, name: str) -> str:
        return f"{self.greeting} {name} from {self.place.rank}"

    def where(self) -> tuple[Place, Peers]:
        return self.place, self.peers

    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def node_and_devices(self) -> tuple[str, str, str]:
        import ray

        node: str = ray.get_runtime_context().get_node_id()
        return node, os.environ["CUDA_VISIBLE_DEVICES"], self.place.device

    def process(self) -> int:
        return os.getpid()

    def echo(self, value: Any) -> Any:
        return value

    def note(self, number: int) -> None:
        self.order.append(number)

    def noted(self) -> list[int]:
        return self.order

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def hold(self, seconds: float) -> bool:
        """Keeps its thread until another call lets go: whether one did within so many seconds."""
        self.held.set()
        return self.freed.wait(seconds)

    async def let_go(self) -> None:
        while not self.held.is_set():
            await asyncio.sleep(0.01)
        self.freed.set()

    async def meet(self, how_many: int) -> int:
        """Returns when so many calls are inside at once."""
        self.arrived += 1
        if self.arrived == how_many:
            self.everyone_is_here.set()
        await self.everyone_is_here.wait()
        return self.arrived

    async def wait_forever(self) -> None:
        self.is_waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise

    async def until_waiting(self) -> bool:
        return await self.is_waiting.wait()

    async def until_cancelled(self) -> bool:
        return await self.was_cancelled.wait()

    def wait_on_rank(self, rank: int, seconds: float) -> str:
        if self.place.rank == rank:
            time.sleep(seconds)
        return "done"

    def corrupt(self) -> None:
        raise CorruptTensorError("layer.0.weight: digest differs")

    def trip(self) -> None:
        raise GuardTrippedError("weights-unchanged", "nothing moved")

    def divide(self) -> float:
        return 1 / 0

    def lose_engine(self) -> None:
        raise EngineDiedError("the engine is gone")

    def exit(self) -> None:
        sys.exit(3)

    async def exit_async(self) -> None:
        sys.exit(3)

    async def fail_async(self) -> None:
        raise KeyError("lost")

    def cannot_travel(self) -> None:
        raise CannotTravel("this", "that")

    def unsendable(self) -> object:
        return threading.Lock()

    def crash(self) -> None:
        ctypes.string_at(0)

    def close(self) -> None:
        if self.notes:
            with Path(self.notes).open("a") as file:
                file.write(f"closed {self.place.rank}\n")


ENGINE = """
import sys, time
from multiprocessing import resource_tracker, shared_memory

segment = shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print("ready", flush=True)
time.sleep(600)
"""
"""A process whose shared memory Python does not unlink, as SGLang's."""


class Littering:
    """Leaves shared memory and a child process behind, as an engine does that is killed."""

    def __init__(self, place: Place, peers: Peers) -> None:
        mark = os.environ["ROLL_INSTANCE"]
        self.segment = shared_memory.SharedMemory(create=True, size=4096)
        self.ours = shared_memory.SharedMemory(create=True, size=4096, name=f"roll-{mark}-{place.rank}")
        self.engines = f"sglang_loads_{mark}-{place.rank}"
        self.child = subprocess.Popen(
            [sys.executable, "-c", ENGINE, self.engines], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == b"ready\n"

    def litter(self) -> tuple[int, int, str, str, str]:
        return os.getpid(), self.child.pid, self.segment.name, self.ours.name, self.engines

    def work(self) -> None:
        time.sleep(600)


class Collective:
    """Two ranks that meet in an all-reduce over gloo."""

    def __init__(self, place: Place, peers: Peers) -> None:
        import torch.distributed as dist

        self.place = place
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{peers.master_addr}:{peers.master_port}",
            rank=place.rank,
            world_size=place.world_size,
        )

    def sum_of_ranks(self) -> int:
        import torch
        import torch.distributed as dist

        total = torch.tensor(self.place.rank + 1)
        dist.all_reduce(total)
        return int(total)

    def die_before_reduce(self, rank: int) -> int:
        if self.place.rank == rank:
            os._exit(7)
        return self.sum_of_ranks()
