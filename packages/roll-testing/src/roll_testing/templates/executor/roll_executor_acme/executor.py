"""Executor `acme`: every worker in a process of its own on this host. An exit of any worker ends the run.

AcmeExecutor.start ─► AcmeWorker ══ socket ══► process with the worker
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError, WorkerDiedError
from roll_core.runtime.cluster.executors.base import Executor, Member, Peers, WorkerGroup, collect, retrieve
from roll_core.runtime.cluster.executors.worker_process import ProcessEndedError, WorkerProcess
from roll_core.runtime.cluster.executors.worker_server import WIRE, decode
from roll_core.runtime.cluster.placement import check_local
from roll_core.runtime.cluster.platform import values_of

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from typing import NoReturn

    from roll_core.runtime.cluster.executors.base import GroupSpec
    from roll_core.runtime.cluster.placement import Place

CLOSE_S = 10.0
"""Seconds that a busy worker has to close."""


class AcmeExecutor(Executor):
    """Starts the processes of all roles, and ends them."""

    def __init__(self, platform: Any, slots_per_node: int) -> None:
        super().__init__(platform, slots_per_node)
        self._workers: list[AcmeWorker] = []
        self._exits: asyncio.Queue[WorkerDiedError] = asyncio.Queue()

    async def start(self, specs: Sequence[GroupSpec]) -> dict[str, WorkerGroup]:
        """See `Executor.start`. Roles are started one after the other."""
        for spec in specs:
            if spec.environment is not None:
                raise UnsupportedError(f"{spec.role}: executor acme starts no Python environments: remove environment")
            check_local(spec.role, spec.kind, spec.places, self.platform, self.slots_per_node)
        try:
            return {spec.role: await self._start_group(spec) for spec in specs}
        except BaseException:
            await self.close()
            raise

    async def watch(self) -> NoReturn:
        """See `Executor.watch`."""
        raise await self._exits.get()

    async def close(self) -> None:
        """See `Executor.close`."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.refuse("its executor was closed")
        await asyncio.gather(*(worker.process.close(CLOSE_S) for worker in workers))

    def worker_exited(self, error: WorkerDiedError) -> None:
        """Let all pending and later calls raise `error`: no role can continue without another."""
        self._exits.put_nowait(error)
        for worker in self._workers:
            worker.fail(error)

    async def _start_group(self, spec: GroupSpec) -> AcmeGroup:
        workers = [AcmeWorker(self, spec, place) for place in spec.places]
        self._workers += workers
        starting = {
            worker.member: asyncio.ensure_future(worker.start(self._environment(spec, worker.place)))
            for worker in workers
        }
        await collect(spec.role, "start of its process", starting, spec.timeout_s)
        alone = len(workers) == 1
        peers = Peers(master_port=0 if alone else free_port(), secret="" if alone else secrets.token_hex(16))
        constructing = {worker.member: worker.construct(self._seen(worker.place), peers) for worker in workers}
        await collect(spec.role, "start", constructing, spec.timeout_s)
        return AcmeGroup(self, spec, workers)

    def _environment(self, spec: GroupSpec, place: Place) -> dict[str, str]:
        """Variables of a worker's process. The configuration cannot override those that identify it."""
        names = (self.platform.visible_devices, *self.platform.also_visible_devices)
        return {
            **os.environ,
            "OMP_NUM_THREADS": str(place.num_threads),
            **values_of(self.platform.environment(spec.kind, place.local_indices)),
            **spec.env,
            "WORKER_NAME": f"{spec.role}-{place.rank}",
            "CLUSTER_NAME": spec.role,
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            **dict.fromkeys(filter(None, names), ",".join(map(str, place.local_indices))),
        }

    def _seen(self, place: Place) -> Place:
        """The place as the worker's process sees it: only its own devices, numbered from 0."""
        hides = place.slots and self.platform.visible_devices
        return replace(place, device=self.platform.device(0)) if hides else place


class AcmeWorker:
    """One process with a worker."""

    def __init__(self, executor: AcmeExecutor, spec: GroupSpec, place: Place) -> None:
        self.spec, self.place = spec, place
        self._executor = executor
        self.member = Member(rank=place.rank, host="", pid=0, node=0, slots=place.slots)
        level = logging.getLogger().getEffectiveLevel()
        self.process = WorkerProcess(
            {"role": spec.role, "rank": place.rank, "level": level, "crash_file": "", "reported": []}
        )
        self._numbers = itertools.count()
        self._calls: set[asyncio.Future[Any]] = set()
        self._refusal: WorkerDiedError | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, env: Mapping[str, str]) -> None:
        """Start the process. Raises `PythonEnvironmentError` if it ends before it serves calls."""
        facts = await self.process.start(Path(sys.executable), env)
        self.member = replace(self.member, host=facts["host"], pid=facts["pid"])
        self._watching = asyncio.create_task(self._watch())

    def construct(self, place: Place, peers: Peers) -> asyncio.Future[Any]:
        """Construct the worker in its process."""
        env = {"MASTER_ADDR": peers.master_addr, "MASTER_PORT": str(peers.master_port)}
        path = [str(Path(entry or Path.cwd()).absolute()) for entry in sys.path]
        payload = WIRE.dumps((self.spec.target, place, peers, dict(self.spec.args), env, path))
        return self._track(self._result(self.process.request("construct", payload)))

    def begin(self, method: str, payload: bytes) -> asyncio.Future[Any]:
        """See `WorkerGroup.begin`."""
        number = next(self._numbers)
        return self._track(self._result(self.process.request("call", number, method, payload), number))

    def refuse(self, cause: str) -> WorkerDiedError:
        """Let all later calls raise an error with this cause. An earlier error stays."""
        error = WorkerDiedError(self.spec.role, self.place.rank, self.member.host, "", cause)
        self._refusal = self._refusal or error
        return error

    def fail(self, error: WorkerDiedError) -> None:
        """Let all pending and later calls raise `error`."""
        self._refusal = error
        for call in self._calls:
            call.cancel()

    def _track(self, call: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return task

    async def _result(self, reply: asyncio.Future[Any], number: int | None = None) -> Any:
        """Result of a request. A cancelled call is cancelled in the process too."""
        try:
            if self._refusal is not None:
                raise asyncio.CancelledError
            return decode(WIRE, await reply)
        except ProcessEndedError as ended:
            raise self._refusal or self.refuse(f"its process {ended}") from ended
        except asyncio.CancelledError:
            if self._refusal is not None:
                raise type(self._refusal)(*self._refusal.args) from None
            if number is not None:
                self.process.request("cancel", number).add_done_callback(retrieve)
            raise

    async def _watch(self) -> None:
        cause = await self.process.ended()
        if self._refusal is None:
            self._executor.worker_exited(self.refuse(f"process {self.member.pid} {cause}"))


class AcmeGroup(WorkerGroup):
    """The processes of a role."""

    def __init__(self, executor: AcmeExecutor, spec: GroupSpec, workers: Sequence[AcmeWorker]) -> None:
        super().__init__(spec, [worker.member for worker in workers])
        self._executor, self._workers = executor, workers

    def encode(self, method: str, args: tuple[Any, ...]) -> bytes:
        """See `WorkerGroup.encode`."""
        return WIRE.dumps(args)

    def begin(self, rank: int, method: str, arguments: bytes) -> asyncio.Future[Any]:
        """See `WorkerGroup.begin`."""
        return self._workers[rank].begin(method, arguments)

    async def stack(self, rank: int) -> str:
        """See `WorkerGroup.stack`."""
        stack: str = await self._workers[rank].process.request("stack")
        return stack

    def terminate(self, rank: int, error: WorkerDiedError) -> None:
        """See `WorkerGroup.terminate`."""
        self._executor.worker_exited(error)
        self._workers[rank].process.kill()


def free_port() -> int:
    """A port that is free at the moment."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port
