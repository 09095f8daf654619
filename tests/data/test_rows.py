"""Rows are read from every format alike; what is wrong is named by file, row and column."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import struct
import time

import pyarrow as pa
import pyarrow.parquet
import pytest

from roll_core.data.rows import messages_of, need_column, read_rows, shape_of, text_of, tools_of
from roll_core.data.templates import NAMED
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments
from roll_core.spec.rollout import IMAGE
from roll_testing.errors import raises_error

ROWS = [
    {"prompt": "1+1=", "response": "2", "tag": "sum", "answer": 2},
    {"prompt": "é漢😀", "response": "", "tag": "odd", "answer": 3},
    {"prompt": "2*3=", "response": "6", "tag": "product", "answer": 6},
]


def write(path, rows=ROWS):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    else:
        names = list(rows[0])
        lines = [",".join(names), *(",".join(f'"{row[name]}"' for name in names) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "arrow", "csv"])
def test_every_format_gives_the_same_rows(tmp_path, ending):
    rows = read_rows(DataArguments(file_name=write(tmp_path / f"rows.{ending}")))
    expected = [row | {"answer": str(row["answer"])} for row in ROWS] if ending == "csv" else ROWS
    assert [dict(row.values) for row in rows] == expected
    assert [row.id for row in rows] == ["0", "1", "2"]
    assert [row.tag for row in rows] == ["sum", "odd", "product"]
    assert rows[-1].where == f"{tmp_path / 'rows'}.{ending} row 3"
    assert rows.columns == ("prompt", "response", "tag", "answer")


def test_text_in_a_csv_stays_text(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,response\n007,NA\n1e3,\n")
    rows = read_rows(DataArguments(file_name=str(tmp_path / "a.csv")))
    assert [dict(row.values) for row in rows] == [
        {"prompt": "007", "response": "NA"},
        {"prompt": "1e3", "response": ""},
    ]


def test_files_are_read_in_order_up_to_max_samples(tmp_path):
    one, two = write(tmp_path / "b.jsonl"), write(tmp_path / "a.jsonl", ROWS[:2])
    rows = read_rows(DataArguments(file_name=[one, two], max_samples=4))
    assert [row.where for row in rows] == [f"{one} row 1", f"{one} row 2", f"{one} row 3", f"{two} row 1"]


def test_changed_file_is_reread_and_leaves_no_cache(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("HF_HOME", str(home))
    path = write(tmp_path / "a.jsonl")
    assert len(read_rows(DataArguments(file_name=path))) == 3
    write(tmp_path / "a.jsonl", ROWS[:1])
    assert len(read_rows(DataArguments(file_name=path))) == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl"]


def test_ids_come_from_their_column_and_must_differ(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "b"}])
    assert [row.id for row in read_rows(DataArguments(file_name=path))] == ["x", "y"]
    path = write(tmp_path / "a.jsonl", [{"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"}])
    with raises_error(DataError, "a.jsonl", "row 2", "'id'", "'x'", "row 1"):
        read_rows(DataArguments(file_name=path))


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("a.jsonl", "", ("empty",)),
        ("a.json", "[]", ()),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt": \n', ("row 2", "JSON")),
        ("a.jsonl", '{"prompt": "a"}\n[1, 2]\n', ("row 2",)),
        ("a.json", '[{"prompt": "a"}]\n[{"prompt": "b"}]\n', ()),
        ("a.csv", "prompt,response,prompt\na,b,c\n", ("'prompt'",)),
        ("a.parquet", "not a parquet file", ("parquet",)),
        ("a.txt", "x", ("format",)),
    ],
)
def test_unreadable_files_are_located(tmp_path, name, content, facts):
    (tmp_path / name).write_text(content)
    with raises_error(DataError, *facts) as caught:
        read_rows(DataArguments(file_name=str(tmp_path / name)))
    assert name in str(caught.value)


def test_files_of_equal_name_are_distinguished_by_folder(tmp_path):
    paths = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        paths.append(write(tmp_path / folder / "rows.jsonl", [{"prompt": folder}]))
    assert [row.where for row in read_rows(DataArguments(file_name=paths))] == [f"{path} row 1" for path in paths]


def test_a_missing_file_names_its_neighbour(tmp_path):
    write(tmp_path / "train.jsonl")
    with raises_error(DataError, "'train.jsonl'"):
        read_rows(DataArguments(file_name=str(tmp_path / "trian.jsonl")))
    with raises_error(DataError, tmp_path / "nowhere"):
        read_rows(DataArguments(file_name=str(tmp_path / "nowhere" / "a.jsonl")))
    with raises_error(DataError, tmp_path):
        read_rows(DataArguments(file_name=str(tmp_path)))
    with raises_error(DataError, "file_name"):
        read_rows(DataArguments())


def test_a_missing_column_names_the_nearest(tmp_path):
    rows = read_rows(DataArguments(file_name=write(tmp_path / "a.jsonl")))
    with raises_error(DataError, "a.jsonl", "'promt'", "'prompt'"):
        need_column("promt", rows)
    with raises_error(DataError, "'prompt'", "'response'"):
        need_column("zzz", rows)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_dotted_name_is_a_column_in_a_mapping(tmp_path, ending):
    stored = [{"extra": {"question": f"{at}+1=", "answer": {"text": str(at + 1)}}, "a.b": "own"} for at in range(2)]
    name = write(tmp_path / f"rows.{ending}", stored)
    data = DataArguments(file_name=name, prompt="extra.question", response="extra.answer.text")
    rows = read_rows(data)
    assert [each["content"] for each in messages_of(rows[1], data, rows, response=True)] == ["1+1=", "2"]
    assert rows[0].values["a.b"] == "own"
    assert list(rows[0].values) == ["extra", "a.b"]
    assert "extra.answer.txt" not in rows[0].values
    missing = DataArguments(file_name=name, prompt="extra.query")
    with raises_error(DataError, "'extra.query'"):
        need_column(missing.prompt, read_rows(missing))


def test_a_value_that_is_no_text_names_its_row(tmp_path):
    rows = read_rows(DataArguments(file_name=write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": None}])))
    with raises_error(DataError, "a.jsonl", "row 2", "'prompt'"):
        text_of(rows[1], "prompt", rows)
    rows = read_rows(DataArguments(file_name=write(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": 5}])))
    assert text_of(rows[0], "prompt", rows) == "a"
    with raises_error(DataError, "row 2", "'prompt'", "5"):
        text_of(rows[1], "prompt", rows)


CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


def test_query_follows_the_prompt_on_a_new_line_unless_empty(tmp_path):
    stored = [{"prompt": "Translate.", "input": text} for text in ("chat", "", None)]
    file = write(tmp_path / "a.jsonl", [*stored, {"prompt": "Translate.", "input": 3}])
    data = DataArguments(file_name=file, query="input")
    rows = read_rows(data)
    found = [messages_of(row, data, rows, response=False)[0]["content"] for row in list(rows)[:3]]
    assert found == ["Translate.\nchat", "Translate.", "Translate."]
    with raises_error(DataError, "row 4", "'input'", "3"):
        messages_of(rows[3], data, rows, response=False)
    with raises_error(DataError, "'inptu'", "'input'"):
        messages_of(rows[0], data.model_copy(update={"query": "inptu"}), rows, response=False)


@pytest.mark.parametrize("stored", [CHAT, json.dumps(CHAT)], ids=["list", "json"])
def test_messages_are_a_list_or_its_json(tmp_path, stored):
    data = DataArguments(
        file_name=write(tmp_path / "a.jsonl", [{"chat": stored, "sys": "be brief"}]), messages="chat", system="sys"
    )
    rows = read_rows(data)
    system = [{"role": "system", "content": "be brief"}]
    assert messages_of(rows[0], data, rows, response=True) == system + CHAT
    assert messages_of(rows[0], data, rows, response=False) == system + CHAT[:3]


@pytest.mark.parametrize(
    ("stored", "facts"),
    [
        ("[{", ("JSON",)),
        ("[]", ("list",)),
        ('[{"role": "user"}]', ("1", "'chat'")),
        ('[{"role": "user", "content": 3}]', ("text",)),
        ('[{"role": "user", "content": "a"}]', ("assistant",)),
        ('[{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]', ("1", "tool_calls")),
        ('[{"role": "assistant", "content": null, "tool_calls": [{}]}]', ("1", "tool_calls")),
    ],
)
def test_broken_messages_name_their_row(tmp_path, stored, facts):
    data = DataArguments(file_name=write(tmp_path / "a.jsonl", [{"chat": stored}]), messages="chat")
    rows = read_rows(data)
    with raises_error(DataError, *facts) as caught:
        messages_of(rows[0], data, rows, response=True)
    assert "a.jsonl row 1" in str(caught.value)


@pytest.mark.parametrize(
    ("tools", "facts"),
    [("[{", ("JSON", "'tools'")), ({"name": "add"}, ("list", "'tools'")), (["add"], ("list", "'tools'"))],
)
def test_broken_tools_name_their_row(tmp_path, tools, facts):
    path = write(tmp_path / "a.jsonl", [{"chat": CHAT, "tools": tools}])
    data = DataArguments(file_name=path, messages="chat", tools="tools")
    rows = read_rows(data)
    with raises_error(DataError, *facts) as caught:
        tools_of(rows[0], data, rows)
    assert "a.jsonl row 1" in str(caught.value)


def test_tool_calls_keep_their_keys(tmp_path):
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1, "ß": [2.5]}'}}
    result = {"role": "tool", "tool_call_id": "1", "name": "add", "content": "3"}
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call], "other": None}, result, CHAT[1]]
    data = DataArguments(file_name=write(tmp_path / "a.jsonl", [{"chat": chat}]), messages="chat", tools=None)
    rows = read_rows(data)
    function = {"name": "add", "arguments": {"a": 1, "ß": [2.5]}}
    kept = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    assert messages_of(rows[0], data, rows, response=True) == [CHAT[0], kept, result, CHAT[1]]
    assert tools_of(rows[0], data, rows) == []


@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_named_templates_refuse_tools(tmp_path, name):
    call = {"id": "1", "function": {"name": "add", "arguments": {}}}
    chat = [CHAT[0], {"role": "assistant", "tool_calls": [call]}]
    data = DataArguments(file_name=write(tmp_path / "a.jsonl", [{"chat": chat}]), messages="chat")
    rows = read_rows(data)
    template = NAMED[name]("<eos>")
    with raises_error(DataError, "tool_calls", "native"):
        template.segments(messages_of(rows[0], data, rows, response=True))
    with raises_error(DataError, "tools", "native"):
        template.prompt(CHAT[:1], [{"type": "function"}])


def test_prompt_and_response_columns_make_two_messages(tmp_path):
    data = DataArguments(file_name=write(tmp_path / "a.jsonl"))
    rows = read_rows(data)
    user, assistant = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    assert messages_of(rows[0], data, rows, response=True) == [user, assistant]
    assert messages_of(rows[0], data, rows, response=False) == [user]


@pytest.mark.parametrize("name", ["rows[1].jsonl", "row?.jsonl", "row*.jsonl", "a::b.jsonl", "file:x.jsonl"])
def test_a_file_name_is_literal(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows1.jsonl", ROWS[:1])
    write(tmp_path / name, ROWS[1:])
    rows = read_rows(DataArguments(file_name=name))
    assert [row.values["answer"] for row in rows] == [3, 6]
    assert rows[0].where == f"{name} row 1"


def test_a_pattern_is_no_file_name_and_its_files_are_named(tmp_path):
    write(tmp_path / "rows1.jsonl")
    with raises_error(DataError, tmp_path / "rows1.jsonl"):
        read_rows(DataArguments(file_name=str(tmp_path / "rows*.jsonl")))


GOOD = b'{"prompt": "a", "response": "b"}\n'


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("a.jsonl", GOOD + b"\n" + GOOD + b'{"prompt": "\xff", "response": "b"}\n', 3),
        ("a.json", b'[{"prompt": "a"},\n {"prompt": "\xff"}]', 2),
        ("a.csv", b"prompt,response\na,b\nc,\xff\n", 2),
        ("a.jsonl", GOOD + b'{"prompt": "a", "more": ' + b"[" * 5_000 + b"]" * 5_000 + b"}\n", 2),
        ("a.jsonl", GOOD + b'{"prompt": "a", "more": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}\n", 2),
        ("a.json", b'[{"prompt": "a"}, {"more": ' + b"[" * 5_000 + b"]" * 5_000 + b"}]", 2),
        ("a.jsonl", GOOD + b'{"prompt": "a", "more": ' + b"1" * 5_000 + b"}\n", 2),
        ("a.json", b'[{"prompt": "a"}, {"more": ' + b"1" * 5_000 + b"}]", 2),
    ],
    ids=["utf-8 of jsonl", "utf-8 of json", "utf-8 of csv", "lists", "objects", "lists of json", "digits", "in a list"],
)
def test_a_row_that_no_library_can_take_is_named(tmp_path, name, content, row):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows(DataArguments(file_name=str(tmp_path / name)))
    assert str(caught.value).startswith(f"{tmp_path / name}: row {row} ")
    assert caught.value.exit_code == 2


def test_invalid_text_in_a_parquet_column_names_its_row(tmp_path):
    raw = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    pyarrow.parquet.write_table(pa.table({"prompt": raw}), tmp_path / "a.parquet")
    with raises_error(DataError, "a.parquet", "row 2"):
        read_rows(DataArguments(file_name=str(tmp_path / "a.parquet")))


def test_parquet_date_out_of_range_names_the_file(tmp_path):
    times = pa.array([2**62], pa.timestamp("us"))
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "time": times}), tmp_path / "a.parquet")
    with raises_error(DataError, "a.parquet"):
        read_rows(DataArguments(file_name=str(tmp_path / "a.parquet")))


def test_columns_of_one_name_are_refused_in_parquet_too(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with raises_error(DataError, "a.parquet", "'prompt'"):
        read_rows(DataArguments(file_name=str(tmp_path / "a.parquet")))


def test_arrow_files_are_read_like_streams(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table, max_chunksize=2)
    found = read_rows(DataArguments(file_name=str(tmp_path / "a.arrow")))
    assert [dict(row.values) for row in found] == ROWS


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_tools_of_other_rows_add_no_null_arguments(tmp_path, ending):
    """A column of structs has the fields of all rows, and null where a row lacks one."""

    def row(name: str) -> dict:
        call = {"function": {"name": "f", "arguments": {name: "x"}}}
        parameters = {"type": "object", "properties": {name: {"type": "string"}}}
        return {
            "chat": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            "extra": {name: 1},
        }

    path = write(tmp_path / f"rows.{ending}", [row("city"), row("date")])
    data = DataArguments(file_name=path, messages="chat", tools="tools")
    rows = read_rows(data)
    for each, name in zip(rows, ("city", "date"), strict=True):
        call = messages_of(each, data, rows, response=True)[-1]["tool_calls"][0]
        assert call["function"] == {"name": "f", "arguments": {name: "x"}}
        assert tools_of(each, data, rows) == row(name)["tools"]
    assert rows[0].values["extra"] == ({"city": 1} if ending == "jsonl" else {"city": 1, "date": None})


def test_a_tag_may_be_any_number(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "tag": tag} for tag in (0, 1, "", None)])
    assert [row.tag for row in read_rows(DataArguments(file_name=path))] == ["0", "1", "", ""]


@pytest.mark.parametrize("module", [gzip, bz2, lzma])
def test_a_corrupt_compressed_file_is_named(tmp_path, module):
    content = bytearray(module.compress(json.dumps([{"prompt": str(i)} for i in range(10_000)]).encode()))
    content[len(content) // 2 : len(content) // 2 + 100] = bytes(100)
    (tmp_path / "a.z").write_bytes(content)
    with raises_error(DataError, "a.z"):
        read_rows(DataArguments(file_name=str(tmp_path / "a.z"), dataset_type="json"))


def test_a_compressed_file_that_ends_early_is_named(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(GOOD * 1000)[:-20])
    with raises_error(DataError, "a.gz"):
        read_rows(DataArguments(file_name=str(tmp_path / "a.gz"), dataset_type="json"))


def test_rows_of_a_csv_with_too_many_values_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,response\na,b\na,b,c\n")
    with raises_error(DataError, "a.csv", "row 2", "3", "2"):
        read_rows(DataArguments(file_name=str(tmp_path / "a.csv")))


def test_messages_nested_too_deep_name_their_row(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"chat": "[" * 100_000}])
    data = DataArguments(file_name=path, messages="chat")
    rows = read_rows(data)
    with raises_error(DataError, "a.jsonl", "row 1", "'chat'"):
        messages_of(rows[0], data, rows, response=False)
    rows = read_rows(DataArguments(file_name=write(tmp_path / "a.jsonl", [{"chat": "1" * 5_000}])))
    with raises_error(DataError, "a.jsonl", "row 1", "'chat'"):
        messages_of(rows[0], data, rows, response=False)


def test_text_brackets_do_not_nest_and_compressed_files_load(tmp_path):
    rows = [{"prompt": "[" * 5_000 + '"{', "list": [[1], [2]] * 200}]
    text = "\ufeff" + json.dumps(rows[0]) + "\n"
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.gz").write_bytes(gzip.compress(json.dumps(rows[0]).encode()))
    for name in ("a.jsonl", "a.json", "a.gz"):
        found = read_rows(DataArguments(file_name=str(tmp_path / name), dataset_type="json"))
        assert [dict(row.values) for row in found] == rows


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_a_flipped_bit_of_an_offset_names_its_row(tmp_path, ending):
    texts = [str(number) * 7 for number in range(10)]
    path = tmp_path / f"a.{ending}"
    table = pa.table({"prompt": texts})
    if ending == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        offset = struct.pack("<i", 21)
    else:
        pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
        offset = struct.pack("<i", 7) + b"3333333"
    content = path.read_bytes()
    assert content.count(offset) == 1
    at = content.index(offset) + 3
    path.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
    with raises_error(DataError, f"a.{ending}", *(["row 3"] if ending == "arrow" else [])):
        read_rows(DataArguments(file_name=str(path)))


@pytest.mark.parametrize("text", ['"' + "\\[" * 40_000, '{"a": "' + "[" * 40_000 + "\\", '"[' * 40_000])
def test_long_texts_that_are_no_json_are_refused_at_once(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    begin = time.process_time()
    with raises_error(DataError, "a.jsonl", "row 1"):
        read_rows(DataArguments(file_name=str(tmp_path / "a.jsonl")))
    assert time.process_time() - begin < 2


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("ending", "compress"),
    [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zstd), ("", zstd)],
)
@pytest.mark.parametrize("format", ["jsonl", "json", "csv", "tsv"])
def test_format_of_a_compressed_file_is_its_inner_extension(tmp_path, ending, compress, format):
    rows = [{"prompt": "é", "response": "b"}, {"prompt": "c", "response": "d"}]
    mark = {"csv": ",", "tsv": "\t"}.get(format, "")
    text = "".join(mark.join(each) + "\n" for each in [rows[0].keys(), *(row.values() for row in rows)])
    text = text if mark else json.dumps(rows) if format == "json" else "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / f"a.{format}{ending}"
    path.write_bytes(compress(text.encode()))
    assert [dict(row.values) for row in read_rows(DataArguments(file_name=str(path)))] == rows
    path.write_bytes(compress(text.encode())[:-5])
    with raises_error(DataError, path.name):
        read_rows(DataArguments(file_name=str(path)))


def test_row_numbers_are_no_ids_of_other_rows(tmp_path):
    names = [write(tmp_path / "a.jsonl", [{"id": "2"}, {"id": "1"}]), write(tmp_path / "b.jsonl", [{"a": 1}] * 2)]
    ids = [row.id for row in read_rows(DataArguments(file_name=names))]
    assert ids[:2] == ["2", "1"]
    assert len(set(ids)) == 4
    assert [row.id for row in read_rows(DataArguments(file_name=names[1]))] == ["0", "1"]


def test_nulls_of_a_padded_table_are_no_values(tmp_path):
    """As `Dataset.to_json` writes a table whose structs have the fields of all rows."""

    def chat(arguments, **padding):
        call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
        return [
            {"role": "user", "content": "q", **padding},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]

    def tools(properties):
        return [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]

    padded = {"a": {"type": "string", "enum": None}, "b": None}
    rows = [
        {"chat": chat({"a": "x", "b": None}, tool_calls=None), "tools": tools(padded)},
        {"chat": chat({"a": "x", "b": None}), "tools": tools({"a": {"default": None}})},
    ]
    data = DataArguments(file_name=write(tmp_path / "a.jsonl", rows), messages="chat", tools="tools")
    found = read_rows(data)
    calls = [messages_of(row, data, found, response=True)[1]["tool_calls"][0]["function"] for row in found]
    assert [call["arguments"] for call in calls] == [{"a": "x"}, {"a": "x", "b": None}]
    assert [tools_of(row, data, found) for row in found] == [tools({"a": {"type": "string"}}), rows[1]["tools"]]


@pytest.mark.parametrize("column", ["image", "images", "videos", "audios"])
def test_rows_with_media_are_refused_by_column(tmp_path, column):
    rows = [{"prompt": "a", "chat": CHAT, column: []}, {"prompt": "a", "chat": CHAT, column: ["a.png"]}]
    path = write(tmp_path / "a.jsonl", rows)
    for data in (DataArguments(file_name=path), DataArguments(file_name=path, messages="chat")):
        found = read_rows(data)
        messages_of(found[0], data, found, response=False)
        with raises_error(DataError, "a.jsonl", "row 2", f"'{column}'"):
            messages_of(found[1], data, found, response=False)


MEDIA = ["<image>", "<video>what?", "<|vision_start|><|image_pad|>", "<image 1>", "<|image_1|>", "[IMG]", "<image_1>"]


@pytest.mark.parametrize("text", MEDIA)
def test_places_of_media_in_prompts_are_refused(tmp_path, text):
    rows = [{"prompt": text, "chat": [{"role": "user", "content": text}]}]
    path = write(tmp_path / "a.jsonl", rows)
    for data in (DataArguments(file_name=path), DataArguments(file_name=path, messages="chat")):
        found = read_rows(data)
        with raises_error(DataError, "a.jsonl", "row 1"):
            messages_of(found[0], data, found, response=False)


def test_tags_and_replies_about_media_are_text(tmp_path):
    texts = ["<image><url>x</url></image>", '<image href="a"/>', "an [IMG_1] <images>", "<video controls></video>"]
    rows = [{"prompt": text, "response": "<image>"} for text in texts]
    data = DataArguments(file_name=write(tmp_path / "a.jsonl", rows))
    found = read_rows(data)
    assert [messages_of(row, data, found, response=True)[0]["content"] for row in found] == texts


@pytest.mark.parametrize("part", [{"type": "audio", "audio": "a"}, {"type": "text", "text": 1}, 3])
def test_parts_that_are_neither_text_nor_image_are_refused(tmp_path, part):
    chat = [{"role": "user", "content": [part]}, CHAT[1]]
    data = DataArguments(file_name=write(tmp_path / "a.jsonl", [{"chat": chat}]), messages="chat")
    rows = read_rows(data)
    with raises_error(DataError, "a.jsonl", "row 1", "message 1"):
        messages_of(rows[0], data, rows, response=True)


@pytest.mark.parametrize(
    ("texts", "images", "contents", "numbers"),
    [
        (["two"], ["a", "b"], [IMAGE * 2 + "two"], [2]),
        (["<image>one<image>"], ["a", "b"], [f"{IMAGE}one{IMAGE}"], [2]),
        (["first <image>", "then <image>"], ["a", "b"], [f"first {IMAGE}", f"then {IMAGE}"], [1, 1]),
        (["none"], [], ["none"], [0]),
    ],
)
def test_images_of_a_column_take_the_places_of_the_text_in_order(tmp_path, texts, images, contents, numbers):
    chat = [message for text in texts for message in ({"role": "user", "content": text}, CHAT[1])]
    name = write(tmp_path / "a.jsonl", [{"chat": chat, "pictures": images}])
    data = DataArguments(file_name=name, messages="chat", images="pictures")
    rows = read_rows(data)
    users = messages_of(rows[0], data, rows, response=True)[::2]
    assert [message["content"] for message in users] == contents
    assert [len(message.get("media", ())) for message in users] == numbers
    assert [image for message in users for image in message.get("media", ())] == images


def test_places_and_parts_of_one_message_keep_their_order(tmp_path):
    parts = [{"type": "text", "text": "<image> or "}, {"type": "image", "image": "part"}, " or <image>"]
    row = {"chat": [{"role": "user", "content": parts}], "pictures": ["first", "last"]}
    data = DataArguments(file_name=write(tmp_path / "a.jsonl", [row]), messages="chat", images="pictures")
    rows = read_rows(data)
    (message,) = messages_of(rows[0], data, rows, response=False)
    assert message == {"role": "user", "content": f"{IMAGE} or {IMAGE} or {IMAGE}", "media": ("first", "part", "last")}


@pytest.mark.parametrize(
    ("row", "shape", "keys"),
    [
        ({"instruction": "a", "input": "", "output": "b"}, "Alpaca",
         {"prompt": "instruction", "query": "input", "response": "output"}),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
         "ShareGPT", {"messages": "conversations", "system": "system"}),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "OpenAI", {"messages": "messages"}),
    ],
)  # fmt: skip
def test_known_formats_are_recognised_and_read(tmp_path, row, shape, keys):
    path = write(tmp_path / "a.jsonl", [row])
    rows = read_rows(DataArguments(file_name=path))
    assert shape_of(rows) == (shape, keys)
    with raises_error(DataError, "'prompt'", shape, *keys.values()):
        need_column("prompt", rows)
    data = DataArguments(file_name=path, **keys)
    messages = [(message["role"], message["content"]) for message in messages_of(rows[0], data, rows, response=True)]
    assert [message for message in messages if message[0] != "system"] == [("user", "a"), ("assistant", "b")]
    assert (messages[0] == ("system", "s")) is (shape == "ShareGPT")


def test_messages_of_sharegpt_have_known_roles(tmp_path):
    said = [("system", "s"), ("human", "a"), ("gpt", "b"), ("observation", "c"), ("user", "d")]
    chat = [{"from": role, "value": text} for role, text in said]
    data = DataArguments(file_name=write(tmp_path / "a.jsonl", [{"c": chat}]), messages="c")
    rows = read_rows(data)
    roles = [message["role"] for message in messages_of(rows[0], data, rows, response=False)]
    assert roles == ["system", "user", "assistant", "tool", "user"]
    chat[2]["from"] = "function_call"
    rows = read_rows(DataArguments(file_name=write(tmp_path / "a.jsonl", [{"c": chat}])))
    with raises_error(DataError, "a.jsonl row 1: message 3", "function_call", "gpt"):
        messages_of(rows[0], data, rows, response=False)
