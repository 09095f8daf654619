"""Pool of reward processes that can be killed: deadlines hold even inside C code, whatever the scored text contains."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from roll_core import reward_process
from roll_core.errors import RewardFailure
from roll_core.reward_process import READY, encode, receive

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)
GROW_S = 0.1
"""Seconds that a job waits for a free process before another one is started."""


class RewardPool:
    """Pool of up to `size` child processes that each load one target. `call` may be used from any thread.

    The target is `"module:attribute"` of a function that takes `options` and returns the function that handles jobs.
    That may have an attribute `facts`, which `start` returns. Arguments, options, results and facts are JSON. A process
    that misses a deadline or exits is replaced when it is next needed.
    """

    def __init__(
        self,
        target: str,
        options: Mapping[str, Any],
        *,
        size: int,
        start_timeout_s: float,
        memory_mb: int | None = None,
        owner: str = "",
        close_s: float = 0.0,
    ) -> None:
        """`owner` names the package whose code raised, in failures.

        If `close_s` is given, `close` lets idle processes call their job handler's `close` method, if it has one. This
        may take at most `close_s` seconds.
        """
        here = os.getcwd()
        self._hello = {
            "target": target,
            "options": dict(options),
            "memory_mb": memory_mb,
            "sys_path": [here, *(entry for entry in sys.path if entry not in ("", here))],
        }
        self._size, self._start_timeout_s, self._close_s, self._owner = size, start_timeout_s, close_s, owner
        self._numbers = itertools.count()
        self._logged = ""
        self._changed = threading.Condition()
        self._idle: list[_Child] = []
        self._children: set[_Child] = set()
        self._closed = False

    def start(self, *, wait: bool) -> Any:
        """Start the first process; with `wait`, block until its target is loaded, and return its `facts` or None.

        Raises `RewardFailure` if that fails.
        """
        child = self._take()
        try:
            if wait:
                child.await_ready(self._start_timeout_s)
        except BaseException:
            self._discard(child)
            raise
        self._release(child)
        return child.facts

    def call(self, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Call the target with `arguments`. Blocks until a process is free, and then for at most `timeout_s` seconds.

        Raises `RewardFailure` if the target raised, the deadline passed, or the process exited.
        """
        number = next(self._numbers)
        job = encode({"number": number, "arguments": dict(arguments), "seconds": timeout_s})
        try:
            reply = self._run(number, job, timeout_s)
        except _NeverBegan:
            reply = self._run(number, job, timeout_s)
        if "error" not in reply:
            return reply["result"]
        reason, trace = reply["error"], reply.get("trace")
        if trace is not None:
            if self._owner:
                reason = f"{self._owner}: {reason}"
            if reason != self._logged:  # a bug fails in the same way for every sample
                self._logged = reason
                log.info("%s\n%s", reason, trace)
        raise RewardFailure(reason)

    def close(self) -> None:
        """Kill the processes. Running calls fail."""
        with self._changed:
            self._closed = True
            children, self._children = self._children, set()
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        if self._close_s:
            for child in idle:
                child.stop_sending()
            deadline = time.monotonic() + self._close_s
            for child in idle:
                child.await_exit(deadline)
        for child in children:
            child.kill()
        for child in idle:
            child.close()

    def _run(self, number: int, job: bytes, timeout_s: float) -> Mapping[str, Any]:
        child = self._take()
        try:
            child.await_ready(self._start_timeout_s)
            reply = child.run(number, job, timeout_s)
        except BaseException:
            # The process may still reply to this job. No other job can use it.
            self._discard(child)
            raise
        self._release(child)
        return reply

    def _take(self) -> _Child:
        """Take a process that no other caller uses. The first process may still be loading its target."""
        started = time.monotonic()
        with self._changed:
            while not self._closed:
                while self._idle:
                    child = self._idle.pop()
                    if child.is_alive():
                        return child
                    self._children.discard(child)
                    child.close()
                if not self._children:
                    return self._new_child()
                waited = time.monotonic() - started >= GROW_S
                if waited and len(self._children) < self._size and all(child.ready for child in self._children):
                    self._grow()
                self._changed.wait(GROW_S)
        raise RewardFailure("the reward has been closed")

    def _new_child(self) -> _Child:
        child = _Child(self._hello)
        self._children.add(child)
        return child

    def _grow(self) -> None:
        """Start an additional process, if the system has room for one. Otherwise jobs wait for the others."""
        try:
            child = self._new_child()
        except OSError as error:  # no memory, or too many processes or files
            reason = f"{len(self._children)} of {self._size} reward processes run, another one cannot start: {error}"
            if reason != self._logged:
                self._logged = reason
                log.warning("%s", reason)
        else:
            threading.Thread(target=self._make_ready, args=(child,), daemon=True).start()

    def _make_ready(self, child: _Child) -> None:
        """Wait until an additional process has loaded its target. No job waits for it."""
        try:
            child.await_ready(self._start_timeout_s)
        except Exception as failure:  # jobs continue with the other processes
            if not self._closed:
                log.warning("one of %d reward processes failed: %s", self._size, failure)
            self._discard(child)
        else:
            self._release(child)

    def _release(self, child: _Child) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(child)
                self._changed.notify()
                return
        child.close()

    def _discard(self, child: _Child) -> None:
        with self._changed:
            self._children.discard(child)
            self._changed.notify()
        child.close()


class _NeverBegan(RewardFailure):
    """The process exited before it read the job, so another process can run it."""


class _Child:
    """Parent's side of one reward process. Used by one thread at a time, except `kill`."""

    def __init__(self, hello: Mapping[str, Any]) -> None:
        self.ready = False
        self.facts: Any = None
        self._killing = threading.Lock()
        self._killed = False
        self._connection, theirs = socket.socketpair()
        with theirs:
            # A session of its own: only the parent handles Ctrl-C, and killing the process group also ends what a
            # function started. `-P` keeps this package's directory out of the child's module path.
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", reward_process.__file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except BaseException:
                self._connection.close()
                raise
        self._connection.settimeout(30.0)
        with contextlib.suppress(OSError):  # if it has already exited, `await_ready` reports how
            self._connection.sendall(encode(hello))

    def await_ready(self, timeout_s: float) -> None:
        """Return once the target is loaded. Raises `RewardFailure` if that fails."""
        if self.ready:
            return
        reply = self._receive(READY, time.monotonic() + timeout_s, timeout_s, "starting")
        if "error" in reply:
            log.info("a reward process failed to start\n%s", reply.get("trace", ""))
            raise RewardFailure(f"the reward process failed to start: {reply['error']}")
        self.ready, self.facts = True, reply["result"]

    def run(self, number: int, job: bytes, timeout_s: float) -> Mapping[str, Any]:
        """Send job `number` and return its reply."""
        deadline = time.monotonic() + timeout_s
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(job)
        except TimeoutError:
            raise _timed_out("scoring", timeout_s) from None
        except OSError as error:
            raise _NeverBegan(self._how_it_exited("scoring")) from error
        return self._receive(number, deadline, timeout_s, "scoring")

    def is_alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def stop_sending(self) -> None:
        """Close the sending side: an idle process then closes its target and exits."""
        with contextlib.suppress(OSError):  # it has already exited
            self._connection.shutdown(socket.SHUT_WR)

    def await_exit(self, deadline: float) -> None:
        """Return once the process has exited, or at the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(deadline - time.monotonic(), 1e-3))

    def kill(self) -> None:
        """Kill the process and all that it started, and wait for its exit. May be called from any thread."""
        with self._killing:
            if not self._killed:
                self._killed = True
                with contextlib.suppress(ProcessLookupError, PermissionError):  # already exited
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def close(self) -> None:
        """Kill the process and close the connection. Only for the thread that uses it."""
        self.kill()
        self._connection.close()

    def _receive(self, number: int, deadline: float, timeout_s: float, doing: str) -> Mapping[str, Any]:
        """Reply with this number. Raises `RewardFailure` for a reply with another number or from another process."""
        self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        try:
            reply = receive(self._connection)
        except TimeoutError:
            raise _timed_out(doing, timeout_s) from None
        except ConnectionResetError as error:  # it exited without reading the job
            raise _NeverBegan(self._how_it_exited(doing)) from error
        except OSError as error:
            raise RewardFailure(self._how_it_exited(doing)) from error
        if reply is None:
            raise RewardFailure(self._how_it_exited(doing))
        expected = (number, self._process.pid)
        if (answered := (reply.get("number"), reply.get("pid"))) != expected:
            raise RewardFailure(
                f"the reward process sent the reply of another job or process while {doing}: number and pid are"
                f" {answered}, expected {expected}; does the reward fork, or write to sockets that it did not open?"
            )
        return reply

    def _how_it_exited(self, doing: str) -> str:
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return f"the reward process closed its connection while {doing}"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
        return f"the reward process {how} while {doing}"


def _timed_out(doing: str, timeout_s: float) -> RewardFailure:
    return RewardFailure(f"{doing} took longer than {timeout_s:g} s and was stopped")
