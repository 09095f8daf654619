"""The plugins of the quick start, for tests that load no other installed ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.plugins.loader import load_plugins

if TYPE_CHECKING:
    from roll_core.plugins.loader import Plugin

HF_PACKAGES = (
    "roll-executor-ray,roll-infer-hf,roll-rewards,roll-strategy-hf,roll-tools,roll-trackers,roll-weight-transports"
)
"""Value of `ROLL_PLUGINS` that loads the core, the report, rewards, trackers, the strategies of the quick start, and
what several workers need."""


def hf_plugins(*packages: str) -> tuple[Plugin, ...]:
    """Return the loaded plugins of `HF_PACKAGES` and of `packages`, and no other installed ones."""
    plugins = load_plugins(environ={"ROLL_PLUGINS": ",".join((HF_PACKAGES, *packages))})
    return tuple(plugin for plugin in plugins if plugin.state == "loaded")
