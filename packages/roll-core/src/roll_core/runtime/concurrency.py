"""Waiting for several things at once, so that the first failure is the one that is seen."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

T = TypeVar("T")


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order. When one fails the others are cancelled, awaited, and the first failure is raised as it is."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
