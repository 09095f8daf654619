"""Converts values whose meaning differs in ROLL. Docstrings cite the files of ROLL's repository that define it."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roll_core.spec.devices import parse_device_mapping
from roll_migrate.rules import Outcome, has_no_effect, value_at

if TYPE_CHECKING:
    from roll_migrate.rules import Key

DEFAULT_PROMPT_LENGTH = 1024
"""Default of `prompt_length` in both ROLL and roll-core, in tokens."""


# -- the run -----------------------------------------------------------------------------------------------------------


def exp_name(value: Any, key: Key) -> Outcome:
    """ROLL accepts any text; here the name is that of a directory."""
    name = re.sub(r"[^\w.-]+", "-", str(value)).strip("-") or "roll"
    if name == value:
        return key.keep(value)
    return Outcome("changed", ((key.path, name),), "the name of a directory: letters, digits, `.`, `_` and `-`")


def response_length(value: Any, key: Key) -> Outcome:
    """ROLL reads it only if there is no `sequence_length` (roll/configs/base_config.py)."""
    if key.at("sequence_length") is not None:
        return Outcome("dead", (), "ROLL reads it only without sequence_length")
    return key.keep(value)


def sequence_length(value: Any, key: Key) -> Outcome:
    """Limit of prompt plus response: a response gets the rest after `prompt_length` (roll/configs/base_config.py)."""
    if not isinstance(value, int):
        return key.keep(value)
    if key.pipeline == "sft":
        # In sft it bounds the whole row (roll/pipeline/sft/sft_pipeline.py).
        writes = ((("prompt_length",), value), (("response_length",), value))
        return Outcome("renamed", writes, "prompt and response may each have up to this length")
    prompt = _number(key.at("prompt_length"), DEFAULT_PROMPT_LENGTH)
    note = f"{value} - prompt_length {prompt}"
    return Outcome("renamed", ((("response_length",), value - prompt),), note)


def prompt_length(value: Any, key: Key) -> Outcome:
    """ROLL's sft reads only `sequence_length` if that is given (roll/pipeline/sft/sft_pipeline.py)."""
    if key.pipeline == "sft" and key.at("sequence_length") is not None:
        return Outcome("dead", (), "ROLL's sft reads only sequence_length")
    return key.keep(value)


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def val_sequence_length(value: Any, key: Key) -> Outcome:
    """Limit of an evaluation's response plus `val_prompt_length` (roll/pipeline/rlvr/rlvr_config.py)."""
    prompt = key.at("val_prompt_length")
    if key.at("validation") is None or not (isinstance(value, int) and isinstance(prompt, int)):
        return Outcome("not needed", (), "there is no evaluation")
    to = ("validation", "generating_args", "max_new_tokens")
    return Outcome("renamed", ((to, value - prompt),), f"{value} - val_prompt_length {prompt}")


def val_prompt_length(value: Any, key: Key) -> Outcome:
    """roll-core has no separate prompt limit for evaluations."""
    same = key.at("prompt_length") or DEFAULT_PROMPT_LENGTH
    if value == same:
        return Outcome("not needed", (), "equal to prompt_length, which also applies to evaluations")
    return Outcome("unsupported", (), f"prompt_length {same} also applies to evaluations")


def resume_from_checkpoint(value: Any, key: Key) -> Outcome:
    """A path refers to a checkpoint of ROLL, which roll-core cannot read."""
    if isinstance(value, str):
        return Outcome(
            "unsupported",
            (),
            "ROLL's checkpoints cannot be read: convert it to a Hugging Face model, and set pretrain to that",
        )
    return key.keep(value)


NO_TRACKER = ("stdout", "None", "none", "", None, False)


def track_with(value: Any, key: Key) -> Outcome:
    """`stdout` prints metrics, as every run here does; a false value means no tracker (roll/utils/tracking.py)."""
    if value in NO_TRACKER:
        return Outcome("changed", ((key.path, []),), "runs print metrics and write metrics.jsonl without a tracker")
    if value not in key.trackers:
        return Outcome("unsupported", ((key.path, []),), _no_tracker(value, key))
    return key.keep(value)


def tracker_kwargs(value: Any, key: Key) -> Outcome:
    """ROLL has one tracker and its options; roll-core groups options by tracker."""
    name = key.source.get("track_with", "tensorboard")
    if name in NO_TRACKER or not value:
        return Outcome("not needed", (), "there is no tracker")
    if name not in key.trackers:
        return Outcome("unsupported", (), _no_tracker(name, key))
    return Outcome("renamed", (((*key.path, name), value),), "options are grouped by tracker")


def _no_tracker(name: Any, key: Key) -> str:
    return f"tracker {name} is not installed (installed: {', '.join(key.trackers)}); metrics.jsonl has every metric"


def environment_variable(value: Any, key: Key) -> Outcome:
    """Booleans become text; text and numbers are kept, and numbers are read as text."""
    if isinstance(value, bool):
        return Outcome("changed", ((key.path, str(value).lower()),))
    return key.keep(value)


ROUTERS = {
    "PromptAffinityRouter": (
        "prompt_affinity",
        "a prompt goes to its previous replica, unless that replica is full or far busier",
    ),
    "EnvAffinityRouter": ("sticky", "a prompt goes to its previous replica, as an environment does in ROLL"),
    "SglangRouter": ("least_loaded", "cached prefixes are not considered"),
}


def router_name(value: Any, key: Key) -> Outcome:
    """ROLL treats an unknown name as `SglangRouter` (roll/distributed/scheduler/router.py)."""
    name, how = ROUTERS.get(value, ROUTERS["SglangRouter"])
    return Outcome("changed", ((key.path, name),), how)


def model_download_type(value: Any, key: Key) -> Outcome:
    """ROLL's default is ModelScope; roll-core supports only the Hugging Face Hub."""
    if value == "HUGGINGFACE_HUB":
        return Outcome("not needed", (), "ids refer to the Hugging Face hub")
    return Outcome("unsupported", (), "ids refer to the Hugging Face hub: download the model, and set its directory")


def rollout_mock(value: Any, key: Key) -> Outcome:
    """In ROLL `dump` writes pickles of each step and `mock` reads them (roll/configs/base_config.py)."""
    if isinstance(value, Mapping) and not value.get("enable"):
        return Outcome("not needed", (), "it is not enabled")
    if key.pipeline == "rlvr" and value_at(value, ("mode",)) == "dump":
        return Outcome("renamed", ((("record_rollouts",), True),), "recorded in the run's directory")
    return Outcome(
        "unsupported",
        (),
        "ROLL's dumps cannot be read: record with record_rollouts: true, then set replay_rollouts to that run",
    )


# -- the algorithm -----------------------------------------------------------------------------------------------------

ESTIMATORS = {"gigpo": "reinforce", "step_reinforce": "reinforce"}
KL = {"kl": "k1", "mse": "k2"}
OWN_LOSS = "ActorPGWorker"


def adv_estimator(value: Any, key: Key) -> Outcome:
    """Convert estimators of turns, which `check` rejects in rlvr.

    In ROLL's rlvr all but gae and grpo are the discounted return (compute_advantage in roll/utils/functionals.py).
    """
    if value in ESTIMATORS:
        return Outcome("changed", ((key.path, ESTIMATORS[value]),), f"ROLL's rlvr computes the same for {value}")
    return key.keep(value)


def norm_type(value: Any, key: Key) -> Outcome:
    """With grpo, ROLL ignores the value and uses the group (reward_postprocess in roll/utils/functionals.py)."""
    if key.at("adv_estimator") == "grpo":
        return Outcome("dead", (), "with grpo, ROLL always uses the group's mean and deviation")
    return key.keep(value)


def kl_penalty(value: Any, key: Key) -> Outcome:
    """Convert ROLL's names of KL estimators (compute_approx_kl in roll/utils/functionals.py).

    `full` expects distributions, but ROLL passes it the logprobs of tokens.
    """
    if value in KL:
        return Outcome("changed", ((key.path, KL[value]),), "the same estimator by its usual name")
    return key.keep(value)


def target_kl(value: Any, key: Key) -> Outcome:
    """ROLL adapts only the coefficient of the KL penalty in the reward."""
    if not key.at("add_token_level_kl"):
        return Outcome("not needed", (), "it adapts the KL penalty in the reward, which is off")
    if not has_domains(key):
        return key.keep(value)
    note = "ROLL adapts the coefficient by the KL of each domain in turn, roll-core by the KL of the whole batch"
    return Outcome("differs", ((key.path, value),), note)


def has_domains(key: Key) -> bool:
    """True if there are several domains, which ROLL processes one by one (roll/pipeline/rlvr/rlvr_pipeline.py)."""
    rewards = key.at("rewards")
    return isinstance(rewards, Mapping) and len(rewards) > 1


SAMPLE_MASKS = ("max_len_mask", "difficulty_mask", "error_max_len_clip")


def whiten(value: Any, key: Key) -> Outcome:
    """ROLL whitens each domain over the samples that masks keep (compute_advantage in roll/utils/functionals.py)."""
    masks = [name for name in SAMPLE_MASKS if key.at(name)]
    scopes = ["each domain separately"] if has_domains(key) else []
    if masks:
        scopes.append(f"only the samples that {' and '.join(masks)} {'keep' if masks[1:] else 'keeps'}")
    if not (value and scopes):
        return key.keep(value)
    return Outcome(
        "differs", ((key.path, value),), f"ROLL whitens {', '.join(scopes)}; roll-core whitens the whole batch"
    )


def loss_agg_mode(value: Any, key: Key) -> Outcome:
    """ROLL's modes are those of agg_loss in roll/utils/functionals.py."""
    if value != "seq-mean-token-sum-norm":
        return key.keep(value)
    note = (
        "ROLL divides the sum over all tokens of a step by sequence_length - 1. roll-core divides by response_length"
        " and by the number of sequences, as in Dr. GRPO, so gradients before clipping are smaller by about that number"
    )
    return Outcome("differs", ((key.path, value),), note)


AT_TEMPERATURE = "training computes logprobs and entropy at the sampling temperature; ROLL at 1"


def temperature(value: Any, key: Key) -> Outcome:
    """ROLL's trainers do not scale logits by temperature (op_compute_log_probs of roll/distributed/strategy)."""
    if key.path[0] != "actor_infer" or not isinstance(value, (int, float)) or value in (0, 1):
        return key.keep(value)
    return Outcome("differs", ((key.path, value),), AT_TEMPERATURE)


LOSSES: dict[Any, tuple[str, dict[str, Any]]] = {
    "tis": ("cispo", {"clip_high": 1.0}),
    "cispo": ("cispo", {"bounds": "relative", "clip_low": 0.1, "clip_high": 0.1}),
    "topr": ("topr", {"level": "token"}),
    "kimi15": ("kimi", {"beta": 0.1}),
}
"""ROLL's policy losses with constants that its configs cannot set, by `pg_variant`."""


def pg_variant(value: Any, key: Key) -> Outcome:
    """Only the worker class ActorPGWorker reads it (roll/pipeline/rlvr/actor_pg_worker.py)."""
    if not str(key.beside("worker_cls")).endswith(OWN_LOSS):
        return Outcome("dead", (), f"only worker_cls {OWN_LOSS} reads it")
    if value not in LOSSES:
        return Outcome("renamed", ((("pg_variant",), value),), "the run has one policy loss")
    name, options = LOSSES[value]
    writes = [(("pg_variant",), name), *((("pg_options", option), each) for option, each in options.items())]
    return Outcome("changed", tuple(writes), "the run has one policy loss; with ROLL's constants as options")


def importance_sampling(value: Any, key: Key) -> Outcome:
    """`seq` is GSPO with the clip range of PPO's keys (roll/pipeline/rlvr/actor_worker.py)."""
    if value == "token":
        return Outcome("not needed", (), "ratios of pg_variant ppo are per token")
    if value != "seq":
        return key.keep(value)
    by_range = key.at("use_pg_clip_range")
    clips = {
        f"clip_{end}": float(key.at(f"pg_clip_{end}" if by_range else "pg_clip") or 0.2) for end in ("low", "high")
    }
    writes = [(("pg_variant",), "gspo"), *((("pg_options", option), each) for option, each in clips.items())]
    return Outcome("changed", tuple(writes), "the ratio of a sequence is pg_variant gspo, with a clip range of its own")


def router_replay(value: Any, key: Key) -> Outcome:
    """Only R3 of the policy's trainer and engine is supported.

    R2, which would replay the experts that the trainer itself chose, is implemented neither in ROLL nor here.
    """
    if value in (None, "disable"):
        return Outcome("not needed", (), "disable has no effect")
    if value == "R3" and key.pipeline == "rlvr" and key.role in (("actor_train",), ("actor_infer",)):
        return Outcome("renamed", ((("router_replay", "mode"), value),), "one key for trainer and engine")
    return Outcome(
        "unsupported",
        ((key.path, value),),
        "only R3 of the policy is supported; left in the config, which `check` rejects",
    )


def topr_weight(value: Any, key: Key) -> Outcome:
    """Factors of the two terms of the topr loss, for positive and negative samples."""
    if key.beside("pg_variant") != "topr" or not isinstance(value, (int, float)) or value == 1:
        return Outcome("not needed", (), "only topr has this weight, and 1 has no effect")
    return Outcome(
        "renamed", ((("pg_options", key.name.removeprefix("topr_")), float(value)),), "an option of the loss"
    )


def worker_cls(value: Any, key: Key) -> Outcome:
    """ROLL's own classes follow from the role and `pg_variant`; a class of the user is refused."""
    if str(value).startswith("roll."):
        return Outcome("not needed", (), "the role and pg_variant decide")
    note = "custom code: see docs/plugins.md; left in the config, which `check` rejects"
    return Outcome("unsupported", ((key.path, value),), note)


def reward_pretrain(value: Any, key: Key) -> Outcome:
    """Model of the critic, if the critic names none (roll/configs/base_config.py)."""
    if key.at("critic") is None or key.at("critic", "model_args", "model_name_or_path") is not None:
        return Outcome("not needed", (), "every role has its own model")
    return Outcome("renamed", ((("critic", "model_args", "model_name_or_path"), value),))


def additional_prompts(value: Any, key: Key) -> Outcome:
    """Applies only to synchronous training: asynchronous training keeps the engine full without it."""
    if key.at("async_generation_ratio"):
        return Outcome("not needed", (), "async_generation_ratio keeps the engine full")
    return key.keep(value)


# -- data --------------------------------------------------------------------------------------------------------------

TEMPLATES = {"native": "native", "qwen2_5": "native", "qwen3": "native", "chatml": "chatml", "empty": "chatml"}
"""ROLL's name -> roll-core's. Most are the tokenizer's own template (roll/datasets/chat_template.py)."""


def template(value: Any, key: Key) -> Outcome:
    """Template of a role. The run's global_template takes precedence (roll/pipeline/rlvr/rlvr_pipeline.py)."""
    if key.at("global_template") is not None:
        return Outcome("dead", (), "global_template takes precedence")
    trained = "sft_train" if key.pipeline == "sft" else "actor_train"
    if key.path[0] != trained:
        return Outcome("dead", (), f"the template of {trained} applies to every row")
    return _template_of(value, key)


def global_template(value: Any, key: Key) -> Outcome:
    """Template of the training rows, which evaluation rows use too."""
    return _template_of(value, key)


def _template_of(value: Any, key: Key) -> Outcome:
    trained = "sft_train" if key.pipeline == "sft" else "actor_train"
    if has_bare_prompts(key.at(trained, "data_args"), key.pipeline):
        return Outcome("dead", (), "ROLL applies no chat template to the column prompt")
    ours = TEMPLATES.get(value, value)
    writes = (((trained, "data_args", "template"), ours),)
    if value not in TEMPLATES:
        return Outcome("unsupported", writes, "unknown template; `roll-core check` rejects it and lists the known ones")
    if key.name == "global_template":
        return Outcome("renamed", writes, f"{value} is called {ours}" if ours != value else "")
    if ours == value:
        return Outcome("kept", writes)
    return Outcome(
        "changed", writes, f"{value} is the tokenizer's own template" if ours == "native" else "the same text"
    )


def sft_column(name: str) -> Any:
    """Build the conversion of a key that names a column; ROLL's sft has these keys at the top level."""

    def convert(value: Any, key: Key) -> Outcome:
        return Outcome("renamed", ((("sft_train", "data_args", name), value),))

    return convert


def has_bare_prompts(data: Any, pipeline: str) -> bool:
    """True if prompts get no chat template, as in rlvr without messages (get_encode_function in rlvr_pipeline.py)."""
    return pipeline == "rlvr" and bool(value_at(data, ("prompt",))) and not value_at(data, ("messages",))


def prompt_column(value: Any, key: Key) -> Outcome:
    """Column with the text of prompts, which is read if there are no messages."""
    if not has_bare_prompts(key.at(*key.path[:-1]), key.pipeline):
        return Outcome("dead", (), "ROLL reads prompt_key" if key.pipeline == "sft" else "messages takes precedence")
    writes = ((key.path, value), ((*key.path[:-1], "template"), "plain"))
    return Outcome("kept", writes, "with template: plain, because ROLL applies no chat template to this column")


def messages_column(value: Any, key: Key) -> Outcome:
    """ROLL's sft ignores it and reads prompt_key and response_key (roll/pipeline/sft/sft_pipeline.py)."""
    if key.pipeline == "sft":
        return Outcome("dead", (), "ROLL's sft reads prompt_key and response_key")
    return key.keep(value)


def file_name(value: Any, key: Key) -> Outcome:
    """Replace glob patterns by the files that match them now; names are literal in roll-core.

    ROLL passes names to `datasets.load_dataset`, which expands patterns (roll/pipeline/rlvr/rlvr_pipeline.py).
    """
    names = value if isinstance(value, list) else [value]
    patterns = [name for name in names if isinstance(name, str) and glob.has_magic(name)]
    if not patterns:
        return key.keep(value)
    found = {name: sorted(glob.glob(name)) for name in patterns}
    files = [file for name in names for file in found.get(name, [name])]
    absent = [name for name in patterns if not found[name]]
    if absent:
        note = f"ROLL expands the pattern {absent[0]}, which matches no file: list the files"
        return Outcome("unsupported", ((key.path, value),), note)
    return Outcome("changed", ((key.path, files),), f"{', '.join(patterns)}: the files that match now")


def dataset_type(value: Any, key: Key) -> Outcome:
    """ROLL has loaders for json, arrow, csv, parquet and text (roll/datasets/dataset.py)."""
    if value in ("json", "arrow", "csv", "parquet"):
        return key.keep(value)
    return Outcome("unsupported", ((key.path, value),), "only json, parquet, csv and arrow files are supported")


# -- roles -------------------------------------------------------------------------------------------------------------


def attention(value: Any, key: Key) -> Outcome:
    """ROLL's values are auto, sdpa and fa2; None means auto (roll/configs/model_args.py)."""
    if value == "sdpa":
        return key.keep(value)
    return Outcome("not needed", (), "auto selects the fastest exact one")


def lora(value: Any, key: Key) -> Outcome:
    """Options of LoRA, which is enabled if `lora_target` is given."""
    if key.beside("lora_target") is None:
        return Outcome("dead", (), "LoRA is enabled by lora_target")
    if key.role[0] not in ("actor_train", "critic", "sft_train"):
        return Outcome("not needed", (), "only the trained role has adapters; other roles receive merged weights")
    if key.name == "lora_dropout" and value:
        return Outcome(
            "unsupported",
            (),
            "dropout is not supported: logprobs before and during an update must come from the same function",
        )
    return key.keep(value)


def ulysses_size(value: Any, key: Key) -> Outcome:
    """Only ROLL's fsdp2 strategy reads it."""
    if has_no_effect(value, (1,)):
        return Outcome("not needed", (), "1 disables it")
    return Outcome("renamed", (((*key.role, "strategy_args", "strategy_config", "ulysses_size"), value),))


BY_SEQUENCE = "roll-core balances each sequence, ROLL each micro-batch"


def moe_aux_loss_coef(value: Any, key: Key) -> Outcome:
    """Megatron's own key takes precedence (model_providers.py). Other strategies add no auxiliary router loss."""
    if has_no_effect(value, (0,)):
        return Outcome("not needed", (), "it has no effect")
    strategy = (*key.role, "strategy_args")
    if not str(key.at(*strategy, "strategy_name")).startswith("megatron"):
        note = "only Megatron adds a router's auxiliary loss; left in the config, which `check` rejects"
        return Outcome("unsupported", ((key.path, value),), note)
    for own in ("moe_aux_loss_coeff", "moe_aux_loss_coef"):
        if key.at(*strategy, "strategy_config", own) is not None:
            return Outcome("not needed", (), f"{own} of its strategy_config takes precedence, as in ROLL")
    return Outcome("renamed", (((*strategy, "strategy_config", "moe_aux_loss_coeff"), value),), BY_SEQUENCE)


def virtual_pipeline(value: Any, key: Key) -> Outcome:
    """Number of model chunks on each pipeline stage."""
    if has_no_effect(value, (1,)):
        return Outcome("not needed", (), "one chunk per stage is a plain pipeline")
    return key.keep(value)


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
        return Outcome("not needed", (), "without it, all ranks share one copy")
    return key.keep(value)


def world_size(value: Any, key: Key) -> Outcome:
    """ROLL computes it from device_mapping if that is given (roll/configs/worker_config.py)."""
    if key.beside("device_mapping") is not None and key.path[0] != "rewards":
        return Outcome("not needed", (), "set by device_mapping")
    return key.keep(value)


def num_train_epochs(value: Any, key: Key) -> Outcome:
    """rlvr uses `max_steps` instead."""
    if key.pipeline != "sft":
        return Outcome("dead", (), "set by max_steps")
    return key.keep(value)


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
        "unsupported", writes, f"write {function.partition(':')[2]}(prompt, response, **columns) in {MODULE}.py"
    )


def of_reward_worker(value: Any, key: Key) -> Outcome:
    """Keys that only ROLL's reward worker reads."""
    if reward_of(key.at(*key.role)):
        return Outcome("not needed", (), "a rule has no model and no devices")
    return Outcome("unsupported", (), "your function replaces it")
