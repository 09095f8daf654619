"""One offline page that compares runs: curves over each other, last and best metrics, differences of the configs."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config.dump import flat
from roll_core.config.secrets import Redactor
from roll_core.runtime.records.record import write_atomically
from roll_core.runtime.records.tracking import is_lower_better
from roll_tools import tables
from roll_tools.charts import figure
from roll_tools.curves import KEY_CURVES, is_rounding, points
from roll_tools.evaluation import run_scores, score_differences
from roll_tools.rendering import TONES, overlay_json, template
from roll_tools.saved_record import SavedRecord, config_hash, read_state, readable_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_core.runtime.records.run_dir import RunDir

_MOST_OTHER_CHARTS = 120
_MOST_KEYS_IN_HEADING = 4
_MISSING = "–"
_HIGHER = ("score", "reward", "accurac", "margins", "tokens_per_s", "/acc")
_NEITHER = (
    "actor/loss", "policy_loss", "kl_loss", "approx_kl", "kl/coef", "/std", "normalised_mean", "rewards/rejected",
    "time/",
)  # fmt: skip
"""Metrics without a better direction. A policy loss is one of them: its mean is about 0 at any quality. The time of a
stage depends on the lengths of responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of the page."""

    label: str
    """Name of the run; with its path if another run has the same name."""
    path: str
    record: SavedRecord
    outcome: str
    tone: str
    metrics: Sequence[Mapping[str, float]]
    config: Mapping[str, Any] | None
    """Resolved values by dotted key; None if the config cannot be read."""
    config_hash: str

    @property
    def steps(self) -> int:
        """Number of completed steps."""
        return max((int(row["step"]) for row in self.metrics), default=self.record.steps_done)

    @property
    def commit(self) -> str:
        """First digits of the git commit; empty if it is unknown."""
        return str(self.record.git.get("commit") or "")[:9] if self.record.git else ""

    @property
    def has_metrics(self) -> bool:
        """True if at least one step could be read."""
        return bool(self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricCell:
    """Last and best value of a metric in one run, formatted; empty if the run lacks it."""

    last: str = ""
    best: str = ""
    step: int | None = None
    """Step of the best value."""
    is_best: bool = False
    """True if no other run has a better value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One metric with a cell for each run."""

    name: str
    better: str
    """`higher`, `lower`, or empty if the metric has no direction. It then has no best values."""
    cells: list[MetricCell]


def write_comparison(runs: Sequence[RunDir], path: Path) -> Path:
    """Write the page that compares `runs` to `path` and return the path. Runs may be in any state."""
    compared = _compared(runs)
    names = sorted({name for run in compared for row in run.metrics for name in row if name not in ("step", "time")})
    known = {name for name in names if any(not is_rounding(name, line) for line in _lines(compared, name) if line)}
    key = list(dict.fromkeys(name for candidates in KEY_CURVES for name in candidates if name in known))
    # Minimum and maximum beside a mean, and times, are only in the table.
    others = [name for name in names if name not in key and not name.startswith("time/")]
    drawn = [name for name in others if not name.endswith(("/min", "/max")) and _changes(compared, name)]
    differences = config_differences([run.config for run in compared])
    changed = [key for key, _ in differences if key != "exp_name"]
    paired = {
        run.label: directory for run, directory in zip(compared, runs, strict=True) if _same_prompts(run, compared[0])
    }
    html = template("comparison.html.j2").render(
        runs=compared,
        changed=changed if len(changed) <= _MOST_KEYS_IN_HEADING else [],
        scores=run_scores({run.label: run.metrics for run in compared}),
        differences_of_scores=score_differences(paired),
        key_rows=[_metric_row(compared, name) for name in key],
        other_rows=[_metric_row(compared, name) for name in names if name not in key],
        key_charts=overlay_json([run.label for run in compared], [(name, _lines(compared, name)) for name in key]),
        other_charts=overlay_json(
            [run.label for run in compared], [(name, _lines(compared, name)) for name in drawn[:_MOST_OTHER_CHARTS]]
        ),
        differences=differences,
        unreadable=[run.label for run in compared if run.config is None],
        written=tables.date(time.time()),
    )
    write_atomically(path, html)
    return path


def config_differences(configs: Sequence[Mapping[str, Any] | None]) -> list[tuple[str, list[str]]]:
    """Dotted keys whose values differ between the readable configs, with one text per config."""
    readable = [config for config in configs if config is not None]
    keys = dict.fromkeys(key for config in readable for key in config)
    return [
        (key, ["" if config is None else _text(config.get(key, _MISSING)) for config in configs])
        for key in keys
        if len({_text(config.get(key, _MISSING)) for config in readable}) > 1
    ]


def _compared(runs: Sequence[RunDir]) -> list[ComparedRun]:
    count = Counter(run.name for run in runs)
    return [_compared_run(run, run.name if count[run.name] == 1 else str(run.path)) for run in runs]


def _compared_run(run: RunDir, label: str) -> ComparedRun:
    record, outcome = read_state(run)
    config = None
    try:
        loaded = yaml.safe_load(run.config.read_text(encoding="utf-8", errors="replace"))
        config = flat(Redactor().value(loaded)) if isinstance(loaded, dict) else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        config = None
    return ComparedRun(
        label=label,
        path=str(run.path),
        record=record,
        outcome=outcome,
        tone=TONES.get(outcome, "warn"),
        metrics=readable_metrics(run),
        config=config,
        config_hash=config_hash(run.config),
    )


def _same_prompts(run: ComparedRun, other: ComparedRun) -> bool:
    """True if both configs name the same held-out rows or episodes. Ids of prompts are often only numbers of rows."""
    return _held_out(run.config or {}) == _held_out(other.config or {})


def _held_out(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("validation.data_args.", "custom_envs.", "val_env_manager.")
    held_out = {key: value for key, value in config.items() if key.startswith(keys) and value is not None}
    episodes = any(key.startswith("val_env_manager.") for key in held_out)
    return held_out | ({"seed": config.get("seed")} if episodes else {})


def _lines(runs: Sequence[ComparedRun], name: str) -> list[list[tuple[float, float]]]:
    return [points(run.metrics, name) for run in runs]


def _changes(runs: Sequence[ComparedRun], name: str) -> bool:
    return len({value for line in _lines(runs, name) for _, value in line}) > 1


def better(name: str) -> str:
    """`higher` or `lower` if one direction of a metric is better; otherwise empty."""
    if any(word in name for word in _NEITHER):
        return ""
    if is_lower_better(name):
        return "lower"
    return "higher" if any(word in name for word in _HIGHER) else ""


def _metric_row(runs: Sequence[ComparedRun], name: str) -> MetricRow:
    direction = better(name)
    sign = -1 if direction == "lower" else 1
    bests = []
    for line in _lines(runs, name):
        finite = [(x, y) for x, y in line if math.isfinite(y)]
        bests.append(max(finite, key=lambda p: sign * p[1]) if finite and direction else None)
    top = max((sign * best[1] for best in bests if best), default=None)
    cells = []
    for line, best in zip(_lines(runs, name), bests, strict=True):
        if not line:
            cells.append(MetricCell())
        elif best is None:
            cells.append(MetricCell(last=figure(line[-1][1])))
        else:
            cells.append(
                MetricCell(
                    last=figure(line[-1][1]), best=figure(best[1]), step=int(best[0]), is_best=sign * best[1] == top
                )
            )
    return MetricRow(name=name, better=direction, cells=cells)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
