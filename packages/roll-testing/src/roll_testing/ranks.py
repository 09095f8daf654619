"""Runs a function on several ranks at once, each a process of its own, with deadlines and nothing left behind.

    RankHost --socket--> rank_host.py (torch is imported once) --fork--> rank 0, rank 1, ...    new ones for each call

What travels between them is pickled, by and for ourselves: a module-level function and plain arguments, and its plain
results (numpy arrays rather than tensors).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

START_S = 240.0
"""Until the host has imported what it preloads."""
PORTS = 20_000, 32_000
"""Below those from which Linux and macOS take one for a connection."""
GRACE_S = 15.0
"""The host says itself who did not answer; after so much longer it is given up."""


class RanksFailedError(AssertionError):
    """A rank raised, died, or did not answer in time; the message says which, and shows what it last did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call on all ranks: `function(rank, *arguments)`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_ranks: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a call."""

    results: tuple[Any, ...] = ()
    failure: str = ""


class RankHost:
    """Starts ranks. One per set of environment variables and preloaded modules; started on first use."""

    def __init__(self, *, environment: Mapping[str, str] | None = None, preload: Sequence[str] = ()) -> None:
        """`environment` is set before anything is imported; modules in `preload` are imported once, for all ranks."""
        self._environment, self._preload = dict(environment or {}), tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, num_ranks: int = 1, timeout_s: float = 60.0
    ) -> tuple[Any, ...]:
        """`function(rank, *arguments)` on ranks 0 to `num_ranks - 1`; their results in order.

        `function` must be importable by its module and name. Raises `RanksFailedError` with the first failure; ranks
        that then still run are killed.
        """
        connection = self._started()
        call = Call(function=function, arguments=arguments, num_ranks=num_ranks, timeout_s=timeout_s)
        try:
            connection.send(call)
            if not connection.poll(timeout_s + GRACE_S):
                self.close()
                raise RanksFailedError(f"the host of the ranks did not answer within {timeout_s + GRACE_S:.0f} s")
            answer: Answer = connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise RanksFailedError(f"the host of the ranks died: {type(error).__name__}: {error}") from error
        except BaseException:  # an interrupt: an answer that comes later would be taken for that of the next call
            self.close()
            raise
        if answer.failure:
            raise RanksFailedError(answer.failure)
        return answer.results

    def close(self) -> None:
        """End the host and its ranks. May be called several times; the next call starts anew."""
        atexit.unregister(self.close)
        if self._connection is not None:
            self._connection.close()  # the host kills its ranks when nobody listens any more
            self._connection = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process.kill()
            self._process.wait()
            self._process = None

    def _started(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "roll_testing.rank_host", str(theirs.fileno()), *self._preload]
        path = {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
        with theirs:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **path, **self._environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        atexit.register(self.close)
        if not self._connection.poll(START_S):
            self.close()
            raise RanksFailedError(f"the host of the ranks did not start within {START_S:.0f} s")
        try:
            problem: str = self._connection.recv()
        except EOFError:
            problem = "it died while it imported what it preloads; its own output says why"
        if problem:
            self.close()
            raise RanksFailedError(f"the host of the ranks did not start: {problem}")
        return self._connection


def free_port() -> int:
    """A port on which nothing listens just now, and that the system does not give to connections that others open."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
