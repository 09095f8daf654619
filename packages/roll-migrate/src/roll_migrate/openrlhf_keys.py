"""Conversion rules for the flags of OpenRLHF's trainers. Update them here if keys change on either side.

Meanings are those of the code of OpenRLHF 0.11.2 that reads the flags; that of older flags is in 0.7 to 0.10.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_migrate import openrlhf_flags as launch
from roll_migrate.openrlhf_flags import DPO, POLICY, PPO, REWARD, RM, SFT, TRAINER
from roll_migrate.rules import (
    Condition,
    Convert,
    Default,
    Key,
    KeyRule,
    Outcome,
    always,
    convert_single,
    dead,
    if_on,
    keys,
    nested,
    only,
    refused,
    to,
    unneeded,
    unsupported,
)
from roll_migrate.shared_rules import experiment, first_row, frequency, lora_dropout, python_function, track_with

if TYPE_CHECKING:
    from collections.abc import Mapping

# -- kinds of rules ----------------------------------------------------------------------------------------------------


def _column(name: str) -> KeyRule:
    """Write the value at `name` of each `data_args`."""
    return nested(lambda value, key: key.renamed({f"{role}.{name}": value for role in launch.columns(key.source)}))


def _images(value: Any, key: Key) -> Outcome:
    """The column of images, which OpenRLHF reads only with a maximum per prompt."""
    if not _has_images(key.source):
        return key.unneeded("data.max_images_per_prompt is 0")
    return key.renamed({f"{role}.images": value for role in launch.columns(key.source)})


def _has_images(source: Mapping[str, Any]) -> bool:
    return bool(source.get("data.max_images_per_prompt"))


def _frozen(value: Any, key: Key) -> Outcome:
    if not _has_images(key.source):
        return key.unneeded("the rows have text alone")
    freeze = ["vision", "projector"] if value else []
    return key.changed({"actor_train.model_args.freeze": freeze}, "OpenRLHF's encoder includes the projector")


def _max_images(value: Any, key: Key) -> Outcome:
    if not value:
        return key.unneeded("the rows have text alone")
    column = key.source.get("data.image_key") or "images"
    writes = {f"{role}.max_images": value for role in launch.columns(key.source)}
    writes |= {f"{role}.images": column for role in launch.columns(key.source)}
    return key.changed(writes, "rows with more images are dropped and counted")


def _computed(*parts: str) -> KeyRule:
    """Write the values that this flag and others determine together: those whose keys have one of `parts`."""

    def convert(value: Any, key: Key) -> Outcome:
        source = key.source
        writes = {path: item for path, item in launch.computed(source).items() if any(part in path for part in parts)}
        if not writes:
            return key.unneeded("no role reads it")
        if parts[0] == "_length" and (note := launch.lengths(source)[2]):
            return key.differs(note, writes)
        by_batch = parts[0] == "gradient_accumulation"
        return key.changed(writes, launch.accumulation(source, POLICY[source[TRAINER]])[2] if by_batch else "")

    return nested(convert)


# -- values: models, data, lengths -------------------------------------------------------------------------------------


def _files(target: str, split: str) -> Convert:
    def convert(value: Any, key: Key) -> Outcome:
        names = launch.files(value) or [
            launch.hub_name(name.strip(), str(key.get(split) or "train")) for name in str(value).split(",")
        ]
        if not all(names):
            return key.refused("files and data sets of the Hub are read: save it as .jsonl or .parquet")
        names = [os.path.expanduser(name) for name in names]
        return key.renamed({f"{target}.data_args.file_name": names if len(names) > 1 else names[0]})

    return convert


def _max_samples(value: Any, key: Key) -> Outcome:
    if value >= 1e6:
        return key.unneeded("OpenRLHF's default: all rows")
    roles = launch.columns(key.source) if key.source[TRAINER] == PPO else launch.columns(key.source)[:1]
    return key.renamed({f"{role}.max_samples": int(value) for role in roles})


def _input(value: Any, key: Key) -> Outcome:
    """The prompt's column: chats if the chat template is applied and no other column has the response."""
    source, multiturn = key.source, key.source.get("data.multiturn")
    if not source.get("data.apply_chat_template"):
        return _column("prompt")(value, key)
    if source[TRAINER] == SFT and source.get("data.output_key"):
        if multiturn:
            return key.refused("a chat and its last response in two columns: write both to one")
        return replace(_column("prompt")(value, key), note="text; chats in two columns are not supported")
    if _type_in_first_row(source, str(value)) is str:
        return _column("prompt")(value, key)
    outcome = _column("messages")(value, key)
    if source[TRAINER] == SFT and not multiturn:
        return replace(outcome, status="differs", note="OpenRLHF trains only the last response; here all are trained")
    return replace(outcome, note="its values are chats; for text set data_args.prompt instead")


def _type_in_first_row(source: Mapping[str, Any], column: str) -> type | None:
    """Type of a column in the first row of the data; None if it cannot be read from here."""
    names = launch.files(source.get("data.prompt_dataset") or source.get("data.dataset") or "")
    row = first_row(names[0]) if names else None
    return None if row is None else type(row.get(column))


def _label(value: Any, key: Key) -> Outcome:
    if not str(key.get("reward.remote_url") or "").split(",")[0].endswith(".py"):
        return key.unneeded("rewards get all columns of a row")
    return key.renamed(f"rewards.{REWARD}.label")


def _input_template(value: Any, key: Key) -> Outcome:
    if "{}" not in value:
        return key.unneeded("without {} it has no effect")
    if key.get("data.apply_chat_template"):
        return key.unneeded("the chat template applies")
    if key.source[TRAINER] in (DPO, RM) or any(begin in value for begin in ("{{", "{%", "{#")):
        return key.refused("the prompt is not formatted: write data_args.columns")
    column = str(launch.fact(key.source, "data.input_key"))
    template = value.replace("{}", f"{{{{ row[{column!r}] }}}}")
    return key.changed({f"{role}.columns": {column: template} for role in launch.columns(key.source)})


# -- values: batches, optimizer, placement -----------------------------------------------------------------------------


def _optimizer(prefix: str, role: str) -> dict[str, Convert]:
    """Rules of an optimizer's flags."""
    args = f"{role}.training_args"

    def betas(value: Any, key: Key) -> Outcome:
        return key.renamed({f"{args}.adam_beta{i}": beta for i, beta in enumerate(value, 1)})

    def floor(value: Any, key: Key) -> Outcome:
        if (key.get(f"{prefix}lr_scheduler") or "cosine_with_min_lr") != "cosine_with_min_lr":
            return key.unneeded("only cosine_with_min_lr reads it")
        return key.renamed(f"{args}.lr_scheduler_kwargs.min_lr_rate")

    def clip(value: Any, key: Key) -> Outcome:
        if prefix != "critic.":
            return key.renamed("max_grad_norm")
        policy = launch.fact(key.source, "actor.max_norm")
        policy = 1.0 if policy is None else policy
        if value == policy:
            return key.unneeded("max_grad_norm applies to every trained role")
        return key.refused(f"the critic has the policy's max_grad_norm {policy}")

    rules: dict[str, Convert] = {
        "optim": refused("only AdamW is supported", "adam"),
        **keys(
            "muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov",
            unneeded("it is for Muon: `optim` decides"),
        ),
        "adam.lr": to(f"{args}.learning_rate"),
        "adam.betas": nested(betas),
        "adam.eps": to(f"{args}.adam_epsilon"),
        "adam.weight_decay": to(f"{args}.weight_decay"),
        "lr_scheduler": to(f"{args}.lr_scheduler_type"),
        "lr_warmup_ratio": to(f"{args}.warmup_ratio"),
        "min_lr_ratio": floor,
        "max_norm": clip,
    }
    return {f"{prefix}{name}": rule for name, rule in rules.items()}


def _dtype(value: Any, key: Key) -> Outcome:
    if value == "bf16":
        return key.unneeded("bf16 is the default")
    return key.renamed({f"{role}.model_args.dtype": value for role in launch.placement(key.source)})


def _lora(name: str) -> Convert:
    def convert(value: Any, key: Key) -> Outcome:
        roles = [POLICY[key.source[TRAINER]], *(["critic"] if launch.has_critic(key.source) else [])]
        option = value[0] if isinstance(value, list) and len(value) == 1 else value
        return key.renamed({f"{role}.model_args.{name}": option for role in roles})

    rule: Convert = only(launch.has_lora, "ds.lora.rank is 0", nested(convert))
    return rule


def _load_in_4bit(value: Any, key: Key) -> Outcome:
    if not value:
        return key.unneeded("models are not quantized")
    if not launch.has_lora(key.source):
        return key.refused("only models below adapters are quantized")
    note = "needs strategy_name: fsdp2_train; scales are not quantized too"
    return key.changed({"{role}.model_args.load_in_4bit": True}, note)


# -- values: algorithm -------------------------------------------------------------------------------------------------

ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"adv_estimator": "gae"},
    "reinforce": {"adv_estimator": "reinforce++"},
    "rloo": {"adv_estimator": "rloo"},
    "reinforce_baseline": {"adv_estimator": "reinforce++_baseline"},
    "group_norm": {"adv_estimator": "grpo"},
    "dr_grpo": {"adv_estimator": "reinforce", "norm_mean_type": "group"},
    "flash_reinforce": {"adv_estimator": "reinforce", "norm_mean_type": "batch"},
}
WHITENED = ("gae", "reinforce", "reinforce_baseline")
BASELINES = ("rloo", "reinforce_baseline", "group_norm")
"""Estimators that subtract a group's baseline after `reward_clip` here, and before it in OpenRLHF."""


def _estimator(value: Any, key: Key) -> Outcome:
    if value not in ESTIMATORS:
        return key.refused("not an estimator of OpenRLHF 0.11")
    outcome = key.changed(ESTIMATORS[value])
    return replace(outcome, status="kept") if ESTIMATORS[value] == {"adv_estimator": value} else outcome


def _no_std(value: Any, key: Key) -> Outcome:
    if launch.estimator(key.source) not in WHITENED:
        return key.unneeded(f"{launch.estimator(key.source)} does not whiten advantages")
    return key.refused("whitening always divides by the deviation")


def _gamma(value: Any, key: Key) -> Outcome:
    if launch.estimator(key.source) not in ("gae", "reinforce"):
        return key.dead(f"OpenRLHF uses 1 for {launch.estimator(key.source)}")
    return key.renamed("gamma")


def _clip_range(value: Any, key: Key) -> Outcome:
    low, high = value
    if -low != high or high <= 0:
        return key.refused("reward_clip is symmetric")
    if launch.estimator(key.source) in BASELINES:
        note = "here rewards are clipped before the group's baseline, in OpenRLHF after it"
        return key.differs(note, {"reward_clip": high})
    return key.changed({"reward_clip": high})


def _kl_coef(value: Any, key: Key) -> Outcome:
    if launch.kl_coef(key.source) <= 0:
        return key.unneeded("there is no KL penalty, as by default here")
    return key.renamed("kl_loss_coef" if key.get("algo.kl.use_loss") else "init_kl_coef")


def _kl_estimator(value: Any, key: Key) -> Outcome:
    in_loss = key.get("algo.kl.use_loss")
    if in_loss and key.get("algo.kl.unbiased_gradient"):
        return key.unneeded("with unbiased_gradient it changes only the logged value")
    return key.renamed("kl_loss_penalty" if in_loss else "kl_penalty")


def _unbiased(value: Any, key: Key) -> Outcome:
    if not key.get("algo.kl.use_loss"):
        return key.dead("algo.kl.use_loss is off")
    return key.changed({"kl_loss_unbiased": True, "kl_loss_penalty": "k3"}, "k3 × ratio has this gradient")


def _kl_target(value: Any, key: Key) -> Outcome:
    if key.get("algo.kl.use_loss"):
        return key.refused("target_kl adapts the KL in the reward, not that in the loss")
    return key.renamed("target_kl")


def _eps_clip(value: Any, key: Key) -> Outcome:
    if key.get("actor.eps_clip_low_high"):
        return key.dead("eps_clip_low_high takes precedence")
    return _eps_clip_range([value, value], key) if launch.is_gspo(key.source) else key.renamed("pg_clip")


def _eps_clip_range(value: Any, key: Key) -> Outcome:
    low, high = value
    if launch.is_gspo(key.source):
        return key.renamed({"pg_options.clip_low": low, "pg_options.clip_high": high})
    return key.renamed({"pg_clip_low": low, "pg_clip_high": high}, "clip-higher")


def _dual_clip(value: Any, key: Key) -> Outcome:
    return key.refused("gspo has no dual clip") if launch.is_gspo(key.source) else key.renamed("dual_clip")


def _policy_loss(value: Any, key: Key) -> Outcome:
    if value not in ("ppo", "gspo"):
        return key.refused("not a policy loss of OpenRLHF 0.11")
    return replace(key.renamed("pg_variant"), status="kept") if value == "gspo" else key.unneeded("")


def _aggregation(value: Any, key: Key) -> Outcome:
    if launch.is_gspo(key.source):
        return key.dead("gspo is always seq-mean-token-mean")
    if value != "token-mean" and key.get("algo.kl.use_loss") and launch.kl_coef(key.source):
        return key.differs("OpenRLHF's KL in the loss stays token-mean", "loss_agg_mode")
    return key.renamed("loss_agg_mode")


def _warmup(value: Any, key: Key) -> Outcome:
    if value < 0:
        return key.unneeded("it is off")
    note = "OpenRLHF's first step is 0, and it trains the policy after step N"
    return key.changed({"critic_warmup": int(value) + 1}, note)


UNBOUNDED = 1e9
"""Upper bound of weights that OpenRLHF does not bound."""


def _correction(value: Any, key: Key) -> Outcome:
    level, mode, bounds = launch.correction(key.source)
    if level == "off":
        return key.unneeded("it is off")
    if launch.is_gspo(key.source):
        return key.refused("gspo then compares with the engine's logprobs")
    if key.get("algo.advantage.is_correction_gating") not in (None, "ratio"):
        return key.refused("only ratios are gated, see train_infer_correction")
    if len(bounds) != 2 or (level, mode) not in (("token", "clip"), ("token", "mask"), ("seq", "mask")):
        return key.refused(f"OpenRLHF refuses level {level} with mode {mode} and bounds {bounds}")
    weight: dict[str, Any] = {"enabled": True, "weight_type": "token"}
    target, (low, high) = "train_infer_correction.is_weight", bounds
    if level == "seq":
        weight |= {"lower_bound": 0.0, "upper_bound": UNBOUNDED}
        gate = {"enabled": True, "agg_type": "geometric", "ratio_low": low, "ratio_high": high}
        writes = {target: weight, "train_infer_correction.filters": [gate]}
        return key.differs("filters remove tokens from the loss's denominator, too", writes)
    weight |= {"lower_bound": low, "upper_bound": high} | ({"outside": "mask"} if mode == "mask" else {})
    if key.get("enable_vllm_is_correction") and "algo.advantage.is_correction_threshold" not in key.source:
        note = f"bounds {low:g} and {high:g} are the default since 0.9; before, 0 and 2"
        return key.differs(note, {target: weight})
    return key.changed({target: weight})


def _filtering(value: Any, key: Key) -> Outcome:
    low, high = launch.fact(key.source, "algo.dynamic_filtering_range")
    if not key.get("algo.dynamic_filtering_enable"):
        return key.unneeded("algo.dynamic_filtering_enable is off")
    filters = {"type": "mean_filter", "filter_args": {"threshold_down": low, "threshold_up": high}}
    note = "OpenRLHF compares `scores` and samples without limit; see dynamic_sampling_max_tries, 10 batches"
    return key.differs(note, {f"rewards.{REWARD}.query_filter_config": filters})


def _overlong(value: Any, key: Key) -> Outcome:
    if value <= 0 or int(value) != value:
        return key.refused("l_cache counts tokens")
    penalty = "soft_overlong_penalty"
    return key.changed({f"{penalty}.l_max": launch.longest(key.source), f"{penalty}.l_cache": int(value)})


def _remote(value: Any, key: Key) -> Outcome:
    file = str(value).split(",")[0]
    if key.get("train.agent_func_path"):
        return key.dead("train.agent_func_path takes precedence")
    if not file.endswith(".py"):
        return key.refused("a server's replies differ: see the reward http, docs/rewards.md")
    outcome = python_function(key, "reward_func", REWARD, "OpenRLHF", file)
    return replace(outcome, writes=(*outcome.writes, (("rewards", REWARD, "signature"), "openrlhf")))


def _reward_model(value: Any, key: Key) -> Outcome:
    if not launch.has_reward_model(key.source):
        return key.unneeded("reward.remote_url or train.agent_func_path scores responses")
    settings = {"reward": "model", "model_args.model_name_or_path": value, "input": "tokens"}
    writes = {f"rewards.{REWARD}.{name}": setting for name, setting in settings.items()}
    return key.changed(writes, "it scores the sampled tokens")


def _normalized(value: Any, key: Key) -> Outcome:
    if not launch.has_reward_model(key.source) and not key.get("critic.model_name_or_path"):
        return key.unneeded("it uses mean and std of a reward model's config.json")
    return key.refused("remove it if config.json of the reward model has no mean and std, by which OpenRLHF normalizes")


def _nll(value: Any, key: Key) -> Outcome:
    if value <= 1e-8:
        return key.unneeded("it is off")
    writes = {"loss_type": launch.losses(key.source), "loss_weights": [1.0, value]}
    return key.differs("a mean over sequences in OpenRLHF, over tokens here", writes)


def _margin(value: Any, key: Key) -> Outcome:
    if key.get("model.loss_type") not in (None, "sigmoid"):
        return key.dead("the loss logexp has no margin")
    return key.changed({"margin": "margin"}, "a column that each row needs")


# -- values: the run ---------------------------------------------------------------------------------------------------


def _ahead(value: Any, key: Key) -> Outcome:
    if not key.get("train.async_enable"):
        return key.unneeded("train.async_enable is off")
    note = "OpenRLHF publishes weights between two batches; here responses continue with the new weights"
    return key.differs(note, {"async_generation_ratio": float(launch.positive(key.source, "train.async_queue_size"))})


def _generated(value: Any, key: Key) -> Outcome:
    if not value or value == launch.positive(key.source, "rollout.batch_size"):
        return key.unneeded("a batch has rollout_batch_size prompts")
    return key.differs("here generation runs ahead by async_generation_ratio batches")


def _episodes(value: Any, key: Key) -> Outcome:
    steps, size = launch.steps_per_epoch(key.source), launch.positive(key.source, "rollout.batch_size")
    if steps is None:
        note = f"rlvr counts steps: set max_steps to {value} × rows of the data / rollout_batch_size {size}"
        return key.lacking(f"{note}; the rows cannot be counted from here", {"max_steps": "???"})
    rows = launch.num_rows(key.source)
    note = f"{value} × ({rows} rows // {size} prompts per batch); less if longer prompts are dropped"
    return key.changed({"max_steps": max(int(value), 1) * steps}, note)


def _epochs(value: Any, key: Key) -> Outcome:
    return key.renamed("ppo_epochs" if key.source[TRAINER] == PPO else "{role}.training_args.num_train_epochs")


def _eval_steps(value: Any, key: Key) -> Outcome:
    if not launch.evaluates(key.source):
        return key.unneeded("there is no eval.dataset")
    if value >= 1:
        return key.renamed("eval_steps")
    if key.source[TRAINER] == PPO:
        return key.changed({"eval_steps": 0}, "-1 is off")
    steps = launch.steps_per_epoch(key.source)
    if steps is None:
        return key.differs("OpenRLHF evaluates after each epoch; here every eval_steps, 10 by default")
    return key.changed({"eval_steps": steps}, "once per epoch")


def _best(value: Any, key: Key) -> Outcome:
    if value == "none" or not launch.evaluates(key.source) or launch.positive_steps(key.source) is None:
        return key.unneeded("no best checkpoint is saved by default")
    return key.differs("over all held-out rows", {"save_best": "val/score/mean"})


def _wandb(name: str) -> Convert:
    target = f"tracker_kwargs.wandb.{name}"

    def convert(value: Any, key: Key) -> Outcome:
        used = "wandb" in launch.trackers(key.source) and "wandb" in key.trackers
        if name != "name":
            return key.renamed(target) if used else key.unneeded("wandb is not used")
        outcome = experiment(key, "openrlhf")
        return replace(outcome, writes=(*outcome.writes, *(key.renamed(target).writes if used else ())))

    return convert


def _wandb_key(value: Any, key: Key) -> Outcome:
    outcome = track_with(key, launch.trackers(key.source))
    return replace(outcome, note=f"{outcome.note}; the key is not copied: set WANDB_API_KEY, or log in")


def _tensorboard(value: Any, key: Key) -> Outcome:
    outcome = track_with(key, launch.trackers(key.source))
    if outcome.status == "unsupported":
        return outcome
    return replace(outcome, writes=(*outcome.writes, *key.renamed("tracker_kwargs.tensorboard.log_dir").writes))


# -- tables ------------------------------------------------------------------------------------------------------------

FASTER = unneeded("it does not affect results")
PLACED = unneeded("idle roles are offloaded by is_offload_states")
TOGETHER = unneeded("device_mapping of the roles has it")
MODELS_OWN = refused("the model's own is used")


def _common(model: str) -> dict[str, Convert]:
    """Flags of all trainers. `model` is the prefix of the trained model's flags."""
    return {
        f"{model}model_name_or_path": to("pretrain"),
        f"{model}gradient_checkpointing_enable": unneeded("it is on by default"),
        f"{model}gradient_checkpointing_reentrant": FASTER,
        f"{model}aux_loss_coef": refused(
            "set strategy_config.moe_aux_loss_coeff to it × top-k / layers with experts", 0
        ),
        "train.batch_size": _computed("gradient_accumulation", "per_device_train"),
        "train.micro_batch_size": _computed("gradient_accumulation", "per_device_train"),
        "train.max_epochs": _epochs,
        "train.seed": to("seed", note="the run's seed, also of sampling and initialization", status="differs"),
        "train.full_determinism_enable": unneeded("deterministic kernels are on unless `deterministic` is false"),
        "ckpt.output_dir": to(
            "output_dir", status="differs", note="runs are in output_dir/exp_name/number, with export/"
        ),
        "ckpt.save_steps": frequency("save_steps"),
        "ckpt.max_num": to("max_ckpt_to_keep"),
        "ckpt.max_mem": unsupported("set max_ckpt_to_keep", 1e8, float("inf")),
        "ckpt.load_enable": lambda value, key: key.changed(
            {"resume_from_checkpoint": "auto"}, "checkpoints of OpenRLHF cannot be read"
        ),
        **keys("ckpt.path ckpt.save_hf ckpt.disable_ds", unneeded("checkpoints resume runs, and export/ is the model")),
        "eval.dataset": _files("validation", "eval.split"),
        "eval.steps": _eval_steps,
        **keys(
            "eval.split data.dataset_split data.prompt_split",
            unneeded("part of the names of data sets"),
        ),
        "logger.logging_steps": to("logging_steps"),
        "logger.wandb.key": _wandb_key,
        "logger.wandb.org": _wandb("entity"),
        "logger.wandb.group": _wandb("group"),
        "logger.wandb.project": _wandb("project"),
        "logger.wandb.run_name": _wandb("name"),
        "logger.tensorboard_dir": _tensorboard,
        "data.max_len": _computed("_length"),
        "data.max_samples": _max_samples,
        "data.apply_chat_template": unneeded("data_args.template is native"),
        "data.input_template": _input_template,
        "data.dataloader_num_workers": FASTER,
        "data.disable_fast_tokenizer": MODELS_OWN,
        **keys(
            "ds.zero_stage ds.adam_offload ds.overlap_comm ds.ring_attn_size ds.tensor_parallel_size",
            _computed("strategy_args"),
        ),
        "ds.param_dtype": _dtype,
        "ds.grad_accum_dtype": refused("gradients accumulate in fp32", "fp32"),
        "ds.load_in_4bit": _load_in_4bit,
        "ds.lora.rank": _lora("lora_rank"),
        "ds.lora.alpha": _lora("lora_alpha"),
        "ds.lora.target_modules": _lora("lora_target"),
        "ds.lora.dropout": lambda value, key: lora_dropout(key, enabled=launch.has_lora(key.source)),
        "ds.packing_samples": unneeded("sequences are always packed"),
        "ds.attn_implementation": unneeded("attn_implementation: auto is the fastest exact one"),
        **keys(
            "ds.deepcompile ds.zpg ds.experts_implementation ds.use_liger_kernel ds.ring_attn_head_stride"
            " ds.use_universal_ckpt local_rank",
            FASTER,
        ),
        "use_ms": unsupported("set MODEL_DOWNLOAD_TYPE=MODELSCOPE for models, and name data modelscope://OWNER/NAME"),
        "bf16": unneeded("bf16 is the default"),
        "flash_attn": unneeded("attn_implementation: auto is the fastest exact one"),
    }


def _tuned() -> dict[str, Convert]:
    """Flags of the trainers without rollouts."""
    return {
        "data.dataset": _files("{role}", "data.dataset_split"),
        "data.dataset_probs": refused("files are not sampled by probabilities: mix the rows"),
        "data.tokenizer_chat_template": MODELS_OWN,
    }


def _pairs() -> dict[str, Convert]:
    """Flags of the trainers on pairs of responses."""
    return {**{f"data.{name}_key": _column(name) for name in ("prompt", "chosen", "rejected")}, "ref.offload": PLACED}


CRITIC = only(
    launch.has_critic,
    "only the estimator gae has a critic",
    {
        **_optimizer("critic.", "critic"),
        "critic.model_name_or_path": to("critic.model_args.model_name_or_path"),
        "critic.value_clip": to("value_clip"),
        "critic.freezing_steps": _warmup,
        "critic.save_value_network": unneeded("a checkpoint has every role; export/ is the policy"),
    },
)
KL = only(
    lambda source: launch.kl_coef(source) > 0,
    "there is no KL penalty",
    {
        "algo.kl.use_loss": to("use_kl_loss"),
        "algo.kl.estimator": _kl_estimator,
        "algo.kl.unbiased_gradient": _unbiased,
        "algo.kl.target": _kl_target,
        "algo.kl.horizon": only(
            lambda source: bool(source.get("algo.kl.target")), "there is no target", to("kl_horizon")
        ),
    },
)
ACTOR: dict[str, Convert] = {
    **_common("actor."),
    **_optimizer("actor.", "actor_train"),
    **CRITIC,
    **KL,
    "algo.kl.init_coef": _kl_coef,
    **{
        f"{group}.{name}": _computed(f"{role}.device_mapping")
        for group, role in launch.GROUPS.items()
        for name in ("num_nodes", "num_gpus_per_node")
    },
    "vllm.num_engines": _computed("actor_infer.device_mapping"),
    **keys("train.colocate_actor_ref train.colocate_critic_reward train.colocate_all", TOGETHER),
    **keys("ref.offload reward.offload vllm.enable_sleep ds.enable_sleep ref_reward_offload", PLACED),
    **{
        f"vllm.{name}": to(f"actor_infer.strategy_args.strategy_config.{name}")
        for name in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")
    },
    **keys("vllm.sync_backend vllm.sync_with_ray", unneeded("the best weight transport is chosen")),
    "actor.eps_clip": _eps_clip,
    "actor.eps_clip_low_high": nested(_eps_clip_range),
    "actor.dual_clip": _dual_clip,
    "actor.policy_loss_type": _policy_loss,
    "actor.loss_agg_mode": _aggregation,
    "actor.entropy_coef": to("entropy_loss_coef"),
    "actor.freeze_visual_encoder": nested(_frozen),
    "algo.advantage.estimator": _estimator,
    "algo.advantage.gamma": _gamma,
    "algo.advantage.lambd": only(launch.has_critic, "only the estimator gae reads it", to("lambd")),
    "algo.advantage.no_std_norm": _no_std,
    "algo.advantage.is_correction_level": _correction,
    **keys(
        "algo.advantage.is_correction_mode algo.advantage.is_correction_gating algo.advantage.is_correction_threshold",
        unneeded("is_correction_level or is_correction_enable has it"),
    ),
    "algo.advantage.is_correction_enable": _correction,
    "algo.advantage.is_correction_type": unneeded("is_correction_enable has it"),
    "enable_vllm_is_correction": _correction,
    **keys("vllm_is_correction_type use_icepop", unneeded("enable_vllm_is_correction has it")),
    **keys("algo.dynamic_filtering_enable algo.dynamic_filtering_range", nested(_filtering)),
    "reward.model_name_or_path": _reward_model,
    "reward.remote_url": _remote,
    "reward.normalize_enable": if_on(nested(_normalized)),
    "reward.clip_range": nested(_clip_range),
    "reward.overlong_buffer_len": _overlong,
    "reward.overlong_penalty_factor": only(
        lambda source: bool(source.get("reward.overlong_buffer_len")),
        "there is no overlong_buffer_len",
        to("soft_overlong_penalty.penalty_factor"),
    ),
    "reward.stop_properly_penalty_coef": refused("rewards of truncated responses are not scaled", 1, 1.0),
    "ds.value_head_prefix": refused("heads are named score", "score"),
    "train.agent_func_path": refused("turns with an environment are the pipeline agentic"),
    "train.async_enable": _ahead,
    "train.async_queue_size": _ahead,
    "train.partial_rollout_enable": to("partial_rollout"),
    **keys(
        "train.dynamic_batch_enable train.max_tokens_per_gpu rollout.max_tokens_per_gpu",
        _computed("_in_train", "_in_infer"),
    ),
    "train.enable_ema": refused("no moving average of the policy is kept"),
    "train.ema_beta": unneeded("enable_ema decides"),
    "train.num_episodes": _episodes,
    "rollout.batch_size": to("rollout_batch_size"),
    "rollout.n_samples_per_prompt": to("num_return_sequences_in_group"),
    "rollout.micro_batch_size": _computed("infer_batch_size"),
    "rollout.max_new_tokens": _computed("_length"),
    "rollout.temperature": to("actor_infer.generating_args.temperature"),
    "rollout.top_p": to("actor_infer.generating_args.top_p"),
    "rollout.vllm_generate_batch_size": _generated,
    "data.prompt_dataset": _files("{role}", "data.prompt_split"),
    "data.prompt_probs": refused("files are not sampled by probabilities: mix the rows"),
    "data.input_key": _input,
    "data.label_key": _label,
    "data.image_key": nested(_images),
    "data.max_images_per_prompt": nested(_max_images),
    "ckpt.best_metric_key": _best,
    "eval.temperature": only(
        launch.evaluates, "there is no eval.dataset", to("validation.generating_args.temperature")
    ),
    "eval.n_samples_per_prompt": only(
        launch.evaluates, "there is no eval.dataset", to("validation.generating_args.num_return_sequences")
    ),
    **keys("prompt_max_len generate_max_len", _computed("_length")),
    **keys("actor_init_on_gpu perf ptx_coef", dead("nothing reads it")),
}
DPO_KEYS: dict[str, Convert] = {
    **_common("model."),
    **_tuned(),
    **_pairs(),
    "ref.model_name_or_path": only(
        launch.reference_model, "it is the policy's own model", to("reference.model_args.model_name_or_path")
    ),
    "model.beta": to("beta"),
    "model.ipo_enable": nested(lambda value, key: key.changed({"loss_type": launch.losses(key.source)})),
    "model.label_smoothing": only(
        lambda source: not source.get("model.ipo_enable"), "ipo_enable: IPO has no smoothing", to("label_smoothing")
    ),
    "model.nll_loss_coef": nested(_nll),
}


RM_KEYS: dict[str, Convert] = {
    **_common("model."),
    **_tuned(),
    **_pairs(),
    "ds.value_head_prefix": refused("heads are named score", "score"),
    "model.margin_loss_enable": nested(_margin),
    "model.loss_type": unneeded("logexp is the same function as sigmoid"),
    "model.compute_fp32_loss_enable": unneeded("losses are always computed in fp32"),
}
SFT_KEYS: dict[str, Convert] = {
    **_common("model."),
    **_tuned(),
    "data.input_key": _input,
    "data.output_key": _column("response"),
    "data.multiturn": unneeded("all responses of a chat are trained"),
    "model.pretrain_mode_enable": refused("rows need prompts and responses"),
    "train_split": dead("nothing reads it"),
}


def _with_flat_flags(trainer: str, rules: dict[str, Convert]) -> dict[str, Convert]:
    """The table of a trainer, with its optimizer and its flat flags."""
    if trainer != PPO:
        rules = {**rules, **_optimizer("", POLICY[trainer])}
    flat = {old: _flat(new, rules) for old, new in launch.ALIASES[trainer].items() if new[0] in rules}
    return {**flat, **rules}


def _flat(names: tuple[str, ...], rules: Mapping[str, Convert]) -> KeyRule:
    """Apply the rules of the dotted flags that a flat flag sets."""

    def convert(value: Any, key: Key) -> Outcome:
        outcomes = [convert_single(rules[name], value, replace(key, path=(name,))) for name in names]
        first = next((outcome for outcome in outcomes if outcome.status != "not needed"), outcomes[0])
        return replace(first, writes=tuple(write for outcome in outcomes for write in outcome.writes))

    return nested(convert)


TABLES: dict[str, dict[str, Convert]] = {
    trainer: _with_flat_flags(trainer, rules)
    for trainer, rules in zip(launch.TRAINERS, (ACTOR, SFT_KEYS, DPO_KEYS, RM_KEYS), strict=True)
}
IMPLIED: dict[str, dict[str, Any]] = {
    PPO: {"train.num_episodes": 1},
    SFT: {"eval.steps": -1, "data.input_template": launch.SFT_TEMPLATE},
    DPO: {"eval.steps": -1},
    RM: {"eval.steps": -1},
}
"""Flags whose default has a result of its own to report, by trainer."""

# -- defaults ----------------------------------------------------------------------------------------------------------


def _on(*flags: str) -> Condition:
    """Condition: one of the flags is set."""
    return lambda source: any(source.get(flag) for flag in flags)


def _has_estimator(*names: str) -> Condition:
    return lambda source: launch.estimator(source) in names


def _by_estimator(name: str) -> Any:
    return lambda source, _: ESTIMATORS.get(launch.estimator(source), {}).get(name)


def _has_kl(*, in_loss: bool) -> Condition:
    return lambda source: launch.kl_coef(source) and bool(source.get("algo.kl.use_loss")) is in_loss


def _has_steps(source: Mapping[str, Any]) -> bool:
    return bool(launch.evaluates(source) and launch.positive_steps(source) and not source.get(launch.FLAT))


def _aggregated(source: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    return "seq-mean-token-mean" if launch.is_gspo(source) else "token-mean"


def _critic_model(source: Mapping[str, Any], _: Mapping[str, Any]) -> Any:
    return source.get(f"{'reward' if launch.has_reward_model(source) else 'actor'}.model_name_or_path") or None


def _input_column(role: str, column: str) -> Default:
    """Column of prompts that OpenRLHF reads without a flag: chats with a chat template, otherwise text."""

    def reads(source: Mapping[str, Any]) -> bool:
        is_chat = bool(source.get("data.apply_chat_template"))
        return f"{role}.data_args" in launch.columns(source) and is_chat is (column == "messages")

    def name(source: Mapping[str, Any], _: Mapping[str, Any]) -> Any:
        return None if "data.input_key" in source else launch.fact(source, "data.input_key") or None

    return Default(f"{role}.data_args.{column}", name, reads)


def _columns_of(role: str) -> tuple[Default, ...]:
    def is_plain(source: Mapping[str, Any]) -> bool:
        return f"{role}.data_args" in launch.columns(source) and not source.get("data.apply_chat_template")

    template = Default(f"{role}.data_args.template", "plain", is_plain)
    return (template, _input_column(role, "messages"), _input_column(role, "prompt"))


def _trained(role: str, prefix: str, rate: float, when: Condition = always) -> tuple[Default, ...]:
    """Optimizer, model and adapters of a trained role."""
    args, model = f"{role}.training_args", f"{role}.model_args"
    checkpointing = f"{'actor' if prefix else 'model'}.gradient_checkpointing_enable"

    def has_floor(source: Mapping[str, Any]) -> bool:
        return bool(when(source)) and source.get(f"{prefix}lr_scheduler", "cosine_with_min_lr") == "cosine_with_min_lr"

    def has_adapters(source: Mapping[str, Any]) -> bool:
        return bool(when(source)) and launch.has_lora(source)

    return (
        Default(f"{args}.learning_rate", lambda source, _: launch.fact(source, "adam.lr") or rate, when),
        Default(f"{args}.adam_beta2", 0.95, when),
        Default(f"{args}.lr_scheduler_type", "cosine_with_min_lr", when),
        Default(f"{args}.warmup_ratio", 0.03, when),
        Default(f"{args}.lr_scheduler_kwargs.min_lr_rate", 0.1, has_floor),
        Default(
            f"{model}.disable_gradient_checkpointing",
            True,
            lambda source: when(source) and not source.get(checkpointing),
        ),
        Default(f"{model}.lora_alpha", 16, has_adapters),
        Default(f"{model}.lora_target", "all-linear", has_adapters),
    )


SAVED = (Default("save_steps", 0), Default("max_ckpt_to_keep", 3))
ROLLOUTS: tuple[Default, ...] = (
    *SAVED,
    Default("rollout_batch_size", 1024),
    Default("num_return_sequences_in_group", 1),
    Default("loss_agg_mode", _aggregated),
    Default("eval_steps", 0),
    Default("adv_estimator", _by_estimator("adv_estimator")),
    Default("norm_mean_type", _by_estimator("norm_mean_type")),
    Default("lambd", 1.0, _has_estimator("gae")),
    Default("whiten_advantages", True, _has_estimator("gae")),
    Default("norm_epsilon", 1e-9, _has_estimator("group_norm")),
    Default("reward_clip", 10.0, lambda source: launch.estimator(source) not in BASELINES),
    Default("pg_options.clip_low", 0.2, launch.is_gspo),
    Default("pg_options.clip_high", 0.2, launch.is_gspo),
    Default("kl_loss_coef", lambda source, _: launch.kl_coef(source), _has_kl(in_loss=True)),
    Default("kl_loss_penalty", "k1", _has_kl(in_loss=True)),
    Default("add_token_level_kl", True, _has_kl(in_loss=False)),
    Default("init_kl_coef", lambda source, _: launch.kl_coef(source), _has_kl(in_loss=False)),
    Default("shuffle", False, lambda source: launch.replica(source) > 1 or source.get("train.dynamic_batch_enable")),
    Default("train_infer_correction.is_weight.enabled", False, _on("train.async_enable")),
    Default("validation.generating_args.temperature", 0.6, launch.evaluates),
    Default("validation.generating_args.num_return_sequences", 4, launch.evaluates),
    Default("save_best", "val/score/mean", _has_steps),
    Default("actor_infer.strategy_args.strategy_name", "vllm"),
    Default("actor_infer.strategy_args.strategy_config.gpu_memory_utilization", 0.95),
    *_columns_of("actor_train"),
    *_columns_of("validation"),
    Default("actor_train.model_args.freeze", lambda source, _: [], _has_images),
    *_trained("actor_train", "actor.", 1e-6),
    *_trained("critic", "critic.", 9e-6, launch.has_critic),
    Default("value_clip", 0.5, launch.has_critic),
    Default("critic.model_args.model_name_or_path", _critic_model, launch.has_critic),
)


def _tuning(trainer: str) -> tuple[Default, ...]:
    """Defaults of a trainer without rollouts."""
    role = POLICY[trainer]
    epochs = f"{role}.training_args.num_train_epochs"
    return (
        *SAVED,
        Default("overlong", "truncate"),
        Default(epochs, lambda source, _: launch.fact(source, "train.max_epochs") or 1),
        Default("loss_type", lambda source, _: launch.losses(source), lambda source: source[TRAINER] == DPO),
        *_columns_of(role),
        *_columns_of("validation"),
        *_trained(role, "", 1e-6),
    )


DEFAULTS = {PPO: ROLLOUTS, **{trainer: _tuning(trainer) for trainer in (SFT, DPO, RM)}}
"""OpenRLHF's defaults that differ from roll-core's, by trainer. `computed` has those that follow from several flags."""
