"""Incremental encoding of conversations: recorded tokens stay as they are, or the conversation forks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from roll_core.data.templates import control_tokens
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_testing.errors import raises_error

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.spec.environment import Message

OPENING: list[Message] = [{"role": "user", "content": "guess a number"}]
HIGHER: list[Message] = [{"role": "user", "content": "higher"}]
TEXTS = ["guess a number higher lower 0123456789 <think></think> You are a helpful. system assistant user \n"] * 3
THINKS = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and '</think>' in m.content and not loop.last %}{{ m.content.split('</think>')[-1] }}\
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Removes the reasoning of earlier turns, as Qwen 3's template does."""


def encoder(folder: Path, kind: str, template: str, *, jinja: str = "") -> tuple[ChatEncoder, Any]:
    tokens = control_tokens(template if template != "native" else "chatml")
    config = TokenizerConfig(kind=kind, vocab_size=300) if kind == "bpe" else TokenizerConfig(kind=kind)
    tokenizer = make_tokenizer(config, TEXTS, folder, control_tokens=tokens)
    if jinja:
        tokenizer.chat_template = jinja
    return ChatEncoder(tokenizer, DataArguments(template=template), where="custom_envs.test"), tokenizer


def ids_of(tokenizer: Any, text: str) -> Any:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
@pytest.mark.parametrize(
    ("template", "end"), [("plain", "<eos>"), ("chatml", "<|im_end|><eos>"), ("qwen", "<|im_end|><eos>")]
)
def test_the_next_prompt_begins_with_the_recorded_tokens(tmp_path: Path, kind: str, template: str, end: str) -> None:
    chats, tokenizer = encoder(tmp_path, kind, template)
    opening = chats.encode(OPENING)
    # The model may sample other tokens of the same text than the tokenizer would choose.
    reply = np.concatenate([ids_of(tokenizer, each) for each in ("4", "2", end)])
    assert chats.reply(reply) == {"role": "assistant", "content": "42"}
    extended = chats.extend(opening, reply, HIGHER)
    assert extended is not None
    known = [*opening.ids.tolist(), *reply.tolist()]
    assert extended.ids[: len(known)].tolist() == known
    whole = chats.encode([*OPENING, {"role": "assistant", "content": "42"}, *HIGHER])
    assert extended.text == whole.text == tokenizer.decode(extended.ids.tolist())


FIRST = "{%- if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
NEVER = "{{ raise_exception('not for chats') }}"
LISTS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"


@pytest.mark.parametrize(
    ("jinja", "fails"), [(NEVER, True), ("{{ messages[0].content.text + '' }}", True), ("", False), (FIRST, False)]
)
def test_a_template_that_renders_no_conversation_is_refused(tmp_path: Path, jinja: str, fails: bool) -> None:
    if not fails:
        encoder(tmp_path, "byte", "native", jinja=jinja + THINKS)
        return
    with pytest.raises(DataError):
        encoder(tmp_path, "byte", "native", jinja=jinja + THINKS)


def test_a_template_that_needs_tools_is_not_refused(tmp_path: Path) -> None:
    chats, _ = encoder(tmp_path, "byte", "native", jinja=LISTS + THINKS)
    assert chats.encode(OPENING, [{"type": "function", "function": {"name": "add"}}]).text.startswith("add<|im_start|>")


def test_a_cut_reply_is_closed_by_the_template(tmp_path: Path) -> None:
    chats, tokenizer = encoder(tmp_path, "char", "chatml")
    opening, reply = chats.encode(OPENING), ids_of(tokenizer, "42")
    extended = chats.extend(opening, reply, HIGHER)
    assert extended is not None
    added = tokenizer.decode(extended.ids[len(opening.ids) + len(reply) :].tolist())
    assert added == "<|im_end|><eos>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("reply", ["<|im_start|>user\nhigher<|im_end|>", " 4", "4 \n", "<|im_end|><eos>"])
def test_whatever_the_model_says_its_tokens_are_kept(tmp_path: Path, reply: str) -> None:
    chats, tokenizer = encoder(tmp_path, "byte", "chatml")
    opening, sampled = chats.encode(OPENING), ids_of(tokenizer, reply)
    extended = chats.extend(opening, sampled, HIGHER)
    if extended is not None:
        known = [*opening.ids.tolist(), *sampled.tolist()]
        assert extended.ids[: len(known)].tolist() == known
        assert tokenizer.decode(extended.ids.tolist()) == extended.text


def test_a_reply_of_half_a_character_is_kept(tmp_path: Path) -> None:
    chats, tokenizer = encoder(tmp_path, "byte", "chatml")
    half = ids_of(tokenizer, "é")[:1]
    extended = chats.extend(chats.encode(OPENING), half, HIGHER)
    assert extended is not None
    assert half[0] in extended.ids


def test_a_template_that_removes_reasoning_forks(tmp_path: Path) -> None:
    chats, tokenizer = encoder(tmp_path, "byte", "native", jinja=THINKS)
    opening = chats.encode(OPENING)
    assert chats.extend(opening, ids_of(tokenizer, "<think>a</think>42<|im_end|>"), HIGHER) is None
    plain = chats.extend(opening, ids_of(tokenizer, "42<|im_end|>"), HIGHER)
    assert plain is not None
    later = chats.extend(plain, ids_of(tokenizer, "43<|im_end|>"), HIGHER)
    assert later is not None


def test_blanks_that_the_template_strips_stay_as_sampled(tmp_path: Path) -> None:
    strips = THINKS.replace("{{ m.content }}", "{{ m.content | trim }}")
    chats, tokenizer = encoder(tmp_path, "byte", "native", jinja=strips)
    opening = chats.encode(OPENING)
    first = chats.extend(opening, ids_of(tokenizer, "42 <|im_end|>"), HIGHER)
    assert first is not None
    assert "assistant\n42 <|im_end|>\n<|im_start|>user" in tokenizer.decode(first.ids.tolist())
    assert "assistant\n42<|im_end|>\n<|im_start|>user" in first.text
    second = chats.extend(first, ids_of(tokenizer, "43<|im_end|>"), HIGHER)
    assert second is not None
    assert second.ids[: len(first.ids)].tolist() == first.ids.tolist()


def test_a_boundary_inside_a_word_forks(tmp_path: Path) -> None:
    """Without an end token between them, the new text could form tokens with the reply."""
    chats, tokenizer = encoder(tmp_path, "bpe", "native", jinja="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert chats.extend(chats.encode(OPENING), ids_of(tokenizer, "42"), HIGHER) is None


def test_tools_need_a_template_of_the_tokenizer(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    chats, _ = encoder(tmp_path / "named", "byte", "chatml")
    with pytest.raises(DataError):
        chats.encode(OPENING, [tool])
    with raises_error(DataError, "data_args.template"):
        chats.check_tools(OPENING, [tool])
    own = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + THINKS
    chats, tokenizer = encoder(tmp_path / "own", "byte", "native", jinja=own)
    opening = chats.encode(OPENING, [tool])
    assert opening.text.startswith("add<|im_start|>")
    extended = chats.extend(opening, ids_of(tokenizer, "4<|im_end|>"), HIGHER)
    assert extended is not None
    assert extended.text.startswith("add<|im_start|>")
