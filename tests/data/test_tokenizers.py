"""Tokenizers that are made here give back exactly what they cover, also after being loaded from their directory."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from roll_core.data.tokenizers import EOS, PAD, make_tokenizer, stored_tokenizer
from roll_core.errors import DataError, ModelError
from roll_core.pipelines.config import SFTConfig
from roll_core.runtime.run.active_run import DatasetCache
from roll_core.runtime.run.tokenizer import load_tokenizer, prepare_tokenizer
from roll_core.spec.config import TokenizerConfig
from roll_testing.errors import raises_error

TEXTS = ["the cat sat on the mat", "12+34=46\n", "naïve café — 漢字 😀", "  two  spaces\tand\r\nlines"]


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        kind: make_tokenizer(TokenizerConfig(kind=kind, vocab_size=300), TEXTS, folder / kind)
        for kind in ("char", "byte", "bpe")
    }


def test_only_a_model_without_the_files_has_no_tokenizer(made, tmp_path):
    assert stored_tokenizer(str(tmp_path)) is None
    made["byte"].save_pretrained(tmp_path)
    assert stored_tokenizer(str(tmp_path)).get_vocab() == made["byte"].get_vocab()
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with raises_error(ModelError, str(tmp_path)):
        stored_tokenizer(str(tmp_path))


def test_hub_model_uses_the_tokenizer_downloaded_with_it(monkeypatch, tmp_path):
    def unreadable(*args, **given):
        raise ValueError("unknown-class")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreadable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--acme--reward"
    for name, text in (("refs/main", "abc"), ("snapshots/abc/config.json", "{}")):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text, encoding="utf-8")
    assert stored_tokenizer("acme/reward") is None
    assert stored_tokenizer("no hub id: ü") is None
    (repository / "snapshots" / "abc" / "vocab.txt").touch()
    with raises_error(ModelError, "acme/reward", "unknown-class"):
        stored_tokenizer("acme/reward")


@pytest.mark.parametrize("kind", ["byte", "bpe"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_bytes_and_byte_pairs_give_back_any_unicode(made, kind, text):
    assert made[kind].decode(encode(made[kind], text)) == text


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from(sorted(set("".join(TEXTS)))), max_size=40))
def test_characters_give_back_their_alphabet(made, text):
    ids = encode(made["char"], text)
    assert len(ids) == len(text)
    assert made["char"].decode(ids) == text


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_special_tokens_are_the_first_and_nothing_is_added(made, kind):
    tokenizer = made[kind]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert tokenizer("cat")["input_ids"] == encode(tokenizer, "cat")
    assert encode(tokenizer, f"a{EOS}")[-1] == 1
    assert encode(tokenizer, PAD) == [0]


def test_vocabularies_have_their_configured_size(made):
    assert len(made["byte"]) == 258
    assert len(made["bpe"]) == 300
    assert len(made["char"]) == 2 + len(set("".join(TEXTS)))
    assert encode(made["byte"], "é") == [2 + 0xC3, 2 + 0xA9]


def test_a_directory_is_loaded_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = make_tokenizer(TokenizerConfig(kind="bpe", vocab_size=280), TEXTS, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert encode(loaded, TEXTS[2]) == encode(made, TEXTS[2])


def test_control_tokens_are_one_token_each(tmp_path):
    tokenizer = make_tokenizer(
        TokenizerConfig(kind="char", alphabet="ab"), (), tmp_path, control_tokens=["<|im_start|>", "<|im_end|>", EOS]
    )
    assert encode(tokenizer, "<|im_start|>ab<|im_end|>") == [2, 4, 5, 3]


def test_an_alphabet_counts_each_character_once(tmp_path):
    tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet="abab "), (), tmp_path)
    assert len(tokenizer) == 5


def test_empty_alphabet_and_too_small_vocabulary_are_refused(tmp_path):
    with raises_error(DataError, "alphabet"):
        make_tokenizer(TokenizerConfig(kind="char"), (), tmp_path)
    config = TokenizerConfig(kind="bpe", vocab_size=260)
    with raises_error(DataError, "263"):
        make_tokenizer(config, TEXTS, tmp_path, control_tokens=["<a>", "<b>", "<c>", "<d>", "<e>"])


def test_tokenizer_error_without_message_names_the_model(tmp_path, monkeypatch):
    def fail(path, **options):
        raise OSError

    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    with raises_error(ModelError, tmp_path, "OSError"):
        load_tokenizer(str(tmp_path))


def test_model_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 10}', encoding="utf-8")
    with raises_error(ModelError, tmp_path, "tokenizer.kind"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("key", ["pretrain", "model_name_or_path"])
@pytest.mark.parametrize("trusted", [True, False])
def test_tokenizer_code_runs_if_its_model_is_trusted(tmp_path, key, trusted):
    stored, chosen = tmp_path / "model", tmp_path / "tokenizer"
    make_tokenizer(TokenizerConfig(kind="char", alphabet="ab"), (), stored).save_pretrained(stored)
    file = stored / "tokenizer_config.json"
    auto = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | auto), encoding="utf-8")
    (stored / "mine.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Mine(PreTrainedTokenizerFast): pass\n",
        encoding="utf-8",
    )
    model = {"trust_remote_code": trusted}
    model |= {"model_name_or_path": str(stored)} if key == "model_name_or_path" else {}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "response": "b"}', encoding="utf-8")
    config = SFTConfig(
        pipeline="sft",
        pretrain=str(stored) if key == "pretrain" else None,
        sft_train={
            "model_args": model,
            "data_args": {"file_name": str(rows), "template": "native"},
            "strategy_args": {"strategy_name": "hf_train"},
        },
    )
    if trusted:
        assert type(prepare_tokenizer(config, DatasetCache(), chosen)).__name__ == "Mine"
    else:
        with raises_error(ModelError, stored, "trust_remote_code"):
            prepare_tokenizer(config, DatasetCache(), chosen)
