"""Calls the event hooks of all plugins. They are loud: one that raises ends the run, naming its package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import PluginHookError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.plugins.loader import Plugin
    from roll_core.plugins.registry import Registry
    from roll_core.spec.pipeline import Run


class Events:
    """The event hooks, called plugin by plugin in order of registration."""

    def __init__(self, registry: Registry) -> None:
        self._plugins = [plugin for plugin in registry.plugins if plugin.manager is not None]

    def run_started(self, run: Run) -> None:
        """Raises `PluginHookError` from the first hook that raises; the plugins after it are not called."""
        for plugin in self._plugins:
            _call(plugin, "roll_run_started", run=run)

    def step_finished(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Raises `PluginHookError` from the first hook that raises; the plugins after it are not called."""
        for plugin in self._plugins:
            _call(plugin, "roll_step_finished", run=run, step=step, metrics=metrics)

    def run_finished(self, run: Run, error: BaseException | None) -> None:
        """Tells every plugin, then raises the first `PluginHookError`: each may have something to close."""
        first: PluginHookError | None = None
        for plugin in self._plugins:
            try:
                _call(plugin, "roll_run_finished", run=run, error=error)
            except PluginHookError as raised:
                first = first or raised
        if first is not None:
            raise first


def _call(plugin: Plugin, hook: str, **arguments: Any) -> None:
    if hook not in plugin.hooks or plugin.manager is None:
        return
    try:
        getattr(plugin.manager.hook, hook)(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code: SystemExit must not pass for the end of the run
        reason = " ".join(str(error).split())
        raise PluginHookError(
            f"plugin {plugin}: {hook} raised {type(error).__name__}{': ' if reason else ''}{reason}"
        ) from error
