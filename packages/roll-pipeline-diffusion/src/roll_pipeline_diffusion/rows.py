"""Columns and files of rows: what `roll-core check` can check without a model. Light: imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from roll_core.data.rows import file_names, need_column, text_of
from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.data.rows import Row, Rows
    from roll_core.spec.config import DataArguments

CONDITIONING = "cond"
"""Column, or prefix of columns, with precomputed conditioning."""


def check_rows(rows: Rows, data: DataArguments, images: Sequence[str], *, guided: bool) -> None:
    """Check what needs no model: columns, types and files. Raises `DataError`."""
    given = [each for each in rows.columns if each == CONDITIONING or each.startswith(f"{CONDITIONING}.")]
    if not given:
        need_column(data.prompt, rows)
    for column in images:
        need_column(column, rows)
    for row in rows:
        has = [each for each in given if row.values.get(each) is not None]
        if not has:
            text_of(row, data.prompt, rows)
        elif guided and not any(name.startswith(f"un{CONDITIONING}") for name, each in row.values.items() if each):
            raise DataError(
                f"{row.where}: has {has[0]!r}, but no 'un{CONDITIONING}', which guidance_scale other than 1 needs: add"
                " it, or set guidance_scale 1"
            )
        for column in images:
            image_file(row, data, column)


def image_file(row: Row, data: DataArguments, column: str) -> Path:
    """File that a column names, relative to the data file. Raises `DataError` if there is none."""
    value = row.values.get(column)
    if not isinstance(value, str):
        raise DataError(f"{row.where}: column {column!r} is {type(value).__name__}, expected the name of an image file")
    file = folder_of(row, data) / value
    if not file.is_file():
        raise DataError(f"{row.where}: column {column!r} names {value}, but there is no file {file}")
    return file


def folder_of(row: Row, data: DataArguments) -> Path:
    """Directory of the file that a row is from."""
    names = [Path(each) for each in file_names(data)]
    return next((each.parent for each in names if row.where.startswith(f"{each.name} row ")), names[0].parent)
