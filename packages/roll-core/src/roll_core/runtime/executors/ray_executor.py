"""The Ray executor: every worker in a process of its own, on one machine or many.

    driver                                    worker's process (one actor for each rank)
    RayGroup.call ─► RayWorker.begin ── Ray ──► RayHost.call ─► WorkerHost ─► worker
                     future ◄─────────────────── bytes
    RayWorker.lifeline ◄── ends when the process does ──► every pending call, of any role, raises WorkerDiedError

After a death all calls raise: whatever a role does next, it may wait for the dead worker in a collective. Groups that
survive a death (replicas of an engine) are an exception: only calls to that worker raise, until it is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import EngineDiedError, UnsupportedError, WorkerDiedError
from roll_core.runtime.concurrency import gather
from roll_core.runtime.executors.base import Executor, Member, Peers, WorkerGroup
from roll_core.runtime.executors.calls import CallFailed, Failure, collect, retrieve
from roll_core.runtime.executors.codecs import PICKLED, WIRE, decode
from roll_core.runtime.executors.deaths import cause_of_death
from roll_core.runtime.executors.ray_instance import RayInstance
from roll_core.runtime.executors.ray_placement import Reservation
from roll_core.runtime.executors.reaper import MARK
from roll_core.runtime.host import hostname, num_oom_kills
from roll_core.runtime.platform import environment_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from typing import NoReturn

    from roll_core.runtime.executors.base import GroupSpec
    from roll_core.runtime.executors.codecs import Codec
    from roll_core.runtime.executors.ray_host import Greeting
    from roll_core.runtime.placement import Place
    from roll_core.spec.platform import Platform

log = logging.getLogger(__name__)

PLACEMENT_S = 120.0
"""How long slots may be taken by others before that is an error."""
ENVIRONMENT_S = 3600.0
"""How long it may take to install the Python environment of a role."""
GREETING_S = 300.0
"""How long Ray may take to start the processes, which by then have loaded nothing of ours that is heavy."""
CLOSE_S = 10.0
"""How long workers may take to close before they are killed."""
DEATH_NEWS_S = 10.0
"""How long after a failed call the news of the worker's death may take."""
SHARED_BYTES = 100_000
"""Arguments at least as large that go to several ranks are put into Ray's object store once."""
MAX_CONCURRENCY = 100_000
"""Calls that one worker may have begun: more than a rollout has requests."""


class RayExecutor(Executor):
    """Workers are Ray actors in one placement group."""

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
        """Nobody wants news of the workers any more."""

    async def start(self, specs: Sequence[GroupSpec]) -> dict[str, WorkerGroup]:
        """See `Executor.start`. All roles are made at the same time."""
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
            raise _again(self._death)

    async def watch(self) -> NoReturn:
        """See `Executor.watch`."""
        while self._death is None:
            await self._died.wait()
        raise _again(self._death)

    async def close(self) -> None:
        """See `Executor.close`. Workers that are busy are killed."""
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
        """A worker's process is gone, or of no use any more: fail every call that is pending, and all later ones; only
        those to it where its group survives that."""
        if self.is_closing or self._death is not None or worker.death is not None:
            return
        death = worker.describe_death(error)
        if worker.spec.survives and any(each.spec is worker.spec and each.death is None for each in self._workers):
            log.warning("%s; the others of its role go on", death)
            worker.death = death
            worker.fail_pending(death)
            return
        self._death = death
        log.info("%s", self._death)
        self._died.set()
        for each in self._workers:
            each.fail_pending(self._death)

    async def replace(self, dead: RayWorker) -> RayWorker:
        """Start another process in the place of one that has died, and make the worker in it."""
        if dead in self._workers:
            self._workers.remove(dead)
            dead.kill()
        spec = dead.spec
        worker = self._host(spec, spec.places[dead.place.rank])
        if spec.environment:
            await self._prepare(spec, [worker])
        (greeting,) = await self._greet(spec, [worker])
        await self._make(spec, [worker], greeting)
        return worker

    @property
    def death(self) -> WorkerDiedError | None:
        """The first death that ends everything."""
        return self._death

    def _host(self, spec: GroupSpec, place: Place) -> RayWorker:
        """Start the process of one worker. It holds no worker yet."""
        import ray

        from roll_core.runtime.executors.ray_foreign_host import ForeignRayHost
        from roll_core.runtime.executors.ray_host import RayHost

        node = self._reservation.nodes[place.node]
        configured = {**environment_of(self._platform, spec.kind, place.local_indices), **spec.env}
        devices = [node.device_ids[at] for at in place.local_indices if node.device_ids]
        env = {"OMP_NUM_THREADS": str(place.num_threads), **configured, **self._identity(spec, place, devices)}
        crash_file = self._instance.scratch / f"{spec.role}-{place.rank}.crash"
        options = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_concurrency": MAX_CONCURRENCY,
            "scheduling_strategy": self._reservation.strategy(place.node),
        }
        if configured:
            # Some variables are read when a process begins (LD_PRELOAD): Ray starts it with them, which takes twice as
            # long as to set them in `RayHost`, before anything heavy is imported.
            options["runtime_env"] = {"env_vars": env}
        level = logging.getLogger().getEffectiveLevel()
        known = (spec.role, place.rank, env, level, str(crash_file))
        if spec.environment is None:
            handle = ray.remote(RayHost).options(**options).remote(*known)
        else:
            handle = ray.remote(ForeignRayHost).options(**options).remote(*known, spec.environment)
        worker = RayWorker(self, spec, place, handle, crash_file)
        self._workers.append(worker)
        return worker

    def _identity(self, spec: GroupSpec, place: Place, devices: Sequence[str]) -> dict[str, str]:
        """What tells a worker who it is and what it may see; no configuration changes that."""
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
        """Let every worker's host find or install the role's Python environment."""
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
            worker.interface = "" if self._instance.single_host else greeting.interface
        return greetings

    async def _make(self, spec: GroupSpec, workers: Sequence[RayWorker], first: Greeting) -> None:
        """Make the workers of a role, now that it is known where rank 0 is."""
        alone = len(workers) == 1
        peers = Peers(master_addr=workers[0].member.address, master_port=0 if alone else first.port)
        futures = {}
        for worker in workers:
            place = worker.place
            if place.slots and self._platform.visible_devices:
                # Its process sees only its own devices, and counts them from 0.
                place = replace(place, device=self._platform.device(0))
            futures[worker.member] = worker.make(place, peers)
        await collect(spec.role, "start", futures, spec.timeout_s)


class RayGroup(WorkerGroup):
    """The actors of a role."""

    def __init__(self, executor: RayExecutor, spec: GroupSpec, workers: Sequence[RayWorker]) -> None:
        super().__init__(spec, [worker.member for worker in workers])
        self._executor = executor
        self._workers = list(workers)

    @property
    def lost(self) -> frozenset[int]:
        """See `WorkerGroup.lost`."""
        return frozenset(rank for rank, worker in enumerate(self._workers) if worker.death is not None)

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
        except Exception as error:  # whatever a foreign object's pickling raises
            raise UnsupportedError(
                f"{self.role}.{method}: its arguments cannot be sent to another process: {error}"
            ) from error
        return ray.put(payload) if len(payload) >= SHARED_BYTES and self.world_size > 1 else payload

    async def _stack(self, rank: int) -> str:
        stack: str = await self._workers[rank].stack()
        return stack

    def _begin(self, rank: int, method: str, arguments: Any) -> asyncio.Future[Any]:
        return self._workers[rank].begin(method, arguments)


class RayWorker:
    """One actor, as the driver sees it. Lives on the event loop of the executor."""

    def __init__(self, executor: RayExecutor, spec: GroupSpec, place: Place, handle: Any, crash_file: Path) -> None:
        self.place = place
        self.member = Member(rank=place.rank, host="?", pid=0, node=place.node, slots=place.slots)
        self._executor = executor
        self.spec = spec
        self._codec = codec_of(spec)
        self._handle = handle
        self._crash_file = crash_file
        self._oom_kills_before = num_oom_kills()
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._pending: dict[asyncio.Future[Any], str] = {}
        """Who waits, and for which method."""
        self._unanswered = 0
        self.interface = ""
        """The network interface at which it meets its peers, where one has to be named."""
        self.is_dead = False
        self.death: WorkerDiedError | None = None
        """How it died, where its group survives that."""
        self._on_answer(handle.lifeline.remote(), self._lifeline_ended)

    @property
    def is_idle(self) -> bool:
        """Whether its process lives and works on nothing, also on nothing that nobody waits for any more."""
        return not self._unanswered and not self.is_dead

    def prepare(self) -> asyncio.Future[Any]:
        """Let it find or install its Python environment."""
        return self._ask("preparation of its environment", self._handle.prepare.remote(), PICKLED)

    def greet(self) -> asyncio.Future[Any]:
        """Wait for its process."""
        return self._ask("start of its process", self._handle.greet.remote(), PICKLED)

    def make(self, place: Place, peers: Peers) -> asyncio.Future[Any]:
        """Make the worker in it."""
        self.place = place
        env = {"MASTER_ADDR": peers.master_addr, "MASTER_PORT": str(peers.master_port)}
        if self.interface:
            from roll_core.runtime.executors.ray_host import GLOO_INTERFACE

            env[GLOO_INTERFACE] = self.interface
        spec = self.spec
        try:
            payload = self._codec.dumps((spec.target, place, peers, dict(spec.args), env, import_path(spec)))
        except Exception as error:
            raise UnsupportedError(f"{spec.role}: its arguments cannot be sent to another process: {error}") from error
        return self._ask("start", self._handle.make.remote(payload), self._codec)

    def begin(self, method: str, payload: Any) -> asyncio.Future[Any]:
        """Begin a call. See `WorkerGroup._begin`."""
        if death := self._executor.death or self.death:
            return self._dead_already(death)
        if self._executor.is_closing:
            member = self.member
            return self._dead_already(
                WorkerDiedError(self.spec.role, member.rank, member.host, "", "its executor was closed")
            )
        number, self._number = self._number, self._number + 1
        future = self._ask(method, self._handle.call.remote(number, method, payload), self._codec)

        def tell_if_cancelled(done: asyncio.Future[Any]) -> None:
            if done.cancelled() and not self._executor.is_closing:
                self._handle.cancel.remote(number)

        future.add_done_callback(tell_if_cancelled)
        return future

    def stack(self) -> asyncio.Future[Any]:
        """Where its worker is right now."""
        return self._ask("stack", self._handle.stack.remote())

    def close(self, timeout_s: float) -> asyncio.Future[Any]:
        """Close the worker in it."""
        return self._ask("close", self._handle.close.remote(timeout_s))

    def kill(self) -> None:
        """End its process.

        The handle goes too: it may live on in a cycle, and when that is collected Ray takes a reference from the actor
        of this id, which by then may be one of the next Ray instance of this process.
        """
        import ray

        ray.kill(self._handle)
        self._handle = None

    def fail_pending(self, death: WorkerDiedError) -> None:
        """Every call that waits raises."""
        for future in list(self._pending):
            if not future.done():
                future.set_exception(_again(death))

    def describe_death(self, error: BaseException) -> WorkerDiedError:
        """What is known: Ray's words, the crash that the process itself wrote, the kernel's count of killings."""
        method = next((method for future, method in self._pending.items() if not future.cancelled()), "")
        trace = _text(self._crash_file)
        struck = num_oom_kills() - self._oom_kills_before if self.member.host in (hostname(), "?") else 0
        cause = cause_of_death(error, pid=self.member.pid, trace=trace, oom_kills=struck)
        return WorkerDiedError(self.spec.role, self.place.rank, self.member.host, method, cause, trace or str(error))

    def _ask(self, method: str, ref: Any, codec: Codec | None = None) -> asyncio.Future[Any]:
        """The answer to a call that was made, as it is where it has no codec."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[future] = method
        self._unanswered += 1
        future.add_done_callback(self._forget)

        def answered(answer: Any, error: BaseException | None) -> None:
            self._unanswered -= 1
            if future.done():
                return
            if error is not None:
                self._unreachable(future, error)
                return
            try:
                future.set_result(decode(codec, answer) if codec else answer)
            except CallFailed as failed:
                if isinstance(failed.failure.error, EngineDiedError):
                    self._executor.death_of(self, failed.failure.error)
                if not future.done():
                    future.set_exception(failed)
            except Exception as wrong:  # whatever the unpickling of a foreign object raises
                future.set_exception(CallFailed(Failure.of(wrong)))

        self._on_answer(ref, answered)
        return future

    def _forget(self, done: asyncio.Future[Any]) -> None:
        self._pending.pop(done, None)
        retrieve(done)

    def _on_answer(self, ref: Any, callback: Callable[[Any, BaseException | None], None]) -> None:
        """Call back on the event loop with the answer or the error. Ray calls from a thread of its own."""

        def ready(done: Future[Any]) -> None:
            error = done.exception()
            answer = None if error else done.result()
            with contextlib.suppress(RuntimeError):  # the loop is closed, and with it everyone who waited
                self._loop.call_soon_threadsafe(callback, answer, error)

        ref.future().add_done_callback(ready)

    def _lifeline_ended(self, _answer: None, error: BaseException | None) -> None:
        import ray

        if isinstance(error, ray.exceptions.ActorUnavailableError):
            # The network had a gap; Ray has not given the process up.
            self._on_answer(self._handle.lifeline.remote(), self._lifeline_ended)
        elif error is not None:
            self.is_dead = True
            self._executor.death_of(self, error)

    def _unreachable(self, future: asyncio.Future[Any], error: BaseException) -> None:
        """Ray lost a call. Most likely the process died, and the lifeline says so in a moment: that error is better."""

        def give_up() -> None:
            if not future.done():
                future.set_exception(CallFailed(Failure.of(error)))

        self._loop.call_later(DEATH_NEWS_S, give_up)

    def _dead_already(self, death: WorkerDiedError) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        future.set_exception(_again(death))
        return future


def _again(death: WorkerDiedError) -> WorkerDiedError:
    """The same error to raise in one more place, without the traceback of another."""
    return WorkerDiedError(*death.args)


def codec_of(spec: GroupSpec) -> Codec:
    """How calls of a role become bytes."""
    return PICKLED if spec.environment is None else WIRE


def import_path(spec: GroupSpec) -> list[str]:
    """Where this process imports from: workers import the user's modules from there too. What is installed here stays
    out of another environment."""
    path = [str(Path(entry or Path.cwd()).absolute()) for entry in sys.path]
    if spec.environment is None:
        return path
    here = {str(Path(prefix).absolute()) for prefix in (sys.prefix, sys.base_prefix)}
    installed = {line for folder in path for file in Path(folder).glob("*.pth") for line in _text(file).splitlines()}
    return [each for each in path if each not in installed and not any(Path(each).is_relative_to(to) for to in here)]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
