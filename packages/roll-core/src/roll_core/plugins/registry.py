"""Looks up parts by kind and name, and calls event hooks.

Names are resolved on use, so a broken part affects only configs that use it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from roll_core import __version__
from roll_core.errors import (
    ContractError,
    PluginHookError,
    ProviderConflictError,
    UnknownProviderError,
    closest,
    install_command,
    one_line,
)
from roll_core.plugins.loader import Plugin, load_plugins, normalise
from roll_core.plugins.records import KINDS, described, kind_of
from roll_core.plugins.requirements import CORE
from roll_core.spec.providers import (
    AdvantageProvider,
    AgentProvider,
    EnvironmentProvider,
    OptimizerProvider,
    PolicyLossProvider,
    PromptSamplerProvider,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from roll_core.plugins.records import Kind
    from roll_core.spec.pipeline import Run
    from roll_core.spec.providers import Provider

P = TypeVar("P", bound="Provider")
log = logging.getLogger(__name__)


def load_registry(disabled: Collection[str] = ()) -> Registry:
    """Load every installed plugin, except `disabled` ones and those that `ROLL_PLUGINS` does not allow."""
    return Registry(load_plugins(disabled))


class Registry:
    """All parts by kind and name.

    registry.find(InferProvider, "acme")                    the record, or an error with a remedy
    registry.find(InferProvider, "roll-infer-acme/acme")    the record of this package
    """

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self.plugins = tuple(plugins)

    def find(self, kind: type[P], name: str) -> P:
        """Return the record of this kind with this name, given as `name` or `package/name`.

        Policy losses, advantage estimators, prompt samplers, optimizers, environments and agents may also be given as
        `module:name`, code of the user. The working directory is then put first on the module path of this process,
        which its workers inherit.

        Raises `ProviderConflictError` if two packages offer it, and `UnknownProviderError` if none does. The latter
        lists the nearest name, the package that provides it, and the plugins that failed to load. The first of their
        errors is chained.
        """
        if ":" in name and kind in USER_FUNCTIONS:
            return _user_function(kind, name)
        offers = self._offers(kind, name)
        if len(offers) == 1:
            return offers[0][1]
        if offers:
            raise ProviderConflictError(self._conflict(kind_of(kind), name, [plugin for plugin, _ in offers]))
        raise self._error(kind, self._unknown(kind, name))

    def providers(self, kind: type[P]) -> tuple[P, ...]:
        """All records of a kind, roll-core's own first."""
        return tuple(record for plugin in self.plugins for record in plugin.providers if isinstance(record, kind))

    def names(self, kind: type[Provider]) -> tuple[str, ...]:
        """Names of a kind, sorted, without duplicates."""
        return tuple(sorted({record.name for record in self.providers(kind)}))

    def owner(self, record: Provider) -> str:
        """Description of a record and its plugin for messages: `infer strategy 'acme' of roll-infer-acme 1.2`."""
        plugin = self._plugin(record)
        return described(record) if plugin is None else f"{described(record)} of {plugin}"

    def package(self, record: Provider) -> str:
        """Distribution that offers a record; empty if no plugin does."""
        plugin = self._plugin(record)
        return "" if plugin is None else plugin.package

    def describe(self) -> list[dict[str, Any]]:
        """Plain values for `plugins --json` and a run's record; lists every plugin, loaded or not."""
        return [_describe(plugin) | {"broken": self.broken(plugin)} for plugin in self.plugins]

    def broken(self, plugin: Plugin) -> list[str]:
        """Why parts of a loaded plugin cannot be imported; see `import_problem`."""
        return [problem for record in plugin.providers if (problem := self.import_problem(record))]

    def import_problem(self, record: Provider) -> str:
        """`signatures.import_problem` of a record of an installed plugin, with its owner.

        Empty for packages released with this core.
        """
        plugin = self._plugin(record)
        if plugin is None or plugin.manager is None or self.is_released_with_core(record):
            return ""
        from roll_core.plugins.signatures import import_problem

        problem = import_problem(record)
        return problem and f"{self.owner(record)}: {problem}"

    def is_released_with_core(self, record: Provider) -> bool:
        """True if the record's package is roll-core or one that its extras require, of the same version."""
        plugin = self._plugin(record)
        if plugin is None or plugin.version != __version__:
            return False
        return normalise(plugin.package) in (CORE, *_released_together())

    def _plugin(self, record: Provider) -> Plugin | None:
        return next((plugin for plugin in self.plugins if any(record is one for one in plugin.providers)), None)

    def _offers(self, kind: type[P], name: str) -> list[tuple[Plugin, P]]:
        package, slash, bare = name.rpartition("/")
        return [
            (plugin, record)
            for plugin in self.plugins
            for record in plugin.providers
            if isinstance(record, kind)
            and record.name == bare
            and (not slash or normalise(plugin.package) == normalise(package))
        ]

    def _conflict(self, kind: Kind, name: str, plugins: list[Plugin]) -> str:
        packages = " and ".join(str(plugin) for plugin in plugins)
        bare = name.rpartition("/")[2]
        spelt = " or ".join(repr(f"{plugin.package}/{bare}") for plugin in plugins)
        if len({normalise(plugin.package) for plugin in plugins}) == 1:
            points = " or ".join(f"--disable-plugin {plugin.entry_point}" for plugin in plugins)
            return f"{kind.noun} {name!r} is offered twice by {plugins[0]}: disable one with {points}"
        return (
            f"{kind.noun} {name!r} is offered by {packages}: write {spelt},"
            f" or disable one with --disable-plugin {plugins[-1].package}"
        )

    def no_part(self, kind: type[Provider], message: str) -> UnknownProviderError:
        """Error for a config that needs a part of this kind that no loaded plugin offers; names packages to install."""
        packages = sorted(set(_known_parts(kind_of(kind))[0].values()))
        return self._error(kind, [message, *(_install(package) for package in packages)])

    def _error(self, kind: type[Provider], lines: list[str]) -> UnknownProviderError:
        """Error of these lines and the state of the plugins, caused by the error of the first one that failed."""
        failed = [plugin for plugin in self.plugins if plugin.state == "failed"]
        lines = [*lines, f"available: {', '.join(self.names(kind)) or 'none'}"]
        lines += [f"failed to load: {plugin}: {plugin.cause}" for plugin in failed]
        lines += [f"not loaded: {plugin} ({_WHY[plugin.state]})" for plugin in self.plugins if plugin.state in _WHY]
        error = UnknownProviderError("\n    ".join(lines))
        error.__cause__ = failed[0].error if failed else None
        return error

    def _unknown(self, kind: type[Provider], name: str) -> list[str]:
        """What is known about a name that no plugin offers: a hint, a similar name, and the package to install."""
        spec = kind_of(kind)
        package, slash, bare = name.rpartition("/")
        known, hints = _known_parts(spec)
        names = self.names(kind)
        lines = [f"no {spec.noun} is called {name!r}"]
        if "." in name and kind in USER_FUNCTIONS:
            lines.append(f"your own code is written as {':'.join(name.rsplit('.', 1))}")
        elif slash:
            lines += self._unknown_package(spec, kind, package, bare)
        elif hint := hints.get(bare.lower()):
            lines.append(hint)
        elif bare not in known:
            closest_name = closest(bare, [*names, *known])
            close = (
                [closest_name]
                if closest_name
                else sorted(known_name for known_name in {*names, *known} if bare and known_name.startswith(bare))
            )
            if close:
                lines[0] += f"; did you mean {' or '.join(map(repr, close))}?"
                bare = close[0]
        if bare in known and bare not in names:
            lines.append(f"{bare!r} is in the package {known[bare]}: {_install(known[bare])}")
        return lines

    def _unknown_package(self, spec: Kind, kind: type[Provider], package: str, bare: str) -> list[str]:
        mine = [plugin for plugin in self.plugins if normalise(plugin.package) == normalise(package)]
        if not mine:
            packages = sorted({plugin.package for plugin in self.plugins})
            return [f"no plugin {package!r} is installed; installed: {', '.join(packages)}"]
        offered = sorted(record.name for plugin in mine for record in plugin.providers if isinstance(record, kind))
        if mine[0].state != "loaded":
            return []
        return [f"{mine[0]} offers {', '.join(offered) if offered else f'no {spec.noun}'}"]


USER_FUNCTIONS = (
    *(AdvantageProvider, AgentProvider, EnvironmentProvider, OptimizerProvider, PolicyLossProvider),
    PromptSamplerProvider,
)
"""Kinds of parts that may be a function or class of the user, see `roll_core.plugins.targets.options_schema`."""


def is_user_function(record: Provider) -> bool:
    """True if the record is that of a function of the user."""
    return record.name == record.target


def _user_function(kind: type[P], name: str) -> P:
    sys.path[:] = dict.fromkeys((os.getcwd(), *sys.path))
    return kind(name=name, target=name, summary="A function of the user")


EVENTS = {
    "roll_run_started": ("run",),
    "roll_step_finished": ("run", "step", "metrics"),
    "roll_run_finished": ("run", "error"),
    "roll_run_recorded": ("directory",),
}
"""Event hooks and their arguments."""


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Check the callbacks of a run, see `Events`.

    Raises `ContractError` for an object without an event hook, a method with a similar name, a coroutine function, or
    a method that does not take the hook's arguments by name.
    """
    import inspect

    for callback in callbacks:
        name = _name(callback)
        hooks = [attribute for attribute in dir(callback) if attribute.startswith("roll_")]
        if isinstance(callback, type) or not hooks:
            kind = "a class" if isinstance(callback, type) else "an object without any of these methods"
            raise ContractError(f"{name}: found {kind}, expected an object with {', '.join(EVENTS)}")
        for hook in hooks:
            if hook not in EVENTS:
                raise ContractError(f"{name}: {hook} is not an event hook; did you mean {closest(hook, EVENTS, 0.0)}?")
            if inspect.iscoroutinefunction(getattr(callback, hook)):
                raise ContractError(f"{name}: {hook} is a coroutine function, expected a plain method")
            try:
                inspect.signature(getattr(callback, hook)).bind(**dict.fromkeys(EVENTS[hook]))
            except (TypeError, ValueError) as error:
                expected = f"{hook}({', '.join(EVENTS[hook])})"
                raise ContractError(f"{name}: {hook}: {error}; expected the arguments {expected}") from error


class Events:
    """Calls the event hooks, plugin by plugin in order of registration, then those of the run's `callbacks`."""

    def __init__(self, registry: Registry, callbacks: Sequence[object] = ()) -> None:
        self._plugins = [*(plugin for plugin in registry.plugins if plugin.manager is not None), *callbacks]

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

    def run_recorded(self, directory: Path) -> list[Path]:
        """Call `roll_run_recorded` of every plugin. Returns the files that they wrote.

        Logs failures: the outcome of the run is recorded already.
        """
        written: list[Path] = []
        for plugin in self._plugins:
            try:
                written_paths = _call(plugin, "roll_run_recorded", directory=directory)
            except PluginHookError as error:
                log.error("%s", error.described(), exc_info=error)
            else:
                written += (
                    written_paths
                    if isinstance(written_paths, list)
                    else []
                    if written_paths is None
                    else [written_paths]
                )
        return written


def _call(plugin: Plugin | object, hook: str, **arguments: Any) -> Any:
    """Call an event hook. Returns its result: a list of a plugin's, the bare one of a callback."""
    function = getattr(plugin.manager.hook if isinstance(plugin, Plugin) and plugin.manager else plugin, hook, None)
    if function is None:
        return None
    try:
        return function(**arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # third-party code: SystemExit must not look like a normal end
        raise PluginHookError(f"{_name(plugin)}: {hook} raised {one_line(error)}") from error


def _name(plugin: Plugin | object) -> str:
    return f"plugin {plugin}" if isinstance(plugin, Plugin) else f"callback {type(plugin).__name__}"


_WHY = {
    "disabled": "--disable-plugin",
    "not allowed": "not listed in ROLL_PLUGINS",
    "not installed": "listed in ROLL_PLUGINS, but not installed",
}


@cache
def _released_together() -> frozenset[str]:
    """Names of the distributions that roll-core or one of its extras requires."""
    names = (re.match(r"[\w.-]+", requirement) for requirement in importlib.metadata.requires(CORE) or ())
    return frozenset(normalise(name[0]) for name in names if name is not None)


def _install(package: str) -> str:
    return f"{install_command(package)} (in a clone of ROLL: {install_command('-e', f'packages/{package}')})"


def _known_parts(kind: Kind) -> tuple[dict[str, str], dict[str, str]]:
    """Packages by the names of their parts, and what to write instead of names of other frameworks."""
    import tomllib
    from importlib.resources import files

    known = tomllib.loads(files("roll_core.plugins").joinpath("known_parts.toml").read_text(encoding="utf-8"))
    return known.get(kind.key, {}), known["hints"].get(kind.key, {})


def _describe(plugin: Plugin) -> dict[str, Any]:
    return {
        "package": plugin.package,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
        "target": plugin.target,
        "state": plugin.state,
        "hook_api": plugin.hook_api,
        "hooks": list(plugin.hooks),
        "provides": {
            kind.key: names
            for kind in KINDS
            if (names := [record.name for record in plugin.providers if type(record) is kind.record])
        },
        "import_s": round(plugin.import_s, 4),
        "error": str(plugin.error) if plugin.error is not None else None,
    }
