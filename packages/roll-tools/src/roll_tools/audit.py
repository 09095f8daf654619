"""`roll-core audit DATA|CONFIG`: checks rows, tokenizer and chat template, and shows which tokens are trained."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError

from roll_core.config import load
from roll_core.config.explain import findings as findings_of
from roll_core.data.encode import Encoder, media_of, tokenizer_texts
from roll_core.data.end_tokens import saved_end_ids
from roll_core.data.modelscope import with_local_models
from roll_core.data.processor import processor_of
from roll_core.data.rows import (
    first_rows,
    format_of,
    has_response,
    is_hub_name,
    messages_of,
    read_rows,
    shape_of,
    tools_of,
)
from roll_core.data.templates import control_tokens
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import ConfigError, ConfigProblem, DataError, UnsupportedError
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_tools.data_audit import (
    PIPELINES,
    AuditFinding,
    audit_rows,
    audit_run,
    audit_template,
    is_chat_data,
    sources,
)
from roll_tools.settings import parse_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Row, Rows
    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RunConfig
    from roll_core.types import Media, SampledFrames, TokenIds
    from roll_tools.data_audit import ReadRows


def show_audit(
    source: Path | str,
    overrides: Sequence[str],
    registry: Registry,
    *,
    tokenizer: str | None = None,
    num_shown: int = 2,
    as_json: bool = False,
) -> int:
    """Print every finding, and the masks of the first rows. Returns 1 if a finding is an error, otherwise 0.

    `source` is a config, a file of rows, or the name of a data set of the Hub. For rows, `overrides` are keys of
    `data_args`, `prompt_length` and `response_length`, and `tokenizer` is a model's directory or hub id (default:
    bytes). Raises `RollError`.
    """
    is_data = isinstance(source, str) or format_of(source) is not None
    with tempfile.TemporaryDirectory() as folder:
        from roll_core.runtime.run.active_run import DatasetCache
        from roll_core.runtime.run.tokenizer import prepare_tokenizer

        data = DatasetCache()
        if is_data:
            values = {key.removeprefix("data_args."): value for key, value in parse_settings(overrides).items()}
            findings, rows = audit_data(str(source), values, tokenizer, Path(folder), num_shown)
        else:
            loaded = load(Path(source), overrides, registry)
            config: RunConfig = with_local_models(loaded.config)
            if not loaded.pipeline.tokenizer:
                raise UnsupportedError(f"pipeline {config.pipeline} has no tokenizer and no chat template to audit")
            built = prepare_tokenizer(config, data, Path(folder))
            findings = list(audit_run(config, data.rows, built, registry=registry))
            rows = list(shown_rows(config, data.rows, built, num_shown))
    failed = any(finding.level == "error" for finding in findings)
    if as_json:
        shown = [asdict(row) for row in rows]
        report = {"ok": not failed, "findings": [asdict(finding) for finding in findings], "rows": shown}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(findings, rows)
    return 1 if failed else 0


def _show(findings: Sequence[AuditFinding], rows: Sequence[MaskedRow]) -> None:
    from rich.text import Text

    from roll_tools.output import counted, findings_table, open_console

    console = open_console()
    lines = [
        (finding.level, f"{finding.check} {finding.subject}", finding.found, finding.remedy) for finding in findings
    ]
    console.print(findings_table(("check", "found"), lines))
    if rows:
        console.print(Text("\nread by the model, ", style="dim").append("⟦trained⟧", style="bold green"))
    for row in rows:
        line = Text(f"{row.where}\n", style="dim")
        for image in row.images:
            line.append(f"{image}\n", style="cyan")
        for text, trained in row.pieces:
            line.append(f"⟦{text}⟧" if trained else text, style="bold green" if trained else "default")
        console.print(line)
    console.print(counted([finding.level for finding in findings]))


# -- rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """Text of an encoded row, cut where training begins and ends."""

    where: str
    pieces: tuple[tuple[str, bool], ...]
    """Texts, and True for those whose tokens are trained. Tokens of images are shortened."""
    images: tuple[str, ...] = ()
    """Sizes, number of tokens and positions of its images."""


def shown_rows(config: RunConfig, rows: ReadRows, tokenizer: PreTrainedTokenizerBase, num: int) -> Iterator[MaskedRow]:
    """The first rows of a run."""
    for source in list(dict(sources(config)).values())[:1] if config.pipeline in PIPELINES else []:
        trains, on_prompt = PIPELINES[config.pipeline], bool(getattr(config, "train_on_prompt", False))
        yield from masked_rows(rows(source), source, tokenizer, num=num, trains=trains, on_prompt=on_prompt)


def masked_rows(
    rows: Rows,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num: int,
    trains: bool,
    on_prompt: bool = False,
) -> Iterator[MaskedRow]:
    """The first rows as the run encodes them. Rows that cannot be encoded are left out.

    With `on_prompt`, all tokens but the first are trained, as with `train_on_prompt`.
    """
    encoder, processor = Encoder(tokenizer, data), processor_of(tokenizer)
    shortened = str if processor is None else processor.shortened
    for row in rows[:num]:
        try:
            tools = tools_of(row, data, rows)
            if trains and has_response(row, data, rows):
                messages = encoder.load_images(messages_of(row, data, rows, response=True), row.where, row.folder)
                tokens, mask = encoder.conversation(messages, row.where, tools)
                if on_prompt:
                    mask[1:] = ~encoder.is_media(tokens[1:])
            else:
                messages = encoder.load_images(messages_of(row, data, rows, response=False), row.where, row.folder)
                tokens = encoder.prompt(messages, row.where, tools)[1]
                mask = np.zeros(len(tokens), dtype=np.bool_)
        except DataError:
            continue
        cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
        # Decoded in context: a decoder may strip the blank at the beginning of a text.
        ends = [encoder.decode(tokens[:cut].tolist()) for cut in cuts]
        pieces = [
            (
                shortened(
                    after.removeprefix(before) if after.startswith(before) else encoder.decode(tokens[a:b].tolist())
                ),
                bool(mask[a]),
            )
            for (a, b), (before, after) in zip(itertools.pairwise(cuts), itertools.pairwise(ends), strict=True)
            if b > a
        ]
        yield MaskedRow(row.where, tuple(pieces), tuple(_shown_images(tokens, encoder, media_of(messages))))


def _shown_images(tokens: TokenIds, encoder: Encoder, media: Sequence[Media]) -> Iterator[str]:
    """One line for each image and video of a row: its size, its tokens and their positions."""
    for image, positions in zip(media, encoder.places_of(tokens, media), strict=True):
        frames = f", {_shown_frames(image.frames)}" if image.frames is not None else ""
        yield (
            f"{image.kind} {image.width} x {image.height}{frames} {image.digest[:8]}: {len(positions)} tokens at"
            f" {positions.start} to {positions.stop - 1}, not trained"
        )


def _shown_frames(frames: SampledFrames) -> str:
    """Which frames of a video are read, at most six of them."""
    first, last = frames.indices[:5], frames.indices[-1]
    shown = ", ".join(map(str, first)) + (f", … {last}" if last != first[-1] else "")
    return f"{len(frames.indices)} of {frames.num_frames} frames ({shown}) at {frames.fps:g} per second"


def audit_data(
    file_name: str, values: Mapping[str, Any], model: str | None, folder: Path, num_shown: int
) -> tuple[list[AuditFinding], list[MaskedRow]]:
    """Audit a file of rows or a data set of the Hub. Rows with responses are audited as in sft, others as prompts.

    `values` are fields of `data_args`, and `prompt_length`, `response_length` and `train_on_prompt`, with the defaults
    of a run.
    """
    keys = {"prompt_length": 1024, "response_length": 1024, "train_on_prompt": False} | dict(values)
    if not isinstance(on_prompt := keys.pop("train_on_prompt"), bool):
        raise ConfigError([_problem("train_on_prompt", f"is {on_prompt!r}, expected true or false")])
    limits = [keys.pop(key) for key in ("prompt_length", "response_length")]
    for key, limit in zip(("prompt_length", "response_length"), limits, strict=True):
        if not isinstance(limit, int) or limit < 1:
            raise ConfigError([_problem(key, f"is {limit!r}, expected a whole number > 0")])
    findings: list[AuditFinding] = []
    subject = file_name if is_hub_name(file_name) else Path(file_name).name
    try:
        data = DataArguments(**{"file_name": file_name, **keys})
        known = first_rows(file_name, data, 1)
        if known is not None and "messages" not in keys and data.prompt not in known.columns:
            shape, columns = shape_of(known)
            data = data.model_copy(update=columns)
            if shape:
                config = ", ".join(f"{key}: {value}" for key, value in {"file_name": file_name, **columns}.items())
                findings.append(AuditFinding("shape", subject, "ok", f"{shape}, read by data_args: {{{config}}}"))
    except ValidationError as error:
        raise ConfigError(
            [_problem(".".join(mistake.path), mistake.message) for mistake in findings_of(error.errors(), keys)]
        ) from None
    rows = read_rows(data)
    if model is None:
        texts = tokenizer_texts(rows, data)
        built = make_tokenizer(
            TokenizerConfig(kind="byte"), texts, folder, control_tokens=control_tokens(data.template)
        )
        if data.messages is not None and data.template == "native":
            data = data.model_copy(update={"template": "plain"})
    else:
        from roll_core.runtime.run.tokenizer import load_tokenizer

        built = load_tokenizer(model)
    trains = any(_has_response(row, data, rows) for row in rows)
    model_ends = saved_end_ids(model) if model else ()
    if is_chat_data(data, built):
        findings += audit_template(built, data, subject=model or "bytes", model_ends=model_ends)
    try:
        findings += audit_rows(
            rows,
            data,
            built,
            subject=subject,
            prompt_length=limits[0],
            response_length=limits[1] if trains else None,
            model_ends=model_ends,
        )
    except DataError as error:
        findings.append(AuditFinding("rows", subject, "error", str(error)))
    shown = masked_rows(rows, data, built, num=num_shown, trains=trains, on_prompt=on_prompt)
    return findings, list(shown)


def _has_response(row: Row, data: DataArguments, rows: Rows) -> bool:
    try:
        return has_response(row, data, rows)
    except DataError:  # audit_rows reports it
        return False


def _problem(key: str, message: str) -> ConfigProblem:
    return ConfigProblem(where="command line", key=key, message=message, hint="see docs/audit.md", code="ROLL-C003")
