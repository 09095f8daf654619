"""Safetensors files of bounded size, written as tensors arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor


class ShardFiles:
    """Writer of a sequence of safetensors files of bounded size."""

    def __init__(self, folder: Path, name: str, max_bytes: int, metadata: Mapping[str, str] | None = None) -> None:
        """`name` is a format string for file names, with a placeholder for the number, which starts at 1."""
        self._folder, self._name, self._max_bytes = folder, name, max_bytes
        self._metadata = dict(metadata) if metadata else None
        self._pending: dict[str, Tensor] = {}
        self.pending_bytes = 0
        """Bytes not yet written."""
        self.files: list[tuple[str, list[str]]] = []
        """Name of each written file, and the names of its tensors."""
        self.num_bytes = 0
        """Total size of all tensors so far, written or not."""

    def add(self, tensors: Mapping[str, Tensor]) -> str:
        """Add tensors, copied to the host or written before this returns. All go to the file whose name is returned."""
        added = sum(tensor.nbytes for tensor in tensors.values())
        if self._pending and self.pending_bytes + added > self._max_bytes:
            self.flush()
        # Host tensors are copied too: a gathered tensor is valid only until the next gather.
        self._pending |= {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
        self.pending_bytes += added
        self.num_bytes += added
        return self._name.format(len(self.files) + 1)

    def flush(self) -> None:
        """Write all pending tensors to a file."""
        from safetensors.torch import save_file

        if not self._pending:
            return
        file = self._name.format(len(self.files) + 1)
        save_file(self._pending, self._folder / file, metadata=self._metadata)
        self.files.append((file, list(self._pending)))
        self._pending, self.pending_bytes = {}, 0
