"""Whole runs of the pipelines preference and reward_model."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from roll_core.errors import NonFiniteError

TRAIN_ROLE = {"preference": "actor_train", "reward_model": "reward_train"}


@pytest.fixture
def pairs(local_runs):
    """`pairs(pipeline=..., **keys)`: a config of a run on pairs of right and wrong digits."""
    runs = local_runs
    for name in ("train", "val"):
        rows = [json.loads(line) for line in (runs.folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        with (runs.folder / f"{name}.pairs.jsonl").open("w", encoding="utf-8") as file:
            for row in rows:
                wrong = row["response"][::-1] if row["response"][::-1] != row["response"] else row["response"] + "0"
                pair = {"prompt": row["prompt"], "chosen": row["response"], "rejected": wrong, "margin": 0.5}
                file.write(json.dumps(pair | {"ground_truth": row["ground_truth"]}) + "\n")

    def make(pipeline="preference", **given):
        role = runs.sft()["sft_train"]
        role["data_args"] = {"file_name": str(runs.folder / "train.pairs.jsonl")}
        return (
            runs.base(pipeline)
            | {
                "max_steps": 4,
                "eval_steps": 4,
                TRAIN_ROLE.get(pipeline, "actor_train"): role,
                "validation": {"data_args": {"file_name": str(runs.folder / "val.pairs.jsonl")}},
            }
            | given
        )

    return make


REFERENCE = {"reference": {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}}}


def test_dpo_starts_at_log_2_and_separates_the_pairs(local_runs, pairs):
    config = pairs("dpo", precompute_ref_log_probs=True, max_steps=8, eval_steps=8)
    lines = local_runs.metrics(local_runs.ok(config))
    assert lines[0]["val/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert lines[0]["val/rewards/margins"] == 0
    assert lines[1]["train/loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    assert lines[-1]["val/rewards/accuracies"] > 0.5
    assert {"train/rewards/chosen", "train/logps/rejected", "train/nll", "train/grad_norm"} <= lines[1].keys()
