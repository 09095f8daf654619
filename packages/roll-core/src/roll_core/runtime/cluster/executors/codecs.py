"""Serialization of arguments and results: pickle within one Python environment, the `wire` schema between two.

Serialized results are `(True, result)` or `(False, failure)`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from roll_core.runtime.cluster.executors import wire
from roll_core.runtime.cluster.executors.calls import CallFailed, Failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Codec(NamedTuple):
    """Serializer. Both functions may raise any exception."""

    dumps: Callable[[Any], bytes]
    loads: Callable[[bytes], Any]


def _pickle(value: Any) -> bytes:
    from ray import cloudpickle

    return bytes(cloudpickle.dumps(value))


def _unpickle(data: bytes) -> Any:
    from ray import cloudpickle

    return cloudpickle.loads(data)


PICKLED = Codec(_pickle, _unpickle)
"""For any object. Definitions of `__main__` are pickled by value (cloudpickle)."""
WIRE = Codec(wire.dumps, wire.loads)
"""For the values of the schema in `wire`."""


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
    return codec.dumps((False, (error, failure.summary, failure.trace, failure.at)))


def decode(codec: Codec, outcome: bytes) -> Any:
    """Deserialize the result of a call. Raises `CallFailed`."""
    succeeded, value = codec.loads(outcome)
    if succeeded:
        return value
    encoded, summary, trace, at = value
    try:
        error = codec.loads(encoded) if encoded else None
    except Exception:  # its class exists only in the worker's environment
        error = None
    raise CallFailed(Failure(error=error, summary=summary, trace=trace, at=at))
