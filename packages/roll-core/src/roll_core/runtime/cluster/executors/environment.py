"""Environment variables that are set for a while."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class EnvironmentChange:
    """Of this process, until it is undone."""

    def __init__(self) -> None:
        self._before: dict[str, str | None] = {}

    def make(self, variables: Mapping[str, str]) -> None:
        """Set them. What was there comes back with `undo`."""
        self._before = {name: os.environ.get(name) for name in variables} | self._before
        os.environ.update(variables)

    def undo(self) -> None:
        """As it was. May be called again."""
        before, self._before = self._before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
