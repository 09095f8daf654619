"""One worker behind serialized calls, for executors whose workers run in processes of their own.

    executor ══ its own connection ══► WorkerServer ─► WorkerHost ─► worker

The server serializes arguments and results itself, with the executor's `Codec`. Arrays therefore arrive writable, and a
value that cannot be serialized raises an error that names its call. Serialized results are `(True, result)` or
`(False, failure)`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from roll_core.host import usable_cores
from roll_core.runtime.cluster.executors import wire
from roll_core.runtime.cluster.executors.base import CallFailed, Failure
from roll_core.runtime.cluster.executors.host import WorkerHost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Codec(NamedTuple):
    """Serializer. Both functions may raise any exception."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


WIRE = Codec(wire.dumps, wire.loads)
"""For the values of the schema in `wire`."""


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
        """Cancel a call that no caller awaits, if its method is async."""
        if number in self._running:
            self._running[number].cancel()

    async def stack(self) -> str:
        """Current stacks of the worker's threads."""
        return self._host.stack()

    async def close(self, timeout_s: float) -> None:
        """Close the worker."""
        await self._host.close(timeout_s)


async def encode_outcome(codec: Codec, call: Awaitable[Any]) -> bytes:
    """Await a call and serialize its result or its failure."""
    try:
        return codec.dumps((True, await call))
    except CallFailed as failed:
        return encode_failure(codec, failed.failure)
    except asyncio.CancelledError as error:
        return encode_failure(codec, Failure.of(error))
    except Exception as error:
        summary = f"its result cannot be sent to another process: {error}"
        return encode_failure(codec, replace(Failure.of(error), summary=summary))


def encode_failure(codec: Codec, failure: Failure) -> bytes:
    """Serialize the failure of a call. Includes the exception itself if it survives a round trip."""
    try:
        error = codec.dumps(failure.error)
        codec.loads(error)
    except Exception:  # any exception of a third-party pickling
        error = b""
    return codec.dumps((False, (error, failure.summary, failure.trace, failure.failed_at)))


def decode(codec: Codec, outcome: bytes) -> Any:
    """Deserialize the result of a call. Raises `CallFailed`."""
    succeeded, value = codec.loads(outcome)
    if succeeded:
        return value
    encoded, summary, trace, failed_at = value
    try:
        error = codec.loads(encoded) if encoded else None
    except Exception:  # its class exists only in the worker's environment
        error = None
    raise CallFailed(Failure(error=error, summary=summary, trace=trace, failed_at=failed_at))
