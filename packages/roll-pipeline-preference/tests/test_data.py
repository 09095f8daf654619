"""Preference data: both responses follow the same prompt tokens, and wrong rows are located."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from roll_core.data.encode import tokenizer_texts
from roll_core.data.rows import read_rows
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import DataError
from roll_core.runtime.run.tokenizer import load_tokenizer
from roll_core.spec.config import DataArguments, TokenizerConfig
from roll_core.types import TrainSequence
from roll_pipeline_preference.encode import CHOSEN, DESIRABLE, MARGIN, encode_labelled, encode_pairs, mismatched
from roll_testing.errors import mentions, raises_error
from roll_testing.image_models import IDS, write_processor
from shared_tests.tiny_vision import picture

PAIR = {"prompt": "2+2=", "chosen": "four", "rejected": "5"}


@pytest.fixture
def load(tmp_path):
    """`load(rows, **data_args)`: rows, their arguments, and a byte tokenizer."""

    def make(rows, **given):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data = DataArguments(file_name=str(path), **given)
        found = read_rows(data)
        control = ["<|im_start|>", "<|im_end|>"] if data.template == "chatml" else []
        kind = TokenizerConfig(kind="byte")
        tokenizer = make_tokenizer(kind, tokenizer_texts(found, data), tmp_path / "tokenizer", control_tokens=control)
        return found, data, tokenizer

    return make


def pairs(loaded, *, prompt_length=200, response_length=100, **given):
    return encode_pairs(*loaded, prompt_length=prompt_length, response_length=response_length, **given)


def text(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens.tolist())


def parts(sequence, tokenizer):
    """Text of the prompt, and of the trained tokens."""
    start = int(sequence.loss_mask.argmax())
    return text(tokenizer, sequence.tokens[:start]), text(tokenizer, sequence.tokens[sequence.loss_mask])


def test_a_pair_is_two_sequences_with_the_same_prompt(load):
    loaded = load([PAIR])
    (chosen, rejected), counts = pairs(loaded)
    assert parts(chosen, loaded[2]) == ("2+2=", "four<eos>")
    assert parts(rejected, loaded[2]) == ("2+2=", "5<eos>")
    assert (chosen.streams[CHOSEN] == chosen.loss_mask).all()
    assert not rejected.streams[CHOSEN].any()
    assert str(counts) == "1 kept"


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


HISTORY = [user("hi"), assistant("hello"), user("bye")]


@pytest.mark.parametrize("order", [1, -1])
def test_chats_without_a_chat_template_are_refused(load, order):
    rows = [PAIR, {"prompt": "bye", "chosen": [*HISTORY, assistant("ciao")], "rejected": [*HISTORY, assistant("go")]}]
    with pytest.raises(DataError):
        pairs(load(rows[::order]))


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [*HISTORY, assistant("ciao")], "rejected": [*HISTORY, assistant("go")]},
        {"prompt": "bye", "chosen": [*HISTORY, assistant("ciao")], "rejected": [*HISTORY, assistant("go")]},
        {"prompt": HISTORY, "chosen": [assistant("ciao")], "rejected": [assistant("go")]},
        {"prompt": HISTORY, "chosen": "ciao", "rejected": "go"},
    ],
    ids=["implicit prompt", "text beside", "chat prompt", "text responses"],
)
def test_prompt_of_chats_is_their_common_part_and_not_trained(load, row):
    loaded = load([row], template="chatml")
    (chosen, rejected), _ = pairs(loaded)
    prompt = (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|><eos>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert parts(chosen, loaded[2]) == (prompt, "ciao<|im_end|><eos>")
    assert parts(rejected, loaded[2]) == (prompt, "go<|im_end|><eos>")


def test_a_query_follows_a_prompts_text_and_no_messages(load):
    loaded = load(
        [{"prompt": HISTORY, "chosen": "ciao", "rejected": "go", "more": "x"}], template="chatml", query="more"
    )
    with raises_error(DataError, "pairs.jsonl row 1", "query", "more"):
        pairs(loaded)


def test_a_system_column_comes_first(load):
    loaded = load([PAIR | {"how": "Add."}], template="chatml", system="how")
    prompt, _ = parts(pairs(loaded)[0][0], loaded[2])
    assert prompt.startswith("<|im_start|>system\nAdd.<|im_end|>")


def test_truncation_cuts_only_responses(load):
    rows = [PAIR | {"chosen": "aaaaaa", "rejected": "b"}, PAIR | {"chosen": "aaab", "rejected": "aaac"}]
    loaded = load(rows)
    (chosen, rejected), counts = pairs(loaded, response_length=3, overlong="truncate")
    assert parts(chosen, loaded[2]) == ("2+2=", "aaa")
    assert parts(rejected, loaded[2]) == ("2+2=", "b<eos>")
    assert (counts.kept, counts.truncated_responses, counts.identical) == (1, 3, 1)
    with pytest.raises(DataError):
        pairs(loaded, response_length=3)
    kept, counts = pairs(loaded, response_length=5)
    assert (len(kept), counts.overlong_responses) == (2, 1)
    with pytest.raises(DataError):
        pairs(loaded, prompt_length=3)


def test_a_dropped_pair_is_counted_once(load):
    long = {"prompt": "a long prompt", "chosen": "x", "rejected": "y"}
    _, counts = pairs(load([PAIR, long]), prompt_length=6)
    assert (counts.kept, counts.overlong_prompts) == (1, 1)
    _, counts = pairs(load([PAIR, PAIR | {"chosen": "four and", "rejected": "five and"}]), response_length=6)
    assert (counts.kept, counts.overlong_responses) == (1, 1)


def test_a_margin_is_at_the_last_token_of_the_chosen_response(load):
    loaded = load([PAIR | {"better_by": 1.5}])
    (chosen, rejected), _ = pairs(loaded, margin="better_by")
    assert chosen.streams[MARGIN].tolist() == [0.0] * (len(chosen) - 1) + [1.5]
    assert MARGIN not in rejected.streams


@pytest.mark.parametrize(
    ("row", "facts"),
    [
        ({"chosen": "  "}, ["'chosen'"]),
        ({"rejected": "four"}, ["'chosen'", "'rejected'"]),
        ({"rejected": None}, ["'rejected'"]),
        ({"rejected": 5}, ["'rejected'", "5"]),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]}, ["'chosen'", "1"]),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a")]}, ["'rejected'"]),
    ],
    ids=["empty", "equal", "missing", "number", "other prompts", "no response"],
)
def test_a_wrong_pair_names_row_and_column(load, row, facts):
    loaded = load([PAIR, PAIR | {"rejected": "6"}])
    loaded[0][1] = loaded[0][1].__class__(
        id="1", tag="", where="pairs.jsonl row 2", values={**loaded[0][1].values, **row}
    )
    with raises_error(DataError, "pairs.jsonl row 2", *facts):
        pairs(loaded)


def test_rows_with_labels_are_not_pairs(load):
    loaded = load([{"prompt": "2+2=", "response": "4", "label": True}])
    with raises_error(DataError, "pairs.jsonl row 1", "'label'", "kto"):
        pairs(loaded)


def test_a_missing_column_is_named_with_the_nearest_one(load):
    loaded = load([{"prompt": "2+2=", "chosen": "4", "reject": "5"}])
    with raises_error(DataError, "'rejected'", "'reject'"):
        pairs(loaded)


LABELLED = [
    {"prompt": "2+2=", "response": "4", "label": True},
    {"prompt": "2+2=", "response": "5", "label": 0},
    {"prompt": "3+3=", "response": "6", "label": "true"},
]


def labelled(loaded):
    return encode_labelled(*loaded, prompt_length=20, response_length=10)[0]


def test_labelled_responses_are_single_sequences(load):
    loaded = load(LABELLED)
    sequences = labelled(loaded)
    assert [parts(each, loaded[2]) for each in sequences] == [
        ("2+2=", "4<eos>"),
        ("2+2=", "5<eos>"),
        ("3+3=", "6<eos>"),
    ]
    assert [DESIRABLE in each.streams for each in sequences] == [True, False, True]
    assert all(each.streams[DESIRABLE].sum() == 1 for each in sequences if DESIRABLE in each.streams)


def test_pairs_can_serve_as_labelled_responses(load):
    sequences = labelled(load([PAIR, PAIR | {"prompt": "1+3="}]))
    assert [DESIRABLE in each.streams for each in sequences] == [True, False, True, False]


def test_a_chat_with_a_label_ends_with_its_response(load):
    loaded = load([{"chat": [*HISTORY, assistant("ciao")], "label": False}], messages="chat", template="chatml")
    assert parts(encode_labelled(*loaded, prompt_length=200, response_length=50)[0][0], loaded[2])[1].startswith("ciao")


@pytest.mark.parametrize("label", ["good", 2, None])
def test_a_wrong_label_is_located(load, label):
    loaded = load([LABELLED[0], LABELLED[1] | {"label": label}])
    with raises_error(DataError, "pairs.jsonl row 2", "'label'", repr(label)):
        labelled(loaded)


def test_a_mismatched_response_is_the_next_one_to_another_prompt(load):
    loaded = load(LABELLED)
    found = mismatched(labelled(loaded), "pairs.jsonl row 1")
    assert [parts(each, loaded[2]) for each in found] == [
        ("2+2=", "6<eos>"),
        ("2+2=", "6<eos>"),
        ("3+3=", "4<eos>"),
    ]


def test_single_prompt_has_no_mismatched_responses():
    mask = np.array([False, True])
    rows = [TrainSequence(id=str(i), tokens=np.array([1, i]), loss_mask=mask) for i in range(3)]
    with raises_error(DataError, "pairs.jsonl row 1"):
        mismatched(rows, "pairs.jsonl row 1")


@pytest.mark.parametrize("label", [True, False])
def test_labels_that_are_all_equal_are_a_warning(load, caplog, label):
    labelled(load(LABELLED))
    assert not caplog.records
    labelled(load([row | {"label": label} for row in LABELLED]))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert mentions(record.getMessage(), "pairs.jsonl row 1", str(label).lower())


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def load_images(tmp_path):
    """`load_images(rows, **data_args)` with the processor of Qwen2.5-VL, and images of 6 and 1 tokens."""
    picture(84, 56).save(tmp_path / "a.png")
    picture(28, 28).save(tmp_path / "b.png")
    write_processor(tmp_path, "qwen2_5_vl")

    def make(rows, **given):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        data = DataArguments(file_name=str(path), **{"images": "images", **given})
        return read_rows(data), data, load_tokenizer(str(tmp_path))

    return make


USER = [{"role": "user", "content": "<image>how many?"}]
FOUR, FIVE = ([{"role": "assistant", "content": text}] for text in ("4", "5"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": USER, "chosen": FOUR, "rejected": FIVE},
        {"prompt": USER, "chosen": "4", "rejected": "5"},
        {"chosen": USER + FOUR, "rejected": USER + FIVE},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many?"}]}],
            "chosen": FOUR,
            "rejected": FIVE,
        },
    ],
    ids=["lists", "texts", "implicit prompt", "parts"],
)
def test_responses_of_a_pair_share_the_images_of_the_prompt(load_images, row):
    loaded = load_images([row | {"images": ["a.png"]}])
    (chosen, rejected), counts = pairs(loaded)
    image = IDS["<|image_pad|>"]
    for sequence in (chosen, rejected):
        assert [(media.width, media.height) for media in sequence.media] == [(84, 56)]
        assert int((sequence.tokens == image).sum()) == 6
        assert not sequence.loss_mask[sequence.tokens == image].any()
    assert chosen.media[0] == rejected.media[0]
    assert (counts.kept, len(chosen.tokens)) == (1, len(rejected.tokens))


def test_pairs_with_bad_images_are_dropped_once(load_images):
    row = {"prompt": USER, "chosen": "4", "rejected": "5"}
    loaded = load_images([row | {"images": ["a.png"]}, row | {"images": ["gone.png"]}], broken_images="drop")
    sequences, counts = pairs(loaded)
    assert (len(sequences), counts.kept, counts.broken_images) == (2, 1, 1)


def test_images_in_responses_are_refused(load_images):
    turns = [*FOUR, {"role": "user", "content": "<image>"}, *FIVE]
    loaded = load_images([{"prompt": "q", "chosen": turns, "rejected": "5", "images": ["a.png"]}])
    with raises_error(DataError, "row 1"):
        pairs(loaded)


def test_equal_prompts_with_other_images_are_other_prompts(load_images):
    rows = [
        {"prompt": USER, "response": "4", "label": True, "images": ["a.png"]},
        {"prompt": USER, "response": "5", "label": False, "images": ["b.png"]},
    ]
    picture(84, 56, seed=1).save(Path(load_images(rows)[1].file_name).parent / "b.png")
    sequences, _ = encode_labelled(*load_images(rows), prompt_length=200, response_length=100)
    assert np.array_equal(sequences[0].tokens[:-2], sequences[1].tokens[:-2])
    first, second = mismatched(sequences, "rows")
    assert [sequence.media for sequence in (first, second)] == [sequence.media for sequence in sequences]
    assert first.tokens.tolist() == sequences[1].tokens.tolist()
