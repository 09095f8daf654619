"""Conversion rules for the flags of OpenRLHF's trainers. Update them here if keys change on either side.

Meanings are those of the code of OpenRLHF 0.11.2 that reads the flags; that of older flags is in 0.7 to 0.10.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_migrate.openrlhf_flags import (
    ALIASES,
    DPO,
    GROUPS,
    POLICY,
    PPO,
    REWARD,
    RM,
    SFT,
    SFT_TEMPLATE,
    TRAINER,
    TRAINERS,
    accumulation,
    columns,
    computed,
    correction,
    estimator,
    evaluates,
    fact,
    files,
    has_critic,
    has_lora,
    has_reward_model,
    is_gspo,
    kl_coef,
    lengths,
    longest,
    losses,
    num_rows,
    placement,
    positive,
    positive_steps,
    reference_model,
    steps_per_epoch,
    trackers,
)
from roll_migrate.rules import (
    Key,
    KeyRule,
    Outcome,
    Table,
    change,
    changed,
    dead,
    dotted,
    each,
    only,
    refused,
    to,
    unneeded,
    unsupported,
)
from roll_migrate.shared_rules import experiment, lora_dropout, python_function, track_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


# -- kinds of rules ----------------------------------------------------------------------------------------------------


def _policy(target: str) -> KeyRule:
    """Write the value at a path below the trained role."""

    def convert(value: Any, key: Key) -> Outcome:
        return Outcome("renamed", ((dotted(f"{POLICY[key.source[TRAINER]]}.{target}"), value),))

    return KeyRule(f"→ `{target}` of the trained role", convert)


def _column(name: str) -> KeyRule:
    """Write the value at `name` of each `data_args`."""

    def convert(value: Any, key: Key) -> Outcome:
        return Outcome("renamed", tuple((dotted(f"{role}.{name}"), value) for role in columns(key.source)))

    return KeyRule(f"→ `data_args.{name}`", convert)


def _if(condition: Callable[[Mapping[str, Any]], bool], why: str, rule: KeyRule) -> KeyRule:
    rules = only(condition, why, {"": rule})
    return rules[""]  # type: ignore[return-value]


def _computed(*parts: str, differs: bool = False) -> KeyRule:
    """Write the values that this flag and others determine together: those whose keys have one of `parts`."""

    def convert(value: Any, key: Key) -> Outcome:
        source = key.source
        found = {path: each for path, each in computed(source).items() if any(part in path for part in parts)}
        writes = tuple((dotted(path), each) for path, each in found.items())
        note = lengths(source)[2] if differs else ""
        if parts[0] == "gradient_accumulation":
            note = accumulation(source, POLICY[source[TRAINER]])[2]
        if not writes:
            return Outcome("not needed", (), "no role reads it")
        return Outcome("differs" if differs and note else "changed", writes, note)

    return KeyRule(f"→ `{'`, `'.join(parts)}` of the roles", convert)


def _kept_in(key: Key, value: Any, note: str) -> Outcome:
    """Leave a setting in the config, so that `roll-core check` rejects it."""
    return Outcome("unsupported", ((key.path, value),), f"{note}; left in the config, which `check` rejects")


# -- values: models, data, lengths -------------------------------------------------------------------------------------


def _reference(value: Any, key: Key) -> Outcome:
    if not reference_model(key.source):
        return Outcome("not needed", (), "it is the policy's own model")
    return Outcome("renamed", ((dotted("reference.model_args.model_name_or_path"), value),))


def _files(target: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        names = files(value)
        if names is None:
            return _kept_in(key, value, "only files are read: save the data set as .jsonl or .parquet")
        role = POLICY[key.source[TRAINER]] if target == "policy" else target
        found = [os.path.expanduser(name) for name in names]
        return Outcome("renamed", ((dotted(f"{role}.data_args.file_name"), found if len(found) > 1 else found[0]),))

    return change("→ `data_args.file_name`: files of rows", convert)


def _max_samples(value: Any, key: Key) -> Outcome:
    if value >= 1e6:
        return Outcome("not needed", (), "OpenRLHF's default: all rows")
    roles = columns(key.source) if key.source[TRAINER] == PPO else columns(key.source)[:1]
    return Outcome("renamed", tuple((dotted(f"{role}.max_samples"), int(value)) for role in roles))


def _input(value: Any, key: Key) -> Outcome:
    """The prompt's column: chats if the chat template is applied and no other column has the response."""
    source = key.source
    if not source.get("data.apply_chat_template"):
        return _column("prompt")(value, key)
    if source[TRAINER] == SFT and source.get("data.output_key"):
        if source.get("data.multiturn"):
            return _kept_in(key, value, "a chat and its last response in two columns: write both to one")
        return replace(_column("prompt")(value, key), note="text; chats in two columns are not supported")
    if _first(source, str(value)) is str:
        return _column("prompt")(value, key)
    found = _column("messages")(value, key)
    if source[TRAINER] == SFT and not source.get("data.multiturn"):
        return replace(found, status="differs", note="OpenRLHF trains only the last response; here all are trained")
    return replace(found, note="its values are chats; for text set data_args.prompt instead")


def _first(source: Mapping[str, Any], column: str) -> type | None:
    """Type of a column in the first row of the data; None if it cannot be read from here."""
    from roll_core.data.rows import read_rows
    from roll_core.errors import RollError
    from roll_core.spec.config import DataArguments

    names = files(source.get("data.prompt_dataset") or source.get("data.dataset") or "")
    if not names or not Path(names[0]).is_file():
        return None
    try:
        (row, *_) = read_rows(DataArguments(file_name=names[0], max_samples=1))
    except (RollError, OSError, ValueError, ImportError):
        return None
    return type(row.values.get(column))


def _label(value: Any, key: Key) -> Outcome:
    if not str(key.at("reward.remote_url") or "").split(",")[0].endswith(".py"):
        return Outcome("not needed", (), "rewards get all columns of a row")
    return Outcome("renamed", ((dotted(f"rewards.{REWARD}.label"), value),))


def _input_template(value: Any, key: Key) -> Outcome:
    if key.at("data.apply_chat_template") or "{}" not in value:
        return Outcome(
            "not needed", (), "the chat template applies" if "{}" in value else "without {} it has no effect"
        )
    return _kept_in(key, value, "prompts cannot be formatted: write the text into the rows")


# -- values: batches, optimizer, placement -----------------------------------------------------------------------------


def _optimizer(prefix: str, role: str) -> dict[str, Any]:
    """Rules of an optimizer's flags."""

    def target(name: str) -> str:
        return f"{role}.training_args.{name}"

    def betas(value: Any, key: Key) -> Outcome:
        return Outcome("renamed", tuple((dotted(target(f"adam_beta{at}")), beta) for at, beta in enumerate(value, 1)))

    def floor(value: Any, key: Key) -> Outcome:
        if (key.at(f"{prefix}lr_scheduler") or "cosine_with_min_lr") != "cosine_with_min_lr":
            return Outcome("not needed", (), "only cosine_with_min_lr reads it")
        return Outcome("renamed", ((dotted(target("lr_scheduler_kwargs.min_lr_rate")), value),))

    def clip(value: Any, key: Key) -> Outcome:
        policy = fact(key.source, "actor.max_norm") if prefix == "critic." else value
        policy = 1.0 if policy is None else policy
        if prefix != "critic.":
            return Outcome("renamed", ((("max_grad_norm",), value),))
        if value == policy:
            return Outcome("not needed", (), "max_grad_norm applies to every trained role")
        return _kept_in(key, value, f"the critic has the policy's max_grad_norm {policy}")

    muon = unneeded("it is for Muon: `optim` decides")
    rules: dict[str, Any] = {
        "optim": refused("only AdamW is supported", "adam"),
        **dict.fromkeys(("muon.lr", "muon.momentum", "muon.ns_steps", "muon.nesterov", "muon.no_nesterov"), muon),
        "adam.lr": to(target("learning_rate")),
        "adam.betas": change("→ `adam_beta1`, `adam_beta2`", betas, nested=True),
        "adam.eps": to(target("adam_epsilon")),
        "adam.weight_decay": to(target("weight_decay")),
        "lr_scheduler": to(target("lr_scheduler_type")),
        "lr_warmup_ratio": to(target("warmup_ratio")),
        "min_lr_ratio": change("→ `lr_scheduler_kwargs.min_lr_rate`", floor),
        "max_norm": change("→ `max_grad_norm`", clip),
    }
    return {f"{prefix}{name}": rule for name, rule in rules.items()}


def _dtype(value: Any, key: Key) -> Outcome:
    if value == "bf16":
        return Outcome("not needed", (), "bf16 is the default")
    return Outcome("renamed", tuple((dotted(f"{role}.model_args.dtype"), value) for role in placement(key.source)))


def _lora(name: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        if not has_lora(key.source):
            return Outcome("not needed", (), "ds.lora.rank is 0")
        roles = [POLICY[key.source[TRAINER]], *(["critic"] if has_critic(key.source) else [])]
        given = value[0] if isinstance(value, list) and len(value) == 1 else value
        return Outcome("renamed", tuple((dotted(f"{role}.model_args.{name}"), given) for role in roles))

    return change(f"→ `model_args.{name}`", convert, nested=True)


def _load_in_4bit(value: Any, key: Key) -> Outcome:
    if not value:
        return Outcome("not needed", (), "models are not quantized")
    if not has_lora(key.source):
        note = "only models below adapters are quantized; left in the config, which `check` rejects"
        return Outcome("unsupported", ((key.path, value),), note)
    target = dotted(f"{POLICY[key.source[TRAINER]]}.model_args.load_in_4bit")
    return Outcome("changed", ((target, True),), "needs strategy_name: fsdp2_train; scales are not quantized too")


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
        return _kept_in(key, value, "not an estimator of OpenRLHF 0.11")
    writes = tuple(((name,), each) for name, each in ESTIMATORS[value].items())
    return Outcome("changed" if len(writes) > 1 or writes[0][1] != value else "kept", writes)


def _no_std(value: Any, key: Key) -> Outcome:
    if estimator(key.source) not in WHITENED:
        return Outcome("not needed", (), f"{estimator(key.source)} does not whiten advantages")
    return _kept_in(key, value, "whitening always divides by the deviation")


def _gamma(value: Any, key: Key) -> Outcome:
    if estimator(key.source) not in ("gae", "reinforce"):
        return Outcome("dead", (), f"OpenRLHF uses 1 for {estimator(key.source)}")
    return Outcome("renamed", ((("gamma",), value),))


def _clip_range(value: Any, key: Key) -> Outcome:
    low, high = value
    if -low != high or high <= 0:
        return _kept_in(key, value, "reward_clip is symmetric")
    if estimator(key.source) in BASELINES:
        note = "here rewards are clipped before the group's baseline, in OpenRLHF after it"
        return Outcome("differs", ((("reward_clip",), high),), note)
    return Outcome("changed", ((("reward_clip",), high),))


def _kl_coef(value: Any, key: Key) -> Outcome:
    if kl_coef(key.source) <= 0:
        return Outcome("not needed", (), "there is no KL penalty, as by default here")
    return Outcome("renamed", (((_in_loss(key, "kl_loss_coef", "init_kl_coef"),), value),))


def _in_loss(key: Key, loss: str, reward: str) -> str:
    return loss if key.at("algo.kl.use_loss") else reward


def _kl_estimator(value: Any, key: Key) -> Outcome:
    if key.at("algo.kl.use_loss") and key.at("algo.kl.unbiased_gradient"):
        return Outcome("not needed", (), "with unbiased_gradient it changes only the logged value")
    return Outcome("renamed", (((_in_loss(key, "kl_loss_penalty", "kl_penalty"),), value),))


def _unbiased(value: Any, key: Key) -> Outcome:
    if not key.at("algo.kl.use_loss"):
        return Outcome("dead", (), "algo.kl.use_loss is off")
    writes = ((("kl_loss_unbiased",), True), (("kl_loss_penalty",), "k3"))
    return Outcome("changed", writes, "k3 × ratio has this gradient")


def _kl_target(value: Any, key: Key) -> Outcome:
    if key.at("algo.kl.use_loss"):
        return _kept_in(key, value, "target_kl adapts the KL in the reward, not that in the loss")
    return Outcome("renamed", ((("target_kl",), value),))


def _eps_clip(value: Any, key: Key) -> Outcome:
    if key.at("actor.eps_clip_low_high"):
        return Outcome("dead", (), "eps_clip_low_high takes precedence")
    if is_gspo(key.source):
        return _eps_clip_range([value, value], key)
    return Outcome("renamed", ((("pg_clip",), value),))


def _eps_clip_range(value: Any, key: Key) -> Outcome:
    low, high = value
    if is_gspo(key.source):
        return Outcome("renamed", ((("pg_options", "clip_low"), low), (("pg_options", "clip_high"), high)))
    writes = ((("pg_clip_low",), low), (("pg_clip_high",), high))
    return Outcome("renamed", writes, "clip-higher")


def _dual_clip(value: Any, key: Key) -> Outcome:
    if is_gspo(key.source):
        return _kept_in(key, value, "gspo has no dual clip")
    return Outcome("renamed", ((("dual_clip",), value),))


def _policy_loss(value: Any, key: Key) -> Outcome:
    if value not in ("ppo", "gspo"):
        return _kept_in(key, value, "not a policy loss of OpenRLHF 0.11")
    return Outcome("kept" if value == "gspo" else "not needed", ((("pg_variant",), value),) if value == "gspo" else ())


def _aggregation(value: Any, key: Key) -> Outcome:
    if is_gspo(key.source):
        return Outcome("dead", (), "gspo is always seq-mean-token-mean")
    if value != "token-mean" and key.at("algo.kl.use_loss") and kl_coef(key.source):
        return Outcome("differs", ((("loss_agg_mode",), value),), "OpenRLHF's KL in the loss stays token-mean")
    return Outcome("renamed", ((("loss_agg_mode",), value),))


def _warmup(value: Any, key: Key) -> Outcome:
    if value < 0:
        return Outcome("not needed", (), "it is off")
    return changed("critic_warmup", int(value) + 1, "OpenRLHF's first step is 0, and it trains the policy after step N")


UNBOUNDED = 1e9
"""Upper bound of weights that OpenRLHF does not bound."""


def _correction(value: Any, key: Key) -> Outcome:
    level, mode, bounds = correction(key.source)
    if level == "off":
        return Outcome("not needed", (), "it is off")
    if is_gspo(key.source):
        return _kept_in(key, value, "gspo then compares with the engine's logprobs")
    if key.at("algo.advantage.is_correction_gating") not in (None, "ratio"):
        return _kept_in(key, value, "only ratios are gated, see train_infer_correction")
    if len(bounds) != 2 or (level, mode) not in (("token", "clip"), ("token", "mask"), ("seq", "mask")):
        return _kept_in(key, value, f"OpenRLHF refuses level {level} with mode {mode} and bounds {bounds}")
    weight: dict[str, Any] = {"enabled": True, "weight_type": "token"}
    low, high = bounds
    if level == "seq":
        weight |= {"lower_bound": 0.0, "upper_bound": UNBOUNDED}
        gate = {"enabled": True, "agg_type": "geometric", "ratio_low": low, "ratio_high": high}
        writes = (
            (dotted("train_infer_correction.is_weight"), weight),
            (dotted("train_infer_correction.filters"), [gate]),
        )
        return Outcome("differs", writes, "filters remove tokens from the loss's denominator, too")
    weight |= {"lower_bound": low, "upper_bound": high}
    weight |= {"outside": "mask"} if mode == "mask" else {}
    found = Outcome("changed", ((dotted("train_infer_correction.is_weight"), weight),))
    if key.at("enable_vllm_is_correction") and "algo.advantage.is_correction_threshold" not in key.source:
        note = f"bounds {low:g} and {high:g} are the default since 0.9; before, 0 and 2"
        return replace(found, status="differs", note=note)
    return found


def _filtering(value: Any, key: Key) -> Outcome:
    low, high = fact(key.source, "algo.dynamic_filtering_range")
    if not key.at("algo.dynamic_filtering_enable"):
        return Outcome("not needed", (), "algo.dynamic_filtering_enable is off")
    target = dotted(f"rewards.{REWARD}.query_filter_config")
    given = {"type": "mean_filter", "filter_args": {"threshold_down": low, "threshold_up": high}}
    note = "OpenRLHF compares `scores` and samples without limit; see dynamic_sampling_max_tries, 10 batches"
    return Outcome("differs", ((target, given),), note)


def _overlong(value: Any, key: Key) -> Outcome:
    if value <= 0 or int(value) != value:
        return _kept_in(key, value, "l_cache counts tokens")
    found = {"l_max": longest(key.source), "l_cache": int(value)}
    return Outcome("changed", tuple((("soft_overlong_penalty", name), each) for name, each in found.items()))


def _remote(value: Any, key: Key) -> Outcome:
    if key.at("train.agent_func_path"):
        return Outcome("dead", (), "train.agent_func_path takes precedence")
    if not str(value).split(",")[0].endswith(".py"):
        return _kept_in(key, value, "a server's replies differ: see the reward http, docs/rewards.md")
    found = python_function(str(value).split(",")[0], "reward_func", REWARD, "OpenRLHF")
    return replace(found, writes=(*found.writes, (dotted(f"rewards.{REWARD}.signature"), "openrlhf")))


def _reward_model(value: Any, key: Key) -> Outcome:
    if not has_reward_model(key.source):
        return Outcome("not needed", (), "reward.remote_url or train.agent_func_path scores responses")
    target = f"rewards.{REWARD}"
    writes = [(dotted(f"{target}.reward"), "model"), (dotted(f"{target}.model_args.model_name_or_path"), value)]
    return Outcome("changed", (*writes, (dotted(f"{target}.input"), "tokens")), "it scores the sampled tokens")


# -- values: the run ---------------------------------------------------------------------------------------------------


def _ahead(value: Any, key: Key) -> Outcome:
    if not key.at("train.async_enable"):
        return Outcome("not needed", (), "train.async_enable is off")
    note = "OpenRLHF publishes weights between two batches; here responses continue with the new weights"
    size = float(positive(key.source, "train.async_queue_size"))
    return Outcome("differs", ((("async_generation_ratio",), size),), note)


def _generated(value: Any, key: Key) -> Outcome:
    if not value or value == positive(key.source, "rollout.batch_size"):
        return Outcome("not needed", (), "a batch has rollout_batch_size prompts")
    return Outcome("differs", (), "here generation runs ahead by async_generation_ratio batches")


def _episodes(value: Any, key: Key) -> Outcome:
    steps, size = steps_per_epoch(key.source), positive(key.source, "rollout.batch_size")
    if steps is None:
        note = f"rlvr counts steps: set max_steps to {value} × rows of the data / rollout_batch_size {size}"
        return Outcome("unsupported", ((("max_steps",), "???"),), f"{note}; the rows cannot be counted from here")
    note = f"{value} × ({num_rows(key.source)} rows // {size} prompts per batch); less if longer prompts are dropped"
    return Outcome("changed", ((("max_steps",), max(int(value), 1) * steps),), note)


def _epochs(value: Any, key: Key) -> Outcome:
    if key.source[TRAINER] == PPO:
        return Outcome("renamed", ((("ppo_epochs",), value),))
    return _policy("training_args.num_train_epochs")(value, key)


def _save_steps(value: Any, key: Key) -> Outcome:
    return changed("save_steps", 0 if value < 1 else value, "-1 is off" if value < 1 else "")


def _eval_steps(value: Any, key: Key) -> Outcome:
    if not evaluates(key.source):
        return Outcome("not needed", (), "there is no eval.dataset")
    if value >= 1:
        return Outcome("renamed", ((("eval_steps",), value),))
    if key.source[TRAINER] == PPO:
        return changed("eval_steps", 0, "-1 is off")
    steps = steps_per_epoch(key.source)
    if steps is None:
        return Outcome("differs", (), "OpenRLHF evaluates after each epoch; here every eval_steps, 10 by default")
    return changed("eval_steps", steps, "once per epoch")


def _best(value: Any, key: Key) -> Outcome:
    if value == "none" or not evaluates(key.source) or positive_steps(key.source) is None:
        return Outcome("not needed", (), "no best checkpoint is saved by default")
    return Outcome("differs", ((("save_best",), "val/score/mean"),), "over all held-out rows")


def _resume(value: Any, key: Key) -> Outcome:
    return changed("resume_from_checkpoint", "auto", "checkpoints of OpenRLHF cannot be read")


def _wandb(name: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        writes = [(dotted(f"tracker_kwargs.wandb.{name}"), value)] if "wandb" in trackers(key.source) else []
        writes = writes if "wandb" in key.trackers else []
        if name == "name":
            found = experiment(value, "openrlhf")
            return replace(found, writes=(*found.writes, *writes))
        return Outcome("renamed", tuple(writes)) if writes else Outcome("not needed", (), "wandb is not used")

    return change(f"→ `tracker_kwargs.wandb.{name}`", convert)


def _key(value: Any, key: Key) -> Outcome:
    found = track_with(trackers(key.source), key)
    return replace(found, note=f"{found.note}; the key is not copied: set WANDB_API_KEY, or log in")


def _tensorboard(value: Any, key: Key) -> Outcome:
    found = track_with(trackers(key.source), key)
    if found.status == "unsupported":
        return found
    return replace(found, writes=(*found.writes, (dotted("tracker_kwargs.tensorboard.log_dir"), value)))


# -- tables ------------------------------------------------------------------------------------------------------------

FASTER = unneeded("it does not affect results")
PLACED = unneeded("idle roles are offloaded by is_offload_states")
TOGETHER = unneeded("device_mapping of the roles has it")
OWN = refused("the model's own is used")


def _common(model: str) -> Table:
    """Flags of all trainers. `model` is the prefix of the trained model's flags."""
    return {
        f"{model}model_name_or_path": to("pretrain"),
        f"{model}gradient_checkpointing_enable": unneeded("it is on by default"),
        f"{model}gradient_checkpointing_reentrant": FASTER,
        f"{model}aux_loss_coef": refused("only megatron_train has the routers' balancing loss", 0),
        "train.batch_size": _computed("gradient_accumulation", "per_device_train"),
        "train.micro_batch_size": _computed("gradient_accumulation", "per_device_train"),
        "train.max_epochs": change("→ `num_train_epochs`; in PPO `ppo_epochs`", _epochs),
        "train.seed": to("seed", note="the run's seed, also of sampling and initialization", differs=True),
        "train.full_determinism_enable": unneeded("deterministic kernels are on unless `deterministic` is false"),
        "ckpt.output_dir": to("output_dir", differs=True, note="runs are in output_dir/exp_name/number, with export/"),
        "ckpt.save_steps": change("→ `save_steps`; -1 becomes 0", _save_steps),
        "ckpt.max_num": to("max_ckpt_to_keep"),
        "ckpt.max_mem": unsupported("set max_ckpt_to_keep", 1e8, float("inf")),
        "ckpt.load_enable": change("→ `resume_from_checkpoint: auto`", _resume),
        **each("ckpt.path ckpt.save_hf ckpt.disable_ds", unneeded("checkpoints resume runs, and export/ is the model")),
        "eval.dataset": _files("validation"),
        "eval.steps": change("→ `eval_steps`", _eval_steps),
        **each("eval.split data.dataset_split data.prompt_split", unneeded("a file has one split")),
        "logger.logging_steps": to("logging_steps"),
        "logger.wandb.key": change("→ `track_with`", _key),
        "logger.wandb.org": _wandb("entity"),
        "logger.wandb.group": _wandb("group"),
        "logger.wandb.project": _wandb("project"),
        "logger.wandb.run_name": _wandb("name"),
        "logger.tensorboard_dir": change("→ `track_with`, `tracker_kwargs`", _tensorboard),
        "data.max_len": _computed("_length", differs=True),
        "data.max_samples": change("→ `data_args.max_samples`", _max_samples),
        "data.apply_chat_template": unneeded("data_args.template is native"),
        "data.input_template": change("rejected, unless the chat template applies", _input_template),
        "data.dataloader_num_workers": FASTER,
        "data.disable_fast_tokenizer": OWN,
        **each(
            "ds.zero_stage ds.adam_offload ds.overlap_comm ds.ring_attn_size ds.tensor_parallel_size",
            _computed("strategy_args"),
        ),
        "ds.param_dtype": change("→ `model_args.dtype`", _dtype),
        "ds.grad_accum_dtype": refused("gradients accumulate in fp32", "fp32"),
        "ds.load_in_4bit": change("→ `model_args.load_in_4bit` with LoRA, otherwise rejected", _load_in_4bit),
        "ds.lora.rank": _lora("lora_rank"),
        "ds.lora.alpha": _lora("lora_alpha"),
        "ds.lora.target_modules": _lora("lora_target"),
        "ds.lora.dropout": change("must be 0", lambda value, key: lora_dropout(value, enabled=has_lora(key.source))),
        "ds.packing_samples": unneeded("sequences are always packed"),
        "ds.attn_implementation": unneeded("attn_implementation: auto is the fastest exact one"),
        **each(
            "ds.deepcompile ds.zpg ds.experts_implementation ds.use_liger_kernel ds.ring_attn_head_stride"
            " ds.use_universal_ckpt local_rank",
            FASTER,
        ),
        "use_ms": unsupported("download models and data from ModelScope, and name their directories"),
        "bf16": unneeded("bf16 is the default"),
        "flash_attn": unneeded("attn_implementation: auto is the fastest exact one"),
    }


def _tuned() -> Table:
    """Flags of the trainers without rollouts."""
    return {
        "data.dataset": _files("policy"),
        "data.dataset_probs": refused("files are not sampled by probabilities: mix the rows"),
        "data.tokenizer_chat_template": OWN,
    }


def _pairs() -> Table:
    """Flags of the trainers on pairs of responses."""
    return {
        **{f"data.{name}_key": _column(name) for name in ("prompt", "chosen", "rejected")},
        "ref.offload": PLACED,
    }


CRITIC = only(
    has_critic,
    "only the estimator gae has a critic",
    {
        **_optimizer("critic.", "critic"),
        "critic.model_name_or_path": to("critic.model_args.model_name_or_path"),
        "critic.value_clip": to("value_clip"),
        "critic.freezing_steps": change("→ `critic_warmup`", _warmup),
        "critic.save_value_network": unneeded("a checkpoint has every role; export/ is the policy"),
    },
)
KL = only(
    lambda source: kl_coef(source) > 0,
    "there is no KL penalty",
    {
        "algo.kl.use_loss": to("use_kl_loss"),
        "algo.kl.estimator": change("→ `kl_penalty` or `kl_loss_penalty`", _kl_estimator),
        "algo.kl.unbiased_gradient": change("→ `kl_loss_unbiased`, with `kl_loss_penalty: k3`", _unbiased),
        "algo.kl.target": change("→ `target_kl`", _kl_target),
        "algo.kl.horizon": _if(
            lambda source: bool(source.get("algo.kl.target")), "there is no target", to("kl_horizon")
        ),
    },
)
ACTOR: Table = {
    **_common("actor."),
    **_optimizer("actor.", "actor_train"),
    **CRITIC,
    **KL,
    "algo.kl.init_coef": change("→ `init_kl_coef` or `kl_loss_coef`", _kl_coef),
    **{
        f"{group}.{name}": _computed(f"{role}.device_mapping")
        for group, role in GROUPS.items()
        for name in ("num_nodes", "num_gpus_per_node")
    },
    "vllm.num_engines": _computed("actor_infer.device_mapping"),
    **each("train.colocate_actor_ref train.colocate_critic_reward train.colocate_all", TOGETHER),
    **each("ref.offload reward.offload vllm.enable_sleep ds.enable_sleep ref_reward_offload", PLACED),
    **{
        f"vllm.{name}": to(f"actor_infer.strategy_args.strategy_config.{name}")
        for name in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching")
    },
    **each("vllm.sync_backend vllm.sync_with_ray", unneeded("the best weight transport is chosen")),
    "actor.eps_clip": change("→ `pg_clip`; of gspo `pg_options`", _eps_clip),
    "actor.eps_clip_low_high": change("→ `pg_clip_low`, `pg_clip_high`", _eps_clip_range, nested=True),
    "actor.dual_clip": change("→ `dual_clip`", _dual_clip),
    "actor.policy_loss_type": change("→ `pg_variant`", _policy_loss),
    "actor.loss_agg_mode": change("→ `loss_agg_mode`", _aggregation),
    "actor.entropy_coef": to("entropy_loss_coef"),
    "actor.freeze_visual_encoder": unneeded("only text models are trained"),
    "algo.advantage.estimator": change("→ `adv_estimator`", _estimator),
    "algo.advantage.gamma": change("→ `gamma`", _gamma),
    "algo.advantage.lambd": _if(has_critic, "only the estimator gae reads it", to("lambd")),
    "algo.advantage.no_std_norm": change("rejected if advantages are whitened", _no_std),
    "algo.advantage.is_correction_level": change("→ `train_infer_correction`", _correction),
    **each(
        "algo.advantage.is_correction_mode algo.advantage.is_correction_gating algo.advantage.is_correction_threshold",
        unneeded("is_correction_level or is_correction_enable has it"),
    ),
    "algo.advantage.is_correction_enable": change("→ `train_infer_correction`", _correction),
    "algo.advantage.is_correction_type": unneeded("is_correction_enable has it"),
    "enable_vllm_is_correction": change("→ `train_infer_correction`", _correction),
    "vllm_is_correction_type": unneeded("enable_vllm_is_correction has it"),
    **each(
        "algo.dynamic_filtering_enable algo.dynamic_filtering_range",
        change("→ `query_filter_config`", _filtering, nested=True),
    ),
    "reward.model_name_or_path": change("→ `rewards.openrlhf`: a `model`", _reward_model),
    "reward.remote_url": change("→ `rewards.openrlhf`: a `function`; rejected for a server", _remote),
    "reward.normalize_enable": refused("scores are not normalized by the reward model's config"),
    "reward.clip_range": change("→ `reward_clip`", _clip_range, nested=True),
    "reward.overlong_buffer_len": change("→ `soft_overlong_penalty`", _overlong),
    "reward.overlong_penalty_factor": _if(
        lambda source: bool(source.get("reward.overlong_buffer_len")),
        "there is no overlong_buffer_len",
        to("soft_overlong_penalty.penalty_factor"),
    ),
    "reward.stop_properly_penalty_coef": refused("rewards of truncated responses are not scaled", 1, 1.0),
    "ds.value_head_prefix": refused("heads are named score", "score"),
    "train.agent_func_path": refused("turns with an environment are the pipeline agentic"),
    "train.async_enable": change("→ `async_generation_ratio`", _ahead),
    "train.async_queue_size": change("→ `async_generation_ratio`", _ahead),
    "train.partial_rollout_enable": to("partial_rollout"),
    **each(
        "train.dynamic_batch_enable train.max_tokens_per_gpu rollout.max_tokens_per_gpu",
        _computed("_in_train", "_in_infer"),
    ),
    "train.enable_ema": refused("no moving average of the policy is kept"),
    "train.ema_beta": unneeded("enable_ema decides"),
    "train.num_episodes": change("→ `max_steps`, if the rows of the data can be counted", _episodes),
    "rollout.batch_size": to("rollout_batch_size"),
    "rollout.n_samples_per_prompt": to("num_return_sequences_in_group"),
    "rollout.micro_batch_size": _computed("infer_batch_size"),
    "rollout.max_new_tokens": _computed("_length", differs=True),
    "rollout.temperature": to("actor_infer.generating_args.temperature"),
    "rollout.top_p": to("actor_infer.generating_args.top_p"),
    "rollout.vllm_generate_batch_size": change("not needed if it is rollout.batch_size", _generated),
    "data.prompt_dataset": _files("policy"),
    "data.prompt_probs": refused("files are not sampled by probabilities: mix the rows"),
    "data.input_key": change("→ `data_args.messages` or `prompt`", _input),
    "data.label_key": change("→ `label` of the reward function", _label),
    "data.image_key": refused("only text is supported"),
    "data.max_images_per_prompt": refused("only text is supported", 0),
    "ckpt.best_metric_key": change("→ `save_best`", _best),
    "eval.temperature": _if(evaluates, "there is no eval.dataset", to("validation.generating_args.temperature")),
    "eval.n_samples_per_prompt": _if(
        evaluates, "there is no eval.dataset", to("validation.generating_args.num_return_sequences")
    ),
    **each("prompt_max_len generate_max_len", _computed("_length", differs=True)),
    **each("actor_init_on_gpu perf ptx_coef", dead("nothing reads it")),
}
DPO_KEYS: Table = {
    **_common("model."),
    **_tuned(),
    **_pairs(),
    "ref.model_name_or_path": change("→ `reference.model_args`", _reference),
    "model.beta": to("beta"),
    "model.ipo_enable": KeyRule("→ `loss_type: ipo_sum`", lambda value, key: changed("loss_type", losses(key.source))),
    "model.label_smoothing": _if(
        lambda source: not source.get("model.ipo_enable"), "ipo_enable: IPO has no smoothing", to("label_smoothing")
    ),
    "model.nll_loss_coef": KeyRule("→ the term `sft` of `loss_type`", lambda value, key: _nll(value, key)),
}


def _nll(value: Any, key: Key) -> Outcome:
    if value <= 1e-8:
        return Outcome("not needed", (), "it is off")
    writes = ((("loss_type",), losses(key.source)), (("loss_weights",), [1.0, value]))
    return Outcome("differs", writes, "a mean over sequences in OpenRLHF, over tokens here")


RM_KEYS: Table = {
    **_common("model."),
    **_tuned(),
    **_pairs(),
    "ds.value_head_prefix": refused("heads are named score", "score"),
    "model.margin_loss_enable": KeyRule(
        "→ `margin`",
        lambda value, key: (
            changed("margin", "margin", "a column that each row needs")
            if key.at("model.loss_type") in (None, "sigmoid")
            else Outcome("dead", (), "the loss logexp has no margin")
        ),
    ),
    "model.loss_type": unneeded("logexp is the same function as sigmoid"),
    "model.compute_fp32_loss_enable": unneeded("losses are always computed in fp32"),
}
SFT_KEYS: Table = {
    **_common("model."),
    **_tuned(),
    "data.input_key": change("→ `data_args.messages` or `prompt`", _input),
    "data.output_key": _column("response"),
    "data.multiturn": unneeded("all responses of a chat are trained"),
    "model.pretrain_mode_enable": refused("rows need prompts and responses"),
    "train_split": dead("nothing reads it"),
}


def _whole(trainer: str, rules: Table) -> Table:
    """The table of a trainer, with its optimizer and its flat flags."""
    if trainer != PPO:
        rules = {**rules, **_optimizer("", POLICY[trainer])}
    flat = {old: _renamed(new, rules) for old, new in ALIASES[trainer].items() if new[0] in rules}
    return {**flat, **rules}


def _renamed(names: tuple[str, ...], rules: Table) -> KeyRule:
    """Apply the rules of the dotted flags that a flat flag sets."""

    def convert(value: Any, key: Key) -> Outcome:
        found = [rules[name](value, replace(key, path=(name,))) for name in names]  # type: ignore[operator]
        first = next((each for each in found if each.status != "not needed"), found[0])
        return replace(first, writes=tuple(write for each in found for write in each.writes))

    return KeyRule(f"as `{names[0]}`", convert)


TABLES: dict[str, Table] = {
    trainer: _whole(trainer, rules)
    for trainer, rules in zip(TRAINERS, (ACTOR, SFT_KEYS, DPO_KEYS, RM_KEYS), strict=True)
}
IMPLIED: dict[str, dict[str, Any]] = {
    PPO: {"train.num_episodes": 1},
    SFT: {"eval.steps": -1, "data.input_template": SFT_TEMPLATE},
    DPO: {"eval.steps": -1},
    RM: {"eval.steps": -1},
}
"""Flags whose default has a result of its own to report, by trainer."""
