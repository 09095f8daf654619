"""Configs in the shapes of ROLL's examples: what a run is told, worked out by hand, and every key accounted for."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import yaml

from roll_core.algorithms.correction_options import ImportanceWeightConfig
from roll_core.cli.main import main
from roll_core.config import load
from roll_core.config.compose import compose
from roll_core.data.columns import ColumnExpressions
from roll_core.errors import UnsupportedError
from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import InferProvider, TrainProvider
from roll_migrate.conversion import put
from roll_migrate.roll import import_roll
from roll_migrate.rules import IMPORT_STATUSES
from roll_testing.errors import mentions, raises_error

FILES = Path(__file__).parent / "roll"
FROZEN = ["vision", "projector"]
SPLIT_A_SEQUENCE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "ulysses_size",
)
IMPORTABLE = (
    "rlvr_megatron_vllm",
    "rlvr_async_sglang",
    "rlvr_lora_deepspeed",
    "rlvr_ppo_critic",
    "sft_fsdp2",
    "sft_defaults",
    "distill",
    "onpolicy_distill",
    "onpolicy_distill_mixed",
    "dpo",
)
EXPECTED = {
    "rlvr_megatron_vllm": {
        "exp_name": "math-code-16-gpus",
        "seed": 7,
        "output_dir": "./runs",
        "system_envs": {"USE_MODELSCOPE": "1", "NCCL_DEBUG": "WARN", "NVTE_FLASH_ATTN": "true"},
        "track_with": ["tensorboard"],
        "tracker_kwargs": {"tensorboard": {"log_dir": "/data/tensorboard"}},
        "prompt_length": 2048,
        "response_length": 4096,
        "num_return_sequences_in_group": 8,
        "adv_estimator": "reinforce",
        "norm_mean_type": "batch",
        "norm_std_type": "batch",
        "kl_penalty": "k2",
        "kl_loss_coef": 0.002,
        "dual_clip": pytest.approx(1.2),
        "pg_variant": "ppo",
        "actor_train.data_args.template": "native",
        "actor_train.data_args.messages": "messages",
        "actor_train.data_args.domain_interleave_probs": {"math": 0.6, "code": 0.3, "judge": 0.1},
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2,
        "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size": 2,
        "actor_train.strategy_args.strategy_config.recompute_granularity": "full",
        "actor_train.strategy_args.strategy_config.bf16": None,
        "actor_train.strategy_args.strategy_config.overlap_param_gather": None,
        "actor_train.ranks_per_replica": 4,
        "actor_train.infer_batch_size": 4,
        "actor_train.training_args.learning_rate": 1e-6,
        "actor_train.training_args.gradient_accumulation_steps": 32,
        "actor_infer.num_gpus_per_worker": 2,
        "actor_infer.generating_args.temperature": 0.99,
        "actor_infer.generating_args.top_p": 0.99,
        "actor_infer.generating_args.top_k": 50,
        "actor_infer.generating_args.max_new_tokens": None,
        "reference.device_mapping": tuple(range(16)),
        "validation.generating_args.num_return_sequences": 2,
        "validation.generating_args.top_k": 40,
        "validation.data_args.messages": "messages",
        "rewards.math.reward": "math_rule",
        "rewards.math.tag_included": ["gsm8k", "aime"],
        "rewards.math.world_size": 8,
        "rewards.math.query_filter_config.type": "mean_filter",
        "rewards.code.reward": "code",
        "rewards.code.tag_included": ["kodcode"],
        "rewards.judge.function": "imported_rewards:judge",
        "rewards.judge.device_mapping": None,
    },
    "rlvr_async_sglang": {
        "output_dir": "/data/runs",
        "pretrain": "/models/policy",
        "track_with": ["wandb"],
        "tracker_kwargs": {"wandb": {"api_key": "a key", "project": "p"}},
        "response_length": 512,
        "norm_mean_type": None,
        "async_generation_ratio": 1.0,
        "is_use_additional_prompts": False,
        "max_running_requests": 128,
        "train_infer_correction.is_weight.upper_bound": 1.5,
        "actor_train.data_args.template": "chatml",
        "actor_train.strategy_args.strategy_config": {
            "param_dtype": "bf16",
            "reduce_dtype": "fp32",
            "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
            "offload_policy": True,
            "ulysses_size": 2,
        },
        "actor_train.ranks_per_replica": 2,
        "actor_infer.strategy_args.strategy_config": {"mem_fraction_static": 0.7, "tp_size": 2},
        "actor_infer.num_gpus_per_worker": 2,
        "actor_infer.generating_args.top_k": -1,
        "actor_infer.generating_args.stop_strings": ["</answer>"],
        "reference": None,
    },
    "rlvr_lora_deepspeed": {
        "exp_name": "lora-ppo",
        "record_rollouts": True,
        "pg_variant": "ppo",
        "adv_estimator": "reinforce",
        "prompt_length": 1024,
        "response_length": 512,
        "actor_train.model_args.lora_target": "q_proj,v_proj",
        "actor_train.model_args.lora_rank": 16,
        "actor_train.model_args.lora_alpha": 32,
        "actor_train.data_args.prompt": "question",
        "actor_train.data_args.template": "plain",
        "actor_train.strategy_args.strategy_config.zero_optimization.stage": 3,
        "actor_infer.model_args.lora_target": None,
        "actor_infer.generating_args.temperature": 0.95,
        "actor_infer.generating_args.top_p": 0.7,
        "reference": None,
    },
    "rlvr_ppo_critic": {
        "adv_estimator": "gae",
        "num_return_sequences_in_group": 2,
        "track_with": [],
        "critic.model_args.model_name_or_path": "/models/value",
        "critic.training_args.learning_rate": 1e-5,
        "router_args.router_name": "prompt_affinity",
        "actor_train.data_args.template": "native",
        "validation.data_args.template": "native",
        "validation.data_args.messages": "conversation",
        "validation.generating_args.max_new_tokens": 1024,
        "validation.generating_args.temperature": 0.95,
    },
    "sft_fsdp2": {
        "max_steps": None,
        "prompt_length": 4096,
        "response_length": 4096,
        "max_grad_norm": 0.5,
        "sft_train.data_args.prompt": "question",
        "sft_train.data_args.query": "input",
        "sft_train.data_args.response": "answer",
        "sft_train.data_args.system": "system",
        "sft_train.data_args.template": "native",
        "validation.data_args.prompt": "question",
        "validation.data_args.query": "input",
        "validation.data_args.response": "answer",
        "sft_train.training_args.num_train_epochs": 2,
        "sft_train.model_args.attn_implementation": "auto",
        "sft_train.strategy_args.strategy_config": {
            "ep_size": 4,
            "param_dtype": "bf16",
            "async_save_ckpt": False,
            "ulysses_size": 2,
        },
    },
    "distill": {
        "pretrain": "/models/small",
        "teachers.main.model_args.model_name_or_path": "/models/large",
        "prompt_length": 1024,
        "response_length": 1024,
        "actor_train.data_args.prompt": "question",
        "actor_train.data_args.response": "solution",
        "actor_train.data_args.template": "native",
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2,
        "teachers.main.strategy_args.strategy_name": "megatron_infer",
        "teachers.main.strategy_args.strategy_config.tensor_model_parallel_size": 4,
        "rollout_batch_size": 64,
        "num_return_sequences_in_group": 1,
        "distill_data": "dataset",
        "kd_support": "teacher_topk",
        "kd_objective": "forward_kl",
        "kd_tail": "renormalise",
        "kd_coef": 0.75,
        "nll_coef": 0.25,
        "logits_topk": 32,
        "max_grad_norm": 0.0,
    },
    "onpolicy_distill": {
        "pipeline": "distill",
        "pretrain": "/models/small",
        "distill_data": "student",
        "kd_support": "sampled",
        "placement": "advantage",
        "kd_coef": 0.5,
        "kd_discount": 0.0,
        "task_coef": 0.0,
        "adv_estimator": "reinforce",
        "use_kl_loss": False,
        "actor_train.data_args.template": "native",
        "actor_train.data_args.messages": "messages",
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2,
        "actor_infer.generating_args.temperature": 0.8,
        "actor_infer.strategy_args.strategy_name": "vllm",
        "teachers.math_teacher.tag_included": ["gsm8k"],
        "teachers.math_teacher.strategy_args.strategy_config.tensor_model_parallel_size": 4,
        "teachers.code.model_args.model_name_or_path": "/models/coder",
    },
    "onpolicy_distill_mixed": {
        "pipeline": "distill",
        "task_coef": 1.0,
        "kd_coef": 1.0,
        "placement": "advantage",
        "adv_estimator": "grpo",
        "response_length": 1024,
        "actor_infer.generating_args.temperature": 0.95,
        "teachers.main.model_args.model_name_or_path": "/models/large",
        "rewards.math.tag_included": ["gsm8k"],
    },
    "sft_defaults": {
        "prompt_length": 128,
        "response_length": 128,
        "sft_train.data_args.prompt": "instruction",
        "sft_train.data_args.response": "output",
    },
    "dpo": {
        "pipeline": "preference",
        "prompt_length": 512,
        "response_length": 512,
        "max_steps": 200,
        "beta": 0.1,
        "loss_type": ["sigmoid"],
        "val_batch_size": 32,
        "actor_train.data_args.prompt": "instruction",
        "actor_train.data_args.chosen": "better",
        "actor_train.data_args.rejected": "worse",
        "actor_train.data_args.template": "native",
        "actor_train.data_args.messages": None,
        "actor_train.training_args.per_device_train_batch_size": 4,
        "reference.device_mapping": (0, 1),
        "validation.data_args.prompt": "instruction",
        "validation.data_args.chosen": "better",
        "validation.data_args.rejected": "worse",
        "validation.data_args.template": "native",
    },
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in ("ROLL_TEST_RUNS", "ROLL_TEST_MODEL", "ROLL_TEST_WANDB"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def registry():
    registry = load_registry()
    for kind, names in (
        (TrainProvider, ("megatron_train", "fsdp2_train", "deepspeed_train")),
        (InferProvider, ("vllm", "sglang")),
    ):
        if missing := [name for name in names if name not in registry.names(kind)]:
            pytest.skip(f"needs the plugins of {missing}")
    return registry


def dug(value, path):
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else getattr(value, step)
    return value


@pytest.mark.parametrize("name", IMPORTABLE)
def test_new_config_loads_with_rolls_settings(name, registry, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ROLL_TEST_MODEL", "/models/policy")
    monkeypatch.setenv("ROLL_TEST_RUNS", "/data/runs")
    monkeypatch.setenv("ROLL_TEST_WANDB", "a key")
    out = tmp_path / "ours.yaml"
    assert main(["import", "roll", str(FILES / f"{name}.yaml"), "-o", str(out)]) == 0, capsys.readouterr().out
    config = load(out, (), registry).config
    assert {path: dug(config, path) for path in EXPECTED[name]} == EXPECTED[name]


def leaves(value, prefix=""):
    if isinstance(value, dict) and value:
        return [leaf for key, entry in value.items() for leaf in leaves(entry, f"{prefix}{key}.")]
    return [prefix.removesuffix(".")]


@pytest.mark.parametrize("name", IMPORTABLE)
def test_every_key_of_the_file_is_reported_once(name, registry):
    imported = import_roll(FILES / f"{name}.yaml", registry)
    keys = yaml.safe_load((FILES / f"{name}.yaml").read_text())
    told = [entry.key for entry in imported.keys if entry.status != "added"]
    assert len(told) == len(set(told))
    # What is composed from elsewhere stands below a key that the file itself has as one.
    assert not [
        leaf for leaf in leaves(keys) if leaf not in told and not any(key.startswith(f"{leaf}.") for key in told)
    ]
    assert {entry.status for entry in imported.keys} <= set(IMPORT_STATUSES)


@pytest.mark.parametrize("name", IMPORTABLE)
def test_every_key_is_reported_with_its_line(name, registry):
    """The line that is named bears the key, be it in the file or in a fragment."""
    for entry in import_roll(FILES / f"{name}.yaml", registry).keys:
        if entry.status == "added":
            continue
        file, line, _ = entry.where.rsplit(":", 2)
        text = Path(file).read_text().splitlines()[int(line) - 1]
        last = entry.key.rpartition(".")[2]
        assert last in text or "${" in text or last.isdigit(), entry


@pytest.mark.parametrize("name", IMPORTABLE)
def test_every_value_of_the_new_config_comes_from_an_entry(name, registry):
    imported = import_roll(FILES / f"{name}.yaml", registry)
    told = {to for entry in imported.keys for to in entry.to} | {"pipeline"}
    assert not [
        leaf
        for leaf in leaves(imported.config)
        if leaf not in told and not any(leaf.startswith(f"{to}.") for to in told)
    ]
    assert not [to for to in told if dug(imported.config, to) is None]


def entries(name, registry):
    return {entry.key: entry for entry in import_roll(FILES / f"{name}.yaml", registry).keys}


def test_keys_a_strategy_refuses_are_dropped_with_its_reason(registry):
    result = entries("rlvr_megatron_vllm", registry)
    prefix = "actor_train.strategy_args.strategy_config"
    for key, reason in (
        ("overlap_param_gather", "weights are read between steps"),
        ("some_new_knob", "no such key"),
    ):
        assert result[f"{prefix}.{key}"].status == "unsupported"
        assert reason in result[f"{prefix}.{key}"].note
    engine = result["actor_infer.strategy_args.strategy_config.data_parallel_size"]
    assert engine.status == "unsupported"
    assert "device_mapping" in engine.note


@pytest.mark.parametrize(
    ("file", "key", "status"),
    [
        ("rlvr_megatron_vllm", "actor_train.data_args.dataset_dir", "dead"),
        ("rlvr_megatron_vllm", "validation.eval_steps", "dead"),
        ("rlvr_megatron_vllm", "actor_infer.generating_args.max_new_tokens", "dead"),
        ("rlvr_megatron_vllm", "checkpoint_config.output_dir", "unsupported"),
        ("rlvr_megatron_vllm", "importance_sampling", "not needed"),
        ("rlvr_megatron_vllm", "rewards.judge.judge_prompt", "unsupported"),
        ("rlvr_megatron_vllm", "rewards.math.model_args.model_name_or_path", "not needed"),
        ("rlvr_async_sglang", "norm_mean_type", "dead"),
        ("rlvr_async_sglang", "track_with", "kept"),
        ("rlvr_async_sglang", "reference.strategy_args.strategy_name", "not needed"),
        (
            "rlvr_megatron_vllm",
            "reference.strategy_args.strategy_config.virtual_pipeline_model_parallel_size",
            "not needed",
        ),
        ("rlvr_lora_deepspeed", "rank_of_adapters", "not needed"),
        ("rlvr_lora_deepspeed", "max_running_request", "unknown"),
        ("sft_fsdp2", "max_steps", "dead"),
        ("sft_fsdp2", "sft_train.data_args.prompt", "dead"),
        ("sft_fsdp2", "sft_train.strategy_args.strategy_config.efsdp_size", "not needed"),
        ("sft_defaults", "prompt_length", "dead"),
        ("dpo", "beta", "dead"),
        ("dpo", "ipo", "dead"),
        ("dpo", "chosen_key", "renamed"),
        ("dpo", "train_batch_size", "not needed"),
        ("dpo", "actor_train.data_args.messages", "dead"),
        ("dpo", "actor_train.training_args.num_train_epochs", "dead"),
    ],
)
def test_key_has_its_status(file, key, status, registry):
    assert entries(file, registry)[key].status == status


@pytest.mark.parametrize(
    ("name", "config", "coefficient", "status", "strategy_config", "left"),
    [
        ("megatron_train", "", "0.001", "renamed", {"moe_aux_loss_coeff": 0.001}, None),
        ("megatron_train", "moe_aux_loss_coeff: 0.01", "0.001", "not needed", {"moe_aux_loss_coeff": 0.01}, None),
        ("megatron_train", "", "0", "not needed", None, None),
        ("fsdp2_train", "", "0.001", "unsupported", None, 0.001),
    ],
    ids=["megatron", "both", "none", "fsdp2"],
)
def test_routers_loss_goes_to_the_strategy_that_adds_it(
    name, config, coefficient, status, strategy_config, left, registry, tmp_path
):
    file = tmp_path / "theirs.yaml"
    file.write_text(
        "sft_train:\n"
        f"  model_args: {{model_name_or_path: /models/base, moe_aux_loss_coef: {coefficient}}}\n"
        f"  strategy_args: {{strategy_name: {name}, strategy_config: {{{config}}}}}\n"
        "  data_args: {file_name: rows.jsonl}\n"
    )
    result = import_roll(file, registry)
    by_key = {entry.key: entry for entry in result.keys}
    assert by_key["sft_train.model_args.moe_aux_loss_coef"].status == status
    role = result.config["sft_train"]
    assert (role["strategy_args"].get("strategy_config") or None) == strategy_config
    assert role["model_args"].get("moe_aux_loss_coef") == left


MATH = "worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"
RLVR = """\
pretrain: /models/policy
prompt_length: 2048
response_length: 4096
rollout_batch_size: 8
num_return_sequences_in_group: 2
adv_estimator: reinforce
actor_train:
  data_args: {file_name: rows.jsonl, messages: messages}
  training_args: {per_device_train_batch_size: 8}
  strategy_args: {strategy_name: hf_train}
  device_mapping: list(range(0,1))
actor_infer:
  generating_args: {temperature: 1.0, top_p: 1.0, top_k: -1}
  strategy_args: {strategy_name: hf_infer}
  device_mapping: list(range(1,2))
"""
REWARD_WORKERS = {
    "code_sandbox_reward_worker.CodeSandboxRewardWorker": "code",
    "ifeval_rule_reward_worker.GeneralRuleRewardWorker": "ifeval",
    "crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker": "crossthink_qa",
    "multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "detection_reward_worker.Other": "function",
}


def imported_reward(tmp_path, registry, worker, **keys):
    """Reward config for one of ROLL's workers, and the status of each of its keys."""
    file = tmp_path / "roll.yaml"
    role = {"worker_cls": f"roll.pipeline.rlvr.rewards.{worker}"} | keys
    file.write_text(RLVR + yaml.safe_dump({"rewards": {"one": role}}))
    result = import_roll(file, registry)
    prefix = "rewards.one."
    return result.config["rewards"]["one"], {
        entry.key.removeprefix(prefix): entry.status for entry in result.keys if entry.key.startswith(prefix)
    }


@pytest.mark.parametrize(("worker", "reward"), REWARD_WORKERS.items())
def test_reward_workers_become_rewards(tmp_path, registry, worker, reward):
    config, statuses = imported_reward(tmp_path, registry, worker, use_local=True)
    assert config["reward"] == reward
    assert statuses["use_local"] == ("unsupported" if reward == "function" else "not needed")


@pytest.mark.parametrize(
    ("worker", "expected"),
    [
        # ROLL's values: 1 to -1 and a length penalty; 1 or 0 and a penalty of repetitions; only boxes; 1 or 0.
        ("crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker", ("differs", "differs", "differs")),
        ("ifeval_rule_reward_worker.GeneralRuleRewardWorker", ("differs", "not needed", "dead")),
        (
            "multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker",
            ("differs", "not needed", "dead"),
        ),
        ("math_rule_reward_worker.MathRuleRewardWorker", ("renamed", "not needed", "dead")),
    ],
)
def test_rewards_with_other_values_differ(tmp_path, registry, worker, expected):
    _, statuses = imported_reward(tmp_path, registry, worker, reward_type="soft", response_length_penalty_coef=0.5)
    assert tuple(statuses[key] for key in ("worker_cls", "reward_type", "response_length_penalty_coef")) == expected


def test_judge_with_an_api_keeps_it(tmp_path, registry):
    worker = "llm_judge_reward_worker.LLMJudgeRewardWorker"
    api = {"judge_model_name": "m", "judge_api_url": "http://h/v1", "judge_prompt": "qwen"}
    config, statuses = imported_reward(tmp_path, registry, worker, judge_model_type="api", **api)
    assert config == {"reward": "judge", "judge_model_name": "m", "judge_api_url": "http://h/v1"}
    assert (statuses["judge_api_url"], statuses["judge_prompt"]) == ("kept", "unsupported")
    config, statuses = imported_reward(tmp_path, registry, worker, judge_model_type="inference", **api)
    assert (config["reward"], statuses["judge_api_url"]) == ("function", "unsupported")


def test_service_for_programs_is_replaced_by_the_sandbox(tmp_path, registry):
    worker = "code_sandbox_reward_worker.CodeSandboxRewardWorker"
    config, statuses = imported_reward(tmp_path, registry, worker, use_local=False, code_url="http://sandbox")
    assert (config["reward"], statuses["code_url"]) == ("code", "differs")


ONE = f"rewards: {{math: {{{MATH}}}}}\n"
TWO = f"rewards: {{math: {{{MATH}}}, logic: {{{MATH}}}}}\n"
KL = "add_token_level_kl: true\nreference: {strategy_args: {strategy_name: hf_infer}}\ntarget_kl: 0.1\n"
CRITIC = (
    "adv_estimator: gae\n"
    "critic: {training_args: {per_device_train_batch_size: 8}, strategy_args: {strategy_name: hf_train}}\n"
)
ASYNC = "async_generation_ratio: 1\n"
SFT = (
    "pretrain: m\nsequence_length: 8\n"
    "sft_train: {strategy_args: {strategy_name: hf_train}, data_args: {file_name: rows.jsonl}}\n"
)


def imported(text, folder):
    """The entries by key, and the config as roll-core loads it."""
    folder.mkdir(exist_ok=True)
    file, out = folder / "theirs.yaml", folder / "ours.yaml"
    file.write_text(text)
    assert main(["import", "roll", str(file), "-o", str(out)]) == 0
    registry = load_registry()
    result = import_roll(file, registry).keys
    return {entry.key or entry.to[0]: entry for entry in result}, load(out, (), registry).config


@pytest.mark.parametrize(
    ("text", "key", "status"),
    [
        (RLVR + ONE + "whiten_advantages: true\n", "whiten_advantages", "kept"),
        (RLVR + ONE + "whiten_advantages: true\nmax_len_mask: true\n", "whiten_advantages", "differs"),
        (RLVR + TWO + "whiten_advantages: true\n", "whiten_advantages", "differs"),
        (RLVR + TWO + "whiten_rewards: true\n", "whiten_rewards", "differs"),
        (RLVR + TWO + "whiten_advantages: false\nwhiten_rewards: false\n", "whiten_advantages", "kept"),
        (RLVR + ONE, "actor_infer.generating_args.temperature", "kept"),
        (
            RLVR.replace("temperature: 1.0", "temperature: 0.6") + ONE,
            "actor_infer.generating_args.temperature",
            "differs",
        ),
        (RLVR + ONE + "loss_agg_mode: seq-mean-token-sum-norm\n", "loss_agg_mode", "differs"),
        (RLVR + ONE + "loss_agg_mode: seq-mean-token-mean\n", "loss_agg_mode", "kept"),
        (RLVR + ONE + KL, "target_kl", "kept"),
        (RLVR + TWO + KL, "target_kl", "differs"),
    ],
)
def test_key_with_a_different_result_has_a_note(text, key, status, tmp_path):
    result = imported(text, tmp_path)[0][key]
    assert (result.status, result.to) == (status, (key,))
    assert bool(result.note) == (status == "differs")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (RLVR + ONE, {"response_length": 4096}),
        # ROLL forgets response_length where there is a sequence_length: 8192 - 2048.
        (RLVR + ONE + "sequence_length: 8192\n", {"response_length": 6144, "prompt_length": 2048}),
        (SFT + "prompt_length: 2\nresponse_length: 4\n", {"response_length": 8, "prompt_length": 8}),
        (RLVR.replace("adv_estimator: reinforce\n", CRITIC) + ONE + "ppo_epochs: 3\n", {"critic_epochs": 1}),
        (RLVR.replace("adv_estimator: reinforce\n", CRITIC) + ONE, {"critic_epochs": None}),
        (RLVR + ONE + "ppo_epochs: 3\n", {"critic_epochs": None}),
        (SFT, {"shuffle": False}),
        (RLVR + ONE, {"train_infer_correction.is_weight.enabled": None}),
        (RLVR + ONE + ASYNC, {"train_infer_correction.is_weight.enabled": False}),
        (RLVR + ONE + "is_use_additional_prompts: true\n", {"train_infer_correction.is_weight.enabled": False}),
        (
            RLVR + ONE + ASYNC + "train_infer_correction: {is_weight: {enabled: true}}\n",
            {"train_infer_correction.is_weight.enabled": True},
        ),
        (
            RLVR + ONE + ASYNC + "train_infer_correction: {is_weight: {upper_bound: 2.0}}\n",
            {"train_infer_correction.is_weight": ImportanceWeightConfig(enabled=False, upper_bound=2.0)},
        ),
    ],
)
def test_new_config_has_rolls_meaning_of_a_key(text, expected, tmp_path):
    entries, config = imported(text, tmp_path)
    assert {path: dug(config, path) for path in expected} == expected
    if "8192" in text:
        assert entries["response_length"].status == "dead"


def test_fp8_engine_gets_no_importance_weights_as_in_roll(registry, tmp_path):
    quantised = RLVR.replace("strategy_name: hf_infer", "strategy_name: vllm, strategy_config: {quantization: fp8}")
    _, config = imported(quantised + ONE, tmp_path)
    assert config.actor_infer.weight_format == "fp8"
    assert config.correction.is_weight.enabled is False


def test_roll_default_with_a_different_result_has_a_note(tmp_path):
    silent = RLVR.replace("generating_args: {temperature: 1.0, top_p: 1.0, top_k: -1}", "generating_args: {top_k: 5}")
    result = imported(silent + ONE, tmp_path / "silent")[0]
    differs = imported(RLVR.replace("temperature: 1.0", "temperature: 0.95") + ONE, tmp_path / "told")[0]
    note = differs["actor_infer.generating_args.temperature"].note
    assert note
    assert note in result["actor_infer.generating_args.temperature"].note
    assert result["actor_infer.generating_args.temperature"].status == "added"


def test_report_has_warnings_of_the_new_config(tmp_path, capsys):
    masked = RLVR + "rewards: {judge: {worker_cls: my.Worker}}\ndifficulty_mask: true\n"
    (tmp_path / "theirs.yaml").write_text(masked)
    assert main(["import", "roll", str(tmp_path / "theirs.yaml"), "-o", str(tmp_path / "ours.yaml")]) == 0
    assert re.search(r"ours\.yaml:\d+:1: warning: ROLL-C050 difficulty_mask: ", capsys.readouterr().out)


def test_unknown_key_is_reported_with_the_nearest(registry):
    assert "did you mean max_running_requests?" in entries("rlvr_lora_deepspeed", registry)["max_running_request"].note


@pytest.mark.parametrize(
    ("run", "role", "loss", "options"),
    [
        ("importance_sampling: seq, pg_clip: 0.1", "", "gspo", {"clip_low": 0.1, "clip_high": 0.1}),
        (
            "importance_sampling: seq, use_pg_clip_range: true, pg_clip_high: 0.3",
            "",
            "gspo",
            {"clip_low": 0.2, "clip_high": 0.3},
        ),
        ("", "pg_variant: tis", "cispo", {"clip_high": 1.0}),
        ("", "pg_variant: cispo", "cispo", {"bounds": "relative", "clip_low": 0.1, "clip_high": 0.1}),
        ("", "pg_variant: kimi15", "kimi", {"beta": 0.1}),
        ("", "pg_variant: topr, topr_negative_weight: 0.5", "topr", {"level": "token", "negative_weight": 0.5}),
    ],
)
def test_policy_losses_get_the_constants_of_roll(run, role, loss, options, tmp_path):
    text = RLVR + ONE + "".join(f"{line}\n" for line in run.split(", "))
    worker = "worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker, "
    lines = "".join(f"  {line}\n" for line in (worker + role).split(", ") if role)
    config = imported(text.replace("actor_train:\n", f"actor_train:\n{lines}"), tmp_path)[1]
    assert config.pg_variant == loss
    assert config.pg_options == options


@pytest.mark.parametrize(
    ("run", "clip_range", "dual_clip"),
    [
        ("pg_clip: 0.1, use_pg_clip_range: true", (0.2, 0.2), None),
        ("pg_clip: 0.1, use_pg_clip_range: true, pg_clip_high: 0.28", (0.2, 0.28), None),
        ("pg_clip: 0.1, use_pg_clip_range: false, pg_clip_high: 0.28", (0.1, 0.1), None),
        ("pg_clip: 0.1, dual_clip_loss: true", (0.1, 0.1), 1.2),
        ("dual_clip_loss: false", (0.2, 0.2), None),
    ],
)
def test_clip_ranges_are_those_of_roll(run, clip_range, dual_clip, tmp_path):
    text = RLVR + ONE + "".join(f"{line}\n" for line in run.split(", "))
    config = imported(text, tmp_path)[1]
    assert config.clip_range() == clip_range
    assert config.dual_clip == (None if dual_clip is None else pytest.approx(dual_clip))


@pytest.mark.parametrize(
    ("lines", "refused"),
    [
        ("rl_loss_coef: 0.5", "rl_loss_coef"),
        ("length_loss_weight: true", "length_loss_weight"),
        ("kl_penalty: full", "kl_penalty"),
        ("adv_estimator: agentic_reinforce", "adv_estimator"),
        ("user_defined_rollout_loop_cls: my.Loop", "user_defined_rollout_loop_cls"),
    ],
)
def test_settings_that_affect_training_are_never_dropped(lines, refused, tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text((FILES / "rlvr_ppo_critic.yaml").read_text() + lines + "\n")
    assert main(["import", "roll", str(file), "-o", str(tmp_path / "ours.yaml")]) == 1
    assert re.search(rf"\n  \S+ours\.yaml:\d+:\d+: ROLL-[CP]\d+ {refused}", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("onpolicy_distill_agents", r"onpolicy_distill_agents\.yaml:3:1: student_train"),
        ("rollout_only", r"rollout_only\.yaml:3:1: actor_infer"),
    ],
)
def test_missing_pipeline_is_refused_with_the_key(file, says, tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    assert main(["import", "roll", str(FILES / f"{file}.yaml"), "-o", str(out)]) == 2
    shown = capsys.readouterr()
    assert re.match(rf"error: ROLL-\w+ \S*{says}", shown.err)
    assert shown.out == ""
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "ROLL-C021"),
        ("a: [1", "ROLL-C021"),
        ("a: 1\n", "ROLL-M002"),
        ("sequence_length: ${response_len}\nsft_train: {}\n", "ROLL-C024"),
        ("defaults: [absent]\nsft_train: {}\n", "ROLL-C023"),
    ],
)
def test_files_that_roll_cannot_load_are_refused(text, says, tmp_path, capsys):
    (tmp_path / "theirs.yaml").write_text(text)
    assert main(["import", "roll", str(tmp_path / "theirs.yaml")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "model_args: 3",
        "strategy_args: vllm",
        "strategy_args: {strategy_name: 5, strategy_config: [1]}",
        "strategy_args: {strategy_name: fsdp2_train, strategy_config: 7}",
        "data_args: [1, 2]",
        "device_mapping: 8",
        "training_args: {}",
    ],
)
def test_values_of_another_type_are_refused(line, tmp_path, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text(f"pretrain: m\nsequence_length: 8\nsft_train:\n  {line}\n")
    assert main(["import", "roll", str(file), "-o", str(tmp_path / "ours.yaml")]) == 1
    assert mentions(capsys.readouterr().out, "roll-core")


def test_environment_variables_stay_interpolations(registry, monkeypatch):
    monkeypatch.setenv("ROLL_TEST_MODEL", "/secret/place")
    config = import_roll(FILES / "rlvr_async_sglang.yaml", registry).config
    assert config["pretrain"] == "${oc.env:ROLL_TEST_MODEL}"
    assert config["output_dir"] == "${oc.env:ROLL_TEST_RUNS,./runs}"


def test_config_goes_to_stdout_and_the_report_to_stderr(capsys):
    assert main(["import", "roll", str(FILES / "sft_defaults.yaml")]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["pipeline"] == "sft"
    assert "sft_defaults.yaml: sft, " in shown.err


def test_json_has_the_report_and_the_config(capsys):
    assert main(["import", "roll", str(FILES / "sft_defaults.yaml"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is True
    assert yaml.safe_load(result["config"])["response_length"] == 128
    assert {entry["key"]: entry["status"] for entry in result["keys"]}["sequence_length"] == "renamed"


def test_existing_file_is_not_overwritten(tmp_path, capsys):
    out = tmp_path / "ours.yaml"
    out.write_text("mine")
    assert main(["import", "roll", str(FILES / "sft_defaults.yaml"), "-o", str(out)]) == 2
    assert out.read_text() == "mine"
    assert mentions(capsys.readouterr().err, "ROLL-R005", out)


def test_keys_of_a_missing_plugin_stay_with_its_package_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("ROLL_PLUGINS", "roll-migrate")
    out = tmp_path / "ours.yaml"
    assert main(["import", "roll", str(FILES / "sft_fsdp2.yaml"), "-o", str(out)]) == 1
    assert mentions(capsys.readouterr().out, "roll-strategy-fsdp2")
    assert yaml.safe_load(out.read_text())["sft_train"]["strategy_args"]["strategy_config"]["async_save_ckpt"] is False


def test_pattern_of_files_becomes_the_files_that_match(registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (FILES / "sft_defaults.yaml").read_text()
    names = "file_name: rows.json"
    Path("theirs.yaml").write_text(text.replace(names, "file_name: [part-?.jsonl, more.jsonl]"))
    result = {entry.key: entry for entry in import_roll(Path("theirs.yaml"), registry).keys}
    assert result["sft_train.data_args.file_name"].status == "unsupported"
    for name in ("part-2.jsonl", "part-1.jsonl"):
        Path(name).touch()
    imported = import_roll(Path("theirs.yaml"), registry)
    result = {entry.key: entry for entry in imported.keys}
    assert result["sft_train.data_args.file_name"].status == "changed"
    names = imported.config["sft_train"]["data_args"]["file_name"]
    assert names == ["part-1.jsonl", "part-2.jsonl", "more.jsonl"]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("distill", "student.data_args.audio_key", "audio"),
        ("rlvr_images", "actor_train.data_args.audio_folder", "sounds"),
    ],
)
def test_configs_with_other_media_are_refused_by_key(name, key, value, registry, tmp_path):
    data = compose(FILES / f"{name}.yaml", (), registry).data
    put(data, tuple(key.split(".")), value)
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(data))
    with raises_error(UnsupportedError, key):
        import_roll(file, registry)


@pytest.mark.parametrize(
    ("name", "keys", "role", "column"),
    [
        ("distill", {"student_pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}, "actor_train", "image"),
        ("distill", {"student.data_args.image_key": "images"}, "actor_train", "images"),
        ("sft_fsdp2", {"pretrain": "Qwen/Qwen3-VL-4B-Instruct"}, "sft_train", "images"),
        ("dpo", {"pretrain": "llava-1.5-7b"}, "actor_train", "images"),
        ("rlvr_images", {"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}, "actor_train", "images"),
        ("rlvr_images", {"actor_train.model_args.freeze_module_prefix": "vision_model"}, "actor_train", "images"),
    ],
)
def test_columns_of_images_are_imported(name, keys, role, column, registry, tmp_path):
    data = compose(FILES / f"{name}.yaml", (), registry).data
    for key, value in keys.items():
        put(data, tuple(key.split(".")), value)
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(data))
    imported = import_roll(file, registry).config[role]
    data_args = imported["data_args"]
    assert data_args["images"] == column
    assert data_args.get("max_pixels") == (100000 if name == "rlvr_images" else None)
    freeze = {"student.data_args.image_key": None, "actor_train.model_args.freeze_module_prefix": FROZEN}
    assert imported["model_args"].get("freeze") == freeze.get(next(iter(keys)), [])


def converted(data, registry, tmp_path):
    """The import of a config with these values."""
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(data))
    return import_roll(file, registry)


def test_rows_with_images_have_rolls_columns(registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data | {"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}
    data["validation"] = {"data_args": {"file_name": "held_out.json"}}
    del data["actor_train"]["data_args"]["image_max_pixels"]
    config = converted(data, registry, tmp_path).config
    for role in ("actor_train", "validation"):
        assert config[role]["data_args"]["images"] == "images"
        # The pipeline of ROLL sets these limits in the processor.
        assert [config[role]["data_args"][f"{name}_pixels"] for name in ("min", "max")] == [3136, 1048576]
        assert config[role]["data_args"]["tag"] == "data_source"
    assert config["rewards"]["math"]["ground_truth"] == "reward_model.ground_truth"


def test_agents_that_freeze_an_encoder_see_text(registry, tmp_path):
    data = compose(FILES / "agentic.yaml", (), registry).data
    put(data, ("actor_train", "model_args", "freeze_module_prefix"), "vision_model")
    assert "images" not in converted(data, registry, tmp_path).config["actor_train"].get("data_args", {})


def test_boards_with_images_are_imported(registry, tmp_path):
    """Megatron reads no images, and those of environments are in no column."""
    data = compose(FILES / "agentic.yaml", (), registry).data | {"pretrain": "Qwen/Qwen2.5-VL-3B-Instruct"}
    manager = "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager"
    (lake,) = data["custom_envs"].values()
    lake |= {"env_type": "frozen_lake", "env_manager_cls": manager, "env_config": {"render_mode": "rgb_array"}}
    config = converted(data, registry, tmp_path).config
    assert config["custom_envs"]["FrozenLake"]["env_config"] == {"observation": "image"}
    assert config["actor_train"]["strategy_args"]["strategy_name"] == "fsdp2_train"
    assert "images" not in config["actor_train"].get("data_args", {})
    lake["env_type"] = "deepeyes"
    with raises_error(UnsupportedError, "custom_envs.FrozenLake.env_type", "sokoban"):
        converted(data, registry, tmp_path)


@pytest.mark.parametrize("name", ["reward_template", "user_prompt_format", "pre_step_template"])
def test_templates_of_env_managers_are_reported(name, registry, tmp_path):
    data = compose(FILES / "agentic.yaml", (), registry).data
    (tag,) = data["custom_envs"]
    data["custom_envs"][tag][name] = "{reward}"
    status = {entry.key: entry.status for entry in converted(data, registry, tmp_path).keys}
    assert status[f"custom_envs.{tag}.{name}"] == "differs"


@pytest.mark.parametrize(("size", "status"), [(1, "not needed"), (2, "kept")])
def test_sequence_parallel_needs_tensor_parallelism(size, status, registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data | {"pretrain": "Qwen/Qwen3-4B"}
    keys = {"tensor_model_parallel_size": size, "sequence_parallel": True}
    data["actor_train"] |= of_strategy("megatron_train", keys, 4, 1)
    imported = converted(data, registry, tmp_path)
    status_of = {entry.key: entry.status for entry in imported.keys}
    assert status_of["actor_train.strategy_args.strategy_config.sequence_parallel"] == status
    options = imported.config["actor_train"]["strategy_args"]["strategy_config"]
    assert options.get("sequence_parallel", False) is (size > 1)


def test_cache_of_processed_images_is_not_needed(registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data
    options = {"disable_mm_preprocessor_cache": True, "block_size": 16}
    data["actor_infer"]["strategy_args"] = {"strategy_name": "vllm", "strategy_config": options}
    imported = converted(data, registry, tmp_path)
    status = {entry.key: entry.status for entry in imported.keys}
    assert status["actor_infer.strategy_args.strategy_config.disable_mm_preprocessor_cache"] == "not needed"
    assert imported.config["actor_infer"]["strategy_args"]["strategy_config"] == {"block_size": 16}


@pytest.mark.parametrize("function", [None, "roll.datasets.vlm_dataset_utils.video_r1_get_data_kwargs"])
def test_keys_of_videos_are_imported(registry, tmp_path, function):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data | {"pretrain": "Qwen/Qwen3-VL-4B-Instruct"}
    data |= {"prompt_length": 512, "adv_estimator": "reinforce", "validation": {"data_args": {"file_name": "val.json"}}}
    data["actor_infer"] = {"strategy_args": {"strategy_name": "vllm"}}
    data["actor_train"]["data_args"] = {
        **{"file_name": "rows.json", "video_folder": "clips", "video_max_frames": 16},
        **{"video_fps": 1.5, "video_max_pixels": 50000, "video_min_pixels": 4000, "video_total_pixels": 300000},
        **{"custom_data_kwargs_func": function, "messages": "prompt"},
    }
    imported = converted(data, registry, tmp_path)
    written = imported.config["actor_train"]["data_args"]
    assert written["videos"] == "video"
    assert "images" not in written
    assert written["image_roots"] == ["clips"]
    assert (written["max_frames"], written["video_fps"]) == (16, 1.5)
    assert (written["min_pixels"], written["max_pixels"], written["max_video_pixels"]) == (4000, 50000, 600000)
    ground_truth = imported.config["rewards"]["math"].get("ground_truth")
    if function is None:
        assert ground_truth == "reward_model.ground_truth"
    else:
        assert (written["tag"], ground_truth) == ("modality_type", None)
        assert "messages" not in written | imported.config["validation"]["data_args"]
        assert imported.config["validation"]["data_args"]["columns"] == written["columns"]
    file = tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump(imported.config), encoding="utf-8")
    row = {"problem": "How many?", "solution": "4", "video": "a.mp4", "modality_type": "video"}
    rows = [ColumnExpressions(written.get("columns", {}), "rows.json")(row, 1)]
    if function is not None:
        assert (rows[0]["prompt"], rows[0]["ground_truth"]) == ("How many?", "4")
    load(file, (), registry)


def test_other_functions_of_rows_are_left_to_check(registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data
    put(data, ("actor_train", "data_args", "custom_data_kwargs_func"), "mine.rows")
    written = converted(data, registry, tmp_path).config["actor_train"]["data_args"]
    assert written["custom_data_kwargs_func"] == "mine.rows"


def of_strategy(name, keys, steps, samples, slots=16):
    return {
        "strategy_args": {"strategy_name": name, "strategy_config": keys},
        "device_mapping": f"list(range(0,{slots}))",
        "training_args": {"gradient_accumulation_steps": steps, "per_device_train_batch_size": samples},
    }


@pytest.mark.parametrize(
    ("name", "keys", "before", "after"),
    [
        ("megatron_train", {"tensor_model_parallel_size": 4, "sequence_parallel": True}, (256, 2), (64, 2)),
        ("megatron_train", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, (2, 4), (1, 2)),
        ("megatron_train", {"expert_model_parallel_size": 8, "context_parallel_size": 2}, (6, 1), (3, 1)),
        ("fsdp2_train", {"ulysses_size": 4, "fsdp_size": 8}, (8, 1), (2, 1)),
    ],
)
def test_runs_with_images_train_by_plain_fsdp2(name, keys, before, after, registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data | {"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}
    data["actor_train"] |= of_strategy(name, keys, *before)
    imported = converted(data, registry, tmp_path)
    role = imported.config["actor_train"]
    assert role["strategy_args"]["strategy_name"] == "fsdp2_train"
    assert role["strategy_args"].get("strategy_config", {}) == {key: keys[key] for key in ("fsdp_size",) if key in keys}
    args = role["training_args"]
    assert (args["gradient_accumulation_steps"], args["per_device_train_batch_size"]) == after
    ranks = 16 // math.prod(size for key, size in keys.items() if key in SPLIT_A_SEQUENCE)
    assert math.prod(before) * ranks == math.prod(after) * 16
    status = {entry.key: entry.status for entry in imported.keys}
    assert all(
        status[f"actor_train.strategy_args.strategy_config.{key}"] == "not needed" for key in keys if key[0] != "f"
    )


@pytest.mark.parametrize(
    ("keys", "steps"),
    [({"tensor_model_parallel_size": 4}, 3), ({"moe_aux_loss_coeff": 0.01}, 4)],
)
def test_megatron_stays_if_its_gradients_would_change(keys, steps, registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data | {"pretrain": "Qwen/Qwen2.5-VL-7B-Instruct"}
    data["actor_train"] |= of_strategy("megatron_train", keys, steps, 1)
    role = converted(data, registry, tmp_path).config["actor_train"]
    assert role["strategy_args"] == {"strategy_name": "megatron_train", "strategy_config": keys}
    assert role["training_args"]["gradient_accumulation_steps"] == steps


def test_megatron_stays_in_runs_without_images(registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data | {"pretrain": "Qwen/Qwen3-4B"}
    data["actor_train"] |= of_strategy("megatron_train", {"tensor_model_parallel_size": 4}, 4, 1)
    role = converted(data, registry, tmp_path).config["actor_train"]
    assert role["strategy_args"]["strategy_name"] == "megatron_train"


@pytest.mark.parametrize(
    ("prefix", "freeze"),
    [
        ("vision_model", ["vision", "projector"]),
        ("vision_tower", ["vision"]),
        ("model.visual,multi_modal_projector", ["vision", "projector"]),
        (None, []),
        ("language_model", None),
    ],
)
def test_frozen_parts_are_imported(prefix, freeze, registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data
    data["pretrain"] = "Qwen/Qwen3-VL-4B-Instruct"
    put(data, ("actor_train", "model_args", "freeze_module_prefix"), prefix)
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(data))
    model_args = import_roll(file, registry).config["actor_train"]["model_args"]
    assert model_args.get("freeze") == freeze
    assert ("freeze_module_prefix" in model_args) is (freeze is None)


def test_rewards_for_detection_become_functions(registry, tmp_path):
    data = compose(FILES / "rlvr_images.yaml", (), registry).data
    worker = "roll.pipeline.rlvr.rewards.detection_reward_worker.DetectionRewardWorker"
    put(data, ("rewards", "math", "worker_cls"), worker)
    file = tmp_path / "theirs.yaml"
    file.write_text(yaml.safe_dump(data))
    assert import_roll(file, registry).config["rewards"]["math"]["reward"] == "function"


def test_rollouts_without_training_become_an_evaluation(registry, tmp_path):
    data = yaml.safe_load((FILES / "rlvr_ppo_critic.yaml").read_text(encoding="utf-8"))
    del data["actor_train"], data["critic"]
    file, out = tmp_path / "rollouts.yaml", tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    new = import_roll(file, registry)
    out.write_text(yaml.safe_dump(new.config), encoding="utf-8")
    config = load(out, (), registry).config
    assert (new.pipeline, config.pipeline, config.pretrain) == ("evaluate", "evaluate", "/models/policy")
    assert config.validation.generating_args.max_new_tokens == 1280 - 256
    assert config.rewards["math"].reward == "math_rule"
    assert {entry.key: entry.status for entry in new.keys}["rollout_batch_size"] == "not needed"


@pytest.mark.parametrize(
    ("changes", "steps", "status"),
    [
        ({}, 2, "differs"),  # 16 episodes for 8 replicas
        ({"rollout_batch_size": 64}, 8, "kept"),
        ({"rollout_batch_size": 20}, 8, "kept"),  # `check` rejects it
        ({"batch_adjust_mode": "delete"}, 8, "kept"),
    ],
)
def test_step_of_agents_has_no_copies_of_rows(changes, steps, status, registry, tmp_path):
    data = compose(FILES / "agentic.yaml", (), registry).data | {"rollout_batch_size": 16} | changes
    data["actor_train"] |= of_strategy("fsdp2_train", {"fsdp_size": 8}, 8, 1)
    data["actor_train"]["model_args"] = {"ulysses_size": 2}
    imported = converted(data, registry, tmp_path)
    assert imported.config["actor_train"]["training_args"]["gradient_accumulation_steps"] == steps
    entries = {entry.key: entry.status for entry in imported.keys}
    assert entries["actor_train.training_args.gradient_accumulation_steps"] == status


def test_settings_of_fsdp2_without_effect_on_results_are_dropped(registry, tmp_path):
    data = compose(FILES / "agentic.yaml", (), registry).data
    wraps = {"transformer_layer_cls_to_wrap": ["Layer"], "wrap_embeddings": True, "moe_experts": ["Experts"]}
    keys = {"ep_size": 4, "efsdp_size": 2, "apply_tiled_mlp": True, "tiled_num_shards": 4, "wrap_policy": wraps}
    data["actor_train"] |= of_strategy("fsdp2_train", keys | {"enable_mix_precision": False}, 1, 1)
    imported = converted(data, registry, tmp_path)
    assert imported.config["actor_train"]["strategy_args"]["strategy_config"] == {
        "ep_size": 4,
        "reduce_dtype": "bf16",
        "wrap_policy": {"transformer_layer_cls_to_wrap": ["Layer"]},
    }
    assert not [
        entry.key for entry in imported.keys if entry.status == "unsupported" and "strategy_config" in entry.key
    ]
