"""Conversion of a dead vLLM engine into `EngineDiedError`."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from roll_core.errors import EngineDiedError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")

LOOK_S = 1.0
"""Seconds between two checks whether the engine is alive."""


@contextmanager
def engine_deaths() -> Iterator[None]:
    """Context manager that raises `EngineDiedError` in place of vLLM's `EngineDeadError`."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise _died() from error


async def while_it_lives(engine: AsyncLLM, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result. Raises `EngineDiedError` if the engine exits or fails meanwhile.

    In that case vLLM fails running requests, but its other calls block forever.
    """
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
            if engine.errored:
                raise _died()
        with engine_deaths():
            return task.result()
    finally:
        task.cancel()


def _died() -> EngineDiedError:
    return EngineDiedError("vLLM's engine is dead; its own messages above say why")
