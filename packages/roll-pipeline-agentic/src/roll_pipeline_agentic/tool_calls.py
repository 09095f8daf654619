"""Parses a reply of a model: its content, its tool calls and its reasoning, in the formats that chat templates use.

    text of a reply ── reasoning block ──► reasoning
                    ── tool calls ───────► tool_calls   in the shape of OpenAI's API
                    ── the rest ─────────► content      with the text of each malformed call

Nothing in a reply raises. Give the text with its special tokens, which some formats are made of, but without the tokens
that end the turn.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from roll_core.data.reasoning import MARKS
from roll_pipeline_agentic.tool_values import ToolSchemas, no_constant, parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ToolFormat = Literal["none", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek", "glm45", "harmony"]
"""How a model writes tool calls. The names are those of vLLM's parsers where it has one.

* `hermes`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as Qwen 2.5 and Qwen 3.
* `qwen3_coder`: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, as Qwen 3.5.
* `llama3_json`: the whole reply is `{"name": …, "parameters": {…}}`, several separated by `;`.
* `mistral`: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]NAME[ARGS]{…}` of newer models.
* `deepseek`: calls between special tokens, as DeepSeek V3, R1 and V3.1.
* `glm45`: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`.
* `harmony`: messages with channels, as gpt-oss.
"""
TOOL_FORMATS: tuple[str, ...] = get_args(ToolFormat)
ReplyPart = Literal["reasoning", "tool_calls", "content"]
Span: TypeAlias = "tuple[int, int, ReplyPart]"
"""Begin and end in characters, and the part of a reply there."""

ToolCall: TypeAlias = dict[str, Any]
"""`{"id": …, "type": "function", "function": {"name": …, "arguments": JSON text}}`."""


class ParsedReply(NamedTuple):
    """Parts of a reply."""

    content: str
    """Text outside of reasoning and of well-formed tool calls."""
    tool_calls: list[ToolCall]
    """In the order of the text."""
    reasoning: str
    """Text of the reasoning block; empty for none."""
    error: str | None = None
    """Why the first malformed tool call, or a reasoning block without an end, is malformed."""


def parse_tool_calls(
    text: str,
    format: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    reasoning_open: bool = False,
    first_id: int = 0,
) -> ParsedReply:
    """Parse a reply. Never raises for any `text`; raises `ValueError` for an unknown `format`.

    A malformed call stays in the content, with its reason in `error`; calls beside it are parsed.

    Args:
        tools: schemas in the format of OpenAI's API. `qwen3_coder` and `glm45` write strings without quotes: values
            are read by the schema, see `tool_values`. `harmony` needs them to read a call without `functions.`.
        reasoning_open: True if the prompt already wrote `<think>`, or another mark of `roll_core.data.reasoning`.
        first_id: number of the first call, which becomes part of its id: count the conversation's earlier calls.
    """
    if format not in TOOL_FORMATS:
        raise ValueError(f"unknown tool_format {format!r}, expected {', '.join(TOOL_FORMATS)}")
    parsed = _find(text, format, ToolSchemas(tools), reasoning_open=reasoning_open)
    calls = [
        {
            # Nine letters and digits, which Mistral's templates demand.
            "id": f"call{first_id + number:05d}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(parsed.calls)
    ]
    return ParsedReply(parsed.content, calls, parsed.reasoning, parsed.error)


def spans_of_parts(text: str, format: str, *, reasoning_open: bool = False) -> list[Span]:
    """Spans of the parts that `parse_tool_calls` finds, in their order: together the whole text.

    A part includes its marks, and white space that alone separates it from the part before. A malformed tool call is
    content, except in a block of `deepseek` with a well-formed one. Schemas of tools are unknown here: a value of a
    wrong type does not make a call malformed, and in `harmony` every recipient is a tool.
    """
    spans: list[Span] = []
    position = 0
    for begin, end, part in _find(text, format, None, reasoning_open=reasoning_open).spans:
        if text[position:begin].strip():
            spans.append((position, begin, "content"))
            position = begin
        spans.append((position, end, part))
        position = end
    if text[position:].strip() or not spans:
        return [*spans, (position, len(text), "content")]
    begin, _, part = spans[-1]
    return [*spans[:-1], (begin, len(text), part)]


class SettledParts(NamedTuple):
    """Parts of a reply that is still generated."""

    reasoning: str
    content: str

    def extends(self, other: SettledParts) -> bool:
        """True if both parts begin with those of `other`."""
        return self.reasoning.startswith(other.reasoning) and self.content.startswith(other.content)


def settled_parts(text: str, format: str, *, reasoning_open: bool = False, stop: Sequence[str] = ()) -> SettledParts:
    """The beginnings of reasoning and content that `parse_tool_calls` returns for `text` and everything that begins so.

    They end before a tool call, and before characters that may belong to a mark, to a string of `stop` or to a
    character of several tokens. A mark that ends reasoning, such as `</think>`, is not expected without one that
    begins it.
    """
    text = text.rstrip("\ufffd")
    if format == "harmony":
        reasoning, content = _settled_harmony(text)
    else:
        if any(mark.startswith(text.lstrip()) for mark in MARKS):
            return SettledParts("", "")
        begin, end = reasoning_marks(text)
        if end not in text:
            text = _before(text, (end,) if text.lstrip().startswith(begin) else tuple(MARKS.values()))
        content, reasoning, _ = _split_reasoning(text, open=reasoning_open)
        marks = _CALL_MARKS[format]
        first = content.lstrip()
        starts_call = format == "llama3_json" and any(
            first.startswith(mark) or mark.startswith(first) for mark in marks
        )
        # The parser strips line breaks around the content if there are tool calls.
        is_open = starts_call or (content.startswith("\n") and bool(marks))
        content = "" if is_open else _before(content, () if format == "llama3_json" else marks)
    return SettledParts(reasoning, _before(content.rstrip("\n") if format != "none" else content, stop))


def tool_format_of(chat_template: str | None) -> ToolFormat:
    """The format that a chat template describes to the model; `none` if it knows no tool calls."""
    text = chat_template or ""
    return next((name for name, marks in _MARKS if all(mark in text for mark in marks)), "none")


def without_reasoning(text: str, *, reasoning_open: bool = False) -> str:
    """Remove all reasoning from a rendered conversation or a reply, and the white space around it.

    `reasoning_open` is that of `parse_tool_calls`. A block without an end reaches to the end of the text.
    """
    return _REASONING.sub("", f"{reasoning_marks(text)[0]}{text}" if reasoning_open else text)


def reasoning_marks(text: str) -> tuple[str, str]:
    """Marks that begin and end the reasoning block of a reply; those of `<think>` if it has none."""
    head = text.lstrip()
    begin = next((mark for mark in MARKS if head.startswith(mark)), None)
    if begin is None:
        end = _END.search(text)
        begin = _BEGIN_OF[end[0]] if end else "<think>"
    return begin, MARKS[begin]


class _Found(NamedTuple):
    content: str
    calls: list[tuple[str, str]]
    """Names and arguments as JSON text."""
    error: str | None = None
    reasoning: str = ""
    spans: Sequence[Span] = ()
    """Positions of reasoning and well-formed calls."""


class _Malformed(Exception):
    """Why a call cannot be parsed."""


_BEGIN_OF = {end: begin for begin, end in MARKS.items()}
_END = re.compile("|".join(map(re.escape, _BEGIN_OF)))
_BLOCK = "|".join(rf"{re.escape(begin)}.*?(?:{re.escape(end)}\s*|\Z)" for begin, end in MARKS.items())
_REASONING = re.compile(
    # A run of blanks is searched once, from its beginning.
    rf"(?:(?<!\s)\s+)?(?:{_BLOCK})"
    # of gpt-oss: a message before the one that is the reply
    r"|<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>(?:<\|start\|>assistant)?|\Z)",
    re.DOTALL,
)
_MARKS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|start|>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("deepseek", ("<｜tool▁call▁begin｜>",)),
    ("llama3_json", ("<|start_header_id|>", "parameters")),
)


def _find(text: str, format: str, tools: ToolSchemas | None, *, reasoning_open: bool) -> _Found:
    if format == "harmony":
        return _harmony(text, tools)
    rest, reasoning, error = _split_reasoning(text, open=reasoning_open)
    parsed = _PARSERS[format](rest, tools)
    if any(mark in parsed.content for mark in _STRAY_MARKS.get(format, ())):
        error = error or f"a tool call has no {_CALL_MARKS[format][0]}"
    offset = len(text) - len(rest)
    spans: list[Span] = [(0, offset, "reasoning")] if offset else []
    spans += [(offset + begin, offset + end, part) for begin, end, part in parsed.spans]
    return _Found(parsed.content, parsed.calls, parsed.error or error, reasoning, spans)


def _split_reasoning(text: str, *, open: bool) -> tuple[str, str, str | None]:
    """The text after the reasoning block, the reasoning, and why the block is malformed."""
    begin, end = reasoning_marks(text)
    head = text.lstrip()
    if head.startswith(begin):
        head = head[len(begin) :]
    elif not open and end not in text.partition(begin)[0]:
        return text, "", None
    else:
        head = text
    reasoning, separator, rest = head.partition(end)
    return rest.lstrip("\n"), reasoning.strip("\n"), None if separator else f"the reasoning block has no {end}"


def _before(text: str, marks: Sequence[str]) -> str:
    """The text before the first mark and before characters at its end with which a mark begins."""
    for mark in marks:
        text = text.partition(mark)[0]
    longest = max(map(len, marks), default=1) - 1
    for number in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-number:]) for mark in marks):
            return text[:-number]
    return text


def _settled_harmony(text: str) -> tuple[str, str]:
    """Reasoning and content of the messages of gpt-oss up to a tool call, or up to reasoning after content."""
    reasoning: list[str] = []
    content = ""
    *messages, last = text.removeprefix("<|start|>assistant").split("<|start|>assistant")
    for message in [*messages, last]:
        header, separator, body = message.partition("<|message|>")
        channel = re.search(r"<\|channel\|>(\w+)", header)
        if not separator or channel is None or " to=" in header or (content and channel[1] == "analysis"):
            break
        body = _before(body, ("<|end|>", "<|call|>", "<|return|>", "<|start|>assistant"))
        if channel[1] == "analysis":
            reasoning.append(body)
        else:
            content += body
    return "\n".join(reasoning), content


# -- formats -----------------------------------------------------------------------------------------------------------


def _none(text: str, tools: ToolSchemas | None) -> _Found:
    return _Found(text, [])


def _tagged(begin: str, end: str, parse: Callable[[str, ToolSchemas | None], tuple[str, str]]) -> Any:
    """Parser of calls that each stand between two tags."""
    pattern = re.compile(f"{re.escape(begin)}(.*?)(?:{re.escape(end)}|\\Z)", re.DOTALL)

    def parser(text: str, tools: ToolSchemas | None) -> _Found:
        calls: list[tuple[str, str]] = []
        spans: list[Span] = []
        error: str | None = None
        content, position = "", 0
        for match in pattern.finditer(text):
            before = text[position : match.start()]
            position = match.end()
            try:
                if not match[0].endswith(end):
                    raise _Malformed(f"a tool call has no {end}")
                calls.append(parse(match[1], tools))
                spans.append((*match.span(), "tool_calls"))
                content += before.rstrip("\n")  # separates the call
            except _Malformed as reason:
                error = error or str(reason)
                content += before + match[0]
        content += text[position:]
        return _Found(content.strip("\n") if calls else content, calls, error, spans=spans)

    return parser


def _hermes_call(body: str, tools: ToolSchemas | None) -> tuple[str, str]:
    return _call_of(_loads(body.strip()))


def _qwen3_coder_call(body: str, tools: ToolSchemas | None) -> tuple[str, str]:
    match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", body, re.DOTALL)
    if match is None:
        raise _Malformed("a tool call has no <function=NAME> … </function>")
    name, rest = match[1].strip(), match[2]
    pairs = _pairs(rest, r"\s*<parameter=([^>\n]+)>(.*)", "</parameter>")
    if pairs is None:
        raise _Malformed(f"the call of {name!r} has text outside of <parameter=KEY> … </parameter>")
    # The template writes each value on lines of its own.
    pairs = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs]
    return name, _typed(name, pairs, "<parameter=", tools)


def _pairs(text: str, pattern: str, end: str) -> list[tuple[str, str]] | None:
    """Keys and values that match `pattern` before each `end`. None if there is other text.

    Time is linear in the text: a model in a loop writes thousands of tags.
    """
    *pieces, rest = text.split(end)
    matches = [match for piece in pieces if (match := re.fullmatch(pattern, piece, re.DOTALL))]
    return None if rest.strip() or len(matches) < len(pieces) else [(match[1].strip(), match[2]) for match in matches]


def _typed(tool: str, pairs: Sequence[tuple[str, str]], begin: str, tools: ToolSchemas | None) -> str:
    """Arguments from keys and texts, as JSON text. `begin` is the tag that begins each pair."""
    arguments: dict[str, Any] = {}
    for key, text in pairs:
        if begin in text:
            raise _Malformed(f"the parameter {key!r} in the call of {tool!r} has no end before the next")
        if key in arguments:
            raise _Malformed(f"the call of {tool!r} has the parameter {key!r} twice")
        try:
            arguments[key] = (tools or ToolSchemas(())).value(tool, key, text)
        except ValueError as error:
            raise _Malformed(str(error)) from None
    return _arguments(arguments)


def _glm45_call(body: str, tools: ToolSchemas | None) -> tuple[str, str]:
    name, tag, rest = body.partition("<arg_key>")
    name = name.strip()
    if not name:
        raise _Malformed("a tool call has no name")
    pairs = _pairs(tag + rest, r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", "</arg_value>")
    if pairs is None or "<" in name:
        raise _Malformed(f"the call of {name!r} has text outside of <arg_key> and <arg_value>")
    return name, _typed(name, pairs, "<arg_key>", tools)


def _deepseek_call(body: str, tools: ToolSchemas | None) -> tuple[str, str]:
    before, separator, after = body.partition("<｜tool▁sep｜>")
    fenced = re.fullmatch(r"([^\n]*)\n```json\n(.*)\n```\s*", after, re.DOTALL)
    if not separator:
        raise _Malformed("a tool call has no <｜tool▁sep｜>")
    name, arguments = (fenced[1], fenced[2]) if fenced and before.strip() == "function" else (before, after)
    return _call_of({"name": name.strip(), "arguments": _loads(arguments)})


_deepseek_calls = _tagged("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_call)


def _deepseek(text: str, tools: ToolSchemas | None) -> _Found:
    content, begin, rest = text.partition("<｜tool▁calls▁begin｜>")
    if not begin:
        return _Found(text, [])
    parsed: _Found = _deepseek_calls(rest.replace("<｜tool▁calls▁end｜>", ""), tools)
    if not parsed.calls:
        return _Found(text, [], parsed.error or "a block of tool calls has no call")
    end = text.rfind("<｜tool▁calls▁end｜>")
    end = len(text) if end < 0 else end + len("<｜tool▁calls▁end｜>")
    return _Found(content + parsed.content, parsed.calls, parsed.error, spans=[(len(content), end, "tool_calls")])


def _llama3_json(text: str, tools: ToolSchemas | None) -> _Found:
    body = text.strip().removeprefix("<|python_tag|>").lstrip()
    marked = "<|python_tag|>" in text
    if not body.startswith("{"):
        return _Found(text, [], "text after <|python_tag|> is not JSON" if marked else None)
    calls: list[tuple[str, str]] = []
    try:
        for value in _values(body):
            if not marked and isinstance(value, dict) and "name" not in value:
                return _Found(text, [])  # a reply in JSON that is no call
            calls.append(_call_of(value, required=True))
    except _Malformed as reason:
        return _Found(text, [], str(reason) if marked or '"name"' in body else None)
    return _Found("", calls, spans=[(0, len(text), "tool_calls")])


def _mistral(text: str, tools: ToolSchemas | None) -> _Found:
    content, mark, rest = text.partition("[TOOL_CALLS]")
    if not mark:
        return _Found(text, [])
    calls: list[tuple[str, str]] = []
    try:
        if rest.lstrip().startswith("["):
            values = _loads(rest.strip())
            calls = [_call_of(value) for value in values]
        else:
            for call in rest.split("[TOOL_CALLS]"):
                name, separator, arguments = call.partition("[ARGS]")
                if not separator:
                    name, brace, arguments = call.partition("{")
                    arguments = brace + arguments
                name = re.sub(r"\[CALL_ID\].*", "", name, flags=re.DOTALL)
                calls.append(_call_of({"name": name.strip(), "arguments": _loads(arguments.strip())}))
    except _Malformed as reason:
        return _Found(text, [], str(reason))
    if not calls:
        return _Found(content, [], "[TOOL_CALLS] has no call")
    return _Found(content, calls, spans=[(len(content), len(text), "tool_calls")])


def _harmony(text: str, tools: ToolSchemas | None) -> _Found:
    """Messages of gpt-oss: `header<|message|>body`, each ended by `<|end|>`, `<|call|>` or `<|return|>`."""
    calls: list[tuple[str, str]] = []
    spans: list[Span] = []
    content, reasoning, error = [], [], None
    begin = len(text) - len(text.removeprefix("<|start|>assistant"))
    for match in re.finditer(r"(?:<\|(?:end|call|return)\|>)?<\|start\|>assistant|\Z", text):
        if match.start() < begin:
            continue
        message, start, begin = text[begin : match.start()], begin, match.end()
        header, separator, body = message.partition("<|message|>")
        body = re.sub(r"<\|(?:end|call|return)\|>\Z", "", body)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        channel = re.search(r"<\|channel\|>(\w+)", header)
        if not separator:
            content.append(message)
            error = error or ("a message has no <|message|>" if "<|" in message else None)
        elif recipient:
            try:
                name = recipient[1].removeprefix("functions.")
                if name == recipient[1] and tools is not None and name not in tools:
                    raise _Malformed(f"the recipient {name!r} is no tool, expected functions.NAME")
                calls.append(_call_of({"name": name, "arguments": _loads(body)}))
                spans.append((start, begin, "tool_calls"))
            except _Malformed as reason:
                error = error or str(reason)
                content.append(message)
        elif channel and channel[1] == "analysis":
            reasoning.append(body)
            spans.append((start, begin, "reasoning"))
        else:
            content.append(body)
    return _Found("".join(content), calls, error, "\n".join(reasoning), spans)


_PARSERS: dict[str, Callable[[str, ToolSchemas | None], _Found]] = {
    "none": _none,
    "hermes": _tagged("<tool_call>", "</tool_call>", _hermes_call),
    "qwen3_coder": _tagged("<tool_call>", "</tool_call>", _qwen3_coder_call),
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "glm45": _tagged("<tool_call>", "</tool_call>", _glm45_call),
}


_CALL_MARKS: dict[str, tuple[str, ...]] = {
    "none": (),
    "hermes": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>",),
    "llama3_json": ("{", "<|python_tag|>"),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>",),
    "glm45": ("<tool_call>",),
}
"""Where tool calls begin. Of `llama3_json` only at the beginning of a reply."""
_STRAY_MARKS: dict[str, tuple[str, ...]] = {
    "hermes": ("</tool_call>",),
    "qwen3_coder": ("<function=", "</tool_call>"),
    "mistral": ("[ARGS]",),
    "deepseek": ("<｜tool▁call▁begin｜>",),
    "glm45": ("<arg_key>", "</tool_call>"),
}
"""Marks of a tool call that never began, where they are part of the content."""


# -- values ------------------------------------------------------------------------------------------------------------


def _call_of(value: Any, *, required: bool = False) -> tuple[str, str]:
    """Name and arguments of an object with a `name` and `arguments` or `parameters`, an object or its JSON text.

    A call that is only a name has no arguments, unless they are `required`.
    """
    if not isinstance(value, dict):
        raise _Malformed("a tool call is not an object")
    name = value.get("name")
    if not isinstance(name, str) or not name or not _is_utf8(name):
        raise _Malformed("a tool call has no name")
    keys = [key for key in ("arguments", "parameters") if key in value]
    unknown = sorted(value.keys() - {"name", "arguments", "parameters", "id", "type"})
    if not keys and (required or unknown):
        raise _Malformed(f"the call of {name!r} has no arguments{f', but {unknown[0]!r:.80}' if unknown else ''}")
    if len(keys) > 1 and value["arguments"] != value["parameters"]:
        raise _Malformed(f"the call of {name!r} has arguments and parameters, which differ")
    arguments = value[keys[0]] if keys else {}
    if isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(arguments, dict):
        raise _Malformed(f"the arguments of {name!r} are not an object")
    return name, _arguments(arguments)


def _arguments(values: dict[str, Any]) -> str:
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
        return text if _is_utf8(text) else json.dumps(values, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"arguments are not JSON: {error}") from error


def _loads(text: str) -> Any:
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"a tool call is not JSON: {error}") from error


def _values(text: str) -> Iterator[Any]:
    """JSON values, separated by white space or `;`."""
    decoder = json.JSONDecoder(parse_constant=no_constant)
    position = 0
    while position < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _Malformed(f"a tool call is not JSON: {error}") from error
        yield value
        while position < len(text) and text[position] in " \t\r\n;":
            position += 1


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
