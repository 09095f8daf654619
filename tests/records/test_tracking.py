import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.errors import TrackerError
from roll_core.runtime.records.run_files import LineWriter, encode, number, read_lines
from roll_core.runtime.records.tracking import TRACE, MetricsFile, Trackers, read_metrics, repeatable
from roll_core.spec.pipeline import TraceContext, Tracker
from roll_testing.errors import raises_error


class FakeTracker(Tracker):
    def __init__(self, events: list[str], name: str, breaks: str = "") -> None:
        self.events, self.name, self.breaks = events, name, breaks
        self._do("open")

    def _do(self, act: str) -> None:
        self.events.append(f"{self.name} {act}")
        if self.breaks == act:
            raise ConnectionError("no route to host")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._do("log")

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._do("config")

    def run_finished(self, *, failed: bool, files: Sequence[Path]) -> None:
        self._do("failed" if failed else "finished")

    def close(self) -> None:
        self._do("close")


def opened(events: list[str], **breaks: str) -> Trackers:
    return Trackers.opened({f"tracker {n}": lambda n=n, b=b: FakeTracker(events, n, b) for n, b in breaks.items()})  # type: ignore[misc]


def test_every_step_is_a_line_once_logged(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.log(1, {"loss": 0.1, "tokens": 12})
    [line] = (tmp_path / "m.jsonl").read_text().splitlines()  # not closed, and there already
    row = json.loads(line)
    assert list(row) == ["step", "time", "loss", "tokens"]
    assert (row["step"], row["loss"], row["tokens"]) == (1, 0.1, 12)
    file.close()


def test_non_finite_numbers_are_json_and_come_back(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.log(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    file.close()
    strict = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert (strict["a"], strict["b"], strict["c"]) == ("NaN", "Infinity", "-Infinity")
    [row] = read_metrics(tmp_path / "m.jsonl")
    assert math.isnan(row["a"])
    assert (row["b"], row["c"]) == (math.inf, -math.inf)


@given(st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False) | st.integers(-(2**53), 2**53), max_size=5))
def test_numbers_come_back_to_the_last_bit_under_any_name(values: dict[str, float]) -> None:
    read = json.loads(encode(values), parse_constant=pytest.fail)
    assert {name: number(value) for name, value in read.items()} == values
    assert encode(values).count(b"\n") == 1


def test_a_metric_cannot_take_the_name_of_a_field(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    with raises_error(ValueError, "'step'"):
        file.log(1, {"step": 3.0})
    file.close()


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    old, new = (tmp_path / run / "metrics.jsonl" for run in ("001", "002"))
    old.parent.mkdir()
    new.parent.mkdir()
    file = MetricsFile(old)
    for step in range(6):
        file.log(step, {"loss": float(step)})
    file.close()
    file = MetricsFile(new, history=old.parent, resumed_step=3)
    file.log(4, {"loss": 40.0})
    file.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(new)] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 40)]
    file = MetricsFile(old, history=old.parent, resumed_step=2)  # in place, as well
    file.log(3, {"loss": 30.0})
    file.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(old)] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert [p for p in tmp_path.rglob("*") if p.is_file() and p not in (old, new)] == []


def test_a_resumed_run_without_history_begins_with_nothing(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl", history=tmp_path / "gone", resumed_step=3)
    file.log(4, {"loss": 1.0})
    file.close()
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == [4]


def test_reading_survives_a_cut_line_garbage_and_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    assert read_metrics(path) == []
    path.write_bytes(
        b'{"step": 1, "loss": 0.5}\n\xff\xfe\x00\n[1, 2]\n\n{"loss": 3}\n'
        b'{"step": 2, "loss": 0.25, "note": "x"}\n{"step": 3, "lo'
    )
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


def test_writing_continues_after_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    writer = LineWriter(path)
    writer.append({"step": 3})
    writer.close()
    writer.close()
    assert [row["step"] for row in read_lines(path)] == [1, 3]


def test_steps_are_read_in_order_and_later_lines_merged(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 2, "a": 1}\n{"step": 1, "a": 0}\n{"step": 2, "b": 5, "a": 3}\n')
    assert read_metrics(path) == [{"step": 1, "a": 0}, {"step": 2, "a": 3, "b": 5}]


def test_reproducible_metrics_exclude_timings() -> None:
    computed = {"step": 3, "actor/loss": 0.5, "weight_sync/version": 2.0, "tokens/trained": 7.0, "env/a/steps": 2.0}
    timing = {
        "time": 1.5,
        "time/rollout": 0.1,
        "tokens_per_s/step": 9.0,
        "weight_sync/seconds": 0.2,
        "env/guess/step_s/mean": 0.3,
        "env/guess/reset_s/max": 0.3,
        "env/agent/run_s/mean": 0.3,
        "val/time/rollout": 0.1,
        "acme/load_seconds": 0.4,
        "checkpoint_store/step": 3.0,
        "engine/actor_infer/running/max": 4.0,
    }
    assert repeatable(computed | timing) == computed


def test_every_tracker_gets_every_event_and_closes_once() -> None:
    events: list[str] = []
    with contextlib.closing(opened(events, a="", b="")) as trackers:
        trackers.log_config({})
        trackers.log(1, {"loss": 1.0})
        trackers.close()
    expected = ["a open", "b open", "a config", "b config", "a log", "b log", "a close", "b close"]
    assert sorted(events) == sorted(expected)
    assert events[:6] == expected[:6]


def test_failed_tracker_is_named_and_the_others_close() -> None:
    events: list[str] = []
    failure = raises_error(TrackerError, "tracker b", "step 7", "ConnectionError")
    with failure as caught, contextlib.closing(opened(events, a="", b="log", c="")) as trackers:
        trackers.log(7, {})
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert sorted(e for e in events if "close" in e) == ["a close", "b close", "c close"]


def test_a_tracker_that_cannot_be_opened_closes_those_before_it() -> None:
    events: list[str] = []
    with raises_error(TrackerError, "tracker b"):
        opened(events, a="", b="open", c="")
    assert events == ["a open", "b open", "a close"]


def test_tracker_that_cannot_close_is_named_after_others_close() -> None:
    events: list[str] = []
    trackers = opened(events, a="", b="close", c="")
    with raises_error(TrackerError, "tracker b"):
        trackers.close()
    assert sorted(e for e in events if "close" in e) == ["a close", "b close", "c close"]
    trackers.close()
    assert len(events) == 6


@pytest.mark.parametrize("breaks", ["finished", "close"])
def test_every_tracker_gets_the_run_end_before_close(breaks: str) -> None:
    events: list[str] = []
    trackers = opened(events, a="", b=breaks, c="")
    with raises_error(TrackerError, "tracker b"):
        trackers.finish(failed=False, files=[])
    assert sorted(events[3:6]) == ["a finished", "b finished", "c finished"]
    assert sorted(events[6:]) == ["a close", "b close", "c close"]


@pytest.mark.parametrize(("steps", "lost"), [((1, 2, 3, 4), None), ((0, 1, 4), "2–3"), ((1,), "2–4"), ((), "1–4")])
def test_a_gap_in_the_metrics_before_a_resumed_run_is_warned_of(tmp_path, caplog, steps, lost) -> None:
    history = tmp_path / "before"
    history.mkdir()
    (history / "m.jsonl").write_text(
        "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in steps) + '{"step": 5, "lo'
    )
    with caplog.at_level("WARNING"):
        MetricsFile(tmp_path / "m.jsonl", history=history, resumed_step=4).close()
    assert [row["step"] for row in read_metrics(tmp_path / "m.jsonl")] == list(steps)
    said = [record for record in caplog.records if record.levelname == "WARNING"]
    assert [record.args[-1] for record in said] == ([lost] if lost else [])


def test_metrics_logged_again_for_a_resumed_step_join_its_line(tmp_path: Path) -> None:
    history = tmp_path / "before"
    history.mkdir()
    (history / "m.jsonl").write_text('{"step": 1, "time": 7.5, "loss": 1.0, "time/step": 2.0}\n')
    file = MetricsFile(tmp_path / "m.jsonl", history=history, resumed_step=1)
    file.log(1, {"val/loss": 0.5, "time/step": 1.5, "time/evaluation": 1.0})
    file.log(2, {"loss": 0.9})
    file.close()
    first, second = (json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines())
    assert first == {"step": 1, "time": 7.5, "loss": 1.0, "time/step": 3.5, "val/loss": 0.5, "time/evaluation": 1.0}
    assert (second["step"], second["loss"]) == (2, 0.9)


def test_calls_in_a_stage_carry_the_span_context() -> None:
    class Spans(FakeTracker):
        @contextlib.contextmanager
        def stage(self, name: str) -> Iterator[TraceContext]:
            yield TraceContext(parent=name, target="m:C", options={})

    def parent() -> str | None:
        trace = TRACE.get()
        return None if trace is None else trace.parent

    trackers = Trackers.opened({"spans": lambda: Spans([], "spans"), "other": lambda: FakeTracker([], "other")})
    seen = [parent()]
    with trackers.stage("step"):
        seen.append(parent())
        with trackers.stage("train"):
            seen.append(parent())
        seen.append(parent())
    seen.append(parent())
    assert seen == [None, "step", "train", "step", None]
