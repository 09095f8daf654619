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

UNDECLARED = dead("no key of ROLL's: its loader drops it without a word")
ELSEWHERE = dead("ROLL's sft and rlvr do not read it")

MODEL: Table = {
    **each("model_name_or_path dtype disable_gradient_checkpointing model_config_kwargs", keep()),
    "attn_implementation": change("`sdpa` is kept, otherwise `auto` takes the fastest exact one", values.attention),
    **each(
        "lora_target lora_rank lora_alpha lora_dropout additional_target",
        change("kept in the role that trains; `lora_dropout` must be 0", values.lora, nested=True),
    ),
    "autocast_adapter_dtype": unneeded("adapters are float32"),
    "ulysses_size": change("→ `strategy_config.ulysses_size`", values.ulysses_size),
    "moe_aux_loss_coef": change(
        "→ `strategy_config.moe_aux_loss_coeff` of Megatron's strategies, unless that says something else; refused for"
        " others unless `0`",
        values.moe_aux_loss_coef,
    ),
    "freeze_module_prefix": refused("no module can be frozen"),
    "gradient_checkpointing_use_reentrant": unneeded("it makes no difference to the numbers"),
    **each("model_type num_labels", unneeded("the role decides what a model computes")),
    "device_map": unneeded("device_mapping decides"),
    "adapter_name_or_path": dead("nothing reads it"),
    "flash_attn": UNDECLARED,
}

TRAINING: Table = {
    **each(
        "learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2 per_device_train_batch_size"
        " gradient_accumulation_steps warmup_steps warmup_ratio",
        keep(),
    ),
    "num_train_epochs": change("kept in sft; rlvr goes by `max_steps`, in ROLL too", values.num_train_epochs),
    **each("max_steps seed output_dir logging_steps save_steps", unneeded("the run's decides, in ROLL too")),
    **each("fp16 bf16", unneeded("model_args.dtype decides, in ROLL too")),
    "dataloader_num_workers": unneeded("rows are read and encoded before the first step"),
    "save_hf_model": unneeded("export/ is a Hugging Face model"),
    **each("data_seed tf32", dead("nothing reads it")),
}

DATA: Table = {
    "file_name": change("kept; a pattern becomes the files that match it", values.file_name, nested=True),
    **each("tag id domain_interleave_probs", keep()),
    "messages": change("kept in rlvr", values.messages_column),
    "prompt": change("kept in rlvr where there are no messages, with `template: plain`", values.prompt_column),
    "template": change("`qwen2_5`, `qwen3` → `native`, `empty` → `chatml`", values.template),
    "dataset_type": change("kept, but for `text`", values.dataset_type),
    "response": unneeded("sft reads response_key, and rlvr no answers"),
    "preprocessing_num_workers": unneeded("rows are encoded in one process"),
    "custom_data_kwargs_func": refused("code of yours that makes rows: write the rows to a file"),
    "eval_file_name": dead("nothing reads it"),
    **each("dataset_dir interleave_probs", UNDECLARED),
}

GENERATING: Table = {
    "temperature": change("kept; in `actor_infer` it is that of training's logprobs too", values.temperature),
    **each("top_p top_k repetition_penalty stop_strings", keep()),
    "num_beams": unsupported("answers are drawn, not searched for", 1),
    "max_new_tokens": dead("ROLL overwrites it by what prompt_length leaves"),
    "max_length": unneeded("response_length decides"),
    "num_return_sequences": dead("ROLL overwrites it by num_return_sequences_in_group"),
    "include_stop_str_in_output": unneeded("what was drawn is kept, token by token"),
    "logprobs": unneeded("every token has its own"),
    "length_penalty": dead("it belongs to beam search"),
    "do_sample": dead("nothing reads it; temperature: 0 is greedy"),
}

STRATEGY: Table = {"strategy_name": keep()}
"""`strategy_config` is checked by the strategy's own schema, after the rules in `STRATEGIES`."""

ROLE: Table = {
    "name": unneeded("a role has the name of its key"),
    "worker_cls": change("not needed for ROLL's own classes; refused for yours", values.worker_cls),
    "pg_variant": change("→ `pg_variant` of the run, where worker_cls is ActorPGWorker", values.pg_variant),
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
    "mtp_training_mode": refused("layers that predict several tokens are not trained", "disabled"),
    "router_replay": {
        "mode": change(
            "`R3` → `router_replay.mode`, of trainer and engine together; others refused", values.router_replay
        )
    },
    **each("sequence_length_round_in_train sequence_length_round_in_infer", unneeded("nothing is padded")),
    "use_sequence_packing": unneeded("sequences are always packed"),
    "sequence_packing_args": unneeded("use_dynamic_batching_in_train fills microbatches by tokens"),
    "logits_in_fp32": unneeded("logprobs and entropy are computed in float32"),
    "backend_timeout": unneeded("rpc_timeout bounds every call"),
    "max_concurrency": unneeded("decided by what a role does"),
    **each("opd_kl_coef tag_included", unneeded("it belongs to teachers")),
    "offload_nccl": dead("ROLL forces it to false"),
    "use_remove_padding": UNDECLARED,
}
NO_ROWS = unneeded("rows come from the data_args of the role that trains, and of validation")
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
    "infer_batch_size": unneeded("the engine decides what it computes together"),
    "model_args": {
        **MODEL,
        **each("disable_gradient_checkpointing attn_implementation", unneeded("the engine has its own ways")),
    },
}

OF_WORKER = change(
    "not needed by a rule; for other rewards what your function does instead", values.of_reward_worker, nested=True
)
REWARD: Table = {
    "worker_cls": change(
        f"→ `reward`: MathRuleRewardWorker is `math_rule`, others a `function` of yours in {values.MODULE}.py",
        values.reward_worker,
    ),
    **each("tag_included world_size", keep()),
    "query_filter_config": {"type": keep(), "filter_args": keep()},
    "system_envs": Each(change("kept, as text", values.environment_variable)),
    "name": unneeded("a reward has the name of its key"),
    **each("response_filter_config response_length_penalty_coef", dead("what is computed from it is thrown away")),
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
        **each("domain_interleave_probs", dead("every row of an evaluation is asked once")),
        **each("messages prompt", dead("ROLL reads the columns that actor_train.data_args names")),
    },
    "generating_args": {**GENERATING, "num_return_sequences": keep()},
    "eval_steps": UNDECLARED,
    **each(
        "name worker_cls model_args training_args strategy_args device_mapping world_size num_gpus_per_worker"
        " infer_batch_size",
        dead("an evaluation has no workers of its own"),
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
    "response_length": change("kept where there is no `sequence_length`", values.response_length),
    "sequence_length": change("→ `response_length`, less `prompt_length`; in sft both", values.sequence_length),
    "val_sequence_length": change("→ `validation.generating_args.max_new_tokens`", values.val_sequence_length),
    "val_prompt_length": change("`prompt_length` holds for evaluations too", values.val_prompt_length),
    "num_gpus_per_node": keep("ROLL overwrites it by what it counts; here it holds"),
    "resume_from_checkpoint": change("kept, but for paths of ROLL's checkpoints", values.resume_from_checkpoint),
    "track_with": change("kept where such a tracker is installed; `stdout` → none", values.track_with),
    "tracker_kwargs": change("→ `tracker_kwargs.<tracker>`", values.tracker_kwargs, nested=True),
    "system_envs": Each(change("kept, as text; it reaches every role", values.environment_variable)),
    "router_args": {
        "router_name": change("→ `prompt_affinity`, `sticky`, `least_loaded`", values.router_name),
        **each("router_config max_running_requests", unneeded("max_running_requests of the run decides")),
    },
    "checkpoint_config": unsupported(
        "checkpoints stay in the run's directory, output_dir/exp_name/number/checkpoints: let output_dir lie on a"
        " disk that lasts"
    ),
    "model_download_type": change("ids are those of the Hugging Face hub", values.model_download_type),
    "rollout_mock": change(
        "`mode: dump` → `record_rollouts: true`; dumps of ROLL's cannot be read", values.rollout_mock, nested=True
    ),
    "user_defined_rollout_loop_cls": refused("code of yours: see docs/plugins.md for what a pipeline is"),
    **each(
        "profiler_timeline profiler_memory",
        unsupported("there is no profiler; the report says where each step's time went", False),
    ),
    **each("profiler_output_dir otlp_output_dir", unneeded("nothing is written there")),
    **each("logging_dir base_dir", unneeded("log, metrics and samples lie in the run's directory")),
    **each("rollout_dump_dir save_logging_board_dir", unneeded("every sample is in the run's samples.jsonl")),
    "transfer_backend": unneeded("samples travel as roll-core's own messages"),
    "generate_opt_level": unneeded("requests are always scheduled one by one"),
    "num_nodes": dead("ROLL computes it from device_mapping, as it is here"),
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
        change("kept in synchronous training", values.ahead),
    ),
    "adv_estimator": change("kept; `gigpo`, `step_reinforce` → `reinforce`", values.adv_estimator),
    **each("norm_mean_type norm_std_type", change("kept, but for grpo, which takes the group's", values.norm_type)),
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
        change("kept; ROLL whitens each domain by itself, without samples that masks leave out", values.whiten),
    ),
    "loss_agg_mode": change(
        "kept; ROLL's `seq-mean-token-sum-norm` does not divide by the number of sequences", values.loss_agg_mode
    ),
    "kl_penalty": change("`kl` → `k1`, `mse` → `k2`; `full` is refused", values.kl_penalty),
    "target_kl": change("kept with `add_token_level_kl`; ROLL adapts domain by domain", values.target_kl),
    "train_infer_correction": {
        "is_weight": {
            **each("enabled weight_type upper_bound", keep()),
            "detach": refused("weights take no gradient", True),
        },
        "filters": keep(),
    },
    "reward_pretrain": change("→ `critic.model_args.model_name_or_path`", values.reward_pretrain),
    "global_template": change("→ `actor_train.data_args.template`", values.global_template),
    "tag_to_template": refused("one template for all rows"),
    **each("difficulty_loss_weight length_loss_weight", refused("samples are not weighted so", False)),
    "rl_loss_coef": refused("the policy loss has no factor", 1),
    "importance_sampling": refused("ratios are those of tokens, unless pg_variant names a loss that does so", "token"),
    **each("enable_reference enable_old_logprobs_recompute", unneeded("it follows from what the losses need")),
    "balance_length": unneeded("microbatches are always balanced by length"),
    **each(
        "l2 use_reward_scaling use_reward_norm add_len_reward dataset_filter val_greedy val_n_sample mask_type"
        " minibatch_data_iter_num postive_loss_coef use_topr_neg_loss_coef use_policy_loss_type use_topr_loss",
        dead("nothing reads it"),
    ),
    "actor_train": TRAIN,
    "actor_infer": INFER,
    "reference": SCORE,
    "critic": CRITIC,
    "reward_model": unsupported("there is no judge that several rewards share"),
    "rewards": Each(REWARD),
    "validation": VALIDATION,
}

SFT: Table = {
    **RUN,
    "prompt_key": change("→ `sft_train.data_args.prompt`", values.sft_column("prompt")),
    "response_key": change("→ `sft_train.data_args.response`", values.sft_column("response")),
    "system_key": change("→ `sft_train.data_args.system`", values.sft_column("system")),
    "query_key": refused("a prompt is one column: join the two in the rows"),
    "global_template": change("→ `sft_train.data_args.template`", values.global_template),
    "max_steps": dead("ROLL's sft goes by num_train_epochs"),
    "sft_train": TRAIN,
    "validation": {**VALIDATION, "generating_args": unneeded("an evaluation is the loss on held-out rows")},
}

STRATEGIES: dict[str, Table] = {
    "vllm": {"VLLM_USE_V1": unneeded("there is no other engine in supported versions")},
    "sglang": {
        "tensor_parallel_size": rename("tp_size"),
        "pipeline_parallel_size": unsupported("tp_size spreads a model", 1),
        "grpc_mode": unneeded("there is one way to talk to the engine"),
    },
    "megatron": {
        **each("bf16 fp16", unneeded("model_args.dtype decides")),
        **each(
            "save_only_model save_hf_model save_merged_model ckpt_format",
            unneeded("checkpoints continue runs, and export/ is a Hugging Face model"),
        ),
        "use_flash_attn": unneeded("the fastest exact attention is taken"),
        **each(
            "calculate_per_token_loss check_for_nan_in_loss_and_grad variable_seq_lengths compile_warmup",
            unneeded("decided by how losses and microbatches are made"),
        ),
        "virtual_pipeline_model_parallel_size": change("kept; 1 is none", values.virtual_pipeline),
        "lr_scheduler_kwargs": rename("role:training_args.lr_scheduler_kwargs"),
        "moe_aux_loss_coeff": differs(values.BY_SEQUENCE),
        "moe_aux_loss_coef": rename("moe_aux_loss_coeff", values.BY_SEQUENCE),
        "moe_token_drop_policy": refused("no token may be dropped"),
        "moe_expert_capacity_factor": refused("no token may be dropped"),
        "optimizer": refused("AdamW takes the steps", "adam"),
    },
    "fsdp2": {
        "save_only_model": unneeded("checkpoints continue runs, and export/ is a Hugging Face model"),
        **each("apply_expert_patch moe_use_grouped_mm model_type", unneeded("decided by the model")),
        "fsdp_size": change("kept; up to 1 it is all ranks", values.fsdp_size),
        **each("param_dtype reduce_dtype", change("kept; torch's names become ours", values.torch_dtype)),
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
    ("shuffle",): "rows as they stand in the files; ROLL also leaves out what fills no batch at the end of each epoch",
}
"""Notes on keys of `DEFAULTS` whose results still differ from ROLL's."""
