"""Runs a function on several ranks, each in its own process, with timeouts and without leftover processes.

    RankHost --socket--> rank_host.py (imports torch once) --fork--> rank 0, rank 1, ...    new processes for each call

Calls and results are pickled, and both ends are our own: a module-level function, plain arguments and plain results
(numpy arrays rather than tensors).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

START_S = 240.0
"""Time limit in seconds for the host to import its preloaded modules."""
PORTS = 20_000, 32_000
"""Ports below those that Linux and macOS assign to outgoing connections."""
GRACE_S = 15.0
"""Seconds after a call's timeout in which the host reports the ranks that timed out. Then the host itself is considered
failed."""
RESERVED = 64
"""Number of ports of `free_port` that a process keeps reserved, each with an open socket."""
_reserved: deque[int] = deque()
"""Descriptors of these sockets."""


class RanksFailedError(AssertionError):
    """A rank raised, died or timed out. The message names the rank and shows the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCall:
    """One call on all ranks: `function(rank, *arguments)`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_ranks: int
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResults:
    """Results of a call, or its failure."""

    results: tuple[Any, ...] = ()
    failure: str = ""


class RankHost:
    """Starts ranks with fixed environment variables and preloaded modules. The host process starts on first use."""

    def __init__(self, *, environment: Mapping[str, str] | None = None, preload: Sequence[str] = ()) -> None:
        """`environment` is set before anything is imported; modules in `preload` are imported once for all ranks."""
        self._environment, self._preload = dict(environment or {}), tuple(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(
        self, function: Callable[..., Any], *arguments: Any, num_ranks: int = 1, timeout_s: float = 60.0
    ) -> tuple[Any, ...]:
        """Run `function(rank, *arguments)` on ranks 0 to `num_ranks - 1` and return the results in rank order.

        `function` must be importable by its module and name. Raises `RanksFailedError` with the first failure, and
        kills the ranks that still run.
        """
        connection = self._started()
        call = RankCall(function=function, arguments=arguments, num_ranks=num_ranks, timeout_s=timeout_s)
        try:
            connection.send(call)
            if not connection.poll(timeout_s + GRACE_S):
                self.close()
                raise RanksFailedError(f"the host of the ranks did not return within {timeout_s + GRACE_S:.0f} s")
            answer: RankResults = connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise RanksFailedError(f"the host of the ranks exited: {type(error).__name__}: {error}") from error
        except BaseException:  # an interrupt: the next call would receive this call's late result
            self.close()
            raise
        if answer.failure:
            raise RanksFailedError(answer.failure)
        return answer.results

    def close(self) -> None:
        """Stop the host and its ranks. Idempotent; the next call starts a new host."""
        atexit.unregister(self.close)
        if self._connection is not None:
            self._connection.close()  # the host kills its ranks once this connection is closed
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
        path = {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
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
            problem = "it exited while importing the preloaded modules; see its output"
        if problem:
            self.close()
            raise RanksFailedError(f"the host of the ranks did not start: {problem}")
        return self._connection


@cache
def shared_host(environment: tuple[tuple[str, str], ...] = (), preload: tuple[str, ...] = ()) -> RankHost:
    """Return the host with these settings that all callers in this process share: it imports its modules once.

    It ends with the process; after a call whose ranks could not be ended, the next call starts another.
    """
    return RankHost(environment=dict(environment), preload=preload)


def free_port() -> int:
    """Return a free local port that the system does not assign to outgoing connections, and reserve it.

    The reserving socket is bound but does not listen: sockets with SO_REUSEADDR, such as those of torch's stores, can
    bind the same port, and other calls of this function, in any process, cannot return it. The last `RESERVED` ports
    of a process stay reserved.
    """
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _reserved.append(probe.detach())
            if len(_reserved) > RESERVED:
                os.close(_reserved.popleft())
            return port
