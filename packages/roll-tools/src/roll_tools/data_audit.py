"""Finds what rows, tokenizer and chat template do to the tokens of a run, before anything starts.

`audit_template` encodes small conversations: do later turns keep the recorded tokens, does reasoning survive, which
token ends a turn. `audit_rows` encodes the rows as the run does: lengths, duplicates, empty rows, trained stop tokens.
`audit_run` audits all data of a run; `write_audit` does so at its start, for its report.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roll_core.config.schema import sections
from roll_core.data.encode import Counts, Encoder, media_of
from roll_core.data.end_tokens import saved_end_ids, trained_end_ids
from roll_core.data.rows import are_chats, has_response, messages_of, tools_of
from roll_core.errors import DataError, PluginLoadError, install_command
from roll_core.plugins.targets import load_class
from roll_core.spec.config import DataArguments, RewardKeys
from roll_core.spec.providers import RewardProvider
from roll_core.spec.rollout import RewardFunction
from roll_tools.saved_record import AUDIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Row, Rows
    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import RewardConfig, RunConfig
    from roll_core.spec.environment import Message
    from roll_core.spec.pipeline import Run
    from roll_pipeline_agentic.chat_encoder import ChatEncoder, EncodedChat

    ReadRows = Callable[[DataArguments], Rows]

log = logging.getLogger(__name__)

NAMED_ROWS = 20
"""Maximum number of rows that a finding names."""
RECORDED_S = 0.5
"""Seconds for the audit of a run's rows at its start."""
PIPELINES = {"sft": True, "rlvr": False, "agentic": False, "evaluate": False}
"""Pipelines whose data are audited, and True if their rows are training sequences."""
Level = Literal["ok", "note", "warning", "error"]
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """Result of a check."""

    check: str
    subject: str
    """What was checked: a key of the config, or a file."""
    level: Level
    found: str
    remedy: str = ""


def audit_template(
    tokenizer: PreTrainedTokenizerBase,
    data: DataArguments,
    *,
    subject: str,
    multi_turn: bool = False,
    tool_format: str = "auto",
    thinking: Any = "template",
    model_ends: Sequence[int] = (),
) -> Iterator[AuditFinding]:
    """Check the chat template on small conversations. With `multi_turn`, later turns matter to the run.

    `model_ends` are the end ids in the model's files, at which generation stops as well as at those of the tokenizer.
    The encoder of conversations is part of roll-pipeline-agentic. Without that package, a note says so.
    """
    try:
        from roll_pipeline_agentic.chat_encoder import ChatEncoder
    except ModuleNotFoundError:
        status = "not checked on conversations of several turns"
        yield AuditFinding("chat_template", subject, "note", status, install_command("roll-pipeline-agentic"))
        return
    try:
        chats = ChatEncoder(tokenizer, data, where=subject, tool_format=tool_format, thinking=thinking)
        encoder = Encoder(tokenizer, data, chats=True)
        trial = _Trial(chats, encoder, subject, "warning" if multi_turn else "note", model_ends)
        trial.opening = chats.encode([trial.question])
    except DataError as error:
        level: Level = "warning" if multi_turn else "note"
        yield AuditFinding("chat_template", subject, level, f"cannot render chats: {error}")
        return
    yield trial.end_of_turn()
    yield trial.keeps("turns_keep_tokens", "messages", {"content": trial.answer}, trial.question)
    if chats.describes_tools:
        call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        result = {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": trial.answer}
        reply = {"content": "", "tool_calls": [call]}
        yield trial.keeps("tool_turns_keep_tokens", "tool results", reply, result, [TOOL])
    else:
        yield trial.finding("tool_turns_keep_tokens", "note", "the chat template describes no tools")
    yield trial.reasoning(thinking)


def audit_rows(
    rows: Rows,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    subject: str,
    prompt_length: int,
    response_length: int | None,
    truncate: bool = False,
    seconds: float | None = None,
    model_ends: Sequence[int] = (),
) -> Iterator[AuditFinding]:
    """Check encoded rows. With `response_length` they are training sequences (sft), otherwise prompts.

    With `truncate`, responses longer than `response_length` lose their stop token instead of being dropped.
    `seconds` ends the audit of further rows; the findings then name the number of rows. `model_ends` are the end ids in
    the model's files.
    """
    begin, encoder = time.monotonic(), Encoder(tokenizer, data)
    prompts: list[int] = []
    responses: list[int] = []
    seen: dict[tuple[bytes | str, ...], Row] = {}
    duplicates: list[tuple[Row, Row]] = []
    empty: list[Row] = []
    unstopped: list[Row] = []
    unknown: list[tuple[Row, str]] = []
    untrained: list[Row] = []
    errors: list[DataError] = []
    long: Counter[str] = Counter()
    counts = Counts()
    image_tokens: list[int] = []
    num_media: Counter[str] = Counter()
    without_response = 0
    ends = {*trained_end_ids(tokenizer), *model_ends}
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    for row in rows:
        if seconds is not None and time.monotonic() - begin > seconds:
            break
        try:
            if response_length is None:
                loaded = counts.load_images(encoder, messages_of(row, data, rows, response=False), row, data)
                if loaded is None:
                    continue
                messages = loaded
                tokens = encoder.prompt(messages, row.where, tools_of(row, data, rows))[1]
                is_empty = not any(_said(message) for message in messages if message["role"] == "user")
                num_prompt = len(tokens)
            elif not has_response(row, data, rows):
                without_response += 1
                continue
            else:
                loaded = counts.load_images(encoder, messages_of(row, data, rows, response=True), row, data)
                if loaded is None:
                    continue
                messages = loaded
                tokens, mask = encoder.conversation(messages, row.where, tools_of(row, data, rows))
                if not mask.any():
                    untrained.append(row)
                    continue
                num_prompt = int(mask.argmax())
                is_empty = not _said(messages[-1]) and not messages[-1].get("tool_calls")
                responses.append(len(tokens) - num_prompt)
                long["response"] += responses[-1] > response_length
                trained = np.flatnonzero(mask)
                is_cut = truncate and responses[-1] > response_length
                lasts = tokens[trained[np.diff(trained, append=len(tokens) + 1) > 1]].tolist()
                if is_cut or lasts[-1] not in ends or (special & set(lasts)) - ends:
                    unstopped.append(row)
        except DataError as error:
            errors.append(error)
            continue
        images = media_of(messages)
        if images:
            image_tokens.append(int(encoder.is_media(tokens).sum()))
            num_media.update(f"{image.kind}s" for image in images)
        unknown += [(row, message["role"]) for message in messages if message["role"] not in ROLES][:1]
        prompts.append(num_prompt)
        long["prompt"] += num_prompt > prompt_length
        if is_empty:
            empty.append(row)
        first = seen.setdefault((tokens.tobytes(), *(image.digest for image in images)), row)
        if first is not row:
            duplicates.append((first, row))
    num = len(prompts)
    num_dropped = counts.broken_images + counts.oversized_images
    num_read = num + len(errors) + len(untrained) + without_response + num_dropped
    part = "" if num_read == len(rows) else f" of the first {num_read}"

    def finding(check: str, level: Level, status: str, remedy: str = "") -> AuditFinding:
        return AuditFinding(check, subject, level, status, remedy)

    if errors:
        yield finding("encoding", "error", f"{len(errors)}{part} rows cannot be encoded; the first: {errors[0]}")
    if image_tokens:
        yield finding(
            "images",
            "ok",
            f"{' and '.join(f'{num} {kind}' for kind, num in num_media.items())} in {len(image_tokens)}{part} rows:"
            f" {_percentiles(image_tokens)} tokens in a row",
        )
    if num_dropped:
        yield finding(
            "images",
            "warning",
            f"{num_dropped}{part} rows are dropped: broken_images {counts.broken_images}, oversized_images"
            f" {counts.oversized_images}",
            "see data_args.broken_images, oversized_images, max_images and max_videos",
        )
    if untrained:
        status = f"{len(untrained)}{part} rows have no token to train on, for example {untrained[0].where}: they are"
        remedy = "every reply has weight 0, or its reasoning is removed by the chat template"
        yield finding("trained_tokens", "warning", f"{status} dropped", remedy)
    if encoder.untrained_replies:
        status = (
            f"{encoder.untrained_replies}{part} replies are read, not trained: the template removes their reasoning,"
            " or reasoning before them, once later messages follow"
        )
        yield finding("trained_replies", "warning", status, "to train them, write one row for each reply")
    if not num:
        none = f", {without_response} without a response" if without_response else ""
        status = f"none of {len(rows)} rows can be used{none}"
        if part:
            status = f"the time sufficed for {num_read} of {len(rows)} rows, none of which can be used"
        yield finding("rows", "note" if part else "error", status)
        return
    counted = f"the first {num} of {len(rows)} rows" if part else f"{num} rows"
    counted += f", and {without_response} without a response" if without_response else ""
    yield finding("rows", "note" if without_response else "ok", counted)
    trains = response_length is not None
    for what, lengths, limit in (
        ("prompt", prompts, prompt_length),
        *([("response", responses, response_length)] if trains else []),
    ):
        over = long[what]
        level: Level = "ok" if not over else "error" if over == num else "warning"
        remedy = f"increase {what}_length; these rows are dropped" + (" or cut" if what == "response" else "")
        status = f"{_percentiles(lengths)} tokens; {over} of {num} exceed {what}_length {limit}"
        yield finding(f"{what}_length", level, status, remedy if over else "")
    if unknown:
        row, role = unknown[0]
        status = f"{len(unknown)} of {num} rows have a message of an unknown role, for example {row.where}: {role!r}"
        remedy = f"write one of {', '.join(ROLES)}: only messages of the assistant are trained"
        yield finding("roles", "warning", status, remedy)
    status = remedy = ""
    if duplicates:
        (first, again), count = duplicates[0], len(duplicates)
        status = f"{count} of {num} rows repeat an earlier one, for example {again.where} that of {first.where}"
        remedy = "remove them, or they count several times in each pass"
    yield finding("duplicates", "warning" if duplicates else "ok", status or "none", remedy)
    what = "response" if trains else "prompt"
    status = f"{len(empty)} of {num} rows have an empty {what}, for example {empty[0].where}" if empty else "none"
    yield finding("empty", "warning" if empty else "ok", status)
    if trains:
        status = f"trained in {num - len(unstopped)} of {num} rows"
        status += f", not in {unstopped[0].where}" if unstopped else ""
        remedy = (
            "the model does not learn to end its responses: the template must end a response with the end-of-sequence"
            f" token {tokenizer.eos_token}"
        )
        level = "ok" if not unstopped else "error" if len(unstopped) == num else "warning"
        yield finding("stop_token", level, status, remedy if unstopped else "")


def audit_reward_columns(
    rows: Rows,
    rewards: Mapping[str, RewardConfig],
    *,
    subject: str,
    seconds: float | None = None,
    functions: Mapping[str, RewardFunction] | None = None,
) -> Iterator[AuditFinding]:
    """Check that the columns of the rows that each reward scores have values, and values that it can score.

    An empty column that a key of the reward names is a warning; of another column it is a note, because a function may
    not read it. `seconds` ends the audit of further rows; the findings then name the number of rows. `functions` find
    the rows that they cannot score.
    """
    begin, functions = time.monotonic(), functions or {}
    for domain, reward in rewards.items():
        tags = {domain, *reward.tag_included}
        read = {column: key for key, column in reward.columns().items()}
        columns = dict.fromkeys((*rows.columns, *read))  # a reward's may be in a column with a mapping
        num, first = 0, ""
        seen: set[str] = set()
        empty: Counter[str] = Counter()
        examples: dict[str, Row] = {}
        unscorable: list[tuple[Row, str]] = []
        for row in rows:
            if seconds is not None and time.monotonic() - begin > seconds:
                first = "the first "
                break
            if len(rewards) > 1 and row.tag not in tags:
                continue
            num += 1
            seen.update(column for column in columns if column in row.values)
            for column in columns:
                if _is_empty(row.values.get(column)):
                    empty[column] += 1
                    examples.setdefault(column, row)
            is_filled = not any(_is_empty(row.values.get(column)) for column in read)
            if domain in functions and is_filled and (problem := functions[domain].unscorable(row.values)):
                unscorable.append((row, problem))
        if unscorable:
            names = [row.where for row, _ in unscorable]
            more = f" and {len(names) - NAMED_ROWS} more" if len(names) > NAMED_ROWS else ""
            status = (
                f"rewards.{domain} cannot score {len(names)} of {num} rows: {unscorable[0][1]}. The rows are"
                f" {', '.join(names[:NAMED_ROWS])}{more}"
            )
            remedy = "mend or remove them: their samples fail in each pass"
            yield AuditFinding("reward_rows", subject, "warning", status, remedy)
        bad = [column for column in columns if column in seen and column in empty]
        for column in bad:
            status = (
                f"column {column!r} is empty in {empty[column]} of {first}{num} rows that rewards.{domain} scores, for"
                f" example {examples[column].where}"
            )
            key = read.get(column)
            remedy = f"fill it, or remove these rows: rewards.{domain}.{key} names this column" if key else ""
            yield AuditFinding("reward_columns", subject, "warning" if key else "note", status, remedy)
        if num and not bad:
            where = f" in {first}{num} rows" if first else ""
            status = f"no column for rewards.{domain} is empty{where}"
            yield AuditFinding("reward_columns", subject, "ok", status)


def _is_empty(value: Any) -> bool:
    return not value.strip() if isinstance(value, str) else value is None or value in ([], {})


class _Trial:
    """Small conversations, encoded with a chat template."""

    def __init__(
        self, chats: ChatEncoder, encoder: Encoder, subject: str, bad: Level, model_ends: Sequence[int]
    ) -> None:
        """`bad` is the level of what matters only to conversations of several turns. `model_ends`: see above."""
        self.chats, self.encoder, self.subject, self.bad = chats, encoder, subject, bad
        tokenizer = encoder.tokenizer
        # A tokenizer of characters may have few of them.
        known = sorted(
            token for token in tokenizer.get_vocab() if len(token) == 1 and token.isascii() and token.isalnum()
        )
        one, two = (known * 2)[1:3] if known else ("1", "2")
        self.question: Message = {"role": "user", "content": one}
        self.answer = two
        self.opening: EncodedChat
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = [str(token) for token in added.values() if token.special]
        self.stops = [stop for stop in dict.fromkeys([str(tokenizer.eos_token), *special]) if stop]
        ends = dict.fromkeys([*trained_end_ids(tokenizer), *model_ends])
        self.ends = [str(token) for token in tokenizer.convert_ids_to_tokens(list(ends)) if token]
        """Tokens at which generation stops."""
        self.end = ""
        """Text that ends a reply."""

    def finding(self, check: str, level: Level, status: str, remedy: str = "") -> AuditFinding:
        """A finding about the chat template."""
        return AuditFinding(check, self.subject, level, status, remedy)

    def end_of_turn(self) -> AuditFinding:
        """The token that ends a reply, and whether generation stops at it."""
        text = self.chats.encode([self.question, {"role": "assistant", "content": self.answer}, self.question]).text
        rest = text.removeprefix(self.opening.text).partition(self.answer)[2]
        ends = [(rest.find(stop), stop) for stop in self.stops if stop in rest]
        if not ends:
            return self.finding("end_of_turn", "note", "the chat template ends replies with no special token")
        offset, self.end = min(ends)
        if self.end in self.ends and self.opening.text.endswith(rest.lstrip()) and self.end != self.stops[0]:
            status = f"the first token of the next turn ({self.end}) ends earlier replies, {self.stops[0]} the last one"
            return self.finding("end_of_turn", "note", status)
        if self.end in self.ends:
            return self.finding("end_of_turn", "ok", f"{self.end}, at which generation stops")
        stop = next(
            (stop_string for stop_string in self.ends if rest[offset + len(self.end) :].startswith(stop_string)), None
        )
        if stop is not None:
            self.end += stop
            return self.finding("end_of_turn", "ok", f"{self.end}; generation stops at {stop}")
        return self.finding(
            "end_of_turn",
            "warning",
            f"the chat template ends earlier replies with {self.end}, generation stops at {', '.join(self.ends)}",
            f"set the tokenizer's eos_token to {self.end}, unless it also ends parts of a reply: then it is not trained"
            " at the end of earlier replies",
        )

    def keeps(
        self, check: str, what: str, reply: Mapping[str, Any], follows: Message, tools: Sequence[Mapping[str, Any]] = ()
    ) -> AuditFinding:
        """Check that a second prompt begins with the first and a reply as the template writes it."""
        try:
            chat = self.chats.encode([self.question], tools)
            text = self.chats.encode([self.question, {"role": "assistant", **reply}, follows], tools).text
            rest = text[len(chat.text) :] if text.startswith(chat.text) else ""
            cuts = {match.end() for stop in self.stops for match in re.finditer(re.escape(stop), rest)}
            for cut in sorted(cuts):
                ids = np.asarray(self.encoder.encode(rest[:cut], self.subject), dtype=np.int64)
                if self.chats.extend(chat, ids, [follows]) is not None:
                    return self.finding(check, "ok", f"prompts after {what} begin with the recorded tokens")
        except DataError as error:
            return self.finding(check, self.bad, f"the chat template cannot render {what}: {error}")
        return self.finding(
            check,
            self.bad,
            f"the chat template changes earlier turns when {what} follow: each turn becomes a training row",
            "set thinking: keep if the template removes reasoning, or use a template that keeps earlier turns",
        )

    def reasoning(self, thinking: str) -> AuditFinding:
        """Check that the reasoning of a reply is part of later prompts."""
        opened = self.opening.text.rstrip().endswith("<think>")
        text = f"{'' if opened else '<think>'}\n{self.answer}\n</think>\n\n{self.answer}{self.end}"
        if self.chats.tool_format == "harmony":
            analysis = f"<|channel|>analysis<|message|>{self.answer}<|end|><|start|>assistant"
            text = f"{analysis}<|channel|>final<|message|>{self.answer}{self.end}"
        try:
            ids = np.asarray(self.encoder.encode(text, self.subject), dtype=np.int64)
            is_kept = self.chats.extend(self.opening, ids, [self.question]) is not None
        except DataError:
            return self.finding("reasoning", "note", "the tokenizer does not cover reasoning blocks")
        status = (
            "reasoning of earlier replies stays in later prompts"
            if is_kept
            else "reasoning of earlier replies is removed: a user's message begins a new training row"
        )
        return self.finding("reasoning", "note", f"{status} (thinking: {thinking})")


def _said(message: Any) -> bool:
    return bool(str(message["content"]).strip())


def _percentiles(lengths: Sequence[int]) -> str:
    median, high, longest = (int(length) for length in np.percentile(lengths, [50, 95, 100], method="higher"))
    return f"median {median}, 95 % at most {high}, longest {longest}"


def is_chat_data(data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if prompts pass through a chat template."""
    return are_chats(data) or data.template not in ("plain", "native") or bool(tokenizer.chat_template)


# -- a run -------------------------------------------------------------------------------------------------------------


def audit_run(
    config: RunConfig,
    rows: ReadRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seconds: float | None = None,
    registry: Registry | None = None,
) -> Iterator[AuditFinding]:
    """Audit the chat template and all rows of a run. `seconds` is the time after which no further row is encoded.

    With `registry`, load the rewards and find the rows that they cannot score.
    """
    begin = time.monotonic()
    if config.pipeline not in PIPELINES:
        status = (
            f"the rows of {config.pipeline} are {'read' if seconds is None else 'not read'}, and not encoded: lengths"
            f" and stop tokens are audited for {', '.join(PIPELINES)}"
        )
        yield AuditFinding("pipeline", "pipeline", "note", status)
        yield from _read_sources(config, rows, set()) if seconds is None else ()
        return
    multi_turn = bool(getattr(config, "multi_turn", False))
    role = config.policy_role or next(iter(config.roles()))
    template, model = config.roles()[role].data_args, config.roles()[role].model_args
    if config.pipeline == "evaluate":
        template = next(source for _, source in sources(config))
    path = model.path(config.pretrain)
    model_ends = saved_end_ids(path, model.model_config_kwargs) if path else ()
    if multi_turn or is_chat_data(template, tokenizer):
        yield from audit_template(
            tokenizer,
            template,
            subject=f"{role}.data_args",
            multi_turn=multi_turn,
            tool_format=getattr(config, "tool_format", "auto"),
            thinking=getattr(config, "thinking", "template"),
            model_ends=model_ends,
        )

    def left() -> float | None:
        return None if seconds is None else max(0.0, seconds - (time.monotonic() - begin)) / 2

    for key, source in dict(sources(config)).items():
        trains = PIPELINES[config.pipeline] and not key.startswith("validation")
        yield from audit_rows(
            rows(source),
            source,
            tokenizer,
            subject=key,
            prompt_length=config.prompt_length,
            response_length=config.response_length if trains else None,
            truncate=getattr(config, "overlong", "drop") == "truncate",
            seconds=left(),
            model_ends=model_ends,
        )
        if isinstance(config, RewardKeys):
            functions = _reward_functions(config, registry) if registry is not None else {}
            yield from audit_reward_columns(
                rows(source), config.rewards, subject=key, seconds=left(), functions=functions
            )
    yield from _read_sources(config, rows, {key for key, _ in sources(config)}) if seconds is None else ()


def _read_sources(config: RunConfig, rows: ReadRows, audited: set[str]) -> Iterator[AuditFinding]:
    """Read all data of a run whose rows are not encoded here, and check them as `roll-core check` does its first rows.

    Raises `DataError` for a file that cannot be read.
    """
    values = config.model_dump()
    for path, _, section in sections(type(config), values, DataArguments):
        data, key = DataArguments.model_validate(section), ".".join(path)
        if not data.file_name or key in audited:
            continue
        source_rows = rows(data)
        needed = type(config).row_keys.get(path[0], ()) if len(path) == 2 else ()
        try:
            for row in source_rows if needed else ():
                messages_of(row, data, source_rows, response="response" in needed)
            if len(path) == 2:
                type(config).check_rows(path[0], source_rows, data, values)
        except DataError as error:
            yield AuditFinding("rows", key, "error", str(error))
        else:
            yield AuditFinding("rows", key, "ok", f"{len(source_rows)} rows, read but not encoded")


def _reward_functions(config: RewardKeys, registry: Registry) -> dict[str, RewardFunction]:
    """Rewards that score without a model, by their domain. None of those whose packages are missing."""
    functions = {}
    for domain, reward in config.rewards.items():
        provider = registry.find(RewardProvider, reward.reward)
        with contextlib.suppress(ImportError, PluginLoadError):  # `roll-core check` reports them
            cls = load_class(provider.target, RewardFunction, owner=provider.name)  # type: ignore[type-abstract]
            functions[domain] = cls(reward)
    return functions


def write_audit(run: Run) -> None:
    """Write the findings about a run's data to `audit.json`. Takes less than a second and never fails."""
    try:
        findings = [asdict(finding) for finding in audit_run(run.config, run.rows, run.tokenizer, seconds=RECORDED_S)]
    except Exception as error:  # of a tokenizer or of a template; the run itself reports what it needs
        log.debug("the audit failed", exc_info=True)
        text = f"failed: {type(error).__name__}: {error}"
        findings = [asdict(AuditFinding("audit", "", "note", text))]
    try:
        (run.dir / AUDIT).write_text(json.dumps(findings, indent=2), encoding="utf-8")
    except OSError as error:
        log.warning("%s cannot be written: %s", run.dir / AUDIT, error)


NUM_STREAMED = 1000
"""Number of first rows that are audited if `streaming` leaves the rows of training on the disk."""


def sources(config: RunConfig) -> Iterator[tuple[str, DataArguments]]:
    """Data with prompts, by key of the config. Rows of environments are tasks, which have no prompt."""
    if getattr(config, "multi_turn", False):
        return
    for role, worker in config.roles().items():
        data = worker.data_args
        if data.file_name and getattr(config, "streaming", False):  # all rows may not fit into memory
            data = data.model_copy(update={"max_samples": min(data.max_samples or NUM_STREAMED, NUM_STREAMED)})
        if data.file_name:
            yield f"{role}.data_args", data
    validation = getattr(config, "validation", None)
    if validation is not None and validation.data_args.file_name:
        yield "validation.data_args", validation.data_args
