import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from roll_core.config.secrets import REDACTED, Redactor, is_secret
from roll_core.spec.config import RunConfig


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("api_key", "abc"), ("WANDB_API_KEY", "x1"), ("judge_api_key", "k"), ("apiKey", "v"),
        ("OPENAI_KEY", "sk12345678"),
        ("HF_TOKEN", "abcdef"), ("token", "s3cretvalue"), ("access_token", "abcd"), ("hub_auth_tokens", "abcd"),
        ("password", "1234"), ("password", 1234), ("dbPassword", "p"), ("client_secret", "x"),
        ("credentials", {"a": 1}),
        ("tracker_kwargs.wandb.api_key", "x"), ("AWS_SECRET_ACCESS_KEY", "x"), ("ssh_key", "x"), ("authorization", "x"),
    ],
)  # fmt: skip
def test_key_can_mark_its_value_as_secret(key: str, value: object) -> None:
    assert is_secret(key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens_per_microbatch_in_train", 4096), ("max_new_tokens", "3"), ("tokens/trained", 1.5),
        ("num_tokens", 5),
        ("pad_token", "<pad>"), ("pad_token", "PADDING"), ("eos_token", "</s>"), ("image_token", "[IMAGE]"),
        ("pad_token_id", 0), ("stop_token_ids", [1]), ("tokenizer", "my/tokenizer"), ("token_level_loss", "abcdefgh1"),
        ("chosen_key", "chosen"), ("key", "id"), ("prompt_key", "column_12345"), ("num_key_value_heads", 2),
        ("keys", ["a"]), ("api_key", None), ("api_key", ""), ("use_password", False), ("monkey", "ape12345"), ("", "x"),
    ],
)  # fmt: skip
def test_words_of_the_field_are_no_secrets(key: str, value: object) -> None:
    assert not is_secret(key, value)


def test_no_field_of_the_schema_is_taken_for_a_secret() -> None:
    config = RunConfig(pipeline="sft").model_dump(mode="json")
    assert Redactor().value(config) == config


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://me:pw@host/x?api_key=abc&x=1", f"https://{REDACTED}@host/x?api_key={REDACTED}&x=1"),
        ("url=http://h/?token=abcdef done", f"url=http://h/?token={REDACTED} done"),
        ("git+https://tok@github.com/x", f"git+https://{REDACTED}@github.com/x"),
        ("tracker_kwargs.wandb.api_key=zzz", f"tracker_kwargs.wandb.api_key={REDACTED}"),
        ("{api_key: zzz, lr: 1}", f"{{api_key: {REDACTED}, lr: 1}}"),
        ('"password": "a b c", "x": 1', f'"password": "{REDACTED}", "x": 1'),
        ("HF_TOKEN='q w e'", f"HF_TOKEN='{REDACTED}'"),
        ("curl -H 'X: Bearer abcdefghijkl'", f"curl -H 'X: Bearer {REDACTED}'"),
        (f"api_key='{'x y' * 999}' lr=1", f"api_key='{REDACTED}' lr=1"),
        (f"api_key={'x' * 9999} lr=1", f"api_key={REDACTED} lr=1"),
        ("got sk-abcdefghijklmnopqrst back", f"got {REDACTED} back"),
        ("got hf_abcdefghijklmnopqrst back", f"got {REDACTED} back"),
    ],
)
def test_secrets_in_text_are_found_by_their_form(text: str, clean: str) -> None:
    assert Redactor().text(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "actor_train.training_args.learning_rate=1e-6", "max_tokens=3 pad_token=<pad>",
        "at 10:30 see https://host/path@x",
        "shape (3, 4): expected key=value", "task-1 of hf_train took 3 s", "key=id chosen_key=chosen",
        "größe: 3 – 4 🎉",
    ],
)  # fmt: skip
def test_other_text_is_unchanged(text: str) -> None:
    assert Redactor().text(text) == text


def test_secret_of_the_config_is_found_wherever_it_appears() -> None:
    redactor = Redactor.of({"tracker_kwargs": {"wandb": {"api_key": "supersecret99"}}, "password": "short"})
    assert redactor.text("401 for supersecret99, short") == f"401 for {REDACTED}, short"
    assert redactor.value(["x supersecret99"]) == [f"x {REDACTED}"]


def test_nested_values_are_redacted_and_the_original_unchanged() -> None:
    config = {"a": [{"api_key": "k", "lr": 0.1}], "b": ({"c": "https://u:p@h"},), "n": None}
    assert Redactor().value(config) == {
        "a": [{"api_key": REDACTED, "lr": 0.1}], "b": [{"c": f"https://{REDACTED}@h"}], "n": None,
    }  # fmt: skip
    assert config["a"] == [{"api_key": "k", "lr": 0.1}]


def test_yaml_without_its_secrets_is_still_yaml() -> None:
    text = yaml.safe_dump({"judge": {"api_key": "supersecret99", "url": "https://u:p@h"}, "list": ["supersecret99"]})
    clean = Redactor.of({"api_key": "supersecret99"}).text(text)
    assert yaml.safe_load(clean) == {
        "judge": {"api_key": REDACTED, "url": f"https://{REDACTED}@h"}, "list": [REDACTED],
    }  # fmt: skip


@given(st.text(max_size=200))
def test_cleaning_twice_changes_nothing_more(text: str) -> None:
    once = Redactor().text(text)
    assert Redactor().text(once) == once


@given(st.dictionaries(st.text(max_size=6), st.integers() | st.booleans() | st.none() | st.floats(), max_size=5))
def test_numbers_are_only_hidden_under_words_that_leave_no_doubt(values: dict[str, object]) -> None:
    cleaned = Redactor().value(values)
    assert json.dumps({k: v for k, v in cleaned.items() if v != REDACTED}) == json.dumps(
        {k: v for k, v in values.items() if cleaned[k] != REDACTED}
    )


@pytest.mark.parametrize("unit", ["a", "a-", "a.", "a_1", "sk-", "eyJ", "a:", "x=", "://", "'", '"', "a://b"])
def test_long_texts_without_spaces_are_redacted_fast(unit: str) -> None:
    text = unit * (200_000 // len(unit))  # would take hours if the time were quadratic
    assert len(Redactor().text(text)) > 0


def test_everyday_words_and_paths_are_not_hunted_for(tmp_path: Path) -> None:
    redactor = Redactor.of({"SECRETS": "disabled", "SECRETS_DIR": str(tmp_path), "password": "correct horse 9"})
    assert redactor.text(f"disabled in {tmp_path}/x, correct horse 9") == f"disabled in {tmp_path}/x, {REDACTED}"
