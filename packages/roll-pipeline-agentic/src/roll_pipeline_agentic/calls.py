"""Calls of an environment from a thread or process of its own, and their arguments and results as JSON values.

Also the seeds and states that episodes of environments and rollouts of agents share.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

from roll_core.spec.agent import Session
from roll_core.spec.environment import Opening, Reply, Turn
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.spec.environment import Environment, Message, State

RESULTS: dict[str, tuple[type, ...]] = {
    "reset": (Opening,),
    "step": (Turn,),
    "score": (Reward, type(None)),
    "run": (Reward, str, type(None)),
    "close": (type(None),),
}
"""Valid types of the results of the methods of environments and agents."""


class BlockingCalls:
    """One environment, called from one thread. Coroutines run on an event loop of this object."""

    def __init__(self, create: Callable[[], Environment]) -> None:
        self._environment = create()
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result."""
        result = getattr(self._environment, method)(*arguments)
        if not inspect.isawaitable(result):
            return result
        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(_awaited(result))

    def close(self) -> None:
        """Close the environment and the event loop."""
        try:
            self("close")
        finally:
            if self._loop is not None:
                self._loop.close()


class CallFailed(Exception):
    """The error of a call in another process. Its text is that of `described` there."""


async def _awaited(result: Any) -> Any:
    return await result


def described(error: BaseException) -> str:
    """Class and message of an exception, on one line."""
    reason = " ".join(str(error).split())
    if isinstance(error, CallFailed):
        return reason
    return f"{type(error).__name__}{': ' if reason else ''}{reason}"


def wire_arguments(method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments of a call as JSON values."""
    return [asdict(each) if isinstance(each, Reply | Session) else each for each in arguments]


def arguments_from(method: str, wired: list[Any]) -> tuple[Any, ...]:
    """Arguments from the result of `wire_arguments`."""
    if method == "run":
        task, session = wired
        return task, Session(**session)
    return tuple(Reply(**each) for each in wired) if method == "step" else tuple(wired)


def wire_result(method: str, result: Any) -> Any:
    """Result of a call as JSON values. Raises `TypeError` for a result of the wrong type."""
    if not isinstance(result, RESULTS[method]):
        expected = " or ".join(each.__name__ for each in RESULTS[method])
        raise TypeError(f"{method} returned {type(result).__name__}, expected {expected}")
    return result if result is None or isinstance(result, str) else asdict(cast("Any", result))


def result_from(method: str, wired: Mapping[str, Any] | str | None) -> Any:
    """Result from the value of `wire_result`."""
    return wired if wired is None or isinstance(wired, str) else RESULTS[method][0](**wired)


def seed_of(*parts: int | str) -> int:
    """A seed of 31 bits, as gymnasium needs, that is the same for the same parts on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def digest_of(data: bytes) -> str:
    """Short digest."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def state_of(state: State | None, messages: Sequence[Message]) -> State:
    """The state that an environment named, or else the digest of its messages."""
    return state if state is not None else digest_of(json.dumps(list(messages), sort_keys=True).encode())
