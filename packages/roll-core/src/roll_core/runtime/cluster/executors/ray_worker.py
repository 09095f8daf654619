"""Driver-side handle of one Ray actor. Its calls begin in order; they return, or fail when its process exits.

    begin ─► future ◄── answer, decoded
               ▲
    lifeline ──┴── ends when the process does

The handle reports an exit to the executor, which decides which other calls fail because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from roll_core.errors import EngineDiedError, UnsupportedError, WorkerDiedError
from roll_core.host import hostname, num_oom_kills
from roll_core.runtime.cluster.executors.calls import CallFailed, Failure, Member, retrieve
from roll_core.runtime.cluster.executors.codecs import PICKLED, WIRE, decode
from roll_core.runtime.cluster.executors.process_exit import cause_of_death

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from roll_core.runtime.cluster.executors.base import GroupSpec, Peers
    from roll_core.runtime.cluster.executors.codecs import Codec
    from roll_core.runtime.cluster.placement import Place

DEATH_NEWS_S = 10.0
"""Seconds to wait for the notice of the worker's exit after a failed call."""


class RayWorkerOwner(Protocol):
    """Interface of the executor that a `RayWorker` uses."""

    @property
    def death(self) -> WorkerDiedError | None:
        """The exit of a worker that ends the executor."""
        ...

    @property
    def is_closing(self) -> bool:
        """True once the executor ignores exits of its workers."""
        ...

    def death_of(self, worker: RayWorker, error: BaseException) -> None:
        """A worker's process exited, or cannot be used any more."""
        ...

    def give_up(self, worker: RayWorker, death: WorkerDiedError) -> None:
        """Kill a worker that missed its heartbeats."""
        ...


class RayWorker:
    """Driver-side handle of one actor. Lives on the executor's event loop."""

    def __init__(self, executor: RayWorkerOwner, spec: GroupSpec, place: Place, handle: Any, crash_file: Path) -> None:
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
        """Method of each pending call."""
        self._unanswered = 0
        self.interface = ""
        """Network interface that the worker uses to reach its peers; empty if it need not be set."""
        self.is_dead = False
        self.death: WorkerDiedError | None = None
        """Error of its exit, if its group survives exits."""
        self._on_answer(handle.lifeline.remote(), self._lifeline_ended)

    @property
    def is_idle(self) -> bool:
        """True if its process is alive and runs no call. Calls without a waiting caller count as running."""
        return not self._unanswered and not self.is_dead and self._handle is not None

    def prepare(self) -> asyncio.Future[Any]:
        """Find or install the worker's Python environment."""
        return self._ask("preparation of its environment", self._handle.prepare.remote(), PICKLED)

    def greet(self) -> asyncio.Future[Any]:
        """Wait until its process has started."""
        return self._ask("start of its process", self._handle.greet.remote(), PICKLED)

    def make(self, place: Place, peers: Peers) -> asyncio.Future[Any]:
        """Construct the worker in the actor."""
        self.place = place
        env = {"MASTER_ADDR": peers.master_addr, "MASTER_PORT": str(peers.master_port)}
        if self.interface:
            from roll_core.runtime.cluster.executors.ray_host import GLOO_INTERFACE

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
            if done.cancelled() and self._handle is not None and not self._executor.is_closing:
                self._handle.cancel.remote(number)

        future.add_done_callback(tell_if_cancelled)
        return future

    def stack(self) -> asyncio.Future[Any]:
        """Current stacks of its worker."""
        return self._ask("stack", self._handle.stack.remote())

    def close(self, timeout_s: float) -> asyncio.Future[Any]:
        """Close the worker in the actor."""
        return self._ask("close", self._handle.close.remote(timeout_s))

    def kill(self) -> None:
        """Kill its process.

        Also drops the handle. The handle may survive in a reference cycle. When the cycle is collected, Ray releases a
        reference of the actor with this id. The id may then belong to the next Ray instance of this process.
        """
        import ray

        handle, self._handle = self._handle, None
        if handle is not None:
            ray.kill(handle)

    def fail_pending(self, death: WorkerDiedError) -> None:
        """Let every pending call raise this error."""
        for future in list(self._pending):
            if not future.done():
                future.set_exception(again(death))

    def describe_death(self, error: BaseException) -> WorkerDiedError:
        """Describe an exit by Ray's message, the process's own crash report, and the kernel's count of OOM kills."""
        method = next((method for future, method in self._pending.items() if not future.cancelled()), "")
        trace = _text(self._crash_file)
        struck = num_oom_kills() - self._oom_kills_before if self.member.host in (hostname(), "?") else 0
        cause = cause_of_death(error, pid=self.member.pid, trace=trace, oom_kills=struck)
        return WorkerDiedError(self.spec.role, self.place.rank, self.member.host, method, cause, trace or str(error))

    def _ask(self, method: str, ref: Any, codec: Codec | None = None) -> asyncio.Future[Any]:
        """Future for the result of a call. Without `codec` the result is returned as it is."""
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
            except Exception as wrong:  # any exception of a third-party unpickling
                future.set_exception(CallFailed(Failure.of(wrong)))

        self._on_answer(ref, answered)
        return future

    def _forget(self, done: asyncio.Future[Any]) -> None:
        self._pending.pop(done, None)
        retrieve(done)

    def _on_answer(self, ref: Any, callback: Callable[[Any, BaseException | None], None]) -> None:
        """Call back on the event loop with the result or the error. Ray calls from its own thread."""

        def ready(done: Future[Any]) -> None:
            answer, error = None, None
            try:
                answer = done.result()
            except BaseException as raised:  # an exception here would be swallowed, and the call would never end
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is left
                self._loop.call_soon_threadsafe(callback, answer, error)

        ref.future().add_done_callback(ready)

    def _lifeline_ended(self, _answer: None, error: BaseException | None) -> None:
        import ray

        if isinstance(error, ray.exceptions.ActorUnavailableError):
            # A gap in the network: Ray has not declared the actor dead.
            self._on_answer(self._handle.lifeline.remote(), self._lifeline_ended)
        elif error is not None:
            self.is_dead = True
            self._executor.death_of(self, error)

    def _unreachable(self, future: asyncio.Future[Any], error: BaseException) -> None:
        """Handle a call that Ray lost.

        Usually the process exited and the lifeline reports it soon, with a better error. Behind a network gap the
        process may be alive, but it has missed a call, and later calls block in its call order. Such a worker is given
        up if its group survives exits.
        """
        import ray

        def give_up() -> None:
            if future.done():
                return
            if isinstance(error, ray.exceptions.RayActorError) and self.spec.survives != "never":
                self._executor.give_up(self, self.describe_death(error))
            if not future.done():
                future.set_exception(CallFailed(Failure.of(error)))

        self._loop.call_later(DEATH_NEWS_S, give_up)

    def _dead_already(self, death: WorkerDiedError) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        future.set_exception(again(death))
        return future


def again(death: WorkerDiedError) -> WorkerDiedError:
    """Copy of the error for another caller, without the traceback of the first one."""
    return type(death)(*death.args)


def codec_of(spec: GroupSpec) -> Codec:
    """Codec for the calls of a role."""
    return PICKLED if spec.environment is None else WIRE


def import_path(spec: GroupSpec) -> list[str]:
    """Import path of this process for workers, which import the user's modules from there too.

    For another Python environment, packages that are installed here are left out.
    """
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
