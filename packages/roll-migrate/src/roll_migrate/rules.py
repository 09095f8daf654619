"""What becomes of a key: the vocabulary in which tables of foreign keys are written.

A table maps the keys of a mapping to rules; a table within a table is a mapping within a mapping.

    MODEL = {"dtype": keep(), "tf32": dead("nothing reads it"), "num_labels": unneeded("the role decides")}

A rule looks at a value and says what is to be written, and where. What a config asks for and a run could not do is
either left out (`unsupported`), where the same is learnt without it, or stays as it is (`refused`), so that
`roll-core check` refuses it: nothing that decides what is learnt disappears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_core.config.source import KeyPath
    from roll_core.spec.importing import ImportStatus

Writes = tuple[tuple["KeyPath", Any], ...]
"""Values, and where they are written."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of one key."""

    status: ImportStatus
    writes: Writes = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Key:
    """Where a key stands, and all that it stands among."""

    path: KeyPath
    source: Mapping[str, Any]
    """The whole config that is imported, its interpolations resolved."""
    pipeline: str
    """Ours."""
    trackers: tuple[str, ...] = ()
    """That are installed."""

    @property
    def name(self) -> str:
        """Its last part."""
        return self.path[-1]

    @property
    def role(self) -> KeyPath:
        """The role that it belongs to."""
        return self.path[:2] if self.path[0] == "rewards" else self.path[:1]

    def beside(self, name: str) -> Any:
        """The value of another key of the same mapping; None where it is not given."""
        return self.at(*self.path[:-1], name)

    def at(self, *path: str) -> Any:
        """A value from the top; None where it is not given."""
        return value_at(self.source, path)


def value_at(data: Any, path: tuple[str, ...]) -> Any:
    """What is at `path`; None where there is nothing."""
    for step in path:
        if not isinstance(data, Mapping) or step not in data:
            return None
        data = data[step]
    return data


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of a key, and in words for the docs."""

    says: str
    judge: Callable[[Any, Key], Outcome]

    def __call__(self, value: Any, key: Key) -> Outcome:
        """What becomes of the key with this value."""
        return self.judge(value, key)


@dataclass(frozen=True, slots=True)
class Each:
    """A mapping with free names, each of which holds what a rule or a table describes."""

    rule: Rule | Mapping[str, Any]


Table = Mapping[str, "Rule | Each | Table"]


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several keys."""
    return dict.fromkeys(names.split(), rule)


def keep(note: str = "") -> Rule:
    """Same name, same meaning."""
    return Rule(f"kept{_because(note)}", lambda value, key: Outcome("kept", ((key.path, value),), note))


def differs(note: str) -> Rule:
    """Same name and value, another result."""
    return Rule(f"kept, with another result: {note}", lambda value, key: Outcome("differs", ((key.path, value),), note))


def rename(to: str, note: str = "") -> Rule:
    """The same under another name. `to` is a name beside the key, or `role:` and a path from its role, or `top:` and
    one from the top."""

    def judge(value: Any, key: Key) -> Outcome:
        where, _, rest = to.rpartition(":")
        parent = {"": key.path[:-1], "role": key.role, "top": ()}[where]
        return Outcome("renamed", (((*parent, *rest.split(".")), value),), note)

    return Rule(f"→ `{to.rpartition(':')[2]}`{_because(note)}", judge)


def change(says: str, judge: Callable[[Any, Key], Outcome], *, nested: bool = False) -> Rule:
    """What a function makes of it. A list or a mapping, where the key is not one for them (`nested`), is left for
    `roll-core check` to refuse."""

    def judged(value: Any, key: Key) -> Outcome:
        if isinstance(value, (dict, list)) and not nested:
            return Outcome("unsupported", ((key.path, value),), "expected a single value")
        return judge(value, key)

    return Rule(says, judged)


def unneeded(note: str) -> Rule:
    """What is done, or not done, without asking."""
    return Rule(f"not needed: {note}", lambda value, key: Outcome("not needed", (), note))


def dead(note: str) -> Rule:
    """Where it comes from it does nothing either."""
    return Rule(f"does nothing in ROLL: {note}", lambda value, key: Outcome("dead", (), note))


def unsupported(note: str, *neutral: Any) -> Rule:
    """Not here, and left out: what is learnt does not depend on it. `neutral` are values that ask for nothing."""

    def judge(value: Any, key: Key) -> Outcome:
        return (
            Outcome("not needed", (), f"{_shown(value)} asks for nothing")
            if asks_for_nothing(value, neutral)
            else (Outcome("unsupported", (), note))
        )

    return Rule(f"not supported{_unless(neutral)}: {note}", judge)


def refused(note: str, *neutral: Any) -> Rule:
    """Not here, and left in the config so that it is refused: what is learnt depends on it."""

    def judge(value: Any, key: Key) -> Outcome:
        if asks_for_nothing(value, neutral):
            return Outcome("not needed", (), f"{_shown(value)} asks for nothing")
        return Outcome("unsupported", ((key.path, value),), f"{note}; left in the config, which `check` refuses")

    return Rule(f"refused{_unless(neutral)}: {note}", judge)


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is one of `neutral`; True is not 1 here."""
    return value is None or any(
        value == other and isinstance(value, bool) is isinstance(other, bool) for other in neutral
    )


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _unless(neutral: tuple[Any, ...]) -> str:
    return f" unless {' or '.join(f'`{_shown(each)}`' for each in neutral)}" if neutral else ""


def _because(note: str) -> str:
    return f": {note}" if note else ""
