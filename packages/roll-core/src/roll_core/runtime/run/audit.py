"""Audits the data of a run, for its record and for `roll-core audit`."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from roll_core.data.audit import AuditFinding, audit_rows, audit_template, is_chat_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Rows
    from roll_core.spec.config import DataArguments, RunConfig

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
    for key, source in dict(sources(config)).items():
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


def sources(config: RunConfig) -> Iterator[tuple[str, DataArguments]]:
    """Data with prompts, by key of the config. Rows of environments are tasks, which have no prompt."""
    if getattr(config, "multi_turn", False):
        return
    for role, worker in config.roles().items():
        if worker.data_args.file_name:
            yield f"{role}.data_args", worker.data_args
    validation = getattr(config, "validation", None)
    if validation is not None and validation.data_args.file_name:
        yield "validation.data_args", validation.data_args
