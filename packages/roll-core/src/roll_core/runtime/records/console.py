"""Console output of a run: a progress bar on a terminal, otherwise one line per step; the time by stage at the end.

roll · grpo/001 · rlvr on cpu, executor local
warning: guard logprob_gap: …
━━━━━━━━━━━━━━━╸━━━━━━━━  12/200  reward 0.412  loss 0.0031  kl 0.0008  1.2k tokens/s  1:04 < 16:20  rollout
"""

from __future__ import annotations

import contextlib
import errno
import io
import math
import os
import select
import sys
import termios
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text
from typing_extensions import override

from roll_core.runtime.records.ledger import OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from roll_core.runtime.records.ledger import LedgerRow

_BAR_WIDTH, _NARROW_BAR_WIDTH = 14, 6
_NARROW = 100
"""Terminal width in columns below which the progress bar is shortened."""
_STAGE_WIDTH = 10
_TASK = TaskID(0)
"""The only task of the progress bar."""
_ESTIMATED_FROM = 20
"""Number of steps from which the remaining time is estimated."""
_PLAIN_WIDTH = 120
"""Width in columns of tables if there is no terminal."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A metric shown in the progress line: the first of `metrics` that a step has."""

    label: str
    metrics: tuple[str, ...]
    dispensable: int = 0
    """On a narrow terminal, higher values are hidden first; 0 is never hidden."""
    rounding: float = 0.0
    """Absolute values up to this one are rounding, and not shown: with one optimizer step per batch, the loss of a
    policy is 0 but for rounding, and so is its KL."""


HEADLINES = (
    Headline("reward", ("score/mean", "reward/mean")),
    Headline("loss", ("actor/loss", "train/loss", "loss"), dispensable=1, rounding=1e-6),
    Headline("kl", ("kl/mean", "actor/approx_kl"), dispensable=7, rounding=1e-9),
    Headline("entropy", ("actor/entropy", "train/entropy"), dispensable=5),
    Headline("grad_norm", ("actor/grad_norm", "train/grad_norm"), dispensable=6),
    Headline("acc", ("train/token_accuracy", "train/rewards/accuracies", "train/acc", "actor/acc"), dispensable=4),
    Headline("val", ("val/score/mean", "val/loss"), dispensable=3),
    Headline("tokens/s", ("tokens_per_s/step", "tokens_per_s/train"), dispensable=2),
)
"""Metrics of the progress line, in order. A value stays until a newer one replaces it."""


def detach_closed_output() -> None:
    """Send stdout and stderr to the null device if their terminal was closed or the reader of their pipe exited, so
    that writing to them cannot fail."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no file behind the stream
            number = stream.fileno()
            if _is_closed(number):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, number)
                os.close(null)


def _is_closed(number: int) -> bool:
    try:
        termios.tcgetattr(number)
    except termios.error as error:
        if error.args[0] == errno.EIO:
            return True
    poll = select.poll()
    poll.register(number, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


@contextlib.contextmanager
def _terminal_may_close() -> Iterator[None]:
    """Lose the output instead of raising an error if the terminal is closed: the run continues until it is stopped."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        detach_closed_output()


class _Output(RichConsole):
    """Also loses the output if the reader of a pipe exits, such as `tee`, unless `must_be_read`."""

    must_be_read = False

    @override
    def on_broken_pipe(self) -> None:
        if self.must_be_read:
            super().on_broken_pipe()  # ends the process
        detach_closed_output()


class Console:
    """Console of one run. Call `start`, then `step` for each step, then `finish`; call `close` in any case."""

    def __init__(
        self, *, stream: TextIO | None = None, terminal: bool | None = None, must_be_read: bool = False
    ) -> None:
        """Write to `stream` (default: stdout). `terminal` forces or disables the progress bar (default: detect).

        A run outlives its terminal and the reader of its pipe. `must_be_read`: end the process with that reader.
        """
        stream = stream if stream is not None else sys.stdout
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a batch job's locale may lack characters of a message
        self._terminal = _is_terminal(stream) if terminal is None else terminal
        width = None if self._terminal else _PLAIN_WIDTH
        # In a notebook rich would make each line an HTML output of the cell, instead of writing to the stream.
        self._rich = _Output(
            file=stream,
            force_terminal=self._terminal,
            force_jupyter=False,
            width=width,
            highlight=False,
            soft_wrap=not self._terminal,
        )
        self._rich.must_be_read = must_be_read
        self._shown: dict[str, float] = {}
        self._progress: Progress | None = None
        self._total = 0
        self._started = time.monotonic()
        self._ends: deque[tuple[int, float]] = deque(maxlen=_ESTIMATED_FROM + 1)
        """Number and end of the last steps."""

    @_terminal_may_close()
    def line(self, text: str, style: str = "") -> None:
        """Print a line, above the progress bar if there is one."""
        self._rich.print(Text(text, style=style))

    def warn(self, text: str) -> None:
        """Print a warning, above the progress bar if there is one."""
        self.line(text, style="yellow")

    @_terminal_may_close()
    def start(
        self,
        *,
        total_steps: int,
        done: int = 0,
        elapsed_s: float = 0.0,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Start the progress bar. `done` of `total_steps` were completed before this run resumed.

        For a run that is already in progress: `elapsed_s` since its start, and the last value of each metric.
        """
        self._total = total_steps
        self._started = time.monotonic() - elapsed_s
        self._take(metrics or {})
        if not self._terminal:
            return
        self._progress = Progress(
            BarColumn(
                bar_width=self._bar_width,
                complete_style="cyan",
                finished_style="green",
                table_column=Column(min_width=self._bar_width),
            ),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", style="bold", table_column=Column(no_wrap=True)),
            _Rendered(self._figures),
            _Rendered(self._clock, style="cyan"),
            TextColumn("{task.fields[stage]}", style="dim", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._rich,
            transient=True,
            redirect_stdout=self._rich.file is sys.stdout,
            redirect_stderr=self._rich.file is sys.stdout,
            refresh_per_second=4,
        )
        self._progress.add_task("", total=total_steps, completed=done, stage="")
        self._progress.start()

    @_terminal_may_close()
    def stage(self, name: str) -> None:
        """Show the current stage beside the progress bar. No effect without a terminal."""
        if self._progress is not None:
            self._progress.update(_TASK, stage=name)

    @_terminal_may_close()
    def step(
        self, step: int, metrics: Mapping[str, float], *, ended_at: float | None = None, line: bool = True
    ) -> None:
        """Show that step `step` is complete, with its metrics. It ended at the monotonic time `ended_at`
        (default: now).

        Without a terminal, a step prints a line, unless `line` is false.
        """
        self._take(metrics)
        self._ends.append((step, time.monotonic() if ended_at is None else ended_at))
        if self._progress is not None:
            self._progress.update(_TASK, completed=step, refresh=True)
        elif line and not self._terminal:
            self.line(self._plain_line(step, metrics))

    @_terminal_may_close()
    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics of an evaluation on held-out data after `step` steps."""
        self._take(metrics)
        figures = "  ".join(f"{name} {_short(value)}" for name, value in metrics.items())
        if self._terminal:
            self.line(f"step {step}: {figures}", style="green")
        else:
            self.line(" ".join([f"step={step}/{self._total}", *(f"{k}={_exact(v)}" for k, v in metrics.items())]))

    def _plain_line(self, step: int, metrics: Mapping[str, float]) -> str:
        """Format `step=3/200 reward=0.512 loss=0.0031 … step_s=1.31 eta_s=258`, the step's metrics in a fixed order.

        `val` is that of the last evaluation.
        """
        parts = [f"step={step}/{self._total}"]
        for headline in HEADLINES:
            value = _first(headline, metrics)
            if value is None and headline.label == "val":
                value = self._shown.get("val")
            if value is not None:
                parts.append(f"{headline.label.replace('/', '_per_')}={_exact(value)}")
        if "time/step" in metrics:
            parts.append(f"step_s={_exact(metrics['time/step'])}")
        remaining = self._remaining_s()
        if remaining is not None:
            parts.append(f"eta_s={remaining:.0f}")
        return " ".join(parts)

    @_terminal_may_close()
    def finish(
        self,
        *,
        outcome: str,
        rows: Sequence[LedgerRow] = (),
        lines: Sequence[tuple[str, str]] = (),
        error: str = "",
        advice: str = "",
    ) -> None:
        """Print the end of the run: time table, outcome with error and advice, then `lines` of label and value."""
        self.close()
        if rows:
            self._rich.print(time_table(rows))
        style = {"finished": "bold green", "failed": "bold red"}.get(outcome, "bold yellow")
        ending = Text(outcome, style=style)
        if error:
            ending.append(f": {error}", style="not bold")
        self._rich.print(ending)
        for line in advice.splitlines():
            self._rich.print(Text(f"  {line}"))
        width = max((len(label) for label, _ in lines), default=0)
        for label, value in lines:
            # No wrapping, so that commands and paths can be copied.
            self._rich.print(Text(f"{label:<{width}}  ", style="dim").append(value, style="not dim"), soft_wrap=True)

    @_terminal_may_close()
    def close(self) -> None:
        """Remove the progress bar. Idempotent."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()

    def _take(self, metrics: Mapping[str, float]) -> None:
        for headline in HEADLINES:
            if any(name in metrics for name in headline.metrics):
                self._shown.pop(headline.label, None)
                if (value := _first(headline, metrics)) is not None:
                    self._shown[headline.label] = value

    def _remaining_s(self) -> float | None:
        """Estimate from the last steps, without the first: it is slower and follows an evaluation."""
        if len(self._ends) < 2:
            return None
        (first, begin), (last, end) = self._ends[0], self._ends[-1]
        return max(0.0, (self._total - last) * (end - begin) / (last - first))

    def _clock(self) -> str:
        passed, remaining = _duration(time.monotonic() - self._started), self._remaining_s()
        return passed if remaining is None else f"{passed} < {_duration(remaining)}"

    @property
    def _bar_width(self) -> int:
        return _BAR_WIDTH if self._rich.width >= _NARROW else _NARROW_BAR_WIDTH

    def _figures(self) -> str:
        """Format as many headline metrics as fit on the line."""
        headlines = [headline for headline in HEADLINES if headline.label in self._shown]
        while True:
            text = "  ".join(self._figure(headline.label) for headline in headlines)
            least = max(headlines, key=lambda headline: headline.dispensable, default=None)
            if least is None or not least.dispensable or len(text) <= self._room():
                return text
            headlines.remove(least)

    def _figure(self, label: str) -> str:
        value = _short(self._shown[label])
        return f"{value} {label}" if "/" in label else f"{label} {value}"

    def _room(self) -> int:
        """Number of characters left for metrics beside the bar, the step count, the clock and the stage."""
        count = 2 * len(str(self._total)) + 1
        clock = len(self._clock())
        return max(0, self._rich.width - self._bar_width - count - clock - _STAGE_WIDTH - 4)


class _Rendered(ProgressColumn):
    """A progress column whose text is recomputed at each refresh."""

    def __init__(self, text: Callable[[], str], style: str = "") -> None:
        super().__init__(Column(no_wrap=True))
        self._text, self._style = text, style

    def render(self, task: Task) -> Text:
        """Return the current text."""
        return Text(self._text(), style=self._style)


def time_table(rows: Sequence[LedgerRow]) -> Table:
    """Table of the run's time by stage. The last line is the sum of the rows."""
    table = Table(title="time by stage", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("stage")
    for heading in ("seconds", "share", "calls", "tokens/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        rate = row.tokens_per_s
        table.add_row(
            row.stage,
            f"{row.seconds:.2f}",
            f"{row.share:.1%}",
            f"{row.entries}" if row.entries else "",
            "" if rate is None else _short(rate),
            style="dim" if row.stage == OTHER else "",
        )
    total = sum(row.seconds for row in rows)
    table.add_row("total", f"{total:.2f}", f"{sum(row.share for row in rows):.1%}", "", "", style="bold")
    return table


def _first(headline: Headline, metrics: Mapping[str, float]) -> float | None:
    value = next((metrics[name] for name in headline.metrics if name in metrics), None)
    return None if value is not None and 0 <= abs(value) <= headline.rounding > 0 else value


def _short(value: float) -> str:
    """Format for people, with three or four significant digits."""
    if not math.isfinite(value):
        return f"{value}"
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 100:
        return f"{value:.0f}"
    return "0" if value == 0 else f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"


def _exact(value: float) -> str:
    """Format for programs, with six significant digits."""
    return f"{value:.6g}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _is_terminal(stream: TextIO) -> bool:
    """True for a terminal except `TERM=dumb`, which cannot move its cursor as a progress bar requires."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"
