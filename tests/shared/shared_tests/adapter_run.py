"""End-to-end run that trains adapters and sends only the adapters, by `roll-core run` in a subprocess.

For plugins of this repository:

    class TestAdapterRun(AdapterRunTests):
        engine = "vllm"
        settings = {"kv_cache_memory_bytes": 32 << 20}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
"""Input plus output sizes of the projections q, k and v, o, gate and up, down, summed over one layer."""
JUDGE = "def score(prompt, response, **row):\n    return sum(c in '02468' for c in response) / 6 + len(response) % 2\n"
BOUND = 1e-4
"""Bound on the difference between engine and trainer logprobs of the same weights in fp32."""
RUN_S = 840.0


class AdapterRunTests:
    """Trainer and engine share one slot and use it alternately."""

    engine: ClassVar[str]
    """Name of the infer strategy."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Its `strategy_config`, without `enable_lora`."""

    @pytest.mark.ray
    def test_a_trained_adapter_travels_alone(self, tmp_path: Path) -> None:
        """A weight sync must copy exactly the bytes of the LoRA matrices A and B.

        Engine and trainer logprobs must then agree.
        """
        (tmp_path / "judges.py").write_text(JUDGE, encoding="utf-8")
        rows = [json.dumps({"id": i, "prompt": f"{i:03d}>", "ground_truth": ""}) for i in range(32)]
        (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(self._config(tmp_path)), encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            [sys.executable, "-m", "roll_core", "run", str(tmp_path / "run.yaml")],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        run = tmp_path / "output" / "adapters" / "latest"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [line["weight_sync/version"] for line in lines] == [0, 1]
        for line in lines:
            assert line["weight_sync/copied_bytes"] == 4 * RANK * LAYERS * INPUTS_AND_OUTPUTS
            assert line["weight_sync/logprob_probe"] < BOUND
            assert line["actor/logprob_gap"] < BOUND
            assert line["actor/grad_norm"] > 0
            assert line["tokens/generated"] > 0
        # A delayed reading of the counter is in the next step's metrics.
        counted = [line.get("engine/actor_infer/generated_tokens", 0) for line in lines]
        read = max(step for step, count in enumerate(counted, start=1) if count)
        assert sum(counted) >= sum(line["tokens/generated"] for line in lines[:read])

    def _config(self, folder: Path) -> Mapping[str, Any]:
        return {
            "pipeline": "rlvr",
            "exp_name": "adapters",
            "output_dir": str(folder / "output"),
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
            "guards": {"logprob_probe": {"every": 1}, "logprob_gap": {"action": "error", "threshold": BOUND}},
            "actor_train": {
                "model_args": {
                    "dtype": "fp32",
                    "disable_gradient_checkpointing": True,
                    "random_init": MODEL,
                    "lora_target": "all-linear",
                    "lora_rank": RANK,
                },
                "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 16},
                "data_args": {"file_name": str(folder / "rows.jsonl")},
                "strategy_args": {"strategy_name": "hf_train"},
                "device_mapping": [0],
            },
            "actor_infer": {
                "model_args": {"dtype": "fp32"},
                "strategy_args": {
                    "strategy_name": self.engine,
                    "strategy_config": {"enable_lora": True, **self.settings},
                },
                "device_mapping": [0],
            },
            "rewards": {"digits": {"reward": "function", "function": "judges:score"}},
        }
