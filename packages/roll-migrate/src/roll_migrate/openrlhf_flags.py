"""Flags of OpenRLHF's trainers: names, types and defaults in 0.11.2, older names, and facts that follow from them.

They are those of the argument parsers in openrlhf/cli and of the code that reads them. A launch is a mapping of flags
under their names of 0.11; `ALIASES` has the flat flags of 0.7 to 0.10.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_migrate.shared_rules import count_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

PPO, SFT, DPO, RM = TRAINERS = ("train_ppo_ray", "train_sft", "train_dpo", "train_rm")
PIPELINES = {PPO: "rlvr", SFT: "sft", DPO: "preference", RM: "reward_model"}
POLICY = {PPO: "actor_train", SFT: "sft_train", DPO: "actor_train", RM: "reward_train"}
"""Role that a trainer trains."""
REWARD = "openrlhf"
"""Name of the one reward in `rewards`."""
TRAINER, FLAT, GPUS = "trainer", "flat", "gpus"
"""Entries of the flags that are not flags: the trainer's name, True for flat flags, the launcher's number of GPUs."""

# -- the argument parsers ----------------------------------------------------------------------------------------------

_SWITCHES = (
    "actor.freeze_visual_encoder actor.gradient_checkpointing_enable actor.gradient_checkpointing_reentrant"
    " actor.muon.nesterov actor.muon.no_nesterov critic.muon.nesterov critic.muon.no_nesterov muon.nesterov"
    " muon.no_nesterov algo.advantage.is_correction_enable algo.advantage.no_std_norm algo.dynamic_filtering_enable"
    " algo.kl.unbiased_gradient"
    " algo.kl.use_loss ckpt.disable_ds ckpt.load_enable ckpt.save_hf critic.save_value_network"
    " data.apply_chat_template data.disable_fast_tokenizer data.multiturn ds.adam_offload ds.deepcompile"
    " ds.enable_sleep ds.load_in_4bit ds.overlap_comm ds.packing_samples ds.use_liger_kernel ds.use_universal_ckpt"
    " model.compute_fp32_loss_enable model.gradient_checkpointing_enable model.gradient_checkpointing_reentrant"
    " model.ipo_enable model.margin_loss_enable model.pretrain_mode_enable ref.offload reward.normalize_enable"
    " reward.offload train.async_enable train.colocate_actor_ref train.colocate_all train.colocate_critic_reward"
    " train.dynamic_batch_enable train.enable_ema train.full_determinism_enable train.partial_rollout_enable use_ms"
    " vllm.enable_prefix_caching vllm.enable_sleep vllm.enforce_eager vllm.sync_with_ray"
    " actor_init_on_gpu bf16 enable_vllm_is_correction flash_attn perf ref_reward_offload"
)
SWITCHES = frozenset(_SWITCHES.split())
"""Flags without a value."""
LISTS = {
    **dict.fromkeys(("actor.adam.betas", "critic.adam.betas", "adam.betas"), 2),
    **dict.fromkeys(("actor.eps_clip_low_high", "reward.clip_range", "algo.dynamic_filtering_range"), 2),
    **dict.fromkeys(("algo.advantage.is_correction_threshold", "ds.lora.target_modules"), 0),
}
"""Flags with several values, and their number; 0 is any number."""
_TEXTS = (
    "actor.model_name_or_path critic.model_name_or_path reward.model_name_or_path ref.model_name_or_path"
    " model.model_name_or_path reward.remote_url train.agent_func_path actor.optim critic.optim optim"
    " actor.lr_scheduler critic.lr_scheduler lr_scheduler actor.policy_loss_type actor.loss_agg_mode"
    " algo.advantage.estimator algo.advantage.is_correction_level algo.advantage.is_correction_mode"
    " algo.advantage.is_correction_gating algo.advantage.is_correction_type"
    " algo.kl.estimator ckpt.path ckpt.output_dir ckpt.best_metric_key"
    " data.prompt_dataset data.prompt_probs data.prompt_split data.dataset data.dataset_probs data.dataset_split"
    " data.input_key data.output_key data.label_key data.prompt_key data.chosen_key data.rejected_key"
    " data.input_template data.tokenizer_chat_template data.image_key eval.dataset eval.split ds.attn_implementation"
    " ds.experts_implementation ds.param_dtype ds.grad_accum_dtype ds.value_head_prefix ds.lora.target_modules"
    " logger.wandb.key logger.wandb.org logger.wandb.group logger.wandb.project logger.wandb.run_name"
    " logger.tensorboard_dir model.loss_type vllm.sync_backend vllm_is_correction_type train_split"
)
TEXTS = frozenset(_TEXTS.split())
"""Flags whose values are text. All others have numbers."""
SECRETS = ("logger.wandb.key",)
"""Flags whose values are not read: a variable in them may be unknown."""
_ALIASES = {
    "model": "model_name_or_path=pretrain gradient_checkpointing_enable=gradient_checkpointing"
    " gradient_checkpointing_reentrant=gradient_checkpointing_use_reentrant aux_loss_coef eps_clip eps_clip_low_high"
    " dual_clip entropy_coef=entropy_loss_coef policy_loss_type freeze_visual_encoder beta ipo_enable=ipo"
    " label_smoothing nll_loss_coef pretrain_mode_enable=pretrain_mode compute_fp32_loss_enable=compute_fp32_loss"
    " margin_loss_enable=margin_loss loss_type=loss",
    "": "adam.weight_decay=l2 adam.betas=adam_betas lr_scheduler lr_warmup_ratio min_lr_ratio max_norm",
    "ckpt": "output_dir=save_path save_steps save_hf=save_hf_ckpt disable_ds=disable_ds_ckpt path=ckpt_path"
    " max_num=max_ckpt_num max_mem=max_ckpt_mem load_enable=load_checkpoint best_metric_key",
    "eval": "steps=eval_steps dataset=eval_dataset split=eval_split temperature=eval_temperature"
    " n_samples_per_prompt=eval_n_samples_per_prompt",
    "logger": "logging_steps wandb.key=use_wandb wandb.org=wandb_org wandb.group=wandb_group"
    " wandb.project=wandb_project wandb.run_name=wandb_run_name tensorboard_dir=use_tensorboard",
    "train": "micro_batch_size=micro_train_batch_size batch_size=train_batch_size seed"
    " full_determinism_enable=full_determinism max_epochs num_episodes async_enable=async_train async_queue_size"
    " partial_rollout_enable=partial_rollout colocate_actor_ref colocate_critic_reward"
    " colocate_all=colocate_all_models dynamic_batch_enable=use_dynamic_batch"
    " max_tokens_per_gpu=train_max_tokens_per_gpu enable_ema ema_beta agent_func_path",
    "rollout": "batch_size=rollout_batch_size vllm_generate_batch_size micro_batch_size=micro_rollout_batch_size"
    " max_new_tokens n_samples_per_prompt temperature top_p max_tokens_per_gpu=rollout_max_tokens_per_gpu",
    "ds": "deepcompile zero_stage param_dtype zpg adam_offload attn_implementation use_liger_kernel grad_accum_dtype"
    " overlap_comm tensor_parallel_size=ds_tensor_parallel_size packing_samples load_in_4bit lora.rank=lora_rank"
    " lora.alpha=lora_alpha lora.target_modules=target_modules lora.dropout=lora_dropout ring_attn_size"
    " ring_attn_head_stride=ring_head_stride value_head_prefix use_universal_ckpt=use_ds_universal_ckpt"
    " enable_sleep=deepspeed_enable_sleep",
    "data": "disable_fast_tokenizer dataloader_num_workers dataset dataset_probs dataset_split max_samples multiturn"
    " input_key output_key label_key prompt_key chosen_key rejected_key input_template apply_chat_template"
    " tokenizer_chat_template max_len prompt_dataset=prompt_data prompt_probs=prompt_data_probs prompt_split"
    " image_key max_images_per_prompt",
    "vllm": "num_engines=vllm_num_engines tensor_parallel_size=vllm_tensor_parallel_size"
    " sync_backend=vllm_sync_backend sync_with_ray=vllm_sync_with_ray enable_prefix_caching enforce_eager"
    " enable_sleep=vllm_enable_sleep gpu_memory_utilization=vllm_gpu_memory_utilization",
    "algo": "advantage.estimator=advantage_estimator advantage.gamma=gamma advantage.lambd=lambd"
    " advantage.no_std_norm=no_advantage_std_norm kl.target=kl_target kl.horizon=kl_horizon kl.init_coef=init_kl_coef"
    " kl.estimator=kl_estimator kl.use_loss=use_kl_loss dynamic_filtering_enable=dynamic_filtering"
    " dynamic_filtering_range=dynamic_filtering_reward_range"
    " advantage.is_correction_threshold=vllm_is_truncated_threshold",
    "actor": "num_nodes=actor_num_nodes num_gpus_per_node=actor_num_gpus_per_node adam.lr=actor_learning_rate",
    "critic": "num_nodes=critic_num_nodes num_gpus_per_node=critic_num_gpus_per_node adam.lr=critic_learning_rate"
    " model_name_or_path=critic_pretrain value_clip freezing_steps=freezing_actor_steps save_value_network",
    "ref": "num_nodes=ref_num_nodes num_gpus_per_node=ref_num_gpus_per_node model_name_or_path=ref_pretrain"
    " offload=ref_offload",
    "reward": "num_nodes=reward_num_nodes num_gpus_per_node=reward_num_gpus_per_node"
    " model_name_or_path=reward_pretrain remote_url=remote_rm_url normalize_enable=normalize_reward"
    " clip_range=reward_clip_range overlong_buffer_len overlong_penalty_factor stop_properly_penalty_coef",
}
"""Flat flags by the group of their dotted flag: `new=old`, or one name if both are the same.

In PPO, `model` is `actor`, and an optimizer's flags are those of `actor` and `critic`.
"""


def _aliases(trainer: str) -> dict[str, tuple[str, ...]]:
    """Flat flags of a trainer, with the dotted flags that they set."""
    flags: dict[str, tuple[str, ...]] = {}
    groups = {"model": ["actor"], "": ["actor", "critic"]} if trainer == PPO else {}
    for group, names in _ALIASES.items():
        for new, _, old in (name.partition("=") for name in names.split()):
            flags[old or new] = tuple(f"{prefix}.{new}".lstrip(".") for prefix in groups.get(group, [group]))
    return flags if trainer == PPO else {**flags, "learning_rate": ("adam.lr",)}


ALIASES = {trainer: _aliases(trainer) for trainer in TRAINERS}


# -- facts of a launch -------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {
    "algo.advantage.estimator": "gae",
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.dynamic_filtering_range": [0, 1],
    "algo.kl.estimator": "k1",
    "algo.kl.init_coef": 0.01,
    "actor.policy_loss_type": "ppo",
    "data.max_len": 2048,
    "train.batch_size": 128,
    "train.micro_batch_size": 8,
    "train.async_queue_size": 1,
    "train.max_tokens_per_gpu": 16192,
    "rollout.batch_size": 1024,
    "rollout.micro_batch_size": 1,
    "rollout.n_samples_per_prompt": 1,
    "ds.zero_stage": 2,
    "ds.ring_attn_size": 1,
    "ds.tensor_parallel_size": 1,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 1,
    **{f"{role}.num_nodes": 1 for role in ("actor", "critic", "ref", "reward")},
    **{f"{role}.num_gpus_per_node": 8 for role in ("actor", "critic", "ref", "reward")},
    GPUS: 8,
}
OF_TRAINER: dict[str, dict[str, Any]] = {
    PPO: {"train.micro_batch_size": 1, "data.input_key": "input"},
    SFT: {"data.input_key": "input", "train.max_epochs": 2, "adam.lr": 5e-6},
    DPO: {"data.max_len": 512, "adam.lr": 1e-5},
    RM: {"data.max_len": 512, "train.micro_batch_size": 1, "adam.lr": 9e-6},
}
OF_FLAT = {"train.micro_batch_size": 4, "rollout.micro_batch_size": 8}
"""Defaults of train_ppo_ray up to 0.9."""
SFT_TEMPLATE = "User: {}\nAssistant: "


def fact(source: Mapping[str, Any], name: str) -> Any:
    """Value of a flag, or OpenRLHF's default."""
    if name in source:
        return source[name]
    trainer = source[TRAINER]
    if trainer == PPO and source.get(FLAT) and name in OF_FLAT:
        return OF_FLAT[name]
    return OF_TRAINER[trainer].get(name, DEFAULTS.get(name))


def positive(source: Mapping[str, Any], name: str) -> int:
    """A flag that counts something: at least 1."""
    value = fact(source, name)
    return max(int(value), 1) if isinstance(value, (int, float)) else 1


def kl_coef(source: Mapping[str, Any]) -> float:
    """Weight of the KL to the reference; 0 without one."""
    return max(float(fact(source, "algo.kl.init_coef")), 0.0) if source[TRAINER] == PPO else 0.0


def has_lora(source: Mapping[str, Any]) -> bool:
    """True if adapters are trained."""
    return bool(source.get("ds.lora.rank"))


def has_critic(source: Mapping[str, Any]) -> bool:
    """True if the estimator needs values."""
    return bool(source[TRAINER] == PPO and fact(source, "algo.advantage.estimator") == "gae")


def has_reference(source: Mapping[str, Any]) -> bool:
    """True if the run has a reference model. With LoRA the base model is the reference."""
    if source[TRAINER] == DPO:
        return not has_lora(source) or bool(reference_model(source))
    return kl_coef(source) > 0 and not has_lora(source)


def reference_model(source: Mapping[str, Any]) -> str:
    """Model of DPO's reference if it is not the policy's own; otherwise empty."""
    model = source.get("ref.model_name_or_path") or ""
    return "" if model == source.get("model.model_name_or_path") else str(model)


def has_reward_model(source: Mapping[str, Any]) -> bool:
    """True if a reward model of the run scores responses."""
    other = source.get("reward.remote_url") or source.get("train.agent_func_path")
    return bool(source.get("reward.model_name_or_path")) and not other


def evaluates(source: Mapping[str, Any]) -> bool:
    """True if there are held-out rows."""
    return bool(source.get("eval.dataset"))


def is_gspo(source: Mapping[str, Any]) -> bool:
    """True if ratios are those of sequences."""
    return bool(fact(source, "actor.policy_loss_type") == "gspo")


def scored(source: Mapping[str, Any]) -> list[str]:
    """Dotted names of roles that compute logprobs, values or scores of rollouts."""
    roles = {"reference": has_reference, "critic": has_critic, f"rewards.{REWARD}": has_reward_model}
    return ["actor_train", *(role for role, exists in roles.items() if exists(source))]


def columns(source: Mapping[str, Any]) -> list[str]:
    """Dotted names of the `data_args` of the run."""
    return [f"{POLICY[source[TRAINER]]}.data_args", *(["validation.data_args"] if evaluates(source) else [])]


def placement(source: Mapping[str, Any]) -> dict[str, range]:
    """Slots of each role, by dotted name."""
    policy = POLICY[source[TRAINER]]
    if source[TRAINER] != PPO:
        both = range(positive(source, GPUS))
        return {policy: both, "reference": both} if source[TRAINER] == DPO and has_reference(source) else {policy: both}
    together, ahead = bool(source.get("train.colocate_all")), bool(source.get("train.async_enable"))
    sizes = {
        role: positive(source, f"{role}.num_nodes") * positive(source, f"{role}.num_gpus_per_node") for role in GROUPS
    }
    slots: dict[str, range] = {policy: range(sizes["actor"])}
    end = sizes["actor"]

    def place(role: str, size: int, beside: str | None) -> None:
        nonlocal end
        start = slots[beside].start if beside in slots else end
        slots[role] = range(start, start + size)
        end = max(end, start + size)

    policy_slots = policy if together else None
    if has_reference(source):
        place("reference", sizes["ref"], policy if source.get("train.colocate_actor_ref") else policy_slots)
    if has_critic(source):
        place("critic", sizes["critic"], policy_slots)
    if has_reward_model(source):
        beside = "critic" if source.get("train.colocate_critic_reward") else None
        place(f"rewards.{REWARD}", sizes["reward"], policy_slots or beside)
    engines = positive(source, "vllm.num_engines") * positive(source, "vllm.tensor_parallel_size")
    place("actor_infer", engines, policy if together and not ahead else None)
    return slots


GROUPS = {"actor": "actor_train", "critic": "critic", "ref": "reference", "reward": f"rewards.{REWARD}"}
"""Roles by OpenRLHF's names."""


def replica(source: Mapping[str, Any]) -> int:
    """Ranks that train one sequence together."""
    return positive(source, "ds.ring_attn_size") * positive(source, "ds.tensor_parallel_size")


def accumulation(source: Mapping[str, Any], role: str) -> tuple[int, int, str]:
    """Sequences per micro-batch, micro-batches per optimizer step, and the arithmetic."""
    ranks, batch = len(placement(source)[role]), positive(source, "train.batch_size")
    parallel = max(ranks // replica(source), 1)
    micro = 1 if source.get("train.dynamic_batch_enable") else positive(source, "train.micro_batch_size")
    steps, rest = divmod(batch, parallel * micro)
    how = f"train.batch_size {batch} = {steps} × {micro} × data parallel {parallel}"
    return micro, max(steps, 1), f"{how}, with a remainder of {rest}, which DeepSpeed refuses" if rest else how


def lengths(source: Mapping[str, Any]) -> tuple[int, int, str]:
    """`prompt_length`, `response_length`, and how they differ from OpenRLHF's limits."""
    total = positive(source, "data.max_len")
    if source[TRAINER] != PPO:
        prompt = total if source[TRAINER] == RM else max(total - 3, 1)
        return prompt, total, f"OpenRLHF truncates prompt and response together to {total} tokens, here the response"
    if "prompt_max_len" in source or "generate_max_len" in source:
        return source.get("prompt_max_len", 1024), source.get("generate_max_len", 1024), ""
    if new := source.get("rollout.max_new_tokens"):
        return (
            max(total - int(new), 1),
            int(new),
            "OpenRLHF truncates longer prompts; here they are dropped and counted",
        )
    return total, total, f"OpenRLHF limits prompt and response together to {total} tokens: set response_length"


def longest(source: Mapping[str, Any]) -> Any:
    """Length from which a response has the whole overlong penalty."""
    if "prompt_max_len" in source or "generate_max_len" in source:
        return source.get("generate_max_len", 1024)
    return source.get("rollout.max_new_tokens") or fact(source, "data.max_len")


def dynamic(source: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Roles with micro-batches filled by tokens, and their keys."""
    if not source.get("train.dynamic_batch_enable"):
        return []
    train = positive(source, "train.max_tokens_per_gpu") * replica(source)
    infer = int(source.get("rollout.max_tokens_per_gpu") or 0) * replica(source) or train
    scores = {"use_dynamic_batching_in_infer": True, "max_tokens_per_microbatch_in_infer": infer}
    trains = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": train}
    return [(role, scores | (trains if role in ("actor_train", "critic") else {})) for role in scored(source)]


def strategy(source: Mapping[str, Any], *, trains: bool) -> tuple[str, dict[str, Any]]:
    """Name and keys of a strategy. FSDP2 splits sequences and layers over ranks, DeepSpeed does not."""
    kind = "train" if trains else "infer"
    offloads = trains and bool(source.get("ds.adam_offload"))
    if replica(source) > 1:
        names = {"tensor_model_parallel_size": "ds.tensor_parallel_size", "ring_size": "ds.ring_attn_size"}
        sizes: dict[str, Any] = {name: size for name, flag in names.items() if (size := positive(source, flag)) > 1}
        return f"fsdp2_{kind}", sizes | ({"offload_policy": True} if offloads else {})
    stage = int(fact(source, "ds.zero_stage"))
    zero: dict[str, Any] = {"stage": stage if trains or stage == 3 else 0}
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu"}
    if trains and source.get("ds.overlap_comm"):
        zero["overlap_comm"] = True
    return f"deepspeed_{kind}", {"zero_optimization": zero}


def computed(source: Mapping[str, Any]) -> dict[str, Any]:
    """Values that follow from several flags, by dotted key."""
    prompt, response, _ = lengths(source)
    values: dict[str, Any] = {"prompt_length": prompt, "response_length": response}
    for role, slots in placement(source).items():
        values[f"{role}.device_mapping"] = f"list(range({slots.start},{slots.stop}))"
        if role != "actor_infer":
            trains = role in (POLICY[source[TRAINER]], "critic")
            values[f"{role}.strategy_args.strategy_name"], keys = strategy(source, trains=trains)
            values |= {f"{role}.strategy_args.strategy_config.{name}": value for name, value in keys.items()}
            if trains:
                micro, steps, _ = accumulation(source, role)
                values[f"{role}.training_args.per_device_train_batch_size"] = micro
                values[f"{role}.training_args.gradient_accumulation_steps"] = steps
    if source[TRAINER] == PPO:
        values |= {f"{role}.infer_batch_size": fact(source, "rollout.micro_batch_size") for role in scored(source)}
        values |= {f"{role}.{name}": value for role, keys in dynamic(source) for name, value in keys.items()}
    return values


def files(value: Any) -> list[str] | None:
    """Names of data files; None if one of them is not a file of rows."""
    names = [name.strip() for name in str(value).split(",")]
    known = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
    return names if all(Path(name).suffix.lower() in known and "@" not in name for name in names) else None


def num_rows(source: Mapping[str, Any]) -> int | None:
    """Rows of the data files; None if they cannot be counted from here."""
    names = files(source.get("data.prompt_dataset") or source.get("data.dataset") or "")
    return count_rows(names, source.get("data.max_samples")) if names else None


def trackers(source: Mapping[str, Any]) -> list[str]:
    """Trackers that OpenRLHF writes to."""
    names = {"logger.wandb.key": "wandb", "logger.tensorboard_dir": "tensorboard"}
    return [name for flag, name in names.items() if source.get(flag)]


def estimator(source: Mapping[str, Any]) -> str:
    """OpenRLHF's name of the estimator."""
    return str(fact(source, "algo.advantage.estimator"))


def correction(source: Mapping[str, Any]) -> tuple[str, str, list[Any]]:
    """Level, mode and bounds of the correction for the engine's logprobs."""
    level = str(source.get("algo.advantage.is_correction_level", "off"))
    mode = str(source.get("algo.advantage.is_correction_mode", "mask"))
    if source.get("enable_vllm_is_correction") or source.get("algo.advantage.is_correction_enable"):
        flat = source.get("vllm_is_correction_type", "tis")
        kind = str(source.get("algo.advantage.is_correction_type", flat))
        levels = {"tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")}
        level, mode = levels.get(kind, ("token", kind))
    bounds = list(fact(source, "algo.advantage.is_correction_threshold"))
    return level, mode, [0.0, *bounds] if len(bounds) == 1 else bounds


def steps_per_epoch(source: Mapping[str, Any]) -> int | None:
    """Steps of one pass over the data; None if the rows cannot be counted from here."""
    rows, name = num_rows(source), "rollout.batch_size" if source[TRAINER] == PPO else "train.batch_size"
    return None if rows is None else max(rows // positive(source, name), 1)


def positive_steps(source: Mapping[str, Any]) -> int | None:
    """Steps between evaluations of PPO; None if they are off."""
    value = source.get("eval.steps", -1)
    return int(value) if value >= 1 else None


def losses(source: Mapping[str, Any]) -> list[str]:
    """`loss_type` of DPO."""
    loss = "ipo_sum" if source.get("model.ipo_enable") else "sigmoid"
    return [loss, "sft"] if (source.get("model.nll_loss_coef") or 0) > 1e-8 else [loss]
