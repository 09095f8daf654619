"""Configs of verl's PPO trainer: expected keys worked out by hand, and every key reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from roll_core.api.files import FileCheck
from roll_core.cli.main import main
from roll_core.config import load
from roll_core.errors import ConfigError, UnsupportedError
from roll_core.plugins.registry import load_registry
from roll_migrate.command import import_config
from roll_migrate.rules import value_at
from roll_migrate.verl import import_verl
from roll_testing.errors import raises_error

FILES = Path(__file__).parent / "verl"
PPO = "python3 -m verl.trainer.main_ppo"
EXPECTED = {
    "grpo_fsdp_vllm.yaml": {
        "exp_name": "first-try",
        "output_dir": "runs",
        "seed": 11,
        "pretrain": "models/policy",
        "save_steps": 25,
        "eval_steps": 5,
        "resume_from_checkpoint": False,
        "track_with": ["wandb"],
        "tracker_kwargs": {"wandb": {"project": "sums"}},
        "prompt_length": 768,
        "response_length": 1280,
        "rollout_batch_size": 256,
        "num_return_sequences_in_group": 5,
        "adv_estimator": "grpo",
        "loss_agg_mode": "token-mean",
        "shuffle": False,
        "use_kl_loss": True,
        "kl_loss_coef": 0.003,
        "kl_loss_penalty": "k3",
        "whiten_advantages": False,
        "critic": None,
        # 64 prompts × 5 responses over 8 GPUs are 40 samples per GPU, in microbatches of 5
        "actor_train.training_args.gradient_accumulation_steps": 8,
        "actor_train.training_args.per_device_train_batch_size": 5,
        "actor_train.training_args.learning_rate": 2e-6,
        "actor_train.training_args.weight_decay": 0.05,
        "actor_train.training_args.warmup_steps": 12,
        "actor_train.training_args.lr_scheduler_type": "constant_with_warmup",
        "actor_train.strategy_args.strategy_name": "fsdp2_train",
        "actor_train.data_args.messages": "prompt",
        "actor_train.infer_batch_size": 10,
        "actor_train.device_mapping": tuple(range(8)),
        "reference.strategy_args.strategy_name": "fsdp2_infer",
        "reference.infer_batch_size": 20,
        "actor_infer.strategy_args.strategy_config": {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.6},
        "actor_infer.generating_args.temperature": 0.9,
        "validation.generating_args.temperature": 0.6,
        "validation.generating_args.num_return_sequences": 2,
        "validation.data_args.file_name": "data/test.parquet",
        "rewards.verl.function": "scoring.rules:score",
        "max_steps": 200,
    },
    "dapo.sh": {
        "max_steps": 300,
        "save_steps": 0,
        "track_with": [],
        "response_length": 6144,
        "rollout_batch_size": 96,
        "num_return_sequences_in_group": 12,
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.3,
        "dual_clip": 10.0,
        "use_kl_loss": False,
        "reference": None,
        # 5 batches of 288 prompts, for batches of 96
        "dynamic_sampling_max_tries": 15.0,
        "rewards.verl.query_filter_config.type": "std_filter",
        "soft_overlong_penalty.l_max": 6144,
        "soft_overlong_penalty.l_cache": 2048,
        "soft_overlong_penalty.penalty_factor": 0.5,
        "actor_train.strategy_args.strategy_config": {"ulysses_size": 2},
        # (1024 + 6144) × 2 tokens per GPU, in groups of two GPUs
        "actor_train.max_tokens_per_microbatch_in_train": 28672,
        "actor_train.use_dynamic_batching_in_train": True,
        # 32 prompts × 12 responses over 8 groups of two GPUs
        "actor_train.training_args.gradient_accumulation_steps": 48,
        "actor_train.training_args.per_device_train_batch_size": 1,
        "actor_train.device_mapping": tuple(range(16)),
        "actor_infer.strategy_args.strategy_config": {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5},
    },
    "ppo_megatron.yaml": {
        "adv_estimator": "gae",
        "gamma": 0.99,
        "lambd": 0.97,
        "whiten_advantages": True,
        "value_clip": 0.4,
        "critic_warmup": 10,
        "num_return_sequences_in_group": 1,
        "prompt_length": 512,
        "add_token_level_kl": True,
        "kl_penalty": "k3",
        "init_kl_coef": 0.02,
        "target_kl": 0.2,
        "actor_train.data_args.file_name": ["data/a.parquet", "data/b.parquet"],
        "actor_train.strategy_args.strategy_name": "megatron_train",
        # 128 samples over 16 / (2 × 2) data parallel ranks, in microbatches of 4
        "actor_train.training_args.gradient_accumulation_steps": 8,
        "actor_train.training_args.learning_rate": 1e-6,
        "reference.strategy_args.strategy_config.tensor_model_parallel_size": 4,
        "reference.strategy_args.strategy_config.pipeline_model_parallel_size": 2,
        "critic.model_args.model_name_or_path": "models/value",
        "critic.training_args.learning_rate": 3e-6,
        # 128 samples over 16 / 2 data parallel ranks, in microbatches of 2
        "critic.training_args.gradient_accumulation_steps": 8,
        "actor_infer.strategy_args.strategy_config": {"tp_size": 4, "mem_fraction_static": 0.7},
    },
    "moe.sh": {
        # sequence_parallel is verl's default
        "actor_train.strategy_args.strategy_config": {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
            "moe_router_dtype": "fp32",
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 0.5,
        },
        "reference.strategy_args.strategy_config": {
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
            "moe_router_dtype": "fp32",
        },
        # 32 prompts × 4 responses over 8 data parallel ranks, in microbatches of 2
        "actor_train.training_args.gradient_accumulation_steps": 8,
        # four data-parallel copies of two GPUs share their experts: one engine of eight
        "actor_infer.strategy_args.strategy_config": {
            "tensor_parallel_size": 2,
            "data_parallel_size": 4,
            "enable_expert_parallel": True,
            "gpu_memory_utilization": 0.5,
        },
    },
}


@pytest.fixture(scope="module")
def registry():
    return load_registry()


def imported(text, registry, folder, name="theirs.yaml"):
    file = folder / name
    file.write_text(text)
    return import_verl(file, registry)


def settings(**changes):
    """A config with the keys that have no default, changed at dotted paths."""
    data = {"actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"name": "vllm"}}, "data": {"train_files": "a"}}
    for path, value in changes.items():
        parent = data
        *steps, last = path.split("__")
        for step in steps:
            parent = parent.setdefault({"arr": "actor_rollout_ref"}.get(step, step), {})
        parent[last] = value
    return yaml.safe_dump(data)


def setting(value, path):
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else getattr(value, step, None)
    return value


@pytest.mark.parametrize("name", EXPECTED)
def test_imported_run_has_verls_settings(name, registry, tmp_path):
    out = tmp_path / "ours.yaml"
    assert import_config("verl", FILES / name, out, registry, as_json=False, verbose=False) == 0
    config = load(out, (), registry).config
    assert {path: setting(config, path) for path in EXPECTED[name]} == EXPECTED[name]


@pytest.mark.parametrize("path", ["trainer.colour", "critic.infer_batch_size", "colours.sky", "trainer.colours.sky"])
def test_unknown_key_stays_and_check_rejects_it(path, registry, tmp_path):
    text = settings(trainer__total_training_steps=5, **{path.replace(".", "__"): "blue"})
    new = imported(text, registry, tmp_path)
    (unknown,) = [entry for entry in new.keys if entry.status == "unknown"]
    assert unknown.key == path
    assert value_at(new.config, tuple(unknown.to[0].split("."))) == "blue"
    out = tmp_path / "ours.yaml"
    assert import_config("verl", tmp_path / "theirs.yaml", out, registry, as_json=False, verbose=False) == 1
    with raises_error("ROLL-C010", unknown.to[0].split(".")[0]):
        load(out, (), registry)


def test_every_key_of_a_file_is_reported_once(registry):
    def leaves(value, prefix=""):
        if isinstance(value, dict) and value:
            return [leaf for key, entry in value.items() for leaf in leaves(entry, f"{prefix}{key}.")]
        return [prefix.removesuffix(".")]

    for name in ("grpo_fsdp_vllm.yaml", "ppo_megatron.yaml"):
        file = FILES / name
        data = yaml.safe_load(file.read_text())
        keys = leaves(data)
        told = [entry.key for entry in import_verl(file, registry).keys if entry.status != "added"]
        assert sorted(told) == sorted(keys)


@pytest.mark.parametrize(
    ("changes", "key", "status", "to"),
    [
        ({"algorithm__adv_estimator": "grpo"}, "algorithm.adv_estimator", "differs", {"adv_estimator": "grpo"}),
        (
            {"data__apply_chat_template_kwargs": {"enable_thinking": False}, "data__val_files": "val.parquet"},
            "data.apply_chat_template_kwargs.enable_thinking",
            "renamed",
            {
                "actor_train.data_args.chat_template_kwargs.enable_thinking": False,
                "validation.data_args.chat_template_kwargs.enable_thinking": False,
            },
        ),
        (
            {"algorithm__adv_estimator": "grpo", "algorithm__norm_adv_by_std_in_grpo": False},
            "algorithm.adv_estimator",
            "changed",
            {"adv_estimator": "reinforce", "norm_mean_type": "group"},
        ),
        (
            {"algorithm__adv_estimator": "reinforce_plus_plus"},
            "algorithm.adv_estimator",
            "changed",
            {"adv_estimator": "reinforce++"},
        ),
        (
            {"arr__actor__use_kl_loss": True, "arr__actor__kl_loss_type": "k3+"},
            "actor_rollout_ref.actor.kl_loss_type",
            "changed",
            {"kl_loss_penalty": "k3", "kl_loss_unbiased": True},
        ),
        (
            {"arr__actor__loss_agg_mode": "seq-mean-token-sum-norm"},
            "actor_rollout_ref.actor.loss_agg_mode",
            "differs",
            {"loss_agg_mode": "seq-mean-token-sum-norm"},
        ),
        (
            {"arr__actor__policy_loss": {"loss_mode": "gspo"}, "arr__actor__clip_ratio_low": 3e-4},
            "actor_rollout_ref.actor.clip_ratio_low",
            "renamed",
            {"pg_variant": "gspo", "pg_options": {"clip_low": 3e-4, "clip_high": 0.2}, "dual_clip": None},
        ),
        # verl reads clip_ratio only where a bound is null
        ({"arr__actor__clip_ratio": 0.3}, "actor_rollout_ref.actor.clip_ratio", "dead", {"pg_clip": None}),
        (
            {"arr__actor": {"clip_ratio": 0.3, "clip_ratio_low": None, "clip_ratio_high": 0.4}},
            "actor_rollout_ref.actor.clip_ratio",
            "renamed",
            {"pg_clip_low": 0.3, "pg_clip_high": 0.4},
        ),
        (
            {"arr__actor": {"policy_loss": {"loss_mode": "cispo"}, "clip_ratio_low": 0.9, "clip_ratio_high": 4}},
            "actor_rollout_ref.actor.clip_ratio_high",
            "renamed",
            {"pg_options": {"bounds": "relative", "clip_low": 0.9, "clip_high": 4}, "pg_clip_high": None},
        ),
        (
            {"arr__actor": {"policy_loss": {"loss_mode": "geo_mean"}, "clip_ratio_low": 0.3}},
            "actor_rollout_ref.actor.clip_ratio_low",
            "renamed",
            {"pg_variant": "gmpo", "pg_options": {"clip_low": 0.3, "clip_high": 0.2}},
        ),
        (
            {"arr__actor": {"policy_loss": {"loss_mode": "dppo_kl"}, "clip_ratio_c": 12.0}},
            "actor_rollout_ref.actor.clip_ratio_c",
            "renamed",
            {
                "pg_variant": "dppo",
                "pg_options": {"divergence": "kl", "delta_low": 0.2, "delta_high": 0.2, "ratio_high": 12.0},
                "dual_clip": None,
            },
        ),
        (
            {"arr__actor": {"policy_loss": {"loss_mode": "clip_cov"}, "clip_ratio_high": 0.3}},
            "actor_rollout_ref.actor.clip_ratio_high",
            "renamed",
            {"pg_variant": "clip_cov", "pg_clip_high": 0.3},
        ),
        (
            {
                "algorithm__rollout_correction": {
                    "rollout_rs": "token_k1, seq_mean_k3",
                    "rollout_rs_threshold": "0.5_4,1",
                }
            },
            "algorithm.rollout_correction.rollout_rs",
            "changed",
            {
                "train_infer_correction.filters": [
                    {"enabled": True, "agg_type": "token", "ratio_low": 0.25, "ratio_high": 2.0},
                    {"enabled": True, "agg_type": "geometric", "ratio_enabled": False, "k3_max": 1.0},
                ]
            },
        ),
        (
            {"algorithm__rollout_correction": {"rollout_rs": "seq_sum_k1,seq_max_k2", "rollout_rs_threshold": 2.0}},
            "algorithm.rollout_correction.rollout_rs",
            "changed",
            {
                "train_infer_correction.filters": [
                    {"enabled": True, "agg_type": "sequence", "ratio_low": 0.5, "ratio_high": 2.0},
                    {"enabled": True, "agg_type": "max", "ratio_enabled": False, "k2_max": 2.0},
                ]
            },
        ),
        *(
            (
                {"algorithm__rollout_correction": {"rollout_rs": name, "rollout_rs_threshold": bound, **more}},
                "algorithm.rollout_correction.rollout_rs",
                "unsupported",
                {"algorithm.rollout_correction.rollout_rs": name, "train_infer_correction": None},
            )
            for name, bound, more in (
                ("seq_max_k1", 2.0, {}),
                ("token_k2", None, {}),
                ("token_k2,token_k3", "1,2,3", {}),
                ("token_k2", 2.0, {"bypass_mode": True}),
            )
        ),
        (
            {"algorithm__rollout_correction": {"rollout_is": "token", "bypass_mode": True}},
            "algorithm.rollout_correction.rollout_is",
            "not needed",
            {"force_disable_old_logprobs_recompute": True, "train_infer_correction": None},
        ),
        (
            {"algorithm__rollout_correction": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}},
            "algorithm.rollout_correction.rollout_is",
            "changed",
            {
                "train_infer_correction.is_weight": {
                    "enabled": True,
                    "weight_type": "token",
                    "lower_bound": 0.5,
                    "upper_bound": 5.0,
                    "outside": "mask",
                }
            },
        ),
        (
            {"arr__model__lora_rank": 32, "arr__actor__use_kl_loss": True},
            "actor_rollout_ref.model.lora_rank",
            "renamed",
            {
                "actor_train.model_args": {"lora_rank": 32, "lora_alpha": 16, "lora_target": "all-linear"},
                "reference": None,
            },
        ),
        ({"reward_model__enable": True}, "reward_model.enable", "unsupported", {"reward_model.enable": True}),
        ({"arr__actor__tau_pos": 2.0}, "actor_rollout_ref.actor.tau_pos", "not needed", {"pg_variant": None}),
        (
            {"arr__actor__policy_loss": {"loss_mode": "sapo"}, "arr__actor__tau_pos": 2.0},
            "actor_rollout_ref.actor.tau_pos",
            "differs",
            {"pg_variant": "sapo"},
        ),
        ({"arr__rollout__logprobs_mode": "raw_logprobs"}, "actor_rollout_ref.rollout.logprobs_mode", "unsupported", {}),
        (
            {"arr__rollout__logprobs_mode": "processed_logprobs"},
            "actor_rollout_ref.rollout.logprobs_mode",
            "not needed",
            {},
        ),
        *(
            (
                {"arr__actor__strategy": "megatron", f"arr__{role}__megatron__override_transformer_config": recomputed},
                f"actor_rollout_ref.{role}.megatron.override_transformer_config.recompute_modules",
                status,
                {f"{ours}.strategy_args.strategy_config.{key}": is_kept and recomputed[key] for key in recomputed},
            )
            for recomputed in ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},)
            for role, ours, status, is_kept in (
                ("actor", "actor_train", "renamed", True),
                ("ref", "reference", "not needed", None),
            )
        ),
        *(
            (
                {"arr__model__enable_activation_offload": True, **others},
                "actor_rollout_ref.model.enable_activation_offload",
                status,
                {"actor_train.strategy_args.strategy_config.activation_offloading": value},
            )
            for others, status, value in (
                ({}, "changed", True),
                ({"arr__model__enable_gradient_checkpointing": False}, "not needed", None),
                ({"arr__actor__strategy": "megatron"}, "not needed", None),
            )
        ),
        ({"trainer__val_only": True}, "trainer.val_only", "unsupported", {}),
        ({"trainer__total_epochs": 3}, "trainer.total_epochs", "unsupported", {"max_steps": "???"}),
        ({"model_engine": "torchtitan"}, "model_engine", "unsupported", {"model_engine": "torchtitan"}),
        *(
            (
                {"model_engine": "veomni", "arr__actor__veomni": sizes},
                f"actor_rollout_ref.actor.veomni.{key}",
                status,
                {f"actor_train.strategy_args.strategy_config.{name}": value for name, value in ours.items()}
                # 256 prompts over 8 GPUs, of which each `ulysses` share a sequence
                | {"actor_train.training_args.gradient_accumulation_steps": steps},
            )
            for sizes, key, status, ours, steps in (
                ({"expert_parallel_size": 4}, "expert_parallel_size", "renamed", {"ep_size": 4}, 32),
                ({"ulysses_parallel_size": 2}, "ulysses_parallel_size", "renamed", {"ulysses_size": 2}, 64),
                ({"fsdp_size": 2, "ulysses_parallel_size": 2}, "fsdp_size", "changed", {"fsdp_size": 4}, 64),
                ({"fsdp_size": 4, "ulysses_parallel_size": 2}, "fsdp_size", "not needed", {"fsdp_size": None}, 64),
                ({"fsdp_size": -1}, "fsdp_size", "not needed", {"fsdp_size": None}, 32),
            )
        ),
        *(
            (
                {f"arr__rollout__{name}": value for name, value in sizes.items()},
                f"actor_rollout_ref.rollout.{key}",
                status,
                {f"actor_infer.strategy_args.strategy_config.{name}": value for name, value in ours.items()},
            )
            for sizes, key, status, ours in (
                (
                    {"data_parallel_size": 4},
                    "data_parallel_size",
                    "not needed",
                    {"tensor_parallel_size": 2, "data_parallel_size": None},
                ),
                (
                    {"data_parallel_size": 4, "expert_parallel_size": 8},
                    "data_parallel_size",
                    "renamed",
                    {"tensor_parallel_size": 2, "data_parallel_size": 4, "enable_expert_parallel": True},
                ),
                (
                    {"name": "sglang", "data_parallel_size": 4, "expert_parallel_size": 8},
                    "data_parallel_size",
                    "not needed",
                    {"tp_size": 8, "ep_size": 8, "data_parallel_size": None},
                ),
                (
                    {"name": "sglang", "tensor_model_parallel_size": 4, "expert_parallel_size": 2},
                    "expert_parallel_size",
                    "changed",
                    {"tp_size": 4, "ep_size": 2},
                ),
                ({"expert_parallel_size": 1}, "expert_parallel_size", "not needed", {"enable_expert_parallel": None}),
            )
        ),
        *(
            (
                {"model_engine": "megatron", "arr__model__lora": {"rank": 8, **others}},
                f"actor_rollout_ref.model.lora.{key}",
                status,
                {f"actor_train.model_args.{name}": value for name, value in ours.items()},
            )
            for others, key, status, ours in (
                ({}, "rank", "renamed", {"lora_rank": 8, "lora_alpha": 32, "lora_target": "all-linear"}),
                (
                    {"target_modules": ["linear_qkv", "linear_fc2"]},
                    "target_modules",
                    "changed",
                    {"lora_target": "q_proj,k_proj,v_proj,down_proj"},
                ),
                ({"target_modules": ["router"]}, "target_modules", "unsupported", {}),
                ({"type": "dora"}, "type", "unsupported", {}),
            )
        ),
        (
            {"model_engine": "megatron", "arr__actor__megatron": {"tensor_model_parallel_size": 2}},
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
            "renamed",
            {"actor_train.strategy_args.strategy_config.sequence_parallel": True},
        ),
        (
            {
                "model_engine": "megatron",
                "arr__actor__megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            },
            "actor_rollout_ref.actor.megatron.sequence_parallel",
            "not needed",
            {"actor_train.strategy_args.strategy_config.sequence_parallel": None},
        ),
        (
            {
                "model_engine": "megatron",
                "arr__actor__megatron": {
                    "pipeline_model_parallel_size": 2,
                    "override_transformer_config": {"num_layers_in_first_pipeline_stage": 5},
                },
            },
            "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage",
            "renamed",
            {"actor_train.strategy_args.strategy_config.num_layers_in_first_pipeline_stage": 5},
        ),
        (
            {
                "model_engine": "megatron",
                "arr__actor__megatron__override_transformer_config": {"moe_token_dispatcher_type": "flex"},
            },
            "actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type",
            "changed",
            {"actor_train.strategy_args.strategy_config.moe_token_dispatcher_type": "alltoall"},
        ),
        (
            {
                "model_engine": "megatron",
                "arr__actor__megatron__override_transformer_config": {"use_flash_attn": True},
            },
            "actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn",
            "not needed",
            {},
        ),
        # verl's limits are per GPU: those that split the tokens of a sequence have the sum
        *(
            (
                {"model_engine": engine, "arr__actor": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 8} | by},
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
                "renamed",
                {"actor_train.max_tokens_per_microbatch_in_train": 16},
            )
            for engine, by in (
                ("megatron", {"megatron": {"context_parallel_size": 2}}),
                ("veomni", {"veomni": {"ulysses_parallel_size": 2}}),
                ("fsdp", {"ulysses_sequence_parallel_size": 2}),
            )
        ),
        *(
            (
                {
                    "model_engine": engine,
                    "arr__actor": {"use_kl_loss": True, "use_dynamic_bsz": True} | by,
                    "arr__ref__log_prob_max_token_len_per_gpu": 8,
                },
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
                "renamed",
                {"reference.max_tokens_per_microbatch_in_infer": 16},
            )
            for engine, by in (
                ("megatron", {"megatron": {"context_parallel_size": 2}}),
                ("fsdp", {"ulysses_sequence_parallel_size": 2}),
            )
        ),
        (
            {"model_engine": "megatron", "arr__actor__optim__betas": [0.9, 0.95]},
            "actor_rollout_ref.actor.optim.betas",
            "dead",
            {"actor_train.training_args.adam_beta2": None},
        ),
        (
            {"model_engine": "megatron", "arr__actor__optim__override_optimizer_config": {"adam_beta2": 0.95}},
            "actor_rollout_ref.actor.optim.override_optimizer_config.adam_beta2",
            "renamed",
            {"actor_train.training_args.adam_beta2": 0.95},
        ),
        (
            {"model_engine": "megatron", "arr__actor__optim": {"lr_decay_style": "cosine", "min_lr": 2e-7}},
            "actor_rollout_ref.actor.optim.lr_decay_style",
            "changed",
            {
                "actor_train.training_args.lr_scheduler_type": "cosine_with_min_lr",
                "actor_train.training_args.lr_scheduler_kwargs": {"min_lr": 2e-7},
            },
        ),
        *(
            (
                {"model_engine": "megatron", "arr__actor__optim": {"lr_decay_style": style, "min_lr": 2e-7}},
                "actor_rollout_ref.actor.optim.min_lr",
                status,
                {},
            )
            for style, status in (("constant", "not needed"), ("cosine", "not needed"), ("linear", "unsupported"))
        ),
        *(
            (
                {"arr__actor__fsdp_config__mixed_precision": {name: value}},
                f"actor_rollout_ref.actor.fsdp_config.mixed_precision.{name}",
                status,
                {f"actor_train.strategy_args.strategy_config.{name}": ours},
            )
            for name, value, status, ours in (
                ("reduce_dtype", "bf16", "renamed", "bf16"),
                ("reduce_dtype", "fp32", "not needed", None),
                ("param_dtype", "float32", "changed", "fp32"),
                ("buffer_dtype", "fp32", "not needed", None),
            )
        ),
        ({"data__image_key": "images"}, "data.image_key", "renamed", {"actor_train.data_args.images": "images"}),
        (
            {"data__image_key": "images", "data__video_key": "videos"},
            "data.image_key",
            "not needed",
            {"data.image_key": None},
        ),
        ({"data__enable_thinking": True}, "data.enable_thinking", "dead", {"data.enable_thinking": None}),
        ({"data__video_key": "clips"}, "data.video_key", "renamed", {"actor_train.data_args.videos": "clips"}),
        ({"data__audio_key": "sounds"}, "data.audio_key", "unsupported", {"data.audio_key": "sounds"}),
        *(
            (
                {"arr__model__override_config": {name: 0.0, "a": 1}},
                f"actor_rollout_ref.model.override_config.{name}",
                "not needed",
                {"actor_train.model_args.model_config_kwargs": {"a": 1}},
            )
            for name in ("attention_dropout", "embd_pdrop", "resid_pdrop")
        ),
        (
            {"arr__model__override_config": {"model_config": {"a": 1}, "moe_config": {"freeze_moe_router": False}}},
            "actor_rollout_ref.model.override_config.model_config.a",
            "renamed",
            {"actor_train.model_args.model_config_kwargs": {"a": 1}},
        ),
        ({"reward_model__reward_manager": "dapo"}, "reward_model.reward_manager", "differs", {}),
        (
            {"reward_model__reward_manager": "dapo", "custom_reward_function__path": "a.py"},
            "reward_model.reward_manager",
            "not needed",
            {},
        ),
        *(
            (
                {
                    "data__train_batch_size": size,
                    "data__gen_batch_size": 4,
                    "algorithm__filter_groups": {"enable": True, "max_num_gen_batches": 3},
                },
                "data.train_batch_size",
                "renamed",
                {"rollout_batch_size": size},
            )
            for size in (0, -1)
        ),
    ],
)
def test_key_has_status_and_target(changes, key, status, to, registry, tmp_path):
    new = imported(settings(**changes), registry, tmp_path)
    assert [entry.status for entry in new.keys if entry.key == key] == [status]
    assert {path: value_at(new.config, tuple(path.split("."))) for path in to} == to


@pytest.mark.parametrize(
    ("limit", "batch", "steps"),
    # 7 + 5 rows, 3 epochs: a last incomplete batch is dropped in each
    [({}, {"train_batch_size": 5}, 6), ({"train_max_samples": 10}, {"train_batch_size": 8, "gen_batch_size": 3}, 9)],
)
def test_epochs_become_steps_if_rows_can_be_counted(limit, batch, steps, registry, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"a": range(7)}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n' * 5)
    files = [str(tmp_path / name) for name in ("a.parquet", "b.jsonl")]
    text = settings(data={"train_files": files, **limit, **batch}, trainer__total_epochs=3)
    new = imported(text, registry, tmp_path)
    assert new.config["max_steps"] == steps
    assert [entry.status for entry in new.keys if entry.key == "trainer.total_epochs"] == ["changed"]


@pytest.mark.parametrize("words", ["--config-name ppo_megatron_trainer.yaml", "-cn \\\n  ppo_megatron_trainer"])
def test_config_name_of_two_words_selects_megatron(words, registry, tmp_path):
    text = f"python3 -m verl.trainer.main_ppo {words} actor_rollout_ref.model.path=m data.train_files=a.parquet\n"
    new = imported(text, registry, tmp_path, "run.sh")
    assert value_at(new.config, ("actor_train", "strategy_args", "strategy_name")) == "megatron_train"


def test_unknown_variable_of_a_script_is_located(registry, tmp_path):
    with pytest.raises(ConfigError) as error:
        imported(f"set -x\n{PPO} data.train_files=$DATA/a.parquet\n", registry, tmp_path, "run.sh")
    (problem,) = error.value.problems
    assert (problem.where, problem.key) == (f"{tmp_path / 'run.sh'}:2:{len(PPO) + 2}", "data.train_files")


def test_key_without_a_value_counts_as_missing(registry, tmp_path):
    """verl's composed configs have `???` in the section of an unused reward model."""
    plain = imported(settings(), registry, tmp_path)
    waits = imported(settings(reward__reward_model__rollout__name="???"), registry, tmp_path)
    assert waits.config == plain.config


def test_config_of_another_framework_is_refused(registry, tmp_path):
    with pytest.raises(UnsupportedError):
        imported("sft_train: {}\n", registry, tmp_path)


def test_environment_variable_stays_an_interpolation(registry, tmp_path, monkeypatch):
    monkeypatch.setenv("POLICY", "/secret")
    new = imported(settings(arr__model__path="${oc.env:POLICY}"), registry, tmp_path)
    assert str(new.config["pretrain"]) == "${oc.env:POLICY}"


def test_script_that_starts_several_runs_is_refused(registry, tmp_path):
    file = tmp_path / "run.sh"
    launch = "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path="
    file.write_text(f"{launch}A\n{launch}B\n")
    with pytest.raises(UnsupportedError):
        import_verl(file, registry)
    file.write_text(f"{launch}A\n{launch}A\n")  # repeated until it succeeds, for example
    assert import_verl(file, registry).config["pretrain"] == "A"


def test_script_that_deletes_a_key_is_refused_with_its_place(registry, tmp_path):
    file = tmp_path / "run.sh"
    launch = "cd ~/verl\npython3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=A"
    file.write_text(f"{launch} \\\n    ~actor_rollout_ref.actor.optim.weight_decay\n")
    with raises_error(UnsupportedError, f"{file}:3:5"):
        import_verl(file, registry)
    file.write_text(f"{launch}\n")
    assert import_verl(file, registry).config["pretrain"] == "A"


def script(text, registry, folder, **variables):
    file = folder / "run.sh"
    file.write_text(text)
    return import_verl(file, registry, {key.removeprefix("_"): value for key, value in variables.items()})


KEYS = "data.train_files=a.parquet actor_rollout_ref.model.path=A"


@pytest.mark.parametrize(
    "launch",
    [
        "python3 -m verl.trainer.main_ppo",
        "python -u verl/trainer/main_ppo.py",
        "PYTHONUNBUFFERED=1 nohup python3 -m recipe.dapo.main_dapo",
        "ray job submit --working-dir . --runtime-env=e.yaml -- python3 -m recipe.dapo.src.main_dapo",
        'L=(uv run python3)\n"${L[@]}" -m verl.trainer.main_ppo --config-path=config --config-name=ppo_trainer.yaml',
    ],
)
def test_scripts_of_the_ppo_trainer_are_recognised(launch, registry, tmp_path):
    new = script(f"{launch} {KEYS} 2>&1 | tee log\n", registry, tmp_path)
    assert new.pipeline == "rlvr"


@pytest.mark.parametrize(
    "program",
    [
        "-m verl.trainer.main_generation_server",
        "-m verl.trainer.main_eval",
        "-m recipe.gkd.main_gkd",
        "-m recipe.prime.main_prime",
        "-m recipe.sppo.main_sppo",
        "-m recipe.flowrl.main_flowrl",
        "-m recipe.reward_queue.main",
        "-m verl.experimental.fully_async_policy.fully_async_main",
        "-m recipe.one_step_off_policy.main_ppo",
        "recipe/dance_grpo/main.py",
        "train.py",
        "base.sh",
    ],
)
def test_scripts_of_other_programs_are_refused_by_name(program, registry, tmp_path):
    with raises_error(UnsupportedError, program.removeprefix("-m "), f"{tmp_path / 'run.sh'}:2"):
        script(f"set -x\npython3 {program} {KEYS}\n", registry, tmp_path)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-7B-Instruct", "OpenGVLab/InternVL3-8B", "zai-org/GLM-4.5V"])
@pytest.mark.parametrize(
    ("keys", "column", "freeze"),
    [
        ("", "images", []),
        ("data.image_key=pictures", "pictures", []),
        (
            "data.image_key=images actor_rollout_ref.actor.freeze_vision_tower=True",
            "images",
            ["vision", "projector"],
        ),
    ],
)
def test_columns_of_images_are_imported(name, keys, column, freeze, registry, tmp_path):
    files = "data.train_files=a.parquet data.val_files=b.parquet"
    imported = script(f"{PPO} {files} actor_rollout_ref.model.path={name} {keys}\n", registry, tmp_path)
    for role in ("actor_train", "validation"):
        assert imported.config[role]["data_args"]["images"] == column
    assert imported.config["actor_train"]["model_args"]["freeze"] == freeze


def test_images_are_trained_by_fsdp2_instead_of_megatron(registry, tmp_path):
    keys = (
        "data.train_files=a.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16"
        " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 actor_rollout_ref.rollout.n=4"
        " actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
        " actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2"
        " actor_rollout_ref.actor.megatron.context_parallel_size=2 trainer.n_gpus_per_node=8"
        " data.max_prompt_length=1000 data.max_response_length=2000 actor_rollout_ref.actor.use_dynamic_bsz=True"
        " actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"
        " actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2048"
        " +actor_rollout_ref.actor.megatron.override_transformer_config.enable_vision_context_parallelism=True"
    )
    imported = script(f"{PPO} actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-3B-Instruct {keys}\n", registry, tmp_path)
    train, reference = imported.config["actor_train"], imported.config["reference"]
    assert train["strategy_args"] == {"strategy_name": "fsdp2_train"}
    assert reference["strategy_args"] == {"strategy_name": "fsdp2_infer"}
    assert train["training_args"]["gradient_accumulation_steps"] * 8 == 16 * 4
    assert "actor_rollout_ref" not in imported.config
    # Ranks that shared a sequence had 4096 tokens; the others get at least one sequence of 1000 + 2000.
    assert (train["max_tokens_per_microbatch_in_train"], train["max_tokens_per_microbatch_in_infer"]) == (4096, 3000)
    assert reference["max_tokens_per_microbatch_in_infer"] == 4096
    limits = {entry.key: (entry.status, entry.note) for entry in imported.keys if "max_token_len" in entry.key}
    assert limits["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == ("renamed", "")
    assert limits["actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"][0] == "changed"
    notes = {entry.to: entry.note for entry in imported.keys if entry.status == "added"}
    assert notes[("reference.strategy_args.strategy_name",)].startswith("'fsdp2_infer'")


@pytest.mark.parametrize(("keys", "column"), [("", "images"), ("data.image_key=pictures", "pictures")])
def test_rows_with_images_are_imported_for_sft(keys, column, registry, tmp_path):
    launch = "torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-VL-2B-Instruct"
    rows = "data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=8 data.max_length=1024"
    size = "optim.lr=1e-5 engine.ulysses_sequence_parallel_size=2 data.max_token_len_per_gpu=8192"
    config = script(f"{launch} {rows} {size} {keys}\n", registry, tmp_path).config
    role = config["sft_train"]
    assert role["data_args"]["images"] == config["validation"]["data_args"]["images"] == column
    assert role["model_args"]["freeze"] == []
    assert role["strategy_args"] == {"strategy_name": "fsdp2_train"}
    assert role["training_args"]["gradient_accumulation_steps"] * 4 == 8
    assert role["max_tokens_per_microbatch_in_train"] == 8192


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-VL-2B-Instruct"])
def test_verls_old_sft_trainer_reads_no_images(name, registry, tmp_path):
    launch = "torchrun --nproc_per_node=2 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet"
    config = script(f"{launch} model.partial_pretrain={name}\n", registry, tmp_path).config
    assert "images" not in config["sft_train"]["data_args"]


@pytest.mark.parametrize("option", ["disable_mm_preprocessor_cache=True", "mm_processor_cache_gb=0"])
def test_cache_of_processed_images_is_not_needed(option, registry, tmp_path):
    engine = f"actor_rollout_ref.rollout.name=vllm +actor_rollout_ref.rollout.engine_kwargs.vllm.{option}"
    imported = script(f"{PPO} data.train_files=a.parquet {engine}\n", registry, tmp_path)
    status = {entry.key.rpartition(".")[2]: entry.status for entry in imported.keys}
    assert status[option.partition("=")[0]] == "not needed"


@pytest.mark.parametrize(
    ("excluded", "kept"), [(".*visual.*", False), ("'.*vision_tower.*'", False), ("lm_head", True)]
)
def test_adapters_exclude_the_image_encoder_by_default(excluded, kept, registry, tmp_path):
    keys = f"actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.exclude_modules={excluded}"
    imported = script(f"{PPO} data.train_files=a.parquet {keys}\n", registry, tmp_path)
    assert ("actor_rollout_ref" in imported.config) is kept


def test_models_with_audio_are_refused_by_name(registry, tmp_path):
    name = "Qwen/Qwen2.5-Omni-7B"
    with raises_error(UnsupportedError, name, f"{tmp_path / 'run.sh'}:1"):
        script(f"{PPO} data.train_files=a.parquet actor_rollout_ref.model.path={name}\n", registry, tmp_path)
    with raises_error(UnsupportedError, name):
        launch = "torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet"
        script(f"{launch} optim.lr=1 model.path={name}\n", registry, tmp_path)


def test_script_that_starts_nothing_is_refused(registry, tmp_path):
    with raises_error(UnsupportedError, "verl.trainer.main_ppo"):
        script("pip install verl\npython3 prepare.py --out data\n", registry, tmp_path)
    with raises_error("ROLL-C024", "--set", at=f"{tmp_path / 'run.sh'}:1"):
        script(f"[ $# -gt 0 ] || exit 1\n{PPO} {KEYS} trainer.nnodes=$1\n", registry, tmp_path)


def test_program_in_a_variable_is_followed_or_required(registry, tmp_path):
    text = f"python3 -m ${{MODULE}} {KEYS}\n"
    with raises_error("ROLL-C024", "MODULE", at=f"{tmp_path / 'run.sh'}:1:12"):
        script(text, registry, tmp_path)
    assert script(text, registry, tmp_path, MODULE="verl.trainer.main_ppo").pipeline == "rlvr"
    with raises_error(UnsupportedError, "verl-train"):
        script(f"verl-train {KEYS}\n", registry, tmp_path)


def test_file_of_overrides_is_a_config_of_the_ppo_trainer(registry, tmp_path):
    new = script(
        "data.train_files=a.parquet \\\ndata.train_batch_size=8\nactor_rollout_ref.model.path=A\n", registry, tmp_path
    )
    assert (new.pipeline, new.config["rollout_batch_size"], new.config["pretrain"]) == ("rlvr", 8, "A")


def test_runs_of_a_loop_are_refused(registry, tmp_path):
    with raises_error(UnsupportedError, f"{tmp_path / 'run.sh'}:1"):
        script(f"for n in 4 8; do {PPO} {KEYS} actor_rollout_ref.rollout.n=$n; done\n", registry, tmp_path)


def test_overrides_after_a_broken_line_are_refused(registry, tmp_path):
    with raises_error("ROLL-C024", "data.train_batch_size=8", at=f"{tmp_path / 'run.sh'}:3:3"):
        script(f"{PPO} {KEYS} \\\n  # comment\n  data.train_batch_size=8\n", registry, tmp_path)


@pytest.mark.parametrize("word", ["algorithm", "--config-name=my_trainer", "data.train_files.x=1"])
def test_word_that_is_no_override_is_refused(word, registry, tmp_path):
    with raises_error(
        (ConfigError, UnsupportedError), word.partition("=")[2] if "--" in word else word.partition("=")[0]
    ):
        script(f"{PPO} {KEYS} {word}\n", registry, tmp_path)


def test_uncountable_epochs_require_max_steps(registry, tmp_path):
    for text in (f"{PPO} {KEYS}", f"{PPO} {KEYS} trainer.total_epochs=3"):
        assert script(text, registry, tmp_path).config["max_steps"] == "???"
    with raises_error("ROLL-C011", key="max_steps"):
        file = tmp_path / "ours.yaml"
        import_config("verl", tmp_path / "run.sh", file, registry, as_json=False, verbose=False)
        load(file, (), registry)
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"a": 1}\n' * 2048)
    counted = script(f"{PPO} data.train_files={rows} actor_rollout_ref.model.path=A", registry, tmp_path)
    assert counted.config["max_steps"] == 60  # verl's 30 epochs of 1024 prompts


def test_branch_of_devices_is_followed(registry, tmp_path):
    text = f"""DEVICE=${{DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}}
case $DEVICE in
  gpu) n=8;;
  npu) n=16;;
esac
{PPO} {KEYS} trainer.n_gpus_per_node=$n
"""
    assert script(text, registry, tmp_path, DEVICE="npu").config["num_gpus_per_node"] == 16
    with raises_error("ROLL-C024", "DEVICE", at=f"{tmp_path / 'run.sh'}:2", key="trainer.n_gpus_per_node"):
        script(text, registry, tmp_path)


SFT = {
    # the trainer of 0.9: chats, micro-batches filled by tokens
    "torchrun --standalone --nproc_per_node=$1 -m verl.trainer.sft_trainer data.train_files=a.parquet"
    " data.train_batch_size=64 engine=fsdp engine.ulysses_sequence_parallel_size=2 model.path=m optim.lr=2e-5"
    " optim.lr_warmup_steps_ratio=0.1 optim.lr_scheduler_type=cosine trainer.total_epochs=2": {
        "pretrain": "m",
        "seed": 1,
        "sft_train.data_args.messages": "messages",
        "sft_train.training_args.learning_rate": 2e-5,
        "sft_train.training_args.lr_scheduler_type": "cosine",
        "sft_train.training_args.warmup_ratio": 0.1,
        "sft_train.training_args.num_train_epochs": 2,
        # 64 rows over 8 GPUs in pairs
        "sft_train.training_args.gradient_accumulation_steps": 16,
        "sft_train.max_tokens_per_microbatch_in_train": 16384,
        "sft_train.strategy_args.strategy_config": {"ulysses_size": 2},
        "sft_train.device_mapping": "list(range(0,8))",
    },
    # Megatron: sequences are split as by verl's default, and a limit of tokens is that of one of two ranks
    "torchrun --nnodes=2 --nproc_per_node=$1 -m verl.trainer.sft_trainer data.train_files=a.parquet"
    " data.train_batch_size=64 data.max_token_len_per_gpu=2048 engine=megatron optim=megatron model.path=m"
    " optim.lr=2e-5 optim.lr_decay_style=cosine optim.min_lr=2e-6 optim.betas=[0.9,0.95]"
    " engine.tensor_model_parallel_size=2"
    " engine.context_parallel_size=2 engine.expert_model_parallel_size=8 engine.expert_tensor_parallel_size=1"
    " engine.pipeline_model_parallel_size=2": {
        "sft_train.training_args.lr_scheduler_type": "cosine_with_min_lr",
        "sft_train.training_args.lr_scheduler_kwargs": {"min_lr": 2e-6},
        "sft_train.training_args.adam_beta2": None,
        # 64 rows over 16 GPUs, 8 for a row
        "sft_train.training_args.gradient_accumulation_steps": 32,
        "sft_train.max_tokens_per_microbatch_in_train": 4096,
        "sft_train.strategy_args.strategy_config": {
            "tensor_model_parallel_size": 2,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "expert_tensor_parallel_size": 1,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    },
    # the older one: a question and an answer in a column of mappings
    "torchrun --nnodes=1 --nproc_per_node $1 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet"
    " data.val_files=b.parquet data.prompt_key=extra_info data.response_key=extra_info"
    " +data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] data.micro_batch_size_per_gpu=2"
    " data.enable_thinking_default=False data.apply_chat_template_kwargs={}"
    " model.partial_pretrain=m trainer.total_training_steps=7 data.truncation=right": {
        "pretrain": "m",
        "max_steps": 7,
        "overlong": "truncate",
        "sft_train.data_args.prompt": "extra_info.question",
        "sft_train.data_args.response": "extra_info.answer",
        "validation.data_args.response": "extra_info.answer",
        "sft_train.data_args.chat_template_kwargs.enable_thinking": False,
        "validation.data_args.chat_template_kwargs.enable_thinking": False,
        "sft_train.training_args.learning_rate": 1e-5,
        "sft_train.training_args.lr_scheduler_type": "cosine",
        "sft_train.training_args.adam_beta2": 0.95,
        "sft_train.training_args.num_train_epochs": None,
        # 256 rows over 8 GPUs, 2 at a time
        "sft_train.training_args.gradient_accumulation_steps": 16,
    },
}


@pytest.mark.parametrize("text", SFT)
def test_script_of_the_sft_trainer_becomes_sft(text, registry, tmp_path):
    new = script(text, registry, tmp_path, _1="8")
    assert new.pipeline == "sft"
    assert {path: value_at(new.config, tuple(path.split("."))) for path in SFT[text]} == SFT[text]
    out = tmp_path / "ours.yaml"
    arguments = {"1": "8"}
    assert (
        import_config("verl", tmp_path / "run.sh", out, registry, as_json=False, verbose=False, variables=arguments)
        == 0
    )


def test_verls_rows_pass_check(registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat = [{"role": "user", "content": "1+1"}]
    row = {"data_source": "gsm8k", "prompt": chat, "reward_model": {"style": "rule", "ground_truth": "2"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    text = (
        f"{PPO} data.train_files=rows.jsonl actor_rollout_ref.model.path=A data.train_batch_size=4"
        " trainer.total_epochs=2 algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2"
        " actor_rollout_ref.rollout.name=hf actor_rollout_ref.actor.ppo_mini_batch_size=4"
        " trainer.n_gpus_per_node=1 trainer.logger=console"
    )
    (tmp_path / "run.sh").write_text(text)
    assert main(["import", "verl", "run.sh", "-o", "ours.yaml"]) == 0
    model = ["~pretrain", "tokenizer.kind=byte", "actor_train.model_args.random_init={model_type: qwen3}"]
    check = ["check", "ours.yaml", *model, "actor_train.data_args.template=plain"]
    assert main(check) == 0
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": chat, "reward_model": {"style": "rule"}}))
    assert main(check) == 2


def test_mixture_of_experts_passes_check_with_its_model(registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**keys, **sizes}))
    row = {"prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert import_config("verl", FILES / "moe.sh", tmp_path / "ours.yaml", registry, as_json=False, verbose=False) == 0
    config = load(tmp_path / "ours.yaml", ["pretrain=model"], registry, FileCheck()).config
    assert config.actor_infer.strategy_args.strategy_config["enable_expert_parallel"] is True
    # 6 experts cannot be distributed over 4 ranks of the trainer
    (tmp_path / "model" / "config.json").write_text(json.dumps({**keys, **sizes, "num_experts": 6}))
    with raises_error("ROLL-C018", "actor_train.strategy_args.strategy_config"):
        load(tmp_path / "ours.yaml", ["pretrain=model"], registry, FileCheck())


def test_variables_are_set_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(f"{PPO} {KEYS} trainer.nnodes=$1 trainer.total_training_steps=$STEPS\n")
    assert main(["import", "verl", "run.sh", "--set", "1=2", "--set", "STEPS=30", "-o", "ours.yaml"]) == 0
    assert yaml.safe_load((tmp_path / "ours.yaml").read_text())["max_steps"] == 30
    for words in (["--set", "1"], ["--set", "1=2"], ["--set", "1=2", "--set", "STEPS=3", "--set", "OTHER=1"]):
        assert main(["import", "verl", "run.sh", *words]) == 2
    (tmp_path / "run.yaml").write_text("pipeline: rlvr\n")
    assert main(["import", "roll", "run.yaml", "--set", "X=1"]) == 2


def test_val_only_becomes_an_evaluation(registry, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(FileCheck, "__call__", lambda *arguments: iter(()))
    file, out = tmp_path / "val_only.yaml", tmp_path / "ours.yaml"
    text = (FILES / "grpo_fsdp_vllm.yaml").read_text(encoding="utf-8")
    data = yaml.safe_load(text)
    data["trainer"] |= {"val_only": True, "val_before_train": True}
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    assert main(["import", "verl", str(file), "-o", str(out)]) == 0, capsys.readouterr().out
    config = load(out, (), registry).config
    assert config.pipeline == "evaluate"
    assert config.pretrain == "models/policy"
    assert (config.validation.data_args.file_name, config.validation.generating_args.num_return_sequences) == (
        "data/test.parquet",
        2,
    )
    assert config.rewards["verl"].function == "scoring.rules:score"
    entries = {entry.key: entry for entry in import_verl(file, registry).keys}
    assert (entries["trainer.val_only"].status, entries["trainer.val_only"].to) == ("changed", ("pipeline",))
    assert entries["actor_rollout_ref.actor.optim.lr"].status == "not needed"


def test_reference_has_the_layers_of_the_policy(registry, tmp_path):
    """Without settings of its own, verl's reference has those of the policy's layers and stages."""
    layers = {"num_layers_in_last_pipeline_stage": 6, "moe_router_dtype": "fp32"}
    policy = {"pipeline_model_parallel_size": 12, "override_transformer_config": layers}
    text = settings(model_engine="megatron", arr__actor={"use_kl_loss": True, "megatron": policy})
    reference = imported(text, registry, tmp_path).config["reference"]["strategy_args"]["strategy_config"]
    assert reference == {"pipeline_model_parallel_size": 12} | layers
