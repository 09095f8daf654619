"""`roll-core plugins`: lists installed plugins, their parts and their failures. A broken plugin does not stop it."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from roll_core.errors import MissingRequirementError, UnknownProviderError, closest, install_command
from roll_core.plugins.loader import SLOW_IMPORT_S, normalise
from roll_core.plugins.records import KINDS, kind_of
from roll_core.plugins.registry import load_registry
from roll_core.plugins.requirements import alternatives
from roll_core.plugins.targets import load_target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.plugins.loader import Plugin
    from roll_core.plugins.registry import Registry


def show_plugins(disabled_plugins: Sequence[str], *, as_json: bool, verbose: bool, check_parts: bool) -> int:
    """List every plugin. Returns the exit code: 2 if `check_parts` is set and finds a broken part, otherwise 0.

    A part whose optional package is not installed is listed separately, and is not broken.
    """
    registry = load_registry(disabled_plugins)
    broken, absent = from_roll_testing("roll_testing.part_checks:check_parts")(registry) if check_parts else ([], [])
    if as_json:
        listing: dict[str, Any] = {"plugins": registry.describe(), "conflicts": _conflicts(registry)}
        if check_parts:
            listing |= {"broken": broken, "not_installed": absent}
        sys.stdout.write(json.dumps(listing, indent=2) + "\n")
    else:
        for plugin in registry.plugins:
            sys.stdout.write("\n".join(_lines(plugin, verbose=verbose)) + "\n")
            for problem in registry.broken(plugin):
                sys.stdout.write(f"    broken: {problem}\n")
        for conflict in _conflicts(registry):
            sys.stdout.write(f"conflict: {conflict}\n")
        for problem in broken:
            sys.stdout.write(f"broken: {problem}\n")
        for problem in absent:
            sys.stdout.write(f"not installed: {problem}\n")
        if check_parts and not broken:
            others = "all other parts" if absent else "all parts"
            sys.stdout.write(f"{others} can be imported, and their requirements are installed\n")
    return 2 if broken else 0


def test_plugin(name: str, disabled_plugins: Sequence[str], expression: str) -> int:
    """Run the conformance tests of an installed plugin. Raises `PluginError` if it is not installed or did not load."""
    registry = load_registry(disabled_plugins)
    by_name = {normalise(plugin.package): plugin for plugin in registry.plugins}
    plugin = by_name.get(normalise(name))
    if plugin is None:
        close = closest(name, by_name)
        hint = f"did you mean {close}?" if close else f"installed: {', '.join(sorted(by_name))}"
        raise UnknownProviderError(f"no plugin is called {name!r}; {hint}")
    if plugin.error is not None:
        raise plugin.error
    code: int = from_roll_testing("roll_testing.suites:run_suites")(plugin, expression)
    return code


def from_roll_testing(target: str) -> Any:
    """A function of roll-testing, which the core does not require. Raises `MissingRequirementError`."""
    if importlib.util.find_spec("roll_testing") is None:
        raise MissingRequirementError(
            f"this command needs roll-testing, which is not installed: {install_command('roll-testing')}"
        )
    return load_target(target, owner="roll-testing")


def _lines(plugin: Plugin, *, verbose: bool) -> list[str]:
    lines = [f"{plugin!s:<32} {plugin.state}"]
    if plugin.error is not None:
        lines.append(f"    {plugin.error}")
    for kind in KINDS:
        offered = [record for record in plugin.providers if type(record) is kind.record]
        if offered and not verbose:
            lines.append(f"    {kind.key.replace('_', ' ')}: {', '.join(record.name for record in offered)}")
        for record in offered if verbose else ():
            lines.append(f"    {kind.noun} {record.name}: {record.summary}")
            if record.needs:
                lines.append(f"        needs {', '.join(' or '.join(alternatives(need)) for need in record.needs)}")
    if verbose and plugin.target:
        slow = "  (slow: every command that reads a config waits for it)" if plugin.import_s > SLOW_IMPORT_S else ""
        lines.append(f"    {plugin.target}, hook API {plugin.hook_api}, imported in {plugin.import_s:.3f} s{slow}")
        if plugin.hooks:
            lines.append(f"    hooks: {', '.join(plugin.hooks)}")
    elif plugin.import_s > SLOW_IMPORT_S:
        lines.append(f"    slow to import: {plugin.import_s:.1f} s")
    return lines


def _conflicts(registry: Registry) -> list[str]:
    """Describe names that several plugins offer; such a name is an error only in a config that uses it."""
    owners: dict[tuple[str, str], list[str]] = defaultdict(list)
    for plugin in registry.plugins:
        for record in plugin.providers:
            owners[kind_of(type(record)).noun, record.name].append(str(plugin))
    return [
        f"{noun} {name!r} is offered by {' and '.join(packages)}"
        for (noun, name), packages in owners.items()
        if len(packages) > 1
    ]
