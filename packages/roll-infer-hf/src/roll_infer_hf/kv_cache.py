"""KV cache with one contiguous region per row, so that a dense batch of rows is a view.

One buffer is allocated once and holds every shape: growing moves the content within it, so that no second buffer is
alive meanwhile. On a host, memory pages that are never written use no physical memory.

Layout `[layer, key|value, row, head, position, D]`. Rows `[0, N)` and positions `[0, W)` of one layer are N × heads
matrices `[W, D]` at a constant stride. A batched GEMM reads them without a copy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

ALIGNMENT = 16
"""Multiple to which the positions of a row are rounded up."""


def aligned(num_positions: int) -> int:
    """Positions of a row that is allocated for `num_positions`."""
    return -(-num_positions // ALIGNMENT) * ALIGNMENT


class KVCache:
    """Keys and values of up to `rows` sequences of up to `width` positions; `reserve` changes the shape, keeping the
    content."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_bytes: int,
    ) -> None:
        """`max_bytes` is the size of the buffer, which `reserve` allocates."""
        self.num_layers, self.num_heads, self.head_dim = num_layers, num_heads, head_dim
        self.dtype, self.device = dtype, device
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._buffer: Tensor = torch.empty(0, dtype=dtype, device=device)
        self._finite_rows = self._finite_width = 0
        self._view(0, 0)

    @property
    def token_bytes(self) -> int:
        """Bytes of one position of one row."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * self.dtype.itemsize

    def reserve(self, rows: int, width: int, used_rows: int, used_width: int) -> None:
        """Make room for `rows` × `width`; keeps the first `used_rows` rows and `used_width` positions.

        Has as many rows of this width as the buffer holds. Raises `ValueError` if these are too few.
        """
        width = aligned(width)
        if rows <= self.rows and width <= self.width:
            return
        fitting = min(self._max_rows, self._max_bytes // (width * self.token_bytes))
        if rows > fitting:
            raise ValueError(f"{rows} rows of {width} positions exceed the {self._max_bytes} bytes of the KV cache")
        if not self._buffer.numel():
            self._buffer = torch.empty(self._max_bytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        old = self._kv.flatten(0, 1)
        self._view(fitting, width)
        self._finite_rows, self._finite_width = used_rows, used_width
        if used_rows:
            new = self._kv.flatten(0, 1)
            # Regions that grow move away from the beginning: the last one first, so that none is overwritten.
            order = range(len(new)) if new[0].numel() < old[0].numel() else reversed(range(len(new)))
            for i in order:
                new[i, :used_rows, :, :used_width] = old[i, :used_rows, :, :used_width].clone()

    def expose(self, rows: int, width: int) -> None:
        """Zero-fill unwritten memory up to `rows` and `width`: a dense batch reads past short rows, and needs finite
        values there."""
        if rows > self._finite_rows:
            self._kv[:, :, self._finite_rows : rows, :, : self._finite_width] = 0
            self._finite_rows = rows
        if width > self._finite_width:
            width = min(width + ALIGNMENT, self.width)
            self._kv[:, :, : self._finite_rows, :, self._finite_width : width] = 0
            self._finite_width = width

    def matrices(self, layer: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first rows and positions as views `[rows * heads, width, D]`, for a batched GEMM."""
        shape = (rows * self.num_heads, width, self.head_dim)
        stride = (self.width * self.head_dim, self.head_dim, 1)
        size = self.rows * self.num_heads * self.width * self.head_dim
        begin = 2 * layer * size
        return self._kv.as_strided(shape, stride, begin), self._kv.as_strided(shape, stride, begin + size)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` to row `target`."""
        self._kv[:, :, target, :, :length] = self._kv[:, :, source, :, :length]

    def take(self, other: KVCache, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of row `source` of another cache to row `target`."""
        self._kv[:, :, target, :, :length] = other._kv[:, :, source, :, :length]

    def clear(self, rows: npt.NDArray[np.int64]) -> None:
        """Set the keys and values of rows to zero."""
        for row in rows:
            self._kv[:, :, int(row), :, : self._finite_width] = 0

    def forget(self) -> None:
        """Discard the content; the memory stays allocated."""
        self._finite_rows = self._finite_width = 0

    def release(self) -> None:
        """Free the memory of the cache."""
        self._buffer = self._buffer.new_empty(0)
        self._finite_rows = self._finite_width = 0
        self._view(0, 0)

    def _view(self, rows: int, width: int) -> None:
        self.rows, self.width = rows, width
        shape = (self.num_layers, 2, rows, self.num_heads, width, self.head_dim)
        self._kv: Tensor = self._buffer[: math.prod(shape)].view(shape)
        self.keys: list[Tensor] = [layer[0] for layer in self._kv]
        """Keys by layer, each a view `[row, head, position, D]`; `values` has the same layout."""
        self.values: list[Tensor] = [layer[1] for layer in self._kv]
