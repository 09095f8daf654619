"""Conversion rules for the keys of alibaba/ROLL's configs (0.3.0). Update them here if keys change on either side.

The meaning of a key in ROLL is taken from its sources: the dataclasses of roll/configs, and those of each pipeline in
roll/pipeline/<name>/<name>_config.py. A key is `dead` if no code of ROLL reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_migrate import roll_values as values
from roll_migrate.roll_pipelines import ON_POLICY, has_images, has_videos
from roll_migrate.rules import (
    AnyName,
    Default,
    KeyRule,
    Table,
    change,
    dead,
    differs,
    keep,
    keys,
    lookup,
    refused,
    rename,
    unneeded,
    unsupported,
)
from roll_migrate.shared_rules import lora_dropout

if TYPE_CHECKING:
    from collections.abc import Mapping

UNDECLARED = dead("not a key of ROLL; its loader ignores it silently")
ELSEWHERE = dead("ROLL's sft and rlvr do not read it")

MODEL: Table = {
    **keys("model_name_or_path dtype disable_gradient_checkpointing model_config_kwargs", keep()),
    "attn_implementation": change(
        "`sdpa` is kept without `ulysses_size`; otherwise `auto` selects the fastest exact one", values.attention
    ),
    **keys(
        "lora_target lora_rank lora_alpha additional_target",
        change("kept in the trained role", values.lora, nested=True),
    ),
    "lora_dropout": change(
        "must be 0", lambda value, key: lora_dropout(key, enabled=key.beside("lora_target") is not None)
    ),
    "autocast_adapter_dtype": unneeded("adapters are float32"),
    "ulysses_size": change("→ `strategy_config.ulysses_size`", values.ulysses_size),
    "moe_aux_loss_coef": change(
        "→ `strategy_config.moe_aux_loss_coeff` of Megatron's strategies, unless that is set; rejected for other"
        " strategies unless `0`",
        values.moe_aux_loss_coef,
    ),
    "freeze_module_prefix": change(
        "→ `freeze` of a model with images, if it names the encoder or the projector", values.freeze
    ),
    "gradient_checkpointing_use_reentrant": unneeded("it does not affect results"),
    **keys("model_type num_labels", unneeded("the role determines what a model computes")),
    "device_map": unneeded("set by device_mapping"),
    "adapter_name_or_path": dead("nothing reads it"),
    "flash_attn": UNDECLARED,
}

TRAINING: Table = {
    **keys(
        "learning_rate lr_scheduler_type weight_decay adam_beta1 adam_beta2 per_device_train_batch_size"
        " warmup_steps warmup_ratio",
        keep(),
    ),
    "gradient_accumulation_steps": change(
        "kept; less in `agentic` if a batch has fewer rows, which ROLL fills with copies", values.accumulation
    ),
    "num_train_epochs": change("kept in sft; rlvr uses `max_steps`, as in ROLL", values.num_train_epochs),
    **keys("max_steps seed output_dir logging_steps save_steps", unneeded("set by the run, as in ROLL")),
    **keys("fp16 bf16", unneeded("set by model_args.dtype, as in ROLL")),
    "dataloader_num_workers": unneeded("rows are read and encoded before the first step"),
    "save_hf_model": unneeded("export/ is a Hugging Face model"),
    **keys("data_seed tf32", dead("nothing reads it")),
}

DATA: Table = {
    "file_name": change("kept; a pattern is replaced by the matching files", values.file_name, nested=True),
    **keys("tag id domain_interleave_probs max_pixels", keep()),
    "image_key": rename("images"),
    **keys("image_max_pixels video_max_pixels", rename("max_pixels")),
    "min_pixels": keep(),
    **keys("image_min_pixels video_min_pixels", rename("min_pixels")),
    "video_key": rename("videos"),
    "video_fps": keep(),
    "video_max_frames": rename("max_frames"),
    "video_total_pixels": change("→ `max_video_pixels`, doubled: ROLL counts two frames as one", values.video_pixels),
    "video_resize_chunk_frames": unneeded("it does not affect results"),
    **keys("image_folder video_folder", change("→ `image_roots`", values.image_root)),
    "messages": change("kept in rlvr", values.messages_column),
    "prompt": change("kept in rlvr without messages, with `template: plain`", values.prompt_column),
    "template": change("`qwen2_5`, `qwen3` → `native`, `empty` → `chatml`", values.template),
    "dataset_type": change("kept, except `text`", values.dataset_type),
    "response": unneeded("sft reads response_key; rlvr needs no responses"),
    "preprocessing_num_workers": unneeded("rows are encoded in one process"),
    "custom_data_kwargs_func": change(
        "`video_r1_get_data_kwargs` → `columns`; otherwise rejected: custom code that makes rows", values.row_function
    ),
    "eval_file_name": dead("nothing reads it"),
    **keys("dataset_dir interleave_probs", UNDECLARED),
}

GENERATING: Table = {
    "temperature": change("kept; in `actor_infer` training's logprobs use it too", values.temperature),
    **keys("top_p top_k repetition_penalty stop_strings", keep()),
    "num_beams": unsupported("beam search is not supported", 1),
    "max_new_tokens": change(
        "no effect in ROLL's rlvr, which overwrites it; in agentic it limits a reply, as `max_tokens_per_step`",
        values.max_new_tokens,
    ),
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
    **keys(
        "topr_positive_weight topr_negative_weight", change("→ `pg_options` of the run, for topr", values.topr_weight)
    ),
    "model_args": MODEL,
    "training_args": TRAINING,
    "data_args": DATA,
    "generating_args": GENERATING,
    "strategy_args": STRATEGY,
    **keys("device_mapping num_gpus_per_worker infer_batch_size", keep()),
    "world_size": change("kept for roles without device_mapping", values.world_size),
    **keys(
        "use_dynamic_batching_in_train use_dynamic_batching_in_infer max_tokens_per_microbatch_in_train"
        " max_tokens_per_microbatch_in_infer",
        keep(),
    ),
    "system_envs": AnyName(change("kept, as text", values.environment_variable)),
    "model_update_frequency": refused("weights are published after every step", 1),
    "apply_loss_scale": refused("gradients are sums over ranks and microbatches", True),
    "mtp_training_mode": refused("multi-token prediction layers are not trained", "disabled"),
    "router_replay": {
        "mode": change(
            "`R3` → `router_replay.mode`, for trainer and engine together; others are rejected", values.router_replay
        )
    },
    **keys("sequence_length_round_in_train sequence_length_round_in_infer", unneeded("sequences are not padded")),
    "use_sequence_packing": unneeded("sequences are always packed"),
    "sequence_packing_args": unneeded("use_dynamic_batching_in_train fills micro-batches by tokens"),
    "logits_in_fp32": unneeded("logprobs and entropy are computed in float32"),
    "backend_timeout": unneeded("rpc_timeout applies to every call"),
    "max_concurrency": unneeded("set by the role's task"),
    **keys("opd_kl_coef tag_included", unneeded("it is for teachers")),
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
        **keys("disable_gradient_checkpointing attn_implementation", unneeded("the engine has its own implementation")),
    },
}

OF_WORKER = change("not needed for a rule; otherwise replaced by your function", values.of_reward_worker, nested=True)
REWARD: Table = {
    "worker_cls": change(
        "→ `reward`: "
        + ", ".join(f"{theirs} is `{ours}`" for theirs, ours in values.REWARDS.items())
        + f", {values.JUDGE} with an API is `judge`; others become a custom `function` in {values.MODULE}.py",
        values.reward_worker,
    ),
    **keys("tag_included world_size", keep()),
    "query_filter_config": {"type": keep(), "filter_args": keep()},
    "system_envs": AnyName(change("kept, as text", values.environment_variable)),
    "name": unneeded("the key is the reward's name"),
    "response_filter_config": dead("ROLL discards the result"),
    "response_length_penalty_coef": change(
        "no effect in ROLL, except for CrossThinkQARuleRewardWorker", values.response_length_penalty_coef
    ),
    "reward_type": change(
        "not needed for a rule, except for CrossThinkQARuleRewardWorker; otherwise replaced by your function",
        values.reward_type,
    ),
    **keys(
        "model_args data_args generating_args training_args strategy_args device_mapping num_gpus_per_worker"
        " infer_batch_size judge_model_type use_local format_pattern reward_manager_config llm_proxy"
        " max_concurrency backend_timeout",
        OF_WORKER,
    ),
    **keys(
        "judge_model_name judge_api_url judge_api_key",
        change("kept for `judge`; not needed for a rule; otherwise replaced by your function", values.judge_api),
    ),
    "judge_prompt": change("`judge` needs the text of the prompt; ROLL's value is a name", values.judge_prompt),
    "code_url": change("`code` runs programs here, by `sandbox_command` or by `sandbox_url`", values.code_url),
}

VALIDATION: Table = {
    "data_args": {
        **DATA,
        **keys("domain_interleave_probs", dead("an evaluation uses every row once")),
        **keys("messages prompt", dead("ROLL reads the columns of actor_train.data_args")),
    },
    "generating_args": {**GENERATING, "num_return_sequences": keep()},
    "eval_steps": UNDECLARED,
    **keys(
        "name worker_cls model_args training_args strategy_args device_mapping world_size num_gpus_per_worker"
        " infer_batch_size",
        dead("an evaluation has no workers"),
    ),
}

RUN: Table = {
    "exp_name": change("kept; other characters than letters, digits, `.`, `_`, `-` become `-`", values.exp_name),
    **keys(
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
    "system_envs": AnyName(change("kept, as text; applies to every role", values.environment_variable)),
    "router_args": {
        "router_name": change("→ `prompt_affinity`, `sticky`, `least_loaded`", values.router_name),
        **keys("router_config max_running_requests", unneeded("set by max_running_requests of the run")),
    },
    "checkpoint_config": unsupported(
        "checkpoints stay in the run's directory, output_dir/exp_name/number/checkpoints: set output_dir to a"
        " persistent disk"
    ),
    "model_download_type": change("MODELSCOPE becomes a variable of `system_envs`", values.model_download_type),
    "rollout_mock": change(
        "`mode: dump` → `record_rollouts: true`; ROLL's dumps cannot be read", values.rollout_mock, nested=True
    ),
    "user_defined_rollout_loop_cls": refused("custom code: see docs/plugins.md for pipelines"),
    **keys("profiler_timeline profiler_memory", unsupported("set profile, which has roles, steps and memory", False)),
    **keys("profiler_output_dir otlp_output_dir", unneeded("nothing is written there")),
    **keys("logging_dir base_dir", unneeded("log, metrics and samples are in the run's directory")),
    **keys("rollout_dump_dir save_logging_board_dir", unneeded("every sample is in the run's samples.jsonl")),
    "transfer_backend": unneeded("roll-core sends samples in its own messages"),
    "generate_opt_level": unneeded("requests are always scheduled individually"),
    "num_nodes": dead("ROLL computes it from device_mapping, as roll-core does"),
    **keys("local_rank report_length_and_rewards length_profiler_dir", dead("nothing reads it")),
    **keys("is_offload_states is_offload_optimizer_states_in_train_step", ELSEWHERE),
    "offload_backend": unneeded("is_offload_states of a role decides"),
    **keys(
        "reward_norm reward_shift reward_scale reward_system_config positive_loss_coef track_name train_batch_size"
        " use_additional_prompts",
        UNDECLARED,
    ),
}

RLVR: Table = {
    **RUN,
    **keys(
        "max_steps rollout_batch_size num_return_sequences_in_group ppo_epochs max_running_requests"
        " async_generation_ratio",
        keep(),
    ),
    "is_num_return_sequences_expand": change("→ `max_running_requests`: 128 without that key", values.expand),
    **keys(
        "is_use_additional_prompts max_additional_running_prompts",
        change("kept in synchronous training", values.additional_prompts),
    ),
    "adv_estimator": change("kept; `gigpo`, `step_reinforce` → `reinforce`", values.adv_estimator),
    **keys("norm_mean_type norm_std_type", change("kept, except for grpo, which uses the group's", values.norm_type)),
    **keys(
        "gamma lambd reward_clip advantage_clip value_clip critic_warmup pg_clip"
        " entropy_loss_coef use_kl_loss"
        " kl_loss_coef add_token_level_kl init_kl_coef kl_horizon force_disable_old_logprobs_recompute max_len_mask"
        " difficulty_mask difficulty_low_threshold difficulty_high_threshold error_max_len_clip"
        " error_max_len_threshold",
        keep(),
    ),
    "use_pg_clip_range": change("`pg_clip_low` and `pg_clip_high` alone", values.clip_switch),
    **keys("pg_clip_low pg_clip_high", change("kept with `use_pg_clip_range`", values.clip_bound)),
    "dual_clip_loss": change("→ `dual_clip`: 1 + 2 `pg_clip`", values.dual_clip),
    **keys(
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
            **keys("enabled weight_type upper_bound", keep()),
            "detach": refused("weights have no gradient", True),
        },
        "filters": keep(),
    },
    "reward_pretrain": change("→ `critic.model_args.model_name_or_path`", values.reward_pretrain),
    "global_template": change("→ `actor_train.data_args.template`", values.global_template),
    "tag_to_template": refused("all rows have one template"),
    **keys("difficulty_loss_weight length_loss_weight", refused("samples cannot be weighted by this", False)),
    "rl_loss_coef": refused("the policy loss has no factor", 1),
    "importance_sampling": change("`seq` → `pg_variant: gspo` with `pg_options`", values.importance_sampling),
    **keys("enable_reference enable_old_logprobs_recompute", unneeded("derived from the losses")),
    "balance_length": unneeded("micro-batches are always balanced by length"),
    **keys(
        "l2 use_reward_scaling use_reward_norm add_len_reward dataset_filter val_greedy val_n_sample mask_type"
        " minibatch_data_iter_num postive_loss_coef use_topr_neg_loss_coef use_policy_loss_type use_topr_loss",
        dead("nothing reads it"),
    ),
    "actor_train": TRAIN,
    "actor_infer": INFER,
    "reference": SCORE,
    "critic": CRITIC,
    "reward_model": unsupported("rewards cannot share a judge model"),
    "rewards": AnyName(REWARD),
    "validation": VALIDATION,
}

OF_MESSAGES = change(
    "the environment writes its own messages",
    lambda value, key: key.differs("the environment writes its own messages, so that prompts differ from ROLL's"),
)
NO_WORKERS = unneeded("environments run in processes of the driver, see `concurrency`")
ENVIRONMENT: Table = {
    "env_type": change("→ `environment`; names of environments are those that are installed", values.env_type),
    "env_config": change(
        "options of `sokoban` and `frozen_lake` are converted, others kept", values.env_config, nested=True
    ),
    **keys("max_steps max_tokens_per_step", keep()),
    "max_env_step_concurrent": change("→ `concurrency`; 0 has no limit", values.env_concurrency),
    "env_manager_cls": change(
        "not needed for TrajEnvManager, and VLTrajEnvManager with a board; others are rejected", values.env_manager
    ),
    **keys(
        "agent_system_template agent_template pre_step_template next_step_template reward_template user_prompt_format",
        OF_MESSAGES,
    ),
    "history_length": dead("TrajEnvManager shows the model all turns"),
    "use_thread_lock": unneeded("an environment has its own process"),
    "tool_wrapper": refused("tools belong to the environment: see docs/agentic.md"),
    "agent_runner_cls": refused("custom code: write an environment, see docs/agentic.md"),
}
MANAGER: Table = {
    **keys("num_env_groups group_size", keep()),
    "tags": keep(),
    "num_groups_partition": keep(),
    "format_penalty": keep("environments report invalid actions by the metric `valid`"),
    "group_size_redundancy": refused("a group consists of all its episodes, also the slowest", 0),
    "llm_proxy": change("not needed for `policy`; others are rejected", values.llm_proxy, nested=True),
    "group_filter_cls": change("not needed for ROLL's class; others are rejected", values.group_filter),
    "max_traj_per_env": unneeded("rollout_batch_size and val_batch_size decide"),
    **keys("max_env_num_per_worker world_size num_gpus_per_worker device_mapping name worker_cls", NO_WORKERS),
    **keys("model_args training_args strategy_args data_args system_envs max_concurrency", NO_WORKERS),
    "generating_args": unneeded("rollouts have those of actor_infer"),
}

AGENTIC: Table = {
    **{
        key: rule for key, rule in RLVR.items() if key not in ("rewards", "validation", "num_return_sequences_in_group")
    },
    "custom_envs": AnyName(ENVIRONMENT),
    "train_env_manager": MANAGER,
    "val_env_manager": {**MANAGER, "generating_args": GENERATING},
    **keys("max_actions_per_traj max_tokens_per_step", keep()),
    "adv_estimator": change(
        "kept; `grpo` with another normalisation than the group's → `reinforce`", values.agentic_estimator
    ),
    "reward_normalization": change(
        "→ `norm_mean_type`, `norm_std_type`, or `adv_options` of `step_reinforce` and `gigpo`",
        values.reward_normalization,
        nested=True,
    ),
    **keys("norm_mean_type norm_std_type", dead("ROLL's agentic pipeline reads reward_normalization")),
    **keys(
        "step_reward_gamma episode_reward_weight step_reward_weight",
        change("→ `adv_options`, if the estimator reads it", values.turn_option),
    ),
    "ratio_type": refused("set pg_variant: gspo_token, or another loss", "token"),
    "batch_adjust_mode": unneeded("no rows are duplicated or dropped to fill a batch"),
    "env_monitor": unneeded("each call of an environment has a deadline"),
    "partial_gpu_mode": unsupported("training and generation have their own slots", False),
    "render_save_dir": unneeded("samples.jsonl and the report show episodes"),
    "reward": refused("an environment scores its episodes: call the judge in its `score`"),
    **keys("dirty_data_mask open_feedback_turn use_token_reward exp_mode", dead("nothing reads it")),
    "parse_tool_call_parameter_to_dict": unneeded("an environment parses its tool calls"),
    "skip_mock_system_prompt": unneeded("no system prompt is added to the messages"),
    "num_return_sequences_in_group": dead("ROLL's agentic pipeline reads train_env_manager.group_size"),
    **keys("rewards validation", dead("ROLL's agentic pipeline does not read it")),
}

SFT: Table = {
    **RUN,
    "prompt_key": change("→ `sft_train.data_args.prompt`", values.row_column("prompt")),
    "response_key": change("→ `sft_train.data_args.response`", values.row_column("response")),
    "system_key": change("→ `sft_train.data_args.system`", values.row_column("system")),
    "query_key": change("→ `sft_train.data_args.query`", values.row_column("query")),
    "global_template": change("→ `sft_train.data_args.template`", values.global_template),
    "max_steps": dead("ROLL's sft uses num_train_epochs"),
    "sft_train": TRAIN,
    "validation": {**VALIDATION, "generating_args": unneeded("an evaluation is the loss on held-out rows")},
}

DISTILL: Table = {
    **RUN,
    "student_pretrain": rename("top:pretrain"),
    "teacher_pretrain": rename("top:teachers.main.model_args.model_name_or_path"),
    "question_key": change("→ `actor_train.data_args.prompt`", values.row_column("prompt")),
    "answer_key": change("→ `actor_train.data_args.response`", values.row_column("response")),
    "global_template": change("→ `actor_train.data_args.template`", values.global_template),
    **keys("kd_objective kd_temperature skew_lambda adaptive_kl_alpha distill_on_prompt", keep()),
    "teacher_temperature": change("both models have `kd_temperature`; another value is rejected", values.kd_teacher),
    "logits_topk": change("kept; 0 → `kd_support: full`", values.logits_topk),
    "distill_loss_weight": change("w → `kd_coef: w` and `nll_coef: 1 - w`", values.distill_loss_weight),
    "logits_transfer_backend": unneeded("teachers return K logprobs or hidden states to the driver"),
    "max_steps": dead("ROLL's distill uses num_train_epochs"),
    "student": TRAIN,
    "teacher": SCORE,
    "validation": unsupported("ROLL's distill does not evaluate; see `validation` of distill"),
}

TEACHER: Table = {
    **SCORE,
    "tag_included": keep(),
    "opd_kl_coef": change("→ `kd_coef`, if all teachers have the same", values.opd_kl_coef),
}
ON_POLICY_DISTILL: Table = {
    **RLVR,
    **{
        name: values.unless_pure(rule)
        for name, rule in RLVR.items()
        if name in ("gamma", "adv_estimator", "critic_warmup", "use_kl_loss", "add_token_level_kl")
        and isinstance(rule, KeyRule)
    },
    **keys("pure_opd_pipeline_type is_pure_opd", unneeded("without rewards in the credit, `task_coef` is 0")),
    "use_opd": change("true → `task_coef: 1`", values.use_opd),
    "student_train": TRAIN,
    "student_infer": INFER,
    "teacher": TEACHER,
}
"""ROLL's rlvr with teachers. Pure distillation has roles `student_train` and `student_infer`."""

IGNORED = dead("ROLL's worker does not receive it and trains with beta 0.1, without smoothing; set it to apply it")
PREFERENCE: Table = {
    **RUN,
    "chosen_key": change("→ `actor_train.data_args.chosen`", values.row_column("chosen")),
    "rejected_key": change("→ `actor_train.data_args.rejected`", values.row_column("rejected")),
    **keys("beta label_smoothing ipo", IGNORED),
    "train_batch_size": unneeded("the batch sizes of actor_train count pairs, as in ROLL, and make up a step"),
    "max_steps": differs("ROLL also stops after num_train_epochs"),
    "global_template": change("→ `actor_train.data_args.template`", values.global_template),
    "actor_train": TRAIN,
    "reference": SCORE,
    "validation": {**VALIDATION, "generating_args": unneeded("an evaluation is the loss on held-out pairs")},
}

FLOW_MODEL: Table = {
    "num_inference_steps": rename("top:num_inference_steps"),
    "mid_timestep": change("→ `objective_options.grad_steps`: final_timestep - mid_timestep + 1", values.mid_timestep),
    "final_timestep": change("→ `objective_options.stop_range`, unless it is the last step", values.final_timestep),
    "min_timestep_boundary": unneeded("ROLL's loss did not read it: `mid_timestep` decides"),
    "max_timestep_boundary": unneeded("ROLL's loss did not read it: `mid_timestep` decides"),
    "trainable_models": refused("all experts of a model's directory are trained: name the directory of one"),
    "extra_inputs": refused("only text conditions the model"),
    "use_gradient_checkpointing_offload": unneeded("disable_gradient_checkpointing decides"),
}
REWARD_FLOW: Table = {
    **RUN,
    "max_steps": keep(),
    "actor_train": {
        **TRAIN,
        "model_args": {**MODEL, "model_config_kwargs": FLOW_MODEL},
        "strategy_args": {
            "strategy_name": change(
                "→ `deepspeed_train`", lambda value, key: key.changed({key.path: "deepspeed_train"})
            )
        },
    },
    "rewards": refused("Reward-FL had its reward in its code: configure `rewards`, see docs/diffusion.md"),
    "validation": refused("configure `validation` of reward_flow"),
}
"""ROLL's Reward-FL, which ROLL has deleted (commit 60044b8b)."""

STRATEGIES: dict[str, Table] = {
    "vllm": {"VLLM_USE_V1": unneeded("supported versions have only this engine")},
    "sglang": {
        "tensor_parallel_size": rename("tp_size"),
        "pipeline_parallel_size": unsupported("only tp_size is supported", 1),
        "grpc_mode": unneeded("the engine has one interface"),
    },
    "megatron": {
        **keys("bf16 fp16", unneeded("set by model_args.dtype")),
        **keys(
            "save_only_model save_hf_model save_merged_model ckpt_format",
            unneeded("checkpoints resume runs, and export/ is a Hugging Face model"),
        ),
        "use_flash_attn": unneeded("roll-core selects the fastest exact attention"),
        **keys(
            "calculate_per_token_loss check_for_nan_in_loss_and_grad variable_seq_lengths compile_warmup",
            unneeded("set by losses and micro-batches"),
        ),
        "sequence_parallel": change("kept with tensor parallelism", values.sequence_parallel),
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
        **keys("apply_expert_patch moe_use_grouped_mm model_type", unneeded("set by the model")),
        "enable_mix_precision": change("`false` → `reduce_dtype: bf16`", values.mix_precision),
        "efsdp_size": unneeded("experts are sharded over the ranks of fsdp_size that hold the same ones"),
        **keys("apply_tiled_mlp tiled_num_shards", unneeded("it saves memory and does not affect results")),
        "wrap_policy": {
            "transformer_layer_cls_to_wrap": change("kept", lambda value, key: key.unchanged(), nested=True),
            **keys("wrap_embeddings wrap_lm_output moe_experts", unneeded("all parameters are sharded")),
        },
        "fsdp_size": change("kept; 1 or less means all ranks", values.fsdp_size),
        **keys("param_dtype reduce_dtype", change("kept; torch's names are converted", values.torch_dtype)),
    },
}
"""Rules for `strategy_config` that a strategy's own schema cannot express, by the first part of the strategy's name."""

# -- defaults ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    *("template", "messages", "prompt", "query", "response", "system", "images", "videos", "image_roots"),
    *("tag", "chosen", "rejected", "columns", "min_pixels", "max_pixels"),
)


OF_IMAGE_PROCESSOR = "ROLL's default of rlvr with images, whatever the model's processor has"
OF_IMAGE_ROWS = "the column of ROLL's rows with images: check it"
GROUND_TRUTH = "reward_model.ground_truth"
"""Column of the answers in ROLL's rows with images of rlvr."""


def _trained(role: str) -> tuple[Default, ...]:
    """Training arguments of transformers, whose defaults ROLL has."""
    args = f"{role}.training_args"
    return (Default(f"{args}.learning_rate", 5e-5), Default(f"{args}.per_device_train_batch_size", 8))


def _sampling(evaluation: str) -> tuple[Default, ...]:
    """Defaults of a pipeline with rollouts, whose evaluations are configured under the key `evaluation`."""
    sampled = "actor_infer.generating_args"
    evaluated = f"{evaluation}.generating_args"
    return (
        *_trained("actor_train"),
        *_trained("critic"),
        Default("kl_loss_coef", 0.0, lambda source: source.get("use_kl_loss")),
        Default(f"{sampled}.temperature", 0.95, note=f"ROLL's default; {values.AT_TEMPERATURE}"),
        Default(f"{sampled}.top_p", 0.7),
        Default(f"{sampled}.top_k", 50),
        Default(f"{evaluated}.temperature", 0.95),
        Default(f"{evaluated}.top_p", 0.7),
        Default(f"{evaluated}.top_k", 50),
        Default(
            "critic_epochs",
            lambda source, config: 1 if "critic" in config else None,
            lambda source: source.get("ppo_epochs", 1) != 1,
            "ROLL's critic passes once over a batch for any ppo_epochs",
        ),
    )


def _evaluated(trained: str, **columns: str) -> tuple[Default, ...]:
    """Columns of evaluation rows, which ROLL reads as the trained role's; `columns` are those by default."""

    def like_trained(name: str) -> Default:
        column = f"{trained}.data_args.{name}"
        return Default(
            f"validation.data_args.{name}",
            lambda source, config: lookup(config, column) or columns.get(name),
            note=f"ROLL reads every row as {trained}'s",
        )

    defaults = (Default(f"{trained}.data_args.{name}", column) for name, column in columns.items())
    unnamed = "the config does not name the column of {}: check it"

    images = Default(f"{trained}.data_args.images", "images", _only_images, unnamed.format("images"))
    videos = Default(f"{trained}.data_args.videos", "video", has_videos, unnamed.format("videos"))
    freeze = Default(f"{trained}.model_args.freeze", lambda source, _: [], _trains_images, "ROLL trains the encoder")
    return (*defaults, images, videos, freeze, *map(like_trained, COLUMNS))


def _only_images(source: Mapping[str, Any]) -> bool:
    """True if rows have images: those of environments are in no column."""
    return has_images(source) and not has_videos(source) and not source.get("custom_envs")


def _trains_images(source: Mapping[str, Any]) -> bool:
    roles = [role for role in source.values() if isinstance(role, dict) and isinstance(role.get("model_args"), dict)]
    return has_images(source) and not any(role["model_args"].get("freeze_module_prefix") for role in roles)


def _expands(source: Mapping[str, Any]) -> bool:
    several = source.get("num_return_sequences_in_group", 1) != 1
    return bool(source.get("async_generation_ratio")) and several and "max_running_requests" not in source


DEFAULTS: dict[str, tuple[Default, ...]] = {
    "rlvr": (
        *_sampling("validation"),
        Default("num_return_sequences_in_group", 1),
        Default("adv_estimator", "gae"),
        Default(
            "max_running_requests", values.MAX_RUNNING, _expands, "ROLL's default; responses are separate requests"
        ),
        Default("actor_train.data_args.tag", "data_source", has_images, OF_IMAGE_ROWS),
        Default("actor_train.data_args.max_pixels", 1024 * 1024, _only_images, OF_IMAGE_PROCESSOR),
        Default("actor_train.data_args.min_pixels", 56 * 56, _only_images, OF_IMAGE_PROCESSOR),
        *_evaluated("actor_train"),
    ),
    "agentic": (*_sampling("val_env_manager"), Default("adv_estimator", "gae"), *_evaluated("actor_train")),
    ON_POLICY: (
        *_sampling("validation"),
        Default("num_return_sequences_in_group", 1),
        Default("adv_estimator", "gae", lambda source: not values.is_pure(source)),
        *_evaluated("actor_train"),
    ),
    "sft": (
        Default(
            "shuffle", False, note="ROLL's default; file order; ROLL also drops the last incomplete batch of each epoch"
        ),
        *_evaluated("sft_train", prompt="instruction", response="output"),
    ),
    "distill": (
        *_trained("actor_train"),
        Default("distill_data", "dataset"),
        Default("kd_support", "teacher_topk"),
        Default(
            "kd_tail",
            "renormalise",
            note="ROLL's default; logprobs are divided by the probability of the K tokens; `bucket` also compares the"
            " rest",
        ),
        Default("kd_objective", "forward_kl"),
        Default("kd_coef", 0.5),
        Default("nll_coef", 0.5),
        Default("max_grad_norm", 0.0),
        Default("num_return_sequences_in_group", 1),
        Default("rollout_batch_size", values.rows_of_a_step, note="the rows of an optimizer step"),
        *(
            Default(f"actor_train.data_args.{name}", column, has_images, OF_IMAGE_ROWS)
            for name, column in (("prompt", "problem"), ("response", "solution"), ("images", "image"))
        ),
        *_evaluated("actor_train"),
    ),
    "preference": (*_trained("actor_train"), *_evaluated("actor_train", prompt="instruction")),
    "reward_flow": (
        Default("objective", "refl"),
        Default("num_inference_steps", 8),
        Default("shift", 5.0, note="ROLL's default; the constant of ROLL's scheduler"),
        Default("objective_options.grad_steps", 4),
        Default("objective_options.predict", "sample"),
        Default(
            "objective_options.reward_scale", 0.625, note="ROLL's default; 0.1 / 0.16, constants for its one reward"
        ),
        Default("objective_options.reward_offset", 0.54),
        Default(
            "objective_options.kl_coef",
            1.0,
            note="ROLL's default; ROLL used one noise for all samples, here each has its own",
        ),
        *_evaluated("actor_train"),
    ),
}
"""ROLL's defaults that differ from roll-core's. A role's defaults are added only if the config has the role."""
