"""Masks of tokens by their text, against a search of every prefix."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.types import Rollout, TurnRecord
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_pipeline_agentic.config import ResponseMaskConfig
from roll_pipeline_agentic.masks import mask_of_messages, mask_of_reply, mask_rollout

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Pieces:
    """Tokens of several bytes that may begin and end within a character."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    def __call__(self, ids: Any) -> str:
        return b"".join(self.pieces[id] for id in ids).decode("utf-8", errors="replace")


def texts(pieces: Pieces, mask: Any, ids: Any) -> list[bytes]:
    return [pieces.pieces[id] for id, chosen in zip(ids, mask, strict=True) if chosen]


def test_tokens_that_overlap_a_match_are_in_the_mask() -> None:
    pieces = Pieces(b"I think ", b"<tool", b"_call>f(", b"1)</tool_call", b">!", b"<eos>")
    ids = np.arange(6)
    mask = mask_of_reply(ids, pieces, r"<tool_call>.*?</tool_call>")
    assert texts(pieces, mask, ids) == [b"<tool", b"_call>f(", b"1)</tool_call", b">!"]
    assert mask_of_reply(ids, pieces, None).all()
    assert not mask_of_reply(ids, pieces, "nothing").any()


def test_bytes_of_a_character_belong_to_its_span() -> None:
    euro = "€".encode()
    pieces = Pieces(b"a", euro[:1], euro[1:2], euro[2:], b"b")
    ids = np.arange(5)
    assert mask_of_reply(ids, pieces, "€").tolist() == [False, True, True, True, False]
    assert mask_of_reply(ids, pieces, "b").tolist() == [False, False, False, False, True]


@pytest.mark.parametrize("seed", range(20))
def test_binary_search_equals_a_search_of_every_token(seed: int) -> None:
    rng = random.Random(seed)
    pieces = Pieces(*("".join(rng.choices("ab<>", k=rng.randint(1, 4))).encode() for _ in range(30)))
    ids = np.arange(30)
    ends = np.cumsum([len(each) for each in pieces.pieces])
    spans = [each.span() for each in re.finditer(r"<.*?>", pieces(ids))]
    expected = [
        any(begin < stop and end > start for start, stop in spans)
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    assert mask_of_reply(ids, pieces, r"<.*?>").tolist() == expected


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["tool_calls"], f"{CALL}<eos>"),
        (["reasoning"], "Add 1.</think>\n\n"),
        (["content"], "I add."),
        (["content", "tool_calls"], f"I add.{CALL}<eos>"),
        (["reasoning", "content", "tool_calls"], f"Add 1.</think>\n\nI add.{CALL}<eos>"),
    ],
)
def test_mask_selects_parts_of_replies_with_open_reasoning(tmp_path: Any, parts: Any, expected: str) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], tmp_path)

    def ids(text: str) -> Any:
        return np.array(tokenizer(text)["input_ids"], dtype=np.int64)

    def turn(prompt: str, reply: str, parent: int | None) -> TurnRecord:
        sampled = ids(reply)
        return TurnRecord(
            parent=parent, context_ids=ids(prompt), sampled_ids=sampled, loss_mask=np.ones(len(sampled), np.bool_),
            logprobs=np.zeros(len(sampled), np.float32), versions=np.zeros(len(sampled), np.int32),
            finish_reason="stop",
        )  # fmt: skip

    encoder = ChatEncoder(tokenizer, DataArguments(template="plain"), where="", tool_format="hermes")
    rollout = Rollout(
        turns=(
            turn("user: add<eos>assistant: <think>\n", f"Add 1.</think>\n\nI add.{CALL}<eos>", None),
            turn("tool: 3<eos>assistant: ", "3<eos>", 0),
        )
    )
    first, second = mask_rollout(rollout, ResponseMaskConfig(parts=parts), encoder).turns
    assert encoder.text(first.sampled_ids[first.loss_mask]) == expected
    assert encoder.text(second.sampled_ids[second.loss_mask]) == ("3<eos>" if "content" in parts else "")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}{{ m.content | tojson }}"
    "{% else %}{{ m.content | trim }}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture
def chatml(tmp_path: Any) -> ChatEncoder:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return ChatEncoder(tokenizer, DataArguments(template="native"), where="")


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize(
    ("contents", "begins"),
    # Where the contents begin in the text after the reply: they are no parts of the marks.
    [
        ([">"], [18]),
        (["user"], [18]),
        (["assistant"], [18]),
        ([" lower \n"], [18]),
        (["", "a"], [18 + len("<|im_end|>\n<|im_start|>user\n")]),
        (["é", "é"], [18, 18 + len("é<|im_end|>\n<|im_start|>user\n")]),
    ],
)
def test_messages_are_masked_where_the_template_writes_them(
    chatml: ChatEncoder, contents: list[str], begins: list[int], forked: bool
) -> None:
    reply = np.array(chatml._tokenizer("7<|im_end|>")["input_ids"], dtype=np.int64)
    chat = chatml.encode([{"role": "user", "content": "lower >"}])
    known = len(chat.ids) + len(reply)
    messages = [{"role": "user", "content": each} for each in contents]
    found = chatml.extend(chat, reply, messages)
    assert found is not None
    ids = found.ids if forked else found.ids[known:]
    mask = mask_of_messages(ids, chatml, found, len(messages))
    assert mask is not None
    new, mask = ids[known:] if forked else ids, mask[known:] if forked else mask
    assert chatml.text(new[mask]) == "".join(each.strip() for each in contents)
    firsts = [at for at in np.flatnonzero(mask) if at == 0 or not mask[at - 1]]
    assert [len(chatml.text(new[:at])) for at in firsts] == begins
    assert not forked or len(mask) == len(ids) - known


def test_a_message_that_the_template_escapes_has_no_mask(chatml: ChatEncoder) -> None:
    plain = chatml.encode([{"role": "tool", "content": "4"}])
    mask = mask_of_messages(plain.ids, chatml, plain, 1)
    assert mask is not None
    assert chatml.text(plain.ids[mask]) == "4"
    escaped = chatml.encode([{"role": "tool", "content": '{"a": 4}'}])
    assert mask_of_messages(escaped.ids, chatml, escaped, 1) is None
