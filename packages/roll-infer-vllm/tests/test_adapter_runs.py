"""A run that trains adapters and sends them alone: `roll-core run` on a tiny model, roles taking turns on one slot."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import yaml

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.ray,
    pytest.mark.timeout(900),
]
RANK, LAYERS = 4, 2
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
INPUTS_AND_OUTPUTS = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 2 * (64 + 96) + (96 + 64)
"""Of q, k and v, o, gate and up, down."""
JUDGE = "def score(prompt, response, **row):\n    return sum(c in '02468' for c in response) / 6 + len(response) % 2\n"


def test_a_trained_adapter_travels_alone(tmp_path):
    (tmp_path / "judges.py").write_text(JUDGE, encoding="utf-8")
    rows = [json.dumps({"id": i, "prompt": f"{i:03d}>", "ground_truth": ""}) for i in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = {
        "pipeline": "rlvr",
        "exp_name": "adapters",
        "output_dir": str(tmp_path / "output"),
        "executor": "ray",
        "seed": 3,
        "max_steps": 2,
        "rollout_batch_size": 4,
        "num_return_sequences_in_group": 4,
        "prompt_length": 8,
        "response_length": 6,
        "track_with": [],
        "save_steps": 0,
        "eval_steps": 0,
        "tokenizer": {"kind": "char", "alphabet": "0123456789>"},
        "guards": {"logprob_probe": {"every": 1}, "logprob_gap": {"action": "error", "threshold": 1e-4}},
        "actor_train": {
            "model_args": {
                "dtype": "fp32",
                "disable_gradient_checkpointing": True,
                "random_init": MODEL,
                "lora_target": "all-linear",
                "lora_rank": RANK,
            },
            "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 16},
            "data_args": {"file_name": str(tmp_path / "rows.jsonl")},
            "strategy_args": {"strategy_name": "hf_train"},
            "device_mapping": [0],
        },
        "actor_infer": {
            "model_args": {"dtype": "fp32"},
            "strategy_args": {
                "strategy_name": "vllm",
                "strategy_config": {"enable_lora": True, "kv_cache_memory_bytes": 32 << 20},
            },
            "device_mapping": [0],
        },
        "rewards": {"digits": {"reward": "function", "function": "judges:score"}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "roll_core", "run", str(tmp_path / "run.yaml")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    run = tmp_path / "output" / "adapters" / "latest"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["weight_sync/version"] for line in lines] == [0, 1]
    for line in lines:
        assert line["weight_sync/copied_bytes"] == 4 * RANK * LAYERS * INPUTS_AND_OUTPUTS
        assert line["weight_sync/logprob_probe"] < 1e-4
        assert line["actor/logprob_gap"] < 1e-4
        assert line["actor/grad_norm"] > 0
        assert line["engine/actor_infer/generated_tokens"] >= line["tokens/generated"] > 0
