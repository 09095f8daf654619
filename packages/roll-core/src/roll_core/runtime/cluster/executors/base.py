"""What pipelines know of workers: groups of them that are called as one. They cannot tell the executors apart.

    Executor.start([GroupSpec, ...]) -> {role: WorkerGroup} -> WorkerStub(group)(Worker.method).all(...) -> close()

A worker is an object of the class that `GroupSpec.target` names, made as `Class(place=..., peers=..., **args)`. Its
sync methods, and its making, all run on one thread of its own, in the order of the calls; its async methods run on an
event loop and may overlap. `close()`, sync or async, is called once at the end if it has one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from roll_core.errors import UnsupportedError, WorkerHungError
from roll_core.runtime.cluster.executors.calls import Member, collect
from roll_core.runtime.cluster.placement import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from types import TracebackType
    from typing import NoReturn, Self

    from roll_core.errors import WorkerDiedError
    from roll_core.runtime.cluster.python_environments.spec import EnvironmentSpec
    from roll_core.spec.platform import RoleKind

log = logging.getLogger(__name__)

Survival = Literal["never", "while_others_live", "always"]
"""Which deaths among its workers a role survives; `always`: also that of the last one."""

STACK_S = 3.0
"""How long a worker that missed a deadline may take to say what it is doing."""

__all__ = ["Executor", "GroupSpec", "Member", "Peers", "Place", "WorkerCall", "WorkerGroup", "WorkerStub"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """One role, as an executor starts it."""

    role: str
    kind: RoleKind
    target: str
    """`"module:Class"` of the worker, imported in its own process."""
    places: tuple[Place, ...]
    """One per rank."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class: picklable plain data."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of its processes: the run's, with the role's own on top. The executor puts the platform's
    below them."""
    environment: EnvironmentSpec | None = None
    """The Python environment of its workers; the driver's where not given."""
    timeout_s: float = 3600.0
    """Deadline of calls that state none, and of starting."""
    survives: Survival = "never"
    """A death that the role survives leaves its other workers as they are, and `WorkerGroup.replace` makes it anew. Any
    other ends everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Where the ranks of a role meet to form process groups."""

    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """A port that was free on rank 0's host; 0 where the role has one worker."""
    secret: str = field(default="", repr=False)
    """Known to the ranks of the role alone; their store admits no other client."""


class WorkerGroup(ABC):
    """All workers of a role. Calls are made from the event loop that started the executor."""

    def __init__(self, spec: GroupSpec, members: Sequence[Member]) -> None:
        self.spec = spec
        self.role = spec.role
        self.world_size = len(spec.places)
        self.members = tuple(members)
        self.replaced = 0
        """Workers that were made anew: connections to those before are no good."""

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that have died, of a group that survives it."""
        return frozenset()

    @property
    def outlives_all(self) -> bool:
        """Whether workers can be made anew even where none is left."""
        return False

    async def replace(self, rank: int) -> None:
        """Make the worker of a lost rank anew, in its place; it is as it was before its first call."""
        raise UnsupportedError(f"{self.role}: this executor's workers do not die")

    async def give_up(self, rank: int, cause: str) -> WorkerDiedError:
        """End a worker that shows no sign of life, as if it had died. Returns its death, with where it hung."""
        trace = await self._stacks([rank])
        log.info("%s rank %d hangs:\n%s", self.role, rank, trace or "and does not say where")
        death = WorkerHungError(self.role, rank, self.members[rank].host, "", cause, trace)
        self._end(rank, death)
        return death

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> list[Any]:
        """Call every rank that lives with the same arguments; results by rank. See `call_each` for errors."""
        arguments = self._encode(method, args)
        living = [rank for rank in range(self.world_size) if rank not in self.lost]
        return await self._collect(method, dict.fromkeys(living, arguments), deadline_s)

    async def call_each(
        self, method: str, args_by_rank: Sequence[tuple[Any, ...]], deadline_s: float | None = None
    ) -> list[Any]:
        """Call rank `r` with `args_by_rank[r]`; results by rank.

        Raises the first cause: a worker's own `RollError` as the class that it is, any other exception as
        `WorkerError`, a dead worker (of whatever role) as `WorkerDiedError`, each with role, rank and host in front;
        and `WorkerTimeoutError` when the deadline passes, naming the ranks that did not answer.
        """
        if len(args_by_rank) != self.world_size:
            raise ValueError(f"{self.role}.{method}: {len(args_by_rank)} sets of arguments for {self.world_size} ranks")
        encoded = {rank: self._encode(method, args) for rank, args in enumerate(args_by_rank)}
        return await self._collect(method, encoded, deadline_s)

    async def call_rank(self, rank: int, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """Call one rank. See `call_each` for errors; `math.inf` is no deadline."""
        return (await self._collect(method, {rank: self._encode(method, args)}, deadline_s))[0]

    async def _collect(self, method: str, arguments: Mapping[int, Any], deadline_s: float | None) -> list[Any]:
        futures = {self.members[rank]: self._begin(rank, method, each) for rank, each in arguments.items()}
        seconds = self.spec.timeout_s if deadline_s is None else deadline_s
        return await collect(self.role, method, futures, seconds, self._stacks)

    async def _stacks(self, ranks: Sequence[int]) -> str:
        """Where these ranks are right now, as far as they say so soon."""
        asked = [asyncio.ensure_future(self._stack(rank)) for rank in ranks]
        await asyncio.wait(asked, timeout=STACK_S)
        told = [task for task in asked if task.done() and not task.cancelled() and not task.exception()]
        for task in asked:
            task.cancel()
        return "\n".join(task.result() for task in told)

    async def _stack(self, rank: int) -> str:
        """Where a rank is right now. May raise, or not return, where that cannot be known."""
        return ""

    def _end(self, rank: int, death: WorkerDiedError) -> None:
        """Kill its process: calls to it, and those to others that cannot do without it, raise this."""
        raise UnsupportedError(f"{self.role}: this executor's workers cannot be ended one by one")

    def _encode(self, method: str, args: tuple[Any, ...]) -> Any:
        """Arguments in the form in which `_begin` takes them; the same form may go to several ranks."""
        return args

    @abstractmethod
    def _begin(self, rank: int, method: str, arguments: Any) -> asyncio.Future[Any]:
        """Begin a call, in order with others to this rank. The future raises `CallFailed` or `WorkerDiedError`."""


W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")


class WorkerStub(Generic[W]):
    """Calls of a worker class that mypy checks: `await WorkerStub[TrainWorker](group)(TrainWorker.save).all(path)`.

    Everything but tests calls workers through it. `WorkerGroup.call_each` says what a call raises.
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
        """A method of the worker class, sync or async; None is the group's own deadline, `math.inf` is none."""
        return WorkerCall(self._group, method.__name__, deadline_s)


@dataclass(frozen=True, slots=True)
class WorkerCall(Generic[P, R]):
    """One method of a worker class, to be called on all ranks or on one."""

    group: WorkerGroup
    method: str
    deadline_s: float | None

    async def all(self, *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Every living rank with the same arguments; results by rank."""
        return await self.group.call(self.method, *args, deadline_s=self.deadline_s)

    async def each(self, args_by_rank: Sequence[tuple[Any, ...]]) -> list[R]:
        """Every rank with arguments of its own, made by `args`; results by rank."""
        return await self.group.call_each(self.method, args_by_rank, deadline_s=self.deadline_s)

    async def at(self, rank: int, *args: P.args, **kwargs: P.kwargs) -> R:
        """One rank."""
        result: R = await self.group.call_rank(rank, self.method, *args, deadline_s=self.deadline_s)
        return result

    @staticmethod
    def args(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
        """One rank's arguments for `each`."""
        return args


class Executor(ABC):
    """Starts workers, watches them, and leaves nothing behind. Use it from one event loop; `close` it in any case."""

    name: ClassVar[str]
    shares_memory: ClassVar[bool]
    """Workers live in this process: arguments and results are passed by reference."""

    fingerprints: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """By role, of the Python environments that are not the driver's: the interpreter and versions. Once started."""

    @abstractmethod
    async def start(self, specs: Sequence[GroupSpec]) -> dict[str, WorkerGroup]:
        """Start every role; called once. When one fails nothing stays.

        Raises `PlacementError` where a place does not exist or is not free in time, and what `call_each` raises.
        """

    @abstractmethod
    def check_alive(self) -> None:
        """Raise `WorkerDiedError` if a worker is known to have died."""

    @abstractmethod
    async def watch(self) -> NoReturn:
        """Wait until a worker dies, then raise `WorkerDiedError`."""

    @abstractmethod
    async def close(self) -> None:
        """Close the workers and give everything back. May be called several times, and after any error; raises none
        of the workers' errors, but logs them."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
