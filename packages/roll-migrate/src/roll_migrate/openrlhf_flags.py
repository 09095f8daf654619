"""Flags of OpenRLHF's trainers: names, types and defaults in 0.11.2, older names, and facts that follow from them.

They are those of the argument parsers in openrlhf/cli (`openrlhf_flags.yaml`) and of the code that reads them. A launch
is a mapping of flags under their names of 0.11; `ALIASES` has the flat flags of 0.7 to 0.10.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

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

_DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SWITCHES = frozenset(_DATA["switches"].split())
"""Flags without a value."""
LISTS: dict[str, int] = _DATA["lists"]
"""Flags with several values, and their number; 0 is any number."""
TEXTS = frozenset(_DATA["texts"].split())
"""Flags whose values are text. All others have numbers."""
SECRETS = ("logger.wandb.key",)
"""Flags whose values are not read: a variable in them may be unknown."""


def _aliases(trainer: str) -> dict[str, tuple[str, ...]]:
    """Flat flags of a trainer, with the dotted flags that they set."""
    flags: dict[str, tuple[str, ...]] = {}
    groups = {"model": ["actor"], "": ["actor", "critic"]} if trainer == PPO else {}
    for group, names in _DATA["aliases"].items():
        for new, _, old in (name.partition("=") for name in names.split()):
            flags[old or new] = tuple(f"{prefix}.{new}".lstrip(".") for prefix in groups.get(group, [group]))
    return flags if trainer == PPO else {**flags, "learning_rate": ("adam.lr",)}


ALIASES = {trainer: _aliases(trainer) for trainer in TRAINERS}


# -- facts of a launch -------------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = _DATA["defaults"] | {GPUS: 8}
OF_TRAINER: dict[str, dict[str, Any]] = _DATA["defaults_of"]
"""Defaults that differ for a trainer; `flat`: for train_ppo_ray up to 0.9."""
SFT_TEMPLATE = "User: {}\nAssistant: "


def fact(source: Mapping[str, Any], name: str) -> Any:
    """Value of a flag, or OpenRLHF's default."""
    if name in source:
        return source[name]
    trainer = source[TRAINER]
    if trainer == PPO and source.get(FLAT) and name in OF_TRAINER["flat"]:
        return OF_TRAINER["flat"][name]
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


ROW_FILES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
"""Endings of files of rows. Other names have a dot too: the data set `OpenRLHF/prompt-collection-v0.1` of the Hub."""


def files(value: Any) -> list[str] | None:
    """Names of data files; None if one of them is not a file of rows."""
    names = [name.strip() for name in str(value).split(",")]
    return names if all(Path(name).suffix.lower() in ROW_FILES and "@" not in name for name in names) else None


def hub_name(name: str, split: str) -> str:
    """Name of a data set of the Hub in `data_args.file_name`; empty for a directory, and for parts of a data set."""
    path = Path(name)
    # Not `./rows` and `../rows`.
    is_hub = re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) and path.suffix.lower() not in ROW_FILES and not path.exists()
    return f"hf://{name}" + ("" if split == "train" else f"?split={split}") if is_hub else ""


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
        level, mode = ("token", "mask") if source.get("use_icepop") else levels.get(kind, ("token", kind))
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
