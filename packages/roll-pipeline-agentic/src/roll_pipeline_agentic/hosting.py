"""Runs environments inline, in threads, in processes or in another interpreter, with a deadline for each call.

    episode ── slot() (concurrency) ──► attempt ── environment() ──► instance ──► reset, step, score ──► close
                                                                       │
                                               deadline or exception ──┴──► EnvironmentFailure with the package

A hanging call is cancelled (inline), abandoned (thread) or killed (process). It never blocks other episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import queue
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.data.media import received_message
from roll_core.errors import DataError, EnvironmentFailure
from roll_pipeline_agentic.calls import check_result, result_from, wire_arguments
from roll_pipeline_agentic.environment_process import (
    BlockingCalls,
    CallFailed,
    described,
    kill_process,
    start_process,
)
from roll_pipeline_agentic.recording import off_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from roll_core.spec.environment import Environment, Opening, Reply, Task, Turn
    from roll_core.spec.providers import Isolation
    from roll_core.types import Reward
    from roll_pipeline_agentic.config import AgenticEnvConfig

log = logging.getLogger(__name__)

MAX_PROCESSES = 32
"""Episodes at the same time of an environment in processes, if neither the config nor its package sets a number."""
CLOSE_S = 10.0
"""Maximum seconds to close an environment."""
MAX_LINE = 1 << 28
"""Maximum bytes of a result of an environment in a process."""


class HostedEnvironment:
    """The environment of one episode. Every method raises `EnvironmentFailure` instead of the environment's errors."""

    def __init__(self, host: EnvironmentHost, caller: _Caller) -> None:
        self._host, self._caller = host, caller
        self._players: tuple[str, ...] = ()
        self._began = False

    async def reset(self, task: Task, seed: int) -> Opening:
        """Begin the episode. An instance has one."""
        if self._began:
            raise AssertionError("the episode has begun already")
        self._began = True
        opening: Opening = await self._call("reset", self._host.config.setup_timeout_s, dict(task), seed)
        messages = await self._messages("reset", opening.messages, required=True)
        self._check_state("reset", opening.state)
        tools, players = opening.tools, opening.players
        if not _are_json_objects(tools):
            raise self._host.failure("reset", f"tools are {tools!r:.200}, expected a list of schemas in JSON values")
        if not (
            isinstance(players, list | tuple)
            and all(isinstance(player, str) and player for player in players)
            and len(set(players)) == len(players)
        ):
            raise self._host.failure("reset", f"players are {players!r:.200}, expected a list of different names")
        if not isinstance(opening.enter, list | tuple) or not all(isinstance(word, str) for word in opening.enter):
            raise self._host.failure("reset", f"enter is {opening.enter!r:.200}, expected a list of texts")
        self._players = tuple(players)
        self._check_player("reset", opening.player)
        return replace(opening, messages=messages)

    async def step(self, reply: Reply) -> Turn:
        """Continue after a reply."""
        turn: Turn = await self._call("step", self._host.config.step_timeout_s, reply)
        ends = turn.done or turn.truncated
        messages = await self._messages("step", turn.messages, required=not ends)
        self._check_state("step", turn.state)
        self._check_player("step", turn.player)
        if turn.reward is not None:
            self._host.check_number("step", "reward", turn.reward)
        self._host.check_numbers("step", "rewards", turn.rewards)
        self._host.check_numbers("step", "metrics", turn.metrics)
        for player in turn.rewards:
            self._check_player("step", player)
        return replace(turn, messages=messages)

    async def score(self) -> Reward | None:
        """Score the episode."""
        reward: Reward | None = await self._call("score", self._host.config.score_timeout_s)
        if reward is not None:
            self._host.check_reward("score", reward)
        return reward

    async def close(self) -> None:
        """Close the environment. Errors are logged."""
        try:
            await self._caller.close()
        except Exception as error:  # user code; the episode is over
            log.warning("%s: close failed: %s", self._host.owner, described(error))

    async def _call(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        begin = time.monotonic()
        try:
            result = await self._caller.invoke(method, arguments, timeout_s)
            check_result(method, result)
        except EnvironmentFailure:
            raise
        except Exception as error:  # user code may raise anything; the failure keeps the cause
            raise self._host.failure(method, described(error)) from error
        self._host.seconds[method].append(time.monotonic() - begin)
        return result

    async def _messages(self, method: str, messages: Any, *, required: bool) -> Any:
        """The messages with their images as `Media`, if they are valid."""
        if _have_images(messages):
            try:
                messages = await off_loop(lambda: [received_message(message) for message in messages])
            except DataError as error:
                raise self._host.failure(method, str(error)) from error
            plain = [{key: value for key, value in message.items() if key != "media"} for message in messages]
        else:
            plain = messages
        valid = _are_json_objects(plain) and all(
            message.get("role") in ROLES and isinstance(message.get("content"), str) for message in plain
        )
        if not valid or (required and not messages):
            raise self._host.failure(
                method,
                f"messages are {messages!r:.200}, expected dicts of JSON values, with a text as content and one of the"
                f" roles {ROLES}",
            )
        return messages

    def _check_state(self, method: str, state: Any) -> None:
        if state is not None and not isinstance(state, str | int):
            raise self._host.failure(method, f"state is {state!r:.100}, expected a text, an integer or None")

    def _check_player(self, method: str, player: Any) -> None:
        if player != "" and player not in self._players:
            raise self._host.failure(method, f"player is {player!r:.100}, expected one of {list(self._players)!r:.200}")


ROLES = ("user", "system", "tool")
"""Roles of messages from an environment."""


def _have_images(messages: Any) -> bool:
    return (
        isinstance(messages, list | tuple)
        and all(isinstance(message, dict) for message in messages)
        and any(message.get("media") or isinstance(message.get("content"), list) for message in messages)
    )


def _are_json_objects(values: Any) -> bool:
    """True if `values` are dicts of JSON values whose texts are valid UTF-8."""
    if not isinstance(values, list | tuple) or not all(isinstance(value, dict) for value in values):
        return False
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


class EnvironmentHost:
    """Creates the environments of one entry of `custom_envs`. Owns their threads and processes."""

    def __init__(
        self,
        tag: str,
        config: AgenticEnvConfig,
        *,
        target: str,
        options: Mapping[str, Any],
        owner: str,
        isolation: Isolation,
        concurrency: int,
        create: Callable[[], Environment] | None = None,
        python: str = "",
    ) -> None:
        """`create` makes an instance in this process; processes import `target` themselves, with the interpreter
        `python` if there is one. `concurrency` 0: no limit, except for processes."""
        self.tag, self.config, self.owner, self.python = tag, config, owner, python
        self.seconds: dict[str, list[float]] = {"reset": [], "step": [], "score": []}
        """Seconds of the calls since the last `take_seconds`."""
        self._target, self._options, self._create, self._isolation = target, options, create, isolation
        limit = concurrency or (MAX_PROCESSES if isolation == "process" else 0)
        self._slots = asyncio.Semaphore(limit) if limit else None
        self._idle: list[_Process] = []
        self._processes: set[_Process] = set()
        self._closed = False

    def slot(self) -> AbstractAsyncContextManager[None]:
        """One of `concurrency` slots, for all attempts of an episode.

        Slots are given in the order of the requests. A failed episode keeps its slot: in the queue again, it would
        follow all episodes that wait, and training would wait for it.
        """
        return self._slots or contextlib.nullcontext()

    @asynccontextmanager
    async def environment(self) -> AsyncIterator[HostedEnvironment]:
        """An environment for one attempt, in a slot. Closes it at the end, also after an error."""
        hosted = HostedEnvironment(self, await self._caller())
        try:
            yield hosted
        finally:
            await hosted.close()

    def failure(self, method: str, reason: str) -> EnvironmentFailure:
        """The error of a failed episode."""
        return EnvironmentFailure(f"custom_envs.{self.tag}: {self.owner}: {method}: {reason}")

    def check_number(self, method: str, what: str, value: Any) -> None:
        """Raise the failure of an episode unless `value` is a finite number, also as a float."""
        try:
            valid = isinstance(value, int | float) and math.isfinite(value)
        except OverflowError:
            valid = False
        if not valid:
            raise self.failure(method, f"{what} is {value!r:.100}, expected a finite number")

    def check_numbers(self, method: str, what: str, values: Any) -> None:
        """Raise the failure of an episode unless `values` are finite numbers by name."""
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise self.failure(method, f"{what}: found {values!r:.200}, expected a dict of numbers by name")
        for name, value in values.items():
            self.check_number(method, f"{name} of {what}", value)

    def check_reward(self, method: str, reward: Reward) -> None:
        """Raise the failure of an episode whose reward has no value, or a number that is not finite."""
        if reward.failed:
            raise self.failure(method, reward.failure or "the reward has neither a value nor a failure")
        self.check_number(method, "reward", reward.value)
        detail: Any = reward.detail
        if isinstance(detail, dict):
            detail = {name: value for name, value in detail.items() if not isinstance(value, str)}
        self.check_numbers(method, "detail", detail)

    def take_seconds(self) -> dict[str, list[float]]:
        """Seconds of calls by method since the last call."""
        taken, self.seconds = self.seconds, {name: [] for name in self.seconds}
        return taken

    async def _caller(self) -> _Caller:
        timeout_s = self.config.setup_timeout_s
        try:
            if self._create is not None and self._isolation == "inline":
                return _Inline(self._create())
            if self._create is not None and self._isolation == "thread":
                thread = _Thread(self._create)
                try:
                    await thread.run(thread.start, timeout_s)
                except BaseException:
                    await thread.close()
                    raise
                return thread
            process = self._idle.pop() if self._idle else await self._new_process()
            try:
                await process.request({"create": self._target, "options": dict(self._options)}, timeout_s)
            except BaseException:
                process.kill()
                raise
            return process
        except Exception as error:  # user code
            raise self.failure("__init__", described(error)) from error

    async def _new_process(self) -> _Process:
        if self._closed:
            raise EnvironmentFailure("the run is over")
        process = await _Process.start(self)
        self._processes.add(process)
        return process

    def release(self, process: _Process) -> None:
        """Keep a process for the next episode."""
        if self._closed:
            process.kill()
        else:
            self._idle.append(process)

    def forget(self, process: _Process) -> None:
        """Remove a process that exited."""
        self._processes.discard(process)

    async def close(self) -> None:
        """Kill all processes. Abandoned threads end with the process."""
        self._closed = True
        killed = list(self._processes)
        for process in killed:
            process.kill()
        for process in killed:
            await process.closed()


@asynccontextmanager
async def _deadline(timeout_s: float) -> AsyncIterator[None]:
    """Raise `CallFailed` after `timeout_s`. A `TimeoutError` of the environment itself is not changed."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise CallFailed(f"took longer than {timeout_s:g} s and was stopped") from None


class _Caller(ABC):
    """Calls one environment. `invoke` raises its errors, or `CallFailed` at the deadline."""

    @abstractmethod
    async def invoke(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """Call a method."""

    @abstractmethod
    async def close(self) -> None:
        """Close the environment, or stop what runs it."""


class _Inline(_Caller):
    """Coroutines on the driver's event loop."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    @override
    async def invoke(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        async with _deadline(timeout_s):
            result = getattr(self._environment, method)(*arguments)
            return await result if asyncio.iscoroutine(result) or isinstance(result, asyncio.Future) else result

    @override
    async def close(self) -> None:
        await self.invoke("close", (), CLOSE_S)


Outcome = tuple[Any, BaseException | None]
"""Result of a call in a thread, or its exception."""


class _Thread(_Caller):
    """A daemon thread for one environment. A call that exceeds its deadline is abandoned with its thread."""

    def __init__(self, create: Callable[[], Environment]) -> None:
        self._create = create
        self._calls: BlockingCalls | None = None
        self._abandoned = False
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Outcome]] | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._serve, name="environment", daemon=True).start()

    def start(self) -> None:
        """Create the environment, in its thread."""
        self._calls = BlockingCalls(self._create)

    async def run(self, job: Callable[[], Any], timeout_s: float) -> Any:
        """Run a function in the thread."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        self._jobs.put((job, future))
        try:
            async with _deadline(timeout_s):
                result, error = await future
        except BaseException:  # the deadline, or the cancelled episode; the thread ends once its call returns
            self._abandoned = True
            self._jobs.put(None)
            raise
        if error is not None:
            raise error if isinstance(error, Exception) else RuntimeError(described(error))
        return result

    @override
    async def invoke(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        calls = self._calls
        if calls is None:
            raise AssertionError("start has not run")
        return await self.run(lambda: calls(method, *arguments), timeout_s)

    @override
    async def close(self) -> None:
        if self._abandoned:
            return
        try:
            if self._calls is not None:
                await self.run(self._calls.close, CLOSE_S)
        finally:
            self._jobs.put(None)

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            outcome: Outcome
            try:
                outcome = job(), None
            except BaseException as error:  # user code; the caller gets the exception
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the run is over
                self._loop.call_soon_threadsafe(_resolve, future, outcome)


def _resolve(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


class _Process(_Caller):
    """A child process with one environment at a time, see `environment_process`."""

    def __init__(self, host: EnvironmentHost, process: subprocess.Popen[bytes]) -> None:
        self._host, self._process = host, process
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._alive = True

    @classmethod
    async def start(cls, host: EnvironmentHost) -> _Process:
        """Start a process."""
        process, ours = start_process(host.python)
        hosted = cls(host, process)
        hosted._reader, hosted._writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE)
        return hosted

    async def request(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return its reply. Kills the process unless it replies in time."""
        try:
            async with _deadline(timeout_s):
                self._writer.write(json.dumps(message).encode() + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
            if not line:
                raise CallFailed(self._how_it_exited())
            reply: dict[str, Any] = json.loads(line)
        except BaseException:
            self.kill()
            raise
        if "error" in reply:
            log.info("%s failed\n%s", self._host.owner, reply.get("trace", ""))
            raise CallFailed(reply["error"])
        return reply

    @override
    async def invoke(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        message = {"call": method, "arguments": wire_arguments(method, arguments)}
        reply = await self.request(message, timeout_s)
        return result_from(method, reply.get("type", "NoneType"), reply.get("result"), plain=bool(self._host.python))

    @override
    async def close(self) -> None:
        if self._alive:
            try:
                await self.request({"call": "close"}, CLOSE_S)
            except BaseException:
                self.kill()
                raise
            self._host.release(self)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        if self._alive:
            self._alive = False
            kill_process(self._process)
            self._writer.close()
            self._host.forget(self)

    async def closed(self) -> None:
        """Wait until the connection is closed."""
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _how_it_exited(self) -> str:
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the environment's process closed its connection"
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
        return f"the environment's process {how}"
