"""One worker behind serialized calls. Ray actors and processes of other interpreters serve it alike.

    RayWorker ── Ray ──► RayHost                               ─┐
    RayWorker ── Ray ──► RayIsolatedEnvHost ══ socket ══► main ─┴─► WorkerServer ─► WorkerHost ─► worker

The server serializes arguments and results, not Ray. Arrays therefore arrive writable, and a value that cannot be
serialized raises an error that names its call.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_core.host import usable_cores
from roll_core.runtime.cluster.executors.calls import CallFailed, Failure
from roll_core.runtime.cluster.executors.codecs import encode_failure, encode_outcome
from roll_core.runtime.cluster.executors.host import WorkerHost

if TYPE_CHECKING:
    from roll_core.runtime.cluster.executors.codecs import Codec


class WorkerServer:
    """Serves one worker. All methods run on one event loop and may overlap; calls begin in order of their numbers."""

    def __init__(self, role: str, rank: int, codec: Codec) -> None:
        self._codec = codec
        self._host = WorkerHost(role, rank)
        self._running: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """Calls that arrived before an earlier one."""

    async def construct(self, payload: bytes) -> bytes:
        """Construct the worker. Returns bytes as `call` does."""
        return await encode_outcome(self._codec, self._construct(payload))

    async def _construct(self, payload: bytes) -> None:
        try:
            target, place, peers, args, env, path = self._codec.loads(payload)
        except Exception as error:
            raise CallFailed(Failure.of(error)) from error
        os.environ.update(env)
        sys.path.extend(entry for entry in path if entry not in sys.path)
        place = replace(place, num_threads=place.threads_of(usable_cores()))
        await self._host.construct(target, place, peers, args)

    async def call(self, number: int, method: str, payload: bytes) -> bytes:
        """Run call `number` after the earlier ones have begun. Returns its serialized result or failure."""
        if number != self._next:
            turn = self._waiting[number] = asyncio.get_running_loop().create_future()
            await turn
        try:
            future = self._running[number] = self._host.begin(method, self._codec.loads(payload))
        except Exception as error:
            return encode_failure(self._codec, Failure.of(error))
        finally:
            self._next = number + 1
            if self._next in self._waiting:
                self._waiting.pop(self._next).set_result(None)
        try:
            return await encode_outcome(self._codec, future)
        finally:
            del self._running[number]

    async def cancel(self, number: int) -> None:
        """Cancel a call whose caller is gone, if its method is async."""
        if number in self._running:
            self._running[number].cancel()

    async def stack(self) -> str:
        """Current stacks of the worker's threads."""
        return self._host.stack()

    async def close(self, timeout_s: float) -> None:
        """Close the worker."""
        await self._host.close(timeout_s)
