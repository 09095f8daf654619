"""Reads rows from files with Hugging Face `datasets`, and names the file, row and column of any error.

Nothing is cached between runs: changes of a file take effect, and no cache grows in the home directory.
"""

from __future__ import annotations

import csv
import difflib
import glob
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from roll_core.data.row_files import (
    JSON_ENDINGS,
    check_csv,
    check_json,
    first_arrow_rows,
    first_csv_rows,
    first_json_rows,
    separator_of,
    short,
    wrong_json_row,
)
from roll_core.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from roll_core.spec.config import DataArguments

ENDINGS = {
    **dict.fromkeys(JSON_ENDINGS, "json"),
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
Message = dict[str, str]
"""Chat message with the keys `role` and `content`."""
FileRows = tuple[str, Sequence[str], Sequence[Mapping[str, Any]]]
"""File name, columns and rows of one file."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row with its columns' values, a stable id, a domain (`tag`), and its location for error messages."""

    id: str
    tag: str
    where: str
    """Location such as `train.jsonl row 12`, counted from 1."""
    values: Mapping[str, Any]


class Rows(Sequence[Row]):
    """All rows of some files, in order. Raises `DataError` for duplicate ids."""

    def __init__(self, parts: Sequence[FileRows], data: DataArguments) -> None:
        self._data = data
        self._places: list[tuple[str, int]] = []
        self._values: list[Mapping[str, Any]] = []
        columns: dict[str, None] = {}
        for name, names, rows in parts:
            columns.update(dict.fromkeys(names))
            for number, values in enumerate(rows, start=1):
                if data.max_samples is not None and len(self._values) >= data.max_samples:
                    break
                self._places.append((name, number))
                self._values.append(values)
        self.columns = tuple(columns)
        self._check_ids()

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        name, number = self._places[index]
        values = self._values[index]
        return Row(
            id=self._id(index),
            tag=str(values.get(self._data.tag) or ""),
            where=f"{name} row {number}",
            values=values,
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[i] for i in range(len(self)))

    def _id(self, index: int) -> str:
        value = self._values[index].get(self._data.id)
        return str(index) if value is None else str(value)

    def _check_ids(self) -> None:
        if self._data.id not in self.columns:
            return
        seen: dict[str, int] = {}
        for index in range(len(self)):
            first = seen.setdefault(self._id(index), index)
            if first != index:
                raise DataError(
                    f"{self[index].where}: column {self._data.id!r} has {self._id(index)!r}, as"
                    f" {self[first].where} has; ids must differ (data_args.id names another column)"
                )


def read_rows(data: DataArguments) -> Rows:
    """Read at most `max_samples` rows of the files in `data.file_name`, in order. Raises `DataError`."""
    names = file_names(data)
    if not names:
        raise DataError("data_args.file_name is not given: which files have the rows?")
    rows = Rows([_read_file(Path(name), data.dataset_type) for name in names], data)
    if not len(rows):
        raise DataError(f"{', '.join(names)}: no rows")
    return rows


def text_of(row: Row, column: str, rows: Rows) -> str:
    """Text of a column. Raises `DataError`, naming the row or the nearest existing column."""
    need_column(column, rows)
    value = row.values.get(column)
    if not isinstance(value, str):
        found = "nothing" if value is None else f"{type(value).__name__} {short(value)}"
        raise DataError(f"{row.where}: column {column!r} must be text, but has {found}")
    return value


def are_chats(data: DataArguments) -> bool:
    """True if rows have roles: a column of messages, or a system message before the prompt."""
    return data.messages is not None or data.system is not None


def messages_of(row: Row, data: DataArguments, rows: Rows, *, response: bool) -> list[Message]:
    """Convert a row to chat messages.

    With `response`, the last message is the assistant's. Without it, trailing assistant messages are dropped. Raises
    `DataError`.
    """
    if data.messages is None:
        messages = [{"role": "user", "content": text_of(row, data.prompt, rows)}]
        if response:
            messages.append({"role": "assistant", "content": text_of(row, data.response, rows)})
        return _with_system(messages, row, data, rows)
    messages = stored_messages(row, data, rows)
    if response and messages[-1]["role"] != "assistant":
        raise DataError(f"{row.where}: column {data.messages!r} must end with a message of the assistant")
    while not response and messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if all(each["role"] == "system" for each in messages):
        raise DataError(f"{row.where}: column {data.messages!r} has nothing to answer")
    return messages


def has_response(row: Row, data: DataArguments, rows: Rows) -> bool:
    """True if the row has a response: a value in its column, or a last message of the assistant. Raises `DataError`."""
    if data.messages is None:
        return row.values.get(data.response) is not None
    return stored_messages(row, data, rows)[-1]["role"] == "assistant"


def need_column(column: str, rows: Rows) -> None:
    """Raise `DataError` unless the rows have the column."""
    if column not in rows.columns:
        close = difflib.get_close_matches(column, rows.columns, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(map(repr, rows.columns))}"
        raise DataError(f"{rows[0].where.rsplit(' row ', 1)[0]}: no column {column!r}; {hint}")


def _with_system(messages: list[Message], row: Row, data: DataArguments, rows: Rows) -> list[Message]:
    if data.system is None:
        return messages
    return [{"role": "system", "content": text_of(row, data.system, rows)}, *messages]


def stored_messages(row: Row, data: DataArguments, rows: Rows) -> list[Message]:
    """All messages of the row: its system column, then its `messages` column (a list or JSON). Raises `DataError`."""
    column = data.messages
    if column is None:
        raise DataError("data_args.messages names no column")
    need_column(column, rows)
    value = row.values.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(f"{row.where}: column {column!r} is text but not JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise DataError(f"{row.where}: column {column!r} must be a list of messages, but has {short(value)}")
    messages: list[Message] = []
    for at, each in enumerate(value, start=1):
        if (
            not isinstance(each, dict)
            or not isinstance(each.get("role"), str)
            or not isinstance(each.get("content"), str)
        ):
            raise DataError(
                f"{row.where}: message {at} of column {column!r} must have a role and a content, both text,"
                f" but is {short(each)}"
            )
        messages.append({"role": each["role"], "content": each["content"]})
    return _with_system(messages, row, data, rows)


def file_names(data: DataArguments) -> list[str]:
    """File names of `data`. Names are literal: `*`, `?` and `[` are no wildcards."""
    return [data.file_name] if isinstance(data.file_name, str) else list(data.file_name or ())


def first_rows(name: str, data: DataArguments, count: int) -> Rows | None:
    """Read at most `count` rows of one file, without `datasets`.

    Returns None if only `datasets` can read the file. Raises `DataError`.
    """
    path = Path(name)
    kind = _kind_of(path, data.dataset_type)
    if kind == "json":
        found = first_json_rows(path, count)
    elif kind == "csv":
        found = first_csv_rows(path, count)
    else:
        found = first_arrow_rows(path, kind, count)
    if found is None:
        return None
    if not found:
        raise DataError(f"{path}: no rows")
    columns = dict.fromkeys(column for row in found for column in row)
    return Rows([(path.name, tuple(columns), found)], data)


def _kind_of(path: Path, kind: str) -> str:
    """Format of an existing, nonempty file. Raises `DataError`."""
    if not path.is_file():
        raise DataError(f"{path}: {_where_else(path)}")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    if kind == "auto":
        if path.suffix.lower() not in ENDINGS:
            raise DataError(
                f"{path}: the ending {path.suffix!r} tells no format;"
                " set data_args.dataset_type to json, parquet, csv or arrow"
            )
        kind = ENDINGS[path.suffix.lower()]
    return kind


def _read_file(path: Path, kind: str) -> FileRows:
    kind = _kind_of(path, kind)
    if kind == "json":
        check_json(path)
    import datasets
    from datasets.exceptions import DatasetGenerationError

    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory(prefix="roll-rows-") as cache:
            # `datasets` interprets names as patterns or URLs, so it gets a link with a neutral name.
            link = Path(cache) / f"rows.{kind}"
            link.symlink_to(path.resolve())
            options = _csv_options(path) if kind == "csv" else {}
            dataset = datasets.load_dataset(
                kind,
                data_files=[glob.escape(str(link))],
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
                **options,
            )
    except (DatasetGenerationError, ValueError, OSError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: {_why_unreadable(path, kind, error)}") from error
    finally:
        if not bars:
            datasets.enable_progress_bars()
    return path.name, dataset.column_names, _values(path, dataset)


def _values(path: Path, dataset: Dataset) -> list[Mapping[str, Any]]:
    try:
        return list(dataset.to_list())
    except (UnicodeDecodeError, RecursionError):
        for number in range(len(dataset)):
            try:
                dataset[number]
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: row {number + 1} is not UTF-8: {error.reason}") from error
            except RecursionError as error:
                raise DataError(f"{path}: row {number + 1} is nested too deeply") from error
        raise


def _csv_options(path: Path) -> dict[str, Any]:
    """Options of the CSV reader that keep values as text: 007 is not a number, and NA is not missing."""
    import datasets

    separator = separator_of(path)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        header = next(csv.reader(stream, delimiter=separator), [])
    features = datasets.Features({name: datasets.Value("string") for name in header})
    return {"features": features, "keep_default_na": False, "sep": separator}


def _where_else(path: Path) -> str:
    if path.is_dir():
        return "is a directory; name the files in it"
    folder = path.parent
    if not folder.is_dir():
        return f"no such file; there is no directory {folder} either (paths are relative to {Path.cwd()})"
    matches = sorted(glob.glob(str(path)))
    if matches:
        shown = ", ".join(matches[:3]) + (", …" if len(matches) > 3 else "")
        return f"no such file; names are not patterns, so list the files: file_name: [{shown}]"
    close = difflib.get_close_matches(path.name, [each.name for each in folder.iterdir()], n=1)
    return f"no such file; did you mean {close[0]!r}?" if close else f"no such file in {folder.resolve()}"


def _why_unreadable(path: Path, kind: str, error: BaseException) -> str:
    """Describe the first invalid row, or else the library's error."""
    if kind == "json":
        wrong = wrong_json_row(path)
        if wrong:
            return wrong
    if kind == "csv":
        try:
            check_csv(path)
        except DataError as found:
            return str(found).removeprefix(f"{path}: ")
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line for line in str(cause).splitlines() if line.strip()]
    return f"cannot be read as {kind}: {lines[0] if lines else type(cause).__name__}"
