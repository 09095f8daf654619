"""What the pages share: templates, JSON in script elements, and charts with several curves."""

from __future__ import annotations

import functools
import json
import math
from typing import TYPE_CHECKING

from roll_tools import tables
from roll_tools.charts import figure, seconds, thin

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import jinja2

TONES = {"finished": "good", "failed": "bad", "killed": "bad", "running": "live"}
"""Colour of the outcome; others are `warn`."""


@functools.cache
def template(name: str) -> jinja2.Template:
    """A template of the pages, with their filters."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("roll_tools", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"figure": figure, "seconds": seconds, "date": tables.date}
    return environment.get_template(name)


def for_script(value: object) -> str:
    """Encode as JSON for a script element. Escapes characters that could end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def overlay_json(names: Sequence[str], charts: Iterable[tuple[str, Sequence[Sequence[tuple[float, float]]]]]) -> str:
    """Encode charts of several curves for `overlay.html.j2`: title and one list of finite points per name.

    Returns an empty string if no chart has a point.
    """
    overlays = []
    for title, lines in charts:
        finite = [thin([(x, y) for x, y in line if math.isfinite(y)]) for line in lines]
        if any(finite):
            overlays.append({"title": title, "lines": finite})
    return for_script({"names": list(names), "charts": overlays}) if overlays else ""
