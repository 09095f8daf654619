"""The Ray executor: every worker in its own process, on one machine or many.

    driver                                    worker's process (one actor for each rank)
    RayGroup.call ─► RayWorker.begin ── Ray ──► RayHost.call ─► WorkerHost ─► worker
                     future ◄── serialized outcome
    RayWorker.lifeline ◄── ends when the process does ──► every pending call, of any role, raises WorkerDiedError

After a worker exits, all calls raise, because any role may block on the exited worker in a collective. Groups that
survive an exit (replicas of an engine) are an exception: only calls to that worker raise, until it is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_core import openmp
from roll_core.errors import RollError, UnsupportedError, WorkerDiedError
from roll_core.runtime.cluster.concurrency import gather
from roll_core.runtime.cluster.executors.base import Executor, Peers, WorkerGroup, collect
from roll_core.runtime.cluster.platform import values_of
from roll_executor_ray.instance import RayInstance
from roll_executor_ray.orphan_cleanup import MARK
from roll_executor_ray.python_environments.spec import environment_spec
from roll_executor_ray.reservation import Reservation
from roll_executor_ray.worker import RayWorker, copy_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from roll_core.runtime.cluster.executors.base import GroupSpec
    from roll_core.runtime.cluster.placement import Place
    from roll_core.spec.platform import Platform
    from roll_executor_ray.actors import ProcessInfo
    from roll_executor_ray.python_environments.spec import EnvironmentSpec

log = logging.getLogger(__name__)

PLACEMENT_S = 120.0
"""Seconds that the executor waits for slots that other jobs occupy."""
ENVIRONMENT_S = 3600.0
"""Seconds for the installation of a role's Python environment."""
START_S = 300.0
"""Seconds for Ray to start the processes. Until then they import no heavy module of ROLL."""
POLL_S = 1.0
"""Seconds between two checks of a private Ray's control service."""
CLOSE_S = 10.0
"""Seconds that workers have to close before they are killed."""
SHARED_BYTES = 100_000
"""Arguments of at least this size that go to several ranks are put into Ray's object store once."""
MAX_CONCURRENCY = 100_000
"""Maximum number of concurrent calls of one worker: more than a rollout has requests."""


class RayExecutor(Executor):
    """Executor whose workers are Ray actors in one placement group."""

    def __init__(self, platform: Platform, slots_per_node: int, *, placement_s: float = PLACEMENT_S) -> None:
        super().__init__(platform, slots_per_node)
        self._instance = RayInstance(platform)
        self._reservation = Reservation(platform, slots_per_node, placement_s)
        self._workers: list[RayWorker] = []
        self._environments: dict[str, EnvironmentSpec] = {}
        self._is_closing = False
        self.exit_error: WorkerDiedError | None = None
        """Error of the first exit that ends the run."""
        self._exited = asyncio.Event()

    async def start(self, specs: Sequence[GroupSpec]) -> dict[str, WorkerGroup]:
        """See `Executor.start`. All roles are started at the same time."""
        try:
            self._environments = {
                spec.role: environment_spec(spec.environment) for spec in specs if spec.environment is not None
            }
            self._instance.open()
            await self._reservation.take(specs)
            workers = {spec.role: [self._launch(spec, place) for place in spec.places] for spec in specs}
            await gather([self._prepare(spec, workers[spec.role]) for spec in specs])
            infos = {spec.role: await self._process_infos(spec, workers[spec.role]) for spec in specs}
            self.fingerprints = {spec.role: infos[spec.role][0].fingerprint for spec in specs if spec.environment}
            await gather([self._construct(spec, workers[spec.role], infos[spec.role]) for spec in specs])
            return {spec.role: RayGroup(self, spec, workers[spec.role]) for spec in specs}
        except BaseException:
            await self.close()
            raise

    async def watch(self) -> NoReturn:
        """See `Executor.watch`. Raises `RollError` if Ray's own control service exits."""
        while self.exit_error is None:
            if self._instance.gcs_exited:
                raise RollError(
                    "Ray's process gcs_server exited, most likely killed (SIGKILL), so the run cannot continue"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), POLL_S)
        raise copy_of(self.exit_error)

    async def close(self) -> None:
        """See `Executor.close`. Busy workers are killed."""
        self._is_closing = True
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.refuse()
        try:
            closing = [worker.close(CLOSE_S) for worker in workers if worker.is_idle]
            if closing:
                await asyncio.wait(closing, timeout=CLOSE_S + 1)
        finally:
            for worker in workers:
                worker.kill()
            # Without Ray's control service the release would block until Ray ends this process.
            if self._instance.is_open and not self._instance.gcs_exited:
                self._reservation.release()
            self._instance.close()

    def worker_exited(self, worker: RayWorker, error: WorkerDiedError) -> None:
        """Let all pending and later calls raise `error`. If its group survives, only calls to this worker raise."""
        if self._is_closing or self.exit_error is not None or worker.exit_error is not None:
            return
        spec = worker.spec
        others = any(
            member.spec is spec and member.exit_error is None for member in self._workers if member is not worker
        )
        if spec.survives == "always" or (spec.survives == "while_others_live" and others):
            left = "the other workers of the role continue" if others else "the role continues with a replacement"
            log.warning("%s; %s", error, left)
            worker.exit_error = error
            worker.fail(error)
            return
        log.info("%s", error)
        self.exit_error = error
        self._exited.set()
        for member in self._workers:
            member.fail(error)

    async def replace(self, old: RayWorker) -> RayWorker:
        """Replace an exited worker: start another process in its place and construct the worker in it.

        If that fails, the new process is killed.
        """
        if old in self._workers:
            self._workers.remove(old)
            old.kill()
        spec = old.spec
        worker = self._launch(spec, spec.places[old.place.rank])
        try:
            await self._prepare(spec, [worker])
            await self._construct(spec, [worker], await self._process_infos(spec, [worker]))
        except BaseException:
            self._workers.remove(worker)
            worker.kill()
            raise
        return worker

    def _launch(self, spec: GroupSpec, place: Place) -> RayWorker:
        """Start the process of one worker. The worker itself is constructed later."""
        import ray

        from roll_executor_ray.actors import RayHost, RayIsolatedEnvHost

        node = self._reservation.nodes[place.node]
        configured = {**values_of(self.platform.environment(spec.kind, place.local_indices)), **spec.env}
        devices = [node.device_ids[index] for index in place.local_indices if node.device_ids]
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
        args: list[Any] = [spec.role, place.rank, env, logging.getLogger().getEffectiveLevel(), str(crash_file)]
        if spec.environment is not None:
            args.append(self._environments[spec.role])
        actor = ray.remote(RayHost if spec.environment is None else RayIsolatedEnvHost)
        worker = RayWorker(spec, place, actor.options(**options).remote(*args), crash_file, self.worker_exited)
        if self.exit_error is not None:
            worker.refuse(self.exit_error)
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
        if self.platform.visible_devices:
            names = (self.platform.visible_devices, *self.platform.also_visible_devices)
            env |= dict.fromkeys(names, ",".join(devices))
        return env

    async def _prepare(self, spec: GroupSpec, workers: Sequence[RayWorker]) -> None:
        """Find or install the role's own Python environment, if it has one, on every worker's host."""
        if spec.environment is not None:
            futures = {worker.member: worker.prepare() for worker in workers}
            await collect(spec.role, "preparation of its environment", futures, ENVIRONMENT_S)

    async def _process_infos(self, spec: GroupSpec, workers: Sequence[RayWorker]) -> list[ProcessInfo]:
        """Wait until the processes have started. The result completes each worker's `member`."""
        futures = {worker.member: worker.process_info() for worker in workers}
        infos: list[ProcessInfo] = await collect(spec.role, "start of its process", futures, START_S)
        for worker, info in zip(workers, infos, strict=True):
            address = "127.0.0.1" if self._instance.single_host else info.address
            worker.member = replace(worker.member, host=info.host, pid=info.pid, address=address)
        return infos

    async def _construct(self, spec: GroupSpec, workers: Sequence[RayWorker], infos: Sequence[ProcessInfo]) -> None:
        """Construct the workers of a role, once the address of rank 0 is known."""
        from roll_executor_ray.actors import GLOO_INTERFACE

        alone = len(workers) == 1
        peers = Peers(
            master_addr=workers[0].member.address,
            master_port=0 if alone else infos[0].port,
            secret="" if alone else secrets.token_hex(16),
        )
        futures = {}
        for worker, info in zip(workers, infos, strict=True):
            place = worker.place
            if place.slots and self.platform.visible_devices:
                # The process sees only its own devices, numbered from 0.
                place = replace(place, device=self.platform.device(0))
            reachable = info.interface and info.address == worker.member.address
            env = {GLOO_INTERFACE: info.interface} if reachable else {}
            futures[worker.member] = worker.construct(place, peers, env)
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
        return frozenset(rank for rank, worker in enumerate(self._workers) if worker.exit_error is not None)

    @property
    def survives_all(self) -> bool:
        """See `WorkerGroup.survives_all`."""
        return self.spec.survives == "always" and self._executor.exit_error is None

    def terminate(self, rank: int, error: WorkerDiedError) -> None:
        """See `WorkerGroup.terminate`."""
        self._executor.worker_exited(self._workers[rank], error)
        self._workers[rank].kill()

    async def replace(self, rank: int) -> None:
        """See `WorkerGroup.replace`."""
        self._workers[rank] = await self._executor.replace(self._workers[rank])
        self.members = tuple(worker.member for worker in self._workers)
        self.replaced += 1
        log.info("%s rank %d: replacement started (pid %d)", self.role, rank, self.members[rank].pid)

    def encode(self, method: str, args: tuple[Any, ...]) -> Any:
        """Serialize the arguments. Large ones that go to several ranks are put into Ray's object store."""
        import ray

        try:
            payload = self._workers[0].codec.dumps(args)
        except Exception as error:  # any exception of a third-party pickling
            raise UnsupportedError(
                f"{self.role}.{method}: its arguments cannot be sent to another process: {error}"
            ) from error
        return ray.put(payload) if len(payload) >= SHARED_BYTES and self.world_size > 1 else payload

    async def stack(self, rank: int) -> str:
        """See `WorkerGroup.stack`."""
        stack: str = await self._workers[rank].stack()
        return stack

    def begin(self, rank: int, method: str, arguments: Any) -> asyncio.Future[Any]:
        """See `WorkerGroup.begin`."""
        return self._workers[rank].begin(method, arguments)
