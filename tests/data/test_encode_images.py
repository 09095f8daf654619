"""Rows with images as tokens: one image token for each feature, counted by the lengths, never trained, never cut."""

import base64
import io
import json
import re

import numpy as np
import pytest
from PIL import Image

from roll_core.data.encode import SHOWN_REASONS, Encoder, encode_prompts, encode_sft
from roll_core.data.processor import processor_of
from roll_core.data.rows import read_rows
from roll_core.errors import DataError
from roll_core.runtime.run.tokenizer import load_tokenizer
from roll_core.spec.config import DataArguments
from roll_core.spec.rollout import IMAGE
from roll_testing.errors import raises_error
from roll_testing.image_models import IDS, write_processor

LONG = {"prompt_length": 1000, "response_length": 1000}
TOKENS = re.compile("|".join(map(re.escape, IDS)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    write_processor(folder, "qwen2_5_vl")
    return load_tokenizer(str(folder))


def png(width, height, colour=(255, 0, 0)):
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Images of 6, 1 and 1 tokens: one for 28 x 28 pixels."""
    for name, size in {"wide.png": (84, 56), "small.png": (28, 28), "other.png": (20, 30)}.items():
        (tmp_path / name).write_bytes(png(*size))
    (tmp_path / "broken.png").write_bytes(png(28, 28)[:40])
    return tmp_path


def rows_of(folder, *rows, **keys):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataArguments(file_name=str(file), **{"images": "images", **keys})
    return read_rows(data), data


def ids_of(text):
    """Ids of a byte tokenizer with special tokens."""
    ids, done = [], 0
    for match in TOKENS.finditer(text):
        ids += [*characters(text[done : match.start()]), IDS[match[0]]]
        done = match.end()
    return ids + characters(text[done:])


def characters(text):
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    ((pieces, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text) or [("", 0)]
    return [alphabet.index(letter) for letter in pieces]


def image(num_tokens):
    return "<|vision_start|>" + "<|image_pad|>" * num_tokens + "<|vision_end|>"


def user(content):
    return f"<|im_start|>user\n{content}<|im_end|>\n"


def reply(content):
    return f"<|im_start|>assistant\n{content}<|im_end|>"


def prompts(tokenizer, rows, data, **lengths):
    return encode_prompts(rows, data, tokenizer, prompt_length=1000, **lengths)


# -- tokens ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "content", "sizes"),
    [
        ({"prompt": "how?", "images": ["wide.png"]}, image(6) + "how?", [(84, 56)]),
        ({"prompt": "how?", "images": "wide.png"}, image(6) + "how?", [(84, 56)]),
        ({"prompt": "a <image>b", "images": ["small.png"]}, f"a {image(1)}b", [(28, 28)]),
        (
            {"prompt": "<image>or<image>?", "images": ["wide.png", "other.png"]},
            f"{image(6)}or{image(1)}?",
            [(84, 56), (20, 30)],
        ),
        ({"prompt": "ümlaut 图", "images": []}, "ümlaut 图", []),
        ({"prompt": "none", "images": None}, "none", []),
        ({"prompt": "<image><image>", "images": ["small.png"] * 2}, image(1) * 2, [(28, 28)] * 2),
    ],
)
def test_prompts_have_one_token_for_each_feature(tokenizer, folder, row, content, sizes):
    rows, data = rows_of(folder, row, messages=None, system=None)
    encoder = Encoder(tokenizer, data, chats=True)
    (message,) = encoder.load_images(messages(rows[0], data, rows), rows[0].where, rows[0].folder)
    tokens = encoder.prompt([message], "row")[1]
    assert tokens.tolist() == ids_of(user(content) + "<|im_start|>assistant\n")
    assert [(media.width, media.height) for media in message.get("media", ())] == sizes


def messages(row, data, rows):
    from roll_core.data.rows import messages_of

    return messages_of(row, data, rows, response=False)


def data_url(raw):
    return "data:image/png;base64," + base64.b64encode(raw).decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "image": "wide.png"},
        {"type": "image", "path": "wide.png"},
        {"type": "image", "base64": base64.b64encode(png(84, 56)).decode()},
        {"type": "image_url", "image_url": {"url": data_url(png(84, 56)), "detail": "high"}},
        {"type": "input_image", "image_url": data_url(png(84, 56))},
    ],
    ids=["column", "verl", "path", "base64", "openai", "responses"],
)
def test_content_parts_of_every_format_are_read(tokenizer, folder, part):
    content = [{"type": "text", "text": "see "}, part, {"type": "text", "text": "?"}]
    rows, data = rows_of(
        folder,
        {"messages": [{"role": "user", "content": content}], "images": [] if len(part) > 1 else ["wide.png"]},
        messages="messages",
    )
    (prompt,), _ = prompts(tokenizer, rows, data)
    assert prompt.tokens.tolist() == ids_of(user(f"see {image(6)}?") + "<|im_start|>assistant\n")
    assert prompt.messages[0]["content"] == f"see {IMAGE}?"
    assert [media.digest for media in prompt.media] == [media.digest for media in prompt.messages[0]["media"]]
    assert prompt.media[0].read() == png(84, 56)


@pytest.mark.parametrize("as_datasets", [False, True])
def test_parquet_of_the_library_datasets_is_read(tokenizer, tmp_path, as_datasets):
    import pyarrow
    import pyarrow.parquet

    entry = {"bytes": png(84, 56), "path": None}
    chat = [{"role": "user", "content": "<image>how many?"}]
    table = pyarrow.Table.from_pylist([{"prompt": chat, "images": [entry] if as_datasets else [entry["bytes"]]}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    data = DataArguments(file_name=str(tmp_path / "a.parquet"), messages="prompt", images="images")
    (prompt,), _ = prompts(tokenizer, read_rows(data), data)
    assert int((prompt.tokens == IDS["<|image_pad|>"]).sum()) == 6
    assert "images" not in prompt.metadata


def test_later_turns_have_their_images_and_replies_are_trained(tokenizer, folder):
    chat = [
        {"role": "user", "content": "<image>one"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "two<image>"},
        {"role": "assistant", "content": "B"},
    ]
    rows, data = rows_of(folder, {"messages": chat, "images": ["wide.png", "small.png"]}, messages="messages")
    for on_prompt in (False, True):
        (sequence,), _ = encode_sft(rows, data, tokenizer, on_prompt=on_prompt, **LONG)
        parts = [
            (user(image(6) + "one") + "<|im_start|>assistant\n", False),
            ("A<|im_end|>", True),
            ("\n" + user(f"two{image(1)}") + "<|im_start|>assistant\n", False),
            ("B<|im_end|>", True),
        ]
        assert sequence.tokens.tolist() == ids_of("".join(text for text, _ in parts))
        expected = np.concatenate([np.full(len(ids_of(text)), trained) for text, trained in parts])
        if on_prompt:
            expected = np.arange(len(expected)) > 0
            expected &= ~np.isin(sequence.tokens, [IDS["<|image_pad|>"], IDS["<|video_pad|>"]])
        assert sequence.loss_mask.tolist() == expected.tolist()
        assert [media.width for media in sequence.media] == [84, 28]


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_prompt_length_counts_expanded_tokens(tokenizer, folder):
    row = {"messages": [{"role": "user", "content": "<image>"}], "images": ["wide.png"]}
    rows, data = rows_of(folder, row, messages="messages")
    (prompt,), _ = prompts(tokenizer, rows, data)
    length = len(prompt.tokens)
    assert len(encode_prompts(rows, data, tokenizer, prompt_length=length)[0]) == 1
    with raises_error(DataError, "1 overlong"):
        encode_prompts(rows, data, tokenizer, prompt_length=length - 1)


def test_truncation_drops_rows_whose_later_image_it_would_cut(tokenizer, folder):
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "<image>"},
        {"role": "assistant", "content": "long reply"},
    ]
    rows, data = rows_of(folder, {"messages": chat, "images": ["wide.png"]}, messages="messages")
    (sequence,), _ = encode_sft(rows, data, tokenizer, **LONG)
    start = int(sequence.loss_mask.argmax())
    last_image = int(np.flatnonzero(sequence.tokens == IDS["<|image_pad|>"])[-1]) + 1 - start
    lengths = {"prompt_length": 1000, "overlong": "truncate"}
    ((kept,), counts) = encode_sft(rows, data, tokenizer, response_length=last_image, **lengths)
    assert (counts.truncated_responses, len(kept.tokens), len(kept.media)) == (1, start + last_image, 1)
    with raises_error(DataError, "1 overlong"):
        encode_sft(rows, data, tokenizer, response_length=last_image - 1, **lengths)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ({"prompt": "<image><image>", "images": ["small.png"]}, "images"),
        ({"prompt": "<image>", "images": []}, "images"),
        ({"prompt": "<image>", "images": ["small.png"] * 2}, "images"),
        ({"prompt": "<|image_pad|>", "images": ["small.png"]}, "<|image_pad|>"),
        ({"prompt": "<image><|image_pad|>", "images": ["small.png"]}, "<|image_pad|>"),
        ({"prompt": "<|video_pad|>", "images": ["small.png"]}, "<|video_pad|>"),
        ({"prompt": f"{IMAGE}", "images": None}, "places"),
        ({"prompt": "a", "images": ["gone.png"]}, "gone.png"),
        ({"prompt": "a", "images": ["../rows.jsonl"]}, "image_roots"),
        ({"prompt": "a", "images": ["broken.png"]}, "broken.png"),
        ({"prompt": "a", "images": ["small.png", None]}, "None"),
        ({"prompt": "a", "images": [{"image": "small.png", "max_pixels": 784}]}, "data_args.min_pixels"),
        ({"prompt": "a", "videos": ["a.mp4"]}, "videos"),
        ({"prompt": "a", "audio": "a.wav"}, "audio"),
    ],
)
def test_rows_that_no_model_could_read_are_located_errors(tokenizer, folder, row, fact):
    rows, data = rows_of(folder, {"prompt": "fine", "images": []}, row)
    with raises_error(DataError, "rows.jsonl row 2", fact):
        prompts(tokenizer, rows, data)


@pytest.mark.parametrize("kind", ["input_audio", "audio", "file"])
def test_parts_of_other_media_are_refused_by_name(tokenizer, folder, kind):
    chat = [{"role": "user", "content": [{"type": kind, kind: "a"}]}]
    rows, data = rows_of(folder, {"messages": chat}, messages="messages")
    with raises_error(DataError, "row 1", "message 1", kind):
        prompts(tokenizer, rows, data)


def test_parts_without_an_image_need_a_column(tokenizer, folder):
    chat = [{"role": "user", "content": [{"type": "image"}]}]
    rows, data = rows_of(folder, {"messages": chat}, messages="messages", images=None)
    with raises_error(DataError, "row 1", "data_args.images"):
        prompts(tokenizer, rows, data)


@pytest.mark.parametrize("text", ["<|image_pad|>", "<|video_pad|>"])
def test_replies_with_tokens_of_images_are_refused(tokenizer, folder, text):
    chat = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": f"it is {text}"}]
    rows, data = rows_of(folder, {"messages": chat, "images": ["small.png"]}, messages="messages")
    with raises_error(DataError, "row 1", text):
        encode_sft(rows, data, tokenizer, **LONG)


def test_text_models_refuse_images(folder):
    from roll_core.data.tokenizers import make_tokenizer
    from roll_core.spec.config import TokenizerConfig

    rows, data = rows_of(folder, {"prompt": "a", "images": ["small.png"]}, template="plain")
    made = make_tokenizer(TokenizerConfig(kind="byte"), [], folder)
    assert processor_of(made) is None
    with raises_error(DataError, "row 1"):
        prompts(made, rows, data)


def test_rows_with_bad_images_are_dropped_if_the_config_says_so(tokenizer, folder, caplog):
    (folder / "thin.png").write_bytes(png(10_000, 1))  # the processor refuses an aspect ratio of more than 200
    rows, data = rows_of(
        folder,
        {"prompt": "a", "images": ["small.png"]},
        {"prompt": "a", "images": ["broken.png"]},
        {"prompt": "a", "images": ["small.png", "gone.png"]},
        {"prompt": "a", "images": ["thin.png"]},
        {"prompt": "a", "images": ["small.png"] * 3},
        {"prompt": "a", "images": ["wide.png"]},
        {"prompt": "a", "images": ["http://127.0.0.1:1/a.png"]},
        broken_images="drop",
        allow_urls=True,
        max_images=2,
        max_pixels=84 * 56 - 1,
        oversized_images="drop",
    )
    with caplog.at_level("WARNING"):
        kept, counts = prompts(tokenizer, rows, data)
    assert [prompt.id for prompt in kept] == ["0"]
    assert (counts.kept, counts.broken_images, counts.oversized_images) == (1, 3, 3)
    reasons = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(reasons) == SHOWN_REASONS
    assert all(f"rows.jsonl row {number}:" in reason for number, reason in enumerate(reasons, 2))


def test_images_that_the_processor_refuses_are_located(tokenizer, folder):
    (folder / "thin.png").write_bytes(png(10_000, 1))
    rows, data = rows_of(folder, {"prompt": "a", "images": ["thin.png"]})
    with raises_error(DataError, "rows.jsonl row 1", "10000 x 1"):
        prompts(tokenizer, rows, data)


def test_reduced_images_have_fewer_tokens(tokenizer, folder):
    rows, data = rows_of(folder, {"prompt": "a", "images": ["wide.png"]}, max_pixels=42 * 28)
    (prompt,), _ = prompts(tokenizer, rows, data)
    assert int((prompt.tokens == IDS["<|image_pad|>"]).sum()) in (1, 2)
    assert prompt.media[0].width * prompt.media[0].height <= 42 * 28


# -- the model's processor ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gemma3", "llava", "internvl", "qwen3_vl"])
def test_expansion_equals_that_of_transformers_processor(tmp_path, kind):
    write_processor(tmp_path, kind)
    tokenizer = load_tokenizer(str(tmp_path))
    processor = processor_of(tokenizer)
    (tmp_path / "a.png").write_bytes(png(70, 45))
    (tmp_path / "b.png").write_bytes(png(33, 64, (0, 0, 255)))
    row = {"messages": [{"role": "user", "content": "x<image>y<image>"}], "images": ["a.png", "b.png"]}
    rows, data = rows_of(tmp_path, row, messages="messages")
    (prompt,), _ = prompts(tokenizer, rows, data)
    together = processor._processor(images=[media.image() for media in prompt.media], text=[prompt.text])
    assert prompt.tokens.tolist() == list(np.asarray(together["input_ids"])[0])
    for name, array in processor.inputs(prompt.media).items():
        np.testing.assert_array_equal(array, np.asarray(together[name]))
    assert set(np.flatnonzero(np.isin(prompt.tokens, processor.media_token_ids))) >= set(
        np.flatnonzero(prompt.tokens == processor.image_token_id)
    )
