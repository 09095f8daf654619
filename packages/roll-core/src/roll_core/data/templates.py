"""Chat templates: from messages to text, turn by turn, so that each turn can be encoded separately.

The tokens of a prompt must not depend on whether the response exists yet. Otherwise a model trains on other prompts
than it sees in generation. A conversation is therefore split into segments that the model reads or writes, and each is
encoded separately. Templates that rewrite earlier turns when later ones follow are not supported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


def load_template(name: str, tokenizer: PreTrainedTokenizerBase, *, chats: bool = False) -> Template:
    """Load the template named by `data_args.template`.

    Raises `DataError` for an unknown name, for a tokenizer without the template's tokens, and for `native` with `chats`
    if the tokenizer has no chat template.
    """
    if name == "native":
        if tokenizer.chat_template:
            return JinjaTemplate(tokenizer)
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
        return "".join(each.text + (self.eos_token or "") if each.ends else each.text for each in read)

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

    def segments(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[Segment]:
        """Alternating segments: text that the model reads, and responses."""
        _refuse_tools(messages, tools)
        turns = list(messages)
        if self.system and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system})
        found: list[Segment] = []
        pending = self.first
        for each in turns:
            pending += self.opening.format(role=each["role"])
            text = each["content"] + self.closing
            if each["role"] == "assistant":
                found.append(Segment(pending, written=False))
                found.append(Segment(text, written=True, ends=self.closing != self.eos_token))
                pending = self.between
            else:
                pending += text + self.between
        if pending != self.between:
            found.append(Segment(pending, written=False))
        return found


def _refuse_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
    if tools or any(message.get("tool_calls") for message in messages):
        raise DataError(
            "a named chat template can neither describe tools nor render tool_calls: set data_args.template to native,"
            " with a tokenizer whose own chat template does, or write tools and calls into the contents"
        )


def texts_of(messages: Sequence[Message], name: str) -> list[str]:
    """Texts that a tokenizer must cover to encode the messages with this template; `native` counts as plain text."""
    template = NAMED.get(name, Turns)(None)
    texts = [segment.text for segment in template.segments([_plain(each) for each in messages])]
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


class JinjaTemplate:
    """Template stored in the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        marks = [tokenizer.eos_token, *tokenizer.all_special_tokens, *(str(each) for each in added if each.special)]
        self.marks = tuple(dict.fromkeys(str(each) for each in marks if each))
        """Special tokens, which mark turns; the end-of-sequence token is the first."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Prompt text with the template's generation prompt. `tools` are schemas in the format of OpenAI's API."""
        return self._render(messages, add_generation_prompt=True, tools=[dict(tool) for tool in tools] or None)

    def conversation(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Text of a whole conversation."""
        return self._render(messages, add_generation_prompt=False, tools=[dict(tool) for tool in tools] or None)

    def segments(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[Segment]:
        """Split where responses begin and end. Raises `DataError` if the template rewrites earlier turns."""
        whole = self.conversation(messages, tools)
        found: list[Segment] = []
        at = 0
        for index, each in enumerate(messages):
            if each["role"] != "assistant":
                continue
            before, after = self.prompt(messages[:index], tools), self.conversation(messages[: index + 1], tools)
            if whole.startswith(before) and after.startswith(before) and whole.startswith(after):
                said = _said(each, after[len(before) :])
                length: int | None = self._end(after[len(before) :], whole[len(after) :], said)
            elif whole.startswith(before):
                said = _said(each, whole[len(before) :])
                length = self._end_in_history(each, whole[len(before) :], said)
            else:
                length = None
            if length is None:
                raise DataError(
                    "the tokenizer's chat template renders a prompt differently if a response follows (message"
                    f" {index + 1}), so the model would be trained on prompts that it never gets in generation: use a"
                    " named template, or train on single turns"
                )
            end = len(before) + length
            response = whole[len(before) : end]
            # In the middle, the template's own token ends a turn: a prompt of the next turn has no other.
            ends = not response[said:].endswith(self.marks if whole[end:].strip() else self.marks[:1])
            found.append(Segment(whole[at : len(before)], written=False))
            found.append(Segment(response, written=True, ends=ends))
            at = end
        if whole[at:].strip():
            found.append(Segment(whole[at:], written=False))
        return found

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

    def _end_in_history(self, message: Message, text: str, said: int) -> int | None:
        """Like `_end`, for a template that renders a last reply in another way than an earlier one, for example with an
        empty block of reasoning. None if the reply's content or reasoning is not in `text`, or its end is unknown."""
        eos = str(self.tokenizer.eos_token)
        length = text.find(eos, said) + len(eos) if eos in text[said:] else 0
        parts = (message.get("content") or "", message.get("reasoning_content") or "")
        return length if length and all(part.strip() in text[:length] for part in parts) else None

    def _render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: list[dict[str, Any]] | None
    ) -> str:
        from jinja2 import TemplateError

        render = partial(
            self.tokenizer.apply_chat_template,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        has_calls = any(message.get("tool_calls") for message in messages)
        try:
            try:
                return str(render([_given(message, parsed=True) for message in messages]))
            except (TemplateError, ValueError, TypeError):
                if not has_calls:
                    raise
                return str(render([_given(message, parsed=False) for message in messages]))
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(f"the tokenizer's chat template cannot render the messages: {error}") from error


def _said(message: Mapping[str, Any], text: str) -> int:
    """Where the content of a message ends in a rendering that begins with it. Special tokens in the content, before
    this position, do not end the turn. 0 if the rendering does not contain it."""
    content = str(message.get("content") or "").strip()
    at = text.find(content)
    return at + len(content) if content and at >= 0 else 0


def _given(message: Mapping[str, Any], *, parsed: bool) -> dict[str, Any]:
    """A message for a chat template: most expect the arguments of tool calls as objects (`parsed`), a few as text, and
    reasoning under one of two keys."""
    given = {**message, "content": message.get("content") or ""}
    if "reasoning_content" in given:
        given["thinking"] = given["reasoning_content"]
    if calls := given.get("tool_calls"):
        given["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"], parsed=parsed)}}
            for call in calls
        ]
    return given


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
a whole conversation; their joined text before each response equals `prompt` of the messages before it."""
