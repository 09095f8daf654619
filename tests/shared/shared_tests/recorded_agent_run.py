"""End-to-end run of agents that call an engine through the recording endpoint, by `roll-core run` in a subprocess.

For plugins of this repository:

    class TestRecordedAgentRun(RecordedAgentRunTests):
        engine = "vllm"
        settings = {"kv_cache_memory_bytes": 32 << 20}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
AGENT = """
import openai

from roll_core.types import Reward


def talk(task, session, stream: bool = False):
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages, most = [{"role": "user", "content": "go"}], 0
    for _ in range(2):
        found = client.chat.completions.create(model=session.model, messages=messages, stream=stream)
        if stream:
            pieces = [each.choices[0].delta.content or "" for each in found if each.choices]
            text, most = "".join(pieces), max(most, sum(map(bool, pieces)))
        else:
            text = found.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    client.close()
    return Reward(value=sum(map(ord, text)) % 10 / 10, detail={"pieces": float(most)})
"""
BOUND = 1e-4
"""Bound on the difference between engine and trainer logprobs of the same weights in fp32."""
RUN_S = 840.0


class RecordedAgentRunTests:
    """The agents know nothing but OpenAI's client. Half of them stream."""

    engine: ClassVar[str]
    """Name of the infer strategy."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Its `strategy_config`."""

    def test_agents_of_openai_s_client_are_trained(self, tmp_path: Path) -> None:
        """Their turns are chains of the engine's tokens, whose logprobs are the trainer's; streams come in pieces."""
        (tmp_path / "talking.py").write_text(AGENT, encoding="utf-8")
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(self._config(tmp_path)), encoding="utf-8")
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        done = subprocess.run(
            [sys.executable, "-m", "roll_core", "run", str(tmp_path / "run.yaml")],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        run = tmp_path / "output" / "talk" / "latest"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        assert [line["step"] for line in lines] == [1, 2]
        for line in lines:
            assert line["actor/logprob_gap"] < BOUND
            assert line["actor/grad_norm"] > 0
            assert line["rollout/forks"] == 0
            assert [line[f"agent/{tag}/calls/mean"] for tag in ("plain", "streamed")] == [2, 2]
        groups = [
            json.loads(line)
            for file in sorted((run / "rollouts").glob("step-*.jsonl"))
            for line in file.read_text(encoding="utf-8").splitlines()[1:]
        ]
        assert sorted({group["id"].partition("/")[0] for group in groups}) == ["plain", "streamed"]
        samples = [sample for group in groups for sample in group["samples"]]
        assert len(samples) == 16
        assert all([turn["parent"] for turn in each["turns"]] == [None, 0] for each in samples)
        pieces = [each["reward"]["detail"]["pieces"] for each in samples]
        assert max(pieces) > 2

    def _config(self, folder: Path) -> Mapping[str, Any]:
        return {
            "pipeline": "agentic",
            "exp_name": "talk",
            "output_dir": str(folder / "output"),
            "executor": "local",
            "seed": 3,
            "max_steps": 2,
            "prompt_length": 16,
            "response_length": 300,
            "rollout_batch_size": 8,
            "max_actions_per_traj": 2,
            "max_tokens_per_step": 120,
            "record_rollouts": True,
            "track_with": [],
            "save_steps": 0,
            "eval_steps": 0,
            "tokenizer": {"kind": "char", "alphabet": "abcdefghijklmnopqrstuvwxyz0123456789>"},
            "guards": {"logprob_gap": {"action": "error", "threshold": BOUND}},
            "custom_envs": {
                tag: {"agent": "talking:talk", "agent_config": {"stream": tag == "streamed"}, "isolation": "thread"}
                for tag in ("plain", "streamed")
            },
            "train_env_manager": {"group_size": 4},
            "actor_train": {
                "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True, "random_init": MODEL},
                "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 8},
                "data_args": {"template": "plain"},
                "strategy_args": {"strategy_name": "hf_train"},
                "device_mapping": [0],
            },
            "actor_infer": {
                "model_args": {"dtype": "fp32"},
                "strategy_args": {"strategy_name": self.engine, "strategy_config": dict(self.settings)},
                "device_mapping": [0],
            },
        }
