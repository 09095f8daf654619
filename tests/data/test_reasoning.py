"""The answer of a response: what follows its reasoning, in the formats of models."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from roll_core.data.reasoning import MARKS, answer_of, decode_response, opens_reasoning
from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import TokenizerConfig

FINAL = "<|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize("begin", MARKS)
def test_the_answer_follows_the_last_end_of_reasoning(begin):
    end = MARKS[begin]
    assert answer_of(f"{begin}a{end}b{begin}c{end}d") == "d"
    assert answer_of(f"a{end}b") == "b"
    assert answer_of(f"{begin}a") is None
    assert answer_of(f"{begin}a{end}b\n{begin}c") is None
    assert answer_of("a", opened=True) is None
    assert answer_of(f"a{end}", opened=True) == ""
    assert opens_reasoning(f"x{begin}\n")
    assert not opens_reasoning(f"{begin}\n\n{end}\n\n")


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("", ""),
        ("a", "a"),
        ("s = '<think>'", "s = '<think>'"),
        (f"<|channel|>analysis<|message|>a<|end|>{FINAL}b<|return|>", "b"),
        (f"<|channel|>analysis<|message|>a<|end|>{FINAL}b", "b"),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>', None),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}"),
        ("<|channel|>analysis<|message|>a", None),
        ("analysisWe need", None),
        ("analysis to=functions.f code", None),
        ("analysisWe needassistantfinal42", "42"),
        ("analysisAassistantanalysisBassistantfinalC", "C"),
        ("final42", "42"),
        ("finalize it", "finalize it"),
        ("analysis", "analysis"),
        ("analysis_result = 3", "analysis_result = 3"),
        ("final_answer=4", "final_answer=4"),
        ("final=4", "final=4"),
    ],
)
def test_gpt_oss_channels_parse_with_and_without_special_tokens(response, answer):
    assert answer_of(response) == answer


def test_special_marks_of_reasoning_stay_in_the_text(tmp_path):
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), ["ab"], tmp_path)
    assert decode_response(tokenizer, [*tokenizer.encode("ab"), tokenizer.eos_token_id]) == "ab"
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), ["ab"], tmp_path)
    marks = [AddedToken(each, special=True) for each in ("[THINK]", "[/THINK]", "[INST]")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    ids = [*tokenizer.encode("[THINK]a[/THINK][INST]b"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert answer_of(decode_response(tokenizer, ids)) == "b"
