"""`roll-core run` with roles on Megatron ranks that share a model: it trains, publishes, saves and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
MIXTURE = MODEL | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "initializer_range": 0.3,
}
TENSOR = {"tensor_model_parallel_size": 2}
SPREAD = TENSOR | {"pipeline_model_parallel_size": 2}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a role is trained."""

    strategy: str = "megatron_cpu_train"
    spread: dict = field(default_factory=dict)
    ranks: int = 1
    replicas: int = 1
    model: dict = field(default_factory=lambda: MODEL)

    def role(self, *, sequences):
        """Its configuration, of steps of so many sequences, in microbatches of 4."""
        return {
            "model_args": {"dtype": "fp32", "random_init": self.model},
            "training_args": {
                "learning_rate": 1e-2,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": sequences // 4 // self.replicas,
            },
            "strategy_args": {"strategy_name": self.strategy, "strategy_config": self.spread},
            "device_mapping": list(range(self.ranks)),
        }


ALONE = Place(strategy="hf_train")
PAIR = Place(spread=TENSOR | {"sequence_parallel": True}, ranks=2)
SQUARE = Place(spread=SPREAD, ranks=4)
PAIRS = Place(spread=TENSOR, ranks=4, replicas=2)


@pytest.fixture
def roll_core(tmp_path):
    """The command, from the repository, with the strategies for a machine without an accelerator as a package that
    workers find."""
    info = tmp_path / "site" / "roll_strategy_megatron_on_cpu-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: roll-strategy-megatron-on-cpu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[roll.plugins]\nmegatron-on-cpu = megatron_on_cpu_plugin\n")
    places = [str(info.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]

    def call(*words):
        done = subprocess.run(
            [sys.executable, "-m", "roll_core", *map(str, words)],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return call


@pytest.fixture
def run(roll_core, tmp_path):
    """A run of these settings by its name; its directory."""
    letters = [f"{one}{other}" for one in "abcd" for other in "abcd"] * 4
    rows = [{"id": at, "prompt": each, "response": each[::-1]} for at, each in enumerate(letters)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def made(name, settings):
        trained = [role for role in settings.values() if isinstance(role, dict) and "training_args" in role]
        for role in trained:
            role.setdefault("data_args", {"file_name": str(tmp_path / "rows.jsonl")})
        ranks = max(len(role["device_mapping"]) for role in trained)
        config = {
            "platform": "cpu",
            "exp_name": name,
            "output_dir": str(tmp_path / "output"),
            "executor": "ray" if ranks > 1 else "local",
            "num_gpus_per_node": 4,
            "prompt_length": 4,
            "response_length": 8,
            "save_steps": 0,
            "eval_steps": 0,
            "track_with": [],
            "tokenizer": {"kind": "char", "alphabet": "abcd"},
        }
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config | settings), encoding="utf-8")
        roll_core("run", file)
        return tmp_path / "output" / name / "latest"

    return made


def rlvr(**settings):
    """Eight prompts a step, eight answers each."""
    return {
        "pipeline": "rlvr",
        "rollout_batch_size": 8,
        "num_return_sequences_in_group": 8,
        "actor_infer": {
            "model_args": {"dtype": "fp32"},
            "strategy_args": {"strategy_name": "hf_infer"},
            "device_mapping": [0],
        },
        "rewards": {"share": {"reward": "function", "function": "megatron_on_cpu_plugin:share_of_c"}},
        "guards": {"logprob_probe": {"every": 1}},
        **settings,
    }


def metrics(run_dir):
    """Of every step."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_grpo_on_tensor_by_pipeline_ranks_equals_hf_train(run):
    one, four = (
        run(name, rlvr(actor_train=place.role(sequences=64), max_steps=steps))
        for name, place, steps in (("one", ALONE, 1), ("four", SQUARE, 12))
    )
    transports = json.loads((four / "run.json").read_text("utf-8"))["weight_transports"]
    assert transports == {"actor_train -> actor_infer": "shm"}
    (first,), steps = metrics(one), metrics(four)
    assert steps[0]["score/mean"] == first["score/mean"]
    assert steps[0]["actor/grad_norm"] == pytest.approx(first["actor/grad_norm"], rel=1e-3)
    assert steps[0]["score/mean"] < 0.2
    assert steps[-1]["score/mean"] > 0.4
    assert all(each["weight_sync/logprob_probe"] < 1e-4 for each in steps)


@pytest.mark.slow
def test_stale_rollouts_give_the_numbers_of_one_rank_of_hf_train(run):
    """Generation runs one step ahead of training; the recorded rollouts are trained on again."""

    def settings(place, **given):
        found = rlvr(actor_train=place.role(sequences=64), max_steps=3, async_generation_ratio=1.0, **given)
        found["actor_infer"]["device_mapping"] = [2]
        return found

    ahead = run("ahead", settings(Place(spread=TENSOR, ranks=2), record_rollouts=True))
    found, expected = metrics(ahead), metrics(run("alone", settings(ALONE, replay_rollouts=str(ahead.resolve()))))
    assert len(found) == len(expected) == 3
    assert all(line["actor/logprob_lag"] > 0 for line in found[1:])
    for one, other in zip(found, expected, strict=True):
        for name in (name for name in other if name.startswith(("actor/", "correction/"))):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_grpo_with_engine_experts_on_ranks_equals_hf_train(run):
    """The engine rounds to bf16, so that its routers choose otherwise now and then."""
    config = {"router_replay": {"mode": "R3"}, "guards": {"logprob_probe": "off", "logprob_gap": "off"}}
    experts = Place(spread={"expert_model_parallel_size": 2}, ranks=2, replicas=2, model=MIXTURE)
    found = []
    for name, place, steps in (("one", Place(strategy="hf_train", model=MIXTURE), 1), ("experts", experts, 2)):
        settings = rlvr(actor_train=place.role(sequences=64), max_steps=steps, **config)
        settings["actor_infer"]["model_args"]["dtype"] = "bf16"
        found.append(metrics(run(name, settings)))
    (first,), steps = found
    assert steps[0]["score/mean"] == first["score/mean"]
    assert steps[0]["actor/loss"] == pytest.approx(first["actor/loss"], abs=1e-6)  # advantages of a group add up to 0
    for name in ("actor/entropy", "actor/logprob_gap", "actor/routing_disagreement", "actor/grad_norm"):
        assert steps[0][name] == pytest.approx(first[name], rel=1e-3), name
    assert all(0 < each["actor/routing_disagreement"] < 0.5 for each in steps)


@pytest.mark.slow  # CI compares such heads and losses in `test_arrangements`
@pytest.mark.parametrize(
    ("pipeline", "spread", "ranks"),
    [
        ("dpo", {"context_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4),
        ("kto", TENSOR | {"sequence_parallel": True, "context_parallel_size": 2}, 4),
        ("reward_model", SPREAD, 4),
        ("reward_model", TENSOR, 2),
    ],
)
def test_preferences_give_the_numbers_of_one_rank_of_hf_train(run, tmp_path, pipeline, spread, ranks):
    rows = [
        {"prompt": f"{a}{b}", "chosen": f"{b}{a}", "rejected": a * (1 + n)} for n, a in enumerate("abcd") for b in "cd"
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def settings(place):
        role = place.role(sequences=8) | {"data_args": {"file_name": str(tmp_path / "pairs.jsonl")}}
        role["training_args"] |= {"learning_rate": 3e-3, "lr_scheduler_type": "constant"}
        if pipeline == "reward_model":
            return {"pipeline": "reward_model", "reward_train": role, "max_steps": 3}
        scored = {
            "model_args": {"dtype": "fp32"},
            "strategy_args": role["strategy_args"] | {"strategy_name": place.strategy.replace("_train", "_infer")},
            "device_mapping": role["device_mapping"],
        }
        losses = "kto" if pipeline == "kto" else ["sigmoid", "sft"]
        return {"pipeline": "dpo", "actor_train": role, "reference": scored, "loss_type": losses, "max_steps": 3}

    expected, found = (
        metrics(run(name, settings(place)))
        for name, place in (("one", ALONE), ("more", Place(spread=spread, ranks=ranks)))
    )
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        for name in (name for name in other if name.startswith("train/")):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow  # CI compares heads over shards in `test_head`
@pytest.mark.parametrize(
    ("ranks", "spread", "given"),
    [
        pytest.param(2, TENSOR, {"kd_support": "full"}, id="the whole vocabulary"),
        pytest.param(2, {"pipeline_model_parallel_size": 2}, {"kd_support": "full"}, id="stages"),
        pytest.param(4, SPREAD | {"sequence_parallel": True}, {"kd_support": "full"}, id="both"),
        pytest.param(
            *(4, TENSOR | {"context_parallel_size": 2}, {"kd_support": "student_topk", "logits_topk": 3}),
            id="K tokens",
        ),
    ],
)
def test_distillation_gives_the_numbers_of_one_rank_of_hf_train(run, ranks, spread, given):
    """The student's and the teacher's output layers are sharded over the vocabulary."""

    def settings(place):
        role = place.role(sequences=8)
        role["training_args"]["lr_scheduler_type"] = "constant"
        teacher = {
            "model_args": {"dtype": "fp32", "random_init": MODEL | {"hidden_size": 48, "initializer_range": 0.3}},
            "strategy_args": role["strategy_args"] | {"strategy_name": place.strategy.replace("_train", "_infer")},
            "device_mapping": role["device_mapping"],
        }
        return {
            "pipeline": "distill",
            "distill_data": "dataset",
            "kd_objective": "js_divergence",
            "kd_temperature": 2.0,
            "rollout_batch_size": 4,
            "num_return_sequences_in_group": 2,
            "actor_train": role,
            "teachers": {"main": teacher},
            "max_steps": 2,
            **given,
        }

    places = {"one": ALONE, "many": Place(spread=spread, ranks=ranks)}
    expected, found = (metrics(run(name, settings(place))) for name, place in places.items())
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        for name in (name for name in other if name.startswith("actor/")):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_ppo_on_ranks_begins_as_hf_train_and_the_critic_learns(run):
    def ppo(actor, critic, steps):
        roles = {"actor_train": actor.role(sequences=64), "critic": critic.role(sequences=64)}
        return rlvr(adv_estimator="gae", whiten_advantages=True, max_steps=steps, **roles)

    (first,), steps = metrics(run("one", ppo(ALONE, ALONE, 1))), metrics(run("many", ppo(PAIR, SQUARE, 8)))
    for name in ("critic/loss", "critic/value", "critic/grad_norm", "actor/grad_norm"):
        assert steps[0][name] == pytest.approx(first[name], rel=1e-3), name
    assert steps[-1]["critic/loss"] < steps[0]["critic/loss"] / 2
    assert all(each["weight_sync/logprob_probe"] < 1e-4 for each in steps)


@pytest.mark.slow
def test_run_resumes_under_another_arrangement_and_converts(run, roll_core, tmp_path):
    settings = {"pipeline": "sft", "max_steps": 4, "save_steps": 2, "portable_checkpoints": True}
    whole = run("whole", settings | {"sft_train": SQUARE.role(sequences=16)})
    saved = {"resume_from_checkpoint": str(whole / "checkpoints" / "step-2")}
    rest = run("rest", settings | saved | {"sft_train": PAIRS.role(sequences=16)})
    for found, expected in zip(metrics(rest)[-2:], metrics(whole)[-2:], strict=True):
        for name in ("step", "train/loss", "train/grad_norm", "train/lr"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4), name
    weights, others = (load_file(each / "export" / "model.safetensors") for each in (rest, whole))
    assert weights.keys() == others.keys()
    assert all(float((weights[name] - each).abs().max()) < 1e-4 for name, each in others.items())
    roll_core("checkpoint", "convert", rest / "checkpoints" / "step-4", tmp_path / "converted")
    exported, converted = (
        AutoModelForCausalLM.from_pretrained(place).state_dict() for place in (rest / "export", tmp_path / "converted")
    )
    assert exported.keys() == converted.keys()
    assert all(torch.equal(converted[name], each) for name, each in exported.items())


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_quick_start_learns_on_tensor_by_pipeline_ranks(roll_core, tmp_path):
    examples, output = REPOSITORY / "examples" / "quickstart", f"output_dir={tmp_path}"
    subprocess.run([sys.executable, str(examples / "make_data.py")], cwd=REPOSITORY, check=True)
    roll_core("run", examples / "sft.yaml", output)
    train = "actor_train.strategy_args.strategy"
    roll_core(
        "run",
        examples / "grpo.yaml",
        output,
        f"pretrain={tmp_path}/quickstart-sft/latest/export",
        f"{train}_name=megatron_cpu_train",
        *(f"{train}_config.{key}={size}" for key, size in SPREAD.items()),
        "actor_train.device_mapping=[0,1,2,3]",
        "num_gpus_per_node=4",
        "executor=ray",
        # Microbatches for both stages to work on; as many sequences in a step.
        "actor_train.training_args.per_device_train_batch_size=64",
        "actor_train.training_args.gradient_accumulation_steps=4",
    )
    steps = metrics(tmp_path / "quickstart-grpo" / "latest")
    scores = [each["val/score/mean"] for each in steps if "val/score/mean" in each]
    assert scores[0] < 0.5
    assert scores[-1] > 0.94


def test_default_checkpoint_converts_to_the_exported_model(run, roll_core, tmp_path):
    role = Place().role(sequences=16)
    done = run("alone", {"pipeline": "sft", "max_steps": 2, "save_steps": 1, "sft_train": role})
    roll_core("checkpoint", "convert", done / "checkpoints" / "step-2", tmp_path / "converted", "--platform", "cpu")
    exported, converted = (load_file(each / "model.safetensors") for each in (done / "export", tmp_path / "converted"))
    assert exported.keys() == converted.keys()
    assert all(torch.equal(converted[name], each) for name, each in exported.items())
