"""Serialization of arguments and results: pickle within one Python environment, the `wire` schema between two.

Serialized results are `(True, result)` or `(False, failure)`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from roll_core.runtime.cluster.executors import wire
from roll_core.runtime.cluster.executors.calls import CallFailed, Failure

if TYPE_CHECKING:
    from collections.abc import Awaitable


class Codec(Protocol):
    """Serializer: a module or object with these two functions."""

    def dumps(self, value: Any, /) -> bytes:
        """Serialize a value. May raise any exception."""

    def loads(self, data: bytes, /) -> Any:
        """Deserialize a value. May raise any exception."""


class Pickled:
    """Pickle codec for any object. Definitions of `__main__` are pickled by value (cloudpickle)."""

    def dumps(self, value: Any, /) -> bytes:
        """See `Codec`."""
        from ray import cloudpickle

        return bytes(cloudpickle.dumps(value))

    def loads(self, data: bytes, /) -> Any:
        """See `Codec`."""
        from ray import cloudpickle

        return cloudpickle.loads(data)


class Wire:
    """Codec for the values that the schema of `roll_core.runtime.cluster.executors.wire` supports."""

    def dumps(self, value: Any, /) -> bytes:
        """See `Codec`."""
        return wire.dumps(value)

    def loads(self, data: bytes, /) -> Any:
        """See `Codec`."""
        return wire.loads(data)


PICKLED: Codec = Pickled()
WIRE: Codec = Wire()


async def answer(codec: Codec, call: Awaitable[Any]) -> bytes:
    """Await a call and serialize its result or its failure."""
    try:
        return encode_result(codec, await call)
    except CallFailed as failed:
        return encode_failure(codec, failed.failure)
    except asyncio.CancelledError as error:
        return encode_failure(codec, Failure.of(error))
    except Exception as error:
        summary = f"its result cannot be sent to another process: {error}"
        return encode_failure(codec, replace(Failure.of(error), summary=summary))


def encode_result(codec: Codec, value: Any) -> bytes:
    """Serialize the result of a successful call."""
    return codec.dumps((True, value))


def encode_failure(codec: Codec, failure: Failure) -> bytes:
    """Serialize the failure of a call. Includes the exception itself if it survives a round trip."""
    try:
        error = codec.dumps(failure.error)
        codec.loads(error)
    except Exception:  # any exception of a third-party pickling
        error = b""
    return codec.dumps((False, (error, failure.summary, failure.trace, failure.at)))


def decode(codec: Codec, answer: bytes) -> Any:
    """Deserialize the result of a call. Raises `CallFailed`."""
    worked, value = codec.loads(answer)
    if worked:
        return value
    encoded, summary, trace, at = value
    try:
        error = codec.loads(encoded) if encoded else None
    except Exception:  # its class exists only in the worker's environment
        error = None
    raise CallFailed(Failure(error=error, summary=summary, trace=trace, at=at))
