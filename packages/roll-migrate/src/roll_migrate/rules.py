"""Engine of conversion rules: the vocabulary in which tables of another framework's keys are written.

A table maps the keys of a mapping to rules; a nested table describes a nested mapping. A rule is a function of a
value and its `Key`, which returns an `Outcome`; the constructors below build the common ones.

    MODEL = {"dtype": keep(), "path": to("pretrain"), "num_labels": unneeded("the role decides"), "lora": convert_lora}

A setting that roll-core does not support is dropped (`unsupported`) if training results do not depend on it. Otherwise
it stays in the config (`refused`), so that `roll-core check` rejects it: no setting that affects training disappears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from roll_core.config.source import KeyPath

ImportStatus = Literal["kept", "differs", "renamed", "changed", "added", "not needed", "dead", "unsupported", "unknown"]
"""Result of importing one key. `differs`: same name and value, different effect. `added`: the other framework has a
different default. `dead`: no effect in the other framework. `unknown`: neither framework has the key."""
IMPORT_STATUSES: tuple[ImportStatus, ...] = get_args(ImportStatus)

Writes = tuple[tuple["KeyPath", Any], ...]
"""Pairs of a path in the new config and the value written there."""
Target = str | Mapping[Any, Any]
"""Dotted key that gets the value, or values by dotted key or by path. `{role}` is `Key.new_role`."""
REJECTED = "left in the config, which `check` rejects"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of converting one key."""

    status: ImportStatus
    writes: Writes = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """A key with its value, and the config that contains it. Its methods build outcomes."""

    path: KeyPath
    source: Mapping[str, Any]
    """The whole imported config, with interpolations resolved."""
    pipeline: str
    """Name of roll-core's pipeline."""
    trackers: tuple[str, ...] = ()
    """Names of the installed trackers."""
    new_role: str = ""
    """Dotted name of the role in the new config that gets settings of this key's role."""
    value: Any = None

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self.path[-1]

    @property
    def role(self) -> KeyPath:
        """Path of the role that the key belongs to."""
        return self.path[:2] if self.path[0] in ("rewards", "teachers") else self.path[:1]

    @property
    def parent(self) -> str:
        """Dotted path of the mapping that has the key."""
        return ".".join(self.path[:-1])

    def beside(self, name: str) -> Any:
        """Value of another key of the same mapping; None if there is none."""
        return self.get(*self.path[:-1], name)

    def get(self, *path: str) -> Any:
        """Value at a path from the top level; None if there is none."""
        return value_at(self.source, path)

    def unchanged(self, note: str = "") -> Outcome:
        """Keep name and value."""
        return Outcome("kept", ((self.path, self.value),), note)

    def renamed(self, target: Target, note: str = "") -> Outcome:
        """Write the value elsewhere."""
        return Outcome("renamed", self._writes(target), note)

    def changed(self, target: Target, note: str = "") -> Outcome:
        """Write another value."""
        return Outcome("changed", self._writes(target), note)

    def differs(self, note: str, target: Target | None = None) -> Outcome:
        """Write the value, or nothing, although the result differs."""
        return Outcome("differs", () if target is None else self._writes(target), note)

    def unneeded(self, note: str) -> Outcome:
        """Drop the key, because roll-core decides by itself."""
        return Outcome("not needed", (), note)

    def dead(self, note: str) -> Outcome:
        """Drop a key that has no effect in the other framework."""
        return Outcome("dead", (), note)

    def lacking(self, note: str, target: Target | None = None) -> Outcome:
        """Drop a setting without a counterpart, or write what replaces it in part."""
        return Outcome("unsupported", () if target is None else self._writes(target), note)

    def rejected(self, note: str) -> Outcome:
        """Leave the setting in the config, so that `check` rejects it with the schema's reason."""
        return Outcome("unsupported", ((self.path, self.value),), note)

    def refused(self, note: str) -> Outcome:
        """Leave the setting in the config, so that `check` rejects it."""
        return self.rejected(f"{note}; {REJECTED}")

    def _writes(self, target: Target) -> Writes:
        targets = target if isinstance(target, Mapping) else {target: self.value}
        return tuple(
            (path if isinstance(path, tuple) else dotted(path.replace("{role}", self.new_role)), value)
            for path, value in targets.items()
        )


def value_at(data: Any, path: tuple[str, ...]) -> Any:
    """Value at `path`; None if there is none."""
    for step in path:
        if not isinstance(data, Mapping) or step not in data:
            return None
        data = data[step]
    return data


def lookup(data: Any, key: str, default: Any = None) -> Any:
    """Value at a dotted key; `default` if it is None or missing."""
    value = value_at(data, dotted(key))
    return default if value is None else value


def dotted(target: str) -> KeyPath:
    """Path of a dotted key."""
    return tuple(target.split("."))


Convert = Callable[[Any, Key], Outcome]
Condition = Callable[[Mapping[str, Any]], Any]
"""True if the imported config has a property."""


def always(source: Mapping[str, Any]) -> bool:
    """The condition that every config fulfils."""
    return True


@dataclass(frozen=True, slots=True)
class Default:
    """What the other framework does without a key, where roll-core's default differs."""

    key: str
    """Dotted key of the new config."""
    value: Any
    """A function gets the imported and the new config; None adds nothing."""
    when: Condition = always
    note: str | Callable[[Mapping[str, Any]], str] = ""
    """Otherwise that of the framework's defaults."""

    def added(self, source: Mapping[str, Any], config: Mapping[str, Any], note: str) -> list[tuple[KeyPath, Any, str]]:
        """Path, value and note, if the condition holds."""
        value = None
        if self.when(source):
            value = self.value(source, config) if callable(self.value) else self.value
        note = self.note(source) if callable(self.note) else self.note or note
        return [] if value is None else [(dotted(self.key), value, note)]


@dataclass(frozen=True, slots=True)
class KeyRule:
    """Conversion of a key whose value may be a list or a mapping, and its description for the docs.

    A function in a table is a rule for single values: the engine leaves a list or a mapping in the config, so that
    `roll-core check` rejects it.
    """

    says: str
    convert: Convert
    nested: bool = True

    def __call__(self, value: Any, key: Key) -> Outcome:
        """Convert the key with this value."""
        return self.convert(value, key) if self.nested else convert_single(self.convert, value, key)


def convert_single(rule: Convert, value: Any, key: Key) -> Outcome:
    """Convert a key whose value must be a single one, unless `rule` is a `KeyRule`."""
    if isinstance(value, (dict, list)) and not isinstance(rule, KeyRule):
        return key.rejected("expected a single value")
    return rule(value, key)


@dataclass(frozen=True, slots=True)
class AnyName:
    """Mapping with free names, whose values all follow one rule or table."""

    rule: Any


Table = Mapping[str, "Convert | KeyRule | AnyName | Table"]


def keys(names: str, rule: Convert) -> dict[str, Convert]:
    """Use the same rule for several keys, given as names separated by spaces."""
    return dict.fromkeys(names.split(), rule)


def change(says: str, convert: Convert, *, nested: bool = False) -> KeyRule:
    """Convert with the function `convert`, which `says` describes; lists and mappings only if `nested` is set."""
    return KeyRule(says, convert, nested)


def nested(convert: Convert) -> KeyRule:
    """Convert with a function that takes lists and mappings too."""
    return KeyRule("", convert)


def keep(note: str = "") -> KeyRule:
    """Keep name and value, which mean the same."""
    return KeyRule(f"kept{_because(note)}", lambda value, key: key.unchanged(note))


def differs(note: str) -> KeyRule:
    """Keep name and value, although the result differs."""
    return KeyRule(f"kept, but the result differs: {note}", lambda value, key: key.differs(note, {key.path: value}))


def rename(target: str, note: str = "") -> KeyRule:
    """Write the value under another name.

    `target` is a name in the same mapping, `role:` and a path below the key's role, or `top:` and a dotted key.
    """
    where, _, rest = target.rpartition(":")

    def convert(value: Any, key: Key) -> Outcome:
        parent = {"": key.path[:-1], "role": key.role, "top": ()}[where]
        return key.renamed({(*parent, *rest.split(".")): value}, note)

    return KeyRule(f"→ `{rest}`{_because(note)}", convert)


def to(
    *targets: str,
    note: str = "",
    status: ImportStatus = "renamed",
    neutral: tuple[Any, ...] = (),
    values: Mapping[Any, Any] | None = None,
    single: bool = False,
) -> KeyRule:
    """Write the value, or its name in `values`, at dotted keys. A value in `neutral` is roll-core's default.

    A `single` value may not be a list or a mapping.
    """

    def convert(value: Any, key: Key) -> Outcome:
        if is_neutral(value, neutral):
            return key.unneeded("it is the default here")
        written = values.get(value, value) if values else value
        return replace(key.renamed(dict.fromkeys(targets, written), note), status=status)

    return KeyRule(f"→ `{'`, `'.join(targets)}`", convert, nested=not single)


def only(condition: Condition | str, why: str, rule: Any) -> Any:
    """Rule, or table of rules, for a config that fulfils a condition: a function, or a key beside this one that is on.

    Otherwise the key is not needed, because of `why`.
    """
    if isinstance(rule, Mapping):
        return {name: only(condition, why, inner) for name, inner in rule.items()}

    def convert(value: Any, key: Key) -> Outcome:
        applies = key.beside(condition) if isinstance(condition, str) else condition(key.source)
        return convert_single(rule, value, key) if applies else key.unneeded(why)

    return KeyRule(getattr(rule, "says", ""), convert)


def if_on(rule: Convert, note: str = "it is off") -> KeyRule:
    """Rule for a value that is true; otherwise the key is not needed, because of `note`."""
    return nested(lambda value, key: convert_single(rule, value, key) if value else key.unneeded(note))


def unneeded(note: str) -> KeyRule:
    """Drop a key, because roll-core decides by itself what the key controls."""
    return KeyRule(f"not needed: {note}", lambda value, key: key.unneeded(note))


def dead(note: str) -> KeyRule:
    """Drop a key that has no effect in the other framework either."""
    return KeyRule(f"no effect in ROLL: {note}", lambda value, key: key.dead(note))


def unsupported(note: str, *neutral: Any) -> KeyRule:
    """Drop a setting that roll-core lacks and that training results do not depend on.

    `neutral` lists values that have no effect; None is always one of them.
    """
    return KeyRule(
        f"not supported{_unless(neutral)}: {note}",
        lambda value, key: _without_effect(key, neutral) or key.lacking(note),
    )


def refused(note: str, *neutral: Any) -> KeyRule:
    """Keep a setting that roll-core lacks, so that `roll-core check` rejects it: training results depend on it.

    `neutral` lists values that have no effect and are dropped; None is always one of them.
    """
    return KeyRule(
        f"rejected{_unless(neutral)}: {note}", lambda value, key: _without_effect(key, neutral) or key.refused(note)
    )


def switched(note: str, switch: str = "enable") -> KeyRule:
    """Reject a mapping if its switch is on."""

    def convert(value: Any, key: Key) -> Outcome:
        on = isinstance(value, Mapping) and value.get(switch)
        return key.refused(note) if on else key.unneeded(f"{switch} is off")

    return KeyRule(f"rejected if {switch} is on: {note}", convert)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """True if a value is one of `neutral`; True and 1 are different values here."""
    return any(value == other and isinstance(value, bool) is isinstance(other, bool) for other in neutral)


def _without_effect(key: Key, neutral: tuple[Any, ...]) -> Outcome | None:
    if key.value is None or is_neutral(key.value, neutral):
        return key.unneeded(f"{_shown(key.value)} has no effect")
    return None


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _unless(neutral: tuple[Any, ...]) -> str:
    return f" unless {' or '.join(f'`{_shown(value)}`' for value in neutral)}" if neutral else ""


def _because(note: str) -> str:
    return f": {note}" if note else ""
