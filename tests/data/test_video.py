"""Videos of rows: which frames are read, their tokens, and what becomes of those that cannot be used."""

import base64
import io
import json
import os
import pickle
import struct
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from roll_core.data.encode import Encoder, encode_prompts, encode_sft
from roll_core.data.processor import processor_of
from roll_core.data.rows import RowVideo, read_rows
from roll_core.data.video import load_video
from roll_core.errors import DataError, UnsupportedError
from roll_core.runtime.records.media_folder import MediaFolder
from roll_core.runtime.run.tokenizer import load_tokenizer
from roll_core.spec.config import DataArguments
from roll_core.types import media_digest
from roll_testing.errors import raises_error
from roll_testing.image_models import IDS, VIDEO_TOKEN, VIDEO_TYPES, write_processor
from shared_tests import video_reference
from shared_tests.tiny_vision import picture

LONG = {"prompt_length": 1000, "response_length": 1000}
SIZE = 112, 84


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    made = {}
    for name in (*VIDEO_TYPES, "llava"):
        folder = tmp_path_factory.mktemp(name)
        write_processor(folder, name)
        made[name] = load_tokenizer(str(folder))
    return made


def encoded(num=30, fps=10, size=SIZE, kind="mp4"):
    """A file whose frame i has the red value 8 i, and whose left half is blue."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = *size, "yuv420p", 4_000_000
        for i in range(num):
            image = Image.new("RGB", size, (8 * i, 0, 0))
            image.paste((8 * i, 0, 255), (0, 0, size[0] // 2, size[1]))
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return file.getvalue()


def animation(kind, num, milliseconds):
    frames, file = [picture(56, 84, i) for i in range(num)], io.BytesIO()
    more = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=milliseconds, **more)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "frames").mkdir()
    for i in range(4):
        picture(56, 84, i).save(tmp_path / "frames" / f"{i:02}.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.png").write_bytes((tmp_path / "frames" / "00.png").read_bytes())
    (tmp_path / "text.mp4").write_text("not a video")
    return tmp_path


def rows_of(folder, *rows, **keys):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataArguments(file_name=str(file), **{"videos": "videos", **keys})
    return read_rows(data), data


def read(tokenizers, folder, value, model_type="qwen2_5_vl", fps=None, **keys):
    data = DataArguments(videos="videos", **keys)
    return load_video(RowVideo(value, fps), "row", data, folder, processor_of(tokenizers[model_type]).video_processor)


def prompts(tokenizer, rows, data):
    return encode_prompts(rows, data, tokenizer, prompt_length=1000)


def pixels(media):
    return [np.asarray(image) for image in media.images()]


def test_frames_and_arrays_equal_transformers():
    found = subprocess.run([sys.executable, video_reference.__file__], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_frames_of_a_file_are_sampled_by_the_processor(tokenizers, folder):
    (folder / "a.mp4").write_bytes(encoded())  # 3 s, of which 2 frames each are read
    for value in ("a.mp4", encoded(kind="matroska"), base64.b64encode(encoded()).decode()):
        media = read(tokenizers, folder, value)
        assert (media.frames.num_frames, media.frames.fps, media.width, media.height) == (30, 10, *SIZE)
        assert media.frames.indices == (0, 5, 10, 15, 20, 25)
        for index, frame in zip(media.frames.indices, pixels(media), strict=True):
            assert np.abs(frame[20, 100].astype(int) - [8 * index, 0, 0]).max() < 12
            assert frame[20, 10, 2] > 200
    assert read(tokenizers, folder, "a.mp4", video_fps=4).frames.indices == tuple(int(2.5 * i) for i in range(12))
    assert read(tokenizers, folder, "a.mp4", "qwen3_vl").frames.indices == (0, 6, 12, 17, 23, 29)


def test_rotated_files_are_turned_upright(tokenizers, folder):
    raw = encoded(size=(112, 56))
    straight, turned = (struct.pack(">9i", *values) for values in (UPRIGHT, CLOCKWISE))
    assert raw.count(straight) >= 2  # of the movie and of its track, which comes last
    at = raw.rindex(straight)
    media = read(tokenizers, folder, raw[:at] + turned + raw[at + len(turned) :])
    upright = pixels(read(tokenizers, folder, raw))
    assert (media.width, media.height) == (56, 112)
    for frame, expected in zip(pixels(media), upright, strict=True):
        np.testing.assert_array_equal(frame, np.rot90(expected, -1))


UPRIGHT = 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30
CLOCKWISE = 0, 1 << 16, 0, -(1 << 16), 0, 0, 56 << 16, 0, 1 << 30


def test_forms_of_a_video_are_the_same_video(tokenizers, folder):
    files = [f"frames/{i:02}.png" for i in range(4)]
    forms = [
        "frames",
        files,
        {"video": files},
        {"frames": None, "type": "video", "video": "frames", "fps": None},
        {"path": f"file://{folder}/frames"},
        [(folder / file).read_bytes() for file in files],
        [{"bytes": (folder / file).read_bytes(), "path": None} for file in files],
    ]
    digests = {read(tokenizers, folder, form).digest for form in forms}
    assert len(digests) == 1
    media = read(tokenizers, folder, files)
    for i, frame in enumerate(pixels(media)):
        np.testing.assert_array_equal(frame, np.asarray(picture(56, 84, i)))
    assert read(tokenizers, folder, files, fps=1.0).digest not in digests  # other times


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animations_have_their_times(tokenizers, folder, kind):
    media = read(tokenizers, folder, animation(kind, 5, 200))
    assert (media.frames.num_frames, media.frames.fps) == (5, pytest.approx(5.0))
    assert media.frames.indices == (0, 1, 2, 3)
    if kind != "GIF":  # which has 256 colours
        np.testing.assert_array_equal(pixels(media)[3], np.asarray(picture(56, 84, 3)))


def test_a_stored_video_has_its_frames_and_times(tokenizers, folder, tmp_path):
    media = read(tokenizers, folder, "frames")
    (tmp_path / "run").mkdir()
    store = MediaFolder(tmp_path / "run")
    (restored,) = store.get(json.loads(json.dumps(store.put([media]))))
    for copy in (restored, pickle.loads(pickle.dumps(media)), media.in_memory()):
        assert (copy.digest, copy.frames, copy.kind) == (media.digest, media.frames, "video")
        np.testing.assert_array_equal(pixels(copy), pixels(media))


def test_places_of_images_and_videos_keep_their_order(tokenizers, folder):
    tokenizer, files = tokenizers["qwen2_5_vl"], ["frames/00.png", "frames/01.png"]
    video = {"type": "video", "video": files}
    contents = [
        ("see <video> or <image>?", {"videos": [files], "images": ["a.png"]}),
        ([{"type": "text", "text": "see "}, video, " or ", {"type": "image", "image": "a.png"}, "?"], {}),
        (
            ["see ", {"type": "video_url", "video_url": {"url": files}}, " or ", {"type": "image"}, "?"],
            {"images": "a.png"},
        ),
        (["see ", {"type": "video"}, " or <image>?"], {"videos": [{"video": files}], "images": "a.png"}),
    ]
    made = []
    for content, columns in contents:
        row = {"messages": [{"role": "user", "content": content}], **columns}
        rows, data = rows_of(folder, row, messages="messages", images="images")
        (prompt,), _ = prompts(tokenizer, rows, data)
        assert [media.kind for media in prompt.media] == ["video", "image"]
        assert not prompt.metadata
        made.append(prompt)
    assert len({prompt.tokens.tobytes() for prompt in made}) == 1
    assert made[0].text.count("see <|vision_start|><|video_pad|><|vision_end|> or <|vision_start|><|image_pad|>") == 1


def test_videos_without_a_place_follow_the_images(tokenizers, folder):
    row = {"prompt": "which?", "videos": ["frames", "frames"], "images": ["a.png"]}
    rows, data = rows_of(folder, row, images="images")
    (prompt,), _ = prompts(tokenizers["qwen2_5_vl"], rows, data)
    assert [media.kind for media in prompt.media] == ["image", "video", "video"]


def test_tokens_are_those_of_the_frames(tokenizers, folder):
    rows, data = rows_of(folder, {"prompt": "<video>!", "videos": ["frames"], "response": "yes"})
    # 84 x 56 pixels are 6 tokens of 28 x 28, for each pair of frames.
    (sequence,), _ = encode_sft(rows, data, tokenizers["qwen2_5_vl"], **LONG)
    assert (sequence.tokens == IDS[VIDEO_TOKEN]).sum() == 2 * 6
    assert not sequence.loss_mask[sequence.tokens == IDS[VIDEO_TOKEN]].any()
    encoder = Encoder(tokenizers["qwen2_5_vl"], data)
    first = int((sequence.tokens == IDS[VIDEO_TOKEN]).argmax())
    assert encoder.places_of(sequence.tokens, sequence.media) == [range(first, first + 12)]
    # With Qwen3-VL, each pair has its time. Frames are at 0, 0.5, 1 and 1.5 s: pairs in the middle of them.
    (prompt,), _ = prompts(tokenizers["qwen3_vl"], rows, data)
    text = tokenizers["qwen3_vl"].decode(prompt.tokens)
    frame = "<|vision_start|>" + VIDEO_TOKEN * (text.count(VIDEO_TOKEN) // 2) + "<|vision_end|>"
    assert f"<|vision_start|><0.2 seconds>{frame}<1.2 seconds>{frame}<|vision_end|>!" in text


def test_videos_over_a_budget_are_reduced_or_dropped(tokenizers, folder):
    tokenizer, one = tokenizers["qwen2_5_vl"], {"prompt": "a", "videos": ["frames"]}
    rows, data = rows_of(folder, one, max_frames=2, max_pixels=28 * 28)
    (prompt,), _ = prompts(tokenizer, rows, data)
    (media,) = prompt.media
    assert media.frames.indices == (0, 2)
    assert media.width * media.height <= 28 * 28
    short = {"prompt": "b", "videos": [["a.png", "a.png"]]}
    of_two = {"max_video_pixels": 2 * 56 * 84, "oversized_images": "drop"}
    for keys in ({"max_frames": 2, "oversized_images": "drop"}, {"max_videos": 1}, of_two):
        many = {**one, "videos": [one["videos"][0]] * 2}
        rows, data = rows_of(folder, short, many, **keys)
        kept, counts = prompts(tokenizer, rows, data)
        assert (len(kept), counts.oversized_images) == (1, 1)


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({"max_video_pixels": 4 * 20 * 15}, (20, 15)),
        ({"max_video_pixels": 4 * 20 * 15, "max_pixels": 10 * 8}, (10, 7)),
        ({"max_video_pixels": 4 * 20 * 15, "min_pixels": 40 * 30}, (40, 30)),
        ({"max_video_pixels": 4 * 80 * 60, "min_pixels": 160 * 120}, (160, 120)),
        ({"max_video_pixels": 4 * 80 * 60}, (80, 60)),
    ],
)
def test_frames_share_the_pixels_of_a_video(tokenizers, folder, keys, size):
    for i in range(4):
        picture(80, 60, i).save(folder / f"shared {i}.png")
    video = [f"shared {i}.png" for i in range(4)]
    rows, data = rows_of(folder, {"prompt": "a", "videos": [video]}, **keys)
    (prompt,), _ = prompts(tokenizers["qwen2_5_vl"], rows, data)
    (media,) = prompt.media
    assert (media.width, media.height) == size


@pytest.mark.parametrize(
    ("videos", "fact"),
    [
        (["empty"], "0 frames"),
        ([[]], "0 frames"),
        ([["a.png"]], "1 frames"),
        (["a.png"], "1 frames"),
        (["gone.mp4"], "gone.mp4"),
        (["text.mp4"], "decoded"),
        (["pipe.mp4"], "pipe"),
        (["a\0b.mp4"], "path"),
        (["../rows.mp4"], "image_roots"),
        (["https://example.com/a.mp4"], "URL"),
        ([["a.png", "gone.png"]], "gone.png"),
        ([["a.png", "wide.png"]], "sizes"),
        ([{"video": "frames", "nframes": 4}], "nframes"),
        ([{"video": "frames", "fps": 0}], "fps"),
        ([3], "expected a path"),
        (["frames", "frames"], "places"),
        ([], "places"),
    ],
)
def test_videos_that_cannot_be_read_are_located_errors(tokenizers, folder, videos, fact):
    picture(112, 84).save(folder / "wide.png")
    os.mkfifo(folder / "pipe.mp4")  # it has no writer: a reader would block
    rows, data = rows_of(folder, {"prompt": "fine<video>", "videos": "frames"}, {"prompt": "<video>", "videos": videos})
    with raises_error(DataError, "rows.jsonl row 2", fact):
        prompts(tokenizers["qwen2_5_vl"], rows, data)
    if fact != "places":
        rows, data = rows_of(folder, *[dict(row.values) for row in rows], broken_images="drop")
        kept, counts = prompts(tokenizers["qwen2_5_vl"], rows, data)
        assert (len(kept), counts.broken_images) == (1, 1)


def test_a_reply_that_is_no_video_is_not_kept(tokenizers, folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    url = "http://127.0.0.1:1/a.mp4"
    cached = folder / "roll" / "urls" / media_digest(url.encode())
    cached.parent.mkdir(parents=True)
    for content, is_kept in ((b"<html>busy</html>", False), (encoded(), True)):
        cached.write_bytes(content)
        with nullcontext() if is_kept else raises_error(DataError, "row"):
            read(tokenizers, folder, url, allow_urls=True)
        assert cached.exists() == is_kept


def test_a_truncated_file_is_a_located_error(tokenizers, folder):
    raw = encoded(kind="mpegts", size=(320, 240))
    (folder / "cut.mp4").write_bytes(encoded()[:-200])  # without its index
    (folder / "whole.ts").write_bytes(raw)
    rows, data = rows_of(folder, {"prompt": "a", "videos": "whole.ts"}, {"prompt": "b", "videos": "cut.mp4"})
    with raises_error(DataError, "rows.jsonl row 2"):
        prompts(tokenizers["qwen2_5_vl"], rows, data)


@pytest.mark.parametrize(("column", "remedy"), [("videos", "data_args.videos"), ("audio", "audio")])
def test_columns_that_are_not_read_are_errors(tokenizers, folder, column, remedy):
    rows, data = rows_of(folder, {"prompt": "a", column: ["a.mp4"]}, videos=None)
    with raises_error(DataError, "row 1", column, remedy):
        prompts(tokenizers["qwen2_5_vl"], rows, data)


def test_models_without_videos_refuse_them(tokenizers, folder):
    rows, data = rows_of(folder, {"prompt": "a", "videos": "frames"})
    with raises_error(UnsupportedError, "row 1", "video"):
        prompts(tokenizers["llava"], rows, data)
