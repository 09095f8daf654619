"""Suggestions for unknown keys: the most similar key on this level or another."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from roll_core.config.source import KeyPath

MAX_SUGGESTIONS = 100
"""Maximum number of suggestions per config. One takes most of a millisecond."""
MANY = 10
"""Maximum number of keys to list if none is similar; more would obscure the message."""


def suggest_key(path: KeyPath, siblings: Sequence[str], everywhere: Iterable[KeyPath]) -> tuple[str, str]:
    """Hint for the unknown key at `path`, and the name of the probably intended key (empty if none was found)."""
    parent, name = path[:-1], path[-1]
    close = difflib.get_close_matches(name, siblings, 1, 0.75)
    if close:
        return f"did you mean {close[0]}?", close[0]
    places = list(everywhere)
    same = [each for each in places if each[-1] == name]
    if same:
        place = best_place(same, parent)[:-1]
        return f"{name} belongs {f'under {dotted(place)}' if place else 'at the top level'}", name
    close = difflib.get_close_matches(name, siblings, 1, 0.6)
    if close:
        return f"did you mean {close[0]}?", close[0]
    close = difflib.get_close_matches(name, {each[-1] for each in places}, 1, 0.8)
    if close:
        best = best_place([each for each in places if each[-1] == close[0]], parent)
        return f"did you mean {dotted(best)}{'' if len(best) > 1 else ', at the top level'}?", close[0]
    if 0 < len(siblings) <= MANY:
        return f"keys here are {', '.join(siblings)}", ""
    return "", ""


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
        parent[at] if step == "*" and at < len(parent) and shared(best) > at else step for at, step in enumerate(best)
    )


def dotted(path: KeyPath) -> str:
    """A path as shown in messages."""
    return ".".join("<name>" if step == "*" else step for step in path)
