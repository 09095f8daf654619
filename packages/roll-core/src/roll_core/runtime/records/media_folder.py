"""Images and videos of a run's samples and recorded rollouts, each stored once: `<run>/media/<digest>`."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from roll_core.errors import RunDirectoryError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_core.types import Media

FOLDER = "media"


class MediaFolder:
    """Stores images and videos by digest, and refers to them in JSON. The folder exists once it has an image."""

    def __init__(self, run: Path, *, history: Path | None = None) -> None:
        """Store below the directory `run`. A resumed run links the images of `history`, the run that it continues."""
        self._folder = run / FOLDER
        for file in sorted((history / FOLDER).glob("*")) if history is not None else ():
            self._add(file.name, file)

    def put(self, media: Sequence[Media]) -> list[dict[str, Any]]:
        """Store images, and return what `get` restores them from. Raises `DataError`, `RunDirectoryError`."""
        for image in media:
            if not (self._folder / image.digest).exists():
                self._add(image.digest, image.read())
        return [
            {"digest": item.digest, "width": item.width, "height": item.height}
            | ({"frames": asdict(item.frames)} if item.frames is not None else {})
            for item in media
        ]

    def get(self, saved: Sequence[Mapping[str, Any]]) -> tuple[Media, ...]:
        """Images from the result of `put`. Their files are read when they are used."""
        from roll_core.types import Media, SampledFrames

        def frames(item: Mapping[str, Any]) -> SampledFrames | None:
            values = item.get("frames")
            return SampledFrames.from_json(values) if values else None

        return tuple(
            Media(**{**item, "frames": frames(item)}, path=str(self._folder / item["digest"])) for item in saved
        )

    def _add(self, name: str, content: Path | bytes) -> None:
        working = self._folder / f".{name}.{os.getpid()}"
        try:
            self._folder.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                working.write_bytes(content)
            else:
                _link(content, working)
            os.replace(working, self._folder / name)
        except OSError as error:
            raise RunDirectoryError(f"cannot store images in {self._folder}: {error.strerror or error}") from error


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)  # images do not change
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
