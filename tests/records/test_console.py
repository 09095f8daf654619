import contextlib
import io
import os
import re
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from roll_core.runtime.records.console import Console, detach_closed_output
from roll_core.runtime.records.ledger import LedgerRow

STEP = {
    "score/mean": 0.5,
    "actor/loss": 0.0031,
    "kl/mean": 0.0008,
    "tokens_per_s/step": 1234.5,
    "time/step": 1.25,
    "x": 1.0,
}
ROWS = [
    LedgerRow(stage="rollout", seconds=6.0, share=0.6, entries=3, tokens=600),
    LedgerRow(stage="train", seconds=3.5, share=0.35, entries=3),
    LedgerRow(stage="other", seconds=0.5, share=0.05, entries=0),
]


def plain() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(stream=stream), stream


def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 120) -> tuple[Console, io.StringIO]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "40")
    stream = io.StringIO()
    return Console(stream=stream, terminal=True), stream


def shown(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())


def test_without_a_terminal_every_step_is_one_parsable_line() -> None:
    console, stream = plain()
    console.start(total_steps=200)
    console.step(2, STEP)
    console.step(3, STEP)
    line = stream.getvalue().splitlines()[1]
    assert re.fullmatch(
        r"step=3/200 reward=0\.5 loss=0\.0031 kl=0\.0008 tokens_per_s=1234\.5 step_s=1\.25 eta_s=\d+", line
    )
    assert dict(part.split("=") for part in line.split())["reward"] == "0.5"


def test_a_line_has_only_what_its_step_has() -> None:
    console, stream = plain()
    console.start(total_steps=10)
    console.step(1, STEP)
    console.step(2, {"actor/loss": float("nan")})
    second = stream.getvalue().splitlines()[1]
    assert re.fullmatch(r"step=2/10 loss=nan eta_s=\d+", second)


def test_evaluation_is_a_line_of_its_own() -> None:
    console, stream = plain()
    console.start(total_steps=10)
    console.evaluated(0, {"val/score/mean": 0.25, "val/num_samples": 128.0})
    assert stream.getvalue() == "step=0/10 val/score/mean=0.25 val/num_samples=128\n"


def test_long_lines_are_not_broken_and_markup_in_them_is_text() -> None:
    console, stream = plain()
    console.warn("[red]not markup[/red] " + "x" * 500)
    assert stream.getvalue() == "[red]not markup[/red] " + "x" * 500 + "\n"


@pytest.mark.parametrize(("encoding", "dot"), [("ascii", "\\xb7"), ("latin-1", "·"), ("utf-8", "·")])
def test_a_stream_of_any_encoding_gets_each_line(encoding: str, dot: str) -> None:
    written = io.BytesIO()
    console = Console(stream=io.TextIOWrapper(written, encoding=encoding))
    console.line("roll · 数 \udc80")
    digits = "数" if encoding == "utf-8" else "\\u6570"
    assert written.getvalue().decode(encoding) == f"roll {dot} {digits} \\udc80\n"


def test_a_terminal_shows_figures_steps_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    console, stream = terminal(monkeypatch)
    console.start(total_steps=200)
    console.stage("rollout")
    console.step(1, STEP)
    console.step(2, STEP)
    console.close()
    last = [drawn for drawn in re.split(r"[\r\n]", shown(stream)) if "tokens/s" in drawn][-1]
    for part in ("2/200", "reward 0.500", "loss 0.0031", "kl 0.0008", "1234 tokens/s", "rollout"):
        assert part in last
    assert re.search(r"\d+:\d\d < \d+:\d\d", last)


def test_the_clock_runs_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console, stream = terminal(monkeypatch)
    console.start(total_steps=200)
    console.stage("evaluation")
    now[0] += 97
    console.close()  # draws it once more, as it is drawn several times a second
    assert "1:37" in shown(stream)
    assert "evaluation" in shown(stream)


def test_first_time_estimate_starts_at_the_second_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console, stream = plain()
    console.start(total_steps=200)
    for step, at in enumerate((97.0, 98.0, 99.0), start=1):  # an evaluation is before the first step
        now[0] = at
        console.step(step, {})
    assert stream.getvalue().split() == ["step=1/200", "step=2/200", "eta_s=198", "step=3/200", "eta_s=197"]


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
@pytest.mark.parametrize(("total", "clock"), [(80, "1:40 < 1:05:00"), (5000, "1:40 < 69:25:00")])
def test_no_figure_and_no_clock_is_cut(monkeypatch: pytest.MonkeyPatch, columns: int, total: int, clock: str) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console, stream = terminal(monkeypatch, columns)
    console.start(total_steps=total)
    console.stage("evaluation")
    for step in (1, 2):
        now[0] += 50
        console.step(step, STEP | {"actor/loss": -6.6e-5, "val/score/mean": 0.9})
    console.close()
    last = [drawn for drawn in re.split(r"[\r\n]", shown(stream)) if f"2/{total}" in drawn][-1]
    assert len(last) <= columns
    assert f" {clock} " in last
    assert " reward 0.500 " in last
    for label, value in (("loss", "-6.6e-05"), ("kl", "0.0008"), ("val", "0.900")):
        assert (f" {label} " in last) is (f" {label} {value} " in last)
    assert ("1234" in last) is (" 1234 tokens/s " in last)


def test_warnings_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    console, stream = terminal(monkeypatch)
    console.start(total_steps=20)
    console.step(1, STEP)
    console.warn("guard logprob_gap: too wide")
    console.step(2, STEP)
    console.close()
    text = shown(stream)
    assert "guard logprob_gap: too wide\n" in text
    assert text.index("guard logprob_gap") < text.rindex("2/20")


def test_final_summary_has_times_outcome_and_paths() -> None:
    console, stream = plain()
    console.finish(
        outcome="failed", rows=ROWS, lines=[("run", "output/x/001"), ("report", "r.html")], error="out of [memory]"
    )
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert lines[0] == "time by stage"
    assert [line.split() for line in lines[2:6]] == [
        ["rollout", "6.00", "60.0%", "3", "100"],
        ["train", "3.50", "35.0%", "3"],
        ["other", "0.50", "5.0%"],
        ["total", "10.00", "100.0%"],
    ]
    assert lines[6:] == ["failed: out of [memory]", "run     output/x/001", "report  r.html"]


def test_closing_twice_or_unstarted_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    console, stream = terminal(monkeypatch)
    console.close()
    assert stream.getvalue() == ""
    console.start(total_steps=1)
    console.close()
    closed = stream.getvalue()
    console.close()
    assert stream.getvalue() == closed
    console.step(1, STEP)
    console.stage("train")


@contextlib.contextmanager
def unread() -> Iterator[TextIO]:
    """stdout is a pipe whose reader has exited."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        os.close(reader)
        yield stream
        detach_closed_output()


def test_run_continues_if_the_reader_of_its_pipe_exits() -> None:
    with unread() as stream:
        console = Console()
        console.start(total_steps=2)
        console.step(1, STEP)
        console.step(2, STEP)
        console.finish(outcome="finished", rows=ROWS)
        assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def test_command_ends_if_the_reader_of_its_output_exits() -> None:
    with unread(), pytest.raises(SystemExit):
        Console(must_be_read=True).line("step 1")


def test_rounding_is_not_shown_but_what_carries_a_signal_is() -> None:
    console, stream = plain()
    console.start(total_steps=200)
    console.evaluated(0, {"val/score/mean": 0.25})
    # One optimizer step per batch: the ratio is 1, so loss and KL are 0 but for rounding.
    noise = {"actor/loss": 4e-9, "actor/approx_kl": 0.0, "actor/entropy": 1.5, "actor/grad_norm": 0.42}
    console.step(1, {"score/mean": 0.5, **noise})
    console.step(2, {"score/mean": 0.5, "actor/loss": -0.25, "actor/approx_kl": 0.001})
    lines = [line.split()[1:] for line in stream.getvalue().splitlines()[1:]]
    assert lines[0] == ["reward=0.5", "entropy=1.5", "grad_norm=0.42", "val=0.25"]
    assert lines[1][:4] == ["reward=0.5", "loss=-0.25", "kl=0.001", "val=0.25"]


def test_a_bar_hides_a_loss_that_became_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    console, stream = terminal(monkeypatch)
    console.start(total_steps=200)
    console.step(1, {"score/mean": 0.5, "actor/loss": 0.25})
    console.step(2, {"score/mean": 0.5, "actor/loss": 1e-9})
    console.close()
    drawn = [re.findall(r"(?:loss|reward) [0-9.]+", each) for each in re.split(r"[\r\n]", shown(stream))]
    assert [each for each in drawn if each][-1] == ["reward 0.500"]
