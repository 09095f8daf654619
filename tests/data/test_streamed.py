"""Rows that stay on the disk: equal to those in memory, in any order."""

from __future__ import annotations

import gzip
import json

import pytest

from roll_core.data.rows import read_rows
from roll_core.data.streamed import StreamedRows
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments
from roll_testing.errors import raises_error

ROWS = [
    {"id": f"r{n}", "prompt": f"{n} ü", "response": "x" * n, "more": {"a": n}} | ({"tag": "odd"} if n % 2 else {})
    for n in range(7)
]
ORDER = [6, 0, 3, 3, 8, 1, 12]


def json_lines(path):
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path.write_bytes("\ufeff".encode() + "\r\n".join([*lines[:3], "", *lines[3:]]).encode())  # no end of line


def parquet(path):
    pytest.importorskip("datasets")
    table = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(table.Table.from_pylist(ROWS), path, row_group_size=2)


def arrow(path):
    pytest.importorskip("datasets")
    table = pytest.importorskip("pyarrow")
    rows = table.Table.from_pylist(ROWS)
    with table.ipc.new_file(str(path), rows.schema) as file:
        file.write_table(rows)


@pytest.mark.parametrize("write", [json_lines, parquet, arrow])
def test_streamed_rows_equal_those_in_memory(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / ("rows.jsonl" if write is json_lines else f"rows.{write.__name__}")
    write(path)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(6)), encoding="utf-8")
    data = DataArguments(
        file_name=[str(path), str(other)], id="own", prompt="more.a", columns={"length": "{{ prompt | length }}"}
    )
    in_memory, streamed = read_rows(data), StreamedRows(data)
    assert len(streamed) == len(in_memory) == 13
    read = streamed.read(ORDER)
    assert list(read) == [in_memory[number] for number in ORDER]
    assert set(read.columns) == set(in_memory.columns)
    assert len(StreamedRows(data.model_copy(update={"max_samples": 8}))) == 8


def test_files_that_are_no_lines_are_refused(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"prompt": "1"}\n')
    (tmp_path / "a.json").write_text('[{"prompt": "1"}]', encoding="utf-8")
    (tmp_path / "a.csv").write_text("prompt\n1\n", encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    for name in ("a.jsonl.gz", "a.json", "a.csv", "empty.jsonl", "none.jsonl", "none.parquet"):
        with raises_error(DataError, name):
            StreamedRows(DataArguments(file_name=str(tmp_path / name)))


def test_broken_line_is_an_error_once_it_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join('{"prompt": "1"}\n' for _ in range(120)) + '{"prompt"\n', encoding="utf-8")
    rows = StreamedRows(DataArguments(file_name=str(path)))
    assert rows.read([119])[0].where == f"{path} row 120"
    with raises_error(DataError, "a.jsonl: row 121"):
        rows.read([120])
