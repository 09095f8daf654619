"""Runs untrusted programs in boxes, from the side of the worker: deadlines, limits of output, results.

    with sandbox.session({"mode": "serve", "source": program}) as box:
        reply = box.request({"target": "add", "action": "call", "arguments": [1, 2]})

A box is a restricted process on this host (`box.py`), or whatever a command starts, for example a container. What it
sends is data: it is parsed as JSON and compared here, and never contains an expected result.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from roll_core.errors import RewardFailure
from roll_rewards import guest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HERE = Path(__file__).parent
START_S = 30.0
"""Maximum seconds until a box is ready to run its program. A busy host needs more than the few milliseconds of an idle
one."""
KEPT_ERRORS = 4096
"""Bytes of standard error that are kept, from its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program."""

    cpu_s: float = 6.0
    """Processor time in seconds; the kernel counts whole ones. The wall-clock limit is three times it."""
    memory_mb: int = 512
    """Address space of the program in MiB."""
    output_kb: int = 1024
    """Standard output and error together."""
    scratch_mb: int = 16
    """Files in the working directory."""

    @property
    def wall_s(self) -> float:
        """Maximum seconds of a program. On a busy host it gets only a part of the processor time."""
        return 3 * self.cpu_s


@dataclass(slots=True, kw_only=True)
class Outcome:
    """How a program ended."""

    stdout: bytes
    stderr: str
    """The last part of standard error."""
    status: int
    """Exit code, or minus the number of the signal that killed it."""
    problem: str = ""
    """The limit that the program exceeded; empty if it ended by itself."""


class ProgramEnded(Exception):
    """The program ended, or exceeded a limit, before it replied."""


class Sandbox:
    """Starts boxes. May be used from any thread."""

    def __init__(
        self,
        limits: Limits,
        *,
        processes: int = 4,
        command: Sequence[str] = (),
        accept_missing: bool = False,
    ) -> None:
        """`command` starts a Python interpreter elsewhere and isolates it; its arguments follow.

        With `accept_missing`, programs also run if the kernel cannot isolate them. At most `processes` run at a time.
        """
        self.limits, self._command, self._accept_missing = limits, list(command), accept_missing
        self._slots = threading.BoundedSemaphore(processes)
        self._server: _Server | None = None
        self._starting = threading.Lock()

    def run(self, source: str, stdin: str) -> Outcome:
        """Run a program with this standard input. Raises `RewardFailure` if no box can be started."""
        with self._slots, self.session({"mode": "script", "source": source}) as box:
            box.write(stdin.encode("utf-8", "surrogateescape"))
            return box.finish()

    def test(self, source: str, tests: str, entry: str = "", paths: Sequence[str] = ()) -> dict[str, Any]:
        """Run test code in a box, and the program that it calls in another one. Returns the result of `guest.tests`.

        Test code may import packages in the directories `paths`; the program may not.
        """
        with self._slots, self.session({"mode": "serve", "source": source}) as program:
            try:
                names = program.reply()["names"]
                program.check_names(names)
            except ProgramEnded as ended:
                return {"passed": False, "broken": False, "why": str(ended)}
            job = {"mode": "tests", "source": tests, "names": names, "entry": entry, "paths": list(paths)}
            # A limit of the program is none of the row's test code, which may send it large arguments.
            limits = replace(self.limits, output_kb=max(self.limits.output_kb, guest.MAX_FRAME >> 10))
            with self.session(job, limits) as tester:
                while True:
                    try:
                        message = tester.frame()
                    except ProgramEnded as ended:
                        return {"passed": False, "broken": False, "why": f"the tests: {ended}"}
                    if "target" not in message:
                        return message
                    try:
                        reply = program.request(message)
                    except ProgramEnded as ended:
                        return {"passed": False, "broken": False, "why": str(ended)}
                    tester.send(reply)

    def call(self, source: str, function: str, arguments: Sequence[Any]) -> Any:
        """Call a function of a program and return its value as `guest.encode` writes it.

        Raises `ProgramEnded` with the reason if it returns none.
        """
        with self._slots, self.session({"mode": "serve", "source": source}) as box:
            box.reply()
            request = {"target": function, "action": "call", "arguments": guest.encode(list(arguments), [])}
            reply = box.request(request)
            if "raised" in reply:
                raise ProgramEnded(f"{reply['raised'][0]}: {reply['message']}"[:300])
            return reply["value"]

    def session(self, job: Mapping[str, Any], limits: Limits | None = None) -> Session:
        """Start a box that runs a job of `guest`."""
        number = secrets.token_hex(8)
        box = self._by_command() if self._command else self._local(job.get("paths", ()))
        box.limits = limits or self.limits
        box.expected = number
        extra = {"announce": box.announcement, "wall_s": START_S + self.limits.wall_s} if self._command else {}
        box.send({**job, "id": number} | extra)
        return box

    def layers(self) -> dict[str, list[str]]:
        """Layers of isolation of a box: `layers`, and `missing` with reasons. Raises `RewardFailure` if refused."""
        with self.session({"mode": "script", "source": ""}) as box:
            box.finish()
            return box.report

    def close(self) -> None:
        """Kill the processes of all boxes."""
        with self._starting:
            if self._server is not None:
                self._server.close()
                self._server = None

    def _local(self, paths: Sequence[str]) -> Session:
        if sys.platform != "linux":
            raise RewardFailure(f"boxes need Linux, this is {sys.platform}")
        limits = self.limits
        with self._starting:
            if self._server is None or not self._server.is_alive():
                if self._server is not None:
                    self._server.close()
                self._server = _Server(self._accept_missing)
            server = self._server
        request = {
            "cpu_s": max(1, round(limits.cpu_s + 0.499)),
            "wall_s": limits.wall_s,
            "memory_mb": limits.memory_mb,
            "scratch_mb": limits.scratch_mb,
            "paths": list(paths),
        }
        return server.session(request, limits)

    def _by_command(self) -> Session:
        source = (HERE / "guest.py").read_text(encoding="utf-8") + "\nmain()\n"
        try:
            process = subprocess.Popen(
                [*self._command, "-I", "-c", source],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise RewardFailure(f"sandbox_command {self._command[0]}: {error.strerror}") from error
        pipes = [pipe.fileno() for pipe in (process.stdin, process.stdout, process.stderr) if pipe is not None]
        fds = [os.dup(fd) for fd in pipes]
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return Session(fds, None, self.limits, process=process)


class _Server:
    """The process that starts boxes, `box.py`."""

    def __init__(self, accept_missing: bool) -> None:
        self._scratch = tempfile.mkdtemp(prefix="roll-box-")
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        options = {"scratch": self._scratch, "accept_missing": accept_missing}
        with theirs:
            # Nothing of this process's environment: it may contain keys.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(HERE / "box.py"), str(theirs.fileno()), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def session(self, request: Mapping[str, Any], limits: Limits) -> Session:
        stdin, ours_in = os.pipe()
        ours_out, stdout = os.pipe()
        ours_err, stderr = os.pipe()
        ours, control = socket.socketpair()
        theirs = [stdin, stdout, stderr, control.fileno()]
        try:
            socket.send_fds(self._connection, [json.dumps(request).encode()], theirs)
        except OSError as error:
            for fd in (ours_in, ours_out, ours_err):
                os.close(fd)
            ours.close()
            raise RewardFailure(f"the server of boxes exited ({error.strerror})") from error
        finally:
            for fd in theirs[:3]:
                os.close(fd)
            control.close()
        return Session([ours_in, ours_out, ours_err], ours, limits)

    def close(self) -> None:
        self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)


@dataclass(slots=True)
class Session:
    """One box: its standard streams and its end. Leaving the context kills it."""

    fds: list[int]
    control: socket.socket | None
    limits: Limits
    process: subprocess.Popen[bytes] | None = None
    num_repeated: int = 0
    """Bytes of the last request. A reply may repeat its arguments, which are not the program's output."""
    expected: str = ""
    """Number that the next reply must have. It is random: a program cannot reply to a request that it has not read."""
    announcement: str = field(default_factory=lambda: f"{secrets.token_hex(16)}\n")
    """What a box of a command writes to standard error before it runs the program."""
    began: bool = False
    """True once the announcement arrived. A command that ends without it did not run the program."""
    report: dict[str, list[str]] = field(default_factory=dict)
    """Layers of isolation that are in force, and missing ones."""
    _out: bytearray = field(default_factory=bytearray)
    _err: bytearray = field(default_factory=bytearray)
    _events: bytearray = field(default_factory=bytearray)
    _pending: bytearray = field(default_factory=bytearray)
    _num_bytes: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _open: set[int] = field(default_factory=set)
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for fd in self.fds:
            os.set_blocking(fd, False)
        for fd in self._sources():
            self._selector.register(fd, selectors.EVENT_READ)
            self._open.add(fd)
        self._open.add(self.fds[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.control is not None:
            self.control.close()
        for fd in self.fds:
            if fd != self.fds[0] or fd in self._open:
                os.close(fd)

    def send(self, message: Mapping[str, Any]) -> int:
        """Write a frame. Returns its size."""
        payload = json.dumps(message).encode("ascii")
        self.write(struct.pack("!I", len(payload)) + payload)
        return len(payload)

    def write(self, data: bytes) -> None:
        """Add to the program's standard input; `frame` and `finish` send it."""
        self._pending += data

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply to it. Raises `ProgramEnded`."""
        self.expected = secrets.token_hex(8)
        self.num_repeated = self.send({**message, "id": self.expected})
        return self.reply()

    def reply(self) -> dict[str, Any]:
        """The reply to the last request. Raises `ProgramEnded`, also for a reply to none."""
        reply = self.frame()
        if reply.get("id") != self.expected:
            raise self._ended("the program wrote replies itself")
        if "raised" in reply and not (_are_texts(reply["raised"]) and isinstance(reply.get("message"), str)):
            raise self._ended("the program wrote an invalid reply")
        if "raised" not in reply and "value" not in reply and "names" not in reply:
            raise self._ended("the program wrote an invalid reply")
        return reply

    @staticmethod
    def check_names(names: Any) -> None:
        """Raise `ProgramEnded` unless these are names, with whether each can be called."""
        if not isinstance(names, dict) or not all(isinstance(value, bool) for value in names.values()):
            raise ProgramEnded("the program wrote an invalid reply")

    def frame(self) -> dict[str, Any]:
        """The next message of the box. Raises `ProgramEnded` if there is none, or it is not valid."""
        while True:
            size = struct.unpack("!I", self._out[:4])[0] if len(self._out) >= 4 else None
            if size is not None and size > self._max_bytes():
                raise self._ended(f"a value of {size} bytes, more than output_limit_kb {self.limits.output_kb}")
            if size is not None and len(self._out) >= 4 + size:
                payload = bytes(self._out[4 : 4 + size])
                del self._out[: 4 + size]
                self._num_bytes -= 4 + size
                try:
                    message = json.loads(payload)
                except (ValueError, RecursionError) as error:
                    raise self._ended("the program wrote an invalid reply") from error
                if not isinstance(message, dict):
                    raise self._ended("the program wrote an invalid reply")
                return message
            problem = self._pump()
            if problem:
                raise self._ended(problem)
            if self.fds[1] not in self._open:
                raise ProgramEnded(self._how_it_ended())

    def _ended(self, why: str) -> ProgramEnded:
        """The error of a program that ended so. Raises `RewardFailure` if a command did not run the program."""
        if self.process is not None and not self.began:
            self.finish()
        return ProgramEnded(why)

    def finish(self) -> Outcome:
        """Close the program's standard input and wait until it ends."""
        problem = ""
        closing = True
        while not problem and self._sources() & self._open:
            if closing and not self._pending:
                self._close_input()
                closing = False
            problem = self._pump()
        if not problem and self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=max(self._deadline() - time.monotonic(), 0.0))
        status = -signal.SIGKILL if problem else self._status()
        if self.process is not None and not self.began:
            raise RewardFailure(f"sandbox_command did not run the program: {describe(self._outcome(status, problem))}")
        return self._outcome(status, problem or self._limit())

    def _outcome(self, status: int, problem: str) -> Outcome:
        return Outcome(stdout=bytes(self._out), stderr=self._errors(), status=status, problem=problem)

    def _sources(self) -> set[int]:
        return {*self.fds[1:], *([self.control.fileno()] if self.control is not None else [])}

    def _max_bytes(self) -> int:
        return (self.limits.output_kb << 10) + self.num_repeated

    def _deadline(self) -> float:
        return self._started + START_S + self.limits.wall_s

    def _pump(self) -> str:
        """Move data until something arrives. Returns the limit that was exceeded, or an empty text.

        Raises `RewardFailure` if the box could not be started.
        """
        left = self._deadline() - time.monotonic()
        if left <= 0:
            return f"exceeded {self.limits.wall_s:g} s"
        self._watch_input()
        for key, _ in self._selector.select(left):
            fd = key.fd
            if fd == self.fds[0]:
                self._write_some()
                continue
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(fd)
                self._open.discard(fd)
            elif fd == self.fds[1]:
                self._out += data
                self._num_bytes += len(data)
            elif fd == self.fds[2]:
                self._num_bytes += len(data)
                self._read_errors(data)
            else:
                self._events += data
                self._read_report()
        if self._num_bytes > self._max_bytes():
            return f"wrote more than output_limit_kb {self.limits.output_kb}"
        return ""

    def _read_errors(self, data: bytes) -> None:
        self._err += data
        before, marker, after = self._err.partition(self.announcement.encode())
        if marker:
            self.began, self._err = True, before + after
        self._err = self._err[-KEPT_ERRORS:]

    def _watch_input(self) -> None:
        registered = self.fds[0] in self._selector.get_map()
        has_pending = bool(self._pending) and self.fds[0] in self._open
        if has_pending and not registered:
            self._selector.register(self.fds[0], selectors.EVENT_WRITE)
        elif registered and not has_pending:
            self._selector.unregister(self.fds[0])

    def _write_some(self) -> None:
        try:
            written = os.write(self.fds[0], memoryview(self._pending)[: 1 << 16])
        except BlockingIOError:
            return
        except OSError:  # the program has closed its input or ended
            self._pending.clear()
            self._close_input()
            return
        del self._pending[:written]

    def _close_input(self) -> None:
        if self.fds[0] in self._selector.get_map():
            self._selector.unregister(self.fds[0])
        if self.fds[0] in self._open:
            self._open.discard(self.fds[0])
            os.close(self.fds[0])

    def _lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in bytes(self._events).split(b"\n")[:-1] if line]

    def _read_report(self) -> None:
        lines = self._lines()
        if lines and not self.report:
            if "error" in lines[0]:
                raise RewardFailure(lines[0]["error"])
            self.report = lines[0]

    def _end(self) -> dict[str, Any]:
        lines = self._lines()
        if len(lines) < 2:
            raise RewardFailure("the box ended without a report: was it killed from outside?")
        return lines[1]

    def _status(self) -> int:
        if self.process is not None:
            return self.process.returncode if self.process.returncode is not None else -signal.SIGKILL
        return int(self._end()["status"])

    def _limit(self) -> str:
        """The limit that the kernel or the keeper enforced."""
        if self.process is not None:
            return ""
        end = self._end()
        if end["late"]:
            return f"exceeded {self.limits.wall_s:g} s"
        if end["status"] == -signal.SIGKILL and end["cpu_s"] >= self.limits.cpu_s:
            return f"exceeded {self.limits.cpu_s:g} s of processor time"
        return ""

    def _errors(self) -> str:
        return bytes(self._err).decode("utf-8", "replace")

    def _how_it_ended(self) -> str:
        outcome = self.finish()
        return describe(outcome)


def describe(outcome: Outcome) -> str:
    """One line about the end of a program: a limit, a signal, its exception or its exit code."""
    if outcome.problem:
        return outcome.problem
    if outcome.status < 0:
        return f"killed by {signal.Signals(-outcome.status).name}"
    lines = outcome.stderr.strip().splitlines()
    last = f": {lines[-1][:200]}" if lines else ""
    return f"exit code {outcome.status}{last}"


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


# -- is isolation given? -----------------------------------------------------------------------------------------------

PROBE = r"""
import ctypes, fcntl, os, shutil, socket
def possible(act):
    try:
        act()
    except BaseException:
        return False
    return True
home, library, parent = CANARY, LIBRARY, PARENT  # the library may be read
call = ctypes.CDLL(None, use_errno=True).syscall
def succeeds(*arguments):
    if call(*arguments) < 0:
        raise OSError
open(library).read()
HOW = (ctypes.c_ulong * 3)(os.O_TRUNC)
print([name for name, act in {
    "read a file outside": lambda: open(home).read(),
    "write a file outside": lambda: open(home, "a").write("x"),
    "create a file outside": lambda: open(home + ".new", "w").write("x"),
    "create a file beside a library": lambda: open(library + ".new", "w").write("x"),
    "create a directory beside a library": lambda: os.mkdir(library + ".directory"),
    "change the mode of a file": lambda: os.chmod(library, 0o777),
    "change the time of a file": lambda: os.utime(library, (0, 0)),
    "set an attribute of a file": lambda: os.setxattr(library, "user.x", b"x"),
    "write a library": lambda: open(library, "a").write("x"),
    "empty a library by its path": lambda: os.truncate(library, 0),
    "empty a library by opening it": lambda: os.open(library, os.O_RDONLY | os.O_TRUNC),
    "empty a library by opening it for nothing": lambda: os.open(library, os.O_ACCMODE | os.O_TRUNC),
    "empty a library by creating it": lambda: os.open(library, os.O_CREAT | os.O_TRUNC),
    "empty a library by opening it anew": lambda: succeeds(437, -100, library.encode(), HOW, 24),
    "rename a library": lambda: os.rename(library, library + ".away"),
    "move a library here": lambda: os.rename(library, "here"),
    "link a library": lambda: os.link(library, library + ".link"),
    "delete a library": lambda: os.unlink(library),
    "lock a library": lambda: fcntl.flock(os.open(library, os.O_RDONLY), fcntl.LOCK_SH),
    "lock a part of a library": lambda: fcntl.lockf(os.open(library, os.O_RDONLY), fcntl.LOCK_SH),
    "open a socket": lambda: socket.socket(),
    "connect": lambda: socket.socket(socket.AF_UNIX).connect("/run/docker.sock"),
    "start a process": lambda: os.fork() or os._exit(0),
    "signal another process": lambda: os.kill(parent, 0),
    "read /proc": lambda: open("/proc/%d/status" % parent).read(),
    "raise a limit": lambda: bytearray(3 << 30),
}.items() if possible(act)])
"""


@cache
def probe() -> str:
    """Why this host cannot isolate programs; empty if it can. Tries to escape from a box, once per process."""
    sandbox = Sandbox(Limits(cpu_s=5.0))
    try:
        with tempfile.TemporaryDirectory(prefix="roll-probe-") as directory:
            canary, library = Path(directory, "canary"), Path(directory, "readable", "library")
            library.parent.mkdir()
            for path in (canary, library):
                path.write_text("canary", encoding="utf-8")
            source = PROBE.replace("CANARY", repr(str(canary))).replace("LIBRARY", repr(str(library)))
            job = {
                "mode": "script",
                "source": source.replace("PARENT", str(os.getpid())),
                "paths": [str(library.parent)],
            }
            with sandbox.session(job) as box:
                outcome = box.finish()
            left = {path.relative_to(directory).as_posix() for path in Path(directory).rglob("*")}
            is_intact = left == {"canary", "readable", "readable/library"}
            is_intact = is_intact and canary.read_text() == library.read_text() == "canary"
        if outcome.status or outcome.stdout.strip() != b"[]" or not is_intact:
            output = outcome.stdout.decode("utf-8", "replace").strip() or describe(outcome)
            return f"a program can escape from its box: {output[:300]}"
    except RewardFailure as failure:
        return str(failure)
    finally:
        sandbox.close()
    return ""
