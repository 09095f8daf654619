"""Whole runs on a data set of a local hub: what is recorded, and resume after the data set has changed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from shared_tests.dataset_hub import serving_datasets, use_hub

pytest.importorskip("datasets")
NAME = "hf://me/digits?split=train"


@pytest.mark.slow
def test_a_resumed_run_reads_the_commit_of_its_record(local_runs, monkeypatch):
    file = local_runs.folder / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [{"question": row["prompt"], "solution": f"so #### {row['response']}"} for row in rows]

    def config(**keys):
        made = local_runs.sft(max_steps=3, **keys)
        columns = {"prompt": "{{ question }}", "response": "{{ solution.split('####')[1] | trim }}"}
        made["sft_train"]["data_args"] = {"file_name": NAME, "columns": columns}
        return made

    with serving_datasets() as hub:
        use_hub(hub.url, local_runs.folder, monkeypatch)
        commit = hub.push("me/digits", {"default": {"train": rows}})
        whole = local_runs.ok(config(exp_name="whole"))
        first = local_runs.ok(config(exp_name="halves", save_steps=2))
        later = hub.push("me/digits", {"default": {"train": rows[::-1]}})
        checkpoint = str(first.run_dir.checkpoints / "step-2")
        second = local_runs.ok(config(exp_name="halves", resume_from_checkpoint=checkpoint))
        other = local_runs.ok(config(exp_name="other"))
    assert local_runs.timeless(second)[2:] == local_runs.timeless(whole)[2:]
    assert local_runs.timeless(other) != local_runs.timeless(whole)
    one, two = (load_file(run.run_dir.export / "model.safetensors") for run in (whole, second))
    assert all(torch.equal(one[name], two[name]) for name in one)
    recorded = [json.loads(run.run_dir.record.read_text(encoding="utf-8"))["datasets"] for run in (second, other)]
    assert recorded == [{NAME: commit}, {NAME: later}]
