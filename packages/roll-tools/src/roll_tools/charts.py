"""Charts of the report as inline SVG. They display without scripts; hover text uses the page's own script."""

from __future__ import annotations

import html
import itertools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Point = tuple[float, float]
"""A step and the value of a metric at it."""

WIDTH, HEIGHT = 440, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 12, 24
_MOST_POINTS = 400
_DOTS_UP_TO = 30
"""Curves of at most this many points have a dot at each point."""
_SMOOTH_REACH = 6
"""Number of neighbours on each side that smoothing averages."""
_NOISY = 4.0
"""A curve is noisy, and also shown smoothed, if its total variation exceeds this multiple of its range."""
_MOST_BARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One curve, with a band from minimum to maximum if these were recorded beside the mean."""

    name: str
    points: Sequence[Point]
    low: Sequence[Point] = ()
    high: Sequence[Point] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A rendered curve. `svg` is markup; the other fields are plain text that the template escapes."""

    title: str
    svg: str
    last: str
    last_step: int
    hover: str
    """JSON list of `[x, y, step, text]` per point, in SVG units."""
    note: str = ""


class _Axes:
    """Axes of a line chart, which map values to SVG coordinates."""

    def __init__(self, points: Sequence[Point], values: Sequence[float]) -> None:
        self.x0, self.x1 = min(x for x, _ in points), max(x for x, _ in points)
        if self.x0 == self.x1:
            self.x0, self.x1 = self.x0 - 0.5, self.x1 + 0.5
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
            margin = abs(low) * 0.1 or 1.0
            low, high = low - margin, high + margin
        self.x_ticks = [t for t in nice_ticks(self.x0, self.x1, 5) if self.x0 <= t <= self.x1 and t == int(t)]
        self.y_ticks = nice_ticks(low, high, 3)
        self.y0, self.y1 = min(low, self.y_ticks[0]), max(high, self.y_ticks[-1])

    def x(self, step: float) -> float:
        return _LEFT + (step - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y0) / (self.y1 - self.y0)
        return HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM)

    def path(self, points: Sequence[Point]) -> str:
        """Path data of a polyline."""
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)

    def svg(self) -> Iterator[str]:
        """Yield grid lines and tick labels."""
        for tick in self.y_ticks:
            y = self.y(tick)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>'
            yield f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{figure(tick)}</text>'
        for tick in self.x_ticks:
            position = f'x="{self.x(tick):.1f}" y="{HEIGHT - 7}"'
            yield f'<text class="tick" {position} text-anchor="middle">{figure(tick)}</text>'


def line_chart(series: Series) -> Chart | None:
    """Render a curve; None if it has no points. Non-finite values are marked with vertical lines."""
    finite = [(x, y) for x, y in series.points if math.isfinite(y)]
    lost = [x for x, y in series.points if not math.isfinite(y)]
    if not finite and not lost:
        return None
    low = [(x, y) for x, y in series.low if math.isfinite(y)]
    high = [(x, y) for x, y in series.high if math.isfinite(y)]
    if all(len({y for _, y in band}) < 2 for band in (low, high)):
        low = high = []  # a constant band, such as rewards 0 and 1, would only fill the chart
    axes = _Axes(series.points, [y for _, y in [*finite, *low, *high]])
    parts = [*axes.svg()]
    if low and high:
        parts.append(f'<path class="band" d="{axes.path([*thin(high), *reversed(thin(low))])}Z"/>')
    if is_noisy(finite):
        parts.append(f'<path class="line raw" d="{axes.path(thin(finite))}"/>')
        parts.append(f'<path class="line" d="{axes.path(thin(smooth(finite)))}"/>')
    elif len(finite) > 1:
        parts.append(f'<path class="line" d="{axes.path(thin(finite))}"/>')
    if len(finite) <= _DOTS_UP_TO:
        parts += [f'<circle class="dot" cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="2.2"/>' for x, y in finite]
    for x in lost[:_MOST_POINTS]:
        line = f"M{axes.x(x):.1f} {_TOP}V{HEIGHT - _BOTTOM}"
        parts.append(f'<path class="lost" d="{line}"><title>step {x:g}: not finite</title></path>')
    hover = [[round(axes.x(x), 1), round(axes.y(y), 1), x, figure(y)] for x, y in thin(finite)]
    last_step, last = (finite or list(series.points))[-1]
    return Chart(
        title=series.name,
        svg="".join(parts),
        last=figure(last),
        last_step=int(last_step),
        hover=json.dumps(hover),
        note=f"{len(lost)} not finite" if lost else "",
    )


def stacked_steps(steps: Sequence[tuple[int, Mapping[str, float]]], colours: Mapping[str, int]) -> str:
    """SVG of stacked bars: time of each step by stage. Averages neighbouring steps into at most `_MOST_BARS` bars."""
    if not steps:
        return ""
    per_bar = math.ceil(len(steps) / _MOST_BARS)
    bars = [_mean(steps[i : i + per_bar]) for i in range(0, len(steps), per_bar)]
    height, width, left, bottom = 300, 900, 46, 22
    top = max(sum(parts.values()) for _, _, parts in bars) or 1.0
    ticks = nice_ticks(0.0, top, 4)
    top = max(top, ticks[-1])
    step_px = (width - left - 8) / len(bars)
    out = []
    for tick in ticks:
        y = height - bottom - tick / top * (height - bottom - 8)
        out.append(f'<path class="grid" d="M{left} {y:.1f}H{width - 8}"/>')
        out.append(f'<text class="tick" x="{left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{figure(tick)} s</text>')
    for index, (first, last, parts) in enumerate(bars):
        x, y = left + index * step_px, float(height - bottom)
        label = f"step {first}" if first == last else f"steps {first}–{last}, mean"
        lines = [f"{label}: {seconds(sum(parts.values()))}"]
        lines += [f"{name} {seconds(value)}" for name, value in sorted(parts.items(), key=lambda kv: -kv[1])]
        out.append(f"<g><title>{html.escape(chr(10).join(lines))}</title>")
        for name in colours:
            if parts.get(name, 0.0) > 0:
                size = parts[name] / top * (height - bottom - 8)
                y -= size
                out.append(
                    f'<rect class="c{colours[name]}" x="{x:.1f}" y="{y:.1f}" width="{max(0.6, step_px - 1):.1f}"'
                    f' height="{size:.2f}"/>'
                )
        out.append("</g>")
    for tick in nice_ticks(bars[0][0], bars[-1][1], 8) if len(bars) > 1 else [float(bars[0][0])]:
        place = next((i for i, (first, last, _) in enumerate(bars) if first <= tick <= last), None)
        if place is not None:
            x = left + (place + 0.5) * step_px
            out.append(f'<text class="tick" x="{x:.1f}" y="{height - 6}" text-anchor="middle">{tick:g}</text>')
    opening = f'<svg class="steps" viewBox="0 0 {width} {height}" role="img" aria-label="time of each step">'
    return f"{opening}{''.join(out)}</svg>"


def smooth(points: Sequence[Point], reach: int = _SMOOTH_REACH) -> list[Point]:
    """Smooth with a centred triangular window of `reach` neighbours on each side. Centring causes no delay."""
    import numpy as np

    window = np.bartlett(2 * reach + 3)[1:-1]
    total = np.convolve([y for _, y in points], window, "same")
    weight = np.convolve(np.ones(len(points)), window, "same")
    return [(x, float(y)) for (x, _), y in zip(points, total / weight, strict=True)]


def is_noisy(points: Sequence[Point]) -> bool:
    """True if a curve has more than `_DOTS_UP_TO` points and its total variation exceeds `_NOISY` times its range."""
    if len(points) <= _DOTS_UP_TO:
        return False
    values = [y for _, y in points]
    path = sum(abs(after - before) for before, after in itertools.pairwise(values))
    return path > _NOISY * (max(values) - min(values))


def thin(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Reduce to about `most` points: the minimum and maximum of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    points_shown = {points[0], points[-1]}
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        points_shown |= {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
    return sorted(points_shown)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round tick values that cover `low` to `high`, spaced by 1, 2 or 5 times a power of ten."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def figure(value: float) -> str:
    """Format a number for people, with up to four significant digits and the suffixes k and M."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e9 or size < 1e-4:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if size >= unit * (9.9995 if name == "k" else 1):  # from there, four digits round to 10 000
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def seconds(value: float) -> str:
    """Format a duration for people, such as `1.2 s` or `3 min 05 s`."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _mean(steps: Sequence[tuple[int, Mapping[str, float]]]) -> tuple[int, int, dict[str, float]]:
    total: dict[str, float] = {}
    for _, parts in steps:
        for name, value in parts.items():
            total[name] = total.get(name, 0.0) + value / len(steps)
    return steps[0][0], steps[-1][0], total
