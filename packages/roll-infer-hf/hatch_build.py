"""The build hook of roll-modeling, where it is installed: only `BUILD_EXT=1` needs it."""

import os
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def get_build_hook() -> type[BuildHookInterface]:
    """hatchling asks for it."""
    try:
        from roll_modeling.extension_wheel import ExtensionHook
    except ModuleNotFoundError:
        return SourcesOnly
    return ExtensionHook


class SourcesOnly(BuildHookInterface):
    """Leaves the wheel as it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Refuses `BUILD_EXT=1`."""
        if os.environ.get("BUILD_EXT", "0") not in ("", "0"):
            raise RuntimeError("BUILD_EXT=1 needs roll-modeling and torch installed; use --no-build-isolation")
