"""End tokens: of the tokenizer, of its chat template, and of a model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from roll_core.data.end_tokens import end_ids, saved_end_ids, trained_end_ids
from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig
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
