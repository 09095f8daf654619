"""How arguments and results of a call become bytes: pickled within one Python environment, by our own schema between
two. Answers are `(True, result)` or `(False, failure)`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from roll_core.runtime.cluster.executors import wire
from roll_core.runtime.cluster.executors.calls import CallFailed, Failure

if TYPE_CHECKING:
    from collections.abc import Awaitable


class Codec(Protocol):
    """A module or object with these two functions."""

    def dumps(self, value: Any, /) -> bytes:
        """May raise whatever."""

    def loads(self, data: bytes, /) -> Any:
        """May raise whatever."""


class Pickled:
    """Any object; what is made in `__main__` travels by value."""

    def dumps(self, value: Any, /) -> bytes:
        """See `Codec`."""
        from ray import cloudpickle

        return bytes(cloudpickle.dumps(value))

    def loads(self, data: bytes, /) -> Any:
        """See `Codec`."""
        from ray import cloudpickle

        return cloudpickle.loads(data)


class Wire:
    """What `roll_core.runtime.cluster.executors.wire` has a place for."""

    def dumps(self, value: Any, /) -> bytes:
        """See `Codec`."""
        return wire.dumps(value)

    def loads(self, data: bytes, /) -> Any:
        """See `Codec`."""
        return wire.loads(data)


PICKLED: Codec = Pickled()
WIRE: Codec = Wire()


async def answer(codec: Codec, call: Awaitable[Any]) -> bytes:
    """The answer to a call that was begun."""
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
    """Of a call that worked."""
    return codec.dumps((True, value))


def encode_failure(codec: Codec, failure: Failure) -> bytes:
    """Of a call that failed. The exception itself travels if it survives the journey."""
    try:
        error = codec.dumps(failure.error)
        codec.loads(error)
    except Exception:  # whatever a foreign exception's pickling raises
        error = b""
    return codec.dumps((False, (error, failure.summary, failure.trace, failure.at)))


def decode(codec: Codec, answer: bytes) -> Any:
    """The result. Raises `CallFailed`."""
    worked, value = codec.loads(answer)
    if worked:
        return value
    encoded, summary, trace, at = value
    try:
        error = codec.loads(encoded) if encoded else None
    except Exception:  # a class that exists only over there
        error = None
    raise CallFailed(Failure(error=error, summary=summary, trace=trace, at=at))
