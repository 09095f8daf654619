"""Audits the data of a run or of a file: the command `roll-core audit`, and the table in the run's report."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from roll_core.config.explain import findings as findings_of
from roll_core.data.audit import AuditFinding, audit_rows, audit_template, is_chat_data, masked_rows
from roll_core.data.encode import tokenizer_texts
from roll_core.data.rows import first_rows, has_response, read_rows
from roll_core.data.templates import control_tokens
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import ConfigError, ConfigProblem, DataError
from roll_core.runtime.run.tokenizer import load_tokenizer
from roll_core.spec.config import DataArguments, TokenizerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.audit import MaskedRow
    from roll_core.data.rows import Row, Rows
    from roll_core.spec.config import RunConfig

    ReadRows = Callable[[DataArguments], Rows]

log = logging.getLogger(__name__)

RECORDED_S = 0.5
"""Seconds for the audit of a run's rows at its start."""
PIPELINES = {"sft": True, "rlvr": False, "agentic": False}
"""Pipelines whose data are audited, and True if their rows are training sequences."""


def audit_run(
    config: RunConfig, rows: ReadRows, tokenizer: PreTrainedTokenizerBase, *, seconds: float | None = None
) -> Iterator[AuditFinding]:
    """Audit the chat template and all rows of a run. `seconds` is the time after which no further row is encoded."""
    begin = time.monotonic()
    if config.pipeline not in PIPELINES:
        yield AuditFinding(
            check="pipeline",
            subject="pipeline",
            level="note",
            found=f"the rows of {config.pipeline} are not audited, only those of {', '.join(PIPELINES)}",
        )
        return
    multi_turn = bool(getattr(config, "multi_turn", False))
    sources = dict(_sources(config))
    role = config.policy_role or next(iter(config.roles()))
    template = config.roles()[role].data_args
    if multi_turn or is_chat_data(template, tokenizer):
        yield from audit_template(
            tokenizer,
            template,
            subject=f"{role}.data_args",
            multi_turn=multi_turn,
            tool_format=getattr(config, "tool_format", "auto"),
            thinking=getattr(config, "thinking", "template"),
        )
    for key, source in sources.items():
        left = None if seconds is None else max(0.0, seconds - (time.monotonic() - begin)) / 2
        trains = PIPELINES[config.pipeline] and not key.startswith("validation")
        yield from audit_rows(
            rows(source),
            source,
            tokenizer,
            subject=key,
            prompt_length=config.prompt_length,
            response_length=config.response_length if trains else None,
            truncate=getattr(config, "overlong", "drop") == "truncate",
            seconds=left,
        )


def recorded_audit(config: RunConfig, rows: ReadRows, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """The audit in a run's record. It takes less than a second and never fails."""
    try:
        return [asdict(each) for each in audit_run(config, rows, tokenizer, seconds=RECORDED_S)]
    except Exception as error:  # of a tokenizer or of a template; the run itself reports what it needs
        log.debug("the audit failed", exc_info=True)
        found = AuditFinding(check="audit", subject="", level="note", found=f"failed: {type(error).__name__}: {error}")
        return [asdict(found)]


def shown_rows(config: RunConfig, rows: ReadRows, tokenizer: PreTrainedTokenizerBase, num: int) -> Iterator[MaskedRow]:
    """The first rows of a run."""
    for source in list(dict(_sources(config)).values())[:1] if config.pipeline in PIPELINES else []:
        trains, on_prompt = PIPELINES[config.pipeline], bool(getattr(config, "train_on_prompt", False))
        yield from masked_rows(rows(source), source, tokenizer, num=num, trains=trains, on_prompt=on_prompt)


def _sources(config: RunConfig) -> Iterator[tuple[str, DataArguments]]:
    """Data with prompts, by key of the config. Rows of environments are tasks, which have no prompt."""
    if getattr(config, "multi_turn", False):
        return
    for role, worker in config.roles().items():
        if worker.data_args.file_name:
            yield f"{role}.data_args", worker.data_args
    validation = getattr(config, "validation", None)
    if validation is not None and validation.data_args.file_name:
        yield "validation.data_args", validation.data_args


def audit_data(
    path: Path, values: Mapping[str, Any], model: str | None, folder: Path, num_shown: int
) -> tuple[list[AuditFinding], list[MaskedRow]]:
    """Audit a file of rows. Rows with responses are audited as those of sft, others as prompts.

    `values` are fields of `data_args`, and `prompt_length`, `response_length` and `train_on_prompt`, with the defaults
    of a run.
    """
    given = {"prompt_length": 1024, "response_length": 1024, "train_on_prompt": False} | dict(values)
    if not isinstance(on_prompt := given.pop("train_on_prompt"), bool):
        raise ConfigError([_problem("train_on_prompt", f"is {on_prompt!r}, expected true or false")])
    limits = [given.pop(key) for key in ("prompt_length", "response_length")]
    for key, limit in zip(("prompt_length", "response_length"), limits, strict=True):
        if not isinstance(limit, int) or limit < 1:
            raise ConfigError([_problem(key, f"is {limit!r}, expected a whole number > 0")])
    try:
        data = DataArguments(**{"file_name": str(path), **given})
        known = first_rows(str(path), data, 1)
        if known is not None and "messages" not in given and data.prompt not in known.columns:
            data = data.model_copy(update={"messages": "messages"} if "messages" in known.columns else {})
    except ValidationError as error:
        raise ConfigError(
            [_problem(".".join(each.path), each.message) for each in findings_of(error.errors(), given)]
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
        built = load_tokenizer(model)
    trains = any(_has_response(row, data, rows) for row in rows)
    findings: list[AuditFinding] = []
    if is_chat_data(data, built):
        findings += audit_template(built, data, subject=model or "bytes")
    try:
        findings += audit_rows(
            rows,
            data,
            built,
            subject=path.name,
            prompt_length=limits[0],
            response_length=limits[1] if trains else None,
        )
    except DataError as error:
        findings.append(AuditFinding(check="rows", subject=path.name, level="error", found=str(error)))
    shown = masked_rows(rows, data, built, num=num_shown, trains=trains, on_prompt=on_prompt)
    return findings, list(shown)


def _has_response(row: Row, data: DataArguments, rows: Rows) -> bool:
    try:
        return has_response(row, data, rows)
    except DataError:  # audit_rows reports it
        return False


def _problem(key: str, message: str) -> ConfigProblem:
    return ConfigProblem(where="command line", key=key, message=message, hint="see docs/audit.md", code="ROLL-C003")
