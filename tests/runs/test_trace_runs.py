"""One trace of a whole run, from the driver and its workers: `./run test-engines tracing`."""

from __future__ import annotations

import json
from collections import Counter

import pytest

TREE = """
1 run
2 run/build roles
1 run/build roles/actor_infer.start
1 run/build roles/actor_train.start
1 run/build roles/rewards.digits.start
2 run/checkpoint
2 run/checkpoint/actor_train.save
1 run/export/actor_train.export
2 run/step
8 run/step/rollout/actor_infer.result
8 run/step/rollout/rewards.digits.score
2 run/step/logprobs/actor_train.score
4 run/step/train/actor_train.update
2 run/step/weight_sync/actor_train.prepare_send
2 run/step/weight_sync/actor_infer.receive_weights
"""
"""Spans of a GRPO run of 2 steps with 4 prompts of 2 responses, 2 updates per step and a checkpoint after each."""

pytestmark = pytest.mark.engine("opentelemetry.sdk")


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.ray])])
def test_a_run_is_one_trace_with_the_calls_of_each_role(local_runs, executor):
    config = local_runs.rlvr(max_steps=2, save_steps=1, executor=executor, track_with=["opentelemetry"])
    run = local_runs.ok(config | {"tracker_kwargs": {"opentelemetry": {"exporter": "file"}}}).run_dir.path
    files = {path.name: path.read_text(encoding="utf-8").splitlines() for path in run.glob("spans*.jsonl")}
    workers = {f"spans-{role}-0.jsonl" for role in ("actor_train", "actor_infer", "rewards.digits")}
    assert set(files) == {"spans.jsonl"} | (workers if executor == "ray" else set())
    spans = [json.loads(line) for lines in files.values() for line in lines]
    assert len({span["context"]["trace_id"] for span in spans}) == 1
    by_id = {span["context"]["span_id"]: span for span in spans}

    def path(span: dict) -> str:
        return f"{path(by_id[span['parent_id']])}/{span['name']}" if span["parent_id"] else span["name"]

    found = Counter(map(path, spans))
    expected = {name: int(number) for number, _, name in (line.partition(" ") for line in TREE.split("\n")[1:-1])}
    assert {name: found[name] for name in expected} == expected
    assert not any(name.endswith(".progress") for name in found)
    roles = {span["attributes"].get("roll.role") for span in spans}
    assert roles == {None, "actor_train", "actor_infer", "rewards.digits"}
