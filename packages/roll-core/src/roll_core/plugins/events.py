"""Calls the event hooks of all plugins. A hook that raises ends the run with an error that names its package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import PluginHookError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.plugins.loader import Plugin
    from roll_core.plugins.registry import Registry
    from roll_core.spec.pipeline import Run


class Events:
    """Calls the event hooks, plugin by plugin in order of registration."""

    def __init__(self, registry: Registry) -> None:
        self._plugins = [plugin for plugin in registry.plugins if plugin.manager is not None]

    def run_started(self, run: Run) -> None:
        """Call `roll_run_started` of each plugin. Raises `PluginHookError` at the first failure and stops there."""
        for plugin in self._plugins:
            _call(plugin, "roll_run_started", run=run)

    def step_finished(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Call `roll_step_finished` of each plugin. Raises `PluginHookError` at the first failure and stops there."""
        for plugin in self._plugins:
            _call(plugin, "roll_step_finished", run=run, step=step, metrics=metrics)

    def run_finished(self, run: Run, error: BaseException | None) -> None:
        """Call `roll_run_finished` of every plugin, then raise the first `PluginHookError`.

        A failure does not stop the calls, because each plugin may have resources to close.
        """
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
    except BaseException as error:  # third-party code: SystemExit must not look like a normal end
        reason = " ".join(str(error).split())
        raise PluginHookError(
            f"plugin {plugin}: {hook} raised {type(error).__name__}{': ' if reason else ''}{reason}"
        ) from error
