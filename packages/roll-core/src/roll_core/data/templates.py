"""Chat templates: from messages to text, turn by turn, so that each turn can be encoded separately.

The tokens of a prompt must not depend on whether the response exists yet. Otherwise a model trains on other prompts
than it sees in generation. A conversation is therefore split into segments that the model reads or writes. Templates
that rewrite earlier turns when later ones follow are not supported, except for reasoning that they remove.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from string import ascii_letters
from typing import TYPE_CHECKING, Any, TypeAlias

from roll_core.data.reasoning import MARKS
from roll_core.errors import DataError
from roll_core.spec.rollout import IMAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.rows import Message


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a conversation that the model either reads or writes."""

    text: str
    written: bool
    """True if the model writes this text, which is then trained; False if it only reads the text."""
    ends: bool = False
    """True if the end-of-sequence token follows, which the model must write to end its turn."""


def load_template(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chats: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Template:
    """Load the template named by `data_args.template`, with the variables `arguments` of a Jinja template.

    Raises `DataError` for an unknown name, for a tokenizer without the template's tokens, for `native` with `chats` if
    the tokenizer has no chat template, and for `arguments` that the template does not read.
    """
    if name == "native" and tokenizer.chat_template:
        return JinjaTemplate(tokenizer, arguments)
    if arguments:
        raise DataError(
            f"chat_template_kwargs has {', '.join(arguments)}, but the tokenizer has no chat template that"
            " could read it: remove it, or choose a tokenizer with a chat template"
        )
    if name == "native":
        if chats:
            raise DataError(
                "the rows are chats (data_args.messages or data_args.system), but the tokenizer has no chat template:"
                " set data_args.template to the one that the model was trained with"
                f" ({', '.join(name for name in NAMED if name != 'plain')}), or to plain, which only joins the contents"
            )
        return NAMED["plain"](tokenizer.eos_token)
    return _named(name, tokenizer)


def chat_template_of(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Jinja text of a named template for `tokenizer.chat_template`; both give the same tokens. Raises `DataError`."""
    return _named(name, tokenizer).jinja()


def _named(name: str, tokenizer: PreTrainedTokenizerBase) -> Turns:
    if name not in NAMED:
        raise DataError(f"unknown chat template {name!r}, expected native, {', '.join(NAMED)}")
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in control_tokens(name) if token not in vocabulary]
    if missing:
        raise DataError(
            f"chat template {name!r} needs the tokens {', '.join(missing)}, which the tokenizer does not have: choose"
            " another template or tokenizer"
        )
    return NAMED[name](tokenizer.eos_token)


def control_tokens(name: str) -> tuple[str, ...]:
    """Tokens by which a named template marks turns; a tokenizer built for it must have them."""
    return CONTROL_TOKENS.get(name, ())


@dataclass(frozen=True, slots=True)
class Turns:
    """Template of turns: `opening`, content and `closing` for each message, then `between`.

    A response ends with the end-of-sequence token, unless `closing` is this token.
    """

    eos_token: str | None
    opening: str = ""
    """Text before a message's content; may contain `{role}`."""
    closing: str = ""
    between: str = ""
    first: str = ""
    """Text before the first turn."""
    system: str = ""
    """Default system message for conversations without one; empty for none."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """All turns, followed by the opening of the assistant's turn."""
        empty: Message = {"role": "assistant", "content": ""}
        *read, _ = self.segments([*messages, empty], tools)
        return "".join(segment.text + (self.eos_token or "") if segment.ends else segment.text for segment in read)

    def jinja(self) -> str:
        """Equivalent Jinja template for `tokenizer.chat_template`."""
        before, named, after = self.opening.partition("{role}")

        def opening(role: str) -> list[str]:
            return [json.dumps(before), role, json.dumps(after)] if named else [json.dumps(before)]

        def shown(*texts: str) -> str:
            joined = " ~ ".join(text for text in texts if text != '""')
            return f"{{{{ {joined} }}}}" if joined else ""

        closing, between = json.dumps(self.closing), json.dumps(self.between)
        default = shown(*opening("'system'"), json.dumps(self.system), closing, between)
        eos = "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}" if self.closing != self.eos_token else ""
        turn, start = shown(*opening("m['role']"), "m['content']", closing), shown(*opening("'assistant'"))
        return (
            shown(json.dumps(self.first))
            + (f"{{% if messages[0]['role'] != 'system' %}}{default}{{% endif %}}" if self.system else "")
            + f"{{% for m in messages %}}{turn}{eos}{shown(between)}{{% endfor %}}"
            + (f"{{% if add_generation_prompt %}}{start}{{% endif %}}" if start else "")
        )

    def segments(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, context: int = 0
    ) -> list[Segment]:
        """Segments of the conversation in order. The model only reads the first `context` messages."""
        _refuse_tools(messages, tools)
        if any(message.get("media") for message in messages):
            raise DataError(
                "a named chat template has no placeholder for images: set data_args.template to native, with a model"
                " whose own chat template renders images"
            )
        written = trained_replies(messages, context)
        turns = list(enumerate(messages))
        if self.system and messages[0]["role"] != "system":
            turns.insert(0, (-1, {"role": "system", "content": self.system}))
        segments: list[Segment] = []
        pending = self.first
        for index, message in turns:
            pending += self.opening.format(role=message["role"])
            text = message["content"] + self.closing
            if message["role"] == "assistant":
                segments.append(Segment(pending, written=False))
                segments.append(Segment(text, written=index in written, ends=self.closing != self.eos_token))
                pending = self.between
            else:
                pending += text + self.between
        if pending != self.between:
            segments.append(Segment(pending, written=False))
        return segments

    def unrendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int | None, str] | None:
        """As `JinjaTemplate.unrendered`. Named templates render roles and contents."""
        _refuse_tools(messages, tools)
        for index, message in enumerate(messages):
            for key in ("reasoning_content", "name"):
                if message.get(key) and not (key == "name" and message["role"] == "tool"):
                    return index, key
        return None


def trained_replies(messages: Sequence[Message], context: int = 0) -> list[int]:
    """Indices of the assistant's messages after the first `context` messages, without those of weight 0."""
    return [
        index
        for index, message in enumerate(messages)
        if index >= context and message["role"] == "assistant" and message.get("weight") != 0
    ]


def _refuse_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    if tools or any(message.get("tool_calls") for message in messages):
        raise DataError(
            "a named chat template can neither describe tools nor render tool_calls: set data_args.template to native,"
            " with a tokenizer whose own chat template does, or write tools and calls into the contents"
        )


def texts_of(messages: Sequence[Message], name: str) -> list[str]:
    """Texts that a tokenizer must cover to encode the messages with this template; `native` counts as plain text."""
    template = NAMED.get(name, Turns)(None)
    texts = [segment.text for segment in template.segments([_plain(message) for message in messages])]
    for token in control_tokens(name):
        texts = [text.replace(token, "") for text in texts]
    return texts


def _plain(message: Message) -> Message:
    """A message whose content ends with its tool calls, as JSON."""
    if not message.get("tool_calls"):
        return message
    return {
        "role": message["role"],
        "content": message["content"] + json.dumps(message["tool_calls"], ensure_ascii=False),
    }


_CHATML = partial(Turns, opening="<|im_start|>{role}\n", closing="<|im_end|>", between="\n")
NAMED: dict[str, Callable[[str | None], Turns]] = {
    "plain": Turns,
    "chatml": _CHATML,
    "qwen": partial(_CHATML, system="You are a helpful assistant."),
    "llama3": partial(
        Turns,
        opening="<|start_header_id|>{role}<|end_header_id|>\n\n",
        closing="<|eot_id|>",
        first="<|begin_of_text|>",
    ),
}
CONTROL_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}


_DATE = "roll_date"
"""Attribute of a tokenizer with the date and time that its chat template sees."""


def set_date(tokenizer: PreTrainedTokenizerBase, date: datetime) -> None:
    """Fix the date and time that the tokenizer's chat template sees (`strftime_now`).

    Otherwise prompts would change at midnight, and those of a resumed run would differ from the run that it continues.
    """
    setattr(tokenizer, _DATE, date)


def date_of(tokenizer: PreTrainedTokenizerBase) -> datetime | None:
    """The date that `set_date` fixed; None if templates see the clock."""
    return getattr(tokenizer, _DATE, None)


class JinjaTemplate:
    """Template stored in the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None) -> None:
        """`arguments` are variables of the template, such as `enable_thinking`.

        Raises `DataError` if the template reads one of them nowhere.
        """
        self.tokenizer, self._arguments = tokenizer, dict(arguments or {})
        text = str(tokenizer.chat_template)
        if unread := [name for name in self._arguments if not re.search(rf"\b{re.escape(name)}\b", text)]:
            raise DataError(
                f"chat_template_kwargs has {', '.join(unread)}, which the tokenizer's chat template does not"
                " read: remove it, or correct the name"
            )
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        marks = [tokenizer.eos_token, *tokenizer.all_special_tokens, *(str(token) for token in added if token.special)]
        self.marks = tuple(dict.fromkeys(str(token) for token in marks if token))
        """Special tokens, which mark turns; the end-of-sequence token is the first."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Prompt text with the template's generation prompt. `tools` are schemas in the format of OpenAI's API."""
        return self._render(messages, add_generation_prompt=True, tools=[dict(tool) for tool in tools] or None)

    def conversation(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Text of a whole conversation."""
        return self._render(messages, add_generation_prompt=False, tools=[dict(tool) for tool in tools] or None)

    def segments(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, context: int = 0
    ) -> list[Segment]:
        """Split where responses begin and end. The model only reads the first `context` messages.

        A reply is read, too, if the template removes reasoning in it or before it once later messages follow. Raises
        `DataError` if the template rewrites earlier turns in other ways.
        """
        rendering = self.conversation(messages, tools)
        replies = trained_replies(messages, context)
        prompts = {index: self.prompt(messages[:index], tools) for index in replies if index}
        if len(messages) - 1 in prompts:
            rendering = _with_thought(messages[-1], prompts[len(messages) - 1], rendering)
        segments: list[Segment] = []
        written_to = 0
        for index in replies:
            span = self._span(messages, index, tools, rendering, prompts.get(index, ""))
            if span is None:
                continue
            begin, end, said = span
            if not written_to <= begin <= said <= end:
                raise DataError(
                    f"message {index + 1} begins at character {begin} of the chat template's rendering, and its content"
                    f" ends at {said}, but the message before it ends at {written_to}: the tokenizer's chat template"
                    " does not render messages in order; set data_args.template to a named template"
                )
            # In the middle, the template's own token ends a turn: a prompt of the next turn has no other.
            ends = not rendering[said:end].endswith(self.marks if rendering[end:].strip() else self.marks[:1])
            segments += [
                Segment(rendering[written_to:begin], written=False),
                Segment(rendering[begin:end], written=True, ends=ends),
            ]
            written_to = end
        if rendering[written_to:].strip():
            segments.append(Segment(rendering[written_to:], written=False))
        return segments

    def _span(
        self, messages: Sequence[Message], index: int, tools: Sequence[Mapping[str, Any]], rendering: str, before: str
    ) -> tuple[int, int, int] | None:
        """Where a reply begins and ends in `rendering`, and where its content ends. `before` is its prompt.

        None if the template removes reasoning in the reply or before it, because later messages follow.
        """
        message = messages[index]
        if index == 0:
            raise DataError(
                "message 1 is of the assistant, but a prompt begins with a message of the system or the user: remove"
                " it, or give it weight 0, so that the model only reads it"
            )
        after = self.conversation(messages[: index + 1], tools) if index + 1 < len(messages) else rendering
        begin = len(before)
        end = said = None
        if rendering.startswith(before) and after.startswith(before) and rendering.startswith(after):
            said = begin + _said(message, after[begin:])
            end = begin + self._end(after[begin:], rendering[len(after) :], said - begin)
        elif rendering.startswith(before) and index + 1 < len(messages):
            said, end = self._end_in_history(messages, index, tools, rendering)
        if said is not None and end is not None:
            thought = _opened(before) or begin
            missing = _missing_text(message, rendering[thought:end])
            if not missing:
                return begin, end, said
            if index + 1 == len(messages) or _missing_text(message, after[thought:]):
                raise DataError(
                    f"the tokenizer's chat template does not render {missing} of message {index + 1} as it is: remove"
                    " what the template removes, or use another template"
                )
            answer = _THOUGHT_END.split(message["content"])[-1]
            if not _missing_text({"content": answer}, rendering[begin:end]):
                return None
        elif (
            index + 1 < len(messages)
            and _REASONING.search(before)
            and _without_reasoning(rendering).startswith(_without_reasoning(before))
        ):
            return None
        raise DataError(
            f"the tokenizer's chat template renders a prompt differently if a response follows (message {index + 1}),"
            " so the model would be trained on prompts that it never gets in generation: use a named template, or train"
            " on single turns"
        )

    def unrendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int | None, str] | None:
        """Index of the first message with a value that the template does not render, and the value's key.

        The index of `tools` is None. Each value is replaced by a text that occurs nowhere else. Reasoning and text
        beside tool calls may be missing once later messages follow.
        """
        marked, marked_tools = _Marked(), [dict(tool) for tool in tools]
        changed = [marked.message(index, message) for index, message in enumerate(messages)]
        for tool in marked_tools:
            function = tool.get("function")
            holder = tool if not isinstance(function, dict) else dict(function)
            if isinstance(holder.get("name"), str):
                holder["name"] = marked.mark(None, "tools", holder["name"])
            if isinstance(function, dict):
                tool["function"] = holder
        try:
            text = self.conversation(changed, marked_tools)
        except DataError:  # the template requires certain values
            marked.by_value()
            changed, marked_tools = list(messages), [dict(tool) for tool in tools]
            text = self.conversation(changed, marked_tools)
        for index, key in marked.missing(text):
            message = messages[index] if index is not None else {}
            is_optional = key == "reasoning_content" or (key == "content" and "tool_calls" in message)
            if index is None or not is_optional or message["role"] != "assistant":
                return index, key
            if key == "reasoning_content" and _opened(self.prompt(messages[:index], tools)):
                continue  # see `_with_thought`
            if index + 1 == len(messages):
                return index, key
            if (index, key) in marked.missing(self.conversation(changed[: index + 1], marked_tools)):
                return index, key
        return None

    def _end(self, response: str, rest: str, said: int) -> int:
        """Length of the text that the model writes, to its end-of-turn token. `response` is the template's rendering of
        the reply, whose content ends at `said`, and `rest` that of what follows: some templates end a turn by the first
        token of the next."""
        eos, closing = self.tokenizer.eos_token, response[said:]
        if eos and eos in closing:
            return said + closing.rfind(eos) + len(eos)
        if not closing.rstrip().endswith(self.marks):
            for mark in self.marks:
                if rest.startswith(mark):
                    return len(response) + len(mark)
        return max(said, len(response.rstrip()))

    def _end_in_history(
        self, messages: Sequence[Message], index: int, tools: Sequence[Mapping[str, Any]], rendering: str
    ) -> tuple[int, int | None]:
        """Where the last value of a reply ends in `rendering`, and where the reply ends, for a template that
        renders a last reply in another way: it ends only a last reply by the end-of-sequence token, or gives it an
        empty block of reasoning.

        The end is None if no special token is between the reply's last value and the next message's content.
        """
        reply, following = messages[index : index + 2]
        # What another last value does not change follows the value. What another next content does not change is
        # before this content. A sentinel that differs at its end keeps both exact.
        last = next(text for text in SENTINELS if not _last_value(reply).endswith(text[-1]))
        other = self.conversation([*messages[:index], with_last_value(reply, last), *messages[index + 1 :]], tools)
        said = len(rendering) - len(common_end([rendering, other]))
        if following["role"] == "assistant":
            other = self.prompt(messages[: index + 1], tools)
        else:
            first = next(text for text in SENTINELS if not following["content"].strip().startswith(text[0]))
            changed = {**following, "content": first}
            other = self.conversation([*messages[: index + 1], changed, *messages[index + 2 :]], tools)
        closing = _common_begin([rendering, other])[said:]
        eos = self.marks[0]
        if eos in closing:
            return said, said + closing.index(eos) + len(eos)
        ends = [(closing.index(mark), -len(mark)) for mark in self.marks if mark in closing]
        return said, said + min(ends)[0] - min(ends)[1] if ends else None

    def _render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: list[dict[str, Any]] | None
    ) -> str:
        from jinja2 import TemplateError

        render = partial(
            self.tokenizer.apply_chat_template,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._arguments,
            **self._dated(tools),
        )
        has_calls = any(message.get("tool_calls") for message in messages)
        has_images = any(message.get("media") for message in messages)
        try:
            try:
                return str(render([_given(message, parsed=True, parts=has_images) for message in messages]))
            except (TemplateError, ValueError, TypeError):
                if not has_calls:
                    raise
                return str(render([_given(message, parsed=False, parts=has_images) for message in messages]))
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(f"the tokenizer's chat template cannot render the messages: {error}") from error

    def _dated(self, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Arguments with which a template sees the date of `set_date`. The library passes no functions to templates."""
        date = date_of(self.tokenizer)
        if date is None or "strftime_now" not in str(self.tokenizer.chat_template):
            return {}
        template = self.tokenizer.get_chat_template(tools=tools)
        directives = [f"%-{letter}" for letter in "djmHIMS"] + [f"%{letter}" for letter in f"{ascii_letters}%"]
        return {
            "chat_template": _STRFTIME + template,
            "roll_date": {directive: date.strftime(directive) for directive in directives},
        }


_STRFTIME = (
    "{% macro strftime_now(format) %}{% set found = namespace(text=format) %}"
    "{% for directive, value in roll_date.items() %}{% set found.text = found.text | replace(directive, value) %}"
    "{% endfor %}{{ found.text }}{% endmacro %}\n"  # the line break is no text: the library sets trim_blocks
)
SENTINELS = ("a1z", "b2y")
"""Two texts without a common first or last character."""
_REASONING = re.compile(
    "|".join(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)" for begin, end in MARKS.items())
    + r"|<\|channel>thought.*?(?:<channel\|>|\Z)"
    + r"|<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?",
    re.DOTALL,
)
"""Reasoning as chat templates render it. A prompt may end inside of it."""
_THOUGHT_END = re.compile("|".join(map(re.escape, MARKS.values())))
_THOUGHT_OPEN = re.compile(rf"({'|'.join(map(re.escape, MARKS))})\s*\Z")


def _without_reasoning(text: str) -> str:
    """A rendering without reasoning and white space."""
    return "".join(_REASONING.sub("", text).split())


def _opened(prompt: str) -> int:
    """Where a prompt that ends inside of reasoning begins it; 0 for other prompts."""
    opening = _THOUGHT_OPEN.search(prompt)
    return opening.start() if opening else 0


def _with_thought(reply: Mapping[str, Any], before: str, rendering: str) -> str:
    """`rendering` with the reasoning of its last reply, whose prompt `before` may end inside of reasoning.

    Some templates (DeepSeek R1) render no reply as the model writes it after such a prompt: they remove its reasoning.
    Others (Nemotron 3) do so for a reply without reasoning. The model ends an empty reasoning at once.
    """
    opened = _THOUGHT_OPEN.search(before)
    if opened is None or rendering.startswith(before) or not rendering.startswith(before[: opened.start()]):
        return rendering
    end = MARKS[opened[1]]
    thought = reply.get("reasoning_content") or reply["content"].rpartition(end)[0].replace(opened[1], "", 1)
    rendered = _REASONING.sub("", rendering[opened.start() :], count=1).lstrip("\n")
    return f"{before}{thought.strip()}\n{end}\n\n{rendered}"


def _last_value(message: Mapping[str, Any]) -> str:
    """The text that `with_last_value` replaces, without white space around it."""
    calls = message.get("tool_calls")
    return "" if calls else str(message.get("content") or "").strip()


def with_last_value(message: Mapping[str, Any], text: str) -> Message:
    """A reply whose last value, an argument of its last tool call or its content, is `text`."""
    if not (calls := message.get("tool_calls")):
        return {**message, "content": text}
    function = {**calls[-1]["function"], "arguments": {"value": text}}
    return {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}


def common_end(texts: Sequence[str]) -> str:
    """The longest text that all texts end with."""
    return _common_begin([text[::-1] for text in texts])[::-1]


def _common_begin(texts: Sequence[str]) -> str:
    low, high = 0, min(map(len, texts))
    while low < high:  # bisection: texts of a whole conversation are long
        middle = (low + high + 1) // 2
        if all(text.startswith(texts[0][:middle]) for text in texts[1:]):
            low = middle
        else:
            high = middle - 1
    return texts[0][:low]


class _Marked:
    """Replaces the values of messages by marks, and finds those that a rendering lacks."""

    def __init__(self) -> None:
        self._places: list[tuple[str, str, int | None, str]] = []
        """Mark, value, index of the message, and key."""

    def mark(self, index: int | None, key: str, value: str) -> str:
        """A mark for a value; an empty value stays."""
        if not value.strip():
            return value
        mark = f"zq{len(self._places)}v"
        self._places.append((mark, value, index, key))
        return mark

    def message(self, index: int, message: Mapping[str, Any]) -> Message:
        """The message with marks for its values. Ids and the names of tool results link messages and stay."""
        keys = ("content", "reasoning_content", *(() if message["role"] == "tool" else ("name",)))
        marked = {**message, **{key: self.mark(index, key, message[key]) for key in keys if message.get(key)}}
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "name": self.mark(index, "tool_calls", call["function"]["name"]),
                        "arguments": self._scalars(index, _arguments(call["function"], parsed=True)),
                    },
                }
                for call in calls
            ]
        return marked

    def _scalars(self, index: int, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._scalars(index, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._scalars(index, item) for item in value]
        return value if value is None else self.mark(index, "tool_calls", str(value))

    def by_value(self) -> None:
        """Look for the values themselves, without white space and images, instead of the marks."""
        self._places = [
            ("".join(text.split()), value, index, key)
            for _, value, index, key in self._places
            for text in value.split(IMAGE)
        ]

    def missing(self, text: str) -> list[tuple[int | None, str]]:
        """Index and key of each value that the rendering lacks."""
        squeezed = "".join(text.split())
        return [(index, key) for mark, _, index, key in self._places if mark not in squeezed]


def _missing_text(message: Mapping[str, Any], text: str) -> str:
    """Key of a reply's text that a rendering lacks, apart from white space; empty if it has them all."""
    squeezed = "".join(text.split())
    for key in ("reasoning_content", "content"):
        if "".join(str(message.get(key) or "").split()) not in squeezed:
            return key
    return ""


def _said(message: Mapping[str, Any], text: str) -> int:
    """Where the content of a message ends in a rendering that begins with it. Special tokens in the content, before
    this position, do not end the turn. 0 if the rendering does not contain it."""
    content = str(message.get("content") or "").strip()
    position = text.find(content)
    return position + len(content) if content and position >= 0 else 0


def _given(message: Mapping[str, Any], *, parsed: bool, parts: bool) -> dict[str, Any]:
    """A message for a chat template: most expect the arguments of tool calls as objects (`parsed`), a few as text, and
    reasoning under one of two keys. In a conversation with images, contents are lists of `parts`."""
    content = message.get("content") or ""
    if parts:
        media = message.get("media")
        content = _parts(content, media) if media else [{"type": "text", "text": content}] * bool(content)
    copied: dict[str, Any] = {**message, "content": content}
    copied.pop("media", None)
    if "reasoning_content" in copied:
        copied["thinking"] = copied["reasoning_content"]
    if calls := copied.get("tool_calls"):
        copied["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"], parsed=parsed)}}
            for call in calls
        ]
    return copied


def _parts(content: str, media: Sequence[Any]) -> list[dict[str, str]]:
    """A content as parts: its texts, and a part of type image or video at each `IMAGE`."""
    texts = [{"type": "text", "text": text} for text in content.split(IMAGE)]
    kinds = [{"type": str(getattr(item, "kind", "image"))} for item in media]  # not all have been read
    parts = [part for text, kind in zip(texts, [*kinds, {}], strict=True) for part in (text, kind)][:-1]
    return [part for part in parts if part.get("text", " ")]


def _arguments(function: Mapping[str, Any], *, parsed: bool) -> Any:
    """Arguments of a call as an object (`parsed`) or as JSON; unchanged if they are no JSON."""
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str) is not parsed:
        return arguments
    try:
        return json.loads(arguments) if parsed else json.dumps(arguments, ensure_ascii=False)
    except ValueError:
        return arguments


Template: TypeAlias = Turns | JinjaTemplate
"""`prompt(messages)` is the text after which the model generates its response. `segments(messages)` are the segments of
a whole conversation; their joined text before each response equals `prompt` of the messages before it. `unrendered`
finds values that a template leaves out."""
