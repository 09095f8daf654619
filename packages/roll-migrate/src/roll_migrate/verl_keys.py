"""Conversion rules for the keys of verl's PPO trainer (0.9.1). Update them here if keys change on either side.

Names, defaults and meanings are those of verl/trainer/config and of the code that reads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from roll_migrate.rules import (
    Each,
    Key,
    KeyRule,
    Outcome,
    Table,
    change,
    changed,
    dotted,
    each,
    only,
    refused,
    to,
    unneeded,
    unsupported,
    value_at,
)
from roll_migrate.shared_rules import count_rows, experiment, lora_dropout, python_function, track_with

if TYPE_CHECKING:
    from roll_core.config.source import KeyPath

ROLE = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = (ROLE, "actor"), (ROLE, "ref"), (ROLE, "rollout")
REWARD = "verl"
"""Name of the one reward in `rewards`."""


# -- facts of a config -------------------------------------------------------------------------------------------------


def given(source: Mapping[str, Any], path: KeyPath, default: Any) -> Any:
    """Value at `path`, or verl's default."""
    value = value_at(source, path)
    return default if value is None else value


def backend(source: Mapping[str, Any], role: KeyPath = ACTOR) -> str:
    """`megatron`, `veomni` or `fsdp`: the engine that trains or scores a role."""
    strategy = value_at(source, (*role, "strategy"))
    if strategy is None and role != ACTOR:
        return backend(source)
    for name in ("megatron", "veomni"):
        chosen = source.get("model_engine") == name or value_at(source, (*ACTOR, name))
        if strategy == name or (strategy is None and chosen):
            return name
    return "fsdp"


def num_gpus(source: Mapping[str, Any]) -> int:
    """Number of GPUs of verl's resource pool."""
    return _int(given(source, ("trainer", "n_gpus_per_node"), 8)) * _int(given(source, ("trainer", "nnodes"), 1))


def _int(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1


def ulysses(source: Mapping[str, Any], role: KeyPath) -> int:
    """Ulysses sequence parallel size of a role."""
    if backend(source, role) == "veomni":
        return _int(given(source, (*role, "veomni", "ulysses_parallel_size"), 1))
    default = given(source, (*role, "fsdp_config", "ulysses_sequence_parallel_size"), 1)
    return _int(given(source, (*role, "ulysses_sequence_parallel_size"), default))


def data_parallel(source: Mapping[str, Any], role: KeyPath) -> int:
    """Data parallel size of a role."""
    shards = ulysses(source, role)
    if backend(source, role) == "megatron":
        shards = 1
        for name in ("tensor_model", "pipeline_model", "context"):
            shards *= _int(given(source, (*role, "megatron", f"{name}_parallel_size"), 1))
    return max(num_gpus(source) // shards, 1)


def lora_rank(source: Mapping[str, Any]) -> int:
    """Rank of the policy's adapters; 0 without LoRA. Megatron's has keys of its own."""
    path = ("lora", "rank") if backend(source) == "megatron" else ("lora_rank",)
    rank: int = given(source, (ROLE, "model", *path), 0)
    return rank


def splits_sequences(source: Mapping[str, Any], role: KeyPath) -> bool:
    """True if Megatron's sequence parallelism, verl's default, has an effect in a role."""
    size = given(source, (*(ACTOR if role == REF else role), "megatron", "tensor_model_parallel_size"), 1)
    size = given(source, (*role, "megatron", "tensor_model_parallel_size"), size)
    return size != 1 and bool(given(source, (*role, "megatron", "sequence_parallel"), True))


def expert_parallel_copies(source: Mapping[str, Any]) -> int:
    """Data-parallel copies of attention in an engine that distributes experts over all its GPUs; otherwise 1."""
    experts = _int(given(source, (*ROLLOUT, "expert_parallel_size"), 1))
    return _int(given(source, (*ROLLOUT, "data_parallel_size"), 1)) if experts > 1 else 1


def dynamic(source: Mapping[str, Any], role: KeyPath) -> bool:
    """True if micro-batches of a role are filled by tokens."""
    return bool(given(source, (*role, "use_dynamic_bsz"), value_at(source, (*ACTOR, "use_dynamic_bsz"))))


def micro_batch(source: Mapping[str, Any], role: KeyPath) -> int:
    """Sequences per micro-batch and rank."""
    return 1 if dynamic(source, role) else _int(value_at(source, (*role, "ppo_micro_batch_size_per_gpu")))


def accumulation(source: Mapping[str, Any], role: KeyPath) -> tuple[int, str]:
    """Micro-batches per optimizer step, and the arithmetic. verl counts a mini-batch in prompts."""
    default = given(source, (*ACTOR, "ppo_mini_batch_size"), 256)
    mini, n = _int(given(source, (*role, "ppo_mini_batch_size"), default)), responses(source)
    parallel, micro = data_parallel(source, role), micro_batch(source, role)
    steps, rest = divmod(mini * n, parallel * micro)
    how = (
        f"{mini} prompts × n {n} = {mini * n} samples per optimizer step: {steps} × {micro} × data parallel {parallel}"
    )
    return max(steps, 1), f"{how}; verl refuses a remainder of {rest}" if rest else how


def responses(source: Mapping[str, Any]) -> int:
    """Responses per prompt."""
    return _int(given(source, (*ROLLOUT, "n"), 1))


def has_reference(source: Mapping[str, Any]) -> bool:
    """True if a KL penalty needs the reference. With LoRA the base model is the reference, as in verl."""
    if lora_rank(source):
        return False
    return bool(value_at(source, (*ACTOR, "use_kl_loss")) or value_at(source, ("algorithm", "use_kl_in_reward")))


def has_critic(source: Mapping[str, Any]) -> bool:
    """True if the algorithm has a critic."""
    enabled = value_at(source, ("critic", "enable"))
    return given(source, ("algorithm", "adv_estimator"), "gae") == "gae" if enabled is None else bool(enabled)


def positive(value: Any) -> bool:
    """True for a number above 0."""
    return isinstance(value, (int, float)) and value > 0


def warms_up(source: Mapping[str, Any], optim: KeyPath) -> bool:
    """True if a learning rate has a warm-up."""
    names = ("lr_warmup_steps", "lr_warmup_steps_ratio")
    return any(positive(value_at(source, (*optim, name))) for name in names)


def loss_mode(source: Mapping[str, Any]) -> str:
    """verl's policy loss."""
    return str(given(source, (*ACTOR, "policy_loss", "loss_mode"), "vanilla"))


# -- kinds of rules ----------------------------------------------------------------------------------------------------


def switched(note: str, switch: str = "enable") -> KeyRule:
    """Reject a mapping if its switch is on."""

    def convert(value: Any, key: Key) -> Outcome:
        if not isinstance(value, Mapping) or not value.get(switch):
            return Outcome("not needed", (), f"{switch} is off")
        return Outcome("unsupported", ((key.path, value),), f"{note}; left in the config, which `check` rejects")

    return KeyRule(f"rejected if {switch} is on: {note}", convert)


# -- values ------------------------------------------------------------------------------------------------------------


def files(target: str) -> KeyRule:
    """Write the names of data files, without `~`."""

    def convert(value: Any, key: Key) -> Outcome:
        names = value if isinstance(value, list) else [value]
        found = [os.path.expanduser(name) if isinstance(name, str) else name for name in names]
        return Outcome("renamed", ((dotted(target), found if isinstance(value, list) else found[0]),))

    return change(f"→ `{target}`", convert, nested=True)


def _prompt_key(value: Any, key: Key) -> Outcome:
    roles = ("actor_train", "validation") if key.beside("val_files") else ("actor_train",)
    return Outcome("renamed", tuple(((role, "data_args", "messages"), value) for role in roles))


def evaluates(source: Mapping[str, Any]) -> bool:
    """True if there are held-out prompts."""
    return bool(value_at(source, ("data", "val_files")))


def _samples(target: str) -> KeyRule:
    return to(target, neutral=(-1,))


def media(value: Any, key: Key) -> Outcome:
    """Keep the key of a column of images, videos or audio."""
    defaults = {"image_key": "images", "video_key": "videos"}
    if all(key.beside(name) == default for name, default in defaults.items()) and value in (
        *defaults.values(),
        "audios",
    ):
        return Outcome("not needed", (), "verl's default, which a composed config has for text too")
    note = "rows with images, videos or audio are not supported; left in the config, which `check` rejects"
    return Outcome("unsupported", ((key.path, value),), note)


def _truncation(value: Any, key: Key) -> Outcome:
    if value == "error" or key.beside("filter_overlong_prompts"):
        return Outcome("not needed", (), "longer prompts are dropped and counted")
    return Outcome("differs", (), f"verl truncates longer prompts ({value}); here they are dropped and counted")


def _overlong_prompts(value: Any, key: Key) -> Outcome:
    if value or key.beside("truncation") not in (None, "error"):
        return Outcome("not needed", (), "longer prompts are dropped and counted")
    return Outcome("differs", (), "verl stops at a longer prompt; here longer prompts are dropped and counted")


def _train_shuffle(value: Any, key: Key) -> Outcome:
    if value:
        return Outcome("not needed", (), "prompts are shuffled in each pass over the data")
    return Outcome("differs", (), "verl keeps the order of the file; here prompts are shuffled in each pass")


ESTIMATORS = {
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "grpo_passk": "pass_at_k",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}


def _estimator(value: Any, key: Key) -> Outcome:
    name = ESTIMATORS.get(value, value)
    if name != "grpo":
        return Outcome("changed" if name != value else "kept", ((("adv_estimator",), name),))
    if key.beside("norm_adv_by_std_in_grpo") is False:
        writes = ((("adv_estimator",), "reinforce"), (("norm_mean_type",), "group"))
        return Outcome("changed", writes, "without the group's deviation (Dr. GRPO)")
    if responses(key.source) == 1:
        note = "the advantage of a group of one is its reward in verl, and 0 here"
        return Outcome("differs", ((("adv_estimator",), name),), note)
    if key.beside("use_kl_in_reward"):
        note = "verl subtracts the KL before the group's mean and deviation, roll-core after"
        return Outcome("differs", ((("adv_estimator",), name),), note)
    return Outcome("kept", ((("adv_estimator",), name),), "the same epsilon, 1e-6, and the unbiased deviation")


KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k1": "k1", "k2": "k2", "k3": "k3", "abs": "abs"}


def _kl_loss_type(value: Any, key: Key) -> Outcome:
    if not key.beside("use_kl_loss"):
        return Outcome("not needed", (), "use_kl_loss is off")
    name = str(value)
    writes: list[tuple[KeyPath, Any]] = [(("kl_loss_penalty",), KL.get(name.removesuffix("+"), value))]
    if name.endswith("+"):
        writes.append((("kl_loss_unbiased",), True))
        note = "the value is that of the estimator, its gradient the unbiased one of the KL, as in verl"
        return Outcome("changed", tuple(writes), note)
    return Outcome("changed" if writes[0][1] != value else "renamed", tuple(writes))


def _kl_penalty(value: Any, key: Key) -> Outcome:
    if not key.beside("use_kl_in_reward"):
        return Outcome("not needed", (), "use_kl_in_reward is off")
    return Outcome("changed", ((("kl_penalty",), KL.get(value, value)),))


def _in_reward(rule: KeyRule) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        if not key.at("algorithm", "use_kl_in_reward"):
            return Outcome("not needed", (), "use_kl_in_reward is off")
        return rule(value, key)

    return KeyRule(rule.says, convert)


def _if_adaptive(target: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        if key.beside("type") != "adaptive":
            return Outcome("not needed", (), "kl_ctrl.type is not adaptive")
        return Outcome("renamed", ((dotted(target), value),))

    return _in_reward(KeyRule(f"→ `{target}`", convert))


def _aggregation(value: Any, key: Key) -> Outcome:
    if value == "seq-mean-token-sum-norm":
        note = "the constant is response_length here; in verl loss_scale_factor, or the padded length"
        return Outcome("differs", ((("loss_agg_mode",), value),), note)
    return Outcome("kept", ((("loss_agg_mode",), value),), "over the optimizer step of all ranks, as in verl")


def _scale_factor(value: Any, key: Key) -> Outcome:
    length = given(key.source, ("data", "max_response_length"), 512)
    if key.beside("loss_agg_mode") != "seq-mean-token-sum-norm" or value == length:
        return Outcome("not needed", (), "the constant of seq-mean-token-sum-norm is response_length")
    return Outcome("unsupported", ((key.path, value),), f"the constant is response_length {length}; `check` rejects it")


def clip_range(source: Mapping[str, Any]) -> tuple[Any, Any]:
    """Lower and upper clip bound: 0.2 by default, and `clip_ratio` where it is null."""
    actor, ends = value_at(source, ACTOR) or {}, ("clip_ratio_low", "clip_ratio_high")
    low, high = (0.2 if end not in actor else given(actor, (end,), actor.get("clip_ratio", 0.2)) for end in ends)
    return low, high


BOUNDS = {"gspo": "clip", "cispo": "clip", "geo_mean": "clip", "dppo_tv": "delta", "dppo_kl": "delta"}
"""Losses with clip bounds in `pg_options`: the beginning of the options' names."""


def _clip_ratio(value: Any, key: Key) -> Outcome:
    ends = [end for end in ("low", "high") if key.at(*ACTOR).get(f"clip_ratio_{end}", 0.2) is None]
    if ends:
        return _bounds(key, *ends)
    if value == 0.2:
        return Outcome("not needed", (), "it is the default here")
    low, high = clip_range(key.source)
    return Outcome(
        "dead", (), f"clip_ratio_low {low} and clip_ratio_high {high} take precedence; both are 0.2 by default"
    )


def _clip_end(end: str) -> KeyRule:
    says = f"→ `pg_clip_{end}`, or `pg_options` of the loss"
    return KeyRule(says, lambda value, key: _bounds(key, end))


def _bounds(key: Key, *ends: str) -> Outcome:
    """Writes the lower or the upper clip bound."""
    loss, (low, high) = loss_mode(key.source), clip_range(key.source)
    bounds = [(end, {"low": low, "high": high}[end]) for end in ends]
    if loss in BOUNDS:
        return Outcome("renamed", tuple((("pg_options", f"{BOUNDS[loss]}_{end}"), each) for end, each in bounds))
    if loss not in ("vanilla", "clip_cov"):
        return Outcome("not needed", (), f"{loss} does not clip")
    if (low, high) == (0.2, 0.2):
        return Outcome("not needed", (), "it is the default here")
    return Outcome("renamed", tuple(((f"pg_clip_{end}",), bound) for end, bound in bounds), "clip-higher")


def _clip_c(value: Any, key: Key) -> Outcome:
    loss = loss_mode(key.source)
    if loss.startswith("dppo"):
        return Outcome("renamed", ((("pg_options", "ratio_high"), value),))
    if loss != "vanilla":
        return Outcome("not needed", (), f"{loss} does not clip twice")
    return Outcome("renamed", ((("dual_clip",), value),), "always on in verl")


LOSSES = {"geo_mean": "gmpo", "dppo_tv": "dppo", "dppo_kl": "dppo"}
LOSS_OPTIONS = {"cispo": {"bounds": "relative"}, "dppo_tv": {"divergence": "tv"}, "dppo_kl": {"divergence": "kl"}}
OTHER_RESULTS = {
    "geo_mean": "verl averages over the sequences of a micro-batch, roll-core over those of the optimizer step",
    "clip_cov": "verl clips a share of the tokens, roll-core tokens with a probability: see pg_options",
    "kl_cov": "verl penalizes a share of the tokens, roll-core those above a covariance: see pg_options",
    "dppo_tv": "here the divergence is that from the engine's logprobs",
    "dppo_kl": "here the divergence is that from the engine's logprobs",
}


def _loss_mode(value: Any, key: Key) -> Outcome:
    if value == "vanilla":
        return Outcome("not needed", (), "verl's vanilla is pg_variant ppo, the default, with dual_clip")
    options = ((("pg_options", name), each) for name, each in LOSS_OPTIONS.get(value, {}).items())
    writes: tuple[tuple[KeyPath, Any], ...] = ((("pg_variant",), LOSSES.get(value, value)), *options)
    return Outcome("differs" if value in OTHER_RESULTS else "renamed", writes, OTHER_RESULTS.get(value, ""))


def _constant_of(loss: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        if loss_mode(key.source) == loss:
            return Outcome("differs", (), f"not converted: set pg_options of {loss}, see docs/algorithms.md")
        return Outcome("not needed", (), f"it is a constant of {loss}")

    return KeyRule(f"not converted: `pg_options` of {loss}", convert)


def _mini_batch(value: Any, key: Key) -> Outcome:
    role = _ours(key)
    steps, how = accumulation(key.source, key.path[:-1])
    return changed(f"{role}.training_args.gradient_accumulation_steps", steps, how)


def _micro_batch(value: Any, key: Key) -> Outcome:
    if dynamic(key.source, key.path[:-1]):
        return Outcome("not needed", (), "use_dynamic_bsz fills micro-batches by tokens")
    return Outcome("renamed", ((dotted(f"{_ours(key)}.training_args.per_device_train_batch_size"), value),))


def _ours(key: Key) -> str:
    if key.pipeline == "sft":
        return "sft_train"
    return "critic" if key.path[0] == "critic" else "reference" if key.path[:2] == REF else "actor_train"


def _tokens(name: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        role = ACTOR if key.path[:2] == ROLLOUT else key.path[:-1]
        switch = key.beside("log_prob_use_dynamic_bsz") if name == "infer" else None
        if not (dynamic(key.source, role) if switch is None else switch):
            return Outcome("not needed", (), "use_dynamic_bsz is off")
        size = ulysses(key.source, role)
        note = f"{value} per GPU × ulysses_sequence_parallel_size {size}" if size > 1 else ""
        target = f"{_ours(key)}.max_tokens_per_microbatch_in_{name}"
        return Outcome("renamed", ((dotted(target), value * size if isinstance(value, int) else value),), note)

    return KeyRule(f"→ `max_tokens_per_microbatch_in_{name}`", convert)


def _dynamic(name: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        if not value:
            return Outcome("not needed", (), "it is off here too")
        return Outcome("renamed", ((dotted(f"{_ours(key)}.use_dynamic_batching_in_{name}"), True),))

    return KeyRule(f"→ `use_dynamic_batching_in_{name}`", convert)


def _in_role(name: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        return Outcome("renamed", ((dotted(f"{_ours(key)}.{name}"), value),))

    return KeyRule(f"→ `{name}` of the role", convert)


def _of_training(name: str) -> KeyRule:
    """Like `_in_role`, for keys that `megatron_infer` rejects."""
    rule = _in_role(name)

    def convert(value: Any, key: Key) -> Outcome:
        return Outcome("not needed", (), ONLY_SCORES) if _ours(key) == "reference" else rule(value, key)

    return KeyRule(rule.says, convert)


def _dtype(value: Any, key: Key) -> Outcome:
    if value in ("fp32", "float32"):
        return Outcome("not needed", (), "the optimizer updates fp32 weights; the computation is bf16")
    return Outcome("differs", (), f"verl stores the trained weights in {value}; here the optimizer has fp32 weights")


def _fsdp_size(value: Any, key: Key) -> Outcome:
    if not isinstance(value, int) or value < 1:
        return Outcome("not needed", (), "all ranks share one copy of the model")
    return Outcome("renamed", ((dotted(f"{_ours(key)}.strategy_args.strategy_config.fsdp_size"), value),))


def _sequence_parallel(value: Any, key: Key) -> Outcome:
    if value == 1:
        return Outcome("not needed", (), "1 has no effect")
    if backend(key.source) == "megatron":
        return Outcome("not needed", (), "Megatron has context_parallel_size")
    return Outcome("renamed", ((dotted(f"{_ours(key)}.strategy_args.strategy_config.ulysses_size"), value),))


def _megatron_sequences(value: Any, key: Key) -> Outcome:
    if not value or key.beside("tensor_model_parallel_size") in (None, 1):
        return Outcome("not needed", (), "it has no effect without tensor parallelism")
    return Outcome("renamed", ((dotted(f"{_ours(key)}.strategy_args.strategy_config.sequence_parallel"), value),))


def _veomni_fsdp_size(value: Any, key: Key) -> Outcome:
    """VeOmni counts ranks with different sequences, and shards over the ranks that share one, too."""
    ranks = value * ulysses(key.source, key.path[:-2]) if isinstance(value, int) else value
    if not isinstance(ranks, int) or not 0 < ranks < num_gpus(key.source):
        return Outcome("not needed", (), "all ranks share one copy of the model")
    note = "" if ranks == value else f"{value} × ulysses_parallel_size"
    return changed(f"{_ours(key)}.{STRATEGY}.fsdp_size", ranks, note)


def _recompute_modules(value: Any, key: Key) -> Outcome:
    if _ours(key) == "reference":
        return Outcome("not needed", (), ONLY_SCORES)
    if key.beside("recompute_granularity") != "selective":
        return Outcome("not needed", (), "recompute_granularity is not selective")
    return Outcome("renamed", ((dotted(f"{_ours(key)}.strategy_args.strategy_config.recompute_modules"), value),))


def _strategy(value: Any, key: Key) -> Outcome:
    by_fsdp2 = str(value).startswith("fsdp") or value == "veomni"
    train = "megatron_train" if value == "megatron" else "fsdp2_train" if by_fsdp2 else value
    name = str(train).replace("_train", "_infer") if _ours(key) == "reference" else train
    return changed(f"{_ours(key)}.strategy_args.strategy_name", name, "by FSDP2" if by_fsdp2 else "")


def _schedule(value: Any, key: Key) -> Outcome:
    target, optim = f"{_ours(key)}.training_args", key.path[:-1]
    warm = warms_up(key.source, optim)
    floor = value_at(key.source, (*optim, "min_lr_ratio")) or 0
    if value == "constant":
        return changed(f"{target}.lr_scheduler_type", "constant_with_warmup" if warm else "constant")
    if value == "cosine" and floor:
        writes = (
            (dotted(f"{target}.lr_scheduler_type"), "cosine_with_min_lr"),
            (dotted(f"{target}.lr_scheduler_kwargs.min_lr_rate"), floor),
        )
        return Outcome("changed", writes)
    return Outcome("renamed", ((dotted(f"{target}.lr_scheduler_type"), value),))


def _positive(name: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        if not isinstance(value, (int, float)) or value <= 0:
            return Outcome("not needed", (), "there is no warm-up")
        return Outcome("renamed", ((dotted(f"{_ours(key)}.training_args.{name}"), value),))

    return KeyRule(f"→ `training_args.{name}`", convert)


def _betas(value: Any, key: Key) -> Outcome:
    if not isinstance(value, list) or len(value) != 2:
        return Outcome("unsupported", ((key.path, value),), "expected two numbers")
    target = f"{_ours(key)}.training_args"
    return Outcome("renamed", tuple((dotted(f"{target}.adam_beta{at}"), each) for at, each in enumerate(value, 1)))


def _grad_clip(value: Any, key: Key) -> Outcome:
    """verl 0.9 reads only optim.clip_grad; older versions read grad_clip with FSDP."""
    actor = given(key.source, (*ACTOR, "optim", "clip_grad"), given(key.source, (*ACTOR, "grad_clip"), 1.0))
    if value == actor and (key.path[0] == "critic" or value == 1.0):
        return Outcome("not needed", (), "max_grad_norm applies to every trained role")
    if key.path[0] == "critic":
        return Outcome("unsupported", ((key.path, value),), f"the critic has the actor's max_grad_norm {actor}")
    if key.name == "grad_clip" and key.beside("optim") and key.at(*ACTOR, "optim", "clip_grad") is not None:
        return Outcome("not needed", (), "optim.clip_grad takes precedence")
    return Outcome("renamed", ((("max_grad_norm",), value),))


def _engine(value: Any, key: Key) -> Outcome:
    name = {"hf": "hf_infer"}.get(value, value)
    return Outcome("renamed", ((dotted("actor_infer.strategy_args.strategy_name"), name),))


def _engine_key(vllm: str, sglang: str = "") -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        name = {"vllm": vllm, "sglang": sglang}.get(str(key.at(*ROLLOUT, "name")), vllm)
        if not name:
            return Outcome("not needed", (), "the engine decides")
        return Outcome("renamed", ((dotted(f"actor_infer.strategy_args.strategy_config.{name}"), value),))

    return KeyRule(f"→ `{vllm}` of vllm, `{sglang or '–'}` of sglang", convert)


def _tensor_parallel(value: Any, key: Key) -> Outcome:
    if key.beside("name") != "sglang":
        return Outcome("renamed", ((dotted(f"actor_infer.{STRATEGY}.tensor_parallel_size"), value),))
    target, copies = f"actor_infer.{STRATEGY}.tp_size", expert_parallel_copies(key.source)
    if copies > 1 and isinstance(value, int):
        note = f"{value} × data_parallel_size {copies}: the engine's GPUs split attention too, instead of sequences"
        return changed(target, value * copies, note)
    return Outcome("renamed", ((dotted(target), value),))


def _data_parallel(value: Any, key: Key) -> Outcome:
    if expert_parallel_copies(key.source) == 1:
        return Outcome("not needed", (), "replicas are set by device_mapping")
    if key.beside("name") == "sglang":
        return Outcome("not needed", (), "tensor_model_parallel_size has it")
    return Outcome("renamed", ((dotted(f"actor_infer.{STRATEGY}.data_parallel_size"), value),))


def _expert_parallel(value: Any, key: Key) -> Outcome:
    if not isinstance(value, int) or value <= 1:
        return Outcome("not needed", (), "experts are split like other weights, as in verl")
    if key.beside("name") == "sglang":
        return changed(f"actor_infer.{STRATEGY}.ep_size", value)
    return changed(f"actor_infer.{STRATEGY}.enable_expert_parallel", True, "over all GPUs of an engine, as in verl")


def _engine_kwargs(value: Any, key: Key) -> Outcome:
    own = value_at(value, (str(key.at(*ROLLOUT, "name")),)) or {}
    target = dotted("actor_infer.strategy_args.strategy_config")
    return Outcome("renamed" if own else "not needed", tuple(((*target, name), each) for name, each in own.items()))


def _engine_dtype(value: Any, key: Key) -> Outcome:
    names = {"float16": "fp16", "float32": "fp32"}
    if value in ("bfloat16", "bf16", "auto"):
        return Outcome("not needed", (), "bf16 is the default")
    return changed("actor_infer.model_args.dtype", names.get(value, value))


def _routing_replay(value: Any, key: Key) -> Outcome:
    if not value:
        return Outcome("not needed", (), "it is off")
    return changed("router_replay.mode", "R3")


def _gpus(value: Any, key: Key) -> Outcome:
    return Outcome("renamed", ((("num_gpus_per_node",), value),), "device_mapping of the roles lists the GPUs")


def _steps(value: Any, key: Key) -> Outcome:
    return Outcome("renamed", ((("max_steps",), value),))


def epochs_as_steps(source: Mapping[str, Any]) -> tuple[int, str] | None:
    """Steps of `total_epochs`, and the arithmetic; None if the rows cannot be counted from here."""
    epochs = given(source, ("trainer", "total_epochs"), 30)
    size = given(source, ("data", "gen_batch_size"), given(source, ("data", "train_batch_size"), 1024))
    rows = num_rows(source)
    if rows is None or not all(isinstance(each, int) and each > 0 for each in (epochs, size, rows // _int(size))):
        return None
    how = f"{epochs} × ({rows} rows // {size} prompts per batch); less if longer prompts are dropped"
    return epochs * (rows // size), how


def _epochs(value: Any, key: Key) -> Outcome:
    if key.beside("total_training_steps") is not None:
        return Outcome("not needed", (), "total_training_steps takes precedence")
    found = epochs_as_steps(key.source)
    if found is None:
        size = given(key.source, ("data", "gen_batch_size"), given(key.source, ("data", "train_batch_size"), 1024))
        note = f"set max_steps to {value} × rows of the data / rollout_batch_size {size}"
        return Outcome("unsupported", ((("max_steps",), "???"),), f"{note}; train_files cannot be counted from here")
    return Outcome("changed", ((("max_steps",), found[0]),), found[1])


def num_rows(source: Mapping[str, Any]) -> int | None:
    """Rows of `data.train_files`, at most `train_max_samples`; None if they cannot be counted from here."""
    limit = given(source, ("data", "train_max_samples"), -1)
    return count_rows(value_at(source, ("data", "train_files")), limit)


def _frequency(target: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        off = not isinstance(value, int) or value < 1
        return changed(target, 0 if off else value, f"{value} is off" if off else "")

    return KeyRule(f"→ `{target}`; -1 becomes 0", convert)


def _val_before_train(value: Any, key: Key) -> Outcome:
    on = positive(given(key.source, ("trainer", "test_freq"), -1))
    if bool(value) == on:
        return Outcome("not needed", (), "eval_steps also evaluates before the first step")
    note = "here a run that evaluates does so before the first step too" if on else "test_freq is off"
    return Outcome("differs", (), f"{note}; eval_steps is {'on' if on else '0, which disables evaluation'}")


def _resume(value: Any, key: Key) -> Outcome:
    known = {"auto": "auto", "disable": False}
    if value in known:
        return changed("resume_from_checkpoint", known[value])
    return Outcome("unsupported", (), "verl's checkpoints cannot be read: convert to a Hugging Face model for pretrain")


def _logger(value: Any, key: Key) -> Outcome:
    return track_with([each for each in loggers(key.source) if each not in ("console", "file")], key)


def loggers(source: Mapping[str, Any]) -> list[Any]:
    """Trackers that verl writes to."""
    value = given(source, ("trainer", "logger"), ["console", "wandb"])
    return value if isinstance(value, list) else [value]


def _project(value: Any, key: Key) -> Outcome:
    names = {"wandb": "project", "swanlab": "project", "trackio": "project", "mlflow": "experiment_name"}
    writes = tuple(
        (("tracker_kwargs", name, option), value)
        for name, option in names.items()
        if name in loggers(key.source) and name in key.trackers
    )
    return Outcome("renamed", writes) if writes else Outcome("not needed", (), "no tracker has projects")


def _experiment(value: Any, key: Key) -> Outcome:
    return experiment(value, "verl")


def _filter(value: Any, key: Key) -> Outcome:
    if not value:
        return Outcome("not needed", (), "it is off")
    target = ("rewards", REWARD, "query_filter_config")
    metric = given(key.source, (*key.path[:-1], "metric"), "reward")
    same = metric in ("reward", "seq_reward", "seq_final_reward", "score")
    note = "" if same else f"verl compares {metric} of a group, roll-core its rewards, penalties included"
    filters = {"type": "std_filter", "filter_args": {"std_threshold": 0}}
    return Outcome("renamed" if same else "differs", ((target, filters),), note)


def _max_batches(value: Any, key: Key) -> Outcome:
    if not key.beside("enable"):
        return Outcome("not needed", (), "filter_groups is off")
    if not isinstance(value, int) or value < 1:
        return Outcome("differs", (), "verl has no limit; see dynamic_sampling_max_tries, 10 batches")
    size = _int(given(key.source, ("data", "train_batch_size"), 1024))
    generated = _int(given(key.source, ("data", "gen_batch_size"), size))
    tries = max(value * generated / size, 1.0)
    note = (
        f"{value} × gen_batch_size {generated} / train_batch_size {size}; verl then raises, here the batch is smaller"
    )
    return Outcome("differs", ((("dynamic_sampling_max_tries",), tries),), note)


WEIGHT = ("train_infer_correction", "is_weight")


def _rollout_is(value: Any, key: Key) -> Outcome:
    level = key.beside("rollout_is_level") if value is True else value
    if not level:
        return Outcome("not needed", (), "it is off")
    if key.beside("bypass_mode"):
        return Outcome("not needed", (), "with bypass_mode, PPO's ratio is the one to the engine")
    writes = [((*WEIGHT, "enabled"), True), ((*WEIGHT, "weight_type"), level)]
    bounds = str(given(key.source, (*key.path[:-1], "rollout_is_threshold"), 2.0)).split("_")
    try:
        numbers = [float(each) for each in bounds]
    except ValueError:
        return Outcome("unsupported", ((key.path, value),), f"rollout_is_threshold {bounds} is not a number")
    writes.append(((*WEIGHT, "upper_bound"), numbers[-1]))
    if len(numbers) > 1:
        writes += [((*WEIGHT, "lower_bound"), numbers[0]), ((*WEIGHT, "outside"), "mask")]
    return Outcome("changed", tuple(writes), "a weight multiplies the advantage, in verl the loss")


LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}


def _rollout_rs(value: Any, key: Key) -> Outcome:
    if not value:
        return Outcome("not needed", (), "it is off")
    bounds = key.beside("rollout_rs_threshold")
    if key.beside("bypass_mode"):
        note = "with bypass_mode, verl rejects by the policy of each optimizer step"
        return Outcome("unsupported", ((key.path, value),), f"{note}; left in the config, which `check` rejects")
    names = list(dict.fromkeys(name for each in str(value).split(",") if (name := each.strip())))
    given_bounds = [bound for each in str(bounds).split(",") if (bound := each.strip())]
    try:
        pairs = zip(names, given_bounds * (len(names) if len(given_bounds) == 1 else 1), strict=True)
        filters = [_rejection(*pair) for pair in pairs]
    except (ValueError, KeyError, ZeroDivisionError):
        note = f"verl refuses it with rollout_rs_threshold {bounds}"
        return Outcome("unsupported", ((key.path, value),), f"{note}; left in the config, which `check` rejects")
    note = "bounds of k1 are those of engine / trainer in verl, of trainer / engine here"
    return Outcome("changed", ((("train_infer_correction", "filters"), filters),), note if "k1" in str(value) else "")


def _rejection(name: str, bound: str) -> dict[str, Any]:
    """Filter for an option of `rollout_rs`."""
    level, _, kind = name.rpartition("_")
    found: dict[str, Any] = {"enabled": True, "agg_type": LEVELS[level]}
    if kind == "k1" and level != "seq_max":
        low, _, high = bound.rpartition("_")
        return found | {"ratio_low": 1 / float(high), "ratio_high": 1 / float(low) if low else float(high)}
    return found | {"ratio_enabled": False, {"k2": "k2_max", "k3": "k3_max"}[kind]: float(bound)}


def _tis_cap(value: Any, key: Key) -> Outcome:
    if not isinstance(value, (int, float)) or value <= 0:
        return Outcome("not needed", (), "it is off")
    writes = (((*WEIGHT, "enabled"), True), ((*WEIGHT, "upper_bound"), value))
    return Outcome("renamed", writes, "a weight multiplies the advantage, in verl the loss")


def _function(value: Any, key: Key) -> Outcome:
    name = given(key.source, (*key.path[:-1], "name"), "compute_score")
    return python_function(value, name, REWARD, "verl")


def _manager(value: Any, key: Key) -> Outcome:
    if value not in ("naive", "dapo", "prime", "batch", "rate_limited", "remote"):
        return Outcome("unsupported", ((key.path, value),), "custom code: write a reward; `check` rejects it")
    if value == "dapo" and not has_function(key.source):
        note = "verl's score of math is 1 or -1 for DAPO's data, that of math_rule is 1 or 0"
        return Outcome("differs", (), f"{note}: a penalty of the same size weighs twice as much")
    return Outcome("not needed", (), "rewards are always scored in parallel; dapo's penalty has keys of its own")


def has_function(source: Mapping[str, Any]) -> bool:
    """True if a function of the user's scores responses."""
    paths = (("custom_reward_function", "path"), ("reward", "custom_reward_function", "path"))
    return any(value_at(source, path) for path in paths)


OVERLONG: Table = {
    "enable": unneeded("soft_overlong_penalty is set if it is on"),
    "len": KeyRule("→ `soft_overlong_penalty.l_cache`", lambda value, key: _overlong("l_cache", value, key)),
    "penalty_factor": KeyRule(
        "→ `soft_overlong_penalty.penalty_factor`", lambda value, key: _overlong("penalty_factor", value, key)
    ),
    "log": unneeded("metrics have it"),
}


def _overlong(name: str, value: Any, key: Key) -> Outcome:
    if not key.beside("enable"):
        return Outcome("not needed", (), "the overlong buffer is off")
    return Outcome("renamed", ((("soft_overlong_penalty", name), value),))


def _max_resp_len(value: Any, key: Key) -> Outcome:
    buffers = [key.beside(name) for name in ("overlong_buffer", "overlong_buffer_cfg")]
    if not any(value_at(each, ("enable",)) for each in buffers):
        return Outcome("not needed", (), "the overlong buffer is off")
    return Outcome("renamed", ((("soft_overlong_penalty", "l_max"), value),))


def _trust(value: Any, key: Key) -> Outcome:
    if not value:
        return Outcome("not needed", (), "it is off")
    roles = (_ours(key),) if _ours(key) != "actor_train" else ("actor_train", "actor_infer")
    return Outcome("renamed", tuple(((role, "model_args", "trust_remote_code"), True) for role in roles))


def _checkpointing(value: Any, key: Key) -> Outcome:
    if value:
        return Outcome("not needed", (), "it is on by default")
    return changed(f"{_ours(key)}.model_args.disable_gradient_checkpointing", True)


def _activation_offload(value: Any, key: Key) -> Outcome:
    if not value:
        return Outcome("not needed", (), "it is off")
    if backend(key.source) == "megatron":
        return Outcome("not needed", (), "verl's Megatron does not read it")
    if key.beside("enable_gradient_checkpointing") is False:
        return Outcome("not needed", (), "inputs of recomputed layers are offloaded, and none is recomputed")
    return changed(f"{_ours(key)}.strategy_args.strategy_config.activation_offloading", True)


def _model_config(value: Any, key: Key) -> Outcome:
    if key.name in MEGATRON_CONFIGS and isinstance(value, dict):
        nested = [_model_config(each, replace(key, path=(*key.path, name))) for name, each in value.items()]
        writes = tuple(write for outcome in nested for write in outcome.writes)
        return Outcome("renamed", writes) if writes else Outcome("not needed", (), "no key has an effect")
    if (key.name.endswith(("dropout", "pdrop")) and value in (0, None)) or (key.name, value) == FREE_ROUTER:
        return Outcome("not needed", (), "dropout is off in training, and routers are trained")
    return Outcome("renamed", (((_ours(key), "model_args", "model_config_kwargs", key.name), value),))


def _lora(name: str, rank: str = "lora_rank") -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        if not key.beside(rank):
            return Outcome("not needed", (), f"{rank} is 0")
        return Outcome("renamed", ((dotted(f"{_ours(key)}.model_args.{name}"), value),))

    return change(f"→ `model_args.{name}`", convert, nested=True)


def _megatron_lora_target(value: Any, key: Key) -> Outcome:
    if not key.beside("rank"):
        return Outcome("not needed", (), "rank is 0")
    if not isinstance(value, list) or set(value) - set(MEGATRON_LINEAR):
        return Outcome("unsupported", ((key.path, value),), "set model_args.lora_target; left in the config")
    names = [module for name in value for module in MEGATRON_LINEAR[name]]
    everything = set(value) == set(MEGATRON_LINEAR)
    return changed(f"{_ours(key)}.model_args.lora_target", "all-linear" if everything else ",".join(names))


# -- tables ------------------------------------------------------------------------------------------------------------

PLACED = unneeded("idle roles are offloaded by is_offload_states")
FASTER = unneeded("it does not affect results")
SEEDED = unneeded("seeds derive from the run's, data.seed")
EXACT = unneeded("deterministic kernels are on unless `deterministic` is false")
STRATEGY = "strategy_args.strategy_config"
OPTIMIZER_OFFLOAD = "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d"
MEGATRON_CONFIGS = ("model_config", "moe_config")
"""Sections of `override_config` in configs for Megatron."""
FREE_ROUTER = ("freeze_moe_router", False)
MEGATRON_LINEAR = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Hugging Face's modules of the layers that Megatron adapts; all of them by default."""
MODEL: Table = {
    "path": to("pretrain"),
    "trust_remote_code": change("→ `model_args.trust_remote_code`", _trust),
    "lora_rank": _lora("lora_rank"),
    "lora_alpha": _lora("lora_alpha"),
    "target_modules": _lora("lora_target"),
    "enable_gradient_checkpointing": change("→ `disable_gradient_checkpointing`", _checkpointing),
    "use_remove_padding": unneeded("sequences are always packed"),
    "override_config": Each(KeyRule("→ `model_args.model_config_kwargs`; dropout is off", _model_config)),
    **each("hf_config_path tokenizer_path custom_chat_template external_lib", refused("the model's own is used")),
    **each("exclude_modules lora_adapter_path", refused("adapters start new, on the modules of lora_target")),
    "enable_activation_offload": change("→ `strategy_config.activation_offloading`", _activation_offload),
    **each("use_shm use_liger use_fused_kernels fused_kernel_options tiled_mlp", FASTER),
    "mtp": switched("multi-token prediction layers are not trained"),
    "lora": only(
        lambda source: backend(source) == "megatron",
        "it is for Megatron; lora_rank, lora_alpha and target_modules apply",
        {
            "rank": _lora("lora_rank", "rank"),
            "alpha": _lora("lora_alpha", "rank"),
            "dropout": change("must be 0", lambda value, key: lora_dropout(value, enabled=bool(key.beside("rank")))),
            "target_modules": change("→ `model_args.lora_target`", _megatron_lora_target, nested=True),
            "type": refused("only LoRA is supported", "lora"),
            **each("exclude_modules adapter_path", refused("adapters start new, on the modules of lora_target", [])),
            "merge": unneeded("engines get merged weights, or adapters if they have a LoRA key"),
            **each(
                "dtype dropout_position lora_A_init_method lora_B_init_method a2a_experimental freeze_vision_model"
                " freeze_vision_projection freeze_language_model",
                unneeded("peft's defaults apply"),
            ),
        },
    ),
    "share_embeddings_and_output_weights": unneeded("the model's config decides"),
}
OPTIM: Table = {
    "lr": _in_role("training_args.learning_rate"),
    "weight_decay": _in_role("training_args.weight_decay"),
    "lr_warmup_steps": _positive("warmup_steps"),
    "lr_warmup_steps_ratio": _positive("warmup_ratio"),
    "betas": KeyRule("→ `training_args.adam_beta1`, `adam_beta2`", _betas),
    **each("lr_scheduler_type warmup_style lr_decay_style", change("→ `training_args.lr_scheduler_type`", _schedule)),
    "min_lr_ratio": unneeded("lr_scheduler_type has it"),
    "clip_grad": change("→ `max_grad_norm`", _grad_clip),
    "weight_decay_incr_style": refused("weight decay is constant", "constant"),
    **each("lr_wsd_decay_style lr_wsd_decay_steps", unneeded("the schedule has no wsd; lr_decay_style decides")),
    **each(
        "muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_coefficient_type muon_num_ns_steps"
        " muon_tp_mode muon_fp32_matmul_prec muon_extra_scale_factor muon_scalar_optimizer muon_match_adamw_update_rms",
        unneeded("it is for Muon: `optimizer` decides"),
    ),
    "use_precision_aware_optimizer": refused("the optimizer's state is fp32", False),
    **each("main_grads_dtype exp_avg_dtype exp_avg_sq_dtype", unneeded("use_precision_aware_optimizer decides")),
    "use_layer_wise_distributed_optimizer": refused("the optimizer is distributed by Megatron's default", False),
    "optimizer": refused("only AdamW is converted; set training_args.optimizer", "AdamW", "adam", "adamw"),
    "optimizer_impl": refused("only torch's AdamW is supported", "torch.optim"),
    "num_cycles": refused("a cosine has half a cycle", 0.5),
    "min_lr": refused("the schedule decays to 0, or to min_lr_ratio", 0.0),
    "lr_warmup_init": refused("warm-up starts at 0", 0.0),
    **each("total_training_steps lr_decay_steps", unneeded("the schedule spans max_steps")),
    "override_optimizer_config": {
        **{name: _in_role(f"{STRATEGY}.{name}") for name in OPTIMIZER_OFFLOAD.split()},
        "use_precision_aware_optimizer": unneeded("masters and moments are fp32"),
    },
    **each("zero_indexed_step use_checkpoint_opt_param_scheduler", FASTER),
}
FSDP: Table = {
    **each("param_offload optimizer_offload", PLACED),
    "offload_policy": KeyRule(
        "→ `strategy_config.offload_policy`",
        lambda value, key: (
            _in_role(f"{STRATEGY}.offload_policy")(True, key) if value else Outcome("not needed", (), "it is off")
        ),
    ),
    "reshard_after_forward": unneeded("FSDP2 decides by the model's size"),
    "fsdp_size": change("→ `strategy_config.fsdp_size`; -1 means all ranks", _fsdp_size),
    **each("model_dtype dtype", change("fp32 weights, bf16 computation", _dtype)),
    "ulysses_sequence_parallel_size": change("→ `strategy_config.ulysses_size`", _sequence_parallel),
    "qat": switched("quantization-aware training is not supported"),
    "seed": SEEDED,
    "full_determinism": EXACT,
    "mixed_precision": refused("the computation is bf16, gradients are reduced in fp32"),
    **each(
        "wrap_policy forward_prefetch use_orig_params entropy_from_logits_with_chunking"
        " entropy_from_logits_chunk_size use_torch_compile entropy_checkpointing"
        " use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket forward_only strategy"
        " turbo_config",
        FASTER,
    ),
}
FSDP = {**FSDP, "dtype": refused("training computes in bf16", "bfloat16")}
PARALLEL = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size"
    " expert_model_parallel_size expert_tensor_parallel_size"
)
TRANSFORMER = (
    "moe_grouped_gemm moe_token_dispatcher_type moe_router_dtype account_for_embedding_in_pipeline_split"
    " account_for_loss_in_pipeline_split"
)
OF_TRAINING = "recompute_granularity recompute_method recompute_num_layers moe_aux_loss_coeff moe_z_loss_coeff"
ONLY_SCORES = "the reference only scores"
MEGATRON: Table = {
    **{name: _in_role(f"{STRATEGY}.{name}") for name in PARALLEL.split()},
    "sequence_parallel": change("→ `strategy_config.sequence_parallel`", _megatron_sequences),
    **each("param_offload optimizer_offload grad_offload", PLACED),
    "use_distributed_optimizer": refused("the optimizer is always distributed", True),
    "override_transformer_config": {
        **{name: _of_training(f"{STRATEGY}.{name}") for name in OF_TRAINING.split()},
        **{name: _in_role(f"{STRATEGY}.{name}") for name in TRANSFORMER.split()},
        "recompute_modules": change("→ `strategy_config.recompute_modules`", _recompute_modules, nested=True),
        **each(
            "attention_backend apply_rope_fusion gradient_accumulation_fusion masked_softmax_fusion"
            " bias_activation_fusion bias_dropout_fusion persist_layer_norm deallocate_pipeline_outputs"
            " moe_permute_fusion moe_enable_deepep moe_flex_dispatcher_backend moe_shared_expert_overlap",
            FASTER,
        ),
        **each(
            "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage",
            refused("write the layers of all stages as pipeline_model_parallel_layout"),
        ),
    },
    **each("override_ddp_config override_mcore_model_config", refused("only the declared keys are supported", {})),
    "qat": switched("quantization-aware training is not supported"),
    "router_replay": unneeded("rollout.enable_rollout_routing_replay decides"),
    "use_megatron_fsdp": refused("Megatron's FSDP is not supported", False),
    "dtype": refused("training computes in bf16", "bfloat16"),
    "seed": SEEDED,
    **each(
        "use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix dist_ckpt_optim_fully_reshardable"
        " distrib_optim_fully_reshardable_mem_efficient use_mbridge vanilla_mbridge entropy_from_logits_with_chunking"
        " entropy_from_logits_chunk_size use_remove_padding forward_only load_weight"
        " dynamic_context_parallel max_seqlen_per_dp_cp_rank pad_bshd_to_minibatch_max pad_to_length"
        " pad_to_length_bucket",
        FASTER,
    ),
}
VEOMNI: Table = {
    **each("param_offload optimizer_offload enable_fsdp_offload", PLACED),
    "fsdp_size": change("→ `strategy_config.fsdp_size`, × `ulysses_parallel_size`", _veomni_fsdp_size),
    "ulysses_parallel_size": _in_role(f"{STRATEGY}.ulysses_size"),
    "expert_parallel_size": _in_role(f"{STRATEGY}.ep_size"),
    "seed": SEEDED,
    "full_determinism": EXACT,
    "mixed_precision": refused("the computation is bf16, gradients are reduced in fp32", True),
    "router_replay": unneeded("rollout.enable_rollout_routing_replay decides"),
    "qat_implementation": refused("quantization-aware training is not supported", "none"),
    "enable_async_activation_offload": unneeded("set strategy_config.activation_offloading"),
    "load_checkpoint_path": refused("set resume_from_checkpoint"),
    **each(
        "init_device enable_full_shard ckpt_manager forward_prefetch strategy use_torch_compile"
        " entropy_from_logits_with_chunking entropy_checkpointing forward_only enable_reentrant attn_implementation"
        " moe_implementation cross_entropy_loss_implementation rms_norm_implementation swiglu_mlp_implementation"
        " rotary_pos_emb_implementation rms_norm_gated_implementation causal_conv1d_implementation"
        " chunk_gated_delta_rule_implementation load_balancing_loss_implementation dsa_indexer_implementation"
        " dsa_attention_implementation mhc_implementation force_use_huggingface activation_offload_modules"
        " activation_offload_host_cache_limit_gb basic_modules pad_to_length pad_to_length_bucket",
        FASTER,
    ),
}
SHARED: Table = {
    "strategy": change("fsdp, fsdp2, veomni → `fsdp2_train`, megatron → `megatron_train`", _strategy),
    "model_engine": unneeded("`strategy` has it"),
    "fsdp_config": only(lambda source: backend(source) == "fsdp", "the strategy is another", FSDP),
    "megatron": only(lambda source: backend(source) == "megatron", "the strategy is another", MEGATRON),
    "veomni": only(lambda source: backend(source) == "veomni", "the strategy is another", VEOMNI),
    "ulysses_sequence_parallel_size": change("→ `strategy_config.ulysses_size`", _sequence_parallel),
    **each(
        "profiler use_torch_compile use_fused_kernels use_remove_padding entropy_from_logits_with_chunking"
        " entropy_from_logits_chunk_size entropy_checkpointing pad_to_length rollout_n load_weight",
        FASTER,
    ),
    "router_replay": unneeded("rollout.enable_rollout_routing_replay decides"),
}
UPDATE: Table = {
    **SHARED,
    "optim": OPTIM,
    "ppo_mini_batch_size": change("→ `gradient_accumulation_steps`; it counts prompts, without × n", _mini_batch),
    "ppo_micro_batch_size_per_gpu": change("→ `per_device_train_batch_size`", _micro_batch),
    "ppo_micro_batch_size": refused("set ppo_micro_batch_size_per_gpu"),
    "use_dynamic_bsz": _dynamic("train"),
    "ppo_max_token_len_per_gpu": _tokens("train"),
    "grad_clip": change("→ `max_grad_norm`", _grad_clip),
    "data_loader_seed": unneeded("the run's seed"),
    "checkpoint": unneeded("checkpoints resume runs, and export/ is a Hugging Face model"),
    "qat": switched("quantization-aware training is not supported"),
}
ACTOR_KEYS: Table = {
    **UPDATE,
    "clip_ratio": change("→ `pg_clip`", _clip_ratio),
    "clip_ratio_low": _clip_end("low"),
    "clip_ratio_high": _clip_end("high"),
    "clip_ratio_c": change("→ `dual_clip`", _clip_c),
    "loss_agg_mode": change("kept", _aggregation),
    "loss_scale_factor": change("not needed if it is `response_length`", _scale_factor),
    "entropy_coeff": to("entropy_loss_coef"),
    "use_kl_loss": to("use_kl_loss"),
    "kl_loss_coef": to("kl_loss_coef"),
    "kl_loss_type": change("→ `kl_loss_penalty`: low_var_kl is k3; + is `kl_loss_unbiased`", _kl_loss_type),
    "ppo_epochs": to("ppo_epochs"),
    "shuffle": to("shuffle", note="here whole groups are shuffled, in verl samples", differs=True),
    "policy_loss": {
        "loss_mode": change("→ `pg_variant`", _loss_mode),
        **each("clip_cov_ratio clip_cov_lb clip_cov_ub", _constant_of("clip_cov")),
        **each("kl_cov_ratio ppo_kl_coef", _constant_of("kl_cov")),
        "dro_beta": _constant_of("dro"),
    },
    "tis_imp_ratio_cap": change("→ `train_infer_correction.is_weight`", _tis_cap),
    **each("tau_pos tau_neg", _constant_of("sapo")),
    "freeze_vision_tower": unneeded("only text models are trained"),
    **each("calculate_entropy calculate_sum_pi_squared use_prefix_grouper", FASTER),
}
SCORED: Table = {
    "log_prob_micro_batch_size_per_gpu": _in_role("infer_batch_size"),
    "log_prob_micro_batch_size": refused("set log_prob_micro_batch_size_per_gpu"),
    "log_prob_use_dynamic_bsz": _dynamic("infer"),
    "log_prob_max_token_len_per_gpu": _tokens("infer"),
}
REF_KEYS: Table = only(
    has_reference,
    "no KL penalty uses it, or with LoRA the base model is the reference",
    {**SHARED, **SCORED, "model": {"path": to("reference.model_args.model_name_or_path")}},
)
ROLLOUT_KEYS: Table = {
    **SCORED,
    "name": change("→ `actor_infer.strategy_args.strategy_name`", _engine),
    "n": to("num_return_sequences_in_group"),
    **{name: to(f"actor_infer.generating_args.{name}") for name in ("temperature", "top_p", "top_k", "min_p")},
    "repetition_penalty": to("actor_infer.generating_args.repetition_penalty"),
    "tensor_model_parallel_size": change("→ `tensor_parallel_size` of vllm, `tp_size` of sglang", _tensor_parallel),
    "pipeline_model_parallel_size": _engine_key("pipeline_parallel_size"),
    "gpu_memory_utilization": _engine_key("gpu_memory_utilization", "mem_fraction_static"),
    "max_model_len": _engine_key("max_model_len", "context_length"),
    "max_num_seqs": _engine_key("max_num_seqs", "max_running_requests"),
    "max_num_batched_tokens": _engine_key("max_num_batched_tokens", "chunked_prefill_size"),
    "enforce_eager": _engine_key("enforce_eager", "disable_cuda_graph"),
    "enable_chunked_prefill": _engine_key("enable_chunked_prefill"),
    "enable_prefix_caching": _engine_key("enable_prefix_caching"),
    "quantization": _engine_key("quantization"),
    "engine_kwargs": KeyRule("→ the engine's `strategy_config`", _engine_kwargs),
    "dtype": change("→ `actor_infer.model_args.dtype`", _engine_dtype),
    "val_kwargs": only(
        evaluates,
        "there are no val_files",
        {
            **{name: to(f"validation.generating_args.{name}") for name in ("temperature", "top_p", "top_k")},
            "n": to("validation.generating_args.num_return_sequences"),
            "do_sample": unneeded("temperature: 0 is greedy, as in verl"),
        },
    ),
    "calculate_log_probs": unneeded("the engine returns the logprob of every token"),
    **each("prompt_length response_length", unneeded("set by data.max_prompt_length and data.max_response_length")),
    "ignore_eos": refused("a response ends with the end token", False),
    "do_sample": refused("set temperature: 0", True),
    "over_sample_rate": refused("set is_use_additional_prompts", 0),
    "multi_turn": switched("turns with tools are the pipeline agentic: see docs/agentic.md"),
    "agent": {
        "num_workers": FASTER,
        "default_agent_loop": refused("turns with tools are the pipeline agentic", "single_turn_agent"),
        "agent_loop_config_path": refused("turns with tools are the pipeline agentic"),
        "custom_async_server": {"path": refused("custom code"), "name": refused("custom code")},
    },
    "seed": SEEDED,
    "full_determinism": EXACT,
    "logprobs_mode": refused("logprobs are those of the sampling temperature", "processed_logprobs"),
    "qat": unneeded("that of the actor decides"),
    "enable_rollout_routing_replay": change("→ `router_replay.mode`: R3", _routing_replay),
    "quantization_config_file": refused("set quantization"),
    "data_parallel_size": change("same in vllm and part of `tp_size` of sglang with experts", _data_parallel),
    "expert_parallel_size": change("→ `enable_expert_parallel` of vllm, `ep_size` of sglang", _expert_parallel),
    "disaggregation": switched("prefill and decode use the same replica", "enabled"),
    "mtp": switched("multi-token prediction layers are not trained"),
    **each(
        "mode load_format free_cache_engine layered_summon disable_log_stats nnodes n_gpus_per_node"
        " scheduling_policy cudagraph_capture_sizes multi_stage_wake_up"
        " moe_load_balance_metrics_interval"
        " router_config_path update_weights_bucket_megabytes checkpoint_engine trace skip_rollout skip_dump_dir"
        " skip_tokenizer_init profiler prometheus limit_images enable_sleep_mode",
        FASTER,
    ),
}
CRITIC: Table = {
    **UPDATE,
    "fsdp": UPDATE["fsdp_config"],
    "nccl_timeout": unneeded("rpc_timeout applies to every call"),
    "enable": unneeded("the estimator decides; the critic is configured if verl has one"),
    "model": {**MODEL, "path": to("critic.model_args.model_name_or_path")},
    "cliprange_value": to("value_clip"),
    "ppo_epochs": to("critic_epochs"),
    "loss_agg_mode": to("value_loss_agg_mode"),
    "loss_scale_factor": unneeded("the constant of seq-mean-token-sum-norm is response_length"),
    "shuffle": unneeded("`shuffle` of the run applies"),
    "forward_micro_batch_size_per_gpu": _in_role("infer_batch_size"),
    "forward_micro_batch_size": refused("set forward_micro_batch_size_per_gpu"),
    "forward_max_token_len_per_gpu": unneeded("infer_batch_size bounds the critic's microbatches"),
}
FUNCTION: Table = {"path": change("→ `rewards.verl`: a `function`", _function), "name": unneeded("`path` has it")}
BUFFER: Table = {
    "overlong_buffer": OVERLONG,
    "overlong_buffer_cfg": OVERLONG,
    "max_resp_len": change("→ `soft_overlong_penalty.l_max`", _max_resp_len),
}
MODEL_REWARD = "a reward model is `rewards.<name>: {reward: model}`, see docs/rewards.md"
REWARDS: Table = {
    **each("num_workers launch_reward_fn_async", unneeded("set by processes and world_size of a reward")),
    "custom_reward_function": FUNCTION,
    "reward_manager": {
        "name": change("not needed for verl's own", _manager),
        "source": refused("custom code: write a reward", "register"),
        "module": {"path": refused("custom code: write a reward"), "name": FASTER},
    },
    "reward_model": switched(MODEL_REWARD),
    "reward_kwargs": BUFFER,
    "sandbox_fusion": {
        "url": unsupported("set `sandbox_url` of a reward `code`"),
        **each("max_concurrent memory_limit_mb", FASTER),
    },
}
OLD_REWARDS: Table = {
    **BUFFER,
    "enable": refused(MODEL_REWARD, False),
    "reward_manager": change("not needed for verl's own", _manager),
    "reward_kwargs": BUFFER,
    "sandbox_fusion": REWARDS["sandbox_fusion"],
    **each(
        "num_workers launch_reward_fn_async enable_resource_pool n_gpus_per_node nnodes model rollout strategy"
        " micro_batch_size_per_gpu use_dynamic_bsz max_length input_tokenizer profiler",
        unneeded("it is for a reward model"),
    ),
    **each("reward_loop_source reward_loop_module_path reward_loop_class_name", refused("custom code: write a reward")),
}
CORRECTION: Table = {
    "rollout_is": change("→ `train_infer_correction.is_weight`", _rollout_is),
    **each("rollout_is_threshold rollout_is_level", unneeded("rollout_is has it")),
    "rollout_is_batch_normalize": to("train_infer_correction.is_weight.batch_normalize", neutral=(False,)),
    "rollout_rs": change("→ `train_infer_correction.filters`", _rollout_rs),
    "rollout_rs_threshold": unneeded("rollout_rs has it"),
    "bypass_mode": to("force_disable_old_logprobs_recompute", neutral=(False,)),
    "loss_type": refused("set pg_variant", "ppo_clip"),
}
ALGORITHM: Table = {
    "adv_estimator": change("kept; names as in docs/coming-from.md", _estimator),
    "gamma": to("gamma"),
    "lam": to("lambd"),
    "norm_adv_by_std_in_grpo": unneeded("adv_estimator has it"),
    "use_kl_in_reward": to("add_token_level_kl"),
    "kl_penalty": change("→ `kl_penalty`: kl is k1, mse k2, low_var_kl k3", _kl_penalty),
    "kl_ctrl": {
        "type": unneeded("target_kl is set if it is adaptive"),
        "kl_coef": _in_reward(to("init_kl_coef")),
        "horizon": _if_adaptive("kl_horizon"),
        "target_kl": _if_adaptive("target_kl"),
    },
    "filter_groups": {
        "enable": change("→ `query_filter_config`", _filter),
        "metric": unneeded("roll-core compares rewards"),
        "max_num_gen_batches": change("→ `dynamic_sampling_max_tries`", _max_batches),
        "max_inflight_gen_batches": FASTER,
    },
    "rollout_correction": CORRECTION,
    **{name: CORRECTION[name] for name in ("rollout_is", "rollout_is_threshold", "rollout_is_level")},
    "use_pf_ppo": refused("samples cannot be reweighted", False),
    "pf_ppo": unneeded("use_pf_ppo decides"),
}
DATA: Table = {
    "train_files": files("actor_train.data_args.file_name"),
    "val_files": files("validation.data_args.file_name"),
    "train_max_samples": _samples("actor_train.data_args.max_samples"),
    **only(evaluates, "there are no val_files", {"val_max_samples": _samples("validation.data_args.max_samples")}),
    "prompt_key": KeyRule("→ `data_args.messages`", _prompt_key),
    "max_prompt_length": to("prompt_length"),
    "max_response_length": to("response_length"),
    "train_batch_size": to("rollout_batch_size"),
    "gen_batch_size": unneeded("dynamic_sampling_max_tries counts batches of rollout_batch_size"),
    "val_batch_size": to("val_batch_size"),
    "shuffle": change("prompts are always shuffled", _train_shuffle),
    "seed": to("seed", note="the run's seed, also of sampling and initialization", differs=True),
    "filter_overlong_prompts": change("longer prompts are always dropped", _overlong_prompts),
    "truncation": change("longer prompts are always dropped", _truncation),
    "reward_fn_key": unneeded("one reward scores every row; for several, set data_args.tag"),
    "custom_cls": {"path": refused("custom code that makes rows"), "name": refused("custom code that makes rows")},
    "tokenizer": refused("the model's own is used"),
    **each("tool_config_path function_tool_path", refused("turns with tools are the pipeline agentic")),
    **each("apply_chat_template_kwargs mm_processor_kwargs", refused("the template has no arguments", {})),
    **each("image_key video_key audio_key", change("rejected outside of a composed config", media)),
    **each(
        "use_shm dataloader_num_workers filter_overlong_prompts_workers validation_shuffle image_patch_size"
        " return_raw_input_ids return_raw_chat return_full_prompt return_multi_modal_inputs",
        FASTER,
    ),
    "trust_remote_code": unneeded("that of the model decides"),
    "need_tools_kwargs": unneeded("turns with tools are the pipeline agentic"),
}
TRAINER: Table = {
    "total_epochs": change("→ `max_steps`, if the rows of `train_files` can be counted", _epochs),
    "total_training_steps": change("→ `max_steps`", _steps),
    "project_name": change("→ `tracker_kwargs`", _project),
    "experiment_name": change("→ `exp_name`", _experiment),
    "logger": change("→ `track_with`", _logger, nested=True),
    "n_gpus_per_node": change("→ `num_gpus_per_node`, `device_mapping`", _gpus),
    "nnodes": unneeded("device_mapping of the roles lists the GPUs of all nodes"),
    "save_freq": _frequency("save_steps"),
    "test_freq": _frequency("eval_steps"),
    "val_before_train": change("not needed with evaluations", _val_before_train),
    "val_only": refused("a run trains: set max_steps: 1, which evaluates before and after the step", False),
    "default_local_dir": to("output_dir", note="runs are in output_dir/exp_name/number"),
    "resume_mode": change("→ `resume_from_checkpoint`", _resume),
    "resume_from_path": unsupported("verl's checkpoints cannot be read"),
    "critic_warmup": to("critic_warmup"),
    "max_actor_ckpt_to_keep": to("max_ckpt_to_keep"),
    "max_critic_ckpt_to_keep": unneeded("a checkpoint has every role: max_ckpt_to_keep"),
    "default_hdfs_dir": unsupported("set checkpoint_store"),
    "device": unneeded("the platform is detected"),
    **each("log_val_generations rollout_data_dir validation_data_dir", unneeded("samples.jsonl has every sample")),
    "v1": {
        "trainer_mode": refused("set async_generation_ratio", "sync"),
        **each("sync colocate_async separate_async sampler", unneeded("trainer_mode decides")),
    },
    **each(
        "balance_batch esi_redundant_time checkpoint_callback_class del_local_ckpt_after_load"
        " ray_wait_register_center_timeout use_v1 use_legacy_worker_impl",
        FASTER,
    ),
}
VERL: Table = {
    "data": DATA,
    ROLE: {
        "model": MODEL,
        "actor": ACTOR_KEYS,
        "ref": REF_KEYS,
        "rollout": ROLLOUT_KEYS,
        **each("hybrid_engine nccl_timeout", unneeded("device_mapping places the roles")),
    },
    "critic": CRITIC,
    "algorithm": ALGORITHM,
    "reward": REWARDS,
    "reward_model": OLD_REWARDS,
    "custom_reward_function": FUNCTION,
    "sandbox_fusion": REWARDS["sandbox_fusion"],
    "trainer": TRAINER,
    "model_engine": refused("training is with FSDP or Megatron", "fsdp", "fsdp2", "dp", "megatron", "veomni"),
    "distillation": switched("teachers are the pipeline distill", "enabled"),
    **each("global_profiler transfer_queue ray_kwargs ray_init skip hydra", unneeded("it does not affect results")),
}
