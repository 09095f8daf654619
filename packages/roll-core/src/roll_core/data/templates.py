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
    from collections.abc import Callable, Sequence

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
        return Plain(tokenizer.eos_token)
    return _named(name, tokenizer)


def chat_template_of(name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Jinja text of a named template for `tokenizer.chat_template`; both give the same tokens. Raises `DataError`."""
    return _named(name, tokenizer).jinja()


def _named(name: str, tokenizer: PreTrainedTokenizerBase) -> Plain | Turns:
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
class Plain:
    """Template that only joins the contents; each response ends with the end-of-sequence token."""

    eos_token: str | None = None

    def prompt(self, messages: Sequence[Message]) -> str:
        """Join all contents."""
        return _joined(self.segments(messages), self.eos_token)

    def jinja(self) -> str:
        """Equivalent Jinja template for `tokenizer.chat_template`."""
        return (
            "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
            "{% endfor %}"
        )

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """Alternating segments: text that the model reads, and responses."""
        found: list[Segment] = []
        pending = ""
        for each in messages:
            if each["role"] == "assistant":
                found += [Segment(pending, written=False)] if pending else []
                found.append(Segment(each["content"], written=True, ends=True))
                pending = ""
            else:
                pending += each["content"]
        return [*found, Segment(pending, written=False)] if pending else found


@dataclass(frozen=True, slots=True)
class Turns:
    """Template of turns: `opening`, content and `closing` for each message, then `between`."""

    eos_token: str | None
    opening: str
    """Text before a message's content; contains `{role}`."""
    closing: str
    between: str = ""
    first: str = ""
    """Text before the first turn."""
    system: str = ""
    """Default system message for conversations without one; empty for none."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """All turns, followed by the opening of the assistant's turn."""
        empty: Message = {"role": "assistant", "content": ""}
        *read, _ = self.segments([*messages, empty])
        return _joined(read, self.eos_token)

    def jinja(self) -> str:
        """Equivalent Jinja template for `tokenizer.chat_template`."""
        before, after = (json.dumps(part) for part in self.opening.split("{role}"))
        closing, between = json.dumps(self.closing), json.dumps(self.between)
        eos = "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}" if self.closing != self.eos_token else ""
        system = (
            f"{{% if messages[0]['role'] != 'system' %}}"
            f"{{{{ {before} ~ 'system' ~ {after} ~ {json.dumps(self.system)} ~ {closing} ~ {between} }}}}{{% endif %}}"
        )
        return (
            f"{{{{ {json.dumps(self.first)} }}}}{system if self.system else ''}"
            f"{{% for m in messages %}}{{{{ {before} ~ m['role'] ~ {after} ~ m['content'] ~ {closing} }}}}{eos}"
            f"{{{{ {between} }}}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{{{{ {before} ~ 'assistant' ~ {after} }}}}{{% endif %}}"
        )

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """Alternating segments: text that the model reads, and responses."""
        found: list[Segment] = []
        pending = ""
        for segment in self._read(messages):
            if segment.written:
                found.append(Segment(pending + self.opening.format(role="assistant"), written=False))
                found.append(Segment(segment.text, written=True, ends=self.closing != self.eos_token))
                pending = self.between
            else:
                pending += segment.text
        if pending.strip():
            found.append(Segment(pending, written=False))
        return found

    def _read(self, messages: Sequence[Message]) -> list[Segment]:
        turns = list(messages)
        if self.system and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self.system})
        found = [Segment(self.first, written=False)] if self.first else []
        for each in turns:
            if each["role"] == "assistant":
                found.append(Segment(each["content"] + self.closing, written=True))
            else:
                text = self.opening.format(role=each["role"]) + each["content"] + self.closing + self.between
                found.append(Segment(text, written=False))
        return found


def texts_of(messages: Sequence[Message], name: str) -> list[str]:
    """Texts that a tokenizer must cover to encode the messages with this template; `native` counts as plain text."""
    template = NAMED.get(name, Plain)(None)
    texts = [segment.text for segment in template.segments(messages)]
    for token in control_tokens(name):
        texts = [text.replace(token, "") for text in texts]
    return texts


_CHATML = partial(Turns, opening="<|im_start|>{role}\n", closing="<|im_end|>", between="\n")
NAMED: dict[str, Callable[[str | None], Plain | Turns]] = {
    "plain": Plain,
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

    def prompt(self, messages: Sequence[Message]) -> str:
        """Prompt text, including the template's generation prompt."""
        return self._render(messages, add_generation_prompt=True)

    def conversation(self, messages: Sequence[Message]) -> str:
        """Text of a whole conversation."""
        return self._render(messages, add_generation_prompt=False)

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """Split where responses begin and end. Raises `DataError` if the template rewrites earlier turns."""
        whole = self.conversation(messages)
        found: list[Segment] = []
        at = 0
        for index, each in enumerate(messages):
            if each["role"] != "assistant":
                continue
            before = self._render(messages[:index], add_generation_prompt=True)
            after = self._render(messages[: index + 1], add_generation_prompt=False)
            if not (whole.startswith(before) and after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    "the tokenizer's chat template renders a prompt differently if a response follows (message"
                    f" {index + 1}), so the model would be trained on prompts that it never gets in generation: use a"
                    " named template, or train on single turns"
                )
            response = after[len(before) :]
            eos = self.tokenizer.eos_token
            cut = response.rfind(eos) + len(eos) if eos and eos in response else len(response.rstrip())
            found.append(Segment(whole[at : len(before)], written=False))
            found.append(Segment(response[:cut], written=True, ends=not (eos and response[:cut].endswith(eos))))
            at = len(before) + cut
        if whole[at:].strip():
            found.append(Segment(whole[at:], written=False))
        return found

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: Any = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(f"the tokenizer's chat template cannot render the messages: {error}") from error
        return str(text)


def _joined(segments: Sequence[Segment], eos_token: str | None) -> str:
    return "".join(each.text + (eos_token or "") if each.ends else each.text for each in segments)


Template: TypeAlias = Plain | Turns | JinjaTemplate
"""`prompt(messages)` is the text after which the model generates its response. `segments(messages)` are the segments of
a whole conversation; their joined text before each response equals `prompt` of the messages before it."""
