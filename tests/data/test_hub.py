"""Rows of data sets of the Hub, read from a local server with its API."""

from __future__ import annotations

import sys

import pytest

from roll_core.data.hub import HubName
from roll_core.data.rows import first_rows, read_rows
from roll_core.data.streamed import StreamedRows
from roll_core.errors import DataError
from roll_core.spec.config import DataArguments
from roll_testing.errors import raises_error
from shared_tests.dataset_hub import serving_datasets, use_hub

datasets = pytest.importorskip("datasets")


def problems(split, start):
    return [{"question": f"{split} {n}+{start}", "answer": f"so #### {n + start}"} for n in range(5)]


def gsm8k(start):
    return {
        "main": {split: problems(split, start) for split in ("train", "test")},
        "socratic": {"train": problems("socratic", start)},
    }


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with `openai/gsm8k`, and an empty cache."""
    with serving_datasets() as served:
        served.push("openai/gsm8k", gsm8k(1))
        use_hub(served.url, tmp_path, monkeypatch)
        yield served


def questions(name, **data):
    return [row.values["question"] for row in read_rows(DataArguments(file_name=name, **data))]


def test_a_name_has_the_arguments_of_load_dataset():
    assert HubName.parse("hf://a/b") == HubName(repo="a/b")
    assert HubName.parse("hf://a/b/c?split=train[:10%25]+test&revision=refs%2Fconvert%2Fparquet") == HubName(
        repo="a/b", subset="c", split="train[:10%]+test", revision="refs/convert/parquet"
    )


def test_streamed_rows_are_those_in_memory(hub):
    data = DataArguments(file_name=["hf://openai/gsm8k/main?split=test", "hf://openai/gsm8k/socratic"])
    streamed, rows = StreamedRows(data), read_rows(data)
    assert list(streamed.read([9, 0, 4])) == [rows[9], rows[0], rows[4]]
    assert streamed.revisions == rows.revisions


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("hf://squad", ["hf://OWNER/NAME"]),
        ("hf://datasets/openai/gsm8k/main", ["hf://openai/gsm8k/main"]),
        ("hf://a/b/c/d", ["hf://OWNER/NAME"]),
        ("hf://a/b?spilt=test", ["split=…"]),
        ("hf://a/b?split=", ["split="]),
    ],
)
def test_a_wrong_name_is_an_error(name, named):
    with raises_error(DataError, name, *named):
        HubName.parse(name)


def test_rows_are_those_of_the_split(hub):
    assert questions("hf://openai/gsm8k/main") == [f"train {n}+1" for n in range(5)]
    assert questions("hf://openai/gsm8k/socratic", max_samples=2) == ["socratic 0+1", "socratic 1+1"]
    names = ["hf://openai/gsm8k/main?split=test[3:]", "hf://openai/gsm8k/main?split=train[:1]"]
    rows = read_rows(DataArguments(file_name=names))
    assert [row.values["question"] for row in rows] == ["test 3+1", "test 4+1", "train 0+1"]
    assert [row.id for row in rows] == ["0", "1", "2"]
    assert rows[2].where == f"{names[1]} row 1"


def test_rows_stay_those_of_the_recorded_commit(hub):
    name = "hf://openai/gsm8k/main"
    before = read_rows(DataArguments(file_name=name)).revisions
    assert before == {name: next(iter(hub.commits["openai/gsm8k"]))}
    after = hub.push("openai/gsm8k", gsm8k(2))
    latest = read_rows(DataArguments(file_name=name))
    assert (latest.revisions, latest[0].values["question"]) == ({name: after}, "train 0+2")
    pinned = read_rows(DataArguments(file_name=name), before)
    assert (pinned.revisions, pinned[0].values["question"]) == (before, "train 0+1")
    assert questions(f"{name}?revision={before[name]}")[0] == "train 0+1"


def test_the_first_rows_need_no_download(hub, tmp_path):
    rows = first_rows("hf://openai/gsm8k/main?split=test[2:]", DataArguments(), 3)
    assert [row.values["question"] for row in rows] == ["test 0+1", "test 1+1", "test 2+1"]
    assert not list((tmp_path / "datasets").rglob("*.arrow"))
    assert not list((tmp_path / "hub").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("hf://openai/gsm8k", ["main", "socratic", "hf://openai/gsm8k/SUBSET?split=SPLIT"]),
        ("hf://openai/gsm8k/mian", ["mian", "main", "socratic"]),
        ("hf://openai/gsm8k/main?split=tset", ["tset", "test"]),
        ("hf://openai/nothing", ["openai/nothing"]),
        (f"hf://openai/gsm8k/main?revision={'c' * 40}", ["c" * 40]),
    ],
)
def test_missing_parts_of_the_hub_are_named(hub, name, named):
    for read in (lambda: read_rows(DataArguments(file_name=name)), lambda: first_rows(name, DataArguments(), 2)):
        with raises_error(DataError, f"{name}: ", *named):
            read()


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with raises_error(DataError, "hf://a/b", "roll-core[hub]"):
        read_rows(DataArguments(file_name="hf://a/b"))


def test_a_directory_does_not_hide_a_data_set(hub, tmp_path, monkeypatch):
    (tmp_path / "openai/gsm8k").mkdir(parents=True)
    (tmp_path / "openai/gsm8k/train.jsonl").write_text('{"question": "mine"}\n')
    monkeypatch.chdir(tmp_path)
    with raises_error(DataError, "hf://openai/gsm8k", "openai/gsm8k"):
        questions("hf://openai/gsm8k")


@pytest.mark.parametrize("where", ["offline", "unreachable"])
def test_the_cache_serves_what_it_has_without_the_hub(hub, tmp_path, monkeypatch, where):
    first = read_rows(DataArguments(file_name="hf://openai/gsm8k/main")).revisions["hf://openai/gsm8k/main"]
    if where == "offline":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    else:
        use_hub("http://127.0.0.1:9", tmp_path, monkeypatch)
        monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    assert questions("hf://openai/gsm8k/main?split=test")[0] == "test 0+1"
    assert questions(f"hf://openai/gsm8k/main?revision={first}")[0] == "train 0+1"
    with raises_error(DataError, "hf://openai/gsm8k/main?revision=v2", first, "v2"):
        questions("hf://openai/gsm8k/main?revision=v2")
    with raises_error(DataError, "hf://openai/gsm8k/socratic", "socratic"):
        questions("hf://openai/gsm8k/socratic")
    with raises_error(DataError, "hf://openai/other", "HF_HUB_OFFLINE"):
        questions("hf://openai/other")
