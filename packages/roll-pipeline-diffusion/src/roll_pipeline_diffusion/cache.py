"""Arrays on disk under a hash of what they were computed from, such as text embeddings and latents of images."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[np.generic]]

log = logging.getLogger(__name__)


class ArrayCache:
    """Files `<directory>/<key>.safetensors`. Several processes may use it at the same time."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def get(self, key: str) -> dict[str, NDArray[np.generic]] | None:
        """Arrays of `key`; None if there are none, or if the file is damaged."""
        from safetensors import SafetensorError, safe_open

        file = self._file(key)
        try:
            with safe_open(file, "np") as stored:
                arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
                digest = (stored.metadata() or {}).get("digest")
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError) as error:
            log.warning("%s is damaged and computed again: %s", file, error)
            return None
        if digest != _digest(arrays):
            log.warning("%s is damaged and computed again: its digest differs", file)
            return None
        return arrays

    def put(self, key: str, arrays: Arrays) -> None:
        """Store arrays. A reader sees all of them or none."""
        import numpy as np
        from safetensors.numpy import save

        plain = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
        self.directory.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(save(plain, {"digest": _digest(plain)}))
            Path(name).replace(self._file(key))
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _file(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"


def key_of(**parts: Any) -> str:
    """Hash of JSON values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def files_identity(directory: Path, folders: Iterable[str]) -> str:
    """Hash of the files in some folders of a model's directory.

    Configs and vocabularies count by content; weights by name, size and time of modification.
    """
    entries: list[list[Any]] = []
    for folder in sorted(folders):
        for file in sorted(path for path in (directory / folder).rglob("*") if path.is_file()):
            status = file.stat()
            name = file.relative_to(directory).as_posix()
            if file.suffix in (".json", ".txt"):
                entries.append([name, hashlib.sha256(file.read_bytes()).hexdigest()])
            else:
                entries.append([name, status.st_size, status.st_mtime_ns])
    return key_of(files=entries)


def _digest(arrays: Arrays) -> str:
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        total.update(f"{name}:{array.dtype}:{array.shape}:".encode())
        total.update(array.tobytes())
    return total.hexdigest()
