"""`report.html`: a self-contained page about a run in any state; it needs no network.

    run.json  metrics.jsonl  samples.jsonl  images.jsonl
    config.yaml  log.txt  checkpoints/  ─►  write_report  ─►  template  ─►  report.html

Every file may be missing, truncated or corrupted: the page shows what can be read and notes what is missing.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import re
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config.secrets import Redactor
from roll_core.errors import RecordingError
from roll_core.runtime.records.mismatch import read_logprobs
from roll_core.runtime.records.record import read_record, write_atomically
from roll_core.runtime.records.run_dir import RunDir
from roll_core.runtime.records.run_files import read_lines, safe
from roll_core.runtime.records.tracking import read_metrics
from roll_tools import domains, tables
from roll_tools.curves import WEIGHTS, charts_of
from roll_tools.evaluation import tag_scores, task_scores
from roll_tools.rendering import TONES, for_script, template
from roll_tools.saved_record import SavedRecord, is_abandoned, read_findings, read_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_core.runtime.records.mismatch import Diagnosis

_LOG_LINES = 60
_LOG_BYTES = 200_000
_MOST_SAMPLES = 4000
_MOST_GRIDS = 100
_MOST_THUMBNAILS, _THUMBNAIL = 64, 128
"""Number of images of samples in a report, and their largest side in pixels."""
_DIGEST = re.compile(r"[0-9a-f]{32}")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_MOST_CHARS = 6000
_SAMPLE_FIELDS = (
    "step", "split", "id", "group", "tag", "player", "prompt", "response", "reward", "failure", "finish",
    "response_tokens", "version",
)  # fmt: skip


def write_report(run: Path) -> Path:
    """Write `report.html` of the run directory `run` and return its path. Works also while the run is in progress."""
    run_dir = RunDir(run)
    saved = read_record(run_dir.record)
    record = SavedRecord.of(saved | {"audit": read_findings(run_dir.path)})
    outcome = "killed" if is_abandoned(saved) else record.outcome
    metrics = read_metrics(run_dir.metrics)
    key_charts, sections = charts_of(metrics)
    samples, samples_left_out = _samples(run_dir.samples)
    thumbnails = _thumbnails(run_dir.media, samples)
    redacted = Redactor().text
    html = template("report.html.j2").render(
        record=record,
        name=record.name or run_dir.name,
        outcome=outcome,
        tone=TONES.get(outcome, "warn"),
        facts=list(tables.facts_of(record)),
        tiles=tables.tiles_of(record, metrics),
        key_charts=key_charts,
        scores=tag_scores(metrics),
        tasks=task_scores(run_dir, _prices(run_dir)),
        domains=domains.by_domain(metrics),
        turns=domains.by_turn(metrics),
        sections=[section for section in sections if section.title != WEIGHTS],
        weight_charts=[chart for section in sections if section.title == WEIGHTS for chart in section.charts],
        time=tables.time_table(record, metrics),
        memory=tables.memory_rows(read_memory(run_dir)),
        samples_json=for_script(safe(samples)),
        thumbnails_json=for_script(thumbnails),
        samples=samples,
        samples_left_out=samples_left_out,
        grids=_grids(run_dir.images),
        weight_sync=tables.weight_sync_rows(metrics),
        checkpoints=tables.checkpoint_rows(run_dir, record),
        profiles=[path.relative_to(run_dir.path) for path in sorted(run_dir.profile.glob("*"))],
        config=_yaml_lines(redacted(_text_of(run_dir.config))),
        environment=list(tables.environment_rows(record)),
        log=redacted("\n".join(_text_of(run_dir.log, _LOG_BYTES).splitlines()[-_LOG_LINES:])),
        written=tables.date(time.time()),
        mismatch=_mismatch(run_dir.path),
        has_record=bool(saved),
        has_metrics=bool(metrics),
    )
    write_atomically(run_dir.report, html)
    return run_dir.report


def _prices(run: RunDir) -> dict[str, dict[str, float]]:
    """Prices of tokens by tag, from the config of the run; none if it cannot be read."""
    try:
        config = yaml.safe_load(_text_of(run.config))
        environments = config["custom_envs"]
        return {tag: entry["prices"] for tag, entry in environments.items() if entry.get("prices")}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _mismatch(run: Path) -> Diagnosis | None:
    """Why engine and trainer disagree, from the logprobs of the last recorded step; None without any."""
    try:
        return read_logprobs(run).diagnose()
    except RecordingError:
        return None


def _samples(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Samples to show, and the number omitted. Long runs keep whole steps, spread evenly over the run."""
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in read_lines(path):
        if isinstance(row.get("step"), int) and "response" in row:
            by_step[row["step"]].append(_sample(row))
    total = sum(len(rows) for rows in by_step.values())
    steps = sorted(by_step)
    steps_shown = {*steps[:: math.ceil(total / _MOST_SAMPLES) or 1], *steps[-1:]}
    samples = [row for step in steps if step in steps_shown for row in by_step[step]]
    return samples, total - len(samples)


def _thumbnails(folder: Path, samples: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Data URLs of small copies of the samples' images, by digest: at most `_MOST_THUMBNAILS`, of the last steps.

    Images that are missing or cannot be decoded have none, and without Pillow there are none.
    """
    shown = [image["digest"] for sample in reversed(samples) for image in sample.get("images", ())]
    thumbnails: dict[str, str] = {}
    with contextlib.suppress(ImportError):
        from PIL import Image

        for digest in list(dict.fromkeys(shown))[:_MOST_THUMBNAILS]:
            file = io.BytesIO()
            with contextlib.suppress(OSError, ValueError, SyntaxError):
                with Image.open(folder / digest) as opened:  # the first frame of a video
                    image = opened.convert("RGB")
                image.thumbnail((_THUMBNAIL, _THUMBNAIL))
                image.save(file, format="PNG")
                thumbnails[digest] = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
    return thumbnails


def _grids(path: Path) -> list[dict[str, Any]]:
    """Grids of images by step and split, at most `_MOST_GRIDS`, spread evenly over the run. Skips damaged rows."""
    grids = []
    for row in read_lines(path):
        images = row.get("images")
        if isinstance(row.get("step"), int) and isinstance(images, list) and all(map(_is_image, images)):
            grids.append({"step": row["step"], "split": row.get("split", ""), "images": images})
    chosen = grids[:: math.ceil(len(grids) / _MOST_GRIDS) or 1]
    return chosen if not grids or chosen[-1] is grids[-1] else [*chosen, grids[-1]]


def _is_image(value: Any) -> bool:
    """True for an image of `images.jsonl`: base64 text, so that it is safe in an attribute, and a caption."""
    png = value.get("png") if isinstance(value, dict) else None
    return isinstance(png, str) and _BASE64.fullmatch(png) is not None and isinstance(value.get("caption"), str)


def _is_reference(value: Any) -> bool:
    """True for an image of `samples.jsonl`, whose digest names a file."""
    digest = value.get("digest") if isinstance(value, dict) else None
    sizes = [value.get("width"), value.get("height")] if isinstance(value, dict) else []
    return (
        isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None and all(type(size) is int for size in sizes)
    )


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {name: _shortened(row[name]) for name in _SAMPLE_FIELDS if row.get(name) not in (None, "")}
    if isinstance(turns := row.get("turns"), list):
        shown["turns"] = [
            {name: _shortened(value) for name, value in turn.items()} for turn in turns if isinstance(turn, dict)
        ]
    if isinstance(images := row.get("images"), list) and all(map(_is_reference, images)):
        shown["images"] = images
    for name in ("metadata", "detail"):
        if isinstance(row.get(name), dict):
            shown[name] = {key: _shortened(value) for key, value in row[name].items()}
    return shown


def _shortened(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_CHARS:
        return f"{value[:_MOST_CHARS]}… ({len(value) - _MOST_CHARS} more characters)"
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return value if isinstance(value, (str, int, float)) or value is None else str(value)


def _yaml_lines(text: str) -> list[tuple[str, str]]:
    """Split each line into key and rest, for syntax colouring."""
    lines = []
    for line in text.splitlines():
        key, colon, rest = line.partition(":")
        is_key = colon and (not rest or rest[0] == " ") and not key.lstrip(" -").startswith(("#", '"', "'"))
        lines.append((key + colon, rest) if is_key else ("", line))
    return lines


def _text_of(path: Path, from_end: int = 0) -> str:
    """Text of a file, or of its last `from_end` bytes; empty if it cannot be read."""
    try:
        return path.read_bytes()[-from_end:].decode("utf-8", errors="replace")
    except OSError:
        return ""
