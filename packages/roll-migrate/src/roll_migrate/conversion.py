"""Conversion of another framework's config by a table of rules, and the report on its keys.

A subclass belongs to one framework. It supplies the table and the defaults that differ.
"""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roll_core.config.explain import show
from roll_core.errors import ConfigError, PluginError
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.providers import InferProvider, TrackerProvider, TrainProvider
from roll_migrate.rules import Each, Key, KeyRule, Outcome, value_at
from roll_migrate.strategies import refusals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from roll_core.config.compose import ComposedConfig
    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_migrate.rules import ImportStatus, Table

GENERATES = "actor_infer"
NULL_MEANS_SOMETHING = ("track_with",)
"""Keys for which null and a missing key mean different things."""

_ENVIRONMENT = re.compile(r"\$\{oc\.(?:env:[^${}]*|decode:\s*\$\{oc\.env:[^${}]*\})\}")


@dataclass(frozen=True, slots=True)
class ImportedKey:
    """Result of importing one key."""

    where: str
    """`file:line:column`; empty for an added key."""
    key: str
    """Dotted key as in the imported file."""
    status: ImportStatus
    to: tuple[str, ...] = ()
    """Dotted keys of the new config that replace it."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """The new config, and a report on every key of the old one: the result of an `Importer`."""

    pipeline: str
    config: dict[str, Any]
    keys: tuple[ImportedKey, ...]


class Verbatim(str):
    """Text that is written unchanged: an interpolation to be resolved when the config is loaded."""


@dataclass(slots=True, kw_only=True)
class Conversion:
    """Conversion of one config."""

    source: dict[str, Any]
    """The other framework's config, with interpolations resolved."""
    pipeline: str
    """Name of roll-core's pipeline, or of the framework's table for it."""
    registry: Registry
    where: Callable[[KeyPath], str]
    """Returns `file:line:column` of a key."""
    config: dict[str, Any] = field(default_factory=dict)
    """The new config."""
    entries: dict[KeyPath, ImportedKey] = field(default_factory=dict)
    quantized: bool = False
    """True if the engine receives weights in a format other than their dtype, such as fp8."""

    def _key(self, path: KeyPath) -> Key:
        """The key as rules see it."""
        return Key(path, self.source, self.pipeline, self.registry.names(TrackerProvider))

    def _renamed(self, path: KeyPath) -> KeyPath:
        """The path in the new config: roles may have other names."""
        return path

    def _table(self, path: KeyPath, table: Table, value: Mapping[str, Any]) -> Table:
        """Rules for the keys of the mapping at `path`."""
        return table

    def _unknown(self, table: Table, path: KeyPath, value: Any) -> None:
        """Record a key that `table` does not have."""
        raise NotImplementedError

    def _mapping(self, table: Table, value: dict[str, Any], path: KeyPath, unused: Mapping[str, str]) -> None:
        for name, each in value.items():
            here = (*path, str(name))
            rule = table.get(str(name))
            if not path and name in unused:
                self._record(here, each, Outcome("not needed", (), unused[name]))
            elif rule is None:
                self._unknown(table, here, each)
            elif isinstance(rule, KeyRule):
                self._apply(rule, here, each)
            elif each is None or each == {}:
                self._record(here, each, Outcome("not needed", (), "it is empty"))
            elif not isinstance(each, dict):
                self._record(here, each, Outcome("unsupported", ((here, each),), "expected a mapping"))
            elif isinstance(rule, Each):
                self._mapping(dict.fromkeys(map(str, each), rule.rule), each, here, {})
            else:
                self._mapping(self._table(here, rule, each), each, here, {})

    def _apply(self, rule: KeyRule, path: KeyPath, value: Any) -> None:
        if value is None and path[-1] not in NULL_MEANS_SOMETHING:
            self._record(path, value, Outcome("not needed", (), "null has no effect"))
            return
        key = self._key(path)
        outcome = rule(value, key)
        if isinstance(value, Verbatim) and any(written != value for _, written in outcome.writes):
            writes = tuple((target, value) for target, _ in outcome.writes)
            outcome = Outcome("kept", writes, "its value comes from the environment and was not converted")
        self._record(path, value, outcome)

    def _record(self, path: KeyPath, value: Any, outcome: Outcome) -> None:
        """Write the outcome's values to the new config, and record an entry for every key of `value`."""
        outcome = replace(outcome, writes=tuple((self._renamed(to), written) for to, written in outcome.writes))
        for target, written in outcome.writes:
            put(self.config, target, deepcopy(written))
        outcome = _with_values(path, value, outcome)
        for leaf in keys(value, path):
            rest = leaf[len(path) :]
            to = tuple(
                ".".join((*target, *rest) if isinstance(written, dict) else target)
                for target, written in outcome.writes
                if not isinstance(written, dict) or has(written, rest)
            )
            self.entries[leaf] = ImportedKey(self.where(leaf), ".".join(leaf), outcome.status, to, outcome.note)

    def _put_added(self, added: Iterable[tuple[KeyPath, object, str]]) -> list[ImportedKey]:
        """Add values where the new config has none, and return an entry for each added key."""
        entries = []
        for path, value, note in added:
            if not has(self.config, path) and put(self.config, path, value):
                entries.append(ImportedKey("", "", "added", (".".join(path),), f"{show(value, path[-1])}: {note}"))
        return entries

    # -- strategies ----------------------------------------------------------------------------------------------------

    def _strategy(self, role: KeyPath) -> None:
        """Remove the keys of `strategy_config` that the strategy's schema refuses, and record the reasons."""
        arguments = value_at(self.config, role)["strategy_args"]
        generates, prefix = role == (GENERATES,), f"{'.'.join(role)}.strategy_args."
        kind: type[InferProvider] | type[TrainProvider] = InferProvider if generates else TrainProvider
        try:
            provider = self.registry.find(kind, arguments["strategy_name"])
        except PluginError:
            return  # `check` names the missing package; without its schema no key can be checked
        owner = self.registry.owner(provider)
        schema = schema_of(provider, StrategyConfig, owner=owner)
        keys = arguments.get("strategy_config") or {}
        if not isinstance(keys, dict):
            return
        stay = {
            entry.to[0].rpartition(".")[2]
            for entry in self.entries.values()
            if entry.status == "unsupported" and entry.to and entry.to[0].startswith(prefix)
        }
        refused = refusals(schema, {key: each for key, each in keys.items() if key not in stay})
        for path, reason in refused.items():
            self._withdraw((*role, "strategy_args", "strategy_config", *path), "unsupported", reason)
        taken = {key: each for key, each in keys.items() if key not in stay}
        self._slots(role, schema, taken)
        if generates:
            self.quantized = schema.model_construct(**taken).weight_format() != "dtype"

    def _slots(self, role: KeyPath, schema: type[StrategyConfig], keys: dict[str, Any]) -> None:
        given = value_at(self.config, role).get("num_gpus_per_worker")
        computed = schema.model_construct(**keys).slots_per_worker() if role == (GENERATES,) else 1
        if given is not None and computed is not None and given != computed:
            self._withdraw((*role, "num_gpus_per_worker"), "not needed", f"the strategy sets {computed} per worker")

    def _withdraw(self, target: KeyPath, status: ImportStatus, reason: str) -> None:
        """Remove a key from the new config, and change the entries of the keys that it came from."""
        _take(self.config, target)
        dotted = ".".join(target)
        for path, entry in self.entries.items():
            if any(each == dotted or each.startswith(f"{dotted}.") for each in entry.to):
                self.entries[path] = replace(entry, status=status, to=(), note=reason)


def keys(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Yield the paths of all keys without further keys below them."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from keys(each, (*path, str(key)))
    else:
        yield path


def _with_values(path: KeyPath, value: Any, outcome: Outcome) -> Outcome:
    """Prefix the note with the old and the new value, if these are single values and differ."""
    if len(outcome.writes) != 1 or outcome.status not in ("changed", "renamed"):
        return outcome
    written = outcome.writes[0][1]
    if written == value or any(isinstance(each, (dict, list)) for each in (value, written)):
        return outcome
    change = f"{show(value, path[-1])} → {show(written, path[-1])}"
    return replace(outcome, note=f"{change}: {outcome.note}" if outcome.note else change)


def paths(table: Table, prefix: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all keys of a table."""
    for name, rule in table.items():
        yield (*prefix, name)
        if isinstance(rule, Each):
            yield from () if isinstance(rule.rule, KeyRule) else paths(rule.rule, (*prefix, name, "*"))
        elif not isinstance(rule, KeyRule):
            yield from paths(rule, (*prefix, name))


def has(data: Any, path: KeyPath) -> bool:
    """True if `data` has a key at `path`."""
    parent = value_at(data, path[:-1])
    return not path or (isinstance(parent, dict) and path[-1] in parent)


def put(data: dict[str, Any], path: KeyPath, value: Any) -> bool:
    """Set the value at `path`, and create missing mappings on the way.

    Returns False if a value that is not a mapping is in the way; `roll-core check` refuses such a config.
    """
    for step in path[:-1]:
        data = data.setdefault(step, {})
        if not isinstance(data, dict):
            return False
    data[path[-1]] = value
    return True


def _take(data: dict[str, Any], path: KeyPath) -> None:
    """Remove the value at `path`, and mappings that become empty."""
    parent = value_at(data, path[:-1])
    parent.pop(path[-1], None)
    if not parent and len(path) > 1:
        _take(data, path[:-1])


def with_environment(composed: ComposedConfig) -> dict[str, Any]:
    """Return the composed values, with interpolations of environment variables left as they are written.

    Their values may be secrets, and the variables need not be set here. Raises `ConfigError` if another interpolation
    cannot be resolved.
    """
    data: dict[str, Any] = deepcopy(composed.data)
    from_environment = {path: text for path in _leaves(data) if (text := _environment_text(path, composed))}
    problems = [each for each in composed.problems if tuple(each.key.split(".")) not in from_environment]
    if problems:
        raise ConfigError(problems)
    for path, text in from_environment.items():
        parent: Any = data
        for step in path[:-1]:
            parent = parent[int(step)] if isinstance(parent, list) else parent[step]
        parent[int(path[-1]) if isinstance(parent, list) else path[-1]] = Verbatim(text)
    return data


def _environment_text(path: KeyPath, composed: ComposedConfig) -> str:
    """Text of the interpolation if `path` comes only from the environment; otherwise empty."""
    found = composed.positions.interpolations.get(path)
    for _ in range(len(composed.positions.interpolations)):
        if found is None or found.from_environment or found.target is None:
            break
        found = composed.positions.interpolations.get(found.target)
    if found is None or not found.from_environment or "${" in _ENVIRONMENT.sub("", found.text):
        return ""
    return found.text


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of all values, including items of lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from _leaves(each, (*path, str(key)))
    if not items and path:
        yield path
