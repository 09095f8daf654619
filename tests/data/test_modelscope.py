"""Data sets and models of ModelScope, downloaded by the library `modelscope` from a local server with its API."""

from __future__ import annotations

import json
import sys

import pytest

from roll_core.data.hub import HubName
from roll_core.data.modelscope import selects_modelscope, snapshot_of
from roll_core.data.rows import first_rows, read_rows
from roll_core.data.streamed import StreamedRows
from roll_core.errors import DataError, ModelError
from roll_core.spec.config import DataArguments
from roll_testing.errors import raises_error
from shared_tests.modelscope_hub import serving_modelscope, use_modelscope

pytest.importorskip("datasets")
pytest.importorskip("modelscope")

NAME = "modelscope://openai/gsm8k/main"
CONFIGS = [{"config_name": "main", "data_files": [{"split": s, "path": f"main/{s}.jsonl"} for s in ("train", "test")]}]


def gsm8k(start, revision="master"):
    def lines(split):
        return "".join(json.dumps({"question": f"{split} {n}+{start}"}) + "\n" for n in range(5)).encode()

    card = f"---\n{json.dumps({'configs': CONFIGS})}\n---\n".encode()
    return {"README.md": card, "main/train.jsonl": lines("train"), "main/test.jsonl": lines("test")}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with `openai/gsm8k`, and empty caches."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
    with serving_modelscope() as served:
        served.push("datasets/openai/gsm8k", gsm8k(1))
        served.push("datasets/openai/gsm8k", gsm8k(3), "v3")
        use_modelscope(served.url, tmp_path, monkeypatch)
        yield served


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    return lambda: use_modelscope("http://127.0.0.1:9", tmp_path, monkeypatch)


def questions(name):
    return [row.values["question"] for row in read_rows(DataArguments(file_name=name))]


def test_rows_are_those_of_the_split(hub):
    assert questions(NAME) == [f"train {n}+1" for n in range(5)]
    assert questions(f"{NAME}?split=test[3:]") == ["test 3+1", "test 4+1"]
    assert questions(f"{NAME}?revision=v3")[0] == "train 0+3"
    data = DataArguments(file_name=NAME)
    assert list(StreamedRows(data).read([3, 0])) == [read_rows(data)[3], read_rows(data)[0]]


def test_changed_files_do_not_continue_a_run(hub):
    before = read_rows(DataArguments(file_name=NAME)).revisions
    assert read_rows(DataArguments(file_name=NAME), before).revisions == before
    hub.push("datasets/openai/gsm8k", gsm8k(2))
    assert questions(NAME)[0] == "train 0+2"
    with raises_error(DataError, NAME, before[NAME], "?revision="):
        read_rows(DataArguments(file_name=NAME), before)


def test_check_reads_rows_that_are_in_the_cache(hub):
    assert first_rows(NAME, DataArguments(), 3) is None
    assert not hub.requests
    read_rows(DataArguments(file_name=NAME))
    assert len(first_rows(NAME, DataArguments(), 3)) == 3


def test_names_have_the_parts_of_hub_names():
    assert HubName.parse("modelscope://a/b/c?split=test") == HubName(
        scheme="modelscope://", repo="a/b", subset="c", split="test"
    )
    with raises_error(DataError, "modelscope://squad", "modelscope://OWNER/NAME"):
        HubName.parse("modelscope://squad")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("modelscope://openai/gsm8k/mian", ["mian", "main"]),
        (f"{NAME}?split=tset", ["tset", "test"]),
        ("modelscope://openai/nothing", ["openai/nothing"]),
        (f"{NAME}?revision=v4", ["openai/gsm8k"]),
    ],
)
def test_missing_parts_are_named(hub, name, named):
    with raises_error(DataError, *named):
        read_rows(DataArguments(file_name=name))


def test_without_network_the_copy_in_the_cache_is_read(hub, unreachable, caplog):
    read_rows(DataArguments(file_name=NAME))
    unreachable()
    assert questions(f"{NAME}?split=test")[0] == "test 0+1"
    assert any("modelscope" in record.name and record.levelname == "WARNING" for record in caplog.records)
    with raises_error(DataError, "openai/other", "--dataset"):
        questions("modelscope://openai/other")


def test_an_incomplete_copy_is_not_read(hub, unreachable):
    folder = snapshot_of("dataset", "openai/gsm8k")
    (folder / "main/train.jsonl").rename(folder / "main/train.jsonl.incomplete")
    unreachable()
    with raises_error(DataError, "openai/gsm8k", str(folder)):
        questions(NAME)


@pytest.mark.parametrize("library", ["modelscope", "datasets"])
def test_a_missing_library_is_named(hub, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    with raises_error(DataError, "roll-core[modelscope]"):
        read_rows(DataArguments(file_name=NAME))


def test_a_missing_model_is_named(hub):
    with raises_error(ModelError, "Qwen/nothing"):
        snapshot_of("model", "Qwen/nothing")


@pytest.mark.parametrize(
    ("environment", "config", "selected"),
    [
        ({}, {}, False),
        ({"MODEL_DOWNLOAD_TYPE": "MODELSCOPE"}, {}, True),
        ({"USE_MODELSCOPE": "1"}, {}, True),
        ({"USE_MODELSCOPE": "0"}, {}, False),
        ({"USE_MODELSCOPE": "1", "MODEL_DOWNLOAD_TYPE": "HUGGINGFACE_HUB"}, {}, False),
        ({}, {"USE_MODELSCOPE": "1"}, True),
        ({"MODEL_DOWNLOAD_TYPE": "MODELSCOPE"}, {"MODEL_DOWNLOAD_TYPE": "HUGGINGFACE_HUB"}, False),
    ],
)
def test_rolls_variables_select_modelscope(monkeypatch, environment, config, selected):
    for name in ("MODEL_DOWNLOAD_TYPE", "USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert selects_modelscope(config) is selected
