"""Token-exact conversations: the prompt of the next turn is the recorded tokens of this turn, then the new messages.

    text of the last prompt │ text of the sampled reply │ end of the turn, new messages, begin of the next reply
    ──────── recorded token ids: never encoded again ───│──────────── encoded

The chat template proves that this is its own prompt: its rendering of all messages must begin with its rendering of
the last prompt, continue with the reply, and end with a text that does not depend on the reply. The template may write
the reply in another way than the model, for example with other blanks in the JSON of a tool call. It may not change
earlier messages when later ones follow: if it removes reasoning or moves a system message, `extend` returns None.

The rendering has one placeholder for each image of a turn's messages, in their order. The ids have the image's tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roll_core.data.encode import Encoder, media_of
from roll_core.data.processor import processor_of
from roll_core.data.reasoning import MARKS, opens_reasoning
from roll_core.data.templates import SENTINELS, JinjaTemplate, common_end, with_last_value
from roll_core.errors import DataError
from roll_pipeline_agentic.tool_calls import (
    TOOL_FORMATS,
    parse_tool_calls,
    reasoning_marks,
    settled_parts,
    spans_of_parts,
    tool_format_of,
    without_reasoning,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.processor import Processor
    from roll_core.spec.config import DataArguments
    from roll_core.spec.environment import Message
    from roll_core.types import Media, TokenIds
    from roll_pipeline_agentic.tool_calls import ParsedReply, SettledParts, Span


Thinking = Literal["template", "keep", "strip"]
"""What later prompts contain of the reasoning in earlier replies: what the chat template keeps, all, or nothing."""
QUESTION: tuple[Message, ...] = ({"role": "user", "content": "1"},)
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {"name": "f1z", "description": "f", "parameters": {"type": "object", "properties": {}}},
}
"""A conversation and a tool by which the chat template is tried."""
PLACE = "a1zb2yc3x"
"""A text that stands for a message, to find where the chat template renders it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChat:
    """Messages of a conversation, and the tokens after which the model generates its reply."""

    messages: tuple[Message, ...]
    text: str
    """The chat template's rendering of `messages`. `ids` encode it, but contain each reply as it was sampled, and the
    tokens of each image instead of its placeholder."""
    ids: TokenIds
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def media(self) -> tuple[Media, ...]:
        """Images of `ids`, in their order."""
        return media_of(self.messages)


class UnseenImageError(DataError):
    """The model cannot see the images of messages: it has no processor, or its chat template drops or moves them."""


class ChatEncoder:
    """Encodes conversations with the chat template of `data_args.template`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataArguments,
        *,
        where: str,
        tool_format: str = "auto",
        thinking: Thinking = "template",
    ) -> None:
        """`where` names the conversations in errors. `tool_format` is `auto` or of `tool_calls.TOOL_FORMATS`.

        Raises `DataError` without a chat template, or if it renders no conversation at all.
        """
        self._tokenizer, self._where, self._thinking = tokenizer, where, thinking
        self._encoder = Encoder(tokenizer, data, chats=True)
        self.accepts_tools = isinstance(self._encoder.template, JinjaTemplate)
        """False for a named chat template, which cannot describe tools."""
        source = str(tokenizer.chat_template) if self.accepts_tools else ""
        self.tool_format = tool_format_of(source) if tool_format == "auto" else tool_format
        """How replies write tool calls."""
        self._replies_are_read = self.tool_format != "none" or tool_format == "none"
        self._template = f"chat template of the tokenizer {getattr(tokenizer, 'name_or_path', '')}".rstrip()
        self._renders_calls = "tool_calls" in source
        self._reasoning_keys = [key for key in ("reasoning_content", "thinking") if key in source]
        """Keys of a message under which the template finds its reasoning."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._special = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        """Ids of tokens that mark turns and are no part of a message."""
        self._atoms = tuple(str(token) for token in added.values()) or tuple(tokenizer.all_special_tokens)
        """Tokens at which the tokenizer splits any text before it encodes the parts."""
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of the longest token."""
        self._check_template()

    @cached_property
    def _processor(self) -> Processor | None:
        return processor_of(self._tokenizer)

    def _check_template(self) -> None:
        """Raise `DataError` if the template refuses the beginning of every conversation."""
        refused: DataError | None = None
        for tools in ((), (TOOL,)):
            for messages in (QUESTION, ({"role": "system", "content": "1"}, *QUESTION)):
                try:
                    self._render(messages, tools)
                    return
                except DataError as error:
                    refused = refused or error
        raise DataError(
            f"{self._where}: {refused}. It refuses the first message of every conversation: name a tokenizer with a"
            " chat template for conversations, or set data_args.template to a named one"
        ) from refused

    @property
    def describes_tools(self) -> bool:
        """True if the chat template describes tools to the model, in a format whose calls are parsed."""
        try:
            self.check_tools(QUESTION, (TOOL,))
        except DataError:
            return False
        return self.tool_format != "none"

    def check_tools(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise `DataError` if the template does not show the tools beside the messages, or if no parser reads calls.

        `tool_format: none` is a decision to read calls in another way.
        """
        if not tools:
            return
        remedy = "use a model whose own chat template describes tools, or an environment without tools"
        if not self.accepts_tools:
            raise DataError(
                f"{self._where}: the environment has tools, which a named chat template cannot describe: set"
                " data_args.template to native, with a tokenizer whose own template describes tools"
            )
        try:
            shown, plain = self._render(messages, tools), self._render_without_tools(messages)
        except DataError:
            return  # `encode` reports it
        names = [str(tool.get("function", tool).get("name")) for tool in tools]
        if hidden := [name for name in names if shown.count(name) <= plain.count(name)]:
            raise DataError(
                f"{self._where}: the environment has tools, but the {self._template} does not show the model"
                f" {', '.join(map(repr, hidden[:3]))}: {remedy}"
            )
        if not self._replies_are_read:
            raise DataError(
                f"{self._where}: the environment has tools, but the {self._template} describes tool calls in a format"
                f" that no parser reads: set tool_format if replies have one of"
                f" {', '.join(name for name in TOOL_FORMATS if name != 'none')}, or {remedy}"
            )

    def _render_without_tools(self, messages: Sequence[Message]) -> str:
        try:
            return self._render(messages, ())
        except DataError:  # a template that renders only conversations with tools
            return ""

    def encode(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> EncodedChat:
        """Encode a whole conversation. Raises `DataError`."""
        self._check_sees_images(messages)
        text = self._render(messages, tools)
        self._check_places(text, messages, tools)
        expanded = self._encoder.expand(text, messages, self._where)
        ids = self._encoder.begun(np.asarray(self._encoder.encode(expanded, self._where), dtype=np.int64))
        if len(ids) == 0:
            raise DataError(f"{self._where}: the chat template renders the messages as an empty text")
        return EncodedChat(messages=tuple(messages), text=text, ids=ids, tools=tuple(tools))

    def _check_sees_images(self, messages: Sequence[Message]) -> None:
        """Raise `UnseenImageError` if the messages have images, which the model or the template cannot have."""
        if not media_of(messages):
            return
        if self._processor is None:
            raise UnseenImageError(
                f"{self._where}: a message has an image, but the model has no processor for images: train a model that"
                " reads images, or use an environment of text"
            )
        if not self.accepts_tools:
            raise UnseenImageError(
                f"{self._where}: a message has an image, for which a named chat template has no placeholder: set"
                " data_args.template to native"
            )

    def _check_places(
        self, text: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], first: int = 0
    ) -> None:
        """Raise `UnseenImageError` unless the template renders the images of the messages after the `first` ones, each
        by one placeholder, message by message. `text` is its rendering of all messages.
        """
        numbers = [len(message.get("media", ())) for message in messages]
        if not any(numbers) or self._processor is None:
            return
        placeholder, dropped = self._processor.placeholder, "drops"
        if text.count(placeholder) >= sum(numbers):
            for index in range(first, len(numbers)):
                if numbers[index] in (0, sum(numbers)):
                    continue
                marked = {**messages[index], "content": PLACE, "media": ()}
                shown = self._render((*messages[:index], marked, *messages[index + 1 :]), tools)
                before, mark, after = shown.partition(PLACE)
                rest = text.count(placeholder) - sum(numbers)  # of texts that contain it, which `expand` reports
                places = before.count(placeholder), after.count(placeholder)
                if mark and not rest and places != (sum(numbers[:index]), sum(numbers[index + 1 :])):
                    dropped = "moves"
                    break
            else:
                return
        raise UnseenImageError(
            f"{self._where}: the {self._template} {dropped} images of messages of the roles"
            f" {', '.join(dict.fromkeys(str(message['role']) for message in messages if message.get('media')))}: use a"
            " model whose chat template renders them, or an environment that sends them in another role"
        )

    def least_tokens(self, messages: Sequence[Message]) -> int:
        """A number of tokens that the messages have at least, in a time that does not depend on the template."""
        read = sum(len(str(message.get("content") or "")) for message in messages if message["role"] != "assistant")
        return read // self._longest_token

    def parse(self, ids: TokenIds, chat: EncodedChat | None = None) -> ParsedReply:
        """Content, tool calls and reasoning of a sampled reply, whose prompt is `chat`. Never raises."""
        messages = chat.messages if chat else ()
        num_calls = sum(len(message.get("tool_calls") or ()) for message in messages)
        return parse_tool_calls(
            self.reply_text(ids),
            self.tool_format,
            tools=chat.tools if chat else (),
            reasoning_open=chat is not None and opens_reasoning(chat.text),
            first_id=max(num_calls, sum(message["role"] == "tool" for message in messages)),
        )

    def settled(self, ids: TokenIds, chat: EncodedChat, stop: Sequence[str] = ()) -> SettledParts:
        """The parts of the reply that `ids` begin which no further token changes, up to a `stop` string."""
        return settled_parts(
            self.reply_text(ids), self.tool_format, reasoning_open=opens_reasoning(chat.text), stop=stop
        )

    def spans(self, ids: TokenIds, context_ids: TokenIds) -> list[Span]:
        """Spans of the parts of a sampled reply in `text(ids)`, after the tokens `context_ids` of its prompt.

        Tokens that end the turn belong to the last part.
        """
        opened = opens_reasoning(self.text(context_ids[-32:]))
        *spans, (begin, _, part) = spans_of_parts(self.reply_text(ids), self.tool_format, reasoning_open=opened)
        return [*spans, (begin, len(self.text(ids)), part)]

    def spans_of_messages(self, chat: EncodedChat, number: int) -> list[tuple[int, int]] | None:
        """Spans in `chat.text` of the contents of the last `number` messages, without blanks around them.

        None if the template rewrites a content, for example escapes it, or if a message has images.
        """
        spans = []
        for index in range(len(chat.messages) - number, len(chat.messages)):
            content = str(chat.messages[index]["content"]).strip()
            if not content:
                continue
            around = None if chat.messages[index].get("media") else self._around(chat, index)
            if around is None:
                return None
            before, after = around
            inner = chat.text[len(before) : len(chat.text) - len(after)]
            if chat.text != before + inner + after or inner.strip() != content:
                return None
            begin = len(before) + inner.index(content)
            spans.append((begin, begin + len(content)))
        return spans

    def _around(self, chat: EncodedChat, index: int) -> tuple[str, str] | None:
        """The texts before and after the content of a message in the template's rendering of `chat`."""
        try:
            one, other = (
                self._render(
                    (
                        *chat.messages[:index],
                        {**chat.messages[index], "content": sentinel},
                        *chat.messages[index + 1 :],
                    ),
                    chat.tools,
                )
                for sentinel in SENTINELS
            )
        except DataError:
            return None
        after = common_end([one, other])
        before = one.removesuffix(SENTINELS[0] + after)
        return (before, after) if [before + sentinel + after for sentinel in SENTINELS] == [one, other] else None

    def reply_text(self, ids: TokenIds) -> str:
        """The text of a sampled reply, without the tokens that end the turn."""
        return self.text(self._unended(ids))

    def reply(self, ids: TokenIds, chat: EncodedChat | None = None) -> Message:
        """The message of a sampled reply, for `encode`: what the chat template renders by keys, and else its text.

        Has the keys `tool_calls` and `reasoning_content` of OpenAI's API if the reply and the template have them. Give
        its prompt `chat` to number tool calls over the conversation.
        """
        parsed, text = self.parse(ids, chat), self.reply_text(ids)
        if not parsed.tool_calls and not parsed.reasoning and self.tool_format != "harmony":
            return {"role": "assistant", "content": text}
        is_open = chat is not None and opens_reasoning(chat.text)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if self.tool_format != "harmony" and not (parsed.tool_calls and self._renders_calls):
            message["content"] = without_reasoning(text, reasoning_open=is_open)
        if parsed.tool_calls:
            message["tool_calls"] = parsed.tool_calls
        if self._thinking == "strip" or not parsed.reasoning:
            return message
        if self._reasoning_keys:
            return message | {"reasoning_content": parsed.reasoning}
        begin, end = reasoning_marks(text)
        return message | {"content": f"{begin}\n{parsed.reasoning}\n{end}\n\n{message['content']}"}

    def extend(self, chat: EncodedChat, reply_ids: TokenIds, messages: Sequence[Message]) -> EncodedChat | None:
        """Append a sampled reply and the messages that follow it. The ids begin with `chat.ids` and `reply_ids`.

        None if the template does not prove that this is its prompt, or if the new tokens could depend on the reply's
        last token. Then encode the messages: the replies in them are no longer the tokens that the model sampled.

        With `thinking: keep`, the proof ignores reasoning and white space: the template would remove the reasoning.
        """
        for reply in self._variants(chat, reply_ids):
            history = (*chat.messages, reply, *messages)
            try:
                text = self._render(history, chat.tools)
                rest = self._rest(chat, reply, reply_ids, messages, text)
                if rest is None:
                    continue
                self._check_places(text, history, chat.tools, first=len(chat.messages) + 1)
                rest = self._encoder.expand(rest, messages, self._where)
                new = self._encoded_after(reply_ids, rest)
            except DataError:  # the template has no such messages; another variant may be its own
                continue
            if new is None or self.text(new) != rest:  # some tokenizers add a blank or normalise text
                continue
            ids = np.concatenate([chat.ids, reply_ids, new])
            return EncodedChat(messages=history, text=text, ids=ids, tools=chat.tools)
        return None

    def _variants(self, chat: EncodedChat, reply_ids: TokenIds) -> Iterator[Message]:
        """Messages that a template may render as the reply."""
        message = self.reply(reply_ids, chat)
        has_reasoning = bool(self.parse(reply_ids, chat).reasoning)
        if self._thinking == "template" or not has_reasoning:
            yield {"role": "assistant", "content": self.reply_text(reply_ids)}
        if self._thinking != "keep" or not has_reasoning:
            yield message
            return
        without = {key: value for key, value in message.items() if key != "reasoning_content"}
        yield without | {"content": without_reasoning(str(without["content"]))}

    def _rest(
        self, chat: EncodedChat, reply: Message, reply_ids: TokenIds, messages: Sequence[Message], text: str
    ) -> str | None:
        """The text after the sampled reply, whose message is `reply`, in the rendering `text` of the whole history."""
        sampled, ended = self.text(reply_ids), int(reply_ids[-1]) in self._special
        if text.startswith(chat.text + sampled):
            rest = text[len(chat.text) + len(sampled) :]
            return rest if ended or rest.startswith(self._atoms) else None
        # The template writes the reply in another way. What follows the reply is what no reply changes.
        renderings = [text]
        for sentinel in SENTINELS:
            message = with_last_value(reply, sentinel)
            renderings.append(self._render((*chat.messages, message, *messages), chat.tools))
        after = common_end(renderings)
        if ended:
            end = self.text(reply_ids[-1:])
            _, separator, rest = after.partition(end)
            if not separator:
                return None  # the model ended its turn by another token than the template
            after = end + rest
        elif not after.startswith(self._atoms):
            return None
        else:
            rest = after
        return rest if self._is_reply(text.removesuffix(after), chat, reply_ids) else None

    def _encoded_after(self, reply_ids: TokenIds, rest: str) -> TokenIds | None:
        """Tokens of the text after a sampled reply, in its context: some tokenizers add a blank to every beginning.

        None if the tokenizer merges the text with the end of the reply.
        """
        end = self.text(reply_ids[-1:]) if int(reply_ids[-1]) in self._special else ""
        ids = np.asarray(self._encoder.encode(end + rest, self._where), dtype=np.int64)
        if not end:
            return ids
        return ids[1:] if ids[0] == reply_ids[-1] else None

    def _is_reply(self, text: str, chat: EncodedChat, reply_ids: TokenIds) -> bool:
        """True if a rendering up to the end of the reply is `chat` and a reply of the same meaning."""
        sampled = self.reply_text(reply_ids)
        if self._thinking == "keep":
            is_open = opens_reasoning(chat.text)
            before = _squeezed(without_reasoning(chat.text))
            return _squeezed(without_reasoning(text)) == before + _squeezed(
                without_reasoning(sampled, reasoning_open=is_open)
            )
        if not text.startswith(chat.text):
            return False
        ours, theirs = (
            parse_tool_calls(reply, self.tool_format, tools=chat.tools, reasoning_open=opens_reasoning(chat.text))
            for reply in (sampled, text[len(chat.text) :])
        )
        return _meaning(ours) == _meaning(theirs)

    def _unended(self, ids: TokenIds) -> TokenIds:
        """A reply without the tokens that end the turn."""
        end = len(ids)
        while end and int(ids[end - 1]) in self._special and self.text(ids[end - 1 : end]) not in KEPT:
            end -= 1
        return ids[:end]

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        plain = [dict(message) for message in messages]
        if not self.accepts_tools:  # it renders calls as part of the contents
            plain = [{key: message[key] for key in ("role", "content", "media") if key in message} for message in plain]
        return self._encoder.template.prompt(plain, tools)

    def text(self, ids: TokenIds) -> str:
        """Text of token ids, with special tokens."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))


KEPT = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>", *MARKS, *MARKS.values())
"""Special tokens of tool calls and reasoning, which do not end turns."""


def _squeezed(text: str) -> str:
    """Text without white space."""
    return "".join(text.split())


def _meaning(parsed: ParsedReply) -> tuple[object, ...]:
    """What two ways to write a reply have in common."""
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parsed.tool_calls]
    return _squeezed(parsed.content), calls, _squeezed(parsed.reasoning)
