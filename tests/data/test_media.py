"""Images of rows: every file that a run may meet is an image with known pixels, an error with its row, or a drop."""

import base64
import io
import os
import pickle
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from roll_core.data import urls
from roll_core.data.media import OversizedImageError, load_image
from roll_core.errors import DataError
from roll_core.runtime.cluster.executors import wire
from roll_core.spec.config import DataArguments
from roll_core.types import Media, media_digest
from roll_testing.errors import raises_error

WHERE = "a.jsonl row 3"
RED, WHITE = (255, 0, 0), (255, 255, 255)


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def load(value, folder=Path(), **keys):
    return load_image(value, WHERE, DataArguments(images="image", **keys), folder)


def pixels(media):
    return np.asarray(media.image())


def solid(mode, colour, size=(3, 2)):
    return Image.new(mode, size, colour)


# -- where an image is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        lambda raw: raw,
        bytearray,
        lambda raw: {"bytes": raw, "path": "gone.png"},
        lambda raw: {"bytes": None, "path": "a.png"},
        lambda raw: {"image": raw},
        lambda raw: {"url": "data:image/png;base64," + base64.b64encode(raw).decode()},
        lambda raw: base64.b64encode(raw).decode(),
        lambda raw: base64.encodebytes(raw).decode(),
        lambda raw: "data:image/png;base64," + base64.b64encode(raw).decode(),
        lambda raw: "a.png",
        lambda raw: "./folder/../a.png",
    ],
)
def test_an_image_is_read_from_every_form(tmp_path, value):
    raw = encoded(solid("RGB", RED))
    (tmp_path / "a.png").write_bytes(raw)
    media = load(value(raw), tmp_path)
    assert (media.digest, media.width, media.height) == (media_digest(raw), 3, 2)
    assert media.read() == raw
    assert (pixels(media) == RED).all()


def test_file_urls_are_paths(tmp_path):
    (tmp_path / "a b.png").write_bytes(encoded(solid("RGB", RED)))
    assert load(f"file://{tmp_path}/a%20b.png", tmp_path).path == str(tmp_path / "a b.png")


@pytest.mark.parametrize("url", ["https://example.org/a.png", "http://a", "s3://bucket/a.png"])
def test_urls_are_refused(url):
    with raises_error(DataError, WHERE, url, "URL", "allow_urls"):
        load(url)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append(self.path)
        reply = self.server.replies.get(self.path, 404)
        if isinstance(reply, str):
            self.send_response(302)
            self.send_header("Location", reply)
        elif isinstance(reply, int):
            self.send_response(reply)
        else:
            self.send_response(200)
        if isinstance(reply, bytes):
            self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        if isinstance(reply, bytes):
            self.wfile.write(reply[: self.server.sent])
        if reply is None:  # no byte, and no end
            self.server.is_over.wait()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """HTTP server with `replies` by path: bytes, a status, a place to go to, or None for silence."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.replies, server.paths, server.is_over, server.sent = {}, [], threading.Event(), None
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.is_over.set()
        server.shutdown()


@pytest.mark.parametrize("form", [str, lambda url: {"url": url}, lambda url: {"bytes": None, "path": url}])
def test_urls_are_fetched_once_if_they_are_allowed(server, form):
    raw = encoded(solid("RGB", RED))
    server.replies |= {"/a.png?size=1": "/moved", "/moved": raw}
    url = form(f"{server.url}/a.png?size=1")
    media = load(url, allow_urls=True)
    server.replies["/moved"] = encoded(solid("RGB", WHITE))  # the cache keeps what the first run has read
    assert load(url, allow_urls=True) == media
    assert (media.digest, media.read()) == (media_digest(raw), raw)
    assert server.paths == ["/a.png?size=1", "/moved"]


def test_a_download_that_ends_early_is_not_kept(server):
    server.replies["/a.png"], server.sent = encoded(solid("RGB", RED)), 50
    with raises_error(DataError, WHERE, "early"):
        load(f"{server.url}/a.png", allow_urls=True)
    server.sent = None
    assert load(f"{server.url}/a.png", allow_urls=True).width == 3


@pytest.mark.parametrize("reply", [b"<html>busy</html>", encoded(solid("RGB", RED))[:50], b""])
def test_a_reply_that_is_no_image_is_not_kept(server, reply):
    server.replies["/a.png"] = reply
    with raises_error(DataError, WHERE):
        load(f"{server.url}/a.png", allow_urls=True)
    server.replies["/a.png"] = encoded(solid("RGB", RED))
    assert load(f"{server.url}/a.png", allow_urls=True).width == 3
    assert len(server.paths) == 2


def test_an_oversized_image_of_a_url_is_kept(server):
    server.replies["/a.png"] = encoded(solid("RGB", RED))
    with raises_error(OversizedImageError, WHERE):
        load(f"{server.url}/a.png", allow_urls=True, max_pixels=4, oversized_images="drop")
    assert load(f"{server.url}/a.png", allow_urls=True).width == 3
    assert len(server.paths) == 1


def test_long_urls_are_no_base64(server):
    server.replies[long := "/a?" + "signature" * 200] = encoded(solid("RGB", RED))
    assert load(server.url + long, allow_urls=True).width == 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (404, "404"),
        (503, "503"),
        (None, "0.1 s"),
        (b"a" * 101, "MiB"),
        (b"<html>", "/reply"),
        ("/reply", "redirects"),
        ("file:///etc/passwd", "file:"),
        ("ftp://127.0.0.1/a.png", "ftp:"),
    ],
)
def test_urls_without_an_image_are_located_errors(server, monkeypatch, reply, reason):
    monkeypatch.setattr(urls, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(urls, "MAX_BYTES", 100)
    server.replies["/reply"] = reply
    with raises_error(DataError, WHERE, reason):
        load(f"{server.url}/reply", allow_urls=True)


@pytest.mark.parametrize("url", ["http://", "https://127.0.0.1:1/a.png", "s3://bucket/a.png", "http://[::1/a"])
def test_urls_that_lead_nowhere_are_located_errors(server, url):
    with raises_error(DataError, WHERE, url):
        load(url, allow_urls=True)


@pytest.mark.parametrize("value", [None, "", 3, [], {}, {"bytes": None, "path": None}, ["a.png"], 1.5])
def test_values_that_are_no_image_are_refused(value):
    with raises_error(DataError, WHERE):
        load(value)


@pytest.mark.parametrize("name", ["gone.png", "a" * 300, "a\0b.png", ".", "loop.png"])
def test_missing_files_are_refused(tmp_path, name):
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    with raises_error(DataError, WHERE):
        load(name, tmp_path)


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # it has no writer: a reader would block
    for name, root in (("pipe.png", tmp_path), ("zero", Path("/dev"))):
        with raises_error(DataError, WHERE, name):
            load(name, tmp_path, image_roots=[str(root)])


def test_files_of_many_gigabytes_are_refused(tmp_path):
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(5 << 30)  # sparse
    with raises_error(DataError, WHERE, "a.png", "GiB"):
        load("a.png", tmp_path)


@pytest.mark.parametrize("text", ["data:image/png;base64,%%%", "data:image/png;base64,", "data:image/svg+xml,<svg/>"])
def test_data_urls_without_an_image_are_refused(text):
    with raises_error(DataError, WHERE):
        load(text)


@pytest.mark.parametrize("name", ["../secret.png", "link.png", "folder/../../secret.png", "{outside}/secret.png"])
def test_paths_outside_of_the_roots_are_refused(tmp_path, name):
    (tmp_path / "secret.png").write_bytes(encoded(solid("RGB", RED)))
    inside = tmp_path / "data"
    (inside / "folder").mkdir(parents=True)
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    with raises_error(DataError, WHERE, "image_roots"):
        load(name.format(outside=tmp_path), inside)
    assert load(name.format(outside=tmp_path), inside, image_roots=[str(inside), str(tmp_path)]).width == 3


def test_relative_paths_begin_at_the_roots_in_order(tmp_path):
    for number, folder in enumerate(("first", "second"), 1):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{number}.png").write_bytes(encoded(solid("RGB", RED, (number, 1))))
    roots = [str(tmp_path / "first"), str(tmp_path / "second")]
    assert [load(f"{number}.png", image_roots=roots).width for number in (1, 2)] == [1, 2]


# -- what an image contains --------------------------------------------------------------------------------------------


def png_with_size(width, height):
    """PNG of a few bytes that declares a size."""

    def chunk(kind, content):
        crc = zlib.crc32(kind + content)
        return len(content).to_bytes(4, "big") + kind + content + crc.to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    begin = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return begin + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def gif(*colours):
    first, *rest = [solid("RGB", colour) for colour in colours]
    return encoded(first, "GIF", save_all=True, append_images=rest)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not an image",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        encoded(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")[:900],
        encoded(Image.effect_noise((64, 64), 50), "PNG")[:200],
        png_with_size(20_000, 20_000),
        png_with_size(9_500, 9_500),
        gif(RED, WHITE),
        encoded(solid("F", 0.5), "TIFF"),
    ],
    ids=["empty", "text", "svg", "cut jpeg", "cut png", "bomb", "large", "animated", "floats"],
)
def test_files_that_cannot_be_an_image_are_refused(raw):
    with raises_error(DataError, WHERE):
        load(raw)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (encoded(solid("RGBA", (255, 0, 0, 255))), RED),
        (encoded(solid("RGBA", (0, 0, 0, 0))), WHITE),
        (encoded(solid("LA", (0, 0))), WHITE),
        (encoded(solid("RGB", RED), transparency=RED), WHITE),
        (encoded(solid("L", 0), transparency=0), WHITE),
        (encoded(solid("P", 0), "GIF", transparency=0), WHITE),
        (encoded(solid("1", 1)), WHITE),
        (encoded(solid("L", 7)), (7, 7, 7)),
        (encoded(Image.fromarray(np.full((2, 3), 65535, dtype=np.uint16))), WHITE),
        (encoded(Image.fromarray(np.full((2, 3), 257 * 9, dtype=np.uint16))), (9, 9, 9)),
        (encoded(solid("CMYK", (0, 0, 0, 0)), "JPEG"), WHITE),
        (encoded(solid("CMYK", (0, 0, 0, 255)), "TIFF"), (0, 0, 0)),
        (encoded(solid("RGB", RED), "BMP"), RED),
        (encoded(solid("RGB", RED), "WEBP", lossless=True), RED),
        (gif(RED), RED),
    ],
    ids=[
        *("alpha", "clear", "grey alpha", "RGB key", "grey key", "palette key", "bit", "grey"),
        *("16 bits", "16 bits of 9", "CMYK JPEG", "CMYK TIFF", "BMP", "WebP", "one frame"),
    ],
)
def test_every_mode_becomes_rgb(raw, expected):
    media = load(raw)
    assert (media.width, media.height) == (3, 2)
    assert np.abs(pixels(media).astype(int) - np.asarray(expected)).max() <= 1


def test_further_pictures_of_a_cameras_file_are_ignored():
    first, preview = solid("RGB", (200, 10, 10), (16, 16)), solid("RGB", WHITE, (8, 8))
    raw = encoded(first, "MPO", save_all=True, append_images=[preview])
    assert (load(raw).width, load(raw).read() == raw) == (16, True)


def test_rotation_of_the_metadata_is_applied():
    image = Image.fromarray(np.arange(18, dtype=np.uint8).reshape(2, 3, 3) * 10)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90 degrees clockwise
    media = load(encoded(image, exif=exif))
    assert (media.width, media.height) == (2, 3)
    np.testing.assert_array_equal(pixels(media), np.rot90(np.asarray(image), -1))


def test_images_of_one_pixel_are_read():
    media = load(encoded(solid("RGB", RED, (1, 1))))
    assert pixels(media).tolist() == [[[255, 0, 0]]]


def test_large_images_are_reduced_or_dropped():
    raw = encoded(solid("RGB", RED, (100, 50)))
    media = load(raw, max_pixels=200)
    assert (media.width, media.height) == (20, 10)
    assert (pixels(media) == RED).all()
    assert load(raw, max_pixels=5000).read() == raw
    with pytest.raises(OversizedImageError):
        load(raw, max_pixels=4999, oversized_images="drop")
    assert load(encoded(solid("RGB", RED, (1000, 1))), max_pixels=10).height == 1


def test_small_images_are_enlarged_to_the_budget():
    raw = encoded(solid("RGB", RED, (10, 20)))
    media = load(raw, min_pixels=800, max_pixels=900)
    assert (media.width, media.height) == (20, 40)
    assert (pixels(media) == RED).all()
    assert load(raw, min_pixels=200).read() == raw
    with raises_error(ValidationError, "min_pixels", "max_pixels"):
        DataArguments(images="image", min_pixels=901, max_pixels=900)


# -- memory and processes ----------------------------------------------------------------------------------------------


def test_media_of_files_keep_paths_and_travel_as_bytes(tmp_path):
    raw = encoded(solid("RGB", RED))
    (tmp_path / "a.png").write_bytes(raw)
    (tmp_path / "alpha.png").write_bytes(encoded(solid("RGBA", RED)))
    for name in ("a.png", "alpha.png"):
        media = load(name, tmp_path)
        assert (media.path != "", media.data) == (True, b"")
        for copy in (pickle.loads(pickle.dumps(media)), wire.loads(wire.dumps(media))):
            assert (copy.digest, copy.path) == (media.digest, "")
            assert copy.read() == media.read()
    assert load("a.png", tmp_path).path == str(tmp_path / "a.png")


@pytest.mark.parametrize("codec", [pickle, wire])
def test_messages_have_one_copy_of_an_images_bytes(codec):
    first, other = (load(encoded(Image.effect_noise((64, 64), 50))) for _ in range(2))
    message = [{"media": (first, other), "id": id} for id in range(8)]
    packed = codec.dumps(message)
    assert len(packed) < 1.1 * len(codec.dumps((first, other))) + 800
    received = codec.loads(packed)
    assert received == message
    assert [[media.data for media in part["media"]] for part in received] == [[first.data, other.data]] * 8


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: file.write_bytes(b"other")])
def test_files_that_change_during_the_run_are_reported(tmp_path, change):
    (tmp_path / "a.png").write_bytes(encoded(solid("RGB", RED)))
    media = load("a.png", tmp_path)
    change(tmp_path / "a.png")
    with raises_error(DataError, "a.png"):
        media.read()
    assert isinstance(media, Media)
