"""Runs whose rows stay on the disk: the batches of a run with all rows in memory, and exact resume."""

from __future__ import annotations

import json

import pytest

from roll_core.config import load
from roll_core.errors import CheckpointMismatchError, ConfigError, DataError
from roll_core.runtime.run.loop import execute
from roll_testing.errors import raises_error
from roll_tools.data_audit import sources


@pytest.fixture
def streaming(local_runs):
    def config(**keys):
        chosen = {"streaming": True, "tokenizer": {"kind": "byte"}, "max_steps": 8, "save_steps": 2, "eval_steps": 0}
        return local_runs.sft() | chosen | {"export_model": False} | keys

    return config


class EndsInStep5:
    def roll_step_finished(self, run, step, metrics):
        if step == 5:
            raise RuntimeError("killed")


def of_steps(runs, result):
    lines = runs.timeless(result)
    return [{key: value for key, value in line.items() if key != "data/dropped_rows"} for line in lines]


def test_batches_equal_those_of_rows_in_memory(local_runs, streaming):
    streamed = local_runs.ok(streaming(exp_name="streamed"))
    in_memory = local_runs.ok(streaming(exp_name="in-memory", streaming=False))
    assert of_steps(local_runs, streamed) == of_steps(local_runs, in_memory)  # two epochs of 64 rows


def test_resumed_run_continues_after_dropped_rows(local_runs, streaming):
    rows = [json.loads(line) for line in (local_runs.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in [*rows[:20], *rows[20::3]]:
        row["response"] *= 100  # dropped: too long. The first batch has none left
    path = local_runs.folder / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = streaming(shuffle=False)
    config["sft_train"]["data_args"] = {"file_name": str(path)}
    whole = local_runs.ok(config | {"exp_name": "whole"})
    assert local_runs.metrics(whole)[-1]["data/dropped_rows"] > 0
    killed = execute(
        load(config | {"exp_name": "half"}, [], local_runs.registry), local_runs.registry, callbacks=[EndsInStep5()]
    )
    assert isinstance(killed.error, RuntimeError)
    half = config | {"exp_name": "half", "resume_from_checkpoint": True}
    resumed = local_runs.ok(half)
    assert local_runs.timeless(resumed) == local_runs.timeless(whole)
    with raises_error(CheckpointMismatchError, "streaming"):
        local_runs.ok(half | {"streaming": False, "max_steps": 9})


def test_rows_that_are_all_dropped_are_an_error(local_runs, streaming):
    with raises_error(DataError, "response_length"):
        local_runs.ok(streaming(response_length=1))


def test_audit_reads_the_first_rows_only(local_runs, streaming):
    config = load(streaming(), [], local_runs.registry).config
    assert [(key, data.max_samples) for key, data in sources(config)] == [
        ("sft_train.data_args", 1000), ("validation.data_args", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "key"), [({"max_steps": None}, "max_steps"), ({"tokenizer": {"kind": "char"}}, "tokenizer.kind")]
)
def test_keys_that_need_all_rows_are_refused(local_runs, streaming, changed, key):
    with raises_error(ConfigError, key):
        load(streaming(**changed), [], local_runs.registry)
