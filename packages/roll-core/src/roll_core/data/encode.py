"""From rows to tokens: prompts for generation and sequences for training. Dropped and truncated rows are counted."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roll_core.data.rows import Rows, are_chats, has_response, messages_of, stored_messages, text_of, tools_of
from roll_core.data.templates import JinjaTemplate, Template, load_template, texts_of
from roll_core.errors import DataError
from roll_core.types import TrainSequence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Message, Row
    from roll_core.spec.config import DataArguments
    from roll_core.spec.rollout import Prompt
    from roll_core.types import TokenIds

log = logging.getLogger(__name__)

Overlong = Literal["drop", "truncate"]


@dataclass(slots=True)
class Counts:
    """Numbers of kept, dropped and truncated rows."""

    kept: int = 0
    overlong_prompts: int = 0
    """Dropped: the prompt is longer than `prompt_length`."""
    overlong_responses: int = 0
    """Dropped: the response is longer than `response_length`."""
    truncated_responses: int = 0
    """Kept, but truncated to `response_length`: the end token is missing."""
    empty: int = 0
    """Dropped: no token to train on."""
    without_response: int = 0
    """Dropped: no response, where a response is optional."""

    def __str__(self) -> str:
        named = [f"{getattr(self, each.name)} {each.name.replace('_', ' ')}" for each in fields(self)]
        return ", ".join(text for text in named if not text.startswith("0 "))


class Encoder:
    """Tokenizer and chat template of the rows, with lossless encoding of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataArguments, *, chats: bool | None = None) -> None:
        """`chats`: True if the rows have roles. Default: as `data` says."""
        self.tokenizer = tokenizer
        self.template: Template = load_template(
            data.template, tokenizer, chats=are_chats(data) if chats is None else chats
        )
        if tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token, which ends each response: set its eos_token")
        first = tokenizer("", add_special_tokens=True)["input_ids"][:1]
        # A chat template writes the beginning-of-sequence token itself. In plain text the tokenizer adds it.
        self.begins_with: list[int] = list(first) if first and first[0] == tokenizer.bos_token_id else []

    def prompt(
        self, messages: Sequence[Message], where: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, TokenIds]:
        """Prompt text, up to where generation starts, and its tokens. Raises `DataError`."""
        text = self.template.prompt(messages, tools)
        return text, self.begun(np.asarray(self.encode(text, where), dtype=np.int64))

    def conversation(
        self, messages: Sequence[Message], where: str, tools: Sequence[Mapping[str, Any]] = (), *, context: int = 0
    ) -> tuple[TokenIds, Any]:
        """Tokens `[L]`, and a bool mask `[L]` of the model's own tokens. Segments are encoded separately.

        The first `context` turns of the assistant belong to the prompt: the mask excludes them.
        """
        pieces: list[int] = []
        written: list[bool] = []
        turns = 0
        for segment in self.template.segments(messages, tools):
            ids = self.encode(segment.text, where)
            ids += [self.tokenizer.eos_token_id] if segment.ends else []
            pieces += ids
            turns += segment.written
            written += [segment.written and turns > context] * len(ids)
        tokens = self.begun(np.asarray(pieces, dtype=np.int64))
        mask = np.asarray([False] * (len(tokens) - len(written)) + written, dtype=np.bool_)
        return tokens, mask

    def rendered(self, messages: Sequence[Message], where: str) -> TokenIds:
        """Tokens `[L]` of a conversation as the template renders it, including text after the last response."""
        if not isinstance(self.template, JinjaTemplate):
            return self.conversation(messages, where)[0]
        return self.begun(np.asarray(self.encode(self.template.conversation(messages), where), dtype=np.int64))

    def encode(self, text: str, where: str) -> list[int]:
        """Tokens of a text. Raises `DataError` for characters that the tokenizer does not cover."""
        if not text:
            return []
        try:
            ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # the library raises plain `Exception`
            raise DataError(f"{where}: {self._uncovered(text)}") from error
        unknown = self.tokenizer.unk_token_id
        if unknown is not None and unknown in ids and str(self.tokenizer.unk_token) not in text:
            raise DataError(f"{where}: {self._uncovered(text)}")
        return ids

    def begun(self, tokens: TokenIds) -> TokenIds:
        """Tokens after the beginning-of-sequence token, if the tokenizer adds one that the text lacks."""
        if not self.begins_with or (len(tokens) and tokens[0] == self.begins_with[0]):
            return tokens
        return np.concatenate([np.asarray(self.begins_with, dtype=np.int64), tokens])

    def _uncovered(self, text: str) -> str:
        def known(character: str) -> bool:
            try:
                ids = self.tokenizer(character, add_special_tokens=False)["input_ids"]
            except Exception:  # see `encode`
                return False
            return self.tokenizer.unk_token_id is None or self.tokenizer.unk_token_id not in ids

        bad = sorted({each for each in text if not known(each)})
        shown = ", ".join(f"{each!r} (U+{ord(each):04X})" for each in bad[:5]) or "some of its text"
        return f"the tokenizer does not cover {shown}; extend its alphabet, or use a byte or bpe tokenizer"


def encode_prompts(
    rows: Rows, data: DataArguments, tokenizer: PreTrainedTokenizerBase, *, prompt_length: int
) -> tuple[list[Prompt], Counts]:
    """Encode rows as prompts, in order, with the rows' ids.

    Prompts longer than `prompt_length` tokens are dropped. Raises `DataError`, also if no prompt remains.
    """
    from roll_core.spec.rollout import Prompt

    encoder = Encoder(tokenizer, data)
    counts = Counts()
    prompts: list[Prompt] = []
    for row in rows:
        messages = messages_of(row, data, rows, response=False)
        text, tokens = encoder.prompt(messages, row.where, tools_of(row, data, rows))
        if len(tokens) == 0:
            raise DataError(f"{row.where}: the prompt has no token")
        if len(tokens) > prompt_length:
            counts.overlong_prompts += 1
            continue
        counts.kept += 1
        prompts.append(
            Prompt(id=row.id, tokens=tokens, text=text, messages=messages, tag=row.tag, metadata=dict(row.values))
        )
    report_counts("prompts", rows, counts)
    return prompts, counts


def tokenizer_texts(rows: Rows, data: DataArguments) -> Iterator[str]:
    """All texts of the rows as formatted by the template, which a tokenizer built for them must cover."""
    for row in rows:
        if tools := tools_of(row, data, rows):
            yield json.dumps(tools, ensure_ascii=False)
        for messages in _conversations(row, data, rows):
            yield from texts_of(messages, data.template)


def _conversations(row: Row, data: DataArguments, rows: Rows) -> Iterator[list[Message]]:
    """The prompt with its response, and the chosen and the rejected response of a pair."""
    pair = [column for column in (data.chosen, data.rejected) if column in rows.columns]
    prompt = data.messages or data.prompt
    for column in [*([prompt] if prompt in rows.columns or not pair else []), *pair]:
        value = row.values.get(column)
        if column == data.messages or isinstance(value, list):
            yield stored_messages(row, data.model_copy(update={"messages": column}), rows)
        elif column == prompt:
            yield messages_of(row, data, rows, response=isinstance(row.values.get(data.response), str))
        else:
            yield [{"role": "assistant", "content": text_of(row, column, rows)}]


def encode_sft(
    rows: Rows,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_length: int,
    response_length: int,
    overlong: Overlong = "drop",
    on_prompt: bool = False,
    require_response: bool = True,
) -> tuple[list[TrainSequence], Counts]:
    """Encode rows with prompt and response as training sequences, in order.

    The prompt is everything before the first token that the model writes. The response is the rest, which may contain
    several turns; only the model's turns are trained.

    * A prompt longer than `prompt_length` drops the row.
    * A response longer than `response_length` drops the row (`drop`) or is cut at its end (`truncate`).
    * With `on_prompt`, all tokens except the first are trained.
    * A row without a response raises `DataError`, or is dropped if `require_response` is false.

    Raises `DataError` also if no row remains, unless every row lacks an optional response.
    """
    encoder = Encoder(tokenizer, data)
    counts = Counts()
    sequences: list[TrainSequence] = []
    for row in rows:
        if not require_response and not has_response(row, data, rows):
            counts.without_response += 1
            continue
        messages = messages_of(row, data, rows, response=True)
        tokens, mask = encoder.conversation(messages, row.where, tools_of(row, data, rows))
        num_prompt = int(mask.argmax()) if mask.any() else len(tokens)
        if num_prompt > prompt_length:
            counts.overlong_prompts += 1
            continue
        if len(tokens) - num_prompt > response_length:
            if overlong == "drop":
                counts.overlong_responses += 1
                continue
            counts.truncated_responses += 1
            tokens, mask = tokens[: num_prompt + response_length], mask[: num_prompt + response_length]
        mask[:1] = False  # the first token has no context to predict it from
        if not mask.any():
            counts.empty += 1
            continue
        counts.kept += 1
        if on_prompt:
            mask[1:] = True
        sequences.append(TrainSequence(id=row.id, tokens=tokens, loss_mask=mask))
    report_counts("rows", rows, counts)
    return sequences, counts


def report_counts(what: str, rows: Rows, counts: Counts) -> None:
    """Log the counts. Raises `DataError` if no row is kept."""
    if counts.kept == 0 and counts.without_response < len(rows):
        raise DataError(f"none of {len(rows)} {what} can be used: {counts}; increase prompt_length or response_length")
    log.info("%d %s: %s", len(rows), what, counts)
