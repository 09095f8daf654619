"""Columns that `data_args.columns` computes: their values and types, and errors that name row and column."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from roll_core.data.rows import messages_of, read_rows, text_of
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments
from roll_testing.errors import raises_error

ROW = {"question": "1+1?", "answer": "so #### 1,002 ", "tests": ["a", "b"], "n": 3, "Odd name": None, "prompt": "old"}


def computed(tmp_path, rows=(ROW,), **columns):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_rows(DataArguments(file_name=str(path), columns=columns))


def test_templates_are_text_and_see_all_columns(tmp_path):
    rows = computed(
        tmp_path,
        prompt="{{ question }}\nThink. Write \\boxed{}.",
        ground_truth="{{ answer.split('####')[1] | trim | replace(',', '') }}",
        twice="{{ n }}{{ n }}",
        fixed="math",
        size="{% if n > 2 %}large{% else %}small{% endif %}",
    )
    assert {key: value for key, value in rows[0].values.items() if ROW.get(key) != value} == {
        "prompt": "1+1?\nThink. Write \\boxed{}.", "ground_truth": "1002", "twice": "33", "fixed": "math",
        "size": "large",
    }  # fmt: skip
    assert text_of(rows[0], "prompt", rows) == "1+1?\nThink. Write \\boxed{}."


def test_an_expression_alone_keeps_the_type_of_its_value(tmp_path):
    (row,) = computed(
        tmp_path,
        cases="{{ tests }}",
        number="{{- n + 1 -}}",
        text="{{ '007' }}",
        nothing="{{ row['Odd name'] }}",
        chat="{{ [{'role': 'user', 'content': question}] }}",
        other="{{ missing | default('none') }}",
        prompt="{{ prompt }}",
    )
    values = {name: row.values[name] for name in ("cases", "number", "text", "nothing", "chat", "other", "prompt")}
    assert values == {
        "cases": ["a", "b"], "number": 4, "text": "007", "nothing": None,
        "chat": [{"role": "user", "content": "1+1?"}], "other": "none", "prompt": "old",
    }  # fmt: skip


def test_a_computed_tag_and_id_name_the_file(tmp_path):
    paths = []
    for name in ("math", "code"):
        paths.append(str(tmp_path / f"{name}.jsonl"))
        (tmp_path / f"{name}.jsonl").write_text('{"n": 1}\n')
    columns = {"tag": "{{ 'math' if 'math' in file_name else 'code' }}", "id": "{{ file_name }}:{{ n }}"}
    rows = read_rows(DataArguments(file_name=paths, columns=columns))
    assert [(row.tag, row.id) for row in rows] == [("math", f"{paths[0]}:1"), ("code", f"{paths[1]}:1")]


def test_padded_structs_of_a_table_lose_their_nulls(tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    other = {"id": "2", "type": "function", "function": {"name": "g", "arguments": {"b": 2}}}
    chats = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [each]}]
        for each in (call, other)
    ]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"chat": chat} for chat in chats]), path)
    data = DataArguments(file_name=str(path), messages="messages", columns={"messages": "{{ chat }}"})
    rows = read_rows(data)
    called = messages_of(rows[0], data, rows, response=True)[-1]["tool_calls"]
    assert called[0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ qestion }}", ["question"]),
        ("{{ question.foo }}", ["foo"]),
        ("{{ answer.split('@')[1] }}", ["list"]),
        ("text {{ row['Odd name'] }}", ["null"]),
        ("{{ n + question }}", ["TypeError"]),
        ("{{ question.__class__ }}", ["SecurityError", "__class__"]),
    ],
)
def test_an_error_names_row_and_column(tmp_path, template, named):
    good = {"question": "q", "foo": "f"}
    with raises_error(DataError, "rows.jsonl row 1: data_args.columns.prompt", *named):
        computed(tmp_path, [ROW, good], prompt=template)
    lacking = [ROW, {name: value for name, value in ROW.items() if name != "answer"}]
    with raises_error(DataError, "rows.jsonl row 2: data_args.columns.truth", "answer"):
        computed(tmp_path, lacking, truth="{{ answer }}")


@pytest.mark.parametrize("template", ["{{ question", "{% if %}", "{{ question | no_such_filter }}"])
def test_a_wrong_template_is_no_config(template):
    with pytest.raises(ValidationError) as error:
        DataArguments(columns={"prompt": template})
    assert [each["loc"] for each in error.value.errors()] == [("columns",)]
