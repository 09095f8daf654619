"""Chat templates: from messages to text, turn by turn, so that each turn can be encoded by itself.

The tokens of a prompt must be the same whether the answer is still to be drawn or already known; otherwise a model is
trained on other prompts than it will see. So a conversation is cut into segments, what the model reads and what it
writes, and each is encoded alone. A template that rewrites earlier turns when later ones come is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.data.datasets import Message


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a conversation."""

    text: str
    written: bool
    """By the model: it is learnt. Otherwise the model reads it."""
    ends: bool = False
    """The end-of-sequence token follows, as the model must write it to end its turn."""


class Template(Protocol):
    """How messages become text."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text after which the model answers."""
        ...

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """A whole conversation: its concatenated texts begin with `prompt` of the messages before each answer."""
        ...


def load_template(name: str, tokenizer: PreTrainedTokenizerBase, *, chats: bool = False) -> Template:
    """A template by its name in `data_args.template`.

    Raises `DataError` if the tokenizer lacks the template's tokens, or if `native` has to render `chats` and the
    tokenizer has no chat template.
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
    """A named template as the text of `tokenizer.chat_template`; both give the same tokens. Raises `DataError`."""
    return _named(name, tokenizer).jinja()


def _named(name: str, tokenizer: PreTrainedTokenizerBase) -> Plain | Turns:
    if name not in NAMED:
        raise DataError(f"unknown chat template {name!r}; there are native, {', '.join(NAMED)}")
    vocabulary = tokenizer.get_vocab()
    lacking = [token for token in control_tokens(name) if token not in vocabulary]
    if lacking:
        raise DataError(f"chat template {name!r} needs {', '.join(lacking)} as tokens, which the tokenizer has not")
    return NAMED[name](tokenizer.eos_token)


def control_tokens(name: str) -> tuple[str, ...]:
    """Tokens by which a named template marks turns; a tokenizer that is made for it must have them."""
    return CONTROL_TOKENS.get(name, ())


@dataclass(frozen=True, slots=True)
class Plain:
    """The contents one after the other, nothing added; each answer ends with the end-of-sequence token."""

    eos_token: str | None = None

    def prompt(self, messages: Sequence[Message]) -> str:
        """All contents."""
        return _joined(self.segments(messages), self.eos_token)

    def jinja(self) -> str:
        """The same as a Jinja template for `tokenizer.chat_template`."""
        return (
            "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
            "{% endfor %}"
        )

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """What is read up to each answer, and the answers."""
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
    """`open(role) + content + close` for each message, with `between` after it."""

    eos_token: str | None
    opening: str
    """With `{role}`."""
    closing: str
    between: str = ""
    first: str = ""
    """Stands before everything."""
    system: str = ""
    """Content of a system message where the conversation has none; empty for no such message."""

    def prompt(self, messages: Sequence[Message]) -> str:
        """All turns and the opening of the assistant's."""
        awaited: Message = {"role": "assistant", "content": ""}
        *read, _ = self.segments([*messages, awaited])
        return _joined(read, self.eos_token)

    def jinja(self) -> str:
        """The same as a Jinja template for `tokenizer.chat_template`."""
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
        """What is read up to each answer, and the answers."""
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


def _chatml(eos_token: str | None) -> Turns:
    return Turns(eos_token, "<|im_start|>{role}\n", "<|im_end|>", "\n")


def _qwen(eos_token: str | None) -> Turns:
    return Turns(eos_token, "<|im_start|>{role}\n", "<|im_end|>", "\n", system="You are a helpful assistant.")


def _llama3(eos_token: str | None) -> Turns:
    opening = "<|start_header_id|>{role}<|end_header_id|>\n\n"
    return Turns(eos_token, opening, "<|eot_id|>", first="<|begin_of_text|>")


def texts_of(messages: Sequence[Message], name: str) -> list[str]:
    """What a tokenizer must cover to encode the messages with this template; `native` counts as plain text."""
    template = NAMED.get(name, Plain)(None)
    texts = [segment.text for segment in template.segments(messages)]
    for token in control_tokens(name):
        texts = [text.replace(token, "") for text in texts]
    return texts


NAMED: dict[str, Callable[[str | None], Plain | Turns]] = {
    "plain": Plain,
    "chatml": _chatml,
    "qwen": _qwen,
    "llama3": _llama3,
}
CONTROL_TOKENS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}


class JinjaTemplate:
    """The tokenizer's own template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> str:
        """With the template's generation prompt."""
        return self._render(messages, answer_follows=True)

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        """Cut where the answers begin and end. Raises `DataError` where the template rewrites what came before."""
        whole = self._render(messages, answer_follows=False)
        found: list[Segment] = []
        at = 0
        for index, each in enumerate(messages):
            if each["role"] != "assistant":
                continue
            before = self._render(messages[:index], answer_follows=True)
            after = self._render(messages[: index + 1], answer_follows=False)
            if not (whole.startswith(before) and after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    "the tokenizer's chat template writes a prompt differently once the answer stands behind it, so a"
                    f" model would be trained on prompts that it will never see (message {index + 1}, after"
                    f" {_common(whole, before)[-40:]!r}); use a named template, or train on single turns"
                )
            answer = after[len(before) :]
            eos = self.tokenizer.eos_token
            cut = answer.rfind(eos) + len(eos) if eos and eos in answer else len(answer.rstrip())
            found.append(Segment(whole[at : len(before)], written=False))
            found.append(Segment(answer[:cut], written=True, ends=not (eos and answer[:cut].endswith(eos))))
            at = len(before) + cut
        if whole[at:].strip():
            found.append(Segment(whole[at:], written=False))
        return found

    def _render(self, messages: Sequence[Message], *, answer_follows: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: Any = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer_follows
            )
        except (TemplateError, ValueError, TypeError) as error:
            raise DataError(f"the tokenizer's chat template refuses the messages: {error}") from error
        return str(text)


def _joined(segments: Sequence[Segment], eos_token: str | None) -> str:
    return "".join(each.text + (eos_token or "") if each.ends else each.text for each in segments)


def _common(one: str, other: str) -> str:
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return one[:length]
