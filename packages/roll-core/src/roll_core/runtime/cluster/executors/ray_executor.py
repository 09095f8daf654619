"""The Ray executor: every worker in its own process, on one machine or many.

    driver                                    worker's process (one actor for each rank)
    RayGroup.call ─► RayWorker.begin ── Ray ──► RayHost.call ─► WorkerHost ─► worker
                     future ◄─────────────────── bytes
    RayWorker.lifeline ◄── ends when the process does ──► every pending call, of any role, raises WorkerDiedError

After a worker exits, all calls raise, because any role may block on the exited worker in a collective. Groups that
survive an exit (replicas of an engine) are an exception: only calls to that worker raise, until it is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_core import openmp
from roll_core.errors import UnsupportedError, WorkerDiedError
from roll_core.runtime.cluster.concurrency import gather
from roll_core.runtime.cluster.executors.base import Executor, Member, Peers, WorkerGroup
from roll_core.runtime.cluster.executors.calls import collect
from roll_core.runtime.cluster.executors.orphan_cleanup import MARK
from roll_core.runtime.cluster.executors.ray_instance import RayInstance
from roll_core.runtime.cluster.executors.ray_placement import Reservation
from roll_core.runtime.cluster.executors.ray_worker import RayWorker, again, codec_of
from roll_core.runtime.cluster.platform import environment_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from roll_core.runtime.cluster.executors.base import GroupSpec
    from roll_core.runtime.cluster.executors.ray_host import Greeting
    from roll_core.runtime.cluster.placement import Place
    from roll_core.spec.platform import Platform

log = logging.getLogger(__name__)

PLACEMENT_S = 120.0
"""Seconds that the executor waits for slots that other jobs occupy."""
ENVIRONMENT_S = 3600.0
"""Seconds for the installation of a role's Python environment."""
GREETING_S = 300.0
"""Seconds for Ray to start the processes. Until then they import no heavy module of ROLL."""
CLOSE_S = 10.0
"""Seconds that workers have to close before they are killed."""
SHARED_BYTES = 100_000
"""Arguments of at least this size that go to several ranks are put into Ray's object store once."""
MAX_CONCURRENCY = 100_000
"""Maximum number of concurrent calls of one worker: more than a rollout has requests."""


class RayExecutor(Executor):
    """Executor whose workers are Ray actors in one placement group."""

    name = "ray"
    shares_memory = False

    def __init__(self, platform: Platform, slots_per_node: int, *, placement_s: float = PLACEMENT_S) -> None:
        self._platform = platform
        self._instance = RayInstance(platform)
        self._reservation = Reservation(platform, slots_per_node, placement_s)
        self._workers: list[RayWorker] = []
        self._death: WorkerDiedError | None = None
        self._died = asyncio.Event()
        self.is_closing = False
        """True once the executor ignores exits of its workers."""

    async def start(self, specs: Sequence[GroupSpec]) -> dict[str, WorkerGroup]:
        """See `Executor.start`. All roles are started at the same time."""
        try:
            self._instance.open()
            await self._reservation.take(specs)
            workers = {spec.role: [self._host(spec, place) for place in spec.places] for spec in specs}
            await gather([self._prepare(spec, workers[spec.role]) for spec in specs if spec.environment])
            greetings = {spec.role: await self._greet(spec, workers[spec.role]) for spec in specs}
            self.fingerprints = {spec.role: greetings[spec.role][0].fingerprint for spec in specs if spec.environment}
            await gather([self._make(spec, workers[spec.role], greetings[spec.role][0]) for spec in specs])
            return {spec.role: RayGroup(self, spec, workers[spec.role]) for spec in specs}
        except BaseException:
            await self.close()
            raise

    def check_alive(self) -> None:
        """See `Executor.check_alive`."""
        if self._death is not None:
            raise again(self._death)

    async def watch(self) -> NoReturn:
        """See `Executor.watch`."""
        while self._death is None:
            await self._died.wait()
        raise again(self._death)

    async def close(self) -> None:
        """See `Executor.close`. Busy workers are killed."""
        self.is_closing = True
        workers, self._workers = self._workers, []
        try:
            closing = [worker.close(CLOSE_S) for worker in workers if worker.is_idle]
            if closing:
                await asyncio.wait(closing, timeout=CLOSE_S + 1)
        finally:
            for worker in workers:
                worker.kill()
            if self._instance.is_open:
                self._reservation.give_back()
            self._instance.close()

    def death_of(self, worker: RayWorker, error: BaseException) -> None:
        """Handle a worker whose process exited or is unusable: all pending and later calls fail.

        If its group survives the exit, only calls to this worker fail.
        """
        if not self._is_news(worker):
            return
        self._has_died(worker, worker.describe_death(error))

    def give_up(self, worker: RayWorker, death: WorkerDiedError) -> None:
        """Kill an unresponsive worker and treat it as exited."""
        if self._is_news(worker):
            self._has_died(worker, death)
            worker.kill()

    def _is_news(self, worker: RayWorker) -> bool:
        return not self.is_closing and self._death is None and worker.death is None

    def _has_died(self, worker: RayWorker, death: WorkerDiedError) -> None:
        spec = worker.spec
        others = any(each.spec is spec and each.death is None for each in self._workers if each is not worker)
        if spec.survives == "always" or (spec.survives == "while_others_live" and others):
            log.warning(
                "%s; %s", death, "the others of its role go on" if others else "its role goes on with a new one"
            )
            worker.death = death
            worker.fail_pending(death)
            return
        self._death = death
        log.info("%s", self._death)
        self._died.set()
        for each in self._workers:
            each.fail_pending(self._death)

    async def replace(self, dead: RayWorker) -> RayWorker:
        """Replace an exited worker: start another process in its place and construct the worker in it.

        If that fails, the new process is killed.
        """
        if dead in self._workers:
            self._workers.remove(dead)
            dead.kill()
        spec = dead.spec
        worker = self._host(spec, spec.places[dead.place.rank])
        try:
            if spec.environment:
                await self._prepare(spec, [worker])
            (greeting,) = await self._greet(spec, [worker])
            await self._make(spec, [worker], greeting)
        except BaseException:
            self._workers.remove(worker)
            worker.kill()
            raise
        return worker

    @property
    def death(self) -> WorkerDiedError | None:
        """Error of the first exit that ends the run, or None."""
        return self._death

    def _host(self, spec: GroupSpec, place: Place) -> RayWorker:
        """Start the process of one worker. The worker itself is constructed later."""
        import ray

        from roll_core.runtime.cluster.executors.ray_host import RayHost
        from roll_core.runtime.cluster.executors.ray_isolated_env_host import RayIsolatedEnvHost

        node = self._reservation.nodes[place.node]
        configured = {**environment_of(self._platform, spec.kind, place.local_indices), **spec.env}
        devices = [node.device_ids[at] for at in place.local_indices if node.device_ids]
        env = {
            "OMP_NUM_THREADS": str(place.num_threads),
            **openmp.environment(os.environ),
            **configured,
            **self._identity(spec, place, devices),
        }
        crash_file = self._instance.scratch / f"{spec.role}-{place.rank}.crash"
        options = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "scheduling_strategy": self._reservation.strategy(place.node),
        }
        if configured:
            # Some variables take effect only when a process starts (LD_PRELOAD), so Ray starts it with them. That takes
            # twice as long as setting them in `RayHost` before the first heavy import.
            options["runtime_env"] = {"env_vars": env}
        level = logging.getLogger().getEffectiveLevel()
        known = (spec.role, place.rank, env, level, str(crash_file))
        if spec.environment is None:
            handle = ray.remote(RayHost).options(**options).remote(*known)
        else:
            handle = ray.remote(RayIsolatedEnvHost).options(**options).remote(*known, spec.environment)
        worker = RayWorker(self, spec, place, handle, crash_file)
        self._workers.append(worker)
        return worker

    def _identity(self, spec: GroupSpec, place: Place, devices: Sequence[str]) -> dict[str, str]:
        """Variables that identify a worker and select its devices. The configuration cannot override them."""
        env = {
            "WORKER_NAME": f"{spec.role}-{place.rank}",
            "CLUSTER_NAME": spec.role,
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "LOCAL_RANK": str(place.local_rank),
            MARK: self._instance.mark,
        }
        if self._platform.visible_devices:
            names = (self._platform.visible_devices, *self._platform.also_visible_devices)
            env |= dict.fromkeys(names, ",".join(devices))
        return env

    async def _prepare(self, spec: GroupSpec, workers: Sequence[RayWorker]) -> None:
        """Find or install the role's Python environment on every worker's host."""
        futures = {worker.member: worker.prepare() for worker in workers}
        await collect(spec.role, "preparation of its environment", futures, ENVIRONMENT_S)

    async def _greet(self, spec: GroupSpec, workers: Sequence[RayWorker]) -> list[Greeting]:
        unknown = [
            Member(rank=worker.place.rank, host="?", pid=0, node=worker.place.node, slots=worker.place.slots)
            for worker in workers
        ]
        futures = {member: worker.greet() for member, worker in zip(unknown, workers, strict=True)}
        greetings: list[Greeting] = await collect(spec.role, "start of its process", futures, GREETING_S)
        for worker, member, greeting in zip(workers, unknown, greetings, strict=True):
            address = "127.0.0.1" if self._instance.single_host else greeting.address
            worker.member = replace(member, host=greeting.host, pid=greeting.pid, address=address)
            worker.interface = greeting.interface if greeting.address == address else ""
        return greetings

    async def _make(self, spec: GroupSpec, workers: Sequence[RayWorker], first: Greeting) -> None:
        """Construct the workers of a role, once the address of rank 0 is known."""
        alone = len(workers) == 1
        peers = Peers(
            master_addr=workers[0].member.address,
            master_port=0 if alone else first.port,
            secret="" if alone else secrets.token_hex(16),
        )
        futures = {}
        for worker in workers:
            place = worker.place
            if place.slots and self._platform.visible_devices:
                # The process sees only its own devices, numbered from 0.
                place = replace(place, device=self._platform.device(0))
            futures[worker.member] = worker.make(place, peers)
        await collect(spec.role, "start", futures, spec.timeout_s)


class RayGroup(WorkerGroup):
    """The Ray actors of a role."""

    def __init__(self, executor: RayExecutor, spec: GroupSpec, workers: Sequence[RayWorker]) -> None:
        super().__init__(spec, [worker.member for worker in workers])
        self._executor = executor
        self._workers = list(workers)

    @property
    def lost(self) -> frozenset[int]:
        """See `WorkerGroup.lost`."""
        return frozenset(rank for rank, worker in enumerate(self._workers) if worker.death is not None)

    @property
    def outlives_all(self) -> bool:
        """See `WorkerGroup.outlives_all`."""
        return self.spec.survives == "always" and self._executor.death is None

    def _end(self, rank: int, death: WorkerDiedError) -> None:
        self._executor.give_up(self._workers[rank], death)

    async def replace(self, rank: int) -> None:
        """See `WorkerGroup.replace`."""
        self._workers[rank] = await self._executor.replace(self._workers[rank])
        self.members = tuple(worker.member for worker in self._workers)
        self.replaced += 1
        log.info("%s %s is there instead of the one that died", self.role, self.members[rank])

    def _encode(self, method: str, args: tuple[Any, ...]) -> Any:
        import ray

        try:
            payload = codec_of(self.spec).dumps(args)
        except Exception as error:  # any exception of a third-party pickling
            raise UnsupportedError(
                f"{self.role}.{method}: its arguments cannot be sent to another process: {error}"
            ) from error
        return ray.put(payload) if len(payload) >= SHARED_BYTES and self.world_size > 1 else payload

    async def _stack(self, rank: int) -> str:
        stack: str = await self._workers[rank].stack()
        return stack

    def _begin(self, rank: int, method: str, arguments: Any) -> asyncio.Future[Any]:
        return self._workers[rank].begin(method, arguments)
