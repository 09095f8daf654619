"""Launches of OpenRLHF's trainers: expected keys worked out by hand, and every flag reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_core.config import load
from roll_core.errors import ConfigError, UnsupportedError
from roll_core.plugins.registry import load_registry
from roll_migrate.command import import_config
from roll_migrate.openrlhf import import_openrlhf
from roll_migrate.rules import value_at
from roll_testing.errors import raises_error

FILES = Path(__file__).parent / "openrlhf"
EXPECTED = {
    "ppo_critic.sh": {
        "pipeline": "rlvr",
        "exp_name": "first-try",
        "output_dir": "runs/ppo",
        "seed": 7,
        "pretrain": "models/policy",
        "save_steps": 20,
        "max_ckpt_to_keep": 3,
        "eval_steps": 0,
        "track_with": ["wandb"],
        "tracker_kwargs": {"wandb": {"project": "sums", "name": "first try"}},
        # 1024 tokens for both, 700 of them for the response
        "prompt_length": 324,
        "response_length": 700,
        "rollout_batch_size": 512,
        "num_return_sequences_in_group": 1,
        "adv_estimator": "gae",
        "gamma": 1.0,
        "lambd": 0.95,
        "whiten_advantages": True,
        "reward_clip": 5,
        "loss_agg_mode": "token-mean",
        "entropy_loss_coef": 0.001,
        "value_clip": 0.3,
        # steps 0 to 9 train the critic alone
        "critic_warmup": 10,
        "use_kl_loss": False,
        "add_token_level_kl": True,
        "kl_penalty": "k1",
        "init_kl_coef": 0.02,
        "target_kl": 6.0,
        "kl_horizon": 10000,
        "actor_train.model_args.disable_gradient_checkpointing": False,
        "actor_train.data_args.messages": "context",
        "actor_train.training_args.learning_rate": 5e-7,
        "actor_train.training_args.adam_beta2": 0.95,
        "actor_train.training_args.weight_decay": 0.0,
        "actor_train.training_args.lr_scheduler_type": "cosine_with_min_lr",
        "actor_train.training_args.lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "actor_train.training_args.warmup_ratio": 0.03,
        "actor_train.training_args.per_device_train_batch_size": 4,
        # 64 samples in micro-batches of 4 on 4 GPUs, for the critic on 2
        "actor_train.training_args.gradient_accumulation_steps": 4,
        "critic.training_args.gradient_accumulation_steps": 8,
        "critic.training_args.learning_rate": 8e-6,
        "critic.training_args.adam_beta2": 0.98,
        "critic.model_args.model_name_or_path": "models/reward",
        # 4 GPUs of policy and reference, 2 of critic and reward model, 2 engines of 2
        "actor_train.device_mapping": (0, 1, 2, 3),
        "reference.device_mapping": (0, 1, 2, 3),
        "critic.device_mapping": (4, 5),
        "rewards.openrlhf.device_mapping": (4, 5),
        "actor_infer.device_mapping": (6, 7, 8, 9),
        "actor_train.strategy_args.strategy_name": "deepspeed_train",
        "actor_train.strategy_args.strategy_config": {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}
        },
        "reference.strategy_args.strategy_config": {"zero_optimization": {"stage": 3}},
        "reference.infer_batch_size": 8,
        "rewards.openrlhf.model_args.model_name_or_path": "models/reward",
        "rewards.openrlhf.input": "tokens",
        "actor_infer.strategy_args.strategy_config": {
            "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.8,
            "enable_prefix_caching": True,
        },
        "actor_infer.generating_args.temperature": 0.9,
    },
    "reinforce_baseline.sh": {
        "adv_estimator": "reinforce++_baseline",
        "ppo_epochs": 2,
        "prompt_length": 512,
        "response_length": 1536,
        "critic": None,
        "use_kl_loss": True,
        "kl_loss_coef": 0.001,
        "kl_loss_penalty": "k2",
        "add_token_level_kl": False,
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.27,
        "reward_clip": None,
        "track_with": ["tensorboard"],
        "soft_overlong_penalty.l_max": 1536,
        "soft_overlong_penalty.l_cache": 512,
        "soft_overlong_penalty.penalty_factor": 0.5,
        # 256 samples in micro-batches of 2 on 8 GPUs
        "actor_train.training_args.gradient_accumulation_steps": 16,
        "actor_train.training_args.adam_beta1": 0.9,
        "actor_train.training_args.adam_beta2": 0.99,
        "actor_train.training_args.weight_decay": 0.01,
        "actor_train.training_args.warmup_ratio": 0.1,
        # the older default, 8
        "actor_train.infer_batch_size": 8,
        "actor_train.data_args.prompt": "question",
        "actor_train.data_args.template": "plain",
        "actor_infer.device_mapping": tuple(range(8)),
        "reference.strategy_args.strategy_config": {"zero_optimization": {"stage": 0}},
        "rewards.openrlhf.function": "rewards.sums:reward_func",
        "rewards.openrlhf.signature": "openrlhf",
        "rewards.openrlhf.label": "answer",
        "rewards.openrlhf.query_filter_config.type": "mean_filter",
        "rewards.openrlhf.query_filter_config.filter_args.threshold_down": 0.1,
        "rewards.openrlhf.query_filter_config.filter_args.threshold_up": 0.9,
    },
    "grpo.sh": {
        "adv_estimator": "grpo",
        "norm_epsilon": 1e-9,
        "num_return_sequences_in_group": 8,
        "loss_agg_mode": "seq-mean-token-mean",
        "dual_clip": 3,
        "reference": None,
        "add_token_level_kl": False,
        "prompt_length": 1024,
        "resume_from_checkpoint": "auto",
        "save_best.metric": "val/score/mean",
        "eval_steps": 10,
        "shuffle": False,
        "actor_train.data_args.file_name": ["data/a.parquet", "data/b.parquet"],
        "actor_train.data_args.template": "native",
        "actor_train.strategy_args.strategy_name": "fsdp2_train",
        "actor_train.strategy_args.strategy_config": {"ring_size": 2},
        # 64 samples on 8 GPUs, two for each sequence
        "actor_train.training_args.gradient_accumulation_steps": 16,
        "actor_train.max_tokens_per_microbatch_in_train": 16384,
        "actor_train.max_tokens_per_microbatch_in_infer": 32768,
        "actor_infer.device_mapping": tuple(range(8)),
        "rewards.openrlhf.function": "my_rewards:reward_func",
        "validation.data_args.messages": "prompt",
        "validation.generating_args.temperature": 0.6,
        "validation.generating_args.num_return_sequences": 2,
    },
    "async.sh": {
        "adv_estimator": "rloo",
        "async_generation_ratio": 2.0,
        "partial_rollout": True,
        "add_token_level_kl": True,
        "init_kl_coef": 0.01,
        "reference": None,
        "actor_train.model_args.lora_target": ["q_proj", "v_proj"],
        "actor_train.model_args.lora_rank": 16,
        "actor_train.model_args.lora_alpha": 16,
        # 128 samples in micro-batches of 1 on 2 nodes of 4
        "actor_train.training_args.gradient_accumulation_steps": 16,
        "actor_train.device_mapping": tuple(range(8)),
        "actor_infer.device_mapping": tuple(range(8, 16)),
        "train_infer_correction.is_weight.lower_bound": 0.5,
        "train_infer_correction.is_weight.upper_bound": 4,
        "train_infer_correction.is_weight.outside": "mask",
    },
    "sft.sh": {
        "pipeline": "sft",
        "pretrain": "models/base",
        "prompt_length": 4093,
        "response_length": 4096,
        "overlong": "truncate",
        "logging_steps": 5,
        "save_steps": 0,
        "sft_train.data_args.messages": "messages",
        "sft_train.data_args.max_samples": 500000,
        "sft_train.training_args.num_train_epochs": 3,
        "sft_train.training_args.learning_rate": 2e-5,
        "sft_train.training_args.lr_scheduler_type": "linear",
        "sft_train.training_args.lr_scheduler_kwargs": {},
        # 64 sequences in micro-batches of 2 on 4 GPUs
        "sft_train.training_args.gradient_accumulation_steps": 8,
        "sft_train.device_mapping": (0, 1, 2, 3),
        "sft_train.strategy_args.strategy_config": {"zero_optimization": {"stage": 1}},
    },
    "dpo.sh": {
        "pipeline": "preference",
        "loss_type": ["sigmoid", "sft"],
        "loss_weights": [1.0, 0.2],
        "beta": 0.05,
        "label_smoothing": 0.1,
        "max_grad_norm": 0.5,
        "eval_steps": 50,
        "actor_train.data_args.chosen": "better",
        "validation.data_args.rejected": "worse",
        "actor_train.training_args.num_train_epochs": 1,
        "actor_train.training_args.weight_decay": 0.1,
        # 128 pairs in micro-batches of 2 on 8 GPUs
        "actor_train.training_args.gradient_accumulation_steps": 8,
        "reference.model_args.model_name_or_path": "models/reference",
        "reference.device_mapping": tuple(range(8)),
    },
    "rm.sh": {
        "pipeline": "reward_model",
        "margin": "margin",
        "prompt_length": 1024,
        "reward_train.data_args.prompt": "question",
        "reward_train.data_args.template": "plain",
        "reward_train.model_args.lora_rank": 8,
        "reward_train.model_args.lora_alpha": 32,
        "reward_train.model_args.lora_target": "all-linear",
        "reward_train.training_args.learning_rate": 3e-6,
        # 32 pairs in micro-batches of 1 on 2 GPUs
        "reward_train.training_args.gradient_accumulation_steps": 16,
    },
}
BASE = "--actor.model_name_or_path m --data.prompt_dataset a.jsonl --reward.remote_url r.py --vllm.num_engines 1"
GROUPS = f"{BASE} --rollout.n_samples_per_prompt 4 --algo.advantage.estimator"


@pytest.fixture(scope="module")
def registry():
    return load_registry()


def imported(flags, registry, folder, trainer="train_ppo_ray"):
    file = folder / "run.sh"
    file.write_text(f"python3 -m openrlhf.cli.{trainer} {flags}\n")
    return import_openrlhf(file, registry)


def status_of(new, key):
    return [entry.status for entry in new.keys if entry.key == key]


def setting(value, path):
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else getattr(value, step, None)
    return value


@pytest.mark.parametrize("name", EXPECTED)
def test_imported_run_has_openrlhfs_settings(name, registry, tmp_path):
    out = tmp_path / "ours.yaml"
    code = import_config("openrlhf", FILES / name, out, registry, as_json=False, verbose=False)
    # The rows of the prompts are not here, so the steps of rlvr are to be set; other trainers count epochs.
    uncounted = EXPECTED[name].get("pipeline", "rlvr") == "rlvr"
    assert code == int(uncounted)
    config = load(out, ("max_steps=5",) if uncounted else (), registry).config
    assert {path: setting(config, path) for path in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_every_flag_is_reported_once_at_its_place(name, registry):
    lines = (FILES / name).read_text().splitlines()
    keys = [entry for entry in import_openrlhf(FILES / name, registry).keys if entry.where.count(":") == 2]
    assert len(keys) == len({entry.key for entry in keys})
    listed = [entry for entry in keys if f"--{entry.key}" in lines[int(entry.where.rsplit(":", 2)[1]) - 1]]
    assert all(entry in listed or "[@]" in lines[int(entry.where.rsplit(":", 2)[1]) - 1] for entry in keys)
    assert not [entry.key for entry in keys if entry.status == "unknown"]


@pytest.mark.parametrize(
    ("flags", "key", "status", "to"),
    [
        # estimators
        (f"{GROUPS} group_norm", "algo.advantage.estimator", "changed", {"adv_estimator": "grpo", "reward_clip": None}),
        (
            f"{GROUPS} dr_grpo",
            "algo.advantage.estimator",
            "changed",
            {"adv_estimator": "reinforce", "norm_mean_type": "group", "reward_clip": 10.0},
        ),
        (
            f"{GROUPS} flash_reinforce",
            "algo.advantage.estimator",
            "changed",
            {"adv_estimator": "reinforce", "norm_mean_type": "batch"},
        ),
        (f"{GROUPS} reinforce", "algo.advantage.estimator", "changed", {"adv_estimator": "reinforce++"}),
        (f"{GROUPS} best", "algo.advantage.estimator", "unsupported", {"algo.advantage.estimator": "best"}),
        (f"{GROUPS} rloo --algo.advantage.gamma 0.9", "algo.advantage.gamma", "dead", {"gamma": None}),
        (f"{GROUPS} reinforce --algo.advantage.gamma 0.9", "algo.advantage.gamma", "renamed", {"gamma": 0.9}),
        (f"{GROUPS} rloo --critic.adam.lr 1e-5", "critic.adam.lr", "not needed", {"critic": None}),
        (f"{GROUPS} rloo --algo.advantage.no_std_norm", "algo.advantage.no_std_norm", "not needed", {}),
        (
            f"{GROUPS} reinforce_baseline --algo.advantage.no_std_norm",
            "algo.advantage.no_std_norm",
            "unsupported",
            {"algo.advantage.no_std_norm": True},
        ),
        (f"{GROUPS} rloo --reward.clip_range -2 2", "reward.clip_range", "differs", {"reward_clip": 2}),
        (f"{BASE} --reward.clip_range -2 5", "reward.clip_range", "unsupported", {"reward_clip": 10.0}),
        # KL
        (
            f"{BASE} --algo.kl.use_loss --algo.kl.unbiased_gradient --algo.kl.estimator k2",
            "algo.kl.unbiased_gradient",
            "changed",
            {"use_kl_loss": True, "kl_loss_unbiased": True, "kl_loss_penalty": "k3", "kl_loss_coef": 0.01},
        ),
        (f"{BASE} --algo.kl.unbiased_gradient", "algo.kl.unbiased_gradient", "dead", {"kl_loss_unbiased": None}),
        (f"{BASE} --algo.kl.use_loss", "algo.kl.use_loss", "renamed", {"kl_loss_penalty": "k1", "init_kl_coef": None}),
        (
            f"{BASE} --algo.kl.use_loss --algo.kl.target 0.1",
            "algo.kl.target",
            "unsupported",
            {"algo.kl.target": 0.1, "target_kl": None},
        ),
        (f"{BASE} --algo.kl.init_coef -1", "algo.kl.init_coef", "not needed", {"reference": None}),
        # losses
        (
            f"{BASE} --actor.policy_loss_type gspo --actor.eps_clip 0.1",
            "actor.eps_clip",
            "renamed",
            {
                "pg_variant": "gspo",
                "pg_options": {"clip_low": 0.1, "clip_high": 0.1},
                "pg_clip": None,
                "loss_agg_mode": "seq-mean-token-mean",
            },
        ),
        (f"{BASE} --actor.eps_clip 0.1", "actor.eps_clip", "renamed", {"pg_clip": 0.1}),
        (
            f"{BASE} --actor.policy_loss_type gspo --actor.dual_clip 3",
            "actor.dual_clip",
            "unsupported",
            {"dual_clip": None, "actor.dual_clip": 3},
        ),
        *(
            (
                f"{BASE} --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.5 4{kind}",
                "algo.advantage.is_correction_enable",
                status,
                written,
            )
            for kind, status, written in (
                ("", "changed", {"train_infer_correction.is_weight.outside": None}),
                (
                    " --algo.advantage.is_correction_type icepop",
                    "changed",
                    {
                        "train_infer_correction.is_weight": {
                            "enabled": True,
                            "weight_type": "token",
                            "lower_bound": 0.5,
                            "upper_bound": 4,
                            "outside": "mask",
                        }
                    },
                ),
                (
                    " --algo.advantage.is_correction_type seq-mask-tis",
                    "differs",
                    {
                        "train_infer_correction.filters": [
                            {"enabled": True, "agg_type": "geometric", "ratio_low": 0.5, "ratio_high": 4}
                        ]
                    },
                ),
                (" --algo.advantage.is_correction_type other", "unsupported", {"train_infer_correction": None}),
            )
        ),
        (f"{BASE} --actor.colour blue", "actor.colour", "unknown", {"actor.colour": "blue"}),
        (
            f"{BASE} --algo.advantage.is_correction_level seq --algo.advantage.is_correction_threshold 0.9 1.1",
            "algo.advantage.is_correction_level",
            "differs",
            {
                "train_infer_correction.filters": [
                    {"enabled": True, "agg_type": "geometric", "ratio_low": 0.9, "ratio_high": 1.1}
                ]
            },
        ),
        (
            f"{BASE} --algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv"
            " --algo.advantage.is_correction_threshold 0.1",
            "algo.advantage.is_correction_level",
            "unsupported",
            {"train_infer_correction": None},
        ),
        (
            f"{BASE} --enable_vllm_is_correction",
            "enable_vllm_is_correction",
            "differs",
            {
                "train_infer_correction.is_weight.lower_bound": 0.5,
                "train_infer_correction.is_weight.upper_bound": 5.0,
            },
        ),
        (
            f"{BASE} --enable_vllm_is_correction --vllm_is_truncated_threshold 0.2 3",
            "enable_vllm_is_correction",
            "changed",
            {
                "train_infer_correction.is_weight": {
                    "enabled": True,
                    "weight_type": "token",
                    "lower_bound": 0.2,
                    "upper_bound": 3,
                }
            },
        ),
        (
            f"{BASE} --train.async_enable --actor.num_gpus_per_node 1",
            "train.async_enable",
            "differs",
            {"async_generation_ratio": 1.0, "train_infer_correction.is_weight.enabled": False},
        ),
        # rewards, data, lengths
        (
            f"{BASE} --reward.remote_url http://localhost:5000/get_reward",
            "reward.remote_url",
            "unsupported",
            {"rewards": None, "reward.remote_url": "http://localhost:5000/get_reward"},
        ),
        (
            f"{BASE} --train.agent_func_path agent.py",
            "train.agent_func_path",
            "unsupported",
            {"rewards": None, "train.agent_func_path": "agent.py"},
        ),
        (f"{BASE} --reward.normalize_enable --critic_pretrain rm", "reward.normalize_enable", "unsupported", {}),
        (f"{BASE} --reward.normalize_enable", "reward.normalize_enable", "not needed", {}),
        (
            f"{BASE} --enable_vllm_is_correction --use_icepop",
            "enable_vllm_is_correction",
            "differs",
            {"train_infer_correction.is_weight.outside": "mask"},
        ),
        (
            f"{BASE} --data.prompt_dataset OpenRLHF/prompt-collection-v0.1",
            "data.prompt_dataset",
            "renamed",
            {"actor_train.data_args.file_name": "hf://OpenRLHF/prompt-collection-v0.1"},
        ),
        (
            f"{BASE} --data.prompt_dataset OpenRLHF/a,OpenRLHF/b --data.prompt_split test",
            "data.prompt_dataset",
            "renamed",
            {"actor_train.data_args.file_name": ["hf://OpenRLHF/a?split=test", "hf://OpenRLHF/b?split=test"]},
        ),
        (
            f"{BASE} --data.prompt_dataset OpenRLHF/prompts@data",
            "data.prompt_dataset",
            "unsupported",
            {"actor_train.data_args.file_name": None},
        ),
        (
            f"{BASE} --data.input_template 'Q: {{}} A:'",
            "data.input_template",
            "changed",
            {"actor_train.data_args.columns": {"input": "Q: {{ row['input'] }} A:"}},
        ),
        (
            f"{BASE} --data.input_template 'Q: {{}} {{{{}}}}'",
            "data.input_template",
            "unsupported",
            {"data.input_template": "Q: {} {{}}"},
        ),
        (
            f"{BASE} --data.input_template ''",
            "data.input_template",
            "not needed",
            {"actor_train.data_args.template": "plain"},
        ),
        (f"{BASE} --data.max_len=512", "data.max_len", "differs", {"prompt_length": 512, "response_length": 512}),
        # the run
        (f"{BASE} --actor.optim muon", "actor.optim", "unsupported", {"actor.optim": "muon"}),
        (f"{BASE} --actor.max_norm 0.5 --critic.max_norm 2", "critic.max_norm", "unsupported", {"max_grad_norm": 0.5}),
        (f"{BASE} --max_norm 0.5", "max_norm", "renamed", {"max_grad_norm": 0.5}),
        (f"{BASE} --eval.steps 5", "eval.steps", "not needed", {"eval_steps": 0}),
        (
            f"{BASE} --ds.lora.rank 8 --ds.load_in_4bit",
            "ds.load_in_4bit",
            "changed",
            {"actor_train.model_args.load_in_4bit": True},
        ),
        (f"{BASE} --ds.lora.alpha 8", "ds.lora.alpha", "not needed", {"actor_train.model_args.lora_alpha": None}),
        (f"{BASE} --train.enable_ema", "train.enable_ema", "unsupported", {}),
        (f"{BASE} --train.num_episodes 2", "train.num_episodes", "unsupported", {"max_steps": "???"}),
        (f"{BASE} --algo.kl.init_coeff 0", "algo.kl.init_coeff", "unknown", {"init_kl_coef": 0.01}),
        (f"{BASE} --colour", "colour", "unknown", {}),
    ],
)
def test_ppo_flag_has_status_and_target(flags, key, status, to, registry, tmp_path):
    new = imported(flags, registry, tmp_path)
    assert status_of(new, key) == [status]
    assert {path: new.config.get(path, value_at(new.config, tuple(path.split(".")))) for path in to} == to


@pytest.mark.parametrize(
    ("trainer", "flags", "key", "status", "to"),
    [
        # the default template of train_sft formats prompts
        (
            "train_sft",
            "--input_key q",
            "data.input_template",
            "changed",
            {
                "sft_train.data_args.prompt": "q",
                "sft_train.data_args.columns": {"q": "User: {{ row['q'] }}\nAssistant: "},
            },
        ),
        ("train_sft", "--input_key q --input_template ''", "input_template", "not needed", {}),
        (
            "train_sft",
            "--input_key q --output_key a --apply_chat_template",
            "output_key",
            "renamed",
            {"sft_train.data_args": {"file_name": "a.jsonl", "prompt": "q", "response": "a"}},
        ),
        ("train_sft", "--input_key q --apply_chat_template", "input_key", "differs", {}),
        ("train_sft", "--pretrain_mode", "pretrain_mode", "unsupported", {"model.pretrain_mode_enable": True}),
        ("train_dpo", "--ipo --label_smoothing 0.1", "label_smoothing", "not needed", {"loss_type": ["ipo_sum"]}),
        ("train_dpo", "--lora_rank 4", "lora_rank", "renamed", {"reference": None}),
        # once per epoch by default
        ("train_dpo", "--eval_dataset b.jsonl", "eval.steps", "differs", {"eval_steps": None}),
        ("train_rm", "--margin_loss --loss logexp", "margin_loss", "dead", {"margin": None}),
        ("train_rm", "--value_head_prefix value", "value_head_prefix", "unsupported", {}),
        ("train_rm", "--dataset_probs 0.5,0.5", "dataset_probs", "unsupported", {"data.dataset_probs": "0.5,0.5"}),
    ],
)
def test_flags_of_other_trainers_have_status_and_target(trainer, flags, key, status, to, registry, tmp_path):
    new = imported(f"--pretrain m --dataset a.jsonl {flags}", registry, tmp_path, trainer)
    assert status_of(new, key) == [status]
    assert {path: new.config.get(path, value_at(new.config, tuple(path.split(".")))) for path in to} == to


@pytest.mark.parametrize(
    ("flags", "trainer"),
    [
        (f"{BASE} --reward.normalize_enable --critic_pretrain rm", "train_ppo_ray"),
        (f"{BASE} --kl_target 1 --use_kl_loss", "train_ppo_ray"),
        ("--pretrain m --dataset a.jsonl --load_in_4bit --apply_chat_template", "train_dpo"),
        ("--pretrain m --dataset a.jsonl --output_key b --input_template '{} {{}}'", "train_sft"),
    ],
)
def test_unsupported_flags_are_rejected_by_check(flags, trainer, registry, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f"deepspeed --module openrlhf.cli.{trainer} {flags}\n")
    assert import_config("openrlhf", file, tmp_path / "out.yaml", registry, as_json=False, verbose=False) == 1


def test_episodes_become_steps_if_rows_can_be_counted(registry, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "1+1"}\n' * 22)
    flags = BASE.replace("a.jsonl", str(tmp_path / "a.jsonl"))
    new = imported(f"{flags} --data.max_samples 21 --rollout.batch_size 10", registry, tmp_path)
    assert new.config["max_steps"] == 2
    new = imported(f"{flags} --num_episodes 3 --rollout.batch_size 8", registry, tmp_path)
    assert new.config["max_steps"] == 6


@pytest.mark.parametrize(("value", "column"), [("1+1", "prompt"), ([{"role": "user", "content": "1+1"}], "messages")])
def test_first_row_decides_between_text_and_chat(value, column, registry, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"q": value}) + "\n")
    flags = BASE.replace("a.jsonl", str(tmp_path / "a.jsonl"))
    new = imported(f"{flags} --data.apply_chat_template --data.input_key q", registry, tmp_path)
    assert value_at(new.config, ("actor_train", "data_args", column)) == "q"


def test_quoted_value_is_one_word_with_its_escapes(registry, tmp_path):
    new = imported(f"{BASE} --data.input_template $'User: {{}}\\nBot: '", registry, tmp_path)
    columns = new.config["actor_train"]["data_args"]["columns"]
    assert columns == {"input": "User: {{ row['input'] }}\nBot: "}


@pytest.mark.parametrize(
    ("flags", "key", "code"),
    [
        ("--train.batch_size", "train.batch_size", "ROLL-C011"),
        ("--train.batch_size --train.seed 1", "train.batch_size", "ROLL-C011"),
        ("--actor.adam.betas 0.9", "actor.adam.betas", "ROLL-C011"),
        ("--train.batch_size many", "train.batch_size", "ROLL-C013"),
        ("--train.batch_size nan", "train.batch_size", "ROLL-C013"),
        ("--train.colocate_all=1", "train.colocate_all", "ROLL-C013"),
        ("--train.colocate_all true", "", "ROLL-C013"),
        ("--actor.model_name_or_path $NOWHERE/m", "actor.model_name_or_path", "ROLL-C024"),
    ],
)
def test_wrong_value_is_located(flags, key, code, registry, tmp_path):
    with pytest.raises(ConfigError) as error:
        imported(flags, registry, tmp_path)
    (problem,) = error.value.problems
    assert (problem.key, problem.code) == (key, code)
    assert problem.where.startswith(f"{tmp_path / 'run.sh'}:1:")


def test_trackers_secret_key_is_not_copied(registry, tmp_path):
    new = imported(f"{BASE} --use_wandb 0123secret", registry, tmp_path)
    assert new.config["track_with"] == ["wandb"]
    assert "0123secret" not in repr(new)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "python3 -m verl.trainer.main_ppo data.train_files=a\n",
        "deepspeed --module openrlhf.cli.train_kto --pretrain m\n",
        "deepspeed --module openrlhf.cli.train_sft --a\ndeepspeed --module openrlhf.cli.train_rm --b\n",
    ],
)
def test_scripts_of_other_trainers_are_refused(text, registry, tmp_path):
    (tmp_path / "run.sh").write_text(text)
    with pytest.raises(UnsupportedError) as error:
        import_openrlhf(tmp_path / "run.sh", registry)
    assert error.value.exit_code == 2


def test_unreadable_file_is_an_error(registry, tmp_path):
    with pytest.raises(ConfigError) as error:
        import_openrlhf(tmp_path / "missing.sh", registry)
    assert [entry.code for entry in error.value.problems] == ["ROLL-C020"]


@pytest.mark.parametrize(
    ("flag", "fact"),
    [("--actor.model_name_or_path Qwen/Qwen2.5-Omni-3B", "Qwen2.5-Omni-3B"), ("--pretrain audio-7b", "audio-7b")],
)
def test_models_with_audio_are_refused_by_name(flag, fact, registry, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(f"python3 -m openrlhf.cli.train_ppo_ray {flag} --data.prompt_dataset a.jsonl\n")
    with raises_error(UnsupportedError, fact, f"{file}:1"):
        import_openrlhf(file, registry)


def test_scripts_in_the_idiom_of_openrlhf_are_followed(registry, tmp_path):
    file = tmp_path / "run.sh"
    file.write_text("""set -x
WORK=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ARGS=(--ckpt.output_dir "${WORK}/out")
ARGS+=(--actor.model_name_or_path "${MODEL:-models/policy}")
read -r -d '' more <<EOF
openrlhf.cli.train_ppo_ray \\
   --data.prompt_dataset ${WORK}/a.jsonl \\
   --rollout.batch_size 64
EOF
if [[ ${1} != "slurm" ]]; then
    python3 -m $more "${ARGS[@]}" --logger.wandb.key $WANDB_API_KEY
fi
""")
    new = import_openrlhf(file, registry)
    assert new.config["rollout_batch_size"] == 64
    assert new.config["output_dir"] == f"{tmp_path}/out"
    assert value_at(new.config, ("actor_train", "data_args", "file_name")) == f"{tmp_path}/a.jsonl"
    places = {entry.key: entry.where.removeprefix(f"{file}:") for entry in new.keys if entry.where}
    assert places["rollout.batch_size"].startswith("8:")
    assert places["ckpt.output_dir"].startswith("3:")
    other = import_openrlhf(file, registry, {"MODEL": "other"})
    assert other.config["pretrain"] == "other"


@pytest.mark.parametrize(
    ("flags", "args", "freeze"),
    [
        ("--data.max_images_per_prompt 4", {"images": "images", "max_images": 4}, []),
        (
            "--data.max_images_per_prompt 1 --data.image_key pictures --actor.freeze_visual_encoder",
            {"images": "pictures", "max_images": 1},
            ["vision", "projector"],
        ),
        ("--data.image_key pictures", {}, None),
    ],
)
def test_columns_of_images_are_imported(flags, args, freeze, registry, tmp_path):
    file = tmp_path / "run.sh"
    model = "--actor.model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct"
    file.write_text(f"python3 -m openrlhf.cli.train_ppo_ray {model} --data.prompt_dataset a.jsonl {flags}\n")
    config = import_openrlhf(file, registry).config["actor_train"]
    assert {key: config["data_args"].get(key) for key in ("images", "max_images")} == {
        "images": None,
        "max_images": None,
        **args,
    }
    assert config.get("model_args", {}).get("freeze") == freeze
