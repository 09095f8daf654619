"""Keys of TRL, verl and OpenRLHF with their equivalents here: hints for unknown keys.

An entry includes parent keys if the meaning depends on them: `val_kwargs.n` is not `n`. The longest match wins. Keys of
ROLL are full paths, or lack the role if several roles have the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.config.nearest import best_place, dotted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from roll_core.config.source import KeyPath

MAX_SHOWN = 6
"""Maximum number of keys of one foreign section in a hint."""

_ENGINE = "actor_infer.strategy_args.strategy_config"
_GENERATING = "actor_infer.generating_args"
_BATCH = "training_args.per_device_train_batch_size training_args.gradient_accumulation_steps"
_LOSS = "grpo: seq-mean-token-mean, dapo and bnpo: token-mean, dr_grpo: seq-mean-token-sum-norm"

FOREIGN: Mapping[str, tuple[str, str]] = {
    # foreign key: equivalent keys of ROLL, separated by spaces; note
    # -- lengths and batches
    "max_prompt_length": ("prompt_length", ""),
    "prompt_max_len": ("prompt_length", ""),
    "max_completion_length": ("response_length", ""),
    "max_response_length": ("response_length", ""),
    "generate_max_len": ("response_length", ""),
    "max_length": ("prompt_length response_length", ""),
    "max_seq_length": ("prompt_length response_length", ""),
    "max_len": ("prompt_length response_length", ""),
    "num_generations": ("num_return_sequences_in_group", ""),
    "n_samples_per_prompt": ("num_return_sequences_in_group", ""),
    "n": ("num_return_sequences_in_group", ""),
    "validation.generating_args.n": ("validation.generating_args.num_return_sequences", ""),
    "val_kwargs.n": ("validation.generating_args.num_return_sequences", ""),
    "generation_batch_size": ("rollout_batch_size", "which counts prompts, not responses"),
    "train_batch_size": ("rollout_batch_size", "in prompts, as verl counts; OpenRLHF's is per optimizer step"),
    "training_args.train_batch_size": (_BATCH, "whose product with data parallel it is"),
    "batch_size": ("rollout_batch_size", "in prompts; of an optimizer step, see training_args"),
    "training_args.batch_size": (_BATCH, "whose product with data parallel it is"),
    "ppo_mini_batch_size": (_BATCH, "whose product with data parallel it is, in samples"),
    "ppo_micro_batch_size": ("training_args.per_device_train_batch_size", ""),
    "ppo_micro_batch_size_per_gpu": ("training_args.per_device_train_batch_size", ""),
    "micro_batch_size": ("training_args.per_device_train_batch_size", ""),
    "micro_batch_size_per_gpu": ("training_args.per_device_train_batch_size", ""),
    "micro_train_batch_size": ("training_args.per_device_train_batch_size", ""),
    "micro_rollout_batch_size": ("infer_batch_size", ""),
    "log_prob_micro_batch_size": ("infer_batch_size", ""),
    "log_prob_micro_batch_size_per_gpu": ("infer_batch_size", ""),
    "use_dynamic_bsz": ("use_dynamic_batching_in_train", ""),
    "ppo_max_token_len_per_gpu": ("max_tokens_per_microbatch_in_train", ""),
    "log_prob_max_token_len_per_gpu": ("max_tokens_per_microbatch_in_infer", ""),
    "num_iterations": ("ppo_epochs", ""),
    "max_epochs": ("ppo_epochs", ""),
    "num_episodes": ("max_steps", ""),
    "total_epochs": ("max_steps", "of pipeline steps"),
    "total_training_steps": ("max_steps", ""),
    # -- losses and advantages
    "advantage_estimator": ("adv_estimator", ""),
    "beta": ("kl_loss_coef use_kl_loss", ""),
    "kl_coef": ("init_kl_coef add_token_level_kl", "for the KL in the reward; kl_loss_coef is the loss's"),
    "use_kl_in_reward": ("add_token_level_kl", ""),
    "kl_target": ("target_kl", ""),
    "kl_ctrl.horizon": ("kl_horizon", ""),
    "kl_loss_type": ("kl_loss_penalty", "low_var_kl is k3"),
    "kl_estimator": ("kl_loss_penalty kl_penalty", "for the loss and for the reward"),
    "loss_type": ("loss_agg_mode", _LOSS),
    "policy_loss.loss_mode": ("pg_variant", ""),
    "epsilon": ("pg_clip", ""),
    "epsilon_high": ("pg_clip_high use_pg_clip_range", ""),
    "clip_ratio": ("pg_clip", ""),
    "clip_ratio_low": ("pg_clip_low use_pg_clip_range", ""),
    "clip_ratio_high": ("pg_clip_high use_pg_clip_range", ""),
    "clip_ratio_c": ("dual_clip dual_clip_loss", ""),
    "delta": ("dual_clip dual_clip_loss", ""),
    "eps_clip": ("pg_clip", ""),
    "eps_clip_low_high": ("pg_clip_low pg_clip_high use_pg_clip_range", ""),
    "cliprange_value": ("value_clip", ""),
    "cliprange": ("pg_clip", ""),
    "entropy_coeff": ("entropy_loss_coef", ""),
    "entropy_coef": ("entropy_loss_coef", ""),
    "lam": ("lambd", ""),
    "gae_lambda": ("lambd", ""),
    "scale_rewards": ("norm_std_type", ""),
    "norm_adv_by_std_in_grpo": ("norm_std_type", ""),
    "mask_truncated_completions": ("max_len_mask", ""),
    "dynamic_filtering": ("rewards.*.query_filter_config", ""),
    "filter_groups": ("rewards.*.query_filter_config", ""),
    # -- the optimizer
    "lr": ("training_args.learning_rate", ""),
    "actor_learning_rate": ("actor_train.training_args.learning_rate", ""),
    "critic_learning_rate": ("critic.training_args.learning_rate", ""),
    "lr_scheduler": ("training_args.lr_scheduler_type", ""),
    "lr_warmup_steps": ("training_args.warmup_steps", ""),
    "lr_warmup_ratio": ("training_args.warmup_ratio", ""),
    "lr_warmup_steps_ratio": ("training_args.warmup_ratio", ""),
    "l2": ("training_args.weight_decay", ""),
    "grad_clip": ("max_grad_norm", ""),
    "max_norm": ("max_grad_norm", ""),
    "num_epochs": ("training_args.num_train_epochs", ""),
    "epochs": ("training_args.num_train_epochs", ""),
    # -- models
    "model": ("pretrain", ""),
    "model.path": ("pretrain", ""),
    "model_name": ("pretrain", ""),
    "base_model": ("pretrain", ""),
    "torch_dtype": ("model_args.dtype", ""),
    "bf16": ("model_args.dtype", ""),
    "fp16": ("model_args.dtype", ""),
    "attn_impl": ("model_args.attn_implementation", ""),
    "gradient_checkpointing": ("model_args.disable_gradient_checkpointing", "it is on by default"),
    "enable_gradient_checkpointing": ("model_args.disable_gradient_checkpointing", "it is on by default"),
    "lora_r": ("model_args.lora_rank", ""),
    "target_modules": ("model_args.lora_target", ""),
    "lora_target_modules": ("model_args.lora_target", ""),
    "use_peft": ("model_args.lora_target", ""),
    # -- data and rewards
    "dataset_name": ("data_args.file_name", ""),
    "prompt_data": ("data_args.file_name", ""),
    "train_files": ("data_args.file_name", ""),
    "val_files": ("validation.data_args.file_name", ""),
    "eval_dataset": ("validation.data_args.file_name", ""),
    "input_key": ("data_args.prompt", ""),
    "output_key": ("data_args.response", ""),
    "prompt_key": ("data_args.messages", "or data_args.prompt, if the column holds text"),
    "response_key": ("data_args.response", ""),
    "reward_funcs": ("rewards.*.reward", "rewards.<domain>: {reward: function, function: module:name}"),
    "reward_model": ("rewards.*.reward", ""),
    "custom_reward_function": ("rewards.*.reward", "rewards.<domain>: {reward: function, function: module:name}"),
    "reward_weights": ("rewards.*.weight", ""),
    # -- the engine
    "use_vllm": ("actor_infer.strategy_args.strategy_name", "strategy_name: vllm"),
    "rollout.name": ("actor_infer.strategy_args.strategy_name", ""),
    "rollout.temperature": (f"{_GENERATING}.temperature", ""),
    "rollout.top_p": (f"{_GENERATING}.top_p", ""),
    "rollout.top_k": (f"{_GENERATING}.top_k", ""),
    "val_kwargs.temperature": ("validation.generating_args.temperature", ""),
    "val_kwargs.top_p": ("validation.generating_args.top_p", ""),
    "val_kwargs.top_k": ("validation.generating_args.top_k", ""),
    "rollout.gpu_memory_utilization": (_ENGINE, ""),
    "rollout.tensor_model_parallel_size": (_ENGINE, ""),
    "rollout.max_model_len": (_ENGINE, ""),
    "vllm_gpu_memory_utilization": (_ENGINE, ""),
    "vllm_tensor_parallel_size": (_ENGINE, ""),
    "vllm_num_engines": ("actor_infer.device_mapping", ""),
    # -- the run
    "run_name": ("exp_name", ""),
    "experiment_name": ("exp_name", ""),
    "report_to": ("track_with", ""),
    "logger": ("track_with", ""),
    "save_path": ("output_dir", ""),
    "ckpt_path": ("output_dir", ""),
    "default_local_dir": ("output_dir", ""),
    "save_freq": ("save_steps", ""),
    "test_freq": ("eval_steps", ""),
    "save_total_limit": ("max_ckpt_to_keep", ""),
    "max_actor_ckpt_to_keep": ("max_ckpt_to_keep", ""),
    "max_ckpt_num": ("max_ckpt_to_keep", ""),
    "resume_mode": ("resume_from_checkpoint", ""),
    "n_gpus_per_node": ("num_gpus_per_node", ""),
    "nnodes": ("device_mapping", "which numbers the slots of all nodes"),
}


def foreign_hint(path: KeyPath, value: Any, places: Sequence[KeyPath]) -> str:
    """Hint for an unknown key, or for the keys in an unknown mapping: their equivalents here. Empty if no framework has
    the key. `places` are the paths of all keys of the schema."""
    found = _ours(path, places)
    if found:
        return f"here it is {found}"
    shown = []
    for leaf in _leaves(value, path) if isinstance(value, dict) else ():
        ours = _ours(leaf, places) or _same(leaf, places)
        if ours:
            shown.append(f"{'.'.join(leaf[len(path) :])} is {ours}")
    more = "; …" if len(shown) > MAX_SHOWN else ""
    return f"here {'; '.join(shown[:MAX_SHOWN])}{more}" if shown else ""


def meant(path: KeyPath, value: Any) -> set[str]:
    """Names of our keys that correspond to an unknown key, or to the keys in an unknown mapping."""
    entries = (_entry(each) for each in _leaves(value, path))
    return {target.rpartition(".")[2] for targets, _ in entries for target in targets.split()}


def _ours(path: KeyPath, places: Sequence[KeyPath]) -> str:
    targets, note = _entry(path)
    found = [_place(target, path, places) for target in targets.split()]
    return " and ".join(found) + (f" ({note})" if note else "") if all(found) else ""


def _entry(path: KeyPath) -> tuple[str, str]:
    """The table's entry for the longest suffix of `path` that has one."""
    return next((FOREIGN[end] for start in range(len(path)) if (end := ".".join(path[start:])) in FOREIGN), ("", ""))


def _place(target: str, path: KeyPath, places: Sequence[KeyPath]) -> str:
    """Path of our key `target` that is nearest to the foreign key's path."""
    steps = tuple(target.split("."))
    fits = [place for place in places if place[-len(steps) :] == steps]
    if path[0] != "validation":  # keys of training take precedence
        fits = [place for place in fits if place[0] != "validation" or place == steps] or fits
    if steps in fits:
        return dotted(steps)
    return dotted(best_place(fits, path[:-1])) if fits else ""


def _same(path: KeyPath, places: Sequence[KeyPath]) -> str:
    """The top-level key of the same name, if there is one."""
    return path[-1] if (path[-1],) in places else ""


def _leaves(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if not isinstance(value, dict):
        yield path
        return
    for key, each in value.items():
        yield from _leaves(each, (*path, str(key)))
