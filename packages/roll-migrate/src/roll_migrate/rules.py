"""Conversion rules for keys: the vocabulary in which tables of another framework's keys are written.

A table maps the keys of a mapping to rules; a nested table describes a nested mapping.

    MODEL = {"dtype": keep(), "tf32": dead("nothing reads it"), "num_labels": unneeded("the role decides")}

A rule maps a value to the values that replace it and their paths in the new config. A setting that roll-core does not
support is dropped (`unsupported`) if training results do not depend on it. Otherwise it stays in the config
(`refused`), so that `roll-core check` rejects it: no setting that affects training disappears silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from roll_core.config.source import KeyPath

ImportStatus = Literal["kept", "differs", "renamed", "changed", "added", "not needed", "dead", "unsupported", "unknown"]
"""Result of importing one key. `differs`: same name and value, different effect. `added`: the other framework has a
different default. `dead`: no effect in the other framework. `unknown`: neither framework has the key."""
IMPORT_STATUSES: tuple[ImportStatus, ...] = get_args(ImportStatus)

Writes = tuple[tuple["KeyPath", Any], ...]
"""Pairs of a path in the new config and the value written there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of converting one key."""

    status: ImportStatus
    writes: Writes = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """Path of a key, and the config that contains it."""

    path: KeyPath
    source: Mapping[str, Any]
    """The whole imported config, with interpolations resolved."""
    pipeline: str
    """Name of roll-core's pipeline."""
    trackers: tuple[str, ...] = ()
    """Names of the installed trackers."""

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.path[-1]

    @property
    def role(self) -> KeyPath:
        """Path of the role that the key belongs to."""
        return self.path[:2] if self.path[0] in ("rewards", "teachers") else self.path[:1]

    def beside(self, name: str) -> Any:
        """Value of another key of the same mapping; None if it is not given."""
        return self.at(*self.path[:-1], name)

    def keep(self, value: Any) -> Outcome:
        """Keep name and value."""
        return Outcome("kept", ((self.path, value),))

    def at(self, *path: str) -> Any:
        """Value at a path from the top level; None if it is not given."""
        return value_at(self.source, path)


def value_at(data: Any, path: tuple[str, ...]) -> Any:
    """Value at `path`; None if there is none."""
    for step in path:
        if not isinstance(data, Mapping) or step not in data:
            return None
        data = data[step]
    return data


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Function that converts a key, and its description for the docs."""

    says: str
    convert: Callable[[Any, Key], Outcome]

    def __call__(self, value: Any, key: Key) -> Outcome:
        """Convert the key with this value."""
        return self.convert(value, key)


@dataclass(frozen=True, slots=True)
class Each:
    """Mapping with free names, whose values all follow one rule or table."""

    rule: KeyRule | Mapping[str, Any]


Table = Mapping[str, "KeyRule | Each | Table"]


def each(names: str, rule: KeyRule) -> dict[str, KeyRule]:
    """Use the same rule for several keys, given as names separated by spaces."""
    return dict.fromkeys(names.split(), rule)


def keep(note: str = "") -> KeyRule:
    """Keep name and value, which mean the same."""
    return KeyRule(f"kept{_because(note)}", lambda value, key: Outcome("kept", ((key.path, value),), note))


def differs(note: str) -> KeyRule:
    """Keep name and value, although the result differs."""
    return KeyRule(
        f"kept, but the result differs: {note}", lambda value, key: Outcome("differs", ((key.path, value),), note)
    )


def rename(to: str, note: str = "") -> KeyRule:
    """Write the value under another name.

    `to` is a name in the same mapping, `role:` and a path below the key's role, or `top:` and a path from the top
    level.
    """

    def convert(value: Any, key: Key) -> Outcome:
        where, _, rest = to.rpartition(":")
        parent = {"": key.path[:-1], "role": key.role, "top": ()}[where]
        return Outcome("renamed", (((*parent, *rest.split(".")), value),), note)

    return KeyRule(f"→ `{to.rpartition(':')[2]}`{_because(note)}", convert)


def dotted(target: str) -> KeyPath:
    """Path of a dotted key."""
    return tuple(target.split("."))


def to(*targets: str, note: str = "", differs: bool = False, neutral: tuple[Any, ...] = ()) -> KeyRule:
    """Write the value at other paths. A value in `neutral` is roll-core's default."""

    def convert(value: Any, key: Key) -> Outcome:
        if any(value == other and isinstance(value, bool) is isinstance(other, bool) for other in neutral):
            return Outcome("not needed", (), "it is the default here")
        return Outcome("differs" if differs else "renamed", tuple((dotted(target), value) for target in targets), note)

    return KeyRule(f"→ `{'`, `'.join(targets)}`", convert)


def only(condition: Callable[[Mapping[str, Any]], bool], why: str, rules: Table) -> Table:
    """Rules that apply if the config fulfils a condition."""

    def limited(rule: Any) -> Any:
        if not isinstance(rule, KeyRule):
            return only(condition, why, rule)

        def convert(value: Any, key: Key) -> Outcome:
            return rule(value, key) if condition(key.source) else Outcome("not needed", (), why)

        return KeyRule(rule.says, convert)

    return {name: limited(rule) for name, rule in rules.items()}


def changed(target: str, value: Any, note: str = "") -> Outcome:
    """Write another value at the dotted key `target`."""
    return Outcome("changed", ((dotted(target), value),), note)


def change(says: str, convert: Callable[[Any, Key], Outcome], *, nested: bool = False) -> KeyRule:
    """Convert the value with the function `convert`, which `says` describes.

    Unless `nested` is set, a list or a mapping stays in the config, so that `roll-core check` rejects it.
    """

    def single(value: Any, key: Key) -> Outcome:
        if isinstance(value, (dict, list)) and not nested:
            return Outcome("unsupported", ((key.path, value),), "expected a single value")
        return convert(value, key)

    return KeyRule(says, single)


def unneeded(note: str) -> KeyRule:
    """Drop a key, because roll-core decides by itself what the key controls."""
    return KeyRule(f"not needed: {note}", lambda value, key: Outcome("not needed", (), note))


def dead(note: str) -> KeyRule:
    """Drop a key that has no effect in the other framework either."""
    return KeyRule(f"no effect in ROLL: {note}", lambda value, key: Outcome("dead", (), note))


def unsupported(note: str, *neutral: Any) -> KeyRule:
    """Drop a setting that roll-core lacks and that training results do not depend on.

    `neutral` lists values that have no effect; None is always one of them.
    """

    def convert(value: Any, key: Key) -> Outcome:
        if has_no_effect(value, neutral):
            return Outcome("not needed", (), f"{_shown(value)} has no effect")
        return Outcome("unsupported", (), note)

    return KeyRule(f"not supported{_unless(neutral)}: {note}", convert)


def refused(note: str, *neutral: Any) -> KeyRule:
    """Keep a setting that roll-core lacks, so that `roll-core check` rejects it: training results depend on it.

    `neutral` lists values that have no effect and are dropped; None is always one of them.
    """

    def convert(value: Any, key: Key) -> Outcome:
        if has_no_effect(value, neutral):
            return Outcome("not needed", (), f"{_shown(value)} has no effect")
        return Outcome("unsupported", ((key.path, value),), f"{note}; left in the config, which `check` rejects")

    return KeyRule(f"rejected{_unless(neutral)}: {note}", convert)


def has_no_effect(value: Any, neutral: tuple[Any, ...]) -> bool:
    """True if a value is None or one of `neutral`; True and 1 are different values here."""
    return value is None or any(
        value == other and isinstance(value, bool) is isinstance(other, bool) for other in neutral
    )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _unless(neutral: tuple[Any, ...]) -> str:
    return f" unless {' or '.join(f'`{_shown(each)}`' for each in neutral)}" if neutral else ""


def _because(note: str) -> str:
    return f": {note}" if note else ""
