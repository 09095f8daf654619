"""Selection of the report's curves: key metrics, and sections by metric prefix."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roll_tools.charts import Chart, Series, figure, line_chart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEY_CURVES = (
    ("val/score/mean", "val/loss"),
    ("score/mean", "reward/mean"),
    ("actor/loss", "train/loss", "loss"),
    ("val/token_accuracy", "train/token_accuracy", "val/rewards/accuracies", "train/rewards/accuracies"),
    ("val/rewards/margins", "train/rewards/margins"),
    ("kl/mean", "actor/kl", "actor/approx_kl"),
    ("actor/entropy", "train/entropy"),
    ("actor/clip_fraction", "actor/clipfrac"),
    ("response_length/mean",),
    ("actor/grad_norm", "train/grad_norm"),
    ("tokens_per_s/step", "tokens_per_s/train"),
)
"""Metrics shown first. Each entry lists candidates; the first that the run has is shown."""
ROUNDING = {
    **dict.fromkeys(("actor/loss", "train/loss", "loss"), 1e-6),
    **dict.fromkeys(("kl/mean", "actor/kl", "actor/approx_kl", "actor/clip_fraction", "actor/clipfrac"), 1e-9),
}
"""Metrics that are not shown first if no absolute value exceeds this: 0 but for rounding."""

BANDS = (("ci_low", "ci_high"), ("min", "max"))
"""Last parts of the names of bounds around a mean. The first pair that a metric has is its band."""
WEIGHTS = "Weight sync"
SECTIONS = {
    "val": "Held-out data",
    "score": "Rewards",
    "reward": "Rewards",
    "groups": "Rewards",
    "advantage": "Rewards",
    "return": "Rewards",
    "actor": "Policy",
    "train": "Training",
    "kl": "Policy",
    "critic": "Critic",
    "response_length": "Lengths and tokens",
    "prompt_length": "Lengths and tokens",
    "tokens": "Lengths and tokens",
    "tokens_per_s": "Throughput",
    "engine": "Engines",
    "weight_sync": WEIGHTS,
}
"""Section title by metric prefix, in display order. Other prefixes get sections of their own at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A titled group of curves."""

    title: str
    charts: list[Chart] = field(default_factory=list)
    constants: list[tuple[str, str]] = field(default_factory=list)
    """Name and value of metrics that never changed, which need no curve."""


def charts_of(metrics: Sequence[Mapping[str, float]]) -> tuple[list[Chart], list[Section]]:
    """Charts of the key metrics, and the sections in order with all other metrics."""
    names = sorted({name for row in metrics for name in row if name not in ("step", "time")})
    series = _series(metrics, [name for name in names if not name.startswith("time/")])
    key: list[Chart] = []
    for candidates in KEY_CURVES:
        known = (name for name in candidates if name in series)
        name_shown = next((name for name in known if not is_rounding(name, series[name].points)), None)
        if name_shown is not None and (chart := line_chart(series.pop(name_shown))) is not None:
            key.append(chart)
    sections: dict[str, Section] = {}
    for name, curve in series.items():
        title = SECTIONS.get(name.partition("/")[0], name.partition("/")[0])
        section = sections.setdefault(title, Section(title=title))
        values = {value for _, value in curve.points}
        if len(values) == 1 and math.isfinite(curve.points[0][1]):
            section.constants.append((name, figure(values.pop())))
        elif (chart := line_chart(curve)) is not None:
            section.charts.append(chart)
    order = list(dict.fromkeys(SECTIONS.values()))
    return key, sorted(
        sections.values(), key=lambda s: (order.index(s.title) if s.title in order else len(order), s.title)
    )


def _series(metrics: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, Series]:
    """Series by metric name. A pair of `BANDS` becomes the band around its mean, not separate curves."""
    known = set(names)
    series = {}
    for name in names:
        base, _, kind = name.rpartition("/")
        with_mean = f"{base}/mean" in known or base in known
        if with_mean and any(kind in pair and {f"{base}/{bound}" for bound in pair} <= known for pair in BANDS):
            continue
        base = base if kind == "mean" else name
        bands = ((f"{base}/{low}", f"{base}/{high}") for low, high in BANDS)
        low, high = next((pair for pair in bands if known.issuperset(pair)), ("", ""))
        both = bool(low)
        series[name] = Series(
            name=name,
            points=points(metrics, name),
            low=points(metrics, low) if both else (),
            high=points(metrics, high) if both else (),
        )
    return series


def is_rounding(name: str, values: Sequence[tuple[float, float]]) -> bool:
    """True if all values of a metric are 0 but for rounding, as a policy's loss and KL with one step per batch."""
    bound = ROUNDING.get(name)
    return bound is not None and all(abs(value) <= bound for _, value in values)


def points(metrics: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """Points `(step, value)` of a metric."""
    return [(row["step"], row[name]) for row in metrics if name in row]
