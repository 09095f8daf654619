"""Rows that stay on the disk: read when a step needs them, for data larger than memory.

    file of JSON lines       ─► offsets of its lines, 8 bytes a row ─┐
    Parquet, Arrow, the Hub  ─► cache of `datasets`, memory-mapped ──┴─► StreamedRows.read(numbers) ─► Rows

Any row can be read at any time. So a resumed run needs no more than the position of its last row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import numpy as np

from roll_core.data.rows import RowReader, Rows, file_names, format_of, is_hub_name, json_row
from roll_core.errors import DataError, install_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from roll_core.spec.config import DataArguments

Values = Mapping[str, Any]
_FIRST_ROWS = 100
"""Rows of a file whose columns all its rows have, as for `roll-core check`."""
_CHUNK_BYTES = 1 << 24


class _Table(Protocol):
    """Rows of a file, by their numbers from 0."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> list[Values]:
        """The rows, in the order of `indices`. Raises `DataError`."""


class StreamedRows:
    """Rows of the files in `data.file_name`, in order. Ids are not compared: a duplicate is no error."""

    def __init__(self, data: DataArguments, revisions: Mapping[str, str] | None = None) -> None:
        """Index the files. Data sets of the Hub are read at the commits in `revisions`. Raises `DataError`."""
        names = file_names(data)
        self.revisions: dict[str, str] = {}
        """Commits of the data sets of the Hub, by their names in `file_name`."""
        self._data = data
        self._readers = [RowReader(name, data) for name in names]
        self._tables = [self._table(name, revisions or {}) for name in names]
        self._starts = list(accumulate(map(len, self._tables), initial=0))
        num_rows = self._starts[-1]
        self._num_rows = num_rows if data.max_samples is None else min(num_rows, data.max_samples)
        if not self._num_rows:
            raise DataError(f"{', '.join(names)}: no rows")
        self._columns = [dict.fromkeys(c for row in self._first(file) for c in row) for file in range(len(names))]

    def __len__(self) -> int:
        return self._num_rows

    def read(self, numbers: Sequence[int]) -> Rows:
        """The rows with these numbers, from 0, in their order. Raises `DataError`."""
        by_file: dict[int, list[int]] = {}
        for number in numbers:
            by_file.setdefault(self._file(number), []).append(number)
        values: dict[int, Values] = {}
        for file, of_file in by_file.items():
            indices = [number - self._starts[file] for number in of_file]
            table = self._tables[file].read(indices)
            for number, index, row in zip(of_file, indices, table, strict=True):
                values[number] = {**dict.fromkeys(self._columns[file]), **self._readers[file].row(row, index + 1)}
        rows = Rows([], self._data)
        for number in numbers:
            file = self._file(number)
            rows.add(self._readers[file].shown, number - self._starts[file] + 1, values[number], id=str(number))
        rows.find_columns(column for columns in self._columns for column in columns)
        return rows

    def _file(self, number: int) -> int:
        return bisect_right(self._starts, number) - 1

    def _first(self, file: int) -> list[Values]:
        table, reader = self._tables[file], self._readers[file]
        first = table.read(range(min(len(table), _FIRST_ROWS)))
        return [reader.row(row, number) for number, row in enumerate(first, 1)]

    def _table(self, name: str, revisions: Mapping[str, str]) -> _Table:
        if is_hub_name(name):
            from roll_core.data.hub import HubRows

            source = HubRows(name, revisions.get(name))
            self.revisions[name] = source.revision
            return _DatasetTable(source.dataset())
        path = Path(name)
        kind = format_of(path) if self._data.dataset_type == "auto" else self._data.dataset_type
        if kind == "json":
            return _JsonLines(path)
        if kind not in ("parquet", "arrow"):
            raise DataError(f"{name}: streaming reads JSON lines, Parquet, Arrow and data sets of the Hub: convert it")
        return _DatasetTable(_in_cache(path, kind))


class _JsonLines:
    """Lines of an uncompressed file that are not blank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                first = file.read(4).removeprefix(b"\xef\xbb\xbf").lstrip()
                if first and not first.startswith(b"{"):
                    raise DataError(f"{path}: streaming reads one JSON object per line, uncompressed: convert it")
                self._starts = _line_starts(file)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, indices: Sequence[int]) -> list[Values]:
        rows: list[Values] = []
        with self._path.open("rb") as file:
            for index in indices:
                start = int(self._starts[index])
                file.seek(start)
                text = file.readline().decode("utf-8" if start else "utf-8-sig", "surrogateescape")
                rows.append(json_row(self._path, index + 1, text))
        return rows


def _line_starts(file: IO[bytes]) -> npt.NDArray[np.int64]:
    """Positions of the lines that have an object."""
    starts = [np.zeros(1, np.int64)]
    position = file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (position + 1))
        position += len(chunk)
    bounds = np.concatenate([*starts, np.full(1, position)])
    return bounds[:-1][np.diff(bounds) > len("\r\n")]


class _DatasetTable:
    """A memory-mapped data set of `datasets`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Sequence[int]) -> list[Values]:
        rows: list[Values] = self._dataset[list(indices)].to_pylist()
        return rows


def _in_cache(path: Path, kind: str) -> Any:
    """A file as a memory-mapped data set, which `datasets` writes into its cache once."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        import datasets
    except ImportError as error:
        message = f"{path}: streaming reads {kind} files with {install_command('roll-core[hub]')}, or write JSON lines"
        raise DataError(message) from error
    try:
        return datasets.load_dataset(kind, data_files=[str(path.resolve())], split="train")
    except Exception as error:  # of the library
        cause = error.__cause__ or error
        raise DataError(f"{path}: cannot be read as {kind}: {str(cause).splitlines()[0]}") from error
