"""Conversion rules for the keys of verl's SFT trainers: `sft_trainer` of 0.9.1, and the older `fsdp_sft_trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_migrate import verl_keys as verl
from roll_migrate.rules import Default, Key, Outcome, Table, if_on, keys, lookup, nested, only, refused, to, unneeded
from roll_migrate.shared_rules import frequency, names_of_files

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLE, COLUMNS = "sft_train", "sft_train.data_args"
GPUS = "gpus"
"""Entry of the config that is no key of verl: the launcher's number of GPUs."""

# -- facts of a config -------------------------------------------------------------------------------------------------


def is_old(source: Mapping[str, Any]) -> bool:
    """True for a config of `fsdp_sft_trainer`, which names the model `partial_pretrain`."""
    return lookup(source, "model.path") is None


def has_chats(source: Mapping[str, Any]) -> bool:
    """True if rows are chats, not a prompt and a response."""
    return not is_old(source) or bool(lookup(source, "data.multiturn.enable"))


def is_dynamic(source: Mapping[str, Any]) -> bool:
    """True if micro-batches are filled by tokens."""
    return not is_old(source) and bool(lookup(source, "data.use_dynamic_bsz", default=True))


def roles(source: Mapping[str, Any]) -> tuple[str, ...]:
    """Sections of the new config with rows."""
    return (ROLE, "validation") if verl.evaluates(source) else (ROLE,)


def micro_batch(source: Mapping[str, Any]) -> int:
    """Sequences per micro-batch and rank."""
    size = lookup(source, "data.micro_batch_size_per_gpu")
    return 1 if is_dynamic(source) else size if isinstance(size, int) and size > 0 else 4


def replica(source: Mapping[str, Any]) -> int:
    """Ranks that train one sequence together."""
    engine = lookup(source, "engine", {})
    names = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
    product = 1
    for name in names if source.get("model_engine") == "megatron" else ["ulysses_sequence_parallel_size"]:
        product *= verl.at_least_one(engine.get(name, source.get(name)))
    return product


def token_limit(source: Mapping[str, Any], tokens: Any) -> Any:
    """Tokens of a micro-batch: verl's limit is per rank that splits the tokens of a sequence."""
    is_megatron = source.get("model_engine") == "megatron"
    ranks = verl.count(source, "engine.context_parallel_size") if is_megatron else replica(source)
    return tokens * ranks if isinstance(tokens, int) else tokens


def splits_sequences(source: Mapping[str, Any]) -> bool:
    """True if Megatron's sequence parallelism, verl's default, has an effect."""
    size = verl.count(source, "engine.tensor_model_parallel_size")
    is_megatron = source.get("model_engine") == "megatron"
    return is_megatron and size > 1 and bool(lookup(source, "engine.sequence_parallel", default=True))


def accumulation(source: Mapping[str, Any]) -> tuple[int, str]:
    """Micro-batches per optimizer step, and the arithmetic."""
    size = lookup(source, "data.train_batch_size", 256)
    batch = size if isinstance(size, int) and size > 0 else 256
    parallel, micro = max(num_gpus(source) // replica(source), 1), micro_batch(source)
    steps, rest = divmod(batch, parallel * micro)
    how = f"train_batch_size {batch} = {steps} × {micro} × data parallel {parallel}"
    return max(steps, 1), f"{how}; verl refuses a remainder of {rest}" if rest else how


def num_gpus(source: Mapping[str, Any]) -> int:
    """Number of GPUs."""
    gpus = source.get(GPUS)
    return gpus if isinstance(gpus, int) and gpus > 0 else verl.num_gpus(source)


def columns(source: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a row, as in `data_args`."""
    data = lookup(source, "data", {})
    if has_chats(source):
        return {"messages": data.get("messages_key") or lookup(data, "multiturn.messages_key") or "messages"}
    names = {}
    for name, default in (("prompt", "question"), ("response", "answer")):
        inner = data.get(f"{name}_dict_keys") or []
        path = (data.get(f"{name}_key") or default, *(inner if isinstance(inner, list) else [inner]))
        names[name] = ".".join(map(str, path))
    return names


# -- values ------------------------------------------------------------------------------------------------------------


def _column(value: Any, key: Key) -> Outcome:
    names, source = columns(key.source), key.source
    name = "messages" if key.name in ("messages_key", "multiturn") else key.name.partition("_")[0]
    if name not in names:
        return key.unneeded("rows are chats" if has_chats(source) else "multiturn.enable is off")
    writes = {f"{role}.data_args.{name}": names[name] for role in roles(source)}
    return key.renamed(writes) if names[name] == value else key.changed(writes)


def _dict_keys(value: Any, key: Key) -> Outcome:
    if isinstance(value, list) and len(value) > 1:
        return key.rejected("a column is one value; `check` rejects it")
    return key.unneeded(f"{key.name.partition('_')[0]}_key has it")


def _template_arguments(value: Any, key: Key) -> Outcome:
    return key.renamed({f"{role}.data_args.chat_template_kwargs": value for role in roles(key.source)})


def _thinking(value: Any, key: Key) -> Outcome:
    if value in (None, "none"):
        return key.unneeded("the template decides")
    name = "chat_template_kwargs.enable_thinking"
    return key.renamed({f"{role}.data_args.{name}": value for role in roles(key.source)})


def _truncation(value: Any, key: Key) -> Outcome:
    if value == "right":
        return key.changed({"overlong": "truncate"}, "the end of a long response is cut")
    note = "verl stops at a longer row" if value == "error" else f"verl cuts a longer row ({value})"
    return key.differs(f"{note}; here longer rows are dropped and counted", {"overlong": "drop"})


def _batch(value: Any, key: Key) -> Outcome:
    steps, how = accumulation(key.source)
    return key.changed({f"{ROLE}.training_args.gradient_accumulation_steps": steps}, how)


def _length(value: Any, key: Key) -> Outcome:
    note = f"verl limits prompt and response together to {value} tokens, here each has the limit"
    return key.differs(note, {"prompt_length": value, "response_length": value})


def _tokens(value: Any, key: Key) -> Outcome:
    return key.renamed({f"{ROLE}.max_tokens_per_microbatch_in_train": token_limit(key.source, value)})


def _epochs(value: Any, key: Key) -> Outcome:
    if key.beside("total_training_steps") is not None:
        return key.unneeded("total_training_steps takes precedence")
    return key.renamed(f"{ROLE}.training_args.num_train_epochs")


def _parallel(value: Any, key: Key) -> Outcome:
    return key.unneeded("1 has no effect") if value == 1 else key.renamed(f"{ROLE}.{verl.STRATEGY}.ulysses_size")


# -- tables ------------------------------------------------------------------------------------------------------------

MODEL: Table = {
    **verl.MODEL,
    "partial_pretrain": to("pretrain"),
    "strategy": unneeded("FSDP2 is used for fsdp and fsdp2"),
    "fsdp_config": {**verl.FSDP, **keys("cpu_offload offload_params", verl.PLACED)},
    "custom_chat_template": refused("set data_args.template"),
}
DATA: Table = {
    "train_files": names_of_files(f"{COLUMNS}.file_name"),
    "val_files": names_of_files("validation.data_args.file_name"),
    "train_max_samples": to(f"{COLUMNS}.max_samples", neutral=(-1,)),
    "val_max_samples": to("validation.data_args.max_samples", neutral=(-1,)),
    **keys("prompt_key response_key messages_key", _column),
    **keys("prompt_dict_keys response_dict_keys", nested(_dict_keys)),
    "multiturn": {
        "enable": unneeded("messages_key has it"),
        "messages_key": _column,
        **keys("tools_key enable_thinking_key", unneeded("rows without the column have none")),
    },
    "tools_key": to(f"{COLUMNS}.tools", neutral=("tools",)),
    "enable_thinking_key": refused("variables of the template are the same for all rows", "enable_thinking"),
    "enable_thinking_default": nested(_thinking),
    "train_batch_size": _batch,
    "micro_batch_size_per_gpu": only(
        lambda source: not is_dynamic(source),
        "use_dynamic_bsz fills micro-batches by tokens",
        to(f"{ROLE}.training_args.per_device_train_batch_size", single=True),
    ),
    "micro_batch_size": refused("set micro_batch_size_per_gpu"),
    "use_dynamic_bsz": if_on(
        lambda value, key: key.renamed({f"{ROLE}.use_dynamic_batching_in_train": True}), "it is off here too"
    ),
    "max_token_len_per_gpu": only(is_dynamic, "use_dynamic_bsz is off", _tokens),
    "max_length": _length,
    "truncation": _truncation,
    "chat_template": refused("set data_args.template"),
    "custom_cls": keys("path name", refused("custom code that makes rows")),
    "apply_chat_template_kwargs": if_on(nested(_template_arguments)),
    "tokenizer": refused("the model's own is used"),
    **keys(
        "balance_dp_token pad_mode use_shm num_workers ignore_input_ids_mismatch return_raw_input_ids return_raw_chat",
        verl.FASTER,
    ),
    "image_key": nested(verl.images),
    "video_key": nested(verl.videos),
    "audio_key": nested(verl.audio),
}
OPTIM: Table = {
    **verl.OPTIM,
    "warmup_steps_ratio": verl.OPTIM["lr_warmup_steps_ratio"],
    "lr_scheduler": verl.OPTIM["lr_scheduler_type"],
    "clip_grad": to("max_grad_norm"),
}
ENGINE: Table = {
    **verl.MEGATRON,
    **verl.FSDP,
    "ulysses_sequence_parallel_size": _parallel,
    "strategy": unneeded("`engine` has it"),
    "dtype": refused("training computes in bf16", "bfloat16"),
}
TRAINER: Table = {
    **verl.TRAINER,
    "total_epochs": _epochs,
    "seed": to("seed"),
    "save_freq": frequency("save_steps"),
    "test_freq": frequency("eval_steps"),
    "max_ckpt_to_keep": to("max_ckpt_to_keep"),
    **keys("profile_interval profiler nccl_timeout checkpoint", verl.FASTER),
    "resume_path": verl.TRAINER["resume_from_path"],
}
SFT: Table = {
    "data": DATA,
    "model": MODEL,
    "optim": OPTIM,
    "engine": ENGINE,
    "trainer": TRAINER,
    "model_engine": verl.VERL["model_engine"],
    "ulysses_sequence_parallel_size": _parallel,
    "use_remove_padding": unneeded("sequences are always packed"),
    **keys("checkpoint profiler global_profiler hydra", verl.FASTER),
}

# -- defaults ----------------------------------------------------------------------------------------------------------

ARGS = f"{ROLE}.training_args"


def _by_trainer(old: Any, new: Any) -> Any:
    return lambda source, _: old if is_old(source) else new


def _schedule(source: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    return "cosine" if is_old(source) else "constant_with_warmup" if verl.warms_up(source, "optim") else "constant"


def _strategy(source: Mapping[str, Any], _: Mapping[str, Any]) -> str:
    return "megatron_train" if source.get("model_engine") == "megatron" else "fsdp2_train"


def _column_of(role: str, name: str) -> Any:
    return lambda source, _: columns(source).get(name) if role in roles(source) else None


def _arithmetic(source: Mapping[str, Any]) -> str:
    return accumulation(source)[1]


def _reads_images(source: Mapping[str, Any]) -> bool:
    return not is_old(source) and verl.has_images(source)


def _has_lora(source: Mapping[str, Any]) -> bool:
    return bool(lookup(source, "model.lora_rank"))


DEFAULTS: tuple[Default, ...] = (
    Default("seed", 1),
    Default("save_steps", 0),
    Default("eval_steps", 0),
    Default("resume_from_checkpoint", "auto"),
    Default("prompt_length", 1024),
    Default("response_length", 1024),
    Default(f"{ARGS}.learning_rate", _by_trainer(1e-5, 1e-3)),
    Default(f"{ARGS}.weight_decay", 0.01),
    Default(f"{ARGS}.lr_scheduler_type", _schedule),
    Default(f"{ARGS}.per_device_train_batch_size", lambda source, _: micro_batch(source), note=_arithmetic),
    Default(f"{ARGS}.gradient_accumulation_steps", lambda source, _: accumulation(source)[0], note=_arithmetic),
    Default(f"{ARGS}.warmup_ratio", 0.1, is_old),
    Default(f"{ARGS}.adam_beta2", 0.95, is_old),
    Default(f"{ARGS}.num_train_epochs", 4, lambda source: lookup(source, "trainer.total_training_steps") is None),
    Default(f"{ROLE}.device_mapping", lambda source, _: f"list(range(0,{num_gpus(source)}))"),
    Default(f"{ROLE}.strategy_args.strategy_name", _strategy),
    Default(f"{ROLE}.{verl.STRATEGY}.sequence_parallel", True, splits_sequences),
    Default(f"{ROLE}.use_dynamic_batching_in_train", True, is_dynamic),
    Default(f"{ROLE}.max_tokens_per_microbatch_in_train", lambda source, _: token_limit(source, 8192), is_dynamic),
    Default(f"{ROLE}.model_args.lora_alpha", 16, _has_lora),
    Default(f"{ROLE}.model_args.lora_target", "all-linear", _has_lora),
    *(
        Default(f"{role}.data_args.{name}", _column_of(role, name))
        for role in (ROLE, "validation")
        for name in ("messages", "prompt", "response")
    ),
    Default(f"{COLUMNS}.images", "images", _reads_images),
    Default("validation.data_args.images", "images", lambda source: _reads_images(source) and verl.evaluates(source)),
    Default(f"{ROLE}.model_args.freeze", lambda source, config: [], _reads_images),
)
"""verl's defaults that differ from roll-core's."""
