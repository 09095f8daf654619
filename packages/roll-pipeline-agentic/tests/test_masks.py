"""Masks of tokens by their text, against a search of every prefix."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig
from roll_pipeline_agentic.masks import mask_of_messages, mask_of_reply


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
def test_the_binary_search_finds_what_a_search_of_every_token_finds(seed: int) -> None:
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


def test_messages_are_found_from_the_end(tmp_path: Any) -> None:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], tmp_path)

    def decode(ids: Any) -> str:
        return str(tokenizer.decode(ids.tolist()))

    ids = np.array(tokenizer("user: lower<eos>user: lower <eos>tool: 4<eos>assistant: ")["input_ids"])
    mask = mask_of_messages(ids, decode, [{"role": "user", "content": " lower "}, {"role": "tool", "content": "4"}])
    assert mask is not None
    assert decode(ids[mask]) == "lower4"
    assert mask[:18].sum() == 0
    assert mask_of_messages(ids, decode, [{"role": "tool", "content": '{"a": 4}'}]) is None
