import asyncio
import sys
from pathlib import Path

import pytest

# Worker processes import this module by name, which the import mode of the suite does not make possible by itself.
sys.path.insert(0, str(Path(__file__).parent))

from roll_testing.new import TEMPLATES

sys.path.append(str(TEMPLATES / "transport"))

from sync_workers import InferWorker, ProcessGroup, TrainWorker, record_of

from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.runtime.weights.publisher import WeightPublisher
from roll_core.spec.transport import Route


class Duo:
    """A train group, an infer group and what brings weights from one to the other."""

    def __init__(self, transport, train, infer, close, directory=""):
        self.transport, self.train, self.infer, self._close = transport, train, infer, close
        self.directory = str(directory)
        self.deadline(20)

    def deadline(self, seconds):
        sources = (0,) * self.infer.world_size if self.transport == "cuda_ipc" else ()
        self.publisher = WeightPublisher(
            self.train,
            self.infer,
            SyncPlan(
                transport=record_of(self.transport),
                route=Route(options={"directory": self.directory}, sources=sources),
                bucket_bytes=64 << 10,
                deadline_s=seconds,
            ),
        )

    async def fault(self, fault, *ranks):
        for rank in ranks or range(self.infer.world_size):
            await WorkerCall(self.infer, "set_fault").at(rank, fault)

    async def step(self, learning_rate=0.125):
        await WorkerCall(self.train, "step").all(learning_rate)

    async def close(self):
        await self._close()


async def local_duo(receivers):
    from roll_core.builtin.cpu import CpuPlatform
    from roll_core.runtime.cluster.executors.base import GroupSpec, Place
    from roll_core.runtime.cluster.executors.local import LocalExecutor

    executor = LocalExecutor(CpuPlatform(), 1)

    def spec(role, kind, worker, size):
        places = tuple(Place(rank=rank, world_size=size) for rank in range(size))
        target = f"{worker.__module__}:{worker.__name__}"
        return GroupSpec(role=role, kind=kind, target=target, places=places, timeout_s=60)

    groups = await executor.start(
        [spec("actor_train", "train", TrainWorker, 1), spec("actor_infer", "generate", InferWorker, receivers)]
    )
    return Duo("shared", groups["actor_train"], groups["actor_infer"], executor.close)


class Processes:
    """One trainer and two engines that serve test after test, until a test leaves one of them dead or busy."""

    def __init__(self):
        self.groups = ()

    async def duo(self, transport, directory):
        if not self.groups or not all(group.usable for group in self.groups):
            self.close()
            self.groups = (ProcessGroup("actor_train", "train", 1), ProcessGroup("actor_infer", "generate", 2))
        for group in self.groups:
            await WorkerCall(group, "close").all()
            await WorkerCall(group, "begin").all()
        return Duo(transport, *self.groups, lambda: asyncio.sleep(0), directory)

    def close(self):
        for group in self.groups:
            group.close()
        self.groups = ()


@pytest.fixture(scope="module")
def processes():
    held = Processes()
    yield held
    held.close()


@pytest.fixture
def with_duo(processes, tmp_path):
    """Runs `scenario(duo)` on an event loop, with new strategies in the workers."""

    def run(transport, scenario, receivers=2):
        async def whole():
            duo = await (local_duo(receivers) if transport == "shared" else processes.duo(transport, tmp_path))
            try:
                return await scenario(duo)
            finally:
                await duo.close()

        return asyncio.run(whole())

    return run
