"""Conversion rules for the keys of verl's SFT trainers: `sft_trainer` of 0.9.1, and the older `fsdp_sft_trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_migrate import verl_keys as verl
from roll_migrate.rules import Key, KeyRule, Outcome, Table, change, each, refused, to, unneeded, value_at

if TYPE_CHECKING:
    from collections.abc import Mapping


ROLE, COLUMNS = "sft_train", "sft_train.data_args"
GPUS = "gpus"
"""Entry of the config that is no key of verl: the launcher's number of GPUs."""


# -- facts of a config -------------------------------------------------------------------------------------------------


def is_old(source: Mapping[str, Any]) -> bool:
    """True for a config of `fsdp_sft_trainer`, which names the model `partial_pretrain`."""
    return value_at(source, ("model", "path")) is None


def has_chats(source: Mapping[str, Any]) -> bool:
    """True if rows are chats, not a prompt and a response."""
    return not is_old(source) or bool(value_at(source, ("data", "multiturn", "enable")))


def num_gpus(source: Mapping[str, Any]) -> int:
    """Number of GPUs."""
    given = source.get(GPUS)
    return given if isinstance(given, int) and given > 0 else verl.num_gpus(source)


def is_dynamic(source: Mapping[str, Any]) -> bool:
    """True if micro-batches are filled by tokens."""
    return not is_old(source) and bool(verl.given(source, ("data", "use_dynamic_bsz"), default=True))


def micro_batch(source: Mapping[str, Any]) -> int:
    """Sequences per micro-batch and rank."""
    size = value_at(source, ("data", "micro_batch_size_per_gpu"))
    return 1 if is_dynamic(source) else size if isinstance(size, int) and size > 0 else 4


def replica(source: Mapping[str, Any]) -> int:
    """Ranks that train one sequence together."""
    engine = value_at(source, ("engine",)) or {}
    if source.get("model_engine") == "megatron":
        names = ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
    else:
        names = ["ulysses_sequence_parallel_size"]
    product = 1
    for name in names:
        size = engine.get(name, source.get(name))
        product *= size if isinstance(size, int) and size > 0 else 1
    return product


def accumulation(source: Mapping[str, Any]) -> tuple[int, str]:
    """Micro-batches per optimizer step, and the arithmetic."""
    size = verl.given(source, ("data", "train_batch_size"), 256)
    batch = size if isinstance(size, int) and size > 0 else 256
    parallel, micro = max(num_gpus(source) // replica(source), 1), micro_batch(source)
    steps, rest = divmod(batch, parallel * micro)
    how = f"train_batch_size {batch} = {steps} × {micro} × data parallel {parallel}"
    return max(steps, 1), f"{how}; verl refuses a remainder of {rest}" if rest else how


def columns(source: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of a row, as in `data_args`."""
    data = value_at(source, ("data",)) or {}
    if has_chats(source):
        name = data.get("messages_key") or value_at(data, ("multiturn", "messages_key"))
        return {"messages": name or "messages"}
    found = {}
    for name, default in (("prompt", "question"), ("response", "answer")):
        column, inner = data.get(f"{name}_key") or default, data.get(f"{name}_dict_keys")
        names = inner if isinstance(inner, list) else [inner] if inner else []
        found[name] = ".".join(map(str, (column, *names)))
    return found


# -- values ------------------------------------------------------------------------------------------------------------


def _column(value: Any, key: Key) -> Outcome:
    found, source = columns(key.source), key.source
    name = "messages" if key.name in ("messages_key", "multiturn") else key.name.partition("_")[0]
    if name not in found:
        return Outcome("not needed", (), "rows are chats" if has_chats(source) else "multiturn.enable is off")
    roles = ("sft_train", "validation") if verl.evaluates(source) else ("sft_train",)
    writes = tuple(((role, "data_args", name), found[name]) for role in roles)
    return Outcome("renamed" if found[name] == value else "changed", writes)


def _dict_keys(value: Any, key: Key) -> Outcome:
    if isinstance(value, list) and len(value) > 1:
        return Outcome("unsupported", ((key.path, value),), "a column is one value; `check` rejects it")
    return Outcome("not needed", (), f"{key.name.partition('_')[0]}_key has it")


def _length(value: Any, key: Key) -> Outcome:
    note = f"verl limits prompt and response together to {value} tokens, here each has the limit"
    return Outcome("differs", ((("prompt_length",), value), (("response_length",), value)), note)


def _truncation(value: Any, key: Key) -> Outcome:
    if value == "right":
        return Outcome("changed", ((("overlong",), "truncate"),), "the end of a long response is cut")
    note = "verl stops at a longer row" if value == "error" else f"verl cuts a longer row ({value})"
    return Outcome("differs", ((("overlong",), "drop"),), f"{note}; here longer rows are dropped and counted")


def _batch(value: Any, key: Key) -> Outcome:
    steps, how = accumulation(key.source)
    return Outcome("changed", (((ROLE, "training_args", "gradient_accumulation_steps"), steps),), how)


def _micro(value: Any, key: Key) -> Outcome:
    if is_dynamic(key.source):
        return Outcome("not needed", (), "use_dynamic_bsz fills micro-batches by tokens")
    return Outcome("renamed", (((ROLE, "training_args", "per_device_train_batch_size"), value),))


def _dynamic(value: Any, key: Key) -> Outcome:
    if not value:
        return Outcome("not needed", (), "it is off here too")
    return Outcome("renamed", (((ROLE, "use_dynamic_batching_in_train"), True),))


def _tokens(value: Any, key: Key) -> Outcome:
    if not is_dynamic(key.source):
        return Outcome("not needed", (), "use_dynamic_bsz is off")
    size = replica(key.source) if key.source.get("model_engine") != "megatron" else 1
    limit = value * size if isinstance(value, int) else value
    return Outcome("renamed", (((ROLE, "max_tokens_per_microbatch_in_train"), limit),))


def _frequency(target: str) -> KeyRule:
    def convert(value: Any, key: Key) -> Outcome:
        if value == "after_each_epoch":
            return Outcome("unsupported", (((target,), "???"),), f"set {target} to the steps of an epoch")
        off = not isinstance(value, int) or value < 1
        return Outcome("changed", (((target,), 0 if off else value),), f"{value} is off" if off else "")

    return KeyRule(f"→ `{target}`; -1 becomes 0", convert)


def _epochs(value: Any, key: Key) -> Outcome:
    if key.beside("total_training_steps") is not None:
        return Outcome("not needed", (), "total_training_steps takes precedence")
    return Outcome("renamed", (((ROLE, "training_args", "num_train_epochs"), value),))


def _parallel(value: Any, key: Key) -> Outcome:
    if value == 1:
        return Outcome("not needed", (), "1 has no effect")
    return Outcome("renamed", (((ROLE, "strategy_args", "strategy_config", "ulysses_size"), value),))


def defaults(source: Mapping[str, Any]) -> dict[str, object]:
    """verl's default behaviour where roll-core's differs, by dotted key."""
    old, args = is_old(source), f"{ROLE}.training_args"
    steps, _ = accumulation(source)
    values: dict[str, object] = {
        "seed": 1,
        "save_steps": 0,
        "eval_steps": 0,
        "resume_from_checkpoint": "auto",
        "prompt_length": 1024,
        "response_length": 1024,
        f"{args}.learning_rate": 1e-5 if old else 1e-3,
        f"{args}.weight_decay": 0.01,
        f"{args}.lr_scheduler_type": "cosine" if old else "constant",
        f"{args}.per_device_train_batch_size": micro_batch(source),
        f"{args}.gradient_accumulation_steps": steps,
        f"{ROLE}.device_mapping": f"list(range(0,{num_gpus(source)}))",
        f"{ROLE}.strategy_args.strategy_name": _strategy(source),
    }
    if old:
        values |= {f"{args}.warmup_ratio": 0.1, f"{args}.adam_beta2": 0.95}
    elif verl.warms_up(source, ("optim",)):
        values[f"{args}.lr_scheduler_type"] = "constant_with_warmup"
    if value_at(source, ("trainer", "total_training_steps")) is None:
        values[f"{args}.num_train_epochs"] = 4
    if is_dynamic(source):
        size = replica(source) if source.get("model_engine") != "megatron" else 1
        values |= {f"{ROLE}.use_dynamic_batching_in_train": True}
        values |= {f"{ROLE}.max_tokens_per_microbatch_in_train": 8192 * size}
    if value_at(source, ("model", "lora_rank")):
        values |= {f"{ROLE}.model_args.lora_alpha": 16, f"{ROLE}.model_args.lora_target": "all-linear"}
    for role in ("sft_train", "validation") if verl.evaluates(source) else ("sft_train",):
        values |= {f"{role}.data_args.{name}": column for name, column in columns(source).items()}
    return values


def _strategy(source: Mapping[str, Any]) -> str:
    return "megatron_train" if source.get("model_engine") == "megatron" else "fsdp2_train"


# -- tables ------------------------------------------------------------------------------------------------------------

MODEL: Table = {
    **verl.MODEL,
    "partial_pretrain": to("pretrain"),
    "strategy": unneeded("FSDP2 is used for fsdp and fsdp2"),
    "fsdp_config": {
        **verl.FSDP,
        **each("cpu_offload offload_params", verl.PLACED),
    },
    "custom_chat_template": refused("set data_args.template"),
}
DATA: Table = {
    "train_files": verl.files(f"{COLUMNS}.file_name"),
    "val_files": verl.files("validation.data_args.file_name"),
    "train_max_samples": to(f"{COLUMNS}.max_samples", neutral=(-1,)),
    "val_max_samples": to("validation.data_args.max_samples", neutral=(-1,)),
    **each("prompt_key response_key messages_key", change("→ `data_args.prompt`, `response`, `messages`", _column)),
    **each(
        "prompt_dict_keys response_dict_keys",
        change("→ a column such as `extra_info.question`", _dict_keys, nested=True),
    ),
    "multiturn": {
        "enable": unneeded("messages_key has it"),
        "messages_key": change("→ `data_args.messages`", _column),
        **each("tools_key enable_thinking_key", unneeded("rows without the column have none")),
    },
    "tools_key": to(f"{COLUMNS}.tools", neutral=("tools",)),
    **each(
        "enable_thinking_key enable_thinking_default",
        refused("the template has no arguments", "enable_thinking", "none"),
    ),
    "train_batch_size": change("→ `gradient_accumulation_steps`", _batch),
    "micro_batch_size_per_gpu": change("→ `per_device_train_batch_size`", _micro),
    "micro_batch_size": refused("set micro_batch_size_per_gpu"),
    "use_dynamic_bsz": change("→ `use_dynamic_batching_in_train`", _dynamic),
    "max_token_len_per_gpu": change("→ `max_tokens_per_microbatch_in_train`", _tokens),
    "max_length": change("→ `prompt_length`, `response_length`", _length),
    "truncation": change("→ `overlong`", _truncation),
    "chat_template": refused("set data_args.template"),
    "custom_cls": {"path": refused("custom code that makes rows"), "name": refused("custom code that makes rows")},
    "apply_chat_template_kwargs": refused("the template has no arguments", {}),
    "tokenizer": refused("the model's own is used"),
    **each(
        "balance_dp_token pad_mode use_shm num_workers ignore_input_ids_mismatch return_raw_input_ids return_raw_chat",
        verl.FASTER,
    ),
    **each("image_key video_key audio_key", change("rejected", verl.media)),
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
    "ulysses_sequence_parallel_size": change("→ `strategy_config.ulysses_size`", _parallel),
    "strategy": unneeded("`engine` has it"),
    "dtype": refused("training computes in bf16", "bfloat16"),
}
TRAINER: Table = {
    **verl.TRAINER,
    "total_epochs": change("→ `training_args.num_train_epochs`", _epochs),
    "seed": to("seed"),
    "save_freq": _frequency("save_steps"),
    "test_freq": _frequency("eval_steps"),
    "max_ckpt_to_keep": to("max_ckpt_to_keep"),
    **each("profile_interval profiler nccl_timeout checkpoint", verl.FASTER),
    "resume_path": verl.TRAINER["resume_from_path"],
}
SFT: Table = {
    "data": DATA,
    "model": MODEL,
    "optim": OPTIM,
    "engine": ENGINE,
    "trainer": TRAINER,
    "model_engine": verl.VERL["model_engine"],
    "ulysses_sequence_parallel_size": change("→ `strategy_config.ulysses_size`", _parallel),
    "use_remove_padding": unneeded("sequences are always packed"),
    **each("checkpoint profiler global_profiler hydra", unneeded("it does not affect results")),
}
