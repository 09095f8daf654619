"""What a run is told once vLLM's engine is gone."""

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
"""Between two looks whether the engine lives."""


@contextmanager
def engine_deaths() -> Iterator[None]:
    """Raises `EngineDiedError` where vLLM raises its own."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise _died() from error


async def while_it_lives(engine: AsyncLLM, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises `EngineDiedError` if the engine dies meanwhile: vLLM tells requests of that, but
    leaves whoever waits for one of its other calls waiting."""
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
