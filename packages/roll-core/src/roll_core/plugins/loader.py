"""Finds and loads plugins in isolation: a broken plugin is recorded with its cause and does not affect the others.

    distributions -> entry points of group roll.plugins -> allowed? -> import -> hook API? -> hooks -> records

Each plugin has its own pluggy manager, so every result and every failure belongs to a known package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import inspect
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from roll_core.errors import PluginError, PluginLoadError, closest, one_line
from roll_core.plugins.records import KINDS, check_record, show
from roll_core.plugins.requirements import CORE
from roll_core.spec import HOOK_API, hooks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from roll_core.plugins.records import Kind
    from roll_core.spec.providers import Provider

GROUP = "roll.plugins"
ALLOW_VARIABLE = "ROLL_PLUGINS"
"""Comma-separated distributions or entry points that may be loaded besides roll-core. If unset, all may be loaded."""
SLOW_IMPORT_S = 0.25
"""Seconds above which the listing marks an import as slow: every command that reads a config pays for it."""

State = Literal["loaded", "failed", "disabled", "not allowed", "not installed"]

HOOK_NAMES = frozenset(name for name in vars(hooks) if name.startswith("roll_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """One entry point of one distribution, and the result of loading it."""

    package: str
    """Name of the distribution."""
    version: str
    entry_point: str
    target: str
    """Value of the entry point, `module` or `module:attribute`."""
    state: State
    hook_api: int | None = None
    hooks: tuple[str, ...] = ()
    """Names of the implemented hooks."""
    providers: tuple[Provider, ...] = ()
    import_s: float = 0.0
    """Import time in seconds, including modules that this plugin is the first to import."""
    error: PluginLoadError | None = None
    """Why loading failed; `__cause__` is the exception that the plugin raised, if any."""
    manager: pluggy.PluginManager | None = field(default=None, repr=False, compare=False)
    """Calls this plugin's hooks; None unless loaded."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}".rstrip()

    @property
    def cause(self) -> str:
        """One-line reason of the failure: the plugin's exception or the violated contract. Empty without an error."""
        if self.error is None:
            return ""
        root = self.error.__cause__
        return str(self.error) if root is None else one_line(root)


def load_plugins(
    disabled: Collection[str] = (), environ: Mapping[str, str] = os.environ, path: list[str] | None = None
) -> tuple[Plugin, ...]:
    """Load every installed plugin, roll-core's own first; a plugin that is not loaded carries the reason.

    `disabled` names distributions or entry points that are not imported. Raises `PluginError` if one of them is not
    installed. Names in `ROLL_PLUGINS` that are not installed are part of the result. `path` replaces `sys.path` for the
    search.
    """
    discovered = sorted(
        _discover(path), key=lambda plugin: (normalise(plugin.package) != CORE, normalise(plugin.package))
    )
    _refuse_unknown(disabled, discovered)
    allowed = _allowed(environ)
    plugins = []
    for plugin in discovered:
        if _is_named(plugin, disabled):
            plugins.append(replace(plugin, state="disabled"))
        elif allowed is not None and not _is_named(plugin, allowed) and normalise(plugin.package) != CORE:
            plugins.append(replace(plugin, state="not allowed"))
        elif plugin.error is not None:
            plugins.append(plugin)
        else:
            plugins.append(_load(plugin))
    for name in sorted(allowed or ()):
        if not any(_is_named(plugin, {name}) for plugin in discovered):
            plugins.append(Plugin(package=name, version="", entry_point="", target="", state="not installed"))
    return tuple(plugins)


def normalise(name: str) -> str:
    """Distribution name in the normalised form of PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


# -- discovery ---------------------------------------------------------------------------------------------------------


def _discover(path: list[str] | None) -> Iterator[Plugin]:
    """Yield the entry points of group `roll.plugins` of every distribution.

    A distribution in several folders of the path counts once, from the first folder, as in `import`. Two distributions
    may use the same entry-point name; both are kept.
    """
    seen: set[str] = set()
    arguments: dict[str, Any] = {} if path is None else {"path": path}
    for distribution in importlib.metadata.distributions(**arguments):
        if GROUP not in _entry_points_text(distribution):
            continue
        package, version = _identity(distribution)
        if normalise(package) in seen:
            continue
        seen.add(normalise(package))
        try:
            points = [point for point in distribution.entry_points if point.group == GROUP]
        except Exception as error:  # a damaged file may raise anything in the parser
            problem = _failure(package, version, "its entry_points.txt cannot be read", error)
            yield Plugin(package=package, version=version, entry_point="", target="", state="failed", error=problem)
            continue
        for point in points:
            yield Plugin(package=package, version=version, entry_point=point.name, target=point.value, state="loaded")


def _entry_points_text(distribution: importlib.metadata.Distribution) -> str:
    """Text of `entry_points.txt`; empty if there is none. Bytes that are not UTF-8 are replaced."""
    try:
        return distribution.read_text("entry_points.txt") or ""
    except UnicodeDecodeError as error:
        return error.object.decode(errors="replace")


def _identity(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Name and version; if METADATA is missing or damaged, they come from the folder's name."""
    try:
        metadata = distribution.metadata  # parsed by each access
        name, version = metadata["Name"], metadata["Version"]
    except Exception:  # a broken distribution must not hide the others
        name, version = None, ""
    if not name:
        folder = getattr(distribution, "_path", None)
        stem = getattr(folder, "stem", "") or "an unnamed distribution"
        name, _, version = str(stem).partition("-")
    return str(name), str(version or "")


def _allowed(environ: Mapping[str, str]) -> set[str] | None:
    value = environ.get(ALLOW_VARIABLE)
    return None if value is None else {name.strip() for name in value.split(",") if name.strip()}


def _is_named(plugin: Plugin, names: Collection[str]) -> bool:
    normalised = {normalise(name) for name in names}
    return normalise(plugin.package) in normalised or normalise(plugin.entry_point) in normalised


def _refuse_unknown(disabled: Collection[str], plugins: list[Plugin]) -> None:
    for name in disabled:
        if not any(_is_named(plugin, {name}) for plugin in plugins):
            installed = sorted({plugin.package for plugin in plugins})
            close = closest(normalise(name), installed)
            hint = f"did you mean {close}?" if close else f"installed: {', '.join(installed)}"
            raise PluginError(f"--disable-plugin {name}: there is no such plugin; {hint}")


# -- loading -----------------------------------------------------------------------------------------------------------


def _load(plugin: Plugin) -> Plugin:
    """Return the plugin, loaded or failed. Records any exception of its import or hooks except KeyboardInterrupt."""
    began = time.perf_counter()
    try:
        # Output that a plugin prints on import must not corrupt that of `--json`.
        with contextlib.redirect_stdout(sys.stderr):
            point = importlib.metadata.EntryPoint(plugin.entry_point, plugin.target, GROUP)
            module = point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # third-party code may raise anything, SystemExit included
        seconds = time.perf_counter() - began
        what = f"importing {plugin.target} failed, which its pyproject.toml names for {plugin.entry_point} in {GROUP}"
        problem = _failure(plugin.package, plugin.version, what, error)
        return replace(plugin, state="failed", import_s=seconds, error=problem)
    plugin = replace(plugin, import_s=time.perf_counter() - began)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            _check_api(module)
            manager = _register(module, plugin.entry_point)
            names = tuple(sorted(manager.implemented))
            providers = tuple(record for kind in KINDS if kind.hook in names for record in _call(manager, kind))
    except _BrokenContractError as error:
        problem = _failure(plugin.package, plugin.version, str(error), error.__cause__)
        return replace(plugin, state="failed", error=problem)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # attributes of the plugin may be computed, by its own code
        problem = _failure(plugin.package, plugin.version, "its hooks cannot be read", error)
        return replace(plugin, state="failed", error=problem)
    return replace(plugin, hook_api=HOOK_API, hooks=names, providers=providers, manager=manager)


class _BrokenContractError(Exception):
    """An imported plugin violates the contract of plugins; the message describes how."""


def _failure(package: str, version: str, problem: str, cause: BaseException | None) -> PluginLoadError:
    detail = f": {one_line(cause)}" if cause is not None else ""
    error = PluginLoadError(f"plugin {package} {version}: {problem}{detail}")
    error.__cause__ = cause
    return error


def _check_api(module: Any) -> None:
    stated = getattr(module, "ROLL_HOOK_API", None)
    if stated is None:
        raise _BrokenContractError(f"ROLL_HOOK_API is missing, expected {HOOK_API} (the version of the hook API)")
    if type(stated) is not int:
        raise _BrokenContractError(f"ROLL_HOOK_API is {stated!r}, expected a number such as {HOOK_API}")
    if stated != HOOK_API:
        newer = "plugin" if stated < HOOK_API else "roll-core"
        message = f"ROLL_HOOK_API is {stated}, expected {HOOK_API}, the version of this roll-core"
        raise _BrokenContractError(f"{message}: install a newer {newer}")


class _Manager(pluggy.PluginManager):
    """Leaves out what pluggy would examine in vain, most of its time: hooks that the plugin does not implement, and a
    module's classes and values.
    """

    def __init__(self) -> None:
        super().__init__(hooks.PROJECT)
        self.implemented: set[str] = set()

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return super().parse_hookspec_opts(module_or_class, name) if name in self.implemented else None

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if isinstance(plugin, ModuleType):
            function = vars(plugin).get(name)
            if not callable(function) or isinstance(function, type):
                return None
        return super().parse_hookimpl_opts(plugin, name)


def _register(module: Any, name: str) -> _Manager:
    manager = _Manager()
    manager.implemented |= _hook_names(manager, module)
    manager.add_hookspecs(hooks)
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        expected = ", ".join(f"{name}{inspect.signature(getattr(hooks, name))}" for name in sorted(manager.implemented))
        raise _BrokenContractError(f"{' '.join(str(error).split())}; expected {expected}") from None
    return manager


def _hook_names(manager: pluggy.PluginManager, module: Any) -> set[str]:
    """Names of the implemented hooks.

    Rejects misspelt hooks, and hook functions without `@hookimpl`: pluggy would call neither.
    """
    implemented = set()
    for name in dir(module):
        options = manager.parse_hookimpl_opts(module, name)
        if options is not None:
            hook = options.get("specname") or name
            if hook not in HOOK_NAMES:
                close = closest(hook, HOOK_NAMES, 0.5)
                hint = f"did you mean {close}?" if close else f"hooks are {', '.join(sorted(HOOK_NAMES))}"
                raise _BrokenContractError(f"{hook} is not a hook; {hint}")
            if inspect.iscoroutinefunction(getattr(module, name)):
                raise _BrokenContractError(f"{hook} is a coroutine function, which nothing would await")
            implemented.add(hook)
        elif name.startswith("roll_") and callable(getattr(module, name, None)):
            close = closest(name, HOOK_NAMES, 0.85)
            if close:
                raise _BrokenContractError(
                    f"{name} is not marked with @hookimpl, so it is never called; mark it, as {close}"
                )
    if not implemented:
        raise _BrokenContractError(
            f"it has no function marked with @hookimpl, expected at least one of {', '.join(sorted(HOOK_NAMES))}"
        )
    return implemented


def _call(manager: pluggy.PluginManager, kind: Kind) -> list[Provider]:
    """Call one provider hook of a plugin and return its records, checked."""
    expected = f"expected an iterable of {kind.record.__name__}"
    try:
        results = getattr(manager.hook, kind.hook)()
        if not results:
            raise _BrokenContractError(f"{kind.hook} returned None, {expected}")
        records: list[Any] = []
        for result in results:
            if not isinstance(result, Iterable) or isinstance(result, (str, bytes, Mapping)):
                raise _BrokenContractError(f"{kind.hook} returned {show(result)}, {expected}")
            records += result
    except (KeyboardInterrupt, _BrokenContractError):
        raise
    except BaseException as error:  # the plugin's own code, SystemExit included
        fields = ", ".join(field.name for field in dataclasses.fields(kind.record))
        hint = f" ({kind.record.__name__} has the fields {fields})" if isinstance(error, TypeError) else ""
        raise _BrokenContractError(f"{kind.hook} raised{hint}") from error
    names: set[str] = set()
    for position, record in enumerate(records, 1):
        if type(record) is not kind.record:
            hook = next((f"; return it from {other.hook}" for other in KINDS if type(record) is other.record), "")
            raise _BrokenContractError(
                f"item {position} of {kind.hook} is {show(record)}, expected {kind.record.__name__}{hook}"
            )
        problem = check_record(record)
        if problem:
            raise _BrokenContractError(f"item {position} of {kind.hook}: {problem}")
        if record.name in names:
            raise _BrokenContractError(f"{kind.hook} offers {record.name!r} twice")
        names.add(record.name)
    return records
