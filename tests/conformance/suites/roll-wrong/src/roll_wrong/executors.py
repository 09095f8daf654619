"""Executors that are right but for one thing: those of this process, and those with processes of their own."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
from socket_executor import SocketExecutor, SocketGroup

from roll_core.runtime.cluster.executors.base import CallFailed
from roll_core.runtime.cluster.executors.host import WorkerThread
from roll_core.runtime.cluster.executors.local import LocalExecutor, LocalGroup


class RightHere(LocalExecutor):
    """Nothing is wrong with it."""

    group: Any = LocalGroup

    async def _start_group(self, spec):
        started = await super()._start_group(spec)
        return self.group(started.spec, started.members, started._hosts)


class RightProcesses(SocketExecutor):
    """Nor with this one."""


def changed(begin):
    """An executor whose groups begin a call in this way."""
    return type("Group", (LocalGroup,), {"begin": begin})


async def _failing(call, change):
    try:
        return await call
    except CallFailed as failed:
        raise CallFailed(change(failed.failure)) from failed


def failing(change):
    """An executor whose groups change what failed."""
    return changed(lambda self, *call: asyncio.ensure_future(_failing(LocalGroup.begin(self, *call), change)))


class ReversesRanks(RightHere):
    group = changed(lambda self, rank, *call: LocalGroup.begin(self, self.world_size - 1 - rank, *call))


class ForgetsArguments(RightHere):
    async def _start_group(self, spec):
        return await super()._start_group(replace(spec, args={**spec.args, "greeting": ""}))


class ForgetsVariables(RightHere):
    async def start(self, specs):
        return await super().start([replace(spec, env={}) for spec in specs])


class NamesOtherProcesses(RightHere):
    async def _start_group(self, spec):
        group = await super()._start_group(spec)
        group.members = tuple(replace(member, pid=member.pid + 1) for member in group.members)
        return group


def _on_a_new_thread(self, rank, method, arguments):
    bound = getattr(self._hosts[rank]._worker, method, None)
    if bound is None or inspect.iscoroutinefunction(bound):
        return LocalGroup.begin(self, rank, method, arguments)
    thread = WorkerThread("another")
    future = thread.run(bound, *arguments)
    thread.stop()
    return future


class ChangesThreads(RightHere):
    group = changed(_on_a_new_thread)


async def _after_the_last(self, *call):
    self.lock = getattr(self, "lock", None) or asyncio.Lock()
    async with self.lock:
        return await LocalGroup.begin(self, *call)


class OneAtATime(RightHere):
    group = changed(lambda self, *call: asyncio.ensure_future(_after_the_last(self, *call)))


def _wide(value):
    if isinstance(value, dict):
        return {name: _wide(each) for name, each in value.items()}
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype == np.float32 else value


class WidensArrays(RightHere):
    group = changed(
        lambda self, rank, method, arguments: LocalGroup.begin(self, rank, method, [*map(_wide, arguments)])
    )


class PlainErrors(RightHere):
    group = failing(lambda failure: replace(failure, error=RuntimeError(failure.summary)))


class WithoutTraces(RightHere):
    group = failing(lambda failure: replace(failure, trace=""))


class HidesEchoes(RightHere):
    group = failing(
        lambda failure: replace(failure, error=None, summary="lost", at=0.0) if failure.is_echo else failure
    )


async def _nothing():
    return None


def _known_methods(self, rank, method, arguments):
    known = hasattr(self._hosts[rank]._worker, method)
    return LocalGroup.begin(self, rank, method, arguments) if known else asyncio.ensure_future(_nothing())


class IgnoresUnknownMethods(RightHere):
    group = changed(_known_methods)


class KeepsCancelledCalls(RightHere):
    group = changed(lambda self, *call: asyncio.shield(LocalGroup.begin(self, *call)))


class NeverCloses(RightHere):
    async def close(self):
        for host in self._hosts:
            host._worker = None
        await super().close()


class ClosesOnce(RightHere):
    async def close(self):
        assert not hasattr(self, "closed")
        self.closed = True
        await super().close()


class LeavesWorkers(RightHere):
    async def start(self, specs):
        self._environment.make(dict(specs[0].env))
        return {spec.role: await self._start_group(spec) for spec in specs}


class HidesNoDevices(SocketExecutor):
    def devices(self, place):
        return {}


class DeafWatch(SocketExecutor):
    async def watch(self):
        await asyncio.Event().wait()


class SilentExits(SocketExecutor):
    async def _start_group(self, spec):
        group = await super()._start_group(spec)
        for worker in group.workers:
            worker.pending = _Forgetful(worker.pending)
        return group


class _Forgetful(dict):
    """Calls that nobody ends."""

    def values(self):
        return ()


LEFT = []
"""What the next one leaves, so that it is not collected during the tests of others."""


class LeavesProcesses(SocketExecutor):
    async def close(self):
        LEFT.append(self)


class ForgetsTheRank(SocketExecutor):
    async def watch(self):
        try:
            await super().watch()
        except Exception as error:
            error.rank = 0
            raise


class LosesAnother(SocketExecutor):
    """It survives exits, and takes another worker for the one that exited."""

    async def _start_group(self, spec):
        group = await super()._start_group(spec)
        group.__class__ = _Survivors
        return group


class _Survivors(SocketGroup):
    @property
    def lost(self):
        exited = any(worker.error for worker in self.workers)
        return frozenset({0}) if exited and self.spec.survives != "never" else frozenset()
