"""Converts values whose meaning differs in ROLL. Docstrings cite the files of ROLL's repository that define it."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roll_core.spec.devices import parse_device_mapping
from roll_migrate.rules import Outcome, asks_for_nothing, value_at

if TYPE_CHECKING:
    from roll_migrate.rules import Key

DEFAULT_PROMPT_LENGTH = 1024
"""Default of `prompt_length` in both ROLL and roll-core, in tokens."""


# -- the run -----------------------------------------------------------------------------------------------------------


def exp_name(value: Any, key: Key) -> Outcome:
    """ROLL accepts any text; here the name is that of a directory."""
    name = re.sub(r"[^\w.-]+", "-", str(value)).strip("-") or "roll"
    if name == value:
        return Outcome("kept", ((key.path, value),))
    return Outcome("changed", ((key.path, name),), "it names a directory: letters, digits, `.`, `_` and `-`")


def response_length(value: Any, key: Key) -> Outcome:
    """ROLL reads it only if there is no `sequence_length` (roll/configs/base_config.py)."""
    if key.at("sequence_length") is not None:
        return Outcome("dead", (), "ROLL reads it only where there is no sequence_length")
    return Outcome("kept", ((key.path, value),))


def sequence_length(value: Any, key: Key) -> Outcome:
    """Limit of prompt plus response: a response gets the rest after `prompt_length` (roll/configs/base_config.py)."""
    if not isinstance(value, int):
        return Outcome("kept", ((key.path, value),))
    if key.pipeline == "sft":
        # In sft it bounds the whole row (roll/pipeline/sft/sft_pipeline.py).
        writes = ((("prompt_length",), value), (("response_length",), value))
        return Outcome("renamed", writes, "rows up to this length have prompts and responses up to it")
    prompt = _number(key.at("prompt_length"), DEFAULT_PROMPT_LENGTH)
    note = f"{value} - prompt_length {prompt}"
    return Outcome("renamed", ((("response_length",), value - prompt),), note)


def prompt_length(value: Any, key: Key) -> Outcome:
    """ROLL's sft reads only `sequence_length` if that is given (roll/pipeline/sft/sft_pipeline.py)."""
    if key.pipeline == "sft" and key.at("sequence_length") is not None:
        return Outcome("dead", (), "ROLL's sft looks at sequence_length alone")
    return Outcome("kept", ((key.path, value),))


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def val_sequence_length(value: Any, key: Key) -> Outcome:
    """Limit of an evaluation's response plus `val_prompt_length` (roll/pipeline/rlvr/rlvr_config.py)."""
    prompt = key.at("val_prompt_length")
    if key.at("validation") is None or not (isinstance(value, int) and isinstance(prompt, int)):
        return Outcome("not needed", (), "there is no evaluation whose answers it would bound")
    to = ("validation", "generating_args", "max_new_tokens")
    return Outcome("renamed", ((to, value - prompt),), f"{value} - val_prompt_length {prompt}")


def val_prompt_length(value: Any, key: Key) -> Outcome:
    """roll-core has no separate prompt limit for evaluations."""
    same = key.at("prompt_length") or DEFAULT_PROMPT_LENGTH
    if value == same:
        return Outcome("not needed", (), "the same as prompt_length, which holds for evaluations too")
    return Outcome("unsupported", (), f"prompt_length {same} holds for evaluations too")


def resume_from_checkpoint(value: Any, key: Key) -> Outcome:
    """A path refers to a checkpoint of ROLL, which roll-core cannot read."""
    if isinstance(value, str):
        return Outcome(
            "unsupported",
            (),
            "a checkpoint of ROLL's cannot be read: convert it to a Hugging Face model, and name that as pretrain",
        )
    return Outcome("kept", ((key.path, value),))


NO_TRACKER = ("stdout", "None", "none", "", None, False)


def track_with(value: Any, key: Key) -> Outcome:
    """`stdout` prints metrics, as every run here does; a false value means no tracker (roll/utils/tracking.py)."""
    if value in NO_TRACKER:
        return Outcome(
            "changed", ((key.path, []),), "a run prints its metrics and writes metrics.jsonl without a tracker"
        )
    if value not in key.trackers:
        return Outcome("unsupported", ((key.path, []),), _no_tracker(value, key))
    return Outcome("kept", ((key.path, value),))


def tracker_kwargs(value: Any, key: Key) -> Outcome:
    """ROLL has one tracker and its options; roll-core groups options by tracker."""
    name = key.source.get("track_with", "tensorboard")
    if name in NO_TRACKER or not value:
        return Outcome("not needed", (), "there is no tracker")
    if name not in key.trackers:
        return Outcome("unsupported", (), _no_tracker(name, key))
    return Outcome("renamed", (((*key.path, name), value),), "options by tracker")


def _no_tracker(name: Any, key: Key) -> str:
    return f"no tracker {name} is installed, only {', '.join(key.trackers)}; metrics.jsonl has every metric"


def environment_variable(value: Any, key: Key) -> Outcome:
    """Booleans become text; text and numbers are kept, and numbers are read as text."""
    if isinstance(value, bool):
        return Outcome("changed", ((key.path, str(value).lower()),))
    return Outcome("kept", ((key.path, value),))


ROUTERS = {
    "PromptAffinityRouter": ("prompt_affinity", "a prompt goes where it was unless that replica is full or far busier"),
    "EnvAffinityRouter": ("sticky", "a prompt goes where it was, as an environment does in ROLL"),
    "SglangRouter": ("least_loaded", "the longest cached beginning is not looked for"),
}


def router_name(value: Any, key: Key) -> Outcome:
    """ROLL treats an unknown name as `SglangRouter` (roll/distributed/scheduler/router.py)."""
    name, how = ROUTERS.get(value, ROUTERS["SglangRouter"])
    return Outcome("changed", ((key.path, name),), how)


def model_download_type(value: Any, key: Key) -> Outcome:
    """ROLL's default is ModelScope; roll-core supports only the Hugging Face Hub."""
    if value == "HUGGINGFACE_HUB":
        return Outcome("not needed", (), "ids are those of the Hugging Face hub")
    return Outcome(
        "unsupported", (), "ids are those of the Hugging Face hub: download the model, and name its directory"
    )


def rollout_mock(value: Any, key: Key) -> Outcome:
    """In ROLL `dump` writes pickles of each step and `mock` reads them (roll/configs/base_config.py)."""
    if isinstance(value, Mapping) and not value.get("enable"):
        return Outcome("not needed", (), "it is not enabled")
    if key.pipeline == "rlvr" and value_at(value, ("mode",)) == "dump":
        return Outcome("renamed", ((("record_rollouts",), True),), "into the run's directory")
    return Outcome(
        "unsupported",
        (),
        "dumps of ROLL's cannot be read: record with record_rollouts: true, then name that run as replay_rollouts",
    )


# -- the algorithm -----------------------------------------------------------------------------------------------------

ESTIMATORS = {"gigpo": "reinforce", "step_reinforce": "reinforce"}
KL = {"kl": "k1", "mse": "k2"}
OWN_LOSS = "ActorPGWorker"


def adv_estimator(value: Any, key: Key) -> Outcome:
    """Convert estimators that have no name of their own here.

    In rlvr all estimators but gae and grpo are the discounted return (compute_advantage in roll/utils/functionals.py).
    """
    if value in ESTIMATORS:
        return Outcome("changed", ((key.path, ESTIMATORS[value]),), f"in rlvr, ROLL computes the same for {value}")
    return Outcome("kept", ((key.path, value),))


def norm_type(value: Any, key: Key) -> Outcome:
    """With grpo, ROLL ignores the value and uses the group (reward_postprocess in roll/utils/functionals.py)."""
    if key.at("adv_estimator") == "grpo":
        return Outcome("dead", (), "with grpo, ROLL takes the group's mean and deviation whatever this says")
    return Outcome("kept", ((key.path, value),))


def kl_penalty(value: Any, key: Key) -> Outcome:
    """Convert ROLL's names of KL estimators (compute_approx_kl in roll/utils/functionals.py).

    `full` expects distributions, but ROLL passes it the logprobs of tokens.
    """
    if value in KL:
        return Outcome("changed", ((key.path, KL[value]),), "the same estimator by its usual name")
    return Outcome("kept", ((key.path, value),))


def target_kl(value: Any, key: Key) -> Outcome:
    """ROLL adapts only the coefficient of the KL penalty in the reward."""
    if not key.at("add_token_level_kl"):
        return Outcome("not needed", (), "it adapts the KL in the reward, and there is none")
    if not has_domains(key):
        return Outcome("kept", ((key.path, value),))
    note = "ROLL adapts the coefficient by the KL of each domain, one after the other; here by that of the whole batch"
    return Outcome("differs", ((key.path, value),), note)


def has_domains(key: Key) -> bool:
    """True if there are several domains, which ROLL processes one by one (roll/pipeline/rlvr/rlvr_pipeline.py)."""
    rewards = key.at("rewards")
    return isinstance(rewards, Mapping) and len(rewards) > 1


SAMPLE_MASKS = ("max_len_mask", "difficulty_mask", "error_max_len_clip")


def whiten(value: Any, key: Key) -> Outcome:
    """ROLL whitens each domain over the samples that masks keep (compute_advantage in roll/utils/functionals.py)."""
    masks = [name for name in SAMPLE_MASKS if key.at(name)]
    scopes = ["each domain by itself"] if has_domains(key) else []
    if masks:
        scopes.append(f"only the samples that {' and '.join(masks)} {'keep' if masks[1:] else 'keeps'}")
    if not (value and scopes):
        return Outcome("kept", ((key.path, value),))
    return Outcome("differs", ((key.path, value),), f"ROLL whitens {', '.join(scopes)}; here the whole batch")


def loss_agg_mode(value: Any, key: Key) -> Outcome:
    """ROLL's modes are those of agg_loss in roll/utils/functionals.py."""
    if value != "seq-mean-token-sum-norm":
        return Outcome("kept", ((key.path, value),))
    note = (
        "ROLL divides the sum over all tokens of a step by sequence_length - 1; here it is divided by response_length"
        " and by the number of sequences, as in Dr. GRPO. Gradients are smaller here by a factor of that order before"
        " they are clipped"
    )
    return Outcome("differs", ((key.path, value),), note)


AT_TEMPERATURE = "logprobs and entropy in training are at this temperature, which was sampled at; ROLL's are at 1"


def temperature(value: Any, key: Key) -> Outcome:
    """ROLL's trainers do not scale logits by temperature (op_compute_log_probs of roll/distributed/strategy)."""
    if key.path[0] != "actor_infer" or not isinstance(value, (int, float)) or value in (0, 1):
        return Outcome("kept", ((key.path, value),))
    return Outcome("differs", ((key.path, value),), AT_TEMPERATURE)


def pg_variant(value: Any, key: Key) -> Outcome:
    """Only the worker class ActorPGWorker reads it (roll/pipeline/rlvr/actor_pg_worker.py)."""
    if not str(key.beside("worker_cls")).endswith(OWN_LOSS):
        return Outcome("dead", (), f"only worker_cls {OWN_LOSS} reads it")
    return Outcome("renamed", ((("pg_variant",), value),), "one policy loss for the run")


def router_replay(value: Any, key: Key) -> Outcome:
    """Only R3 of the policy's trainer and engine is supported.

    R2, which would replay the experts that the trainer itself chose, is implemented neither in ROLL nor here.
    """
    if value in (None, "disable"):
        return Outcome("not needed", (), "disable asks for nothing")
    if value == "R3" and key.pipeline == "rlvr" and key.role in (("actor_train",), ("actor_infer",)):
        return Outcome("renamed", ((("router_replay", "mode"), value),), "one key for trainer and engine")
    return Outcome(
        "unsupported", ((key.path, value),), "R3 of the policy alone; left in the config, which `check` refuses"
    )


def topr_weight(value: Any, key: Key) -> Outcome:
    """Factors of the two terms of the topr loss, for positive and negative samples."""
    if key.beside("pg_variant") != "topr" or not isinstance(value, (int, float)) or value == 1:
        return Outcome("not needed", (), "only topr has such a weight, and 1 changes nothing")
    return Outcome(
        "renamed", ((("pg_options", key.name.removeprefix("topr_")), float(value)),), "an option of the loss"
    )


def worker_cls(value: Any, key: Key) -> Outcome:
    """ROLL's own classes follow from the role and `pg_variant`; a class of the user is refused."""
    if str(value).startswith("roll."):
        return Outcome("not needed", (), "the role and pg_variant decide")
    note = "code of yours: see docs/plugins.md; left in the config, which `check` refuses"
    return Outcome("unsupported", ((key.path, value),), note)


def reward_pretrain(value: Any, key: Key) -> Outcome:
    """Model of the critic, if the critic names none (roll/configs/base_config.py)."""
    if key.at("critic") is None or key.at("critic", "model_args", "model_name_or_path") is not None:
        return Outcome("not needed", (), "no role without a model of its own is left that would begin from it")
    return Outcome("renamed", ((("critic", "model_args", "model_name_or_path"), value),))


def ahead(value: Any, key: Key) -> Outcome:
    """Applies only to synchronous training: asynchronous training keeps the engine full without it."""
    if key.at("async_generation_ratio"):
        return Outcome("not needed", (), "async_generation_ratio keeps the engine full")
    return Outcome("kept", ((key.path, value),))


# -- data --------------------------------------------------------------------------------------------------------------

TEMPLATES = {"native": "native", "qwen2_5": "native", "qwen3": "native", "chatml": "chatml", "empty": "chatml"}
"""ROLL's name -> roll-core's. Most are the tokenizer's own template (roll/datasets/chat_template.py)."""


def template(value: Any, key: Key) -> Outcome:
    """Template of a role. The run's global_template takes precedence (roll/pipeline/rlvr/rlvr_pipeline.py)."""
    if key.at("global_template") is not None:
        return Outcome("dead", (), "global_template wins")
    trained = "sft_train" if key.pipeline == "sft" else "actor_train"
    if key.path[0] != trained:
        return Outcome("dead", (), f"{trained}'s is taken for every row")
    return _templated(value, key)


def global_template(value: Any, key: Key) -> Outcome:
    """Template of the training rows, which evaluation rows use too."""
    return _templated(value, key)


def _templated(value: Any, key: Key) -> Outcome:
    trained = "sft_train" if key.pipeline == "sft" else "actor_train"
    if has_bare_prompts(key.at(trained, "data_args"), key.pipeline):
        return Outcome("dead", (), "ROLL puts no chat template around the column prompt")
    ours = TEMPLATES.get(value, value)
    writes = (((trained, "data_args", "template"), ours),)
    if value not in TEMPLATES:
        return Outcome("unsupported", writes, "there is no such template; a run says which there are, and refuses it")
    if key.name == "global_template":
        return Outcome("renamed", writes, f"{value} is {ours} here" if ours != value else "")
    if ours == value:
        return Outcome("kept", writes)
    return Outcome(
        "changed", writes, f"{value} is the tokenizer's own template" if ours == "native" else "the same text"
    )


def sft_column(name: str) -> Any:
    """Build the conversion of a key that names a column; ROLL's sft has these keys at the top level."""

    def judge(value: Any, key: Key) -> Outcome:
        return Outcome("renamed", ((("sft_train", "data_args", name), value),))

    return judge


def has_bare_prompts(data: Any, pipeline: str) -> bool:
    """True if prompts get no chat template, as in rlvr without messages (get_encode_function in rlvr_pipeline.py)."""
    return pipeline == "rlvr" and bool(value_at(data, ("prompt",))) and not value_at(data, ("messages",))


def prompt_column(value: Any, key: Key) -> Outcome:
    """Column with the text of prompts, which is read if there are no messages."""
    if not has_bare_prompts(key.at(*key.path[:-1]), key.pipeline):
        return Outcome("dead", (), "ROLL reads prompt_key" if key.pipeline == "sft" else "messages wins")
    writes = ((key.path, value), ((*key.path[:-1], "template"), "plain"))
    return Outcome("kept", writes, "with template: plain, as ROLL puts no chat template around this column")


def messages_column(value: Any, key: Key) -> Outcome:
    """ROLL's sft ignores it and reads prompt_key and response_key (roll/pipeline/sft/sft_pipeline.py)."""
    if key.pipeline == "sft":
        return Outcome("dead", (), "ROLL's sft reads prompt_key and response_key")
    return Outcome("kept", ((key.path, value),))


def file_name(value: Any, key: Key) -> Outcome:
    """Replace glob patterns by the files that match them now; names are literal in roll-core.

    ROLL passes names to `datasets.load_dataset`, which expands patterns (roll/pipeline/rlvr/rlvr_pipeline.py).
    """
    names = value if isinstance(value, list) else [value]
    patterns = [name for name in names if isinstance(name, str) and glob.has_magic(name)]
    if not patterns:
        return Outcome("kept", ((key.path, value),))
    found = {name: sorted(glob.glob(name)) for name in patterns}
    files = [file for name in names for file in found.get(name, [name])]
    absent = [name for name in patterns if not found[name]]
    if absent:
        note = f"ROLL expands the pattern {absent[0]}, which matches no file here: list the files"
        return Outcome("unsupported", ((key.path, value),), note)
    return Outcome("changed", ((key.path, files),), f"{', '.join(patterns)}: the files that match now")


def dataset_type(value: Any, key: Key) -> Outcome:
    """ROLL has loaders for json, arrow, csv, parquet and text (roll/datasets/dataset.py)."""
    if value in ("json", "arrow", "csv", "parquet"):
        return Outcome("kept", ((key.path, value),))
    return Outcome("unsupported", ((key.path, value),), "rows come from json, parquet, csv or arrow files")


# -- roles -------------------------------------------------------------------------------------------------------------


def attention(value: Any, key: Key) -> Outcome:
    """ROLL's values are auto, sdpa and fa2; None means auto (roll/configs/model_args.py)."""
    if value == "sdpa":
        return Outcome("kept", ((key.path, value),))
    return Outcome("not needed", (), "the fastest exact one is taken")


def lora(value: Any, key: Key) -> Outcome:
    """Options of LoRA, which is enabled if `lora_target` is given."""
    if key.beside("lora_target") is None:
        return Outcome("dead", (), "LoRA is on where lora_target is given")
    if key.role[0] not in ("actor_train", "critic", "sft_train"):
        return Outcome(
            "not needed", (), "engines and scorers get merged weights; only the role that trains has adapters"
        )
    if key.name == "lora_dropout" and value:
        return Outcome(
            "unsupported", (), "dropout is off, so that logprobs before an update and in it come from the same function"
        )
    return Outcome("kept", ((key.path, value),))


def ulysses_size(value: Any, key: Key) -> Outcome:
    """Only ROLL's fsdp2 strategy reads it."""
    if asks_for_nothing(value, (1,)):
        return Outcome("not needed", (), "1 is none")
    return Outcome("renamed", (((*key.role, "strategy_args", "strategy_config", "ulysses_size"), value),))


BY_SEQUENCE = "each sequence is balanced by itself, in ROLL each microbatch"


def moe_aux_loss_coef(value: Any, key: Key) -> Outcome:
    """Megatron's own key takes precedence (model_providers.py). Other strategies add no auxiliary router loss."""
    if asks_for_nothing(value, (0,)):
        return Outcome("not needed", (), "it asks for nothing")
    strategy = (*key.role, "strategy_args")
    if not str(key.at(*strategy, "strategy_name")).startswith("megatron"):
        note = "a router's auxiliary loss is not added; left in the config, which `check` refuses"
        return Outcome("unsupported", ((key.path, value),), note)
    for own in ("moe_aux_loss_coeff", "moe_aux_loss_coef"):
        if key.at(*strategy, "strategy_config", own) is not None:
            return Outcome("not needed", (), f"{own} of its strategy_config decides, in ROLL too")
    return Outcome("renamed", (((*strategy, "strategy_config", "moe_aux_loss_coeff"), value),), BY_SEQUENCE)


def virtual_pipeline(value: Any, key: Key) -> Outcome:
    """Number of model chunks on each pipeline stage."""
    if asks_for_nothing(value, (1,)):
        return Outcome("not needed", (), "one piece on each stage is a plain pipeline")
    return Outcome("kept", ((key.path, value),))


TORCH_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def torch_dtype(value: Any, key: Key) -> Outcome:
    """Convert torch's dtype names to roll-core's; ROLL accepts both spellings."""
    name = str(value).removeprefix("torch.")
    ours = TORCH_DTYPES.get(name, name)
    return Outcome("kept" if ours == value else "changed", ((key.path, ours),))


def fsdp_size(value: Any, key: Key) -> Outcome:
    """A size <= 1 or >= the number of ranks means one group of all ranks (fsdp2_strategy.py)."""
    try:
        ranks = len(parse_device_mapping(key.at(*key.role, "device_mapping")))
    except ValueError:
        ranks = 0
    if isinstance(value, int) and (value <= 1 or 0 < ranks <= value):
        return Outcome("not needed", (), "all ranks share one copy where it is not given")
    return Outcome("kept", ((key.path, value),))


def world_size(value: Any, key: Key) -> Outcome:
    """ROLL computes it from device_mapping if that is given (roll/configs/worker_config.py)."""
    if key.beside("device_mapping") is not None and key.path[0] != "rewards":
        return Outcome("not needed", (), "device_mapping decides")
    return Outcome("kept", ((key.path, value),))


def num_train_epochs(value: Any, key: Key) -> Outcome:
    """rlvr uses `max_steps` instead."""
    if key.pipeline != "sft":
        return Outcome("dead", (), "max_steps decides")
    return Outcome("kept", ((key.path, value),))


# -- rewards -----------------------------------------------------------------------------------------------------------

REWARDS = {"MathRuleRewardWorker": "math_rule"}
"""ROLL's worker class -> roll-core's reward."""
MODULE = "imported_rewards"
"""Module in which users write functions that replace ROLL's rewards without an equivalent here."""


def reward_of(reward: Any) -> str:
    """roll-core's reward for a `rewards.<domain>` of ROLL; empty if there is none."""
    worker = reward.get("worker_cls") if isinstance(reward, Mapping) else None
    return REWARDS.get(str(worker).rpartition(".")[2], "")


def reward_worker(value: Any, key: Key) -> Outcome:
    """In ROLL the worker class determines the reward (roll/pipeline/rlvr/rewards)."""
    ours = reward_of({"worker_cls": value})
    if ours:
        return Outcome("renamed", (((*key.role, "reward"), ours),))
    name = re.sub(r"\W", "_", key.path[1])
    function = f"{MODULE}:{name if not name[:1].isdigit() else f'_{name}'}"
    writes = (((*key.role, "reward"), "function"), ((*key.role, "function"), function))
    return Outcome(
        "unsupported", writes, f"write {function.partition(':')[2]}(prompt, response, **columns) into {MODULE}.py"
    )


def of_reward_worker(value: Any, key: Key) -> Outcome:
    """Keys that only ROLL's reward worker reads."""
    if reward_of(key.at(*key.role)):
        return Outcome("not needed", (), "a rule has no model, and no devices")
    return Outcome("unsupported", (), "your function decides")
