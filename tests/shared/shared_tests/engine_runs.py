"""End-to-end runs with an engine, by `roll-core run` in a subprocess: adapters, images, and agents at the recording
endpoint.

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

from roll_testing.image_models import tiny_vision
from shared_tests.tiny_vision import picture

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
    "max_position_embeddings": 512,
}
MIXTURE = {
    **{key: each for key, each in MODEL.items() if key != "intermediate_size"},
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}
"""Router logits are close enough for engine and trainer to select different experts for one token in twenty."""
INPUTS_AND_OUTPUTS = (64 + 64) + 2 * (64 + 32) + (64 + 64) + 2 * (64 + 96) + (96 + 64)
"""Input plus output sizes of the projections q, k and v, o, gate and up, down, summed over one layer."""
JUDGE = "def score(prompt, response, **row):\n    return sum(c in '02468' for c in response) / 6 + len(response) % 2\n"
SEEN = "def score(prompt, response, images):\n    return images[0].width + len(response) % 3\n"
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


def finished_run(
    folder: Path, module: str, source: str, config: Mapping[str, Any]
) -> tuple[Path, list[dict[str, Any]]]:
    """Run directory and metrics of a run that finished, with a module of the user beside its config."""
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    (folder / "run.yaml").write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "roll_core", "run", str(folder / "run.yaml")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    run = folder / "output" / config["exp_name"] / "latest"
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


class AdapterRunTests:
    """Trainer and engine share one slot and use it alternately."""

    engine: ClassVar[str]
    """Name of the infer strategy."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Its `strategy_config`, without `enable_lora`."""

    @pytest.mark.ray
    def test_trained_adapter_is_sent_without_the_base(self, tmp_path: Path) -> None:
        """A weight sync must copy exactly the bytes of the LoRA matrices A and B.

        Engine and trainer logprobs must then agree.
        """
        config = two_steps(tmp_path, self.engine, {"enable_lora": True, **self.settings})
        config["actor_train"]["model_args"] |= {"lora_target": "all-linear", "lora_rank": RANK}
        config["guards"] = {"logprob_probe": {"every": 1}, "logprob_gap": {"action": "error", "threshold": BOUND}}
        _, lines = finished_run(tmp_path, "judges", JUDGE, config)
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


class ImageRunTests:
    """Prompts with an image, two, a video, and none."""

    engine: ClassVar[str]
    """Name of the infer strategy."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Its `strategy_config`."""

    def test_trainer_and_engine_agree_after_images(self, tmp_path: Path) -> None:
        """Logprobs must agree before and after an update, and rewards and records have the images."""
        config = two_steps(tmp_path, self.engine, self.settings)
        for i in range(4):
            picture(28 * (1 + i % 2), 56, seed=i).save(tmp_path / f"{i}.png")
        rows = [
            {"prompt": "<image> how many?", "images": ["0.png"]},
            {"prompt": "<image> or <image>?", "images": ["1.png", "2.png"]},
            {"prompt": "<video> or <image>?", "images": ["3.png"], "videos": [["0.png", "2.png"]]},
            {"prompt": "<image>", "images": ["3.png"]},
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
        del config["tokenizer"], config["actor_train"]["model_args"]["random_init"]
        config["actor_train"]["data_args"] |= {"images": "images", "videos": "videos"}
        config["guards"] = {"logprob_probe": {"every": 1}, "logprob_gap": {"action": "error", "threshold": BOUND}}
        config["rewards"] = {"seen": {"reward": "function", "function": "seeing:score"}}
        config |= {"pretrain": str(tiny_vision(tmp_path / "model", "qwen2_5_vl", num_heads=2)), "prompt_length": 64}
        config |= {"executor": "local", "record_rollouts": True}
        run, lines = finished_run(tmp_path, "seeing", SEEN, config)
        assert [line["step"] for line in lines] == [1, 2]
        for line in lines:
            assert line["weight_sync/logprob_probe"] < BOUND
            assert line["actor/logprob_gap"] < BOUND
            assert line["actor/grad_norm"] > 0
        samples = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
        assert {file.name for file in (run / "media").iterdir()} == {
            image["digest"] for sample in samples for image in sample["images"]
        }
        groups = [
            json.loads(line)
            for file in sorted((run / "rollouts").glob("step-*.jsonl"))
            for line in file.read_text(encoding="utf-8").splitlines()[1:]
        ]
        assert len({digest for group in groups for digest in group["images"]}) == 5  # four images and the video
        assert all(sample["reward"] >= sample["images"][0]["width"] for sample in samples)


class RouterReplayRunTests:
    """Trainer and engine share one slot. The engine rounds to bf16, the trainer does not."""

    engine: ClassVar[str]
    """Name of the infer strategy."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Its `strategy_config`."""
    variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables of its workers."""

    @pytest.mark.ray
    def test_replay_brings_the_trainer_to_the_engines_logprobs(self, tmp_path: Path) -> None:
        """In the first step both runs have the same weights, and prompts: only the trainer's routing differs."""
        found = {}
        for mode in ("R3", "disable"):
            config = two_steps(tmp_path, self.engine, self.settings)
            config["actor_train"]["model_args"]["random_init"] = MIXTURE
            config["actor_infer"]["model_args"]["dtype"] = "bf16"
            config["actor_infer"]["system_envs"] = dict(self.variables)
            config["guards"] = {"logprob_probe": "off", "logprob_gap": "off"}
            config |= {"router_replay": {"mode": mode}, "exp_name": mode, "response_length": 24}
            _, found[mode] = finished_run(tmp_path, "judges", JUDGE, config)
        replayed, plain = (found[mode][0]["actor/logprob_gap"] for mode in ("R3", "disable"))
        assert replayed < 0.7 * plain
        assert all(0 < line["actor/routing_disagreement"] < 0.5 for line in found["R3"])
        assert not any("actor/routing_disagreement" in line for line in found["disable"])


def two_steps(folder: Path, engine: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Config of GRPO of two steps, trainer and engine on one slot; its rows are written into `folder`."""
    rows = [json.dumps({"id": i, "prompt": f"{i:03d}>", "ground_truth": ""}) for i in range(32)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return {
        "pipeline": "rlvr",
        "exp_name": "two-steps",
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
        "actor_train": {
            "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True, "random_init": MODEL},
            "training_args": {"learning_rate": 1e-2, "per_device_train_batch_size": 16},
            "data_args": {"file_name": str(folder / "rows.jsonl")},
            "strategy_args": {"strategy_name": "hf_train"},
            "device_mapping": [0],
        },
        "actor_infer": {
            "model_args": {"dtype": "fp32"},
            "strategy_args": {"strategy_name": engine, "strategy_config": dict(settings)},
            "device_mapping": [0],
        },
        "rewards": {"digits": {"reward": "function", "function": "judges:score"}},
    }


class RecordedAgentRunTests:
    """The agents know nothing but OpenAI's client. Half of them stream."""

    engine: ClassVar[str]
    """Name of the infer strategy."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Its `strategy_config`."""

    def test_agents_of_openai_s_client_are_trained(self, tmp_path: Path) -> None:
        """Their turns are chains of the engine's tokens, whose logprobs are the trainer's; streams come in pieces."""
        run, lines = finished_run(tmp_path, "talking", AGENT, self._config(tmp_path))
        assert [line["step"] for line in lines] == [1, 2]
        for line in lines:
            assert line["actor/logprob_gap"] < BOUND
            assert line["actor/grad_norm"] > 0
            assert [line[f"agent/{tag}/calls/mean"] for tag in ("plain", "streamed")] == [2, 2]
        groups = [
            json.loads(line)
            for file in sorted((run / "rollouts").glob("step-*.jsonl"))
            for line in file.read_text(encoding="utf-8").splitlines()[1:]
        ]
        assert sorted({group["id"].partition("/")[0] for group in groups}) == ["plain", "streamed"]
        samples = [sample for group in groups for sample in group["samples"]]
        assert len(samples) == 16
        rollouts = [sample["rollout"]["turns"] for sample in samples]
        parents = [[turn.get("parent") for turn in turns] for turns in rollouts]
        assert all(each in ([None, 0], [None, None]) for each in parents)
        # A reply that is cut off at `<pad>` may have ended there.
        forked = [turns[0]["finish_reason"] for turns in rollouts if turns[1].get("parent") != 0]
        assert forked == ["length"] * int(sum(line["rollout/forks"] for line in lines))
        assert len(forked) <= 2
        pieces = [each["reward"]["detail"]["pieces"] for each in samples]
        assert max(pieces) > 1  # engines report at the first token, then every 64 tokens

    def _config(self, folder: Path) -> Mapping[str, Any]:
        return {
            "pipeline": "agentic",
            "exp_name": "talk",
            "output_dir": str(folder / "output"),
            "executor": "local",
            "seed": 3,
            "max_steps": 2,
            "prompt_length": 16,
            "response_length": 420,
            "rollout_batch_size": 8,
            "max_actions_per_traj": 2,
            "max_tokens_per_step": 200,
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
                "generating_args": {"min_new_tokens": 66},
                "strategy_args": {"strategy_name": self.engine, "strategy_config": dict(self.settings)},
                "device_mapping": [0],
            },
        }
