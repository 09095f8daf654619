"""What vLLM says once its engine's processes are gone, as a run knows it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from roll_core.errors import EngineDiedError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def engine_deaths() -> Iterator[None]:
    """Raises `EngineDiedError` where vLLM raises its own."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDiedError("vLLM's engine is dead; its own messages above say why") from error
