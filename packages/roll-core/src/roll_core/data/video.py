"""Videos of rows: from a list of frames, an animation or an encoded file to `Media` with the frames that are sampled.

    row ── number of frames ──► indices, by the model's processor ──► these frames alone, decoded ──► TIFF, a page each

Frames are images of a directory or a list. Animations (GIF, WebP, PNG) are read by Pillow, other files by PyAV, whose
wheels contain FFmpeg and do not depend on the version of torch. Pages are lossless: trainer and engine read the same
pixels, and need no decoder of videos.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.data.media import (
    KEYS,
    MAX_DECODED_PIXELS,
    OversizedImageError,
    PixelLimits,
    allowed_path,
    base64_of,
    decoded_base64,
    file_bytes,
    forgotten_if_broken,
    in_rgb,
    load_image,
    resized,
    temporary_file,
    unwrapped,
)
from roll_core.data.rows import RATE_KEYS
from roll_core.errors import DataError, MissingRequirementError, one_line
from roll_core.types import Media, SampledFrames, media_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from PIL import Image

    from roll_core.data.rows import RowVideo
    from roll_core.data.video_processor import Qwen2VideoProcessor
    from roll_core.spec.config import DataArguments

VIDEO_KEYS = ("video", "video_url", *KEYS)
"""Keys of a mapping that may have a video."""
FRAME_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Files of a directory that are frames, in the order of their names."""
ANIMATIONS = ("GIF", "WEBP", "PNG")
"""Formats of Pillow that may have several frames with times."""
IMAGE_DESCRIPTION = 270
"""TIFF's tag with `SampledFrames`."""
FRAME_S = 0.1
"""Duration of the frames of animations that have none, as in browsers."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A video whose frames can be decoded."""

    num_frames: int
    fps: float
    decode: Callable[[frozenset[int]], Iterator[tuple[int, Image.Image]]]
    """Index and image in RGB of each of these frames."""


def load_video(video: RowVideo, where: str, data: DataArguments, folder: Path, processor: Qwen2VideoProcessor) -> Media:
    """The video of a row, with the frames that `processor` samples. `folder` is that of the row's file.

    Raises `DataError` for a video that is missing, corrupt, too short or outside of `data.image_roots`, and
    `OversizedImageError` for one that exceeds a maximum if `oversized_images` is `drop`.
    """
    value = unwrapped(video.value, where, VIDEO_KEYS)
    with forgotten_if_broken(value):
        return _load(value, video, where, data, folder, processor)


def _load(
    value: Any, video: RowVideo, where: str, data: DataArguments, folder: Path, processor: Qwen2VideoProcessor
) -> Media:
    drop = data.oversized_images == "drop"
    target_fps = data.video_fps if video.fps is None else video.fps
    fps = processor.fps if target_fps is None else target_fps
    _check_keys(video.value, where)
    source = _source(value, fps, where, data, folder)
    try:
        indices = processor.sample(source.num_frames, source.fps, target_fps=target_fps)
        if data.max_frames is not None and len(indices) > data.max_frames:
            if drop:
                raise OversizedImageError(f"{len(indices)} frames of a video are sampled, more than max_frames")
            most = data.max_frames
            indices = processor.sample(source.num_frames, source.fps, target_fps=target_fps, max_frames=most)
    except DataError as error:
        raise type(error)(f"{where}: {error}") from error
    try:
        decoded = dict(source.decode(frozenset(indices)))
    except DataError:
        raise
    except Exception as error:  # decoders raise all kinds of errors for corrupt bytes
        raise DataError(f"{where}: a video cannot be decoded: {one_line(error)}") from error
    if missing := sorted({*indices} - decoded.keys()):
        raise DataError(f"{where}: a video is truncated: frame {missing[0]} of {source.num_frames} is missing")
    if len(sizes := sorted({frame.size for frame in decoded.values()})) > 1:
        shown = " and ".join(f"{width} x {height}" for width, height in sizes[:2])
        raise DataError(f"{where}: the frames of a video have different sizes: {shown}")
    limits = PixelLimits.of(data, len(indices))
    frames = [resized(decoded[index], where, limits) for index in indices]
    return _stored(frames, SampledFrames(indices=indices, num_frames=source.num_frames, fps=source.fps))


def _check_keys(value: Any, where: str) -> None:
    """Raise `DataError` if a mapping has a key that nothing reads."""
    while isinstance(value, dict):
        known = ("type", *VIDEO_KEYS, *RATE_KEYS)
        if unread := [key for key, item in value.items() if item is not None and key not in known]:
            raise DataError(
                f"{where}: a video has the key {unread[0]!r}, which nothing reads: set data_args.video_fps, max_frames,"
                " max_pixels or max_video_pixels instead"
            )
        value = next((value[key] for key in VIDEO_KEYS if value.get(key)), None)


def _source(value: Any, fps: float, where: str, data: DataArguments, folder: Path) -> _Source:
    """The video of a path, bytes, base64 or a list of frames, which have `fps` frames per second."""
    if not isinstance(fps, (int, float)) or fps <= 0:
        raise DataError(f"{where}: a video has the rate (fps) {fps!r:.20}, expected a positive number")
    if isinstance(value, str) and value:
        text = base64_of(value)
        value = decoded_base64(text, where) if text else allowed_path(value, where, data, folder, "video")
    if isinstance(value, Path) and value.is_dir():
        value = [str(file) for file in sorted(value.iterdir()) if file.suffix.lower() in FRAME_ENDINGS]
    if isinstance(value, list):
        frames = value
        return _Source(
            len(frames), fps, lambda some: ((i, load_image(frames[i], where, data, folder).image()) for i in some)
        )
    if isinstance(value, Path):
        try:
            value = file_bytes(value)
        except OSError as error:
            raise DataError(f"{where}: video {str(value)!r:.200} cannot be read: {error.strerror or error}") from error
    if not isinstance(value, (bytes, bytearray)):
        raise DataError(f"{where}: a video is {value!r:.60}, expected a path, bytes, base64 or a list of frames")
    try:
        return _animation(bytes(value)) or _encoded(bytes(value))
    except MissingRequirementError as error:
        raise MissingRequirementError(f"{where}: {error}") from error
    except Exception as error:  # as in `load_video`
        raise DataError(f"{where}: a video of {len(value)} bytes cannot be decoded: {one_line(error)}") from error


def _animation(raw: bytes) -> _Source | None:
    """The video of an animated image; None for other files."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(raw), formats=ANIMATIONS)
    except UnidentifiedImageError:
        return None
    num_frames = int(getattr(image, "n_frames", 1))
    milliseconds = 0.0
    for index in range(num_frames):
        image.seek(index)
        image.load()  # otherwise a WebP has no duration
        milliseconds += float(image.info.get("duration") or 1000 * FRAME_S)

    def decode(indices: frozenset[int]) -> Iterator[tuple[int, Image.Image]]:
        for index in sorted(indices):
            image.seek(index)
            yield index, in_rgb(image)

    return _Source(num_frames, 1000 * num_frames / milliseconds, decode)


def _encoded(raw: bytes) -> _Source:
    """The video of a file that FFmpeg decodes."""
    from PIL import Image

    try:
        import av
    except ImportError as error:
        raise MissingRequirementError("videos need the package av: pip install 'roll-core[video]'") from error

    with av.open(io.BytesIO(raw), "r") as file:
        if not file.streams.video:
            raise ValueError("the file has no video")
        stream = file.streams.video[0]
        rate, num_frames = stream.average_rate or stream.guessed_rate, stream.frames
        if stream.width * stream.height > MAX_DECODED_PIXELS:
            raise ValueError(f"its frames have {stream.width} x {stream.height} pixels, which is too large")
        if not num_frames:  # the container does not count them
            num_frames = sum(1 for _ in file.decode(stream))
    if rate is None:
        raise ValueError("its frame rate is unknown")

    def decode(indices: frozenset[int]) -> Iterator[tuple[int, Image.Image]]:
        with av.open(io.BytesIO(raw), "r") as file:
            for index, frame in enumerate(file.decode(file.streams.video[0])):
                if index in indices:
                    # Cameras store the rotation apart from the pixels.
                    yield index, Image.fromarray(frame.to_ndarray(format="rgb24")).rotate(frame.rotation, expand=True)
                if index >= max(indices):
                    return

    return _Source(num_frames, float(rate), decode)


def _stored(frames: list[Image.Image], sampled: SampledFrames) -> Media:
    """The frames as a TIFF in a temporary file. Its description tells videos of equal frames but other times apart."""
    file = io.BytesIO()
    description = json.dumps(asdict(sampled))
    first, *others = frames
    first.save(
        file, "TIFF", save_all=True, append_images=others, compression="tiff_adobe_deflate", description=description
    )
    raw = file.getvalue()
    digest = media_digest(raw)
    return Media(
        digest=digest, width=first.width, height=first.height, frames=sampled, path=temporary_file(raw, digest, "tiff")
    )


def stored_video(url: str) -> Media:
    """The video of a data URL with the bytes of a `load_video`. Raises `DataError`."""
    from PIL import Image

    raw = decoded_base64(base64_of(str(url)) or "", "message")
    try:
        file: Any = Image.open(io.BytesIO(raw), formats=["TIFF"])
        frames = SampledFrames.from_json(json.loads(file.tag_v2[IMAGE_DESCRIPTION]))
    except Exception as error:  # as in `load_video`
        raise DataError(f"message: a video has not been prepared by a run: {one_line(error)}") from error
    return Media(digest=media_digest(raw), width=file.width, height=file.height, frames=frames, data=raw)
