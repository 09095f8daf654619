"""Reads rows of JSON, CSV and arrow files without `datasets`.

A run reads its rows with `datasets`. This module reads the first rows of a file for `roll-core check`, which imports
no heavy package. It also finds the row that `datasets` cannot read.
"""

from __future__ import annotations

import csv
import json
import re
from itertools import islice
from typing import TYPE_CHECKING, Any

from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Values = dict[str, Any]

MAX_NESTING = 100
"""Maximum nesting of lists and objects in a JSON row. Thousands of levels overflow the stacks of parsing libraries."""
LARGEST_LIST_BYTES = 64 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
_JSON_BEGINS = b"{[ \t\r\n" + BYTE_ORDER_MARK[:1]
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that `surrogateescape` could not decode."""
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(strict=False)


def check_json(path: Path) -> None:
    """Raise `DataError` for a row that is not UTF-8 or exceeds `MAX_NESTING`. Compressed files are not checked."""
    if _is_json_text(path):
        for _ in _json_rows(path):
            pass


def first_json_rows(path: Path, count: int) -> list[Values] | None:
    """Read at most `count` rows of a JSON file.

    Returns None if the file is compressed, a list too large to read for its first rows, or a single JSON value other
    than a list. Raises `DataError`.
    """
    if not _is_json_text(path) or (path.stat().st_size > LARGEST_LIST_BYTES and _is_list(path)):
        return None
    rows: list[Values] = []
    for number, text in islice(_json_rows(path), count):
        try:
            row = json.loads(text, strict=False)
        except json.JSONDecodeError as error:
            if number == 1 and _is_one_value(path):
                return None
            raise DataError(f"{path}: row {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}: row {number} must be an object with columns, but is {short(row)}")
        rows.append(row)
    return rows


def first_csv_rows(path: Path, count: int) -> list[Values] | None:
    """Read at most `count` CSV rows, as text. None if the standard library cannot parse them. Raises `DataError`."""
    try:
        return list(islice(_csv_rows(path), count))
    except csv.Error:
        return None


def first_arrow_rows(path: Path, kind: str, count: int) -> list[Values] | None:
    """Read at most `count` rows of a `parquet` or `arrow` file.

    Returns None if text is not UTF-8, or if pyarrow (a dependency of `datasets`) is not installed. Raises `DataError`.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        return None

    try:
        if kind == "parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                batch = next(file.iter_batches(batch_size=count), None)
        else:
            with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
                batch = next(iter(stream), None)
        rows: list[Values] = batch.slice(0, count).to_pylist() if batch is not None else []
    except UnicodeDecodeError:
        return None
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: cannot be read as {kind}: {str(error).splitlines()[0]}") from error
    return rows


def wrong_json_row(path: Path) -> str:
    """Describe the first row that is invalid or inconsistent with the rows before it; empty if all are valid."""
    types: dict[str, tuple[str, int]] = {}
    number = 0
    try:
        for number, text in _json_rows(path):
            row = json.loads(text)
            if not isinstance(row, dict):
                return f"row {number} must be an object with columns, but is {short(row)}"
            for column, value in row.items():
                if value is not None:
                    name = type(value).__name__
                    known, first = types.setdefault(column, (name, number))
                    if known != name and {known, name} != {"int", "float"}:
                        return f"row {number}: column {column!r} is {name}, but row {first} has {known} there"
    except json.JSONDecodeError as error:
        return f"row {number} is not JSON: {error}"
    except DataError as error:
        return str(error).removeprefix(f"{path}: ")
    return "" if number else "no rows"


def check_csv(path: Path) -> None:
    """Raise `DataError` for a row that is not UTF-8."""
    try:
        for _ in _csv_rows(path):
            pass
    except csv.Error:
        return


def separator_of(path: Path) -> str:
    """Separator of the values in a row: a tab for `.tsv` files, otherwise a comma."""
    return "\t" if path.suffix.lower() == ".tsv" else ","


def short(value: object) -> str:
    """Representation of a value in a message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- JSON --------------------------------------------------------------------------------------------------------------


def _is_json_text(path: Path) -> bool:
    """True if the file's name or first byte indicates JSON text. Compressed files have neither."""
    if path.suffix.lower() in JSON_ENDINGS:
        return True
    with path.open("rb") as file:
        return file.read(1) in _JSON_BEGINS


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def _is_one_value(path: Path) -> bool:
    """True if the whole file is one JSON value, which may span several lines."""
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _json_rows(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each row, in a file with one object per line or one list of objects."""
    with path.open("rb") as file:
        number = 0
        for line in file:
            if number == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                continue
            number += 1
            if number == 1 and line.lstrip().startswith(b"["):
                yield from _items(path, line + file.read())
                return
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, number, error) from error
            _check_nesting(path, number, text)
            yield number, text


def _items(path: Path, content: bytes) -> Iterator[tuple[int, str]]:
    """Number and text of each item of a JSON list."""
    undecodable: UnicodeDecodeError | None = None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        undecodable = error
        text = content[: error.start].decode("utf-8")
    at = _after_space(text, text.index("[") + 1)
    number = 0
    while text[at : at + 1] != "]":
        number += 1
        try:
            _, end = _DECODER.raw_decode(text, at)
        except RecursionError as error:
            raise _too_deep(path, number) from error
        except json.JSONDecodeError as error:
            if undecodable is not None:
                raise _not_utf8(path, number, undecodable) from undecodable
            raise DataError(f"{path}: row {number} is not JSON: {error}") from error
        row = text[at:end]
        _check_nesting(path, number, row)
        yield number, row
        at = _after_space(text, end)
        if text[at : at + 1] == ",":
            at = _after_space(text, at + 1)
        elif text[at : at + 1] != "]":
            if undecodable is not None:
                raise _not_utf8(path, number, undecodable) from undecodable
            raise DataError(f"{path}: row {number} is followed by neither a comma nor the end of the list")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _check_nesting(path: Path, number: int, text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_NESTING:
        return
    depth = 0
    for found in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > MAX_NESTING:
            raise _too_deep(path, number)


def _too_deep(path: Path, number: int) -> DataError:
    return DataError(f"{path}: row {number} is nested deeper than {MAX_NESTING} levels of lists and objects")


def _not_utf8(path: Path, number: int, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f"{path}: row {number} is not UTF-8: byte 0x{error.object[error.start]:02x}; save the file as UTF-8"
    )


# -- CSV ---------------------------------------------------------------------------------------------------------------


def _csv_rows(path: Path) -> Iterator[Values]:
    """Rows as dictionaries with the header's columns as keys."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        records = (record for record in csv.reader(file, delimiter=separator_of(path)) if record)
        header = next(records, [])
        _check_csv_text(path, "the header", header)
        for number, record in enumerate(records, start=1):
            _check_csv_text(path, f"row {number}", record)
            yield dict(zip(header, record, strict=False))


def _check_csv_text(path: Path, what: str, record: list[str]) -> None:
    for value in record:
        found = _NOT_UTF8.search(value)
        if found is not None:
            raise DataError(f"{path}: {what} is not UTF-8: byte 0x{ord(found[0]) - 0xDC00:02x}; save the file as UTF-8")
