"""End tokens: of the tokenizer, of its chat template, and of a model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from roll_core.data.encode import Encoder
from roll_core.data.end_tokens import end_ids, saved_end_ids, trained_end_ids
from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import DataArguments, TokenizerConfig
from shared_tests.chat_templates import FAMILIES


def ends_of(folder: Path, template: str, marks: tuple[str, ...], eos: str = "<eos>") -> list[str]:
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), (), folder, control_tokens=marks)
    tokenizer.eos_token, tokenizer.chat_template = eos, template or None
    return tokenizer.convert_ids_to_tokens(list(trained_end_ids(tokenizer)))


def test_a_tokenizer_without_a_template_ends_with_eos(tmp_path: Path) -> None:
    assert ends_of(tmp_path, "", ("<end>",)) == ["<eos>"]
    assert ends_of(tmp_path, "", ("<end>",), eos="<end>") == ["<end>"]


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen2.5", ["<|im_end|>"]),
        ("qwen3", ["<|im_end|>"]),
        ("llama3", ["<|eot_id|>"]),
        ("gemma", ["<end_of_turn>"]),
        ("mistral", ["</s>"]),
        ("deepseek", ["<｜end▁of▁sentence｜>"]),
        # The next turn's first token ends a turn.
        ("glm", ["<|user|>", "<|observation|>"]),
        # Not <|end|>: it also ends the analysis.
        ("gpt-oss", ["<|call|>"]),
    ],
)
def test_the_chat_template_ends_replies(tmp_path: Path, name: str, ends: list[str]) -> None:
    family = FAMILIES[name]
    assert ends_of(tmp_path, family.template, family.special) == ["<eos>", *ends]


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ([None, None], (1,)),
        ([{"eos_token_id": 5}, {"eos_token_id": 6}], (1, 5)),
        ([{}, {"eos_token_id": [6, 1]}], (1, 6)),
        ([GenerationConfig(eos_token_id=[7]), {"eos_token_id": 6}], (1, 7)),
    ],
)
def test_the_first_config_with_end_ids_adds_them(tmp_path: Path, stored: list[Any], expected: tuple[int, ...]) -> None:
    assert end_ids(make_tokenizer(TokenizerConfig(kind="byte"), (), tmp_path), *stored) == expected


def test_end_ids_are_read_from_a_models_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 4}, "eos_token_id": 3}))
    assert saved_end_ids(str(tmp_path)) == (4,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert saved_end_ids(str(tmp_path)) == (8, 9)
    assert saved_end_ids(str(tmp_path / "nowhere")) == ()


def trained_texts(folder: Path, template: str, marks: tuple[str, ...], eos: str) -> list[str]:
    """Trained texts of two questions with answers A1 and A2."""
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), (), folder, control_tokens=marks)
    tokenizer.eos_token, tokenizer.chat_template = eos, template
    chat = [{"role": role, "content": f"{role[0].upper()}{turn}"} for turn in (1, 2) for role in ("user", "assistant")]
    tokens, mask = Encoder(tokenizer, DataArguments(messages="messages")).conversation(chat, "row")
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return [tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_token_that_ends_no_generation_is_not_trained_as_an_end(tmp_path: Path) -> None:
    family = FAMILIES["gpt-oss"]
    final = "<|channel|>final<|message|>"
    texts = trained_texts(tmp_path, family.template, family.special, "<|return|>")
    assert texts == [f"{final}A1", f"{final}A2<|end|><|return|>"]


def test_end_of_an_earlier_reply_is_trained_and_ends_generation(tmp_path: Path) -> None:
    turns = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}<|end|>{% endfor %}"
    template = turns + "{% if add_generation_prompt %}<a>{% else %}{{ eos_token }}{% endif %}"
    assert trained_texts(tmp_path, template, ("<|end|>",), "<eos>") == ["A1<|end|>", "A2<|end|><eos>"]
    assert ends_of(tmp_path, template, ("<|end|>",)) == ["<eos>", "<|end|>"]
