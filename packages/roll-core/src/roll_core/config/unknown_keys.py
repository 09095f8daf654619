"""Hints for unknown keys: the most similar key, or the equivalent of a key of TRL, verl or OpenRLHF."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.errors import closest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from roll_core.config.source import KeyPath

MAX_SUGGESTIONS = 100
"""Maximum number of suggestions per config. One takes most of a millisecond."""
MANY = 10
"""Maximum number of keys to list if none is similar; more would obscure the message."""


def suggest_key(path: KeyPath, siblings: Sequence[str], everywhere: Iterable[KeyPath]) -> tuple[str, str]:
    """Hint for the unknown key at `path`, and the name of the probably intended key (empty if none was found)."""
    parent, name = path[:-1], path[-1]
    close = closest(name, siblings, 0.75)
    if close:
        return f"did you mean {close}?", close
    places = list(everywhere)
    nested = (*parent, *name.split("."))
    if "." in name and nested in places:
        return f"{nested[-1]} belongs under {dotted(nested[:-1])}", nested[-1]
    same = _for_training([place for place in places if place[-1] == name], path)
    if same:
        place = best_place(same, parent)[:-1]
        return f"{name} belongs {f'under {dotted(place)}' if place else 'at the top level'}", name
    close = closest(name, siblings)
    if close:
        return f"did you mean {close}?", close
    close = closest(name, {place[-1] for place in places}, 0.8)
    if close:
        best = best_place([place for place in places if place[-1] == close], parent)
        return f"did you mean {dotted(best)}{'' if len(best) > 1 else ', at the top level'}?", close
    if 0 < len(siblings) <= MANY:
        return f"keys here are {', '.join(siblings)}", ""
    return "", ""


def _for_training(places: list[KeyPath], path: KeyPath) -> list[KeyPath]:
    """The places outside of `validation`, if there are any and `path` is not in it."""
    if path[0] == "validation":
        return places
    return [place for place in places if place[0] != "validation" or len(place) == 1] or places


def best_place(places: list[KeyPath], parent: KeyPath) -> KeyPath:
    """The path with the longest common prefix with `parent`; of several, the shortest."""

    def shared(place: KeyPath) -> int:
        count = 0
        for ours, theirs in zip(parent, place, strict=False):
            if theirs not in (ours, "*"):
                break
            count += 1
        return count

    best = min(places, key=lambda place: (-shared(place), len(place)))
    return tuple(
        parent[i] if step == "*" and i < len(parent) and shared(best) > i else step for i, step in enumerate(best)
    )


def dotted(path: KeyPath) -> str:
    """A path as shown in messages."""
    return ".".join("<name>" if step == "*" else step for step in path)


# -- keys of other frameworks ------------------------------------------------------------------------------------------

MAX_SHOWN = 40
"""Maximum number of keys of one foreign section in a hint."""


@lru_cache
def foreign_keys() -> Mapping[str, tuple[str, str]]:
    """Foreign keys, each with the equivalent keys of ROLL (separated by spaces) and a note."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_name("foreign_keys.yaml").read_bytes())
    return {key: (entry, "") if isinstance(entry, str) else (entry[0], entry[1]) for key, entry in table.items()}


def foreign_hint(path: KeyPath, value: Any, places: Sequence[KeyPath]) -> str:
    """Hint for an unknown key, or for the keys in an unknown mapping: their equivalents here. Empty if no framework has
    the key. `places` are the paths of all keys of the schema."""
    our_key = _ours(path, places)
    if our_key:
        return f"here it is {our_key}" if _entry(path)[0] else f"here {our_key}"
    shown = []
    for leaf in _leaves(value, path) if isinstance(value, dict) else ():
        ours = _ours(leaf, places) or (leaf[-1] if (leaf[-1],) in places else "")
        if ours:
            shown.append(f"{'.'.join(leaf[len(path) :])}{' is' if _entry(leaf)[0] or leaf[-1] == ours else ':'} {ours}")
    more = ["…"] if len(shown) > MAX_SHOWN else []
    lines = [*shown[:MAX_SHOWN], *more]
    return "\n    ".join(["here:", *lines] if len(lines) > 1 else [f"here {line}" for line in lines])


def meant(path: KeyPath, value: Any) -> set[str]:
    """Names of our keys that correspond to an unknown key, or to the keys in an unknown mapping."""
    entries = (_entry(leaf) for leaf in _leaves(value, path))
    return {target.rpartition(".")[2] for targets, _ in entries for target in targets.split()}


def _ours(path: KeyPath, places: Sequence[KeyPath]) -> str:
    targets, note = _entry(path)
    if not targets:
        return note
    names = [_place(target, path, places) for target in targets.split()]
    return " and ".join(names) + (f" ({note})" if note else "") if all(names) else ""


def _entry(path: KeyPath) -> tuple[str, str]:
    """The table's entry for the longest suffix of `path` that has one."""
    table = foreign_keys()
    return next((table[end] for start in range(len(path)) if (end := ".".join(path[start:])) in table), ("", ""))


def _place(target: str, path: KeyPath, places: Sequence[KeyPath]) -> str:
    """Path of our key `target` that is nearest to the foreign key's path."""
    steps = tuple(target.split("."))
    fits = [place for place in places if place[-len(steps) :] == steps]
    if steps in fits:
        return dotted(steps)
    fits = _for_training(fits, path)
    return dotted(best_place(fits, path[:-1])) if fits else ""


def _leaves(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if not isinstance(value, dict):
        yield path
        return
    for key, inner in value.items():
        yield from _leaves(inner, (*path, str(key)))
