"""Vocabularies of students and teachers are compared from their files."""

import json

from roll_core.spec.config import ModelArguments
from roll_pipeline_distill.vocabulary import difference, stored_vocabulary, vocabulary_size
from roll_testing.errors import mentions


def test_the_vocabulary_of_a_directory_has_added_tokens(tmp_path):
    assert stored_vocabulary(str(tmp_path)) is None
    stored = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<end>", "id": 2}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    assert stored_vocabulary(str(tmp_path)) == {"a": 0, "b": 1, "<end>": 2}


def test_unigram_vocabularies_are_lists(tmp_path):
    stored = {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    assert stored_vocabulary(str(tmp_path)) == {"a": 0, "b": 1}


def test_a_file_that_is_no_tokenizer_is_not_compared(tmp_path):
    for text in ("{", "[]", '{"model": {}}'):
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        assert stored_vocabulary(str(tmp_path)) is None


def test_sizes_are_those_of_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 7}}), encoding="utf-8")
    assert vocabulary_size(ModelArguments(model_name_or_path=str(tmp_path)), None) == 7
    assert vocabulary_size(ModelArguments(), str(tmp_path)) == 7
    assert vocabulary_size(ModelArguments(random_init={"model_type": "qwen3", "vocab_size": 5}), str(tmp_path)) == 5
    assert vocabulary_size(ModelArguments(model_name_or_path="org/model"), None) is None


def test_a_difference_names_a_token():
    one, other = {"a": 0, "b": 1}, {"a": 0, "c": 1}
    assert mentions(difference(one, other, 2, 2), "'b'", 1)
    assert difference(one, dict(one), 2, 64) == ""  # padded
    assert mentions(difference(one, None, 2, 3), 2, 3)
    assert difference(None, None, None, 3) == ""
