"""Worker groups and executors as pipelines see them: a group is called as one, and all executors behave alike.

    Executor.start([GroupSpec, ...]) -> {role: WorkerGroup} -> WorkerStub(group)(Worker.method).all(...) -> close()

A worker is an object of the class that `GroupSpec.target` names, constructed as `Class(place=..., peers=..., **args)`.
Its constructor and its sync methods run on one dedicated thread, in call order. Its async methods run on an event loop
and may overlap. `close()`, sync or async, is called once at the end if the worker has one. `host.WorkerHost` does all
this for one worker; `worker_server.WorkerServer` does it behind serialized calls.

A plugin offers an executor by an `ExecutorProvider`: a subclass of `Executor`, and one of `WorkerGroup` whose `begin`
starts a call on a rank.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

from roll_core.errors import UnsupportedError, WorkerHungError
from roll_core.runtime.cluster.concurrency import end_on_callbacks_of
from roll_core.runtime.cluster.executors.calls import Member, collect
from roll_core.runtime.cluster.placement import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from types import TracebackType
    from typing import NoReturn, Self

    from roll_core.errors import WorkerDiedError
    from roll_core.spec.diagnostics import RoleEnvironment
    from roll_core.spec.platform import Platform, RoleKind

log = logging.getLogger(__name__)

Survival = Literal["never", "while_others_live", "always"]
"""Worker exits that a role survives: none, those that leave another worker alive, or all, including the last one."""

STACK_S = 3.0
"""Seconds that workers have to return their stacks after a missed deadline."""

__all__ = ["Executor", "GroupSpec", "Member", "Peers", "Place", "WorkerCall", "WorkerGroup", "WorkerStub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """Specification of one role's workers, for an executor."""

    role: str
    kind: RoleKind
    target: str
    """The worker class as `"module:Class"`. It is imported in the worker's process."""
    places: tuple[Place, ...]
    """One place per rank."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class: plain picklable data."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the role's processes: those of the run, overridden by the role's own.

    They take precedence over the variables that the executor sets for the platform.
    """
    environment: RoleEnvironment | None = None
    """The role's own Python environment. Only executors whose record declares `python_environments` get one. Default:
    the driver's."""
    timeout_s: float = 3600.0
    """Deadline in seconds for starting the workers, and for calls without a deadline of their own."""
    survives: Survival = "never"
    """Worker exits that the role survives. After such an exit the other workers continue.

    `WorkerGroup.replace` starts a replacement. Any other exit ends the run.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Rendezvous data with which the ranks of a role form process groups."""

    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Port that was free on rank 0's host; 0 if the role has one worker."""
    secret: str = field(default="", repr=False)
    """Secret that only the ranks of the role know. Their store accepts no client without it."""


class WorkerGroup(ABC):
    """All workers of a role. Calls are made from the event loop that started the executor."""

    def __init__(self, spec: GroupSpec, members: Sequence[Member]) -> None:
        self.spec = spec
        self.role = spec.role
        self.world_size = len(spec.places)
        self.members = tuple(members)
        self.replaced = 0
        """Number of workers replaced so far. Connections to the replaced workers are invalid."""

    # -- what an executor implements; all but `begin` have a default ---------------------------------------------------

    @abstractmethod
    def begin(self, rank: int, method: str, arguments: Any) -> asyncio.Future[Any]:
        """Begin a call; calls to one rank keep their order. The future raises `CallFailed` or `WorkerDiedError`.

        Cancelling the future cancels an async method. A sync method continues, and its result is dropped.
        """

    def encode(self, method: str, args: tuple[Any, ...]) -> Any:
        """Encode arguments for `begin`. The encoded form may be sent to several ranks."""
        return args

    async def stack(self, rank: int) -> str:
        """Current stack of a rank. May raise or block if the stack cannot be read."""
        return ""

    def terminate(self, rank: int, error: WorkerDiedError) -> None:
        """Kill the rank's process. Calls to it, and calls to ranks that cannot continue without it, raise `error`."""
        raise UnsupportedError(f"{self.role}: this executor cannot kill single workers")

    @property
    def lost(self) -> frozenset[int]:
        """Ranks whose worker exited, in a group that survives exits."""
        return frozenset()

    @property
    def survives_all(self) -> bool:
        """True if workers can be replaced even after all of them exited."""
        return False

    async def replace(self, rank: int) -> None:
        """Start a replacement worker for a lost rank, in its place. It has the state of a new worker."""
        raise UnsupportedError(f"{self.role}: this executor cannot replace workers; choose another executor")

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def kill(self, rank: int, cause: str) -> WorkerDiedError:
        """Kill an unresponsive worker, which then counts as exited.

        Returns the error, with the worker's stack if available.
        """
        trace = await self._stacks([rank])
        log.info("%s rank %d is unresponsive; its stacks:\n%s", self.role, rank, trace or "not available")
        error = WorkerHungError(self.role, rank, self.members[rank].host, "", cause, trace)
        self.terminate(rank, error)
        return error

    async def call(
        self, method: str, args_by_rank: Mapping[int, tuple[Any, ...]], deadline_s: float | None = None
    ) -> list[Any]:
        """Call each rank in `args_by_rank` with its arguments; results in that order. `math.inf` means no deadline.

        Raises the error that came first. Each error names the role, rank and host:

        - a worker's own `RollError`: the same class
        - any other exception in a worker: `WorkerError`
        - an exited worker, of any role: `WorkerDiedError`
        - a missed deadline: `WorkerTimeoutError`, which names the ranks that did not return
        """
        encoded: dict[int, Any] = {}  # by identity: arguments that ranks have in common are encoded once
        for args in args_by_rank.values():
            if id(args) not in encoded:
                encoded[id(args)] = self.encode(method, args)
        futures = {
            self.members[rank]: self.begin(rank, method, encoded[id(args)]) for rank, args in args_by_rank.items()
        }
        seconds = self.spec.timeout_s if deadline_s is None else deadline_s
        return await collect(self.role, method, futures, seconds, self._stacks)

    async def _stacks(self, ranks: Sequence[int]) -> str:
        """Current stacks of these ranks, as far as they arrive within `STACK_S` seconds."""
        tasks = [asyncio.ensure_future(self.stack(rank)) for rank in ranks]
        await asyncio.wait(tasks, timeout=STACK_S)
        done = [task for task in tasks if task.done() and not task.cancelled() and not task.exception()]
        for task in tasks:
            task.cancel()
        return "\n".join(task.result() for task in done)


W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")


class WorkerStub(Generic[W]):
    """Typed calls of a worker class: `await WorkerStub[TrainWorker](group)(TrainWorker.save).all(path)`.

    mypy checks the arguments. All code except tests calls workers through this class. `WorkerGroup.call` documents the
    errors.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    @overload
    def __call__(
        self, method: Callable[Concatenate[W, P], Coroutine[Any, Any, R]], deadline_s: float | None = None
    ) -> WorkerCall[P, R]: ...

    @overload
    def __call__(self, method: Callable[Concatenate[W, P], R], deadline_s: float | None = None) -> WorkerCall[P, R]: ...

    def __call__(self, method: Callable[..., Any], deadline_s: float | None = None) -> WorkerCall[..., Any]:
        """Select a method of the worker class, sync or async.

        `deadline_s`: None is the group's own; `math.inf` is none.
        """
        return WorkerCall(self._group, method.__name__, deadline_s)


@dataclass(frozen=True, slots=True)
class WorkerCall(Generic[P, R]):
    """One method of a worker class, ready to be called on all ranks or on one."""

    group: WorkerGroup
    method: str
    deadline_s: float | None = None

    async def all(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call every living rank with the same arguments; results ordered by rank."""
        living = [rank for rank in range(self.group.world_size) if rank not in self.group.lost]
        return await self.group.call(self.method, dict.fromkeys(living, args), self.deadline_s)

    async def each(self, args_by_rank: Sequence[tuple[Any, ...]]) -> list[R]:
        """Call every rank with its own arguments, created by `args`; results ordered by rank."""
        if len(args_by_rank) != self.group.world_size:
            where = f"{self.group.role}.{self.method}"
            raise ValueError(f"{where}: {len(args_by_rank)} sets of arguments for {self.group.world_size} ranks")
        return await self.group.call(self.method, dict(enumerate(args_by_rank)), self.deadline_s)

    async def at(self, rank: int, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call one rank."""
        (result,) = await self.group.call(self.method, {rank: args}, self.deadline_s)
        return cast("R", result)

    @staticmethod
    def args(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
        """Typed arguments of one rank, for `each`."""
        return args


class Executor(ABC):
    """Starts workers, monitors them, and cleans up. Use it from one event loop, and always `close` it."""

    fingerprints: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """Interpreter and package versions of each role that has its own Python environment. Available after `start`."""

    def __init__(self, platform: Platform, slots_per_node: int) -> None:
        """`slots_per_node` is the number of slots per node with which the roles were placed."""
        self.platform, self.slots_per_node = platform, slots_per_node

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        end_on_callbacks_of(cls.__module__)

    @abstractmethod
    async def start(self, specs: Sequence[GroupSpec]) -> dict[str, WorkerGroup]:
        """Start every role; call it once. If one role fails, no worker is left running.

        Raises `PlacementError` if a slot does not exist or is not free in time, and the errors of `WorkerGroup.call`.
        """

    @abstractmethod
    async def watch(self) -> NoReturn:
        """Wait until a worker exits, then raise `WorkerDiedError`."""

    @abstractmethod
    async def close(self) -> None:
        """Close the workers and release all resources.

        May be called several times and after any error. Errors of workers are logged, not raised.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
