"""Conversion rules for the keys of alibaba/ROLL's configs (0.3.0). Update them here if keys change on either side.

The meaning of a key in ROLL is taken from its sources: the dataclasses of roll/configs, and those of each pipeline in
roll/pipeline/<name>/<name>_config.py. A key is `dead` if no code of ROLL reads it.
"""

from __future__ import annotations

from roll_migrate import roll_values as values
from roll_migrate.rules import (
    Each,
    Table,
    change,
    dead,
    differs,
    each,
    keep,
    refused,
    rename,
    unneeded,
    unsupported,
)

UNDECLARED = dead("not a key of ROLL; its loader ignores it silently")
ELSEWHERE = dead("ROLL's sft and rlvr do not read it")

MODEL: Table = {
    **each("model_name_or_path dtype disable_gradient_checkpointing model_config_kwargs", keep()),
    "attn_implementation": change("`sdpa` is kept; otherwise `auto` selects the fastest exact one", values.attention),
    **each(
        "lora_target lora_rank lora_alpha lora_dropout additional_target",
        change("kept in the trained role; `lora_dropout` must be 0", values.lora, nested=True),
    ),
    "autocast_adapter_dtype": unneeded("adapters are float32"),
    "ulysses_size": change("→ `strategy_config.ulysses_size`", values.ulysses_size),
    "moe_aux_loss_coef": change(
        "→ `strategy_config.moe_aux_loss_coeff` of Megatron's strategies, unless that is set; rejected for other"
        " strategies unless `0`",
        values.moe_aux_loss_coef,
    ),
    "freeze_module_prefix": refused("modules cannot be frozen"),
    "gradient_checkpointing_use_reentrant": unneeded("it does not affect results"),
    **each("model_type num_labels", unneeded("the role determines what a model computes")),
    "device_map": unneeded("set by device_mapping"),
    "adapter_name_or_path": dead("nothing reads it"),
    "flash_attn": UNDECLARED,
}

TRAINING: Table = {
    **each(
        "learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2 per_device_train_batch_size"
        " gradient_accumulation_steps warmup_steps warmup_ratio",
        keep(),
    ),
    "num_train_epochs": change("kept in sft; rlvr uses `max_steps`, as in ROLL", values.num_train_epochs),
    **each("max_steps seed output_dir logging_steps save_steps", unneeded("set by the run, as in ROLL")),
    **each("fp16 bf16", unneeded("set by model_args.dtype, as in ROLL")),
    "dataloader_num_workers": unneeded("rows are read and encoded before the first step"),
    "save_hf_model": unneeded("export/ is a Hugging Face model"),
    **each("data_seed tf32", dead("nothing reads it")),
}

DATA: Table = {
    "file_name": change("kept; a pattern is replaced by the matching files", values.file_name, nested=True),
    **each("tag id domain_interleave_probs", keep()),
    "messages": change("kept in rlvr", values.messages_column),
    "prompt": change("kept in rlvr without messages, with `template: plain`", values.prompt_column),
    "template": change("`qwen2_5`, `qwen3` → `native`, `empty` → `chatml`", values.template),
    "dataset_type": change("kept, except `text`", values.dataset_type),
    "response": unneeded("sft reads response_key; rlvr needs no responses"),
    "preprocessing_num_workers": unneeded("rows are encoded in one process"),
    "custom_data_kwargs_func": refused("custom code that makes rows: write the rows to a file"),
    "eval_file_name": dead("nothing reads it"),
    **each("dataset_dir interleave_probs", UNDECLARED),
}

GENERATING: Table = {
    "temperature": change("kept; in `actor_infer` training's logprobs use it too", values.temperature),
    **each("top_p top_k repetition_penalty stop_strings", keep()),
    "num_beams": unsupported("beam search is not supported", 1),
    "max_new_tokens": dead("ROLL overwrites it with the length that prompt_length leaves"),
    "max_length": unneeded("set by response_length"),
    "num_return_sequences": dead("ROLL overwrites it with num_return_sequences_in_group"),
    "include_stop_str_in_output": unneeded("responses contain every sampled token"),
    "logprobs": unneeded("every token has a logprob"),
    "length_penalty": dead("it belongs to beam search"),
    "do_sample": dead("nothing reads it; temperature: 0 is greedy"),
}

STRATEGY: Table = {"strategy_name": keep()}
"""`strategy_config` is checked by the strategy's own schema, after the rules in `STRATEGIES`."""

ROLE: Table = {
    "name": unneeded("the key is the role's name"),
    "worker_cls": change("not needed for ROLL's classes; rejected for custom classes", values.worker_cls),
    "pg_variant": change("→ `pg_variant` of the run, if worker_cls is ActorPGWorker", values.pg_variant),
    **each(
        "topr_positive_weight topr_negative_weight", change("→ `pg_options` of the run, for topr", values.topr_weight)
    ),
    "model_args": MODEL,
    "training_args": TRAINING,
    "data_args": DATA,
    "generating_args": GENERATING,
    "strategy_args": STRATEGY,
    **each("device_mapping num_gpus_per_worker infer_batch_size", keep()),
    "world_size": change("kept for roles without device_mapping", values.world_size),
    **each(
        "use_dynamic_batching_in_train use_dynamic_batching_in_infer max_tokens_per_microbatch_in_train"
        " max_tokens_per_microbatch_in_infer",
        keep(),
    ),
    "system_envs": Each(change("kept, as text", values.environment_variable)),
    "model_update_frequency": refused("weights are published after every step", 1),
    "apply_loss_scale": refused("gradients are sums over ranks and microbatches", True),
    "mtp_training_mode": refused("multi-token prediction layers are not trained", "disabled"),
    "router_replay": {
        "mode": change(
            "`R3` → `router_replay.mode`, for trainer and engine together; others are rejected", values.router_replay
        )
    },
    **each("sequence_length_round_in_train sequence_length_round_in_infer", unneeded("sequences are not padded")),
    "use_sequence_packing": unneeded("sequences are always packed"),
    "sequence_packing_args": unneeded("use_dynamic_batching_in_train fills micro-batches by tokens"),
    "logits_in_fp32": unneeded("logprobs and entropy are computed in float32"),
    "backend_timeout": unneeded("rpc_timeout applies to every call"),
    "max_concurrency": unneeded("set by the role's task"),
    **each("opd_kl_coef tag_included", unneeded("it is for teachers")),
    "offload_nccl": dead("ROLL forces it to false"),
    "use_remove_padding": UNDECLARED,
}
NO_ROWS = unneeded("rows come from the data_args of the trained role and of validation")
SCORE: Table = {
    **ROLE,
    "training_args": unneeded("the role is not trained"),
    "data_args": NO_ROWS,
    "generating_args": unneeded("the role does not generate"),
}
TRAIN: Table = {**ROLE, "generating_args": unneeded("the role does not generate")}
CRITIC: Table = {**TRAIN, "data_args": NO_ROWS}
INFER: Table = {
    **ROLE,
    "training_args": unneeded("the role is not trained"),
    "data_args": NO_ROWS,
    "infer_batch_size": unneeded("the engine chooses its batches"),
    "model_args": {
        **MODEL,
        **each("disable_gradient_checkpointing attn_implementation", unneeded("the engine has its own implementation")),
    },
}

OF_WORKER = change("not needed for a rule; otherwise replaced by your function", values.of_reward_worker, nested=True)
REWARD: Table = {
    "worker_cls": change(
        f"→ `reward`: MathRuleRewardWorker is `math_rule`, others become a custom `function` in {values.MODULE}.py",
        values.reward_worker,
    ),
    **each("tag_included world_size", keep()),
    "query_filter_config": {"type": keep(), "filter_args": keep()},
    "system_envs": Each(change("kept, as text", values.environment_variable)),
    "name": unneeded("the key is the reward's name"),
    **each("response_filter_config response_length_penalty_coef", dead("ROLL discards the result")),
    **each(
        "model_args data_args generating_args training_args strategy_args device_mapping num_gpus_per_worker"
        " infer_batch_size judge_prompt judge_model_type judge_model_name judge_api_url judge_api_key code_url"
        " use_local format_pattern reward_type reward_manager_config llm_proxy max_concurrency backend_timeout",
        OF_WORKER,
    ),
}

VALIDATION: Table = {
    "data_args": {
        **DATA,
        **each("domain_interleave_probs", dead("an evaluation uses every row once")),
        **each("messages prompt", dead("ROLL reads the columns of actor_train.data_args")),
    },
    "generating_args": {**GENERATING, "num_return_sequences": keep()},
    "eval_steps": UNDECLARED,
    **each(
        "name worker_cls model_args training_args strategy_args device_mapping world_size num_gpus_per_worker"
        " infer_batch_size",
        dead("an evaluation has no workers"),
    ),
}

RUN: Table = {
    "exp_name": change("kept; other characters than letters, digits, `.`, `_`, `-` become `-`", values.exp_name),
    **each(
        "seed output_dir pretrain save_steps max_ckpt_to_keep logging_steps eval_steps val_batch_size max_grad_norm"
        " rpc_timeout model_update_buffer_size_mb",
        keep(),
    ),
    "prompt_length": change("kept", values.prompt_length),
    "response_length": change("kept without `sequence_length`", values.response_length),
    "sequence_length": change("→ `response_length`, minus `prompt_length`; in sft both", values.sequence_length),
    "val_sequence_length": change("→ `validation.generating_args.max_new_tokens`", values.val_sequence_length),
    "val_prompt_length": change("`prompt_length` also applies to evaluations", values.val_prompt_length),
    "num_gpus_per_node": keep("ROLL overwrites it with the number it detects; roll-core uses it"),
    "resume_from_checkpoint": change("kept, except paths of ROLL's checkpoints", values.resume_from_checkpoint),
    "track_with": change("kept if the tracker is installed; `stdout` → none", values.track_with),
    "tracker_kwargs": change("→ `tracker_kwargs.<tracker>`", values.tracker_kwargs, nested=True),
    "system_envs": Each(change("kept, as text; applies to every role", values.environment_variable)),
    "router_args": {
        "router_name": change("→ `prompt_affinity`, `sticky`, `least_loaded`", values.router_name),
        **each("router_config max_running_requests", unneeded("set by max_running_requests of the run")),
    },
    "checkpoint_config": unsupported(
        "checkpoints stay in the run's directory, output_dir/exp_name/number/checkpoints: set output_dir to a"
        " persistent disk"
    ),
    "model_download_type": change("ids refer to the Hugging Face hub", values.model_download_type),
    "rollout_mock": change(
        "`mode: dump` → `record_rollouts: true`; ROLL's dumps cannot be read", values.rollout_mock, nested=True
    ),
    "user_defined_rollout_loop_cls": refused("custom code: see docs/plugins.md for pipelines"),
    **each(
        "profiler_timeline profiler_memory",
        unsupported("there is no profiler; the report shows the time of each part of a step", False),
    ),
    **each("profiler_output_dir otlp_output_dir", unneeded("nothing is written there")),
    **each("logging_dir base_dir", unneeded("log, metrics and samples are in the run's directory")),
    **each("rollout_dump_dir save_logging_board_dir", unneeded("every sample is in the run's samples.jsonl")),
    "transfer_backend": unneeded("roll-core sends samples in its own messages"),
    "generate_opt_level": unneeded("requests are always scheduled individually"),
    "num_nodes": dead("ROLL computes it from device_mapping, as roll-core does"),
    **each("local_rank report_length_and_rewards length_profiler_dir", dead("nothing reads it")),
    **each("is_offload_states is_offload_optimizer_states_in_train_step", ELSEWHERE),
    **each(
        "reward_norm reward_shift reward_scale reward_system_config positive_loss_coef track_name train_batch_size"
        " use_additional_prompts",
        UNDECLARED,
    ),
}

RLVR: Table = {
    **RUN,
    **each(
        "max_steps rollout_batch_size num_return_sequences_in_group ppo_epochs max_running_requests"
        " async_generation_ratio is_num_return_sequences_expand",
        keep(),
    ),
    **each(
        "is_use_additional_prompts max_additional_running_prompts",
        change("kept in synchronous training", values.additional_prompts),
    ),
    "adv_estimator": change("kept; `gigpo`, `step_reinforce` → `reinforce`", values.adv_estimator),
    **each("norm_mean_type norm_std_type", change("kept, except for grpo, which uses the group's", values.norm_type)),
    **each(
        "gamma lambd reward_clip advantage_clip value_clip critic_warmup pg_clip"
        " use_pg_clip_range pg_clip_low pg_clip_high dual_clip_loss entropy_loss_coef use_kl_loss"
        " kl_loss_coef add_token_level_kl init_kl_coef kl_horizon force_disable_old_logprobs_recompute max_len_mask"
        " difficulty_mask difficulty_low_threshold difficulty_high_threshold error_max_len_clip"
        " error_max_len_threshold",
        keep(),
    ),
    **each(
        "whiten_rewards whiten_advantages",
        change("kept; ROLL whitens each domain separately, without masked samples", values.whiten),
    ),
    "loss_agg_mode": change(
        "kept; ROLL's `seq-mean-token-sum-norm` does not divide by the number of sequences", values.loss_agg_mode
    ),
    "kl_penalty": change("`kl` → `k1`, `mse` → `k2`; `full` is rejected", values.kl_penalty),
    "target_kl": change("kept with `add_token_level_kl`; ROLL adapts domain by domain", values.target_kl),
    "train_infer_correction": {
        "is_weight": {
            **each("enabled weight_type upper_bound", keep()),
            "detach": refused("weights have no gradient", True),
        },
        "filters": keep(),
    },
    "reward_pretrain": change("→ `critic.model_args.model_name_or_path`", values.reward_pretrain),
    "global_template": change("→ `actor_train.data_args.template`", values.global_template),
    "tag_to_template": refused("all rows have one template"),
    **each("difficulty_loss_weight length_loss_weight", refused("samples cannot be weighted by this", False)),
    "rl_loss_coef": refused("the policy loss has no factor", 1),
    "importance_sampling": change("`seq` → `pg_variant: gspo` with `pg_options`", values.importance_sampling),
    **each("enable_reference enable_old_logprobs_recompute", unneeded("derived from the losses")),
    "balance_length": unneeded("micro-batches are always balanced by length"),
    **each(
        "l2 use_reward_scaling use_reward_norm add_len_reward dataset_filter val_greedy val_n_sample mask_type"
        " minibatch_data_iter_num postive_loss_coef use_topr_neg_loss_coef use_policy_loss_type use_topr_loss",
        dead("nothing reads it"),
    ),
    "actor_train": TRAIN,
    "actor_infer": INFER,
    "reference": SCORE,
    "critic": CRITIC,
    "reward_model": unsupported("rewards cannot share a judge model"),
    "rewards": Each(REWARD),
    "validation": VALIDATION,
}

SFT: Table = {
    **RUN,
    "prompt_key": change("→ `sft_train.data_args.prompt`", values.sft_column("prompt")),
    "response_key": change("→ `sft_train.data_args.response`", values.sft_column("response")),
    "system_key": change("→ `sft_train.data_args.system`", values.sft_column("system")),
    "query_key": refused("a prompt is one column: join both columns in the rows"),
    "global_template": change("→ `sft_train.data_args.template`", values.global_template),
    "max_steps": dead("ROLL's sft uses num_train_epochs"),
    "sft_train": TRAIN,
    "validation": {**VALIDATION, "generating_args": unneeded("an evaluation is the loss on held-out rows")},
}

STRATEGIES: dict[str, Table] = {
    "vllm": {"VLLM_USE_V1": unneeded("supported versions have only this engine")},
    "sglang": {
        "tensor_parallel_size": rename("tp_size"),
        "pipeline_parallel_size": unsupported("only tp_size is supported", 1),
        "grpc_mode": unneeded("the engine has one interface"),
    },
    "megatron": {
        **each("bf16 fp16", unneeded("set by model_args.dtype")),
        **each(
            "save_only_model save_hf_model save_merged_model ckpt_format",
            unneeded("checkpoints resume runs, and export/ is a Hugging Face model"),
        ),
        "use_flash_attn": unneeded("roll-core selects the fastest exact attention"),
        **each(
            "calculate_per_token_loss check_for_nan_in_loss_and_grad variable_seq_lengths compile_warmup",
            unneeded("set by losses and micro-batches"),
        ),
        "virtual_pipeline_model_parallel_size": change("kept; 1 disables it", values.virtual_pipeline),
        "lr_scheduler_kwargs": rename("role:training_args.lr_scheduler_kwargs"),
        "moe_aux_loss_coeff": differs(values.BY_SEQUENCE),
        "moe_aux_loss_coef": rename("moe_aux_loss_coeff", values.BY_SEQUENCE),
        "moe_token_drop_policy": refused("tokens must not be dropped"),
        "moe_expert_capacity_factor": refused("tokens must not be dropped"),
        "optimizer": refused("only AdamW is supported", "adam"),
    },
    "fsdp2": {
        "save_only_model": unneeded("checkpoints resume runs, and export/ is a Hugging Face model"),
        **each("apply_expert_patch moe_use_grouped_mm model_type", unneeded("set by the model")),
        "fsdp_size": change("kept; 1 or less means all ranks", values.fsdp_size),
        **each("param_dtype reduce_dtype", change("kept; torch's names are converted", values.torch_dtype)),
    },
}
"""Rules for `strategy_config` that a strategy's own schema cannot express, by the first part of the strategy's name."""

NULL_MEANS_SOMETHING = ("track_with",)
"""Keys for which null and a missing key mean different things."""

DEFAULTS: dict[str, dict[tuple[str, ...], object]] = {
    "rlvr": {
        ("num_return_sequences_in_group",): 1,
        ("adv_estimator",): "gae",
        ("kl_loss_coef",): 0.0,
        ("actor_infer", "generating_args", "temperature"): 0.95,
        ("actor_infer", "generating_args", "top_p"): 0.7,
        ("actor_infer", "generating_args", "top_k"): 50,
        ("validation", "generating_args", "temperature"): 0.95,
        ("validation", "generating_args", "top_p"): 0.7,
        ("validation", "generating_args", "top_k"): 50,
    },
    "sft": {
        ("shuffle",): False,
        ("sft_train", "data_args", "prompt"): "instruction",
        ("sft_train", "data_args", "response"): "output",
    },
}
"""ROLL's defaults that differ from roll-core's. A role's defaults are added only if the config has the role."""

DIFFERS: dict[tuple[str, ...], str] = {
    ("actor_infer", "generating_args", "temperature"): values.AT_TEMPERATURE,
    ("shuffle",): "file order; ROLL also drops the last incomplete batch of each epoch",
}
"""Notes on keys of `DEFAULTS` whose results still differ from ROLL's."""
