import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roll_tools.charts import (
    HEIGHT,
    WIDTH,
    Series,
    figure,
    is_noisy,
    line_chart,
    nice_ticks,
    seconds,
    smooth,
    stacked_steps,
    thin,
)
from roll_tools.checkpoint_listing import size_text
from roll_tools.curves import charts_of
from roll_tools.tables import memory_rows


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.5, "0.5"), (0.94736, "0.9474"), (123.456, "123.5"), (9999, "9999"), (9999.7, "10k"),
        (12345, "12.35k"), (1_384_000, "1.384M"), (2.5e9, "2.5e9"), (0.00012, "0.00012"), (1.96e-6, "1.96e-6"),
        (-0.0313, "-0.0313"), (math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "−∞"),
    ],
)  # fmt: skip
def test_figures_are_short(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0306, "31 ms"), (1.23, "1.2 s"), (59.94, "59.9 s"), (61, "1 min 01 s"), (3600 * 5 + 61, "5 h 01 min")],
)
def test_durations_are_short(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1010, "0.986 KiB"),
        (1_023_590, "0.976 MiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes_are_short(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 8))
def test_ticks_are_round_evenly_spaced_and_enclose_the_data(low: float, span: float, count: int) -> None:
    ticks = nice_ticks(low, low + span, count)
    step = (ticks[-1] - ticks[0]) / max(1, len(ticks) - 1)
    slack = 1e-6 * step + 1e-9 * abs(low)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= low + span - slack
    assert len(ticks) <= count + 3
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - nice) for nice in (1, 2, 5, 10)) < 1e-3


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=2000))
@example([5.0, 0.0, 9.0, 5.0, 5.0] * 41)  # neither end is an extreme of its stretch
def test_thinning_keeps_ends_order_and_extremes(values: list[float]) -> None:
    points = list(enumerate(values))
    kept = thin(points, 100)
    assert len(kept) <= 104
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert {min(values), max(values)} <= {y for _, y in kept}


def test_smoothing_keeps_a_line_and_is_not_late() -> None:
    line = [(float(x), 3.0 * x) for x in range(50)]
    inner = smooth(line)[10:-10]
    assert [y for _, y in inner] == pytest.approx([3.0 * x for x, _ in inner])
    spike = [(float(x), float(x == 25)) for x in range(50)]
    smoothed = [y for _, y in smooth(spike)]
    assert smoothed.index(max(smoothed)) == 25


def test_only_noise_is_smoothed() -> None:
    assert not is_noisy([(float(x), min(1.0, x / 10)) for x in range(200)])
    assert is_noisy([(float(x), float(x % 2)) for x in range(200)])


def test_a_long_curve_without_noise_has_few_points() -> None:
    chart = line_chart(Series(name="x", points=[(float(x), float(x)) for x in range(20_000)]))
    assert chart is not None
    assert chart.svg.count("L") < 500


def test_a_maximum_without_a_minimum_has_a_curve_of_its_own() -> None:
    rows = [
        {"step": step, "a/mean": step, "a/max": 2 * step, "b/mean": step, "b/min": -step, "b/max": step}
        for step in range(3)
    ]
    _, sections = charts_of(rows)
    assert [chart.title for section in sections for chart in section.charts] == ["a/max", "a/mean", "b/mean"]


finite_or_not = st.floats(allow_nan=True, allow_infinity=True, width=32)


@given(st.lists(finite_or_not, max_size=60), st.lists(finite_or_not, max_size=60), st.lists(finite_or_not, max_size=60))
def test_any_series_is_plotted_within_its_frame(mean: list[float], low: list[float], high: list[float]) -> None:
    points, lows, highs = (list(enumerate(values)) for values in (mean, low, high))
    chart = line_chart(Series(name="x", points=points, low=lows, high=highs))
    if not mean:
        assert chart is None
        return
    assert chart is not None
    tree = ET.fromstring(f"<svg>{chart.svg}</svg>")
    for circle in tree.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= WIDTH
        assert 0 <= float(circle.attrib["cy"]) <= HEIGHT
    assert "nan" not in chart.svg.replace("not finite", "")
    assert sum(not math.isfinite(y) for y in mean) == int((chart.note or "0").split()[0])


def test_steps_are_stacked_and_averaged_where_there_are_many() -> None:
    steps = [(step, {"a": 1.0, "b": 2.0 + step % 2}) for step in range(1, 241)]
    svg = stacked_steps(steps, {"a": 0, "b": 1})
    tree = ET.fromstring(svg)
    groups = list(tree.iter("g"))
    assert len(groups) == 120
    title = groups[0].find("title")
    assert title is not None
    assert title.text == "steps 1–2, mean: 3.5 s\nb 2.5 s\na 1.0 s"
    heights = [float(rect.attrib["height"]) for rect in groups[0].iter("rect")]
    assert heights[1] / heights[0] == pytest.approx(2.5, rel=1e-2)


def test_names_of_stages_are_text() -> None:
    svg = stacked_steps([(1, {"<b>": 1.0})], {"<b>": 0})
    assert ET.fromstring(svg) is not None
    assert "<b>" not in svg
    assert stacked_steps([], {}) == ""


def test_bars_do_not_overlap() -> None:
    svg = ET.fromstring(stacked_steps([(n, {"a": 1.0}) for n in range(7)], {"a": 0}))
    places = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in svg.iter("rect")]
    assert all(x + w <= after for (x, w), (after, _) in itertools.pairwise(places))


def test_the_first_charts_leave_out_rounding() -> None:
    rows = [
        {"step": i, "score/mean": 0.5, "actor/loss": 4e-9 * (-1) ** i, "actor/approx_kl": 1e-14, "actor/clipfrac": 0.0}
        for i in (1, 2, 3)
    ]
    key, sections = charts_of(rows)
    assert [chart.title for chart in key] == ["score/mean"]
    assert [chart.title for section in sections for chart in section.charts] == ["actor/loss"]
    key, _ = charts_of([{**row, "actor/loss": 0.1 * row["step"], "actor/approx_kl": 0.01} for row in rows])
    assert [chart.title for chart in key] == ["score/mean", "actor/loss", "actor/approx_kl"]


@pytest.mark.parametrize(
    ("predicted", "measured", "error"),
    [(88, 137, "within 64 MiB"), (880, 1370, "-36%"), (1000, 1010, "within 64 MiB"), (None, 10, "")],
)
def test_small_errors_of_predicted_memory_are_no_share(predicted: int | None, measured: int, error: str) -> None:
    process = {"roles": ["actor_train"], "pid": 1, "host": "here", "measured_bytes": measured << 20}
    process |= {"predicted_bytes": None if predicted is None else predicted << 20}
    (row,) = memory_rows([{**process, "device_measured_bytes": None, "device_predicted_bytes": None}])
    assert row["error"] == error
