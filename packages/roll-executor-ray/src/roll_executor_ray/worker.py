"""Driver-side handle of one Ray actor. Its calls begin in order; they return, or fail when its process exits.

    begin ─► future ◄── result, decoded
               ▲
    lifeline ──┴── ends when the process does

The handle reports an exit to the executor, which decides which other calls fail because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import EngineDiedError, UnsupportedError, WorkerDiedError
from roll_core.host import hostname
from roll_core.runtime.cluster.executors.base import CallFailed, Failure, Member, retrieve
from roll_core.runtime.cluster.executors.worker_server import WIRE, Codec, decode
from roll_executor_ray.exit_causes import exit_cause, num_oom_kills

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from roll_core.runtime.cluster.executors.base import GroupSpec, Peers
    from roll_core.runtime.cluster.placement import Place


def _pickle(value: Any) -> bytes:
    from ray import cloudpickle

    return bytes(cloudpickle.dumps(value))


def _unpickle(data: bytes) -> Any:
    from ray import cloudpickle

    return cloudpickle.loads(data)


PICKLED = Codec(_pickle, _unpickle)
"""For workers in the driver's environment: any object. Definitions of `__main__` are pickled by value."""
EXIT_NOTICE_S = 10.0
"""Seconds to wait for the notice of the worker's exit after a failed call."""


class RayWorker:
    """Driver-side handle of one actor. Lives on the executor's event loop."""

    def __init__(
        self,
        spec: GroupSpec,
        place: Place,
        handle: Any,
        crash_file: Path,
        on_exit: Callable[[RayWorker, WorkerDiedError], None],
    ) -> None:
        """`on_exit` is called when the process exited or is unusable."""
        self.spec, self.place = spec, place
        self.member = Member(rank=place.rank, host="?", pid=0, node=place.node, slots=place.slots)
        self.codec = PICKLED if spec.environment is None else WIRE
        self._handle, self._crash_file, self._on_exit = handle, crash_file, on_exit
        self._oom_kills_before = num_oom_kills()
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._pending: dict[asyncio.Future[Any], str] = {}
        """Method of each pending call."""
        self._num_running = 0
        """Calls that the actor has not returned from, including those that no caller awaits."""
        self._refusal: WorkerDiedError | None = None
        """Error of all further calls."""
        self.exit_error: WorkerDiedError | None = None
        """Error of its exit, if its group survives exits."""
        self.has_exited = False
        self._when_done(handle.lifeline.remote(), self._lifeline_ended)

    @property
    def is_idle(self) -> bool:
        """True if its process is alive and runs no call."""
        return not self._num_running and not self.has_exited and self._handle is not None

    def prepare(self) -> asyncio.Future[Any]:
        """Find or install the worker's Python environment."""
        return self._request("preparation of its environment", self._handle.prepare.remote(), PICKLED)

    def process_info(self) -> asyncio.Future[Any]:
        """`ProcessInfo` of its process, once that has started."""
        return self._request("start of its process", self._handle.process_info.remote(), PICKLED)

    def construct(self, place: Place, peers: Peers, env: dict[str, str]) -> asyncio.Future[Any]:
        """Construct the worker in the actor. `env` are variables that depend on the worker's host."""
        self.place = place
        env = {"MASTER_ADDR": peers.master_addr, "MASTER_PORT": str(peers.master_port), **env}
        spec = self.spec
        try:
            payload = self.codec.dumps((spec.target, place, peers, dict(spec.args), env, import_path(spec)))
        except Exception as error:
            raise UnsupportedError(f"{spec.role}: its arguments cannot be sent to another process: {error}") from error
        return self._request("start", self._handle.construct.remote(payload), self.codec)

    def begin(self, method: str, payload: Any) -> asyncio.Future[Any]:
        """Begin a call. See `WorkerGroup.begin`."""
        if self._refusal is not None:
            future: asyncio.Future[Any] = self._loop.create_future()
            future.set_exception(copy_of(self._refusal))
            return future
        number, self._number = self._number, self._number + 1
        future = self._request(method, self._handle.call.remote(number, method, payload), self.codec)

        def cancel_if_cancelled(done: asyncio.Future[Any]) -> None:
            if done.cancelled() and self._handle is not None and self._refusal is None:
                self._handle.cancel.remote(number)

        future.add_done_callback(cancel_if_cancelled)
        return future

    def stack(self) -> asyncio.Future[Any]:
        """Current stacks of its worker."""
        return self._request("stack", self._handle.stack.remote())

    def close(self, timeout_s: float) -> asyncio.Future[Any]:
        """Close the worker in the actor."""
        return self._request("close", self._handle.close.remote(timeout_s))

    def kill(self) -> None:
        """Kill its process.

        Also drops the handle. The handle may survive in a reference cycle. When the cycle is collected, Ray releases a
        reference of the actor with this id. The id may then belong to the next Ray instance of this process.
        """
        import ray

        handle, self._handle = self._handle, None
        if handle is not None:
            ray.kill(handle)

    def refuse(self, error: WorkerDiedError | None = None) -> None:
        """Let all later calls raise `error`; by default the error of a closed executor."""
        closed = WorkerDiedError(self.spec.role, self.place.rank, self.member.host, "", "its executor was closed")
        self._refusal = error or self._refusal or closed

    def fail(self, error: WorkerDiedError) -> None:
        """Let all pending and later calls raise `error`."""
        self.refuse(error)
        for future in list(self._pending):
            if not future.done():
                future.set_exception(copy_of(error))

    def _report_exit(self, error: BaseException) -> None:
        """Report the exit, described by Ray's message, the crash report, and the kernel's count of OOM kills."""
        method = next((method for future, method in self._pending.items() if not future.cancelled()), "")
        trace = _text(self._crash_file)
        oom_kills = num_oom_kills() - self._oom_kills_before if self.member.host in (hostname(), "?") else 0
        cause = exit_cause(error, pid=self.member.pid, trace=trace, oom_kills=oom_kills)
        died = WorkerDiedError(self.spec.role, self.place.rank, self.member.host, method, cause, trace or str(error))
        self._on_exit(self, died)

    def _request(self, method: str, ref: Any, codec: Codec | None = None) -> asyncio.Future[Any]:
        """Future for the result of a call. Without `codec` the result is returned as it is."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[future] = method
        self._num_running += 1
        future.add_done_callback(self._forget)

        def settle(outcome: Any, error: BaseException | None) -> None:
            self._num_running -= 1
            if future.done():
                return
            if error is not None:
                self._call_lost(future, error)
                return
            try:
                future.set_result(decode(codec, outcome) if codec else outcome)
            except CallFailed as failed:
                if isinstance(failed.failure.error, EngineDiedError):
                    self._report_exit(failed.failure.error)
                if not future.done():
                    future.set_exception(failed)
            except Exception as wrong:  # any exception of a third-party unpickling
                future.set_exception(CallFailed(Failure.of(wrong)))

        self._when_done(ref, settle)
        return future

    def _forget(self, done: asyncio.Future[Any]) -> None:
        self._pending.pop(done, None)
        retrieve(done)

    def _when_done(self, ref: Any, callback: Callable[[Any, BaseException | None], None]) -> None:
        """Call back on the event loop with the result or the error. Ray calls from its own thread."""

        def ready(done: Future[Any]) -> None:
            outcome, error = None, None
            try:
                outcome = done.result()
            except BaseException as raised:  # an exception here would be swallowed, and the call would never end
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller is left
                self._loop.call_soon_threadsafe(callback, outcome, error)

        ref.future().add_done_callback(ready)

    def _lifeline_ended(self, _outcome: None, error: BaseException | None) -> None:
        import ray

        if isinstance(error, ray.exceptions.ActorUnavailableError) and self._handle is not None:
            # A gap in the network: Ray has not declared the actor dead.
            self._when_done(self._handle.lifeline.remote(), self._lifeline_ended)
        elif error is not None:
            self.has_exited = True
            self._report_exit(error)

    def _call_lost(self, future: asyncio.Future[Any], error: BaseException) -> None:
        """Handle a call that Ray lost.

        Usually the process exited and the lifeline reports it soon, with a better error. Behind a network gap the
        process may be alive, but it has missed a call, and later calls block in its call order. Such a worker is
        killed if its group survives exits.
        """
        import ray

        def give_up_waiting() -> None:
            if future.done():
                return
            if isinstance(error, ray.exceptions.RayActorError) and self.spec.survives != "never":
                self._report_exit(error)
                self.kill()
            if not future.done():
                future.set_exception(CallFailed(Failure.of(error)))

        self._loop.call_later(EXIT_NOTICE_S, give_up_waiting)


def copy_of(error: WorkerDiedError) -> WorkerDiedError:
    """Copy of the error for another caller, without the traceback of the first one."""
    return type(error)(*error.args)


def import_path(spec: GroupSpec) -> list[str]:
    """Import path of this process for workers, which import the user's modules from there too.

    For another Python environment, packages that are installed here are left out.
    """
    path = [str(Path(entry or Path.cwd()).absolute()) for entry in sys.path]
    if spec.environment is None:
        return path
    here = {str(Path(prefix).absolute()) for prefix in (sys.prefix, sys.base_prefix)}
    installed = {line for folder in path for file in Path(folder).glob("*.pth") for line in _text(file).splitlines()}
    return [
        entry for entry in path if entry not in installed and not any(Path(entry).is_relative_to(to) for to in here)
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
