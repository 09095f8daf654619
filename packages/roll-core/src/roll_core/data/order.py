"""Order of rows: a new permutation in each epoch, computable for any step without the previous ones."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt


class RowOrder:
    """Endless seeded order of `num_rows` rows, epoch after epoch.

    Row `i` of the order is a pure function of `(num_rows, seed, i)`, so a resumed run continues exactly where the
    interrupted run stopped. A batch may span two epochs. Every epoch contains each row exactly once. Raises `DataError`
    for fewer than one row.
    """

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool = True) -> None:
        if num_rows < 1:
            raise DataError("there are no rows to go through; is the data empty, or was every row left out?")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle

    def batch(self, step: int, size: int) -> list[int]:
        """Rows of batch `step` (from 0), if every batch has `size` rows."""
        return self.rows(step * size, size)

    def rows(self, start: int, count: int) -> list[int]:
        """Rows at positions `start` to `start + count` (exclusive) of the endless order."""
        return [row for row, _ in self.visits(start, count)]

    def visits(self, start: int, count: int) -> list[tuple[int, int]]:
        """Same as `rows`, with the epoch of each row: `(row, epoch)`."""
        found: list[tuple[int, int]] = []
        position = start
        while len(found) < count:
            epoch, offset = divmod(position, self.num_rows)
            taken = self._epoch(epoch)[offset : offset + count - len(found)]
            found.extend((int(row), epoch) for row in taken)
            position += len(taken)
        return found

    def _epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        return _permutation(self.num_rows, self.seed, epoch) if self.shuffle else np.arange(self.num_rows)


@lru_cache(maxsize=16)
def _permutation(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
