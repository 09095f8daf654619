"""Images of rows: from a path, bytes, base64 or a record of the library datasets to `Media`, checked once, when read.

Engine and trainer decode the same bytes. An image that is not plain RGB, is rotated by its metadata or is too large is
converted here and stored as PNG in a temporary directory of the process; any other stays where it is. Memory has paths,
and the bytes of images that rows contain.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import tempfile
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from roll_core.data.rows import RowVideo, check_pixels, joined_parts
from roll_core.errors import DataError, MissingRequirementError
from roll_core.spec.rollout import IMAGE
from roll_core.types import Media, media_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from PIL import Image

    from roll_core.spec.config import DataArguments
    from roll_core.spec.environment import Message

KEYS = ("bytes", "path", "image", "url", "base64")
"""Keys of a mapping that may have an image: of the library datasets, of verl, and of content parts."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAX_DECODED_PIXELS = 89_478_485
"""Larger images are refused before they are decoded: Pillow's own limit against decompression bombs."""
MAX_FILE_BYTES = 4 << 30
"""Larger files are refused before they are read."""
ORIENTATION = 0x0112
"""EXIF's tag of an image's rotation."""
_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""Base64 of the first bytes of PNG, JPEG, GIF and WebP files."""


class OversizedImageError(DataError):
    """An image or a video exceeds a maximum of `data_args`, and `oversized_images` is `drop`."""


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """Numbers of pixels that images may have."""

    least: int = 0
    """Smaller images are enlarged."""
    most: int | None = None
    """Larger images are reduced, or an error with `drop`."""
    drop: bool = False

    @classmethod
    def of(cls, data: DataArguments, num_frames: int = 1) -> PixelLimits:
        """Those of images, or of each frame of a video with `num_frames` frames."""
        least, most = data.min_pixels or 0, data.max_pixels
        if num_frames > 1 and data.max_video_pixels is not None:
            share = max(least, data.max_video_pixels // num_frames)
            most = share if most is None else min(most, share)
        return cls(least, most, data.oversized_images == "drop")


def load_image(value: Any, where: str, data: DataArguments, folder: Path) -> Media:
    """The image that a row has as `value`: a path, bytes, base64, a data URL, a mapping with one of `KEYS`, or itself.

    `folder` is that of the row's file. Raises `DataError` for an image that is missing, corrupt, animated or outside of
    `data.image_roots`, for a URL without `data.allow_urls`, and `OversizedImageError`.
    """
    if isinstance(value, Media):
        return value
    if isinstance(value, dict):
        check_pixels(value, where)
    value = unwrapped(value, where)
    path = ""
    if isinstance(value, (bytes, bytearray)):
        raw = bytes(value)
    elif isinstance(value, str) and (text := base64_of(value)) is not None:
        raw = decoded_base64(text, where)
    elif isinstance(value, str) and value:
        try:
            path = str(allowed_path(value, where, data, folder))
            raw = file_bytes(Path(path))
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{where}: image {value!r:.200} cannot be read: {reason}") from error
    else:
        raise DataError(f"{where}: an image is {value!r:.60}, expected a path, bytes or base64")
    name = f"image {value!r:.200}" if path else f"an image of {len(raw)} bytes"
    with forgotten_if_broken(value):
        image, stored = _checked(raw, where, PixelLimits.of(data), name)
    digest = media_digest(stored)
    if stored is not raw:
        path = temporary_file(stored, digest, "png")
    return Media(digest=digest, width=image.width, height=image.height, path=path, data=b"" if path else stored)


def with_parts(messages: Sequence[Mapping[str, Any]], *, data: bool) -> list[dict[str, Any]]:
    """Messages in the format of OpenAI's API. A content with images or videos is a list of parts.

    Parts of type image have their image as a data URL (`image_url`) with `data`, and only their place without it. A
    video is an image for each of its frames with `data`, and a part of type video without it.
    """
    return [_with_parts(message, data) for message in messages]


def _with_parts(message: Mapping[str, Any], data: bool) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "media"}
    if not message.get("media"):
        return plain
    first, *texts = message["content"].split(IMAGE)
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for media, text in zip(message["media"], texts, strict=True):
        urls = _data_urls(media) if data else ()
        parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls] or [{"type": media.kind}]
        parts += [{"type": "text", "text": text}]
    return plain | {"content": [part for part in parts if part.get("text", " ")]}


def _data_urls(media: Media) -> list[str]:
    from PIL import Image

    files = [media.read()] if media.frames is None else [_png(frame) for frame in media.images()]
    kinds = [Image.open(io.BytesIO(file)).get_format_mimetype() for file in files]
    return [
        f"data:{kind};base64,{base64.b64encode(file).decode('ascii')}" for kind, file in zip(kinds, files, strict=True)
    ]


def image_media(image: Image.Image) -> Media:
    """An image in memory, such as an environment's rendering, as RGB."""
    raw = _png(in_rgb(image))
    return Media(digest=media_digest(raw), width=image.width, height=image.height, data=raw)


def received_image(value: Any) -> Media:
    """The image of a message from an environment or an agent: an image of Pillow, bytes, base64, a data URL, a mapping
    with one of them, or `Media`.

    Raises `DataError` for another value and for an image that is corrupt or animated. Paths and URLs are refused: the
    sender reads them, because the file may change until the sample is trained.
    """
    value = unwrapped(value, "message")
    if isinstance(value, Media):
        return value
    if isinstance(value, (bytes, bytearray)):
        return _received(bytes(value))
    if isinstance(value, str) and (text := base64_of(value)) is not None:
        return _received(decoded_base64(text, "message"))
    if isinstance(value, RowVideo):
        raise DataError("message: videos of environments and agents are not supported: send their frames as images")
    if callable(getattr(value, "convert", None)):
        return _received(_png(in_rgb(value)))
    raise DataError(
        f"message: an image is {value!r:.60}, expected an image of Pillow, bytes, base64 or a data URL: paths and URLs"
        " are not read"
    )


def received_message(message: Message) -> Message:
    """A message with its images as `Media` in `media`, and `IMAGE` at their places in the content, which is a text.

    `message` has the images in parts of its content, in the formats of OpenAI and Hugging Face, or is of this form.
    Raises `DataError`.
    """
    content = message.get("content")
    if isinstance(content, list):  # a text may contain the character of an image's place
        content = [{**part, "text": _placeless(part["text"])} if _is_text(part) else part for part in content]
    text, images = joined_parts(content, "message")
    images = (*images, *(message.get("media") or ()))
    if not images:
        return {**message, "content": text}
    if not isinstance(text, str) or text.count(IMAGE) != len(images):
        number = text.count(IMAGE) if isinstance(text, str) else 0
        raise DataError(f"message: the content has {number} places for images (U+FFFC), but there are {len(images)}")
    return {**message, "content": text, "media": tuple(map(received_image, images))}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _placeless(text: str) -> str:
    return text.replace(IMAGE, "\ufffd")


@lru_cache(maxsize=256)
def _received(raw: bytes) -> Media:
    """Equal images are one object: agents send all images again with each request."""
    image, stored = _checked(raw, "message", PixelLimits(), f"an image of {len(raw)} bytes")
    return Media(digest=media_digest(stored), width=image.width, height=image.height, data=stored)


def unwrapped(value: Any, where: str, keys: Sequence[str] = KEYS) -> Any:
    """The image or video in a mapping with one of `keys`, without its base64; any other value as it is.

    Raises `DataError` for base64 that is not valid.
    """
    while isinstance(value, dict):
        key = next((key for key in keys if value.get(key)), "")
        value = value.get(key)
        if key == "base64" and isinstance(value, str):
            return decoded_base64(base64_of(value) or value, where)
    return value


def decoded_base64(text: str, where: str) -> bytes:
    """The bytes of an image or a video. Raises `DataError`."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (ValueError, binascii.Error) as error:
        raise DataError(f"{where}: an image is not valid base64: {error}") from error


@cache
def _converted() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="roll-images-")


def temporary_file(data: bytes, digest: str, ending: str) -> str:
    """Path of a temporary file with a converted image or the frames of a video. It exists until the process ends."""
    path = Path(_converted().name, f"{digest}.{ending}")
    if not path.exists():
        working = path.with_suffix(f".{os.getpid()}")
        working.write_bytes(data)
        os.replace(working, path)
    return str(path)


def base64_of(text: str) -> str | None:
    """The base64 of a data URL, of an image or of a text that is too long for a path; None for a path."""
    if text.startswith("data:"):
        return text.partition(",")[2]
    is_base64 = text.startswith(_BASE64) or (len(text) > 1024 and "://" not in text)
    return text if is_base64 else None


def allowed_path(value: str, where: str, data: DataArguments, folder: Path, what: str = "image") -> Path:
    """The path of an image or a video, which is fetched if it is a URL and `allow_urls` is set.

    Raises `DataError` for a path outside of allowed directories, and for a URL that is not allowed or not reached.
    """
    scheme, _, rest = value.partition("://")
    if rest and scheme != "file":
        if not data.allow_urls:
            raise DataError(
                f"{where}: {what} {value!r:.200} is a URL: download it and name the file, or set data_args.allow_urls"
            )
        from roll_core.data.urls import fetched

        try:
            return fetched(value)
        except DataError as error:
            raise DataError(f"{where}: {what} {error}") from error
        except ValueError as error:  # a host that is none
            raise DataError(f"{where}: {what} {value!r:.200} is no URL: {error}") from error
    value = unquote(rest) if rest else value
    roots = [Path(root).expanduser().resolve() for root in data.image_roots] or [folder.resolve()]
    try:
        candidates = [(root / value).resolve() for root in roots]
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a loop of links
        raise DataError(f"{where}: {what} {value!r:.200} is no path: {error}") from error
    inside = [path for path in candidates if any(path.is_relative_to(root) for root in roots)]
    if not inside:
        raise DataError(
            f"{where}: {what} {value!r:.200} is outside of {', '.join(map(str, roots))}: name its directory in"
            " data_args.image_roots"
        )
    return next((path for path in inside if path.exists()), inside[0])


@contextmanager
def forgotten_if_broken(value: object) -> Iterator[None]:
    """Remove the file of the URL `value` from the cache if it is no image or video, so that the next run fetches it."""
    try:
        yield
    except OversizedImageError:
        raise
    except DataError:
        if isinstance(value, str) and "://" in value and base64_of(value) is None:
            from roll_core.data.urls import forget

            forget(value)
        raise


def file_bytes(path: Path) -> bytes:
    """Contents of an image's or video's file.

    Raises `OSError` for a file that cannot be read, that is not a regular one (a pipe would block), or is too large.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is a directory" if path.is_dir() else "it is a device or a pipe")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise OSError(f"it has more than {MAX_FILE_BYTES >> 30} GiB")
    return path.read_bytes()


def _checked(raw: bytes, where: str, limits: PixelLimits, name: str) -> tuple[Image.Image, bytes]:
    """The decoded image and the bytes to store: `raw` itself if they decode to the same pixels without a conversion."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise MissingRequirementError("images need the package pillow: pip install 'roll-core[images]'") from error

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(raw), formats=FORMATS)
            # The further pictures of a camera's JPEG (MPO) are previews and depth maps.
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
                raise DataError(f"{where}: {name} is animated ({image.n_frames} frames): store its frames as images")
            if image.width * image.height > MAX_DECODED_PIXELS:
                raise DataError(f"{where}: {name} has {image.width} x {image.height} pixels, which is too large")
            image.load()
            rotated = image.getexif().get(ORIENTATION, 1) != 1
            upright = ImageOps.exif_transpose(image) if rotated else image
            rgb = in_rgb(upright)
    except DataError:
        raise
    except UnidentifiedImageError as error:  # its text has an address in memory
        raise DataError(f"{where}: {name} is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise all kinds of errors for corrupt bytes
        raise DataError(f"{where}: {name} cannot be decoded: {error}") from error
    fitting = resized(rgb, where, limits)
    same = not rotated and fitting is rgb and image.mode in ("RGB", "L") and "transparency" not in image.info
    return fitting, raw if same else _png(fitting)


def resized(image: Image.Image, where: str, limits: PixelLimits) -> Image.Image:
    """The image with a number of pixels within the limits, if its shape permits it.

    Raises `OversizedImageError` if it has more, and `limits.drop`.
    """
    from PIL import Image

    num_pixels = image.width * image.height
    if limits.most is not None and num_pixels > limits.most:
        if limits.drop:
            size = f"{image.width} x {image.height}"
            raise OversizedImageError(
                f"{where}: an image has {size} pixels, more than {limits.most} (max_pixels, max_video_pixels)"
            )
        scale = math.sqrt(limits.most / num_pixels)
        width, height = (max(1, math.floor(side * scale)) for side in image.size)
    elif num_pixels < limits.least:
        scale = math.sqrt(limits.least / num_pixels)
        width, height = (math.ceil(side * scale) for side in image.size)
    else:
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def in_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB: transparent pixels on white, 16 bits scaled to 8."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is unknown: store it with 8 or 16 bits")
    if image.mode.startswith("I"):
        import numpy as np

        values = np.asarray(image, dtype=np.float64) / 65535.0 * 255.0
        return Image.fromarray(values.clip(0, 255).round().astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layered = image.convert("RGBA")
        white = Image.new("RGBA", layered.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layered).convert("RGB")
    return image.convert("RGB")


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return file.getvalue()
