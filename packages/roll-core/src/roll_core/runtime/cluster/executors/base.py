"""Worker groups and executors as pipelines see them: a group is called as one, and all executors behave alike.

    Executor.start([GroupSpec, ...]) -> {role: WorkerGroup} -> WorkerStub(group)(Worker.method).all(...) -> close()

A worker is an object of the class that `GroupSpec.target` names, constructed as `Class(place=..., peers=..., **args)`.
Its constructor and its sync methods run on one dedicated thread, in call order. Its async methods run on an event loop
and may overlap. `close()`, sync or async, is called once at the end if the worker has one. `host.WorkerHost` does all
this for one worker; `worker_server.WorkerServer` does it behind serialized calls.

A plugin offers an executor by an `ExecutorProvider`: a subclass of `Executor`, and one of `WorkerGroup` whose `begin`
starts a call on a rank.

A failure on one rank breaks its peers' collectives a moment later ("connection reset by peer"). The exit of a process
may be noticed later still. So when a rank fails, the other ranks get a grace period to return. Then the cause is
chosen: an exited worker before an exception, an original error before one that looks like a consequence ("echo") of
another rank's failure, the earliest first.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, cast, overload

from roll_core.errors import RollError, UnsupportedError, WorkerError, WorkerHungError, WorkerTimeoutError
from roll_core.runtime.cluster.concurrency import end_on_callbacks_of
from roll_core.runtime.cluster.placement import Place
from roll_core.runtime.records.tracking import TRACE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
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

        Returns the error, with the worker's stack if available. Raises the error if the executor cannot kill workers.
        """
        member = self.members[rank]
        trace = await self._stacks([rank])
        log.info("%s rank %d is unresponsive; its stacks:\n%s", self.role, rank, trace or "not available")
        error = WorkerHungError(self.role, rank, member.host, "", cause, trace)
        if self.members[rank] is member:  # otherwise it exited meanwhile, and its replacement is running already
            try:
                self.terminate(rank, error)
            except UnsupportedError as unsupported:
                raise error from unsupported
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
        trace = TRACE.get()
        for args in args_by_rank.values():
            if id(args) not in encoded:
                encoded[id(args)] = self.encode(method, args if trace is None else (trace, *args))
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
        return await self.group.call(self.method, dict.fromkeys(living, _positional(args, kwargs)), self.deadline_s)

    async def each(self, args_by_rank: Sequence[tuple[Any, ...]]) -> list[R]:
        """Call every rank with its own arguments, created by `args`; results ordered by rank."""
        if len(args_by_rank) != self.group.world_size:
            where = f"{self.group.role}.{self.method}"
            raise ValueError(f"{where}: {len(args_by_rank)} sets of arguments for {self.group.world_size} ranks")
        return await self.group.call(self.method, dict(enumerate(args_by_rank)), self.deadline_s)

    async def at(self, rank: int, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call one rank."""
        (result,) = await self.group.call(self.method, {rank: _positional(args, kwargs)}, self.deadline_s)
        return cast("R", result)

    @staticmethod
    def args(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
        """Typed arguments of one rank, for `each`."""
        return _positional(args, kwargs)


def _positional(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of a call. Raises `TypeError` for keywords: the types allow them, but they do not reach a worker."""
    if kwargs:
        raise TypeError(f"calls of workers take positional arguments only, found {', '.join(kwargs)}=")
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


# -- results and failures of one call ----------------------------------------------------------------------------------

GRACE_S = 1.0
"""Seconds that the other ranks have to return after one has failed."""
ECHO_GRACE_S = 15.0
"""Grace period if all failures so far look like echoes: the exit that caused them is noticed within seconds."""
SAME_MOMENT_S = 0.1
_ECHO = re.compile(
    r"connection (was )?(reset|closed|refused|aborted|lost)|closed by (the )?(remote )?peer|broken pipe|end of file"
    r"|socket.*(closed|reset)|recv.*0 bytes|remote process exited",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A running worker: its rank, host and process."""

    rank: int
    host: str
    pid: int
    node: int
    address: str = "127.0.0.1"
    """IP address at which other workers reach its host."""
    slots: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception in a worker, in a form that can be sent to the driver."""

    error: BaseException | None
    """The exception itself if it can be sent, otherwise None."""
    summary: str
    """Type and message of the exception."""
    trace: str
    failed_at: float
    """Time of the failure on the worker's clock, in seconds since the epoch."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Record an exception that was just caught."""
        try:
            message = str(error)
        except Exception:  # a third-party __str__ that raises
            message = ""
        name = type(error).__name__
        return cls(
            error=error,
            summary=f"{name}: {message}" if message else name,
            trace="".join(traceback.format_exception(error)),
            failed_at=time.time(),
        )

    @property
    def is_echo(self) -> bool:
        """True if it looks like the consequence of another rank's failure."""
        return isinstance(self.error, ConnectionError) or bool(_ECHO.search(self.summary))


class CallFailed(Exception):
    """A worker's method raised. Internal to executors: `collect` converts it, so users never see it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


async def collect(
    role: str,
    method: str,
    futures: Mapping[Member, asyncio.Future[Any]],
    seconds: float,
    stacks: Callable[[Sequence[int]], Awaitable[str]] | None = None,
) -> list[Any]:
    """Results in the order of `futures`; an empty list if there are none.

    Futures that are still pending when the function returns or raises are cancelled. After a missed deadline, `stacks`
    returns the stacks of the ranks that did not return; they become the error's trace.
    """
    if not futures:
        return []
    for future in futures.values():
        future.add_done_callback(retrieve)
    try:
        timeout = None if seconds == math.inf else seconds
        _, pending = await asyncio.wait(futures.values(), timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
        if _errors(futures):
            # The first error to arrive is often a consequence; the cause may be about to arrive.
            await _grace_period(futures)
            raise_first_cause(role, method, futures)
        if pending:
            late = [member for member, future in futures.items() if future in pending]
            ranks, hosts = [member.rank for member in late], [member.host for member in late]
            error = WorkerTimeoutError(role, method, seconds, ranks, hosts)
            error.trace = await stacks(ranks) if stacks else ""
            raise error
        return [future.result() for future in futures.values()]
    finally:
        for future in futures.values():
            future.cancel()


def _errors(futures: Mapping[Member, asyncio.Future[Any]]) -> dict[Member, BaseException]:
    """Exceptions of the ranks that have failed so far."""
    done = {member: future for member, future in futures.items() if future.done() and not future.cancelled()}
    return {member: error for member, future in done.items() if (error := future.exception()) is not None}


async def _grace_period(futures: Mapping[Member, asyncio.Future[Any]]) -> None:
    """Wait for the other ranks: longer if all failures so far look like echoes."""
    started = time.monotonic()
    while pending := [future for future in futures.values() if not future.done()]:
        errors = _errors(futures).values()
        echoes = all(isinstance(error, CallFailed) and error.failure.is_echo for error in errors)
        left_s = started + (ECHO_GRACE_S if echoes else GRACE_S) - time.monotonic()
        if left_s <= 0:
            return
        await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def raise_first_cause(role: str, method: str, futures: Mapping[Member, asyncio.Future[Any]]) -> None:
    """Raise the error of the rank that failed first. The module docstring describes the choice."""
    failures: dict[Member, Failure] = {}
    for member, error in _errors(futures).items():
        if not isinstance(error, CallFailed):
            raise error
        failures[member] = error.failure
    first = min(failures.values(), key=lambda failure: (failure.is_echo, failure.failed_at))

    def is_cause(failure: Failure) -> bool:
        # Ranks with the same error fail at about the same time: report the lowest of them.
        alike = failure.summary == first.summary and abs(failure.failed_at - first.failed_at) < SAME_MOMENT_S
        return failure is first or (alike and failure.is_echo == first.is_echo)

    member, failure = next(item for item in failures.items() if is_cause(item[1]))
    for other, secondary in failures.items():
        if other is not member:
            log.debug("%s %s: %s also failed: %s", role, other, method, secondary.summary)
    cause = located(role, member, method, failure)
    if cause is failure.error:  # an exception must not become its own cause
        raise cause
    raise cause from failure.error


def located(role: str, member: Member, method: str, failure: Failure) -> RollError:
    """Error for the driver after a worker's failure: the same class for a `RollError`, otherwise `WorkerError`."""
    where = f"{role} rank {member.rank} on {member.host}"
    if isinstance(failure.error, RollError):
        try:
            error = failure.error.located(where)
        except TypeError:
            log.debug("%s cannot be constructed from its own arguments", type(failure.error).__name__)
        else:
            error.trace = error.trace or failure.trace
            return error
    return WorkerError(role, member.rank, member.host, method, failure.summary, failure.trace)


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved, so that asyncio does not log failures other than the first cause."""
    if not future.cancelled():
        future.exception()
