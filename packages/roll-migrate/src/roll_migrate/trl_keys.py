"""Conversion rules for the arguments of TRL's trainers. Update them here if arguments change on either side.

A run is a mapping of arguments under the names of TRL's configs and of its command line. Names and defaults are those
of TRL 1.16.0 and of the `TrainingArguments` of transformers 5.
"""

from __future__ import annotations

import math
import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_migrate.rules import (
    Condition,
    Convert,
    Default,
    Key,
    KeyRule,
    Outcome,
    always,
    keys,
    lookup,
    nested,
    only,
    refused,
    to,
    unneeded,
    unsupported,
)
from roll_migrate.shared_rules import count_rows, experiment, lora_dropout, max_steps, track_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Source = Mapping[str, Any]

TRAINER = "trainer"
"""Entry of a run with the trainer's name; not an argument."""
GRPO, RLOO, SFT, DPO, KTO, REWARD = TRAINERS = ("grpo", "rloo", "sft", "dpo", "kto", "reward")
PIPELINES = {GRPO: "rlvr", RLOO: "rlvr", SFT: "sft", DPO: "preference", KTO: "preference", REWARD: "reward_model"}
POLICY = {SFT: "sft_train", REWARD: "reward_train"}
"""Trained role; otherwise `actor_train`."""
LEARNING_RATES = {GRPO: 1e-6, RLOO: 1e-6, SFT: 2e-5, DPO: 1e-6, KTO: 1e-6, REWARD: 1e-4}
VLLM_DEFAULT = 0.3
"""TRL's `vllm_gpu_memory_utilization`."""
RATIO_BOUND = 3.0
"""TRL's `vllm_importance_sampling_clip_max`."""

# -- facts of a run ----------------------------------------------------------------------------------------------------


def trains(*trainers: str) -> Callable[[Source], bool]:
    """Condition: one of these trainers."""
    return lambda source: source[TRAINER] in trainers


def has_rollouts(source: Source) -> bool:
    """True for GRPO and RLOO."""
    return source[TRAINER] in (GRPO, RLOO)


def policy(source: Source) -> str:
    """Name of the trained role."""
    return POLICY.get(source[TRAINER], "actor_train")


def number(source: Source, name: str, default: Any) -> Any:
    """A numeric argument, or TRL's default."""
    value = source.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else default


def count(source: Source, name: str, default: int = 1) -> int:
    """An argument that counts something: at least 1."""
    return max(int(number(source, name, default)), 1)


def num_processes(source: Source) -> int:
    """Processes of the launcher, one for each device."""
    value = lookup(source, "accelerate.num_processes", 1)
    return value if isinstance(value, int) and value > 0 else 1


def samples_per_step(source: Source) -> int:
    """Samples of an optimizer step over all processes."""
    size = count(source, "per_device_train_batch_size", 8) * num_processes(source)
    return size * count(source, "gradient_accumulation_steps")


def generated(source: Source) -> int:
    """Responses of a batch of rollouts: `generation_batch_size`."""
    if source.get("generation_batch_size"):
        return count(source, "generation_batch_size")
    steps = count(source, "steps_per_generation", count(source, "gradient_accumulation_steps"))
    return count(source, "per_device_train_batch_size", 8) * num_processes(source) * steps


def group_size(source: Source) -> int:
    """Responses to a prompt."""
    return count(source, "num_generations", 2 if source[TRAINER] == RLOO else 8)


def prompts_per_batch(source: Source) -> int:
    """Prompts of a batch of rollouts."""
    return max(generated(source) // group_size(source), 1)


def steps_per_batch(source: Source) -> float:
    """Optimizer steps for each pipeline step: 1 without rollouts."""
    if not has_rollouts(source):
        return 1
    return max(generated(source) / samples_per_step(source), 1) * count(source, "num_iterations")


def beta(source: Source) -> float:
    """Weight of the KL to the reference in GRPO and RLOO."""
    return float(number(source, "beta", 0.05 if source[TRAINER] == RLOO else 0.0))


def has_lora(source: Source) -> bool:
    """True if adapters are trained."""
    return bool(source.get("use_peft") or source.get("peft_config") or source.get("peft_config.r"))


def has_reference(source: Source) -> bool:
    """True if the run has a reference model. With LoRA the base model is the reference."""
    if has_rollouts(source):
        return beta(source) > 0 and not has_lora(source)
    is_used = source[TRAINER] in (DPO, KTO) and losses(source) != ["sft"]
    return is_used and not has_lora(source) and not source.get("precompute_ref_log_probs")


def losses(source: Source) -> list[Any]:
    """`loss_type` of DPO or KTO."""
    value = source.get("loss_type") or ("kto" if source[TRAINER] == KTO else "sigmoid")
    return value if isinstance(value, list) else [value]


def loss(source: Source) -> str:
    """`loss_type` of GRPO."""
    return str(source.get("loss_type") or "dapo")


def is_sequence_level(source: Source) -> bool:
    """True if GRPO's ratios are those of sequences."""
    return source.get("importance_sampling_level") in ("sequence", "sequence_token") or loss(source) == "luspo"


def evaluates(source: Source) -> bool:
    """True if there are held-out rows that TRL evaluates."""
    strategy = source.get("eval_strategy") or "no"
    return bool(source.get("eval_dataset")) and strategy != "no"


def roles(source: Source) -> list[str]:
    """Roles with a model."""
    names = [policy(source)]
    names += ["reference"] if has_reference(source) else []
    return names + (["actor_infer"] if has_rollouts(source) else [])


def data_roles(source: Source) -> list[str]:
    """Dotted names of the `data_args` of the run."""
    return [f"{role}.data_args" for role in (policy(source), *(["validation"] if evaluates(source) else []))]


def dtype(source: Source) -> str:
    """Dtype of the computation: mixed precision, otherwise that of the model."""
    mixed = source.get("bf16")
    if mixed or (mixed is None and not source.get("fp16")):
        return "bf16"
    if source.get("fp16"):
        return "fp16"
    stored = str(lookup(source, "model_init_kwargs.dtype") or source.get("dtype") or "float32")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(stored.removeprefix("torch."), "fp32")


def strategy(source: Source) -> tuple[str, dict[str, Any]]:
    """Kind and keys of the strategies: DeepSpeed or FSDP2 if accelerate or an argument names it."""
    accelerate = source.get("accelerate") or {}
    kind = str(accelerate.get("distributed_type") or "NO").upper()
    deepspeed = source.get("deepspeed")
    if deepspeed or kind == "DEEPSPEED":
        options = accelerate.get("deepspeed_config") or {}
        zero = lookup(source, "deepspeed.zero_optimization") if isinstance(deepspeed, dict) else None
        zero = dict(zero) if isinstance(zero, dict) and zero else {"stage": options.get("zero_stage", 2)}
        for part in ("optimizer", "param"):
            device = options.get(f"offload_{part}_device")
            if device not in (None, "none"):
                zero[f"offload_{part}"] = {"device": device}
        return "deepspeed", {"zero_optimization": zero}
    if kind == "FSDP" or source.get("fsdp") or source.get("load_in_4bit"):
        offloads = lookup(accelerate, "fsdp_config.fsdp_offload_params") or "offload" in str(source.get("fsdp") or "")
        return "fsdp2", {"offload_policy": True} if offloads else {}
    return "hf", {}


def computed(source: Source) -> dict[str, Any]:
    """Values that follow from several arguments, by dotted key."""
    kind, options = strategy(source)
    slots = f"list(range(0,{num_processes(source)}))"
    values: dict[str, Any] = {}
    for role in roles(source):
        values[f"{role}.device_mapping"] = slots
        if dtype(source) != "bf16":
            values[f"{role}.model_args.dtype"] = dtype(source)
        if role != "actor_infer":
            values[f"{role}.strategy_args.strategy_name"] = f"{kind}_{'infer' if role == 'reference' else 'train'}"
            for name, value in options.items():
                if role == policy(source):
                    values[f"{role}.strategy_args.strategy_config.{name}"] = value
                elif name == "zero_optimization" and value.get("stage") == 3:
                    inference = {key: item for key, item in value.items() if key != "offload_optimizer"}
                    values[f"{role}.strategy_args.strategy_config.{name}"] = inference
    if has_rollouts(source):
        values["actor_infer.strategy_args.strategy_name"] = "vllm" if source.get("use_vllm") else "hf_infer"
        values["rollout_batch_size"] = prompts_per_batch(source)
        if source.get("vllm_mode") == "server" and source.get("use_vllm"):
            first, size = num_processes(source), count(source, "vllm_tensor_parallel_size")
            values["actor_infer.device_mapping"] = f"list(range({first},{first + size}))"
    return values


# -- kinds of rules ----------------------------------------------------------------------------------------------------


def each_data(name: str) -> KeyRule:
    """Write the value at `name` of each `data_args`."""
    return nested(lambda value, key: key.renamed({f"{role}.{name}": value for role in data_roles(key.source)}))


def each_role(name: str) -> KeyRule:
    """Write the value at `name` of each `model_args`."""
    return nested(lambda value, key: key.renamed({f"{role}.model_args.{name}": value for role in roles(key.source)}))


def follows(*parts: str) -> KeyRule:
    """Write the values that this argument and others determine together: those whose keys have one of `parts`."""

    def convert(value: Any, key: Key) -> Outcome:
        values = computed(key.source).items()
        writes = {path: item for path, item in values if any(part in path for part in parts)}
        return key.changed(writes) if writes else key.unneeded("it is the default here")

    return nested(convert)


def _rate(target: str) -> Convert:
    """Write a number of optimizer steps as pipeline steps."""

    def convert(value: Any, key: Key) -> Outcome:
        if isinstance(value, float) and value < 1:
            return key.lacking(f"{target} is a number of steps, not a share of the run")
        per_batch = steps_per_batch(key.source)
        steps = max(math.ceil(value / per_batch), 1) if value else 0
        note = "" if per_batch == 1 else f"{value} optimizer steps are {steps} batches of rollouts"
        return key.changed({target: steps}, note)

    return convert


def _max_steps(value: Any, key: Key) -> Outcome:
    if value <= 0:
        return key.unneeded("num_train_epochs decides")
    return _rate("max_steps")(value, key)


def _epochs(value: Any, key: Key) -> Outcome:
    source = key.source
    if number(source, "max_steps", -1) > 0:
        return key.unneeded("max_steps takes precedence")
    if not has_rollouts(source):
        return key.renamed("{role}.training_args.num_train_epochs")
    rows = count_rows(source.get("train_dataset") or "")
    if steps := max_steps(int(value), rows, prompts_per_batch(source)):
        return key.changed({"max_steps": steps[0]}, steps[1])
    note = f"set it to {value:g} × rows // {prompts_per_batch(source)} prompts per batch"
    return key.lacking(note, {"max_steps": "???"})


def _when(argument: str, target: str) -> Convert:
    """`save_strategy` or `eval_strategy`, whose interval is `argument`."""

    def convert(value: Any, key: Key) -> Outcome:
        if value in ("no", False):
            return key.changed({target: 0}, "it is off")
        if value == "steps":
            return key.unneeded(f"{argument} has the number")
        return key.lacking(f"set {target} to the steps of an epoch", {target: "???"})

    return convert


def _warmup(value: Any, key: Key) -> Outcome:
    is_share = isinstance(value, float) and 0 < value < 1
    return key.renamed(f"{{role}}.training_args.{'warmup_ratio' if is_share else 'warmup_steps'}")


def _optimizer(value: Any, key: Key) -> Outcome:
    name = str(value)
    if name in ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_apex_fused", "adamw_hf"):
        return key.unneeded("AdamW is the default")
    if "adamw" in name:
        return key.differs("AdamW with moments in fp32, which need more memory")
    if name in ("sgd", "muon"):
        return key.renamed("{role}.training_args.optimizer")
    return key.refused("adamw, sgd, muon, or a function of your rules: see training_args.optimizer")


def _directory(value: Any, key: Key) -> Outcome:
    parent, name = posixpath.split(str(value).rstrip("/"))
    named = {} if key.get("run_name") else {"exp_name": "".join(c if c.isalnum() or c in "_.-" else "-" for c in name)}
    return key.changed({"output_dir": parent or ".", **named}, "each run has a numbered directory below exp_name")


def _trackers(value: Any, key: Key) -> Outcome:
    names = value if isinstance(value, list) else [value]
    if names == ["all"]:
        return key.lacking("name the trackers", {"track_with": []})
    return track_with(key, [name for name in names if name != "none"])


METRICS = {"loss": "-val/loss", "reward": "val/score/mean", "rewards/accuracies": "val/rewards/accuracies"}


def _best(value: Any, key: Key) -> Outcome:
    metric = METRICS.get(str(value).removeprefix("eval_"))
    if metric is None:
        return key.lacking("set save_best to a metric of docs/metrics.md")
    return key.changed({"save_best": metric}, "a leading - is for metrics of which lower values are better")


def _resume(value: Any, key: Key) -> Outcome:
    if isinstance(value, str):
        return key.lacking("a checkpoint of TRL is not read: set pretrain to its directory")
    return key.changed({"resume_from_checkpoint": "auto"}) if value else key.unneeded("it is off")


def _in_model(value: Any, key: Key) -> Outcome:
    """`model_init_kwargs`: those that have keys here."""
    writes: dict[str, Any] = {}
    rest = {}
    for name, item in value.items():
        if name in ("dtype", "torch_dtype"):
            writes |= {path: data for path, data in computed(key.source).items() if path.endswith("model_args.dtype")}
        elif name in ("attn_implementation", "trust_remote_code"):
            target = {f"{role}.model_args.{name}": item for role in roles(key.source)}
            writes |= _attention(item, key, target) if name == "attn_implementation" else target
        elif name not in ("use_cache", "device_map", "low_cpu_mem_usage") and (name, item) != ("revision", "main"):
            rest[name] = item
    if rest:
        return key.refused(
            f"no key for {', '.join(rest)}: keys of the model's config are model_args.model_config_kwargs"
        )
    return key.changed(writes) if writes else key.unneeded("the defaults here have its effect")


def _attention(value: Any, key: Key, target: dict[str, Any]) -> dict[str, Any]:
    return target if value in ("eager", "sdpa") else {}


def _attention_argument(value: Any, key: Key) -> Outcome:
    target = {f"{role}.model_args.attn_implementation": value for role in roles(key.source) if role != "actor_infer"}
    if writes := _attention(value, key, target):
        return key.renamed(writes)
    return key.unneeded("attn_implementation: auto is the fastest exact one")


def _precision(value: Any, key: Key) -> Outcome:
    writes = {path: item for path, item in computed(key.source).items() if path.endswith("model_args.dtype")}
    return key.changed(writes) if writes else key.unneeded("bf16 with weights in fp32 is the default")


def _checkpointing(value: Any, key: Key) -> Outcome:
    if value:
        return key.unneeded("it is on by default")
    return key.changed({f"{policy(key.source)}.model_args.disable_gradient_checkpointing": True})


def _kl(value: Any, key: Key) -> Outcome:
    if not has_rollouts(key.source):
        return key.renamed("beta")
    if value == 0:
        return key.unneeded("there is no KL penalty, as by default here")
    if key.source[TRAINER] == RLOO:
        return key.changed({"add_token_level_kl": True, "init_kl_coef": value}, "the KL is part of the reward")
    return key.changed({"use_kl_loss": True, "kl_loss_coef": value})


def _clip(value: Any, key: Key) -> Outcome:
    """`epsilon` and `epsilon_high`."""
    source = key.source
    low, high = number(source, "epsilon", 0.2), source.get("epsilon_high")
    high = low if high is None else high
    if loss(source) in ("sapo", "vespo"):
        return key.unneeded(f"{loss(source)} does not clip")
    if loss(source) == "cispo":
        return key.changed({"pg_options.clip_high": high}, "the largest weight")
    if is_sequence_level(source):
        return key.changed({"pg_options.clip_low": low, "pg_options.clip_high": high})
    return key.renamed("pg_clip") if low == high else key.changed({"pg_clip_low": low, "pg_clip_high": high})


def _delta(value: Any, key: Key) -> Outcome:
    return key.differs(
        "for negative advantages: for positive ones the upper clip is already lower", {"dual_clip": value}
    )


LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_agg_mode": "token-mean"},
    "bnpo": {"loss_agg_mode": "token-mean"},
    "grpo": {"loss_agg_mode": "seq-mean-token-mean"},
    "dr_grpo": {"loss_agg_mode": "seq-mean-token-sum-norm"},
    "cispo": {"pg_variant": "cispo", "loss_agg_mode": "token-mean"},
    "sapo": {"pg_variant": "sapo", "loss_agg_mode": "seq-mean-token-mean"},
    "luspo": {"pg_variant": "luspo", "loss_agg_mode": "seq-mean-token-mean"},
    "vespo": {"pg_variant": "vespo", "loss_agg_mode": "token-mean"},
}
"""GRPO's losses. The numbers and gradients are compared in tests/algorithms/test_grpo_against_trl.py."""


def _policy_loss(value: Any, key: Key) -> Outcome:
    if value not in LOSSES:
        return key.refused("not a loss of TRL 1.16")
    return key.changed(LOSSES[value])


def _ratio_level(value: Any, key: Key) -> Outcome:
    if value == "token":
        return key.unneeded("it is the default here")
    if value != "sequence":
        return key.refused("ratios are those of tokens or of sequences")
    return key.unneeded("luspo has it") if loss(key.source) == "luspo" else key.changed({"pg_variant": "gspo"})


def _scale(value: Any, key: Key) -> Outcome:
    if key.get("multi_objective_aggregation") == "normalize_then_sum":
        return key.unneeded("gdpo normalizes each reward")
    if value in (True, "group"):
        return key.unneeded("adv_estimator: grpo, the default here")
    writes = {"adv_estimator": "reinforce", "norm_mean_type": "group"}
    return key.changed(writes | ({"norm_std_type": "batch"} if value == "batch" else {}))


def _aggregation(value: Any, key: Key) -> Outcome:
    if value == "normalize_then_sum":
        return key.changed({"adv_estimator": "gdpo"})
    return key.unneeded("rewards are added before they are normalized")


def _entropy(value: Any, key: Key) -> Outcome:
    return (
        key.renamed("entropy_target")
        if key.get("use_adaptive_entropy")
        else key.unneeded("use_adaptive_entropy is off")
    )


def _of_loss(name: str, options: str) -> dict[str, Convert]:
    """Rules of a loss's options: TRL's name, `=` and that here if they differ."""
    pairs = [option.partition("=") for option in options.split()]
    return {
        f"{name}_{theirs}": only(
            lambda source: loss(source) == name, f"loss_type is not {name}", to(f"pg_options.{ours or theirs}")
        )
        for theirs, _, ours in pairs
    }


IS_MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
}


def correction(source: Source) -> dict[str, Any]:
    """`train_infer_correction.is_weight` that has the effect of TRL's correction, which needs vLLM."""
    if not source.get("use_vllm") or source.get("vllm_importance_sampling_correction") is False:
        return {"enabled": False}
    level, outside = IS_MODES.get(str(source.get("vllm_importance_sampling_mode")), ("sequence", "mask"))
    upper = number(
        source, "vllm_importance_sampling_cap", number(source, "vllm_importance_sampling_clip_max", RATIO_BOUND)
    )
    low = number(source, "vllm_importance_sampling_clip_min", 0.0)
    return {"enabled": True, "weight_type": level, "outside": outside, "upper_bound": upper, "lower_bound": low}


def _correction(value: Any, key: Key) -> Outcome:
    if not key.get("use_vllm"):
        return key.unneeded("use_vllm is off")
    return key.changed({"train_infer_correction.is_weight": correction(key.source)})


def _engine(name: str) -> Convert:
    rule: Convert = only("use_vllm", "use_vllm is off", to(f"actor_infer.strategy_args.strategy_config.{name}"))
    return rule


def _generation(value: Any, key: Key) -> Outcome:
    target = "actor_infer.generating_args"
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "stop": "stop_strings"}
    names |= {
        "repetition_penalty": "repetition_penalty",
        "min_new_tokens": "min_new_tokens",
        "min_tokens": "min_new_tokens",
    }
    if unknown := [name for name in value if name not in names]:
        return key.refused(f"no key for {', '.join(unknown)} in {target}")
    return key.changed({f"{target}.{names[name]}": item for name, item in value.items()})


def _length(value: Any, key: Key) -> Outcome:
    note = f"TRL truncates prompt and response together to {value} tokens; here each has the limit"
    return key.differs(note, {"prompt_length": value, "response_length": value})


def _on_prompt(value: Any, key: Key) -> Outcome:
    writes = {"train_on_prompt": not value}
    return key.changed(writes)


def _streaming(value: Any, key: Key) -> Outcome:
    if value and key.pipeline == "sft":
        return key.changed({"streaming": True}, "in a new order of all rows in each epoch, not of a buffer")
    return key.unneeded("rows are read into memory")


def _packing(value: Any, key: Key) -> Outcome:
    if not value:
        return key.unneeded("sequences are packed without padding and do not see each other")
    return key.differs("rows are packed anyway; a batch counts rows, not blocks of max_length tokens")


def _loss_types(value: Any, key: Key) -> Outcome:
    return replace(key.unchanged(), writes=((("loss_type",), losses(key.source)),))


def _neutral_loss(value: Any, key: Key) -> Outcome:
    if value in ("nll", "chunked_nll"):
        return key.unneeded("the negative log-likelihood, a mean over the tokens of a step")
    return key.refused("only the negative log-likelihood is supported")


def _lora(target: str) -> Convert:
    rule: Convert = only(has_lora, "no adapters are trained", to(f"{{role}}.model_args.{target}"))
    return rule


def _dropout(value: Any, key: Key) -> Outcome:
    return lora_dropout(key, enabled=has_lora(key.source))


def _four_bit(value: Any, key: Key) -> Outcome:
    if not value:
        return key.unneeded("models are not quantized")
    if not has_lora(key.source):
        return key.refused("only models below adapters are quantized")
    return key.changed({"{role}.model_args.load_in_4bit": True}, "the strategy is fsdp2_train")


def _reward_clip(value: Any, key: Key) -> Outcome:
    low, high = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if low is None or high is None or -low != high:
        return key.refused("reward_clip is symmetric")
    return key.changed({"reward_clip": high})


def _processes(value: Any, key: Key) -> Outcome:
    return key.changed({path: item for path, item in computed(key.source).items() if "device_mapping" in path})


def _distributed(value: Any, key: Key) -> Outcome:
    if str(value).upper() in ("MEGATRON_LM", "TPU", "XLA"):
        return key.refused("DeepSpeed, FSDP and data parallel are imported")
    return follows("strategy_args.strategy_name")(value, key)


# -- tables ------------------------------------------------------------------------------------------------------------

FASTER = unneeded("it does not affect results")
LOGS = unneeded("the run's record, samples.jsonl and report.html have it")
PUSHED = unneeded("`roll-core push` uploads an export")
SERVED = unneeded("the run starts its engine")
LAUNCHED = unneeded("the executor starts the workers")
OURS = "{role}.training_args"
TRAINING: dict[str, Any] = {
    **{
        name: to(f"{OURS}.{name}")
        for name in ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
    },
    **{name: to(f"{OURS}.{name}") for name in ("per_device_train_batch_size", "gradient_accumulation_steps")},
    "lr_scheduler_type": to(f"{OURS}.lr_scheduler_type"),
    "lr_scheduler_kwargs": to(f"{OURS}.lr_scheduler_kwargs"),
    **keys("warmup_steps warmup_ratio", _warmup),
    "optim": _optimizer,
    "optim_args": refused("set training_args.optimizer_kwargs"),
    "optim_target_modules": refused("an optimizer has all trained parameters"),
    "max_grad_norm": to("max_grad_norm"),
    "max_steps": _max_steps,
    "num_train_epochs": _epochs,
    "save_steps": _rate("save_steps"),
    "eval_steps": only(evaluates, "nothing is evaluated", _rate("eval_steps")),
    "logging_steps": _rate("logging_steps"),
    "save_strategy": _when("save_steps", "save_steps"),
    "eval_strategy": only(
        lambda source: bool(source.get("eval_dataset")), "there are no held-out rows", _when("eval_steps", "eval_steps")
    ),
    "save_total_limit": to("max_ckpt_to_keep"),
    "metric_for_best_model": _best,
    **keys("load_best_model_at_end greater_is_better", unneeded("metric_for_best_model decides: save_best")),
    "seed": to("seed"),
    "run_name": lambda value, key: experiment(key, "trl"),
    "output_dir": _directory,
    "report_to": nested(_trackers),
    "project": unneeded("set tracker_kwargs"),
    "resume_from_checkpoint": _resume,
    **keys("bf16 fp16", nested(_precision)),
    "gradient_checkpointing": _checkpointing,
    "label_smoothing_factor": refused("labels are not smoothed", 0, 0.0),
    "neftune_noise_alpha": refused("no noise is added to embeddings"),
    "train_sampling_strategy": only(
        trains(SFT, DPO, KTO, REWARD),
        "prompts are in a random order",
        nested(
            lambda value, key: (
                key.changed({"shuffle": False}) if value == "sequential" else key.unneeded("rows are shuffled")
            )
        ),
    ),
    "deepspeed": nested(follows("strategy_args")),
    **keys("fsdp fsdp_config", nested(follows("strategy_args"))),
    "full_determinism": unneeded("deterministic is on"),
    "data_seed": unneeded("seed decides the order of the rows"),
    "auto_find_batch_size": unsupported("the batch is as configured: `roll-core plan` estimates its memory", False),
    "average_tokens_across_devices": unneeded("losses are always means over the tokens of a step"),
    **keys(
        "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs tf32 torch_compile"
        " torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache"
        " torch_empty_cache_steps bf16_full_eval fp16_full_eval use_cpu dataloader_drop_last dataloader_num_workers"
        " dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order"
        " dataloader_multiprocessing_context dataset_num_proc pad_to_multiple_of padding_free pad_token"
        " remove_unused_columns label_names length_column_name group_by_length include_num_input_tokens_seen"
        " skip_memory_metrics debug per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches"
        " eval_use_gather_object prediction_loss_only include_for_metrics batch_eval_metrics eval_delay"
        " do_train do_eval do_predict precompute_ref_batch_size dataset_kwargs ignore_bias_buffers",
        FASTER,
    ),
    **keys(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout"
        " local_rank accelerator_config parallelism_config log_on_each_node save_on_each_node enable_jit_checkpoint"
        " ds3_gather_for_generation",
        LAUNCHED,
    ),
    **keys(
        "logging_strategy logging_first_step logging_nan_inf_filter logging_dir log_level log_level_replica"
        " disable_tqdm trackio_space_id trackio_bucket_id trackio_static_space_id",
        LOGS,
    ),
    **keys("push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision", PUSHED),
    **keys(
        "ignore_data_skip restore_callback_states_from_checkpoint save_only_model", unneeded("a checkpoint has all")
    ),
    "eval_on_start": unneeded("runs evaluate before the first step"),
}
MODEL: dict[str, Any] = {
    "model_name_or_path": to("pretrain"),
    "model_init_kwargs": nested(_in_model),
    "model_revision": refused("download the revision and name its directory", "main"),
    "dtype": nested(_precision),
    "attn_implementation": _attention_argument,
    "trust_remote_code": each_role("trust_remote_code"),
    "router_aux_loss_coef": refused(
        "set strategy_config.moe_aux_loss_coeff to it × top-k / layers with experts", 0, 0.0
    ),
    "disable_dropout": unneeded("dropout is always off in training"),
    "cast_lm_head_to_fp32": unneeded("logprobs are always computed in fp32"),
    "activation_offloading": unsupported("set strategy_config.activation_offloading of fsdp2_train", False),
    **keys("chat_template_path", refused("set tokenizer.chat_template or data_args.template")),
    "eos_token": refused("the end token is the tokenizer's"),
    "processing_class": unneeded("the model's tokenizer"),
    "use_peft": unneeded("the adapter's arguments have it"),
    "load_in_4bit": _four_bit,
    "load_in_8bit": refused("models below adapters have 4 bits: load_in_4bit", False),
    **keys("bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage bnb_4bit_compute_dtype", FASTER),
    **{
        prefix + name: rule
        for name, rule in {
            "r": _lora("lora_rank"),
            "alpha": _lora("lora_alpha"),
            "target_modules": _lora("lora_target"),
            "target_parameters": _lora("target_parameters"),
            "modules_to_save": _lora("additional_target"),
            "dropout": _dropout,
            "task_type": unneeded("the role determines what a model computes"),
        }.items()
        for prefix in ("lora_", "peft_config.")
    },
    **{f"{prefix}{name}": _lora(name) for name in ("use_rslora", "use_dora") for prefix in ("", "peft_config.")},
    **{f"peft_config.{name}": _lora(name) for name in ("rank_pattern", "alpha_pattern")},
    "peft_config.lora_alpha": _lora("lora_alpha"),
    "peft_config.lora_dropout": _dropout,
    "peft_config.bias": refused("biases are not trained", "none"),
    **keys(
        "peft_config.inference_mode peft_config.peft_type peft_config.auto_mapping peft_config.peft_version"
        " peft_config.base_model_name_or_path peft_config.revision peft_config.runtime_config"
        " peft_config.fan_in_fan_out",
        FASTER,
    ),
    **keys(
        "peft_config.exclude_modules peft_config.layers_to_transform peft_config.layers_pattern"
        " peft_config.megatron_config peft_config.megatron_core peft_config.trainable_token_indices"
        " peft_config.loftq_config peft_config.eva_config peft_config.corda_config peft_config.lora_ga_config"
        " peft_config.velora_config peft_config.alora_invocation_tokens peft_config.use_qalora"
        " peft_config.qalora_group_size peft_config.monteclora_config peft_config.layer_replication"
        " peft_config.lora_bias peft_config.use_bdlora peft_config.arrow_config peft_config.kasa_config"
        " peft_config.ensure_weight_tying",
        refused("adapters have no such option", False),
    ),
    "peft_config.init_lora_weights": refused("adapters begin at 0", True),
}
DATA: dict[str, Any] = {
    **{
        f"{part}_dataset{suffix}": rule
        for part in ("train", "eval")
        for suffix, rule in {
            ".steps": refused(
                "rows are read as they are: save the mapped data set, or set data_args.columns; map, filter and"
                " shuffle of a script are not run"
            ),
        }.items()
    },
    "train_dataset": to("{role}.data_args.file_name"),
    "eval_dataset": only(evaluates, "eval_strategy is no", to("validation.data_args.file_name")),
    **keys("dataset_streaming streaming", _streaming),
    "datasets": refused("list the files in data_args.file_name"),
    "test_split_size": refused("held-out rows are files of their rules: validation.data_args"),
    "callbacks": unneeded("hooks of a plugin observe a run"),
    "optimizers": refused("set training_args.optimizer"),
    "data_collator": unneeded("sequences are packed"),
}
ACCELERATE: dict[str, Any] = {
    "num_processes": _processes,
    "distributed_type": _distributed,
    "mixed_precision": unneeded("bf16 and fp16 of the trainer's arguments decide"),
    "deepspeed_config": {
        **keys("zero_stage offload_optimizer_device offload_param_device", nested(follows("zero_optimization"))),
        **keys("gradient_accumulation_steps gradient_clipping", unneeded("the trainer's arguments have it")),
        **keys(
            "deepspeed_multinode_launcher zero3_init_flag zero3_save_16bit_model deepspeed_hostfile"
            " deepspeed_moe_layer_cls_names offload_optimizer_nvme_path offload_param_nvme_path",
            LAUNCHED,
        ),
        "deepspeed_config_file": refused("name it in the trainer's argument deepspeed"),
    },
    "fsdp_config": {
        "fsdp_offload_params": nested(follows("offload_policy")),
        **keys(
            "fsdp_version fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch"
            " fsdp_backward_prefetch_policy fsdp_cpu_ram_efficient_loading fsdp_forward_prefetch fsdp_use_orig_params"
            " fsdp_sync_module_states fsdp_state_dict_type fsdp_sharding_strategy fsdp_reshard_after_forward"
            " fsdp_activation_checkpointing fsdp_min_num_params",
            FASTER,
        ),
    },
    "dynamo_config": nested(lambda value, key: key.unneeded("torch.compile is not used")),
    **keys(
        "compute_environment debug downcast_bf16 enable_cpu_affinity gpu_ids machine_rank main_process_ip"
        " main_process_port main_training_function num_machines rdzv_backend same_network tpu_env tpu_use_cluster"
        " tpu_use_sudo use_cpu",
        LAUNCHED,
    ),
}
ROLLOUTS: dict[str, Any] = {
    "reward_funcs": nested(
        lambda value, key: key.refused(
            "a reward is a function, or a reward model's name, with one of reward_weights each"
        )
    ),
    "reward_weights": unneeded("reward_funcs has them"),
    "reward_processing_classes": unneeded("a reward model has its own tokenizer"),
    "num_generations": to("num_return_sequences_in_group"),
    "num_generations_eval": only(
        evaluates, "nothing is evaluated", to("validation.generating_args.num_return_sequences")
    ),
    "max_prompt_length": to("prompt_length"),
    "max_completion_length": to("response_length"),
    "shuffle_dataset": unsupported("prompts are always in a random order", True),
    **keys("generation_batch_size steps_per_generation", follows("rollout_batch_size")),
    **{
        name: to(f"actor_infer.generating_args.{name}")
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    },
    "generation_kwargs": nested(_generation),
    "chat_template_kwargs": each_data("chat_template_kwargs"),
    "use_vllm": nested(follows("actor_infer.strategy_args")),
    "vllm_mode": only("use_vllm", "use_vllm is off", follows("actor_infer.device_mapping")),
    "vllm_gpu_memory_utilization": _engine("gpu_memory_utilization"),
    "vllm_max_model_length": _engine("max_model_len"),
    "vllm_tensor_parallel_size": _engine("tensor_parallel_size"),
    "vllm_model_impl": unsupported("vLLM's own models are used", "vllm", "auto"),
    "vllm_structured_outputs_regex": refused("responses are not constrained: guided tokens have other probabilities"),
    "vllm_enable_sleep_mode": unneeded("idle roles are offloaded by is_offload_states"),
    **keys("vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port", SERVED),
    "beta": _kl,
    "num_iterations": to("ppo_epochs"),
    **keys("epsilon epsilon_high", _clip),
    "mask_truncated_completions": to("max_len_mask"),
    "sync_ref_model": refused("the reference is fixed", False),
    **keys("ref_model_mixup_alpha ref_model_sync_steps", unneeded("sync_ref_model decides")),
    **keys("log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo", LOGS),
    **keys(
        "cache_implementation use_transformers_continuous_batching transformers_continuous_batching_config"
        " use_transformers_paged",
        FASTER,
    ),
    **keys(
        "tools environment_factory max_tool_calling_iterations", refused("turns with tools are the pipeline agentic")
    ),
    "rollout_func": refused("an environment of the pipeline agentic replaces it"),
    "quantization_config": refused("models below adapters are quantized by load_in_4bit"),
}
GRPO_KEYS: dict[str, Any] = {
    **ROLLOUTS,
    "delta": _delta,
    "loss_type": _policy_loss,
    "importance_sampling_level": _ratio_level,
    "scale_rewards": _scale,
    "multi_objective_aggregation": _aggregation,
    **_of_loss("sapo", "temperature_pos=tau_pos temperature_neg=tau_neg"),
    **_of_loss("vespo", "k_pos k_neg lambda_pos lambda_neg"),
    "top_entropy_quantile": to("top_entropy_quantile"),
    "entropy_coef": to("entropy_loss_coef"),
    "use_adaptive_entropy": unneeded("entropy_target has it"),
    "entropy_target": _entropy,
    **{
        name: only("use_adaptive_entropy", "use_adaptive_entropy is off", to(name))
        for name in ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta")
    },
    **keys(
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max"
        " vllm_importance_sampling_clip_min vllm_importance_sampling_cap",
        nested(_correction),
    ),
    "off_policy_mask_threshold": to("train_infer_correction.off_policy_mask_threshold"),
    "use_bias_correction_kl": only(lambda source: beta(source) > 0, "there is no KL penalty", to("kl_loss_unbiased")),
}
RLOO_KEYS: dict[str, Any] = {
    **ROLLOUTS,
    "normalize_advantages": to("whiten_advantages"),
    "reward_clip_range": nested(_reward_clip),
}
TUNED: dict[str, Any] = {
    "max_length": _length,
    "truncation_mode": unsupported("the end of a response is cut", "keep_start"),
}
REFERENCES: dict[str, Any] = {
    **TUNED,
    "ref_model": to("reference.model_args.model_name_or_path"),
    "precompute_ref_log_probs": to("precompute_ref_log_probs"),
    "beta": _kl,
    "loss_type": nested(_loss_types),
    **{
        name: ROLLOUTS[name]
        for name in ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "quantization_config")
    },
}
SFT_KEYS: dict[str, Any] = {
    **TUNED,
    "dataset_text_field": refused("rows need prompts and responses: split the text into two columns", "text"),
    "shuffle_dataset": unneeded("rows are shuffled in each epoch"),
    **keys("packing", _packing),
    **keys("packing_strategy eval_packing", unneeded("packing decides")),
    **keys("completion_only_loss assistant_only_loss", _on_prompt),
    "loss_type": _neutral_loss,
    "quantization_config": ROLLOUTS["quantization_config"],
    "formatting_func": refused("rows are read as they are: save the formatted rows"),
}
DPO_KEYS: dict[str, Any] = {
    **REFERENCES,
    **{
        name: to(name) for name in ("loss_weights", "ld_alpha", "f_divergence_type", "label_smoothing", "use_weighting")
    },
    "f_alpha_divergence_coef": only(
        lambda source: "alpha" in str(source.get("f_divergence_type")),
        "the divergence is another",
        to("f_alpha_divergence_coef"),
    ),
    "discopop_tau": only(lambda source: "discopop" in losses(source), "the loss is another", to("discopop_tau")),
}
KTO_KEYS: dict[str, Any] = {**REFERENCES, **{name: to(name) for name in ("desirable_weight", "undesirable_weight")}}
REWARD_KEYS: dict[str, Any] = {**TUNED, "center_rewards_coefficient": to("center_rewards_coefficient")}
TABLES: dict[str, dict[str, Any]] = {
    trainer: {**TRAINING, **MODEL, **DATA, "accelerate": ACCELERATE, **rules}
    for trainer, rules in zip(TRAINERS, (GRPO_KEYS, RLOO_KEYS, SFT_KEYS, DPO_KEYS, KTO_KEYS, REWARD_KEYS), strict=True)
}
HARMLESS = frozenset({"output_dir", "run_name", "report_to", "logging_steps", "save_steps", "eval_steps", "project"})
"""Arguments without effect on training: if the script computes them, roll-core's defaults apply."""

# -- defaults ----------------------------------------------------------------------------------------------------------


def _has_kl(source: Source) -> bool:
    return has_rollouts(source) and beta(source) > 0


def _by_policy(name: str, value: Any, when: Condition = always) -> tuple[Default, ...]:
    """A default of the trained role."""

    def of(role: str) -> Condition:
        return lambda source: policy(source) == role and when(source)

    return tuple(Default(f"{role}.{name}", value, of(role)) for role in ("actor_train", *POLICY.values()))


IS_GRPO, IS_RLOO = trains(GRPO), trains(RLOO)
DEFAULTS: tuple[Default, ...] = (
    *_by_policy("training_args.learning_rate", lambda source, _: LEARNING_RATES[source[TRAINER]]),
    *_by_policy(
        "training_args.num_train_epochs",
        3.0,
        lambda source: not has_rollouts(source) and number(source, "max_steps", -1) <= 0,
    ),
    *_by_policy("model_args.lora_target", "all-linear", has_lora),
    *_by_policy("model_args.lora_rank", lambda source, _: 16 if source.get("use_peft") else 8, has_lora),
    *_by_policy("model_args.lora_alpha", lambda source, _: 32 if source.get("use_peft") else 8, has_lora),
    Default("save_steps", lambda source, _: max(math.ceil(500 / steps_per_batch(source)), 1)),
    Default("response_length", 512, has_rollouts),
    Default("prompt_length", 1024, lambda source: not has_rollouts(source)),
    Default("response_length", 1024, lambda source: not has_rollouts(source)),
    Default("overlong", "truncate", lambda source: not has_rollouts(source)),
    Default("num_return_sequences_in_group", 2, IS_RLOO),
    Default("loss_agg_mode", "token-mean", IS_GRPO),
    Default(
        "norm_epsilon",
        1e-4,
        lambda source: IS_GRPO(source) and source.get("scale_rewards") not in (False, "none"),
    ),
    Default("adv_estimator", "rloo", IS_RLOO),
    Default("loss_agg_mode", "seq-mean-token-sum", IS_RLOO),
    Default("add_token_level_kl", True, lambda source: IS_RLOO(source) and _has_kl(source)),
    Default("init_kl_coef", lambda source, _: beta(source), lambda source: IS_RLOO(source) and _has_kl(source)),
    Default("kl_loss_unbiased", True, lambda source: IS_GRPO(source) and _has_kl(source)),
    Default("pg_options.clip_low", 0.2, lambda source: IS_GRPO(source) and is_sequence_level(source)),
    Default("pg_options.clip_high", 0.2, lambda source: IS_GRPO(source) and is_sequence_level(source)),
    Default(
        "train_infer_correction.is_weight",
        lambda source, _: correction(source),
        lambda source: IS_GRPO(source) and bool(source.get("use_vllm")),
    ),
    Default(
        "actor_infer.strategy_args.strategy_config.gpu_memory_utilization",
        VLLM_DEFAULT,
        lambda source: has_rollouts(source) and bool(source.get("use_vllm")),
    ),
    Default("loss_type", lambda source, _: losses(source), trains(DPO, KTO)),
    Default("train_on_prompt", True, lambda source: source[TRAINER] == SFT and "completion_only_loss" not in source),
)
"""TRL's defaults that differ from roll-core's. `computed` has those that follow from several arguments."""
