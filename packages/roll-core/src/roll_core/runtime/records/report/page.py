"""Collect the report's contents from the run's files and render the template."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll_core.config.secrets import Redactor
from roll_core.runtime.records.record import read_record, write_atomically
from roll_core.runtime.records.report.curves import WEIGHTS, Section, charts_of
from roll_core.runtime.records.report.headline import Tile, facts_of, outcome_of, tiles_of
from roll_core.runtime.records.report.reading import as_counts, as_dicts, as_pairs, date, text_of
from roll_core.runtime.records.report.shown_samples import for_script, samples_of
from roll_core.runtime.records.report.tables import (
    checkpoint_rows,
    environment_rows,
    guard_row,
    memory_rows,
    plugin_row,
    proofs,
    yaml_lines,
)
from roll_core.runtime.records.report.times import TimeAccount, time_account
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.tracking import read_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import jinja2

    from roll_core.runtime.records.report.charts import Chart

_LOG_LINES = 60


@dataclass(kw_only=True)
class _Page:
    """Variables of the template."""

    name: str
    outcome: str
    tone: str
    error: str
    advice: str
    facts: list[tuple[str, str]]
    tiles: list[Tile]
    key_charts: list[Chart]
    sections: list[Section]
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
    """Write `report.html` of the run directory `run` and return its path. Works also while the run is in progress."""
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
    outcome, tone = outcome_of(record)
    key_charts, sections = charts_of(metrics)
    weights = next((section for section in sections if section.title == WEIGHTS), Section(title=WEIGHTS))
    samples, left_out = samples_of(run_dir.samples)
    error = record.get("error")
    found = record.get("guards")
    guards: Mapping[str, Any] = found if isinstance(found, dict) else {}
    page = _Page(
        name=str(record.get("name") or run_dir.name),
        outcome=outcome,
        tone=tone,
        error=f"{error.get('type', 'Error')}: {error.get('message', '')}" if isinstance(error, dict) else "",
        advice=str(error.get("advice", "")) if isinstance(error, dict) else "",
        facts=facts_of(record),
        tiles=tiles_of(record, metrics, guards),
        key_charts=key_charts,
        sections=[section for section in sections if section is not weights],
        weight_charts=weights.charts,
        time=time_account(record, metrics),
        memory=memory_rows(record),
        samples_json=for_script(samples),
        num_samples=len(samples),
        samples_left_out=left_out,
        guards=[guard_row(event) for event in as_dicts(guards.get("events"))],
        guard_counts=as_counts(guards.get("counts")),
        proofs=proofs(metrics),
        transports=as_pairs(record.get("weight_transports")),
        checkpoints=checkpoint_rows(run_dir),
        config=yaml_lines(redactor.text(text_of(run_dir.config))),
        versions=as_pairs(record.get("versions")),
        plugins=[plugin_row(plugin) for plugin in as_dicts(record.get("plugins"))],
        environment=environment_rows(record),
        log=redactor.text("\n".join(text_of(run_dir.log, from_end=200_000).splitlines()[-_LOG_LINES:])),
        written=date(time.time()),
    )
    if not record:
        page.notes.append("run.json is missing or cannot be read: how the run ended is not known.")
    if not metrics:
        page.notes.append("No step has been recorded yet.")
    return page
