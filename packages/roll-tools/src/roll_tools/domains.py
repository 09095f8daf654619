"""Views of the report by domain (tag of the rows) and by turn, if the run recorded metrics of several."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roll_tools.charts import figure
from roll_tools.curves import points
from roll_tools.rendering import overlay_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DOMAIN = re.compile(r"(?P<before>(?:val/)?(?:score|reward|env)/)(?P<key>[^/]+)/(?P<after>.+)")
_TURN = re.compile(r"(?P<before>.*)/turn_(?P<key>\d+)/(?P<after>.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedView:
    """Metrics of the same meaning side by side: one column per domain or turn."""

    columns: list[str]
    rows: list[tuple[str, list[str]]]
    """Name of the metric, and the last value in each column; empty if it was not recorded."""
    charts: str
    """Curves of all runs as JSON, for `overlay.html.j2`."""


def by_domain(metrics: Sequence[Mapping[str, float]]) -> GroupedView | None:
    """Scores, reward components and episode metrics of each domain; None for fewer than two domains."""
    return _view(metrics, _DOMAIN, "<domain>")


def by_turn(metrics: Sequence[Mapping[str, float]]) -> GroupedView | None:
    """Metrics of each turn of multi-turn rollouts; None for fewer than two turns."""
    return _view(metrics, _TURN, "turn")


def _view(metrics: Sequence[Mapping[str, float]], pattern: re.Pattern[str], stands_for: str) -> GroupedView | None:
    groups: dict[str, dict[str, str]] = {}
    for name in sorted({name for row in metrics for name in row}):
        match = pattern.fullmatch(name)
        if match is None or (pattern is _DOMAIN and _TURN.fullmatch(name)):
            continue
        before, key, after = match["before"], match["key"], match["after"]
        title = f"{before}{stands_for}/{after}" if pattern is _DOMAIN else f"{before}/{stands_for}/{after}"
        groups.setdefault(title, {})[key] = name
    groups = {title: names for title, names in groups.items() if len(names) > 1}
    if not groups:
        return None
    keys = {key for names in groups.values() for key in names}
    columns = sorted(keys, key=lambda key: (int(key), key) if key.isdecimal() else (0, key))
    return GroupedView(
        columns=[f"turn {key}" for key in columns] if pattern is _TURN else columns,
        rows=[
            (title, [_last(metrics, names[key]) if key in names else "" for key in columns])
            for title, names in groups.items()
        ],
        charts=overlay_json(
            [f"turn {key}" for key in columns] if pattern is _TURN else columns,
            [
                (title, [points(metrics, names[key]) if key in names else [] for key in columns])
                for title, names in groups.items()
            ],
        ),
    )


def _last(metrics: Sequence[Mapping[str, float]], name: str) -> str:
    return figure(points(metrics, name)[-1][1])
