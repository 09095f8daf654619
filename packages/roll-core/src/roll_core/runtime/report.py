"""`report.html`: a whole run on one page that needs no network, whatever state the run is in.

    run.json  metrics.jsonl  samples.jsonl  config.yaml  log.txt  checkpoints/  ─►  page  ─►  template  ─►  report.html

Every file may be missing, cut off or full of nonsense: the page shows what there is and says what there is not.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll_core.config.secrets import Redactor
from roll_core.runtime.charts import (
    Chart,
    Segment,
    Series,
    figure,
    line_chart,
    seconds,
    stacked_bar,
    stacked_steps,
)
from roll_core.runtime.checkpoints import CheckpointStore
from roll_core.runtime.jsonlines import finite_number, read_lines
from roll_core.runtime.ledger import OTHER
from roll_core.runtime.record import is_abandoned, read_record, write_atomically
from roll_core.runtime.run_dir import RunDir
from roll_core.runtime.tracking import read_metrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import jinja2

logger = logging.getLogger(__name__)

KEY_CURVES = (
    ("val/score/mean", "val/loss"),
    ("score/mean", "reward/mean"),
    ("actor/loss", "train/loss", "loss"),
    ("kl/mean", "actor/kl", "actor/approx_kl"),
    ("actor/entropy", "train/entropy"),
    ("actor/clip_fraction", "actor/clipfrac"),
    ("response_length/mean",),
    ("actor/grad_norm", "train/grad_norm"),
    ("tokens_per_s/step", "tokens_per_s/train"),
)
"""Shown first: of each entry the first that the run has."""

_WEIGHTS = "Weight sync"
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
    "weight_sync": _WEIGHTS,
}
"""Where the curves of a prefix stand, in this order; other prefixes get sections of their own behind."""

_COLOURS = 14
_MOST_SAMPLES = 4000
_MOST_CHARS = 6000
_LOG_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A headline number."""

    label: str
    value: str
    note: str = ""
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount:
    """Where the time went."""

    rows: list[dict[str, Any]]
    bar: list[Segment]
    steps_svg: str
    total: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """Curves that belong together."""

    title: str
    charts: list[Chart] = field(default_factory=list)
    constants: list[tuple[str, str]] = field(default_factory=list)
    """What never changed, which needs no curve."""


@dataclass(kw_only=True)
class _Page:
    """What the template is given."""

    name: str
    outcome: str
    tone: str
    error: str
    advice: str
    facts: list[tuple[str, str]]
    tiles: list[Tile]
    key_charts: list[Chart]
    sections: list[_Section]
    weight_charts: list[Chart]
    time: TimeAccount | None
    memory: list[dict[str, str]]
    samples_json: str
    num_samples: int
    samples_left_out: int
    guards: list[dict[str, Any]]
    guard_counts: list[tuple[str, int]]
    proofs: list[dict[str, str]]
    transports: list[tuple[str, str]]
    checkpoints: list[dict[str, str]]
    config: list[tuple[str, str]]
    versions: list[tuple[str, str]]
    plugins: list[dict[str, str]]
    environment: list[tuple[str, str]]
    log: str
    written: str
    notes: list[str] = field(default_factory=list)


def write_report(run: Path) -> Path:
    """Write `report.html` of the run directory `run` and return its path. May be called while the run goes on."""
    run_dir = RunDir(run)
    html = _render(_page(run_dir))
    write_atomically(run_dir.report, html)
    return run_dir.report


def _render(page: _Page) -> str:
    return _template().render(page=page)


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("roll_core.runtime", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def _page(run_dir: RunDir) -> _Page:
    record = read_record(run_dir.record)
    metrics = read_metrics(run_dir.metrics)
    redactor = Redactor()
    outcome, tone = _outcome(record)
    key_charts, sections = _charts(metrics)
    weights = next((section for section in sections if section.title == _WEIGHTS), _Section(title=_WEIGHTS))
    samples, left_out = _samples(run_dir.samples)
    error = record.get("error")
    found = record.get("guards")
    guards: Mapping[str, Any] = found if isinstance(found, dict) else {}
    page = _Page(
        name=str(record.get("name") or run_dir.name),
        outcome=outcome,
        tone=tone,
        error=f"{error.get('type', 'Error')}: {error.get('message', '')}" if isinstance(error, dict) else "",
        advice=str(error.get("advice", "")) if isinstance(error, dict) else "",
        facts=_facts(record),
        tiles=_tiles(record, metrics, guards),
        key_charts=key_charts,
        sections=[section for section in sections if section is not weights],
        weight_charts=weights.charts,
        time=_time(record, metrics),
        memory=_memory(record),
        samples_json=_for_script(samples),
        num_samples=len(samples),
        samples_left_out=left_out,
        guards=[_guard_row(event) for event in _dicts(guards.get("events"))],
        guard_counts=_counts(guards.get("counts")),
        proofs=_proofs(metrics),
        transports=_pairs(record.get("weight_transports")),
        checkpoints=_checkpoints(run_dir),
        config=_yaml_lines(redactor.text(_text(run_dir.config))),
        versions=_pairs(record.get("versions")),
        plugins=[_plugin_row(plugin) for plugin in _dicts(record.get("plugins"))],
        environment=_environment(record),
        log=redactor.text("\n".join(_text(run_dir.log, from_end=200_000).splitlines()[-_LOG_LINES:])),
        written=_date(time.time()),
    )
    if not record:
        page.notes.append("run.json is missing or cannot be read: how the run ended is not known.")
    if not metrics:
        page.notes.append("No step has been recorded yet.")
    return page


# -- header ------------------------------------------------------------------------------------------------------------


def _outcome(record: Mapping[str, Any]) -> tuple[str, str]:
    outcome = str(record.get("outcome") or "unknown")
    if is_abandoned(record):
        return "killed", "bad"
    return outcome, {"finished": "good", "failed": "bad", "running": "live"}.get(outcome, "warn")


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [(label, str(record[key])) for label, key in _FACTS if record.get(key) not in (None, "")]
    started, ended = finite_number(record.get("started")), finite_number(record.get("ended"))
    if started is not None:
        facts.append(("started", _date(started)))
        if ended is not None:
            facts.append(("took", seconds(ended - started)))
    if record.get("resumed_from"):
        facts.append(("resumed from", f"{record['resumed_from']} (step {record.get('resumed_step')})"))
    return facts


_FACTS = (("pipeline", "pipeline"), ("platform", "platform"), ("executor", "executor"), ("seed", "seed"))


def _tiles(record: Mapping[str, Any], metrics: Sequence[Mapping[str, float]], guards: Mapping[str, Any]) -> list[Tile]:
    tiles = [
        tile
        for label, name, noisy in _SCORES
        if (tile := _score_tile(label, _points(metrics, name), noisy)) is not None
    ][:3]
    steps = max((int(row["step"]) for row in metrics), default=int(finite_number(record.get("steps_done")) or 0))
    asked = finite_number(record.get("steps_asked"))
    tiles.append(Tile(label="steps", value=f"{steps}" + (f" / {asked:.0f}" if asked else "")))
    started, ended = finite_number(record.get("started")), finite_number(record.get("ended"))
    if started is not None and ended is not None:
        tiles.append(Tile(label="wall time", value=seconds(sum(_ledger_seconds(record)) or ended - started)))
    trained = sum(row.get("tokens/trained", 0.0) for row in metrics)
    if trained:
        spent = sum(row.get("time/step", 0.0) for row in metrics if "tokens/trained" in row)
        rate = f"{figure(trained / spent)} per second" if spent else ""
        tiles.append(Tile(label="tokens trained", value=figure(trained), note=rate))
    counts = _counts(guards.get("counts"))
    if record:
        tripped = sum(count for _, count in counts)
        fatal = any(event.get("action") == "error" for event in _dicts(guards.get("events")))
        value = str(tripped) if tripped else "none"
        note = ", ".join(name for name, _ in counts)
        tiles.append(
            Tile(label="guards tripped", value=value, note=note, tone="bad" if fatal else "warn" if tripped else "good")
        )
    return tiles


_SCORES = (
    ("held-out score", "val/score/mean", False),
    ("held-out loss", "val/loss", False),
    ("reward", "score/mean", True),
    ("loss", "train/loss", True),
)
"""Label and metric of the first tiles, and whether single values are too noisy to be quoted."""
_QUOTED_STEPS = 10


def _ledger_seconds(record: Mapping[str, Any]) -> list[float]:
    """The ledger's account begins before the record does: with the process."""
    return [s for row in _dicts(record.get("time")) if (s := finite_number(row.get("seconds"))) is not None]


def _score_tile(label: str, points: Sequence[tuple[float, float]], noisy: bool) -> Tile | None:
    values = [y for _, y in points if math.isfinite(y)]
    if not values:
        return None
    if not noisy or len(values) < 3 * _QUOTED_STEPS:
        return Tile(label=label, value=figure(values[-1]), note=f"from {figure(values[0])}" if len(values) > 1 else "")
    first, last = (sum(part) / len(part) for part in (values[:_QUOTED_STEPS], values[-_QUOTED_STEPS:]))
    return Tile(label=label, value=figure(last), note=f"from {figure(first)}; means of {_QUOTED_STEPS} steps")


# -- curves ------------------------------------------------------------------------------------------------------------


def _charts(metrics: Sequence[Mapping[str, float]]) -> tuple[list[Chart], list[_Section]]:
    names = sorted({name for row in metrics for name in row if name not in ("step", "time")})
    series = _series(metrics, [name for name in names if not name.startswith("time/")])
    key: list[Chart] = []
    for candidates in KEY_CURVES:
        found = next((name for name in candidates if name in series), None)
        if found is not None and (chart := line_chart(series.pop(found))) is not None:
            key.append(chart)
    sections: dict[str, _Section] = {}
    for name, each in series.items():
        title = SECTIONS.get(name.partition("/")[0], name.partition("/")[0])
        section = sections.setdefault(title, _Section(title=title))
        values = {value for _, value in each.points}
        if len(values) == 1 and math.isfinite(each.points[0][1]):
            section.constants.append((name, figure(values.pop())))
        elif (chart := line_chart(each)) is not None:
            section.charts.append(chart)
    order = list(dict.fromkeys(SECTIONS.values()))
    return key, sorted(
        sections.values(), key=lambda s: (order.index(s.title) if s.title in order else len(order), s.title)
    )


def _series(metrics: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[str, Series]:
    """Minimum and maximum become the range around their mean, not curves of their own."""
    known = set(names)
    series = {}
    for name in names:
        base, _, kind = name.rpartition("/")
        mean = f"{base}/mean" if f"{base}/mean" in known else base
        if kind in ("min", "max") and mean in known:
            continue
        base = base if kind == "mean" else name
        low, high = f"{base}/min", f"{base}/max"
        both = low in known and high in known
        series[name] = Series(
            name=name,
            points=_points(metrics, name),
            low=_points(metrics, low) if both else (),
            high=_points(metrics, high) if both else (),
        )
    return series


def _points(metrics: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in metrics if name in row]


# -- time --------------------------------------------------------------------------------------------------------------


def _time(record: Mapping[str, Any], metrics: Sequence[Mapping[str, float]]) -> TimeAccount | None:
    rows, note = _time_rows(record, metrics)
    if not rows:
        return None
    total = sum(row["seconds"] for row in rows)
    steps = [
        (int(row["step"]), {n[5:]: v for n, v in row.items() if n.startswith("time/") and n != "time/step" and v > 0})
        for row in metrics
        if row["step"] > 0 and "time/step" in row
    ]
    names = [row["stage"] for row in rows] + sorted({name for _, parts in steps for name in parts})
    ordered = [name for name in dict.fromkeys(names) if name != OTHER]
    colours = {name: index % (_COLOURS - 1) for index, name in enumerate(ordered)} | {OTHER: _COLOURS - 1}
    in_steps = {name for _, parts in steps for name in parts}
    for row in rows:
        row["colour"] = colours[row["stage"]]
        row["share"] = row["seconds"] / total if total > 0 else 0.0
        row["text"] = seconds(row["seconds"])
        tokens = row.get("tokens") or 0
        row["rate"] = figure(tokens / row["seconds"]) if tokens and row["seconds"] > 0 else ""
    return TimeAccount(
        rows=rows,
        bar=stacked_bar([(row["stage"], row["seconds"]) for row in rows], colours),
        steps_svg=stacked_steps(steps, {name: c for name, c in colours.items() if name in in_steps}),
        total=seconds(total),
        note=note,
    )


def _time_rows(record: Mapping[str, Any], metrics: Sequence[Mapping[str, float]]) -> tuple[list[dict[str, Any]], str]:
    """The ledger's account; of a run that did not live to write one, what its steps recorded."""
    rows = [
        {
            "stage": str(row["stage"]),
            "seconds": s,
            "entries": row.get("entries") or 0,
            "tokens": finite_number(row.get("tokens")) or 0,
        }
        for row in _dicts(record.get("time"))
        if "stage" in row and (s := finite_number(row.get("seconds"))) is not None
    ]
    if rows:
        return rows, ""
    total: dict[str, float] = defaultdict(float)
    entries: dict[str, int] = defaultdict(int)
    for row in metrics:
        for name, value in row.items():
            if name.startswith("time/") and name != "time/step" and math.isfinite(value):
                total[name[5:]] += value
                entries[name[5:]] += 1
    order = sorted(total, key=lambda name: (name == OTHER, -total[name]))
    return (
        [{"stage": name, "seconds": total[name], "entries": entries[name], "tokens": 0} for name in order],
        "Only what the steps recorded: the run has not written its whole account (yet).",
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def _memory(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """What each process was expected to take beside what it took."""
    rows = []
    for row in _dicts(record.get("memory")):
        roles = row.get("roles")
        for where, prefix in (("host", ""), ("device", "device_")):
            measured = finite_number(row.get(f"{prefix}measured_bytes"))
            predicted = finite_number(row.get(f"{prefix}predicted_bytes"))
            if measured is None:
                continue
            rows.append(
                {
                    "roles": ", ".join(map(str, roles)) if isinstance(roles, list) else "",
                    "process": f"{row.get('pid', '?')} on {row.get('host', '?')}",
                    "where": where,
                    "predicted": "not known" if predicted is None else _mib(predicted),
                    "measured": _mib(measured),
                    "error": f"{predicted / measured - 1:+.0%}" if predicted is not None and measured > 0 else "",
                }
            )
    return rows


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


# -- samples -----------------------------------------------------------------------------------------------------------


def _samples(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Samples for the browser, and how many were left out: whole steps, spread over the run."""
    by_step: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(path):
        if isinstance(row.get("step"), int) and "response" in row:
            by_step[row["step"]].append(_sample(row))
    everything = sum(len(rows) for rows in by_step.values())
    steps = sorted(by_step)
    stride = math.ceil(everything / _MOST_SAMPLES) if everything else 1
    kept = [step for index, step in enumerate(steps) if index % stride == 0 or index == len(steps) - 1]
    samples = [row for step in kept for row in by_step[step]]
    return samples, everything - len(samples)


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = (
        "step",
        "split",
        "id",
        "group",
        "tag",
        "prompt",
        "response",
        "reward",
        "failure",
        "finish",
        "response_tokens",
        "version",
    )
    found: dict[str, Any] = {name: _cut(row[name]) for name in shown if row.get(name) not in (None, "")}
    for name in ("metadata", "detail"):
        if isinstance(row.get(name), dict):
            found[name] = {str(k): _cut(v) for k, v in row[name].items()}
    return found


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return (
            value
            if len(value) <= _MOST_CHARS
            else f"{value[:_MOST_CHARS]}… ({len(value) - _MOST_CHARS} more characters)"
        )
    return value if isinstance(value, (int, float, bool)) or value is None else str(value)


def _for_script(value: object) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# -- the rest ----------------------------------------------------------------------------------------------------------


def _guard_row(event: Mapping[str, Any]) -> dict[str, Any]:
    when = finite_number(event.get("time"))
    return {
        "guard": str(event.get("guard", "")),
        "action": str(event.get("action", "")),
        "message": str(event.get("message", "")),
        "step": event.get("step", ""),
        "time": _date(when) if when is not None else "",
    }


def _proofs(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    """What weight sync recorded about itself, over the run."""
    names = sorted({name for row in metrics for name in row if name.startswith("weight_sync/")})
    rows = []
    for name in names:
        values = [row[name] for row in metrics if name in row]
        finite = [value for value in values if math.isfinite(value)]
        rows.append(
            {
                "name": name.partition("/")[2],
                "count": str(len(values)),
                "last": figure(values[-1]),
                "low": figure(min(finite)) if finite else "",
                "high": figure(max(finite)) if finite else "",
            }
        )
    return rows


def _checkpoints(run_dir: RunDir) -> list[dict[str, str]]:
    rows = []
    for checkpoint in CheckpointStore(run_dir.checkpoints).list():
        files = [path for path in checkpoint.path.rglob("*") if path.is_file()]
        rows.append(
            {
                "step": str(checkpoint.step),
                "path": str(checkpoint.path.relative_to(run_dir.path)),
                "size": _size(sum(path.stat().st_size for path in files)),
                "files": str(len(files)),
                "written": _date(checkpoint.path.stat().st_mtime),
            }
        )
    return rows


def _yaml_lines(text: str) -> list[tuple[str, str]]:
    """Key and rest of each line, for colouring."""
    lines = []
    for line in text.splitlines():
        key, colon, rest = line.partition(":")
        is_key = colon and (not rest or rest[0] == " ") and not key.lstrip(" -").startswith(("#", '"', "'"))
        lines.append((key + colon, rest) if is_key else ("", line))
    return lines


def _plugin_row(plugin: Mapping[str, Any]) -> dict[str, str]:
    provides = plugin.get("provides")
    offers = []
    if isinstance(provides, dict):
        offers = [
            f"{kind}: {', '.join(map(str, names))}" for kind, names in provides.items() if isinstance(names, list)
        ]
    return {
        "name": str(plugin.get("package") or plugin.get("name") or ""),
        "version": str(plugin.get("version") or ""),
        "hook_api": str(plugin.get("hook_api") or ""),
        "state": str(plugin.get("state") or ""),
        "provides": "; ".join(offers),
        "error": str(plugin.get("error") or ""),
    }


def _environment(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    host = record.get("host")
    if isinstance(host, dict):
        rows += [(key, str(host[key])) for key in ("name", "system", "cpu", "cores", "executable") if host.get(key)]
        memory = finite_number(host.get("memory_bytes"))
        if memory is not None:
            rows.append(("memory", _size(memory)))
    git = record.get("git")
    if isinstance(git, dict):
        dirty = " with uncommitted changes" if git.get("dirty") else ""
        rows.append(("git", f"{str(git.get('commit', ''))[:12]} on {git.get('branch')}{dirty}"))
    environments = record.get("environments")
    for role, found in environments.items() if isinstance(environments, dict) else ():
        rows.append((f"Python of {role}", ", ".join(f"{name} {version}" for name, version in _pairs(found))))
    if isinstance(record.get("argv"), list):
        rows.append(("command", " ".join(str(part) for part in record["argv"])))
    if record.get("cwd"):
        rows.append(("directory", str(record["cwd"])))
    return rows


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _pairs(value: Any) -> list[tuple[str, str]]:
    return [(str(k), str(v)) for k, v in value.items()] if isinstance(value, dict) else []


def _counts(value: Any) -> list[tuple[str, int]]:
    found: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    return [(str(name), int(count)) for name, count in found if isinstance(count, (int, float))]


def _text(path: Path, from_end: int | None = None) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        logger.debug("%s is not in the report: %s", path, error)
        return ""
    return content[-from_end if from_end else 0 :].decode("utf-8", errors="replace")


def _date(seconds_since_epoch: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds_since_epoch))
    except (OverflowError, ValueError, OSError):
        return ""


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
