"""A tiny model learns to write the program that passes its tests."""

from __future__ import annotations

import json
import random
import statistics

import pytest

from roll_rewards import sandbox
from roll_testing.runs import Runs

NEEDS_ISOLATION = pytest.mark.skipif(bool(sandbox.probe()), reason=f"no isolation on this host: {sandbox.probe()}")


@NEEDS_ISOLATION
@pytest.mark.slow
def test_programs_that_pass_become_more_frequent(tmp_path, monkeypatch):
    """The data of the supervised phase has the right digit in half of its programs."""
    monkeypatch.chdir(tmp_path)
    runs, rng = Runs(tmp_path, "local"), random.Random(0)
    rows = []
    for number in range(256):
        digit = number % 4
        written = digit if rng.random() < 0.5 else rng.randrange(4)
        tests = json.dumps([{"input": "", "output": str(digit)}])
        rows.append({"id": number, "prompt": f"{digit}>", "response": f"print({written})", "test_cases": tests})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"tokenizer": {"kind": "char", "alphabet": "0123456789>print()"}, "response_length": 10}
    first = runs.ok(runs.sft(max_steps=60, **shared))
    reward = {"reward": "code", "require_code_block": False, "case_timeout_s": 1, "processes": 2}
    config = runs.rlvr(
        max_steps=12, rollout_batch_size=8, num_return_sequences_in_group=8, rewards={"code": reward}, **shared
    )
    config["actor_train"]["model_args"] = runs.model() | {"model_name_or_path": str(first.run_dir.path / "export")}
    config["tokenizer"] = None
    config["actor_train"]["training_args"]["learning_rate"] = 3e-3
    scores = [line["score/mean"] for line in runs.metrics(runs.ok(config))]
    assert statistics.fmean(scores[:3]) < 0.8
    assert statistics.fmean(scores[-3:]) > statistics.fmean(scores[:3]) + 0.15
