"""A callback that shows the metrics of a run in a notebook cell while it runs."""

from __future__ import annotations

import asyncio
import html
import math
import sys
import time
from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.console import HEADLINES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.pipeline import Run

_WIDTH, _HEIGHT = 240, 28
"""Size of a curve in pixels."""
_POINTS = 240
"""A curve has at most this many points; a longer run shows every n-th step."""
_REFRESH_S = 0.5


class LiveMetrics:
    """Callback of `roll.run` that shows a table with the last value and the curve of each metric.

    In a notebook the table is one output of the cell, updated in place at most twice a second and at the end. Without
    IPython's display, each step prints a line. `metrics` names the metrics; by default they are those of the progress
    line, as far as the run has them. One object can show several runs, one after the other.
    """

    def __init__(self, metrics: Sequence[str] = ()) -> None:
        self._names: list[tuple[str, ...]] = [(name,) for name in metrics] or [
            headline.metrics for headline in HEADLINES
        ]
        """Of each group of names, the first that a step has is shown."""
        self._curves: dict[str, list[tuple[int, float]]] = {}
        self._title = ""
        self._step = 0
        self._handle: Any = None
        """IPython's handle of the shown table; None without a notebook."""
        self._shown_at = -math.inf

    def roll_run_started(self, run: Run) -> None:
        """Show an empty table."""
        self._curves, self._step, self._shown_at = {}, 0, -math.inf
        self._title = f"{run.dir.parent.name}/{run.dir.name}"
        self._handle = _display(self)

    def roll_step_finished(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Add the step to the table."""
        self._step = step
        present = (next((name for name in names if name in metrics), None) for names in self._names)
        values = {name: metrics[name] for name in present if name is not None}
        for name, value in values.items():
            self._curves.setdefault(name, []).append((step, value))
        if self._handle is None:
            figures = (f"{name}={value:.6g}" for name, value in values.items())
            sys.stdout.write(" ".join([f"{self._title} step={step}", *figures]) + "\n")
            sys.stdout.flush()
        elif time.monotonic() - self._shown_at >= _REFRESH_S:
            self._update()

    def roll_run_finished(self, run: Run, error: BaseException | None) -> None:
        """Show the last step and how the run ended."""
        interrupted = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
        ended = "interrupted" if interrupted else f"ended by {type(error).__name__}"
        self._title += f" · {'finished' if error is None else ended}"
        if self._handle is not None:
            self._update()

    def _update(self) -> None:
        self._handle.update(self)
        self._shown_at = time.monotonic()

    def __repr__(self) -> str:
        last = (f"{name}={curve[-1][1]:.6g}" for name, curve in self._curves.items())
        return " ".join([f"{self._title} step={self._step}", *last])

    def _repr_html_(self) -> str:
        rows = (
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{curve[-1][1]:.4g}</td>"
            f"<td>{_svg(curve)}</td></tr>"
            for name, curve in self._curves.items()
        )
        title = f"{html.escape(self._title)} · step {self._step}"
        return f"<table><caption>{title}</caption>{''.join(rows)}</table>"


def _svg(curve: Sequence[tuple[int, float]]) -> str:
    """Draw the finite values of a curve over its steps."""
    points = [(step, value) for step, value in curve if math.isfinite(value)]
    points = points[:: math.ceil(len(points) / _POINTS) or 1]
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    line = " ".join(
        f"{(step - first) / ((last - first) or 1) * _WIDTH:.1f},{(high - value) / ((high - low) or 1) * _HEIGHT:.1f}"
        for step, value in points
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="-2 -2 {_WIDTH + 4} {_HEIGHT + 4}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor"/></svg>'
    )


def _display(table: LiveMetrics) -> Any:
    """Show `table` as an output of the running cell. Returns its handle; None if no notebook runs this code."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display(table, display_id=True)
