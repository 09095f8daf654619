"""Safetensors files of bounded size, written while tensors arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


class PieceFiles:
    """Safetensors files, one after another."""

    def __init__(self, folder: Path, name: str, max_bytes: int, metadata: Mapping[str, str] | None = None) -> None:
        """`name` is the files', with a place for their number, which counts from 1."""
        self._folder, self._name, self._max_bytes = folder, name, max_bytes
        self._metadata = dict(metadata) if metadata else None
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self.files: list[tuple[str, list[str]]] = []
        """Names of those that are written, and of the tensors in each."""
        self.num_bytes = 0
        """Of all tensors so far."""

    @property
    def holds(self) -> int:
        """Bytes that are not yet written."""
        return self._pending_bytes

    def add(self, tensors: Mapping[str, Tensor]) -> str:
        """Copied, or written, before this returns. They stand in the file of this name, all of them."""
        added = sum(each.nbytes for each in tensors.values())
        if self._pending and self._pending_bytes + added > self._max_bytes:
            self.flush()
        # Copies also of what is on the host already: what was gathered is good only until the next is.
        self._pending |= {key: each.detach().to("cpu", copy=True).contiguous() for key, each in tensors.items()}
        self._pending_bytes += added
        self.num_bytes += added
        return self._name.format(len(self.files) + 1)

    def flush(self) -> None:
        """Write what is not yet written."""
        from safetensors.torch import save_file

        if not self._pending:
            return
        file = self._name.format(len(self.files) + 1)
        save_file(self._pending, self._folder / file, metadata=self._metadata)
        self.files.append((file, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0
