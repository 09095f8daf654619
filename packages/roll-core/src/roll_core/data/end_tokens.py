"""Tokens that end a response: one set for training data, engines, exports and the audit.

A tokenizer, a generation config and a config each name end tokens, and they often differ: a base model with a
tokenizer for chats, a new end-of-sequence token. A model that learned to end with a token at which generation does not
stop never ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.data.templates import JinjaTemplate
from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Message


def end_ids(tokenizer: PreTrainedTokenizerBase | None, *configs: object) -> tuple[int, ...]:
    """Ids at which generation stops: those that training ends responses with, and those of the model.

    The model's are in the first of `configs` that has any: its generation config, then its config. A config is an
    object or a mapping of transformers' keys; None has no ids.
    """
    ids = [] if tokenizer is None else [*trained_end_ids(tokenizer)]
    return tuple(dict.fromkeys([*ids, *stored_end_ids(*configs)]))


def stored_end_ids(*configs: object) -> tuple[int, ...]:
    """End ids of the first of `configs` that has any (see `end_ids`)."""
    for config in configs:
        value = config.get("eos_token_id") if isinstance(config, Mapping) else getattr(config, "eos_token_id", None)
        if value is not None:
            return tuple(int(token) for token in (value if isinstance(value, (list, tuple)) else [value]))
    return ()


def saved_end_ids(path: str, overrides: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """End ids in the files of a model at a directory or, if downloaded, at a hub id. `overrides` are of its config."""
    from transformers.utils import cached_file

    def read(name: str) -> dict[str, Any]:
        try:
            options = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
            file = cached_file(path, name, **options)
            keys = json.loads(Path(file).read_text(encoding="utf-8")) if file else {}
        except (OSError, ValueError, RecursionError):  # reported when the model is loaded
            return {}
        return keys if isinstance(keys, dict) else {}

    config = {**read("config.json"), **(overrides or {})}
    return stored_end_ids(read("generation_config.json"), config.get("text_config"), config)


def trained_end_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response in training data: the end-of-sequence token, and the chat template's end of a reply."""
    return tuple(int(tokenizer.convert_tokens_to_ids(mark)) for mark in reply_ends(tokenizer)[0])


def reply_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[str, ...], frozenset[str]]:
    """Special tokens that end a reply, the end-of-sequence token first, and those that end only a message of a reply.

    Some replies consist of several messages (gpt-oss: analysis, then the answer). The token that ends any message does
    not end such a reply.
    """
    eos = [str(tokenizer.eos_token)] if tokenizer.eos_token else []
    if not tokenizer.chat_template:
        return tuple(eos), frozenset()
    read, inside, closing = _marks_of_trials(JinjaTemplate(tokenizer))
    of_messages = {mark for mark in closing if inside & read and mark in read} - set(eos)
    ends = dict.fromkeys([*eos, *(mark for mark in closing if mark not in of_messages)])
    return tuple(ends), frozenset(of_messages)


_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "a"}}},
    },
}
_QUESTION: Message = {"role": "user", "content": "1"}
_REPLY: Message = {"role": "assistant", "content": "2"}
_TRIALS: tuple[tuple[Sequence[Message], Sequence[Mapping[str, Any]]], ...] = (
    ([_QUESTION, _REPLY], ()),
    ([_QUESTION, _REPLY, _QUESTION, _REPLY], ()),
    ([{"role": "system", "content": "4"}, _QUESTION, _REPLY, _QUESTION, _REPLY], ()),
    ([_QUESTION, {**_REPLY, "reasoning_content": "3"}], ()),
    (
        [
            _QUESTION,
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "2"},
            _REPLY,
        ],
        (_TOOL,),
    ),
)
"""Small conversations: a reply is the last or not, follows a system message, has reasoning, or calls a tool."""


def _marks_of_trials(template: JinjaTemplate) -> tuple[set[str], set[str], list[str]]:
    """Special tokens in what the model reads, inside its replies, and at the end of its replies.

    Skips conversations that the template refuses.
    """
    read: set[str] = set()
    inside: set[str] = set()
    closing: list[str] = []
    marks = "|".join(re.escape(mark) for mark in sorted(template.marks, key=len, reverse=True))
    for messages, tools in _TRIALS if marks else ():
        try:
            segments = template.segments(messages, tools)
        except DataError:
            continue
        for segment in segments:
            if not segment.written:
                read.update(re.findall(marks, segment.text))
            elif end := re.search(rf"(?:(?:{marks})\s*)+$", segment.text):
                inside.update(re.findall(marks, segment.text[: end.start()]))
                closing.append(re.findall(marks, end[0])[-1])
    return read, inside, closing
