"""`roll-core run`s that go on from one strategy to the next, and back, through the state that all of them read."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.engine("deepspeed"),
    pytest.mark.timeout(960),  # five runs, each of which starts Ray where there are two ranks
]

CHAIN = ("fsdp2_train", "deepspeed_train", "hf_train", "deepspeed_train", "fsdp2_train")
"""One step on each."""
ROUNDING = 2e-5
"""Relative, of metrics and weights: strategies add up in different orders."""
CLOCKS = ("time", "tokens_per_s")
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def config(folder, number: int, ranks: int, stage: int) -> dict[str, Any]:
    strategy = {"strategy_name": CHAIN[number]}
    if strategy["strategy_name"] == "deepspeed_train":
        zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        strategy["strategy_config"] = {"zero_optimization": zero}
    resume = str(folder / f"output/part-{number - 1}/001/checkpoints/step-{number}") if number else False
    return {
        "pipeline": "sft",
        "exp_name": f"part-{number}",
        "output_dir": str(folder / "output"),
        "executor": "local" if ranks == 1 else "ray",
        "seed": 3,
        "max_steps": len(CHAIN),
        "save_steps": 1,
        "eval_steps": 0,
        "portable_checkpoints": True,
        "resume_from_checkpoint": resume,
        "prompt_length": 8,
        "response_length": 6,
        "track_with": [],
        "tokenizer": {"kind": "char", "alphabet": "0123456789>"},
        "sft_train": {
            "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True, "random_init": MODEL},
            "training_args": {
                "learning_rate": 1e-2,
                "weight_decay": 0.1,
                "lr_scheduler_type": "cosine",
                "warmup_steps": 1,
                "per_device_train_batch_size": 16 // ranks,
            },
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "strategy_args": strategy,
            "device_mapping": list(range(ranks)),
        },
    }


@pytest.mark.parametrize(
    ("ranks", "stage"), [(1, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 3), (1, 1)))]
)
def test_fsdp2_then_deepspeed_then_hf_and_back_is_one_run(tmp_path, ranks, stage):
    digits = [f"{number * 37 % 1000:03d}" for number in range(80)]
    rows = [{"prompt": f"{each}>", "response": "".join(sorted(each))} for each in digits]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = []
    for number in range(len(CHAIN)):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump(config(tmp_path, number, ranks, stage)), encoding="utf-8")
    command = [sys.executable, "-m", "roll_core", "run", *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    whole, last = (tmp_path / "output" / f"part-{number}" / "001" for number in (0, len(CHAIN) - 1))
    lines, others = (
        [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for run in (last, whole)
    )
    assert len(lines) == len(CHAIN)
    for one, other in zip(lines, others, strict=True):
        numbers = {name: value for name, value in other.items() if not name.startswith(CLOCKS)}
        assert {name: one[name] for name in numbers} == pytest.approx(numbers, rel=ROUNDING)
    weights, expected = (load_file(run / "export" / "model.safetensors") for run in (last, whole))
    missed = sum(float((weights[name] - each).square().sum()) for name, each in expected.items())
    assert math.sqrt(missed / sum(float(each.square().sum()) for each in expected.values())) < ROUNDING


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_default_checkpoint_converts_to_the_exported_model(tmp_path, stage):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "21>", "response": "12"}\n' * 32, encoding="utf-8")
    settings = config(tmp_path, 1, 1, stage) | {
        "max_steps": 2,
        "portable_checkpoints": False,
        "resume_from_checkpoint": False,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    run = tmp_path / "output" / "part-1" / "001"
    converted = tmp_path / "converted"
    for words in (
        ["run", tmp_path / "run.yaml"],
        ["checkpoint", "convert", run / "checkpoints" / "step-2", converted, "--platform", "cpu"],
    ):
        command = [sys.executable, "-m", "roll_core", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    expected, found = (load_file(each / "model.safetensors") for each in (run / "export", converted))
    assert expected.keys() == found.keys()
    assert all(found[name].equal(each) for name, each in expected.items())
