"""Temporary changes of this process's environment variables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class EnvironmentChange:
    """Environment variables of this process, set until `undo`."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def make(self, variables: Mapping[str, str]) -> None:
        """Set the variables. `undo` restores their previous values."""
        self._before = {name: os.environ.get(name) for name in variables} | self._before
        os.environ.update(variables)

    def undo(self) -> None:
        """Restore the previous values. Idempotent."""
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
