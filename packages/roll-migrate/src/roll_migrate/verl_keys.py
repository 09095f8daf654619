"""Conversion rules for the keys of verl's PPO trainer (0.9.1). Update them here if keys change on either side.

Names, defaults and meanings are those of verl/trainer/config and of the code that reads them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from roll_migrate.rules import (
    AnyName,
    Condition,
    Convert,
    Default,
    Key,
    Outcome,
    Table,
    always,
    if_on,
    keys,
    lookup,
    nested,
    only,
    refused,
    switched,
    to,
    unneeded,
    unsupported,
)
from roll_migrate.shared_rules import (
    count_rows,
    experiment,
    frequency,
    lora_dropout,
    max_steps,
    names_of_files,
    python_function,
    reads_images,
    track_with,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROLE = "actor_rollout_ref"
ACTOR, REF, ROLLOUT = f"{ROLE}.actor", f"{ROLE}.ref", f"{ROLE}.rollout"
REWARD = "verl"
"""Name of the one reward in `rewards`."""
STRATEGY = "strategy_args.strategy_config"
ENGINE = f"actor_infer.{STRATEGY}"

# -- facts of a config -------------------------------------------------------------------------------------------------


def backend(source: Mapping[str, Any], role: str = ACTOR) -> str:
    """`megatron`, `veomni` or `fsdp`: the engine that trains or scores a role."""
    strategy = lookup(source, f"{role}.strategy")
    if strategy is None and role != ACTOR:
        return backend(source)
    for name in ("megatron", "veomni"):
        chosen = source.get("model_engine") == name or lookup(source, f"{ACTOR}.{name}")
        if strategy == name or (strategy is None and chosen):
            return name
    return "fsdp"


def is_megatron(source: Mapping[str, Any]) -> bool:
    """True if Megatron trains the policy."""
    return backend(source) == "megatron"


def count(source: Mapping[str, Any], key: str, default: Any = 1) -> int:
    """Value of a key that counts something: at least 1."""
    return at_least_one(lookup(source, key, default))


def at_least_one(value: Any) -> int:
    """The value if it is a positive number, otherwise 1."""
    return value if isinstance(value, int) and value > 0 else 1


def num_gpus(source: Mapping[str, Any]) -> int:
    """Number of GPUs of verl's resource pool."""
    return count(source, "trainer.n_gpus_per_node", 8) * count(source, "trainer.nnodes")


def ranks_per_sequence(source: Mapping[str, Any], role: str) -> int:
    """Ranks of a role that split the tokens of each sequence: verl's limits of tokens are per rank."""
    if backend(source, role) == "megatron":
        default = ranks_per_sequence(source, ACTOR) if role == REF else 1
        return count(source, f"{role}.megatron.context_parallel_size", default)
    return ulysses(source, role)


def ulysses(source: Mapping[str, Any], role: str) -> int:
    """Ulysses sequence parallel size of a role."""
    default = ulysses(source, ACTOR) if role == REF else 1
    if backend(source, role) == "veomni":
        return count(source, f"{role}.veomni.ulysses_parallel_size", default)
    default = lookup(source, f"{role}.fsdp_config.ulysses_sequence_parallel_size", default)
    return count(source, f"{role}.ulysses_sequence_parallel_size", default)


def data_parallel(source: Mapping[str, Any], role: str) -> int:
    """Data parallel size of a role."""
    shards = ulysses(source, role)
    if backend(source, role) == "megatron":
        shards = 1
        for name in ("tensor_model", "pipeline_model", "context"):
            shards *= count(source, f"{role}.megatron.{name}_parallel_size")
    return max(num_gpus(source) // shards, 1)


def lora_rank(source: Mapping[str, Any]) -> int:
    """Rank of the policy's adapters; 0 without LoRA. Megatron's has keys of its own."""
    rank: int = lookup(source, f"{ROLE}.model.{'lora.rank' if backend(source) == 'megatron' else 'lora_rank'}", 0)
    return rank


def splits_sequences(source: Mapping[str, Any], role: str) -> bool:
    """True if Megatron's sequence parallelism, verl's default, has an effect in a role."""
    size = lookup(source, f"{ACTOR if role == REF else role}.megatron.tensor_model_parallel_size", 1)
    size = lookup(source, f"{role}.megatron.tensor_model_parallel_size", size)
    return size != 1 and bool(lookup(source, f"{role}.megatron.sequence_parallel", True))


def expert_parallel_copies(source: Mapping[str, Any]) -> int:
    """Data-parallel copies of attention in an engine that distributes experts over all its GPUs; otherwise 1."""
    return count(source, f"{ROLLOUT}.data_parallel_size") if count(source, f"{ROLLOUT}.expert_parallel_size") > 1 else 1


def dynamic(source: Mapping[str, Any], role: str) -> bool:
    """True if micro-batches of a role are filled by tokens."""
    return bool(lookup(source, f"{role}.use_dynamic_bsz", lookup(source, f"{ACTOR}.use_dynamic_bsz")))


def micro_batch(source: Mapping[str, Any], role: str) -> int:
    """Sequences per micro-batch and rank."""
    return 1 if dynamic(source, role) else count(source, f"{role}.ppo_micro_batch_size_per_gpu")


def accumulation(source: Mapping[str, Any], role: str) -> tuple[int, str]:
    """Micro-batches per optimizer step, and the arithmetic. verl counts a mini-batch in prompts."""
    mini = count(source, f"{role}.ppo_mini_batch_size", lookup(source, f"{ACTOR}.ppo_mini_batch_size", 256))
    n, parallel, micro = responses(source), data_parallel(source, role), micro_batch(source, role)
    steps, rest = divmod(mini * n, parallel * micro)
    how = (
        f"{mini} prompts × n {n} = {mini * n} samples per optimizer step: {steps} × {micro} × data parallel {parallel}"
    )
    return max(steps, 1), f"{how}; verl refuses a remainder of {rest}" if rest else how


def responses(source: Mapping[str, Any]) -> int:
    """Responses per prompt."""
    return count(source, f"{ROLLOUT}.n")


def has_reference(source: Mapping[str, Any]) -> bool:
    """True if a KL penalty needs the reference. With LoRA the base model is the reference, as in verl."""
    has_kl = lookup(source, f"{ACTOR}.use_kl_loss") or lookup(source, "algorithm.use_kl_in_reward")
    return bool(has_kl) and not lora_rank(source)


def has_critic(source: Mapping[str, Any]) -> bool:
    """True if the algorithm has a critic."""
    return bool(lookup(source, "critic.enable", lookup(source, "algorithm.adv_estimator", "gae") == "gae"))


def evaluates(source: Mapping[str, Any]) -> bool:
    """True if there are held-out prompts."""
    return bool(lookup(source, "data.val_files"))


def only_evaluates(source: Mapping[str, Any]) -> bool:
    """True if the run evaluates the model before training, and then ends."""
    return bool(lookup(source, "trainer.val_only")) and evaluates(source)


def positive(value: Any) -> bool:
    """True for a number above 0."""
    return isinstance(value, (int, float)) and value > 0


def warms_up(source: Mapping[str, Any], optim: str) -> bool:
    """True if a learning rate has a warm-up."""
    return any(positive(lookup(source, f"{optim}.{name}")) for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"))


def loss_mode(source: Mapping[str, Any]) -> str:
    """verl's policy loss."""
    return str(lookup(source, f"{ACTOR}.policy_loss.loss_mode", "vanilla"))


def clip_range(source: Mapping[str, Any]) -> tuple[Any, Any]:
    """Lower and upper clip bound: 0.2 by default, and `clip_ratio` where it is null."""
    actor, ends = lookup(source, ACTOR, {}), ("clip_ratio_low", "clip_ratio_high")
    low, high = (0.2 if end not in actor else lookup(actor, end, actor.get("clip_ratio", 0.2)) for end in ends)
    return low, high


def batch_size(source: Mapping[str, Any]) -> Any:
    """Prompts that are generated at once."""
    return lookup(source, "data.gen_batch_size", lookup(source, "data.train_batch_size", 1024))


def epochs_as_steps(source: Mapping[str, Any]) -> tuple[int, str] | None:
    """Steps of `total_epochs`, and the arithmetic; None if the rows cannot be counted from here."""
    rows = count_rows(lookup(source, "data.train_files"), lookup(source, "data.train_max_samples", -1))
    return max_steps(lookup(source, "trainer.total_epochs", 30), rows, batch_size(source))


def loggers(source: Mapping[str, Any]) -> list[Any]:
    """Trackers that verl writes to."""
    value = lookup(source, "trainer.logger", ["console", "wandb"])
    return value if isinstance(value, list) else [value]


# -- values: data ------------------------------------------------------------------------------------------------------


FROZEN = ["vision", "projector"]
OF_IMAGES = ("visual", "vision")


def audio(value: Any, key: Key) -> Outcome:
    """Keep the key of a column of audio."""
    if value == "audios":
        return key.unneeded("verl's default; rows with audio are an error")
    return key.refused("rows with audio are not supported")


def videos(value: Any, key: Key) -> Outcome:
    """Write the column of videos to each `data_args`."""
    if value == "videos":
        return key.unneeded("verl's default; set data_args.videos if rows have videos")
    return _column("videos", value, key)


def images(value: Any, key: Key) -> Outcome:
    """Write the column of images to each `data_args`."""
    if value == "images" and key.beside("video_key") == "videos" and not has_images(key.source):
        return key.unneeded("verl's default, which a composed config has for text too")
    return _column("images", value, key)


def _column(name: str, value: Any, key: Key) -> Outcome:
    trained = "actor_train" if lookup(key.source, "optim") is None else "sft_train"
    roles = (trained, "validation")[: 1 + evaluates(key.source)]
    return key.renamed({f"{role}.data_args.{name}": value for role in roles})


def _frozen(value: Any, key: Key) -> Outcome:
    if not has_images(key.source):
        return key.unneeded("the model reads text")
    return key.changed(
        {"actor_train.model_args.freeze": FROZEN if value else []}, "verl's tower includes the projector"
    )


def _excluded(value: Any, key: Key) -> Outcome:
    if value is None or (any(word in str(value) for word in OF_IMAGES) and "language" not in str(value)):
        return key.unneeded("adapters leave out the image encoder and the projector")
    return key.refused(ADAPTERS)


def has_images(source: Mapping[str, Any]) -> bool:
    """True if the name of the model says that it reads images."""
    return any(
        reads_images(lookup(source, key)) for key in (f"{ROLE}.model.path", "model.path", "model.partial_pretrain")
    )


def _truncation(value: Any, key: Key) -> Outcome:
    if value == "error" or key.beside("filter_overlong_prompts"):
        return key.unneeded("longer prompts are dropped and counted")
    return key.differs(f"verl truncates longer prompts ({value}); here they are dropped and counted")


def _overlong_prompts(value: Any, key: Key) -> Outcome:
    if value or key.beside("truncation") not in (None, "error"):
        return key.unneeded("longer prompts are dropped and counted")
    return key.differs("verl stops at a longer prompt; here longer prompts are dropped and counted")


def _train_shuffle(value: Any, key: Key) -> Outcome:
    if value:
        return key.unneeded("prompts are shuffled in each pass over the data")
    return key.differs("verl keeps the order of the file; here prompts are shuffled in each pass")


# -- values: the algorithm ---------------------------------------------------------------------------------------------

ESTIMATORS = {
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "grpo_passk": "pass_at_k",
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}


def _estimator(value: Any, key: Key) -> Outcome:
    name = ESTIMATORS.get(value, value)
    if name == "grpo" and key.beside("norm_adv_by_std_in_grpo") is False:
        writes = {"adv_estimator": "reinforce", "norm_mean_type": "group"}
        return key.changed(writes, "without the group's deviation (Dr. GRPO)")
    writes = {"adv_estimator": name}
    if name == "grpo" and responses(key.source) == 1:
        return key.differs("the advantage of a group of one is its reward in verl, and 0 here", writes)
    if name == "grpo" and key.beside("use_kl_in_reward"):
        return key.differs("verl subtracts the KL before the group's mean and deviation, roll-core after", writes)
    note = "the same epsilon, 1e-6, and the unbiased deviation" if name == "grpo" else ""
    return Outcome("kept" if name in (value, "grpo") else "changed", ((("adv_estimator",), name),), note)


KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k1": "k1", "k2": "k2", "k3": "k3", "abs": "abs"}


def _kl_loss_type(value: Any, key: Key) -> Outcome:
    name = str(value)
    writes = {"kl_loss_penalty": KL.get(name.removesuffix("+"), value)}
    if name.endswith("+"):
        note = "the value is that of the estimator, its gradient the unbiased one of the KL, as in verl"
        return key.changed({**writes, "kl_loss_unbiased": True}, note)
    return key.renamed(writes) if writes["kl_loss_penalty"] == value else key.changed(writes)


def _in_reward(rule: Convert) -> Any:
    return only(lambda source: lookup(source, "algorithm.use_kl_in_reward"), "use_kl_in_reward is off", rule)


def _if_adaptive(target: str) -> Any:
    adapts = "adaptive"
    rule = only(
        lambda source: lookup(source, "algorithm.kl_ctrl.type") == adapts, "kl_ctrl.type is not adaptive", to(target)
    )
    return _in_reward(rule)


def _aggregation(value: Any, key: Key) -> Outcome:
    if value == "seq-mean-token-sum-norm":
        note = "the constant is response_length here; in verl loss_scale_factor, or the padded length"
        return key.differs(note, "loss_agg_mode")
    return replace(key.renamed("loss_agg_mode", "over the optimizer step of all ranks, as in verl"), status="kept")


def _scale_factor(value: Any, key: Key) -> Outcome:
    length = lookup(key.source, "data.max_response_length", 512)
    if key.beside("loss_agg_mode") != "seq-mean-token-sum-norm" or value == length:
        return key.unneeded("the constant of seq-mean-token-sum-norm is response_length")
    return key.rejected(f"the constant is response_length {length}; `check` rejects it")


BOUNDS = {"gspo": "clip", "cispo": "clip", "geo_mean": "clip", "dppo_tv": "delta", "dppo_kl": "delta"}
"""Losses with clip bounds in `pg_options`: the beginning of the options' names."""


def _clip_ratio(value: Any, key: Key) -> Outcome:
    ends = [end for end in ("low", "high") if lookup(key.source, ACTOR).get(f"clip_ratio_{end}", 0.2) is None]
    if ends:
        return _bounds(key, *ends)
    if value == 0.2:
        return key.unneeded("it is the default here")
    low, high = clip_range(key.source)
    return key.dead(f"clip_ratio_low {low} and clip_ratio_high {high} take precedence; both are 0.2 by default")


def _bounds(key: Key, *ends: str) -> Outcome:
    """Write the lower or the upper clip bound."""
    loss, (low, high) = loss_mode(key.source), clip_range(key.source)
    values = {"low": low, "high": high}
    if loss in BOUNDS:
        return key.renamed({f"pg_options.{BOUNDS[loss]}_{end}": values[end] for end in ends})
    if loss not in ("vanilla", "clip_cov"):
        return key.unneeded(f"{loss} does not clip")
    if (low, high) == (0.2, 0.2):
        return key.unneeded("it is the default here")
    return key.renamed({f"pg_clip_{end}": values[end] for end in ends}, "clip-higher")


def _clip_c(value: Any, key: Key) -> Outcome:
    loss = loss_mode(key.source)
    if loss.startswith("dppo"):
        return key.renamed("pg_options.ratio_high")
    return (
        key.renamed("dual_clip", "always on in verl")
        if loss == "vanilla"
        else key.unneeded(f"{loss} does not clip twice")
    )


LOSSES = {"geo_mean": "gmpo", "dppo_tv": "dppo", "dppo_kl": "dppo"}
LOSS_OPTIONS = {"cispo": {"bounds": "relative"}, "dppo_tv": {"divergence": "tv"}, "dppo_kl": {"divergence": "kl"}}
OTHER_RESULTS = {
    "geo_mean": "verl averages over the sequences of a micro-batch, roll-core over those of the optimizer step",
    "clip_cov": "verl clips a share of the tokens, roll-core tokens with a probability: see pg_options",
    "kl_cov": "verl penalizes a share of the tokens, roll-core those above a covariance: see pg_options",
    **dict.fromkeys(("dppo_tv", "dppo_kl"), "here the divergence is that from the engine's logprobs"),
}


def _loss_mode(value: Any, key: Key) -> Outcome:
    if value == "vanilla":
        return key.unneeded("verl's vanilla is pg_variant ppo, the default, with dual_clip")
    options = {f"pg_options.{name}": option for name, option in LOSS_OPTIONS.get(value, {}).items()}
    writes = {"pg_variant": LOSSES.get(value, value), **options}
    return key.differs(OTHER_RESULTS[value], writes) if value in OTHER_RESULTS else key.renamed(writes)


def _constant_of(loss: str) -> Convert:
    def convert(value: Any, key: Key) -> Outcome:
        if loss_mode(key.source) == loss:
            return key.differs(f"not converted: set pg_options of {loss}, see docs/algorithms.md")
        return key.unneeded(f"it is a constant of {loss}")

    return nested(convert)


def _filter(value: Any, key: Key) -> Outcome:
    metric = key.beside("metric") or "reward"
    target = {f"rewards.{REWARD}.query_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": 0}}}
    if metric in ("reward", "seq_reward", "seq_final_reward", "score"):
        return key.renamed(target)
    return key.differs(f"verl compares {metric} of a group, roll-core its rewards, penalties included", target)


def _max_batches(value: Any, key: Key) -> Outcome:
    if not isinstance(value, int) or value < 1:
        return key.differs("verl has no limit; see dynamic_sampling_max_tries, 10 batches")
    size = count(key.source, "data.train_batch_size", 1024)
    generated = count(key.source, "data.gen_batch_size", size)
    note = (
        f"{value} × gen_batch_size {generated} / train_batch_size {size}; verl then raises, here the batch is smaller"
    )
    return key.differs(note, {"dynamic_sampling_max_tries": max(value * generated / size, 1.0)})


WEIGHT = "train_infer_correction.is_weight"
MULTIPLIES = "a weight multiplies the advantage, in verl the loss"


def _rollout_is(value: Any, key: Key) -> Outcome:
    level = key.beside("rollout_is_level") if value is True else value
    if not level:
        return key.unneeded("it is off")
    if key.beside("bypass_mode"):
        return key.unneeded("with bypass_mode, PPO's ratio is the one to the engine")
    threshold = key.beside("rollout_is_threshold")
    bounds = str(2.0 if threshold is None else threshold).split("_")
    try:
        numbers = [float(bound) for bound in bounds]
    except ValueError:
        return key.rejected(f"rollout_is_threshold {bounds} is not a number")
    writes = {f"{WEIGHT}.enabled": True, f"{WEIGHT}.weight_type": level, f"{WEIGHT}.upper_bound": numbers[-1]}
    if len(numbers) > 1:
        writes |= {f"{WEIGHT}.lower_bound": numbers[0], f"{WEIGHT}.outside": "mask"}
    return key.changed(writes, MULTIPLIES)


LEVELS = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric", "seq_max": "max"}


def _rollout_rs(value: Any, key: Key) -> Outcome:
    threshold = key.beside("rollout_rs_threshold")
    if key.beside("bypass_mode"):
        return key.refused("with bypass_mode, verl rejects by the policy of each optimizer step")
    names, bounds = (list(filter(None, map(str.strip, str(text).split(",")))) for text in (value, threshold))
    names = list(dict.fromkeys(names))
    try:
        pairs = zip(names, bounds * (len(names) if len(bounds) == 1 else 1), strict=True)
        filters = [_rejection(*pair) for pair in pairs]
    except (ValueError, KeyError, ZeroDivisionError):
        return key.refused(f"verl refuses it with rollout_rs_threshold {threshold}")
    note = "bounds of k1 are those of engine / trainer in verl, of trainer / engine here"
    return key.changed({"train_infer_correction.filters": filters}, note if "k1" in str(value) else "")


def _rejection(name: str, bound: str) -> dict[str, Any]:
    """Filter for an option of `rollout_rs`."""
    level, _, kind = name.rpartition("_")
    options: dict[str, Any] = {"enabled": True, "agg_type": LEVELS[level]}
    if kind == "k1" and level != "seq_max":
        low, _, high = bound.rpartition("_")
        return options | {"ratio_low": 1 / float(high), "ratio_high": 1 / float(low) if low else float(high)}
    return options | {"ratio_enabled": False, {"k2": "k2_max", "k3": "k3_max"}[kind]: float(bound)}


def _tis_cap(value: Any, key: Key) -> Outcome:
    if not positive(value):
        return key.unneeded("it is off")
    return key.renamed({f"{WEIGHT}.enabled": True, f"{WEIGHT}.upper_bound": value}, MULTIPLIES)


def _manager(value: Any, key: Key) -> Outcome:
    functions = ("custom_reward_function.path", "reward.custom_reward_function.path")
    if value not in ("naive", "dapo", "prime", "batch", "rate_limited", "remote"):
        return key.rejected("custom code: write a reward; `check` rejects it")
    if value == "dapo" and not any(lookup(key.source, path) for path in functions):
        note = "verl's score of math is 1 or -1 for DAPO's data, that of math_rule is 1 or 0"
        return key.differs(f"{note}: a penalty of the same size weighs twice as much")
    return key.unneeded("rewards are always scored in parallel; dapo's penalty has keys of its own")


def _max_resp_len(value: Any, key: Key) -> Outcome:
    if not any(lookup(key.beside(name), "enable") for name in ("overlong_buffer", "overlong_buffer_cfg")):
        return key.unneeded("the overlong buffer is off")
    return key.renamed("soft_overlong_penalty.l_max")


# -- values: roles -----------------------------------------------------------------------------------------------------


def _mini_batch(value: Any, key: Key) -> Outcome:
    steps, how = accumulation(key.source, key.parent)
    return key.changed({"{role}.training_args.gradient_accumulation_steps": steps}, how)


def _micro_batch(value: Any, key: Key) -> Outcome:
    if dynamic(key.source, key.parent):
        return key.unneeded("use_dynamic_bsz fills micro-batches by tokens")
    return key.renamed("{role}.training_args.per_device_train_batch_size")


def _tokens(kind: str) -> Convert:
    def convert(value: Any, key: Key) -> Outcome:
        role = ACTOR if key.parent == ROLLOUT else key.parent
        switch = key.beside("log_prob_use_dynamic_bsz") if kind == "infer" else None
        if not (dynamic(key.source, role) if switch is None else switch):
            return key.unneeded("use_dynamic_bsz is off")
        size = ranks_per_sequence(key.source, role)
        splits = "context" if backend(key.source, role) == "megatron" else "ulysses_sequence"
        note = f"{value} per GPU × {splits}_parallel_size {size}" if size > 1 else ""
        limit = value * size if isinstance(value, int) else value
        return key.renamed({f"{{role}}.max_tokens_per_microbatch_in_{kind}": limit}, note)

    return nested(convert)


def _dynamic(kind: str) -> Convert:
    target = f"{{role}}.use_dynamic_batching_in_{kind}"
    return if_on(nested(lambda value, key: key.renamed({target: True})), "it is off here too")


def _of_training(name: str) -> Convert:
    """Key of `strategy_config` that `megatron_infer` rejects."""

    def convert(value: Any, key: Key) -> Outcome:
        scores = key.new_role == "reference"
        return key.unneeded(ONLY_SCORES) if scores else key.renamed(f"{{role}}.{STRATEGY}.{name}")

    return nested(convert)


def _dtype(value: Any, key: Key) -> Outcome:
    if value in ("fp32", "float32"):
        return key.unneeded("the optimizer updates fp32 weights; the computation is bf16")
    return key.differs(f"verl stores the trained weights in {value}; here the optimizer has fp32 weights")


def _fsdp_dtype(value: Any, key: Key) -> Outcome:
    dtype = {"bfloat16": "bf16", "float32": "fp32"}.get(value, value)
    if dtype == {"param_dtype": "bf16", "reduce_dtype": "fp32"}[key.name]:
        return key.unneeded("it is so by default")
    if key.name == "reduce_dtype" and key.new_role == "reference":
        return key.unneeded(ONLY_SCORES)
    target = {f"{{role}}.{STRATEGY}.{key.name}": dtype}
    return key.renamed(target) if dtype == value else key.changed(target)


def _fsdp_size(value: Any, key: Key) -> Outcome:
    if not isinstance(value, int) or value < 1:
        return key.unneeded("all ranks share one copy of the model")
    return key.renamed(f"{{role}}.{STRATEGY}.fsdp_size")


def _veomni_fsdp_size(value: Any, key: Key) -> Outcome:
    """VeOmni counts ranks with different sequences, and shards over the ranks that share one, too."""
    ranks = value * ulysses(key.source, ".".join(key.path[:-2])) if isinstance(value, int) else value
    if not isinstance(ranks, int) or not 0 < ranks < num_gpus(key.source):
        return key.unneeded("all ranks share one copy of the model")
    note = "" if ranks == value else f"{value} × ulysses_parallel_size"
    return key.changed({f"{{role}}.{STRATEGY}.fsdp_size": ranks}, note)


def _sequence_parallel(value: Any, key: Key) -> Outcome:
    if value == 1 or backend(key.source) == "megatron":
        return key.unneeded("1 has no effect" if value == 1 else "Megatron has context_parallel_size")
    return key.renamed(f"{{role}}.{STRATEGY}.ulysses_size")


def _megatron_sequences(value: Any, key: Key) -> Outcome:
    if not value or key.beside("tensor_model_parallel_size") in (None, 1):
        return key.unneeded("it has no effect without tensor parallelism")
    return key.renamed(f"{{role}}.{STRATEGY}.sequence_parallel")


def _dispatcher(value: Any, key: Key) -> Outcome:
    target = f"{{role}}.{STRATEGY}.moe_token_dispatcher_type"
    return key.changed({target: "alltoall"}, "without DeepEP") if value == "flex" else key.renamed(target)


def _recompute_modules(value: Any, key: Key) -> Outcome:
    if key.new_role == "reference":
        return key.unneeded(ONLY_SCORES)
    if key.beside("recompute_granularity") != "selective":
        return key.unneeded("recompute_granularity is not selective")
    return key.renamed(f"{{role}}.{STRATEGY}.recompute_modules")


def _strategy(value: Any, key: Key) -> Outcome:
    by_fsdp2 = str(value).startswith("fsdp") or value == "veomni"
    train = "megatron_train" if value == "megatron" else "fsdp2_train" if by_fsdp2 else value
    name = str(train).replace("_train", "_infer") if key.new_role == "reference" else train
    return key.changed({"{role}.strategy_args.strategy_name": name}, "by FSDP2" if by_fsdp2 else "")


def _schedule(value: Any, key: Key) -> Outcome:
    target = "{role}.training_args.lr_scheduler_type"
    if value == "constant":
        return key.changed({target: "constant_with_warmup" if warms_up(key.source, key.parent) else "constant"})
    if value == "cosine" and (floor := _lowest_rate(key)):
        return key.changed({target: "cosine_with_min_lr", "{role}.training_args.lr_scheduler_kwargs": floor})
    return key.renamed(target)


def _lowest_rate(key: Key) -> dict[str, float]:
    """Arguments of a cosine schedule that ends above 0. FSDP's optimizer has `min_lr_ratio`, Megatron's `min_lr`."""
    names = {"min_lr_rate": "min_lr_ratio", "min_lr": "min_lr"}
    return {name: value for name, theirs in names.items() if positive(value := key.beside(theirs))}


def _min_lr(value: Any, key: Key) -> Outcome:
    style = key.beside("lr_decay_style") or "constant"
    if not value or style in ("constant", "cosine"):
        return key.unneeded("the rate is constant" if style == "constant" else "lr_decay_style has it")
    return key.rejected(f"a {style} schedule decays to 0 here")


def _positive(name: str) -> Convert:
    def convert(value: Any, key: Key) -> Outcome:
        return key.renamed(f"{{role}}.training_args.{name}") if positive(value) else key.unneeded("there is no warm-up")

    return nested(convert)


def _betas(value: Any, key: Key) -> Outcome:
    if backend(key.source, ".".join(key.path[:-2]) or ACTOR) == "megatron":
        return key.dead("verl does not pass it to Megatron, whose betas are 0.9 and 0.999")
    if not isinstance(value, list) or len(value) != 2:
        return key.rejected("expected two numbers")
    return key.renamed({f"{{role}}.training_args.adam_beta{i}": beta for i, beta in enumerate(value, 1)})


def _grad_clip(value: Any, key: Key) -> Outcome:
    """verl 0.9 reads only optim.clip_grad; older versions read grad_clip with FSDP."""
    actor = lookup(key.source, f"{ACTOR}.optim.clip_grad", lookup(key.source, f"{ACTOR}.grad_clip", 1.0))
    if value == actor and (key.path[0] == "critic" or value == 1.0):
        return key.unneeded("max_grad_norm applies to every trained role")
    if key.path[0] == "critic":
        return key.rejected(f"the critic has the actor's max_grad_norm {actor}")
    if key.name == "grad_clip" and lookup(key.source, f"{ACTOR}.optim.clip_grad") is not None:
        return key.unneeded("optim.clip_grad takes precedence")
    return key.renamed("max_grad_norm")


def _trust(value: Any, key: Key) -> Outcome:
    roles = ("actor_train", "actor_infer") if key.new_role == "actor_train" else (key.new_role,)
    return key.renamed({f"{role}.model_args.trust_remote_code": True for role in roles})


def _checkpointing(value: Any, key: Key) -> Outcome:
    if value:
        return key.unneeded("it is on by default")
    return key.changed({"{role}.model_args.disable_gradient_checkpointing": True})


def _activation_offload(value: Any, key: Key) -> Outcome:
    if backend(key.source) == "megatron":
        return key.unneeded("verl's Megatron does not read it")
    if key.beside("enable_gradient_checkpointing") is False:
        return key.unneeded("inputs of recomputed layers are offloaded, and none is recomputed")
    return key.changed({f"{{role}}.{STRATEGY}.activation_offloading": True})


MEGATRON_CONFIGS = ("model_config", "moe_config")
"""Sections of `override_config` in configs for Megatron."""


def _model_config(value: Any, key: Key) -> Outcome:
    if key.name in MEGATRON_CONFIGS and isinstance(value, dict):
        inner = (_model_config(item, replace(key, path=(*key.path, name), value=item)) for name, item in value.items())
        writes = tuple(write for outcome in inner for write in outcome.writes)
        return Outcome("renamed", writes) if writes else key.unneeded("no key has an effect")
    no_dropout = key.name.endswith(("dropout", "pdrop")) and value in (0, None)
    if no_dropout or (key.name, value) == ("freeze_moe_router", False):
        return key.unneeded("dropout is off in training, and routers are trained")
    return key.renamed({(key.new_role, "model_args", "model_config_kwargs", key.name): value})


def _lora(name: str, rank: str = "lora_rank") -> Convert:
    rule: Convert = only(rank, f"{rank} is 0", to(f"{{role}}.model_args.{name}"))
    return rule


MEGATRON_LINEAR = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Hugging Face's modules of the layers that Megatron adapts; all of them by default."""


def _megatron_lora_target(value: Any, key: Key) -> Outcome:
    if not isinstance(value, list) or set(value) - set(MEGATRON_LINEAR):
        return key.rejected("set model_args.lora_target; left in the config")
    modules = ",".join(module for name in value for module in MEGATRON_LINEAR[name])
    everything = set(value) == set(MEGATRON_LINEAR)
    return key.changed({"{role}.model_args.lora_target": "all-linear" if everything else modules})


# -- values: the engine ------------------------------------------------------------------------------------------------


def _engine_key(vllm: str, sglang: str = "") -> Convert:
    def convert(value: Any, key: Key) -> Outcome:
        name = {"vllm": vllm, "sglang": sglang}.get(str(lookup(key.source, f"{ROLLOUT}.name")), vllm)
        return key.renamed(f"{ENGINE}.{name}") if name else key.unneeded("the engine decides")

    return nested(convert)


def _tensor_parallel(value: Any, key: Key) -> Outcome:
    copies = expert_parallel_copies(key.source)
    if key.beside("name") != "sglang":
        return key.renamed(f"{ENGINE}.tensor_parallel_size")
    if copies > 1 and isinstance(value, int):
        note = f"{value} × data_parallel_size {copies}: the engine's GPUs split attention too, instead of sequences"
        return key.changed({f"{ENGINE}.tp_size": value * copies}, note)
    return key.renamed(f"{ENGINE}.tp_size")


def _data_parallel(value: Any, key: Key) -> Outcome:
    if expert_parallel_copies(key.source) == 1:
        return key.unneeded("replicas are set by device_mapping")
    if key.beside("name") == "sglang":
        return key.unneeded("tensor_model_parallel_size has it")
    return key.renamed(f"{ENGINE}.data_parallel_size")


def _expert_parallel(value: Any, key: Key) -> Outcome:
    if not isinstance(value, int) or value <= 1:
        return key.unneeded("experts are split like other weights, as in verl")
    if key.beside("name") == "sglang":
        return key.changed(f"{ENGINE}.ep_size")
    return key.changed({f"{ENGINE}.enable_expert_parallel": True}, "over all GPUs of an engine, as in verl")


def _engine_kwargs(value: Any, key: Key) -> Outcome:
    options = lookup(value, str(lookup(key.source, f"{ROLLOUT}.name"))) or {}
    writes = tuple(((*ENGINE.split("."), name), option) for name, option in options.items())
    return Outcome("renamed" if options else "not needed", writes)


def _engine_dtype(value: Any, key: Key) -> Outcome:
    if value in ("bfloat16", "bf16", "auto"):
        return key.unneeded("bf16 is the default")
    return key.changed({"actor_infer.model_args.dtype": {"float16": "fp16", "float32": "fp32"}.get(value, value)})


# -- values: the run ---------------------------------------------------------------------------------------------------


def _epochs(value: Any, key: Key) -> Outcome:
    if key.beside("total_training_steps") is not None:
        return key.unneeded("total_training_steps takes precedence")
    if (steps := epochs_as_steps(key.source)) is None:
        note = f"set max_steps to {value} × rows of the data / rollout_batch_size {batch_size(key.source)}"
        return key.lacking(f"{note}; train_files cannot be counted from here", {"max_steps": "???"})
    return key.changed({"max_steps": steps[0]}, steps[1])


def _val_before_train(value: Any, key: Key) -> Outcome:
    if only_evaluates(key.source):
        return key.unneeded("an evaluation trains nothing")
    on = positive(lookup(key.source, "trainer.test_freq"))
    if bool(value) == on:
        return key.unneeded("eval_steps also evaluates before the first step")
    note = "here a run that evaluates does so before the first step too" if on else "test_freq is off"
    return key.differs(f"{note}; eval_steps is {'on' if on else '0, which disables evaluation'}")


def _val_only(value: Any, key: Key) -> Outcome:
    if not value:
        return key.unneeded("the run trains")
    return key.changed({"pipeline": "evaluate"}) if evaluates(key.source) else key.lacking("there are no val_files")


def _resume(value: Any, key: Key) -> Outcome:
    modes = {"auto": "auto", "disable": False}
    if value in modes:
        return key.changed({"resume_from_checkpoint": modes[value]})
    return key.lacking("verl's checkpoints cannot be read: convert to a Hugging Face model for pretrain")


def _project(value: Any, key: Key) -> Outcome:
    options = {"wandb": "project", "swanlab": "project", "trackio": "project", "mlflow": "experiment_name"}
    used = [name for name in options if name in loggers(key.source) and name in key.trackers]
    writes = {f"tracker_kwargs.{name}.{options[name]}": value for name in used}
    return key.renamed(writes) if writes else key.unneeded("no tracker has projects")


# -- tables ------------------------------------------------------------------------------------------------------------

PLACED = unneeded("idle roles are offloaded by is_offload_states")
FASTER = unneeded("it does not affect results")
SEEDED = unneeded("seeds derive from the run's, data.seed")
EXACT = unneeded("deterministic kernels are on unless `deterministic` is false")
ADAPTERS = "adapters start new, on the modules of lora_target"
QAT = "quantization-aware training is not supported"
NO_TOOLS = "turns with tools are the pipeline agentic"
ONLY_SCORES = "the reference only scores"
BY_REPLAY = unneeded("rollout.enable_rollout_routing_replay decides")
MODEL: Table = {
    "path": to("pretrain"),
    "trust_remote_code": if_on(_trust),
    "lora_rank": _lora("lora_rank"),
    "lora_alpha": _lora("lora_alpha"),
    "target_modules": _lora("lora_target"),
    "enable_gradient_checkpointing": _checkpointing,
    "use_remove_padding": unneeded("sequences are always packed"),
    "override_config": AnyName(nested(_model_config)),
    **keys("hf_config_path tokenizer_path custom_chat_template external_lib", refused("the model's own is used")),
    "exclude_modules": nested(_excluded),
    "lora_adapter_path": refused(ADAPTERS),
    "enable_activation_offload": if_on(_activation_offload),
    **keys("use_shm use_liger use_fused_kernels fused_kernel_options tiled_mlp", FASTER),
    "mtp": switched("multi-token prediction layers are not trained"),
    "lora": only(
        is_megatron,
        "it is for Megatron; lora_rank, lora_alpha and target_modules apply",
        {
            "rank": _lora("lora_rank", "rank"),
            "alpha": _lora("lora_alpha", "rank"),
            "dropout": lambda value, key: lora_dropout(key, enabled=bool(key.beside("rank"))),
            "target_modules": only("rank", "rank is 0", nested(_megatron_lora_target)),
            "type": refused("only LoRA is supported", "lora"),
            **keys("exclude_modules adapter_path", refused(ADAPTERS, [])),
            "merge": unneeded("engines get merged weights, or adapters if they have a LoRA key"),
            **keys(
                "dtype dropout_position lora_A_init_method lora_B_init_method a2a_experimental freeze_vision_model"
                " freeze_vision_projection freeze_language_model",
                unneeded("peft's defaults apply"),
            ),
        },
    ),
    "share_embeddings_and_output_weights": unneeded("the model's config decides"),
}
OPTIM: Table = {
    "lr": to("{role}.training_args.learning_rate"),
    "weight_decay": to("{role}.training_args.weight_decay"),
    "lr_warmup_steps": _positive("warmup_steps"),
    "lr_warmup_steps_ratio": _positive("warmup_ratio"),
    "betas": nested(_betas),
    **keys("lr_scheduler_type warmup_style lr_decay_style", _schedule),
    "min_lr_ratio": unneeded("lr_scheduler_type has it"),
    "clip_grad": _grad_clip,
    "weight_decay_incr_style": refused("weight decay is constant", "constant"),
    **keys("lr_wsd_decay_style lr_wsd_decay_steps", unneeded("the schedule has no wsd; lr_decay_style decides")),
    **keys(
        "muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_coefficient_type muon_num_ns_steps"
        " muon_tp_mode muon_fp32_matmul_prec muon_extra_scale_factor muon_scalar_optimizer muon_match_adamw_update_rms",
        unneeded("it is for Muon: `optimizer` decides"),
    ),
    "use_precision_aware_optimizer": refused("the optimizer's state is fp32", False),
    **keys("main_grads_dtype exp_avg_dtype exp_avg_sq_dtype", unneeded("use_precision_aware_optimizer decides")),
    "use_layer_wise_distributed_optimizer": refused("the optimizer is distributed by Megatron's default", False),
    "optimizer": refused("only AdamW is converted; set training_args.optimizer", "AdamW", "adam", "adamw"),
    "optimizer_impl": refused("only torch's AdamW is supported", "torch.optim"),
    "num_cycles": refused("a cosine has half a cycle", 0.5),
    "min_lr": nested(_min_lr),
    "lr_warmup_init": refused("warm-up starts at 0", 0.0),
    **keys("total_training_steps lr_decay_steps", unneeded("the schedule spans max_steps")),
    "override_optimizer_config": {
        **{
            name: to(f"{{role}}.{STRATEGY}.{name}")
            for name in ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
        },
        **{name: to(f"{{role}}.training_args.{name}") for name in ("adam_beta1", "adam_beta2")},
        "use_precision_aware_optimizer": unneeded("masters and moments are fp32"),
    },
    **keys("zero_indexed_step use_checkpoint_opt_param_scheduler", FASTER),
}
FSDP: Table = {
    **keys("param_offload optimizer_offload", PLACED),
    "offload_policy": if_on(nested(lambda value, key: key.renamed({f"{{role}}.{STRATEGY}.offload_policy": True}))),
    "reshard_after_forward": unneeded("FSDP2 decides by the model's size"),
    "fsdp_size": _fsdp_size,
    "model_dtype": _dtype,
    "dtype": refused("training computes in bf16", "bfloat16"),
    "ulysses_sequence_parallel_size": _sequence_parallel,
    "qat": switched(QAT),
    "seed": SEEDED,
    "full_determinism": EXACT,
    "mixed_precision": {
        "param_dtype": _fsdp_dtype,
        "reduce_dtype": _fsdp_dtype,
        "buffer_dtype": unneeded("buffers keep the model's dtype"),
    },
    **keys(
        "wrap_policy forward_prefetch use_orig_params entropy_from_logits_with_chunking"
        " entropy_from_logits_chunk_size use_torch_compile entropy_checkpointing"
        " use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket forward_only strategy"
        " turbo_config",
        FASTER,
    ),
}
PARALLEL = (
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size context_parallel_size"
    " expert_model_parallel_size expert_tensor_parallel_size"
)
TRANSFORMER = (
    "moe_grouped_gemm moe_token_dispatcher_type moe_router_dtype account_for_embedding_in_pipeline_split"
    " account_for_loss_in_pipeline_split num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"
)
OF_TRAINING = "recompute_granularity recompute_method recompute_num_layers moe_aux_loss_coeff moe_z_loss_coeff"
MEGATRON: Table = {
    **{name: to(f"{{role}}.{STRATEGY}.{name}") for name in PARALLEL.split()},
    "sequence_parallel": _megatron_sequences,
    **keys("param_offload optimizer_offload grad_offload", PLACED),
    "use_distributed_optimizer": refused("the optimizer is always distributed", True),
    "override_transformer_config": {
        **{name: _of_training(name) for name in OF_TRAINING.split()},
        **{name: to(f"{{role}}.{STRATEGY}.{name}") for name in TRANSFORMER.split()},
        "moe_token_dispatcher_type": _dispatcher,
        "recompute_modules": nested(_recompute_modules),
        **keys(
            "attention_backend apply_rope_fusion gradient_accumulation_fusion masked_softmax_fusion"
            " bias_activation_fusion bias_dropout_fusion persist_layer_norm deallocate_pipeline_outputs"
            " moe_permute_fusion moe_enable_deepep moe_flex_dispatcher_backend moe_shared_expert_overlap"
            " enable_vision_context_parallelism use_flash_attn",
            FASTER,
        ),
    },
    **keys("override_ddp_config override_mcore_model_config", refused("only the declared keys are supported", {})),
    "qat": switched(QAT),
    "router_replay": BY_REPLAY,
    "use_megatron_fsdp": refused("Megatron's FSDP is not supported", False),
    "dtype": refused("training computes in bf16", "bfloat16"),
    "seed": SEEDED,
    **keys(
        "use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix dist_ckpt_optim_fully_reshardable"
        " distrib_optim_fully_reshardable_mem_efficient use_mbridge vanilla_mbridge entropy_from_logits_with_chunking"
        " entropy_from_logits_chunk_size use_remove_padding forward_only load_weight"
        " dynamic_context_parallel max_seqlen_per_dp_cp_rank pad_bshd_to_minibatch_max pad_to_length"
        " pad_to_length_bucket",
        FASTER,
    ),
}
VEOMNI: Table = {
    **keys("param_offload optimizer_offload enable_fsdp_offload", PLACED),
    "fsdp_size": _veomni_fsdp_size,
    "ulysses_parallel_size": to(f"{{role}}.{STRATEGY}.ulysses_size"),
    "expert_parallel_size": to(f"{{role}}.{STRATEGY}.ep_size"),
    "seed": SEEDED,
    "full_determinism": EXACT,
    "mixed_precision": refused("the computation is bf16, gradients are reduced in fp32", True),
    "router_replay": BY_REPLAY,
    "qat_implementation": refused(QAT, "none"),
    "enable_async_activation_offload": unneeded("set strategy_config.activation_offloading"),
    "load_checkpoint_path": refused("set resume_from_checkpoint"),
    **keys(
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
    "strategy": _strategy,
    "model_engine": unneeded("`strategy` has it"),
    "fsdp_config": only(lambda source: backend(source) == "fsdp", "the strategy is another", FSDP),
    "megatron": only(is_megatron, "the strategy is another", MEGATRON),
    "veomni": only(lambda source: backend(source) == "veomni", "the strategy is another", VEOMNI),
    "ulysses_sequence_parallel_size": _sequence_parallel,
    **keys(
        "profiler use_torch_compile use_fused_kernels use_remove_padding entropy_from_logits_with_chunking"
        " entropy_from_logits_chunk_size entropy_checkpointing pad_to_length rollout_n load_weight",
        FASTER,
    ),
    "router_replay": BY_REPLAY,
}
UPDATE: Table = {
    **SHARED,
    "optim": OPTIM,
    "ppo_mini_batch_size": _mini_batch,
    "ppo_micro_batch_size_per_gpu": _micro_batch,
    "ppo_micro_batch_size": refused("set ppo_micro_batch_size_per_gpu"),
    "use_dynamic_bsz": _dynamic("train"),
    "ppo_max_token_len_per_gpu": _tokens("train"),
    "grad_clip": _grad_clip,
    "data_loader_seed": unneeded("the run's seed"),
    "checkpoint": unneeded("checkpoints resume runs, and export/ is a Hugging Face model"),
    "qat": switched(QAT),
}
ACTOR_KEYS: Table = {
    **UPDATE,
    "clip_ratio": _clip_ratio,
    "clip_ratio_low": nested(lambda value, key: _bounds(key, "low")),
    "clip_ratio_high": nested(lambda value, key: _bounds(key, "high")),
    "clip_ratio_c": _clip_c,
    "loss_agg_mode": _aggregation,
    "loss_scale_factor": _scale_factor,
    "entropy_coeff": to("entropy_loss_coef"),
    "use_kl_loss": to("use_kl_loss"),
    "kl_loss_coef": to("kl_loss_coef"),
    "kl_loss_type": only("use_kl_loss", "use_kl_loss is off", _kl_loss_type),
    "ppo_epochs": to("ppo_epochs"),
    "shuffle": to("shuffle", note="here whole groups are shuffled, in verl samples", status="differs"),
    "policy_loss": {
        "loss_mode": _loss_mode,
        **keys("clip_cov_ratio clip_cov_lb clip_cov_ub", _constant_of("clip_cov")),
        **keys("kl_cov_ratio ppo_kl_coef", _constant_of("kl_cov")),
        "dro_beta": _constant_of("dro"),
    },
    "tis_imp_ratio_cap": _tis_cap,
    **keys("tau_pos tau_neg", _constant_of("sapo")),
    "freeze_vision_tower": nested(_frozen),
    **keys("calculate_entropy calculate_sum_pi_squared use_prefix_grouper", FASTER),
}
SCORED: Table = {
    "log_prob_micro_batch_size_per_gpu": to("{role}.infer_batch_size"),
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
    "name": to("actor_infer.strategy_args.strategy_name", values={"hf": "hf_infer"}, single=True),
    "n": to("num_return_sequences_in_group"),
    **{
        name: to(f"actor_infer.generating_args.{name}")
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    },
    "tensor_model_parallel_size": _tensor_parallel,
    "pipeline_model_parallel_size": _engine_key("pipeline_parallel_size"),
    "gpu_memory_utilization": _engine_key("gpu_memory_utilization", "mem_fraction_static"),
    "max_model_len": _engine_key("max_model_len", "context_length"),
    "max_num_seqs": _engine_key("max_num_seqs", "max_running_requests"),
    "max_num_batched_tokens": _engine_key("max_num_batched_tokens", "chunked_prefill_size"),
    "enforce_eager": _engine_key("enforce_eager", "disable_cuda_graph"),
    **{name: _engine_key(name) for name in ("enable_chunked_prefill", "enable_prefix_caching", "quantization")},
    "engine_kwargs": nested(_engine_kwargs),
    "dtype": _engine_dtype,
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
    **keys("prompt_length response_length", unneeded("set by data.max_prompt_length and data.max_response_length")),
    "ignore_eos": refused("a response ends with the end token", False),
    "do_sample": refused("set temperature: 0", True),
    "over_sample_rate": refused("set is_use_additional_prompts", 0),
    "multi_turn": switched(f"{NO_TOOLS}: see docs/agentic.md"),
    "agent": {
        "num_workers": FASTER,
        "default_agent_loop": refused(NO_TOOLS, "single_turn_agent"),
        "agent_loop_config_path": refused(NO_TOOLS),
        "custom_async_server": keys("path name", refused("custom code")),
    },
    "seed": SEEDED,
    "full_determinism": EXACT,
    "logprobs_mode": refused("logprobs are those of the sampling temperature", "processed_logprobs"),
    "qat": unneeded("that of the actor decides"),
    "enable_rollout_routing_replay": if_on(lambda value, key: key.changed({"router_replay.mode": "R3"})),
    "quantization_config_file": refused("set quantization"),
    "data_parallel_size": _data_parallel,
    "expert_parallel_size": _expert_parallel,
    "disaggregation": switched("prefill and decode use the same replica", "enabled"),
    "mtp": switched("multi-token prediction layers are not trained"),
    **keys(
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
    "forward_micro_batch_size_per_gpu": to("{role}.infer_batch_size"),
    "forward_micro_batch_size": refused("set forward_micro_batch_size_per_gpu"),
    "forward_max_token_len_per_gpu": unneeded("infer_batch_size bounds the critic's microbatches"),
}
FUNCTION: Table = {
    "path": lambda value, key: python_function(key, key.beside("name") or "compute_score", REWARD, "verl"),
    "name": unneeded("`path` has it"),
}
OVERLONG: Table = {
    "enable": unneeded("soft_overlong_penalty is set if it is on"),
    "len": only("enable", "the overlong buffer is off", to("soft_overlong_penalty.l_cache")),
    "penalty_factor": only("enable", "the overlong buffer is off", to("soft_overlong_penalty.penalty_factor")),
    "log": unneeded("metrics have it"),
}
BUFFER: Table = {"overlong_buffer": OVERLONG, "overlong_buffer_cfg": OVERLONG, "max_resp_len": _max_resp_len}
MODEL_REWARD = "a reward model is `rewards.<name>: {reward: model}`, see docs/rewards.md"
CUSTOM = "custom code: write a reward"
REWARDS: Table = {
    **keys("num_workers launch_reward_fn_async", unneeded("set by processes and world_size of a reward")),
    "custom_reward_function": FUNCTION,
    "reward_manager": {
        "name": _manager,
        "source": refused(CUSTOM, "register"),
        "module": {"path": refused(CUSTOM), "name": FASTER},
    },
    "reward_model": switched(MODEL_REWARD),
    "reward_kwargs": BUFFER,
    "sandbox_fusion": {
        "url": unsupported("set `sandbox_url` of a reward `code`"),
        **keys("max_concurrent memory_limit_mb", FASTER),
    },
}
OLD_REWARDS: Table = {
    **BUFFER,
    "enable": refused(MODEL_REWARD, False),
    "reward_manager": _manager,
    "reward_kwargs": BUFFER,
    "sandbox_fusion": REWARDS["sandbox_fusion"],
    **keys(
        "num_workers launch_reward_fn_async enable_resource_pool n_gpus_per_node nnodes model rollout strategy"
        " micro_batch_size_per_gpu use_dynamic_bsz max_length input_tokenizer profiler",
        unneeded("it is for a reward model"),
    ),
    **keys("reward_loop_source reward_loop_module_path reward_loop_class_name", refused(CUSTOM)),
}
CORRECTION: Table = {
    "rollout_is": _rollout_is,
    **keys("rollout_is_threshold rollout_is_level", unneeded("rollout_is has it")),
    "rollout_is_batch_normalize": to(f"{WEIGHT}.batch_normalize", neutral=(False,)),
    "rollout_rs": if_on(_rollout_rs),
    "rollout_rs_threshold": unneeded("rollout_rs has it"),
    "bypass_mode": to("force_disable_old_logprobs_recompute", neutral=(False,)),
    "loss_type": refused("set pg_variant", "ppo_clip"),
}
ALGORITHM: Table = {
    "adv_estimator": _estimator,
    "gamma": to("gamma"),
    "lam": to("lambd"),
    "norm_adv_by_std_in_grpo": unneeded("adv_estimator has it"),
    "use_kl_in_reward": to("add_token_level_kl"),
    "kl_penalty": only(
        "use_kl_in_reward", "use_kl_in_reward is off", to("kl_penalty", values=KL, status="changed", single=True)
    ),
    "kl_ctrl": {
        "type": unneeded("target_kl is set if it is adaptive"),
        "kl_coef": _in_reward(to("init_kl_coef")),
        "horizon": _if_adaptive("kl_horizon"),
        "target_kl": _if_adaptive("target_kl"),
    },
    "filter_groups": {
        "enable": if_on(_filter),
        "metric": unneeded("roll-core compares rewards"),
        "max_num_gen_batches": only("enable", "filter_groups is off", _max_batches),
        "max_inflight_gen_batches": FASTER,
    },
    "rollout_correction": CORRECTION,
    **{name: CORRECTION[name] for name in ("rollout_is", "rollout_is_threshold", "rollout_is_level")},
    "use_pf_ppo": refused("samples cannot be reweighted", False),
    "pf_ppo": unneeded("use_pf_ppo decides"),
}


def _of_data(name: str) -> Convert:
    """Write the value at `name` of each `data_args`."""

    def convert(value: Any, key: Key) -> Outcome:
        roles = ("actor_train", "validation")[: 1 + evaluates(key.source)]
        return key.renamed({f"{role}.data_args.{name}": value for role in roles})

    return convert


DATA: Table = {
    "train_files": names_of_files("actor_train.data_args.file_name"),
    "val_files": names_of_files("validation.data_args.file_name"),
    "train_max_samples": to("actor_train.data_args.max_samples", neutral=(-1,)),
    "val_max_samples": only(evaluates, "there are no val_files", to("validation.data_args.max_samples", neutral=(-1,))),
    "prompt_key": nested(_of_data("messages")),
    "apply_chat_template_kwargs": if_on(nested(_of_data("chat_template_kwargs"))),
    "max_prompt_length": to("prompt_length"),
    "max_response_length": to("response_length"),
    "train_batch_size": to("rollout_batch_size"),
    "gen_batch_size": unneeded("dynamic_sampling_max_tries counts batches of rollout_batch_size"),
    "val_batch_size": to("val_batch_size"),
    "shuffle": _train_shuffle,
    "seed": to("seed", note="the run's seed, also of sampling and initialization", status="differs"),
    "filter_overlong_prompts": _overlong_prompts,
    "truncation": _truncation,
    "reward_fn_key": unneeded("one reward scores every row; for several, set data_args.tag"),
    "custom_cls": keys("path name", refused("custom code that makes rows")),
    "tokenizer": refused("the model's own is used"),
    **keys("tool_config_path function_tool_path", refused(NO_TOOLS)),
    "enable_thinking": lambda value, key: key.dead("verl reads apply_chat_template_kwargs.enable_thinking"),
    "mm_processor_kwargs": refused("the processor has no arguments", {}),
    "image_key": nested(images),
    "video_key": videos,
    "audio_key": audio,
    **keys(
        "use_shm dataloader_num_workers filter_overlong_prompts_workers validation_shuffle image_patch_size"
        " return_raw_input_ids return_raw_chat return_full_prompt return_multi_modal_inputs",
        FASTER,
    ),
    "trust_remote_code": unneeded("that of the model decides"),
    "need_tools_kwargs": unneeded(NO_TOOLS),
}
FILES = ("console", "file")
"""Loggers that are always on here."""
TRAINER: Table = {
    "total_epochs": _epochs,
    "total_training_steps": to("max_steps", single=True),
    "project_name": _project,
    "experiment_name": lambda value, key: experiment(key, "verl"),
    "logger": nested(lambda value, key: track_with(key, [name for name in loggers(key.source) if name not in FILES])),
    "n_gpus_per_node": to("num_gpus_per_node", note="device_mapping of the roles lists the GPUs", single=True),
    "nnodes": unneeded("device_mapping of the roles lists the GPUs of all nodes"),
    "save_freq": frequency("save_steps"),
    "test_freq": frequency("eval_steps"),
    "val_before_train": _val_before_train,
    "val_only": _val_only,
    "default_local_dir": to("output_dir", note="runs are in output_dir/exp_name/number"),
    "resume_mode": _resume,
    "resume_from_path": unsupported("verl's checkpoints cannot be read"),
    "critic_warmup": to("critic_warmup"),
    "max_actor_ckpt_to_keep": to("max_ckpt_to_keep"),
    "max_critic_ckpt_to_keep": unneeded("a checkpoint has every role: max_ckpt_to_keep"),
    "default_hdfs_dir": unsupported("set checkpoint_store"),
    "device": unneeded("the platform is detected"),
    **keys("log_val_generations rollout_data_dir validation_data_dir", unneeded("samples.jsonl has every sample")),
    "v1": {
        "trainer_mode": refused("set async_generation_ratio", "sync"),
        **keys("sync colocate_async separate_async sampler", unneeded("trainer_mode decides")),
    },
    **keys(
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
        **keys("hybrid_engine nccl_timeout", unneeded("device_mapping places the roles")),
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
    **keys("global_profiler transfer_queue ray_kwargs ray_init skip hydra", FASTER),
}

# -- defaults ----------------------------------------------------------------------------------------------------------

ENGINES = "the strategy of verl's engine"
POOL = "verl's pool of n_gpus_per_node × nnodes GPUs, which roles use in turn"
LIKE_POLICY = "by default the policy's, as in verl"


def _of(fact: Callable[..., Any], *arguments: Any) -> Any:
    """A value that is a fact of the imported config."""
    return lambda source, config: fact(source, *arguments)


def _slots(source: Mapping[str, Any]) -> str:
    return f"list(range(0,{num_gpus(source)}))"


def _placed(role: str, theirs: str, kind: str, when: Condition = always) -> tuple[Default, ...]:
    """Strategy and slots of a role with weights of its own."""

    def strategy(source: Mapping[str, Any]) -> str:
        return f"{'megatron' if backend(source, theirs) == 'megatron' else 'fsdp2'}_{kind}"

    def splits(source: Mapping[str, Any]) -> bool:
        return bool(when(source) and backend(source, theirs) == "megatron" and splits_sequences(source, theirs))

    return (
        Default(f"{role}.{STRATEGY}.sequence_parallel", True, splits),
        Default(f"{role}.strategy_args.strategy_name", _of(strategy), when, ENGINES),
        Default(f"{role}.device_mapping", _of(_slots), when, POOL),
    )


def _trained(role: str, theirs: str, rate: float, tokens: int, when: Condition = always) -> tuple[Default, ...]:
    """Optimizer, batches and placement of a trained role."""
    args, tokens_in = f"{role}.training_args", f"{role}.max_tokens_per_microbatch_in"

    def schedule(source: Mapping[str, Any]) -> str:
        return "constant_with_warmup" if warms_up(source, f"{theirs}.optim") else "constant"

    def limit(source: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
        return lookup(config, f"{tokens_in}_train", tokens * ranks_per_sequence(source, theirs))

    def is_filled(source: Mapping[str, Any]) -> bool:
        return bool(when(source) and dynamic(source, theirs))

    def arithmetic(source: Mapping[str, Any]) -> str:
        return accumulation(source, theirs)[1]

    return (
        Default(f"{args}.learning_rate", rate, when),
        Default(f"{args}.weight_decay", 0.01, when),
        Default(f"{args}.lr_scheduler_type", _of(schedule), when),
        Default(f"{args}.per_device_train_batch_size", _of(micro_batch, theirs), when, arithmetic),
        Default(
            f"{args}.gradient_accumulation_steps", lambda source, _: accumulation(source, theirs)[0], when, arithmetic
        ),
        Default(f"{role}.use_dynamic_batching_in_train", True, is_filled),
        Default(f"{tokens_in}_train", lambda source, config: tokens * ranks_per_sequence(source, theirs), is_filled),
        Default(f"{role}.use_dynamic_batching_in_infer", True, is_filled),
        Default(f"{tokens_in}_infer", limit, is_filled),
        *_placed(role, theirs, "train", when),
    )


def _like_policy(engine: str, names: str) -> Iterator[Default]:
    """Settings of the reference's layers and their placement."""

    def uses(source: Mapping[str, Any]) -> bool:
        return has_reference(source) and (backend(source, REF) == "megatron") is (engine == "megatron")

    for name in names.split():
        size = partial(_setting, f"actor_train.{STRATEGY}.{name}")
        yield Default(f"reference.{STRATEGY}.{name}", size, uses, LIKE_POLICY)


def _setting(key: str, source: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    return lookup(config, key)


def _clips_by(kind: str) -> Condition:
    return lambda source: BOUNDS.get(loss_mode(source)) == kind


def _has_engine(*names: str) -> Condition:
    return lambda source: str(lookup(source, f"{ROLLOUT}.name")) in names


def _evaluated(value: Any) -> Any:
    return lambda source, config: value if "validation" in config else None


def _scored_by(value: Any) -> Any:
    return lambda source, config: None if lookup(config, f"rewards.{REWARD}.reward") else value


def _has_gae(source: Mapping[str, Any]) -> bool:
    return bool(lookup(source, "algorithm.adv_estimator", "gae") == "gae")


def _has_kl_in_reward(source: Mapping[str, Any]) -> bool:
    return bool(lookup(source, "algorithm.use_kl_in_reward"))


def _adapts_kl(source: Mapping[str, Any]) -> bool:
    return _has_kl_in_reward(source) and lookup(source, "algorithm.kl_ctrl.type") == "adaptive"


def _reference_is_filled(source: Mapping[str, Any]) -> bool:
    return has_reference(source) and dynamic(source, ACTOR)


def _steps(source: Mapping[str, Any]) -> tuple[Any, str]:
    note = "verl's default is 30 epochs: set it to 30 × rows of the data / rollout_batch_size"
    return epochs_as_steps(source) or ("???", note)


DEFAULTS: tuple[Default, ...] = (
    Default("rollout_batch_size", 1024),
    Default("num_return_sequences_in_group", 1),
    Default("prompt_length", 512),
    Default("response_length", 512),
    Default("adv_estimator", "gae"),
    Default("loss_agg_mode", "token-mean"),
    Default("shuffle", False),
    Default("save_steps", 0),
    Default("eval_steps", 0),
    Default("resume_from_checkpoint", "auto"),
    Default("dual_clip", 3.0, lambda source: loss_mode(source) == "vanilla"),
    Default("pg_options.clip_low", lambda source, _: clip_range(source)[0], _clips_by("clip")),
    Default("pg_options.clip_high", lambda source, _: clip_range(source)[1], _clips_by("clip")),
    Default("pg_options.delta_low", lambda source, _: clip_range(source)[0], _clips_by("delta")),
    Default("pg_options.delta_high", lambda source, _: clip_range(source)[1], _clips_by("delta")),
    Default("pg_options.ratio_high", 3.0, _clips_by("delta")),
    Default("lambd", 1.0, _has_gae),
    Default("whiten_advantages", True, _has_gae),
    Default("init_kl_coef", 0.001, _has_kl_in_reward),
    Default("target_kl", 0.1, _adapts_kl),
    *_trained("actor_train", ACTOR, 1e-6, 16384),
    Default("actor_train.model_args.lora_alpha", 32, lambda source: lora_rank(source) and is_megatron(source)),
    Default("actor_train.model_args.lora_alpha", 16, lora_rank),
    Default("actor_train.model_args.lora_target", "all-linear", lora_rank),
    Default("actor_train.data_args.messages", "prompt"),
    Default("actor_train.data_args.images", "images", has_images),
    Default("actor_train.model_args.freeze", lambda source, config: [], has_images),
    Default("actor_infer.strategy_args.strategy_name", "vllm", note=ENGINES),
    Default("actor_infer.device_mapping", _of(_slots), note=POOL),
    Default(f"{ENGINE}.tensor_parallel_size", 2, _has_engine("vllm", "None")),
    Default(f"{ENGINE}.gpu_memory_utilization", 0.5, _has_engine("vllm", "None")),
    Default(f"{ENGINE}.tp_size", lambda source, _: 2 * expert_parallel_copies(source), _has_engine("sglang")),
    Default(f"{ENGINE}.mem_fraction_static", 0.5, _has_engine("sglang")),
    *_like_policy("megatron", f"{PARALLEL} {TRANSFORMER}"),
    *_like_policy("fsdp2", "ulysses_size ep_size"),
    *_placed("reference", REF, "infer", has_reference),
    Default("reference.use_dynamic_batching_in_infer", True, _reference_is_filled, LIKE_POLICY),
    Default(
        "reference.max_tokens_per_microbatch_in_infer",
        lambda source, config: lookup(config, "actor_train.max_tokens_per_microbatch_in_train") or 16384,
        _reference_is_filled,
        LIKE_POLICY,
    ),
    Default("value_clip", 0.5, has_critic),
    Default(
        "value_loss_agg_mode", lambda source, _: lookup(source, f"{ACTOR}.loss_agg_mode", "token-mean"), has_critic
    ),
    *_trained("critic", "critic", 1e-5, 32768, has_critic),
    Default("validation.data_args.messages", _evaluated("prompt")),
    Default("validation.data_args.images", _evaluated("images"), has_images),
    Default("validation.generating_args.temperature", _evaluated(0.0)),
    Default(
        f"rewards.{REWARD}.reward",
        _scored_by("math_rule"),
        note="verl selects its rule by data_source: choose the reward of your data, see docs/rewards.md",
    ),
    Default(
        f"rewards.{REWARD}.ground_truth", _scored_by("reward_model.ground_truth"), note="the column of verl's rows"
    ),
    Default(
        "max_steps",
        lambda source, _: _steps(source)[0],
        lambda source: lookup(source, "trainer.total_training_steps") is None,
        lambda source: _steps(source)[1],
    ),
)
"""verl's defaults that differ from roll-core's."""
