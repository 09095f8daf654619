"""Converts values whose meaning differs in ROLL. Docstrings cite the files of ROLL's repository that define it."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from roll_core.spec.devices import parse_device_mapping
from roll_migrate.roll_pipelines import BOARDS, has_images
from roll_migrate.rules import KeyRule, Outcome, is_neutral, lookup, value_at
from roll_migrate.shared_rules import experiment

if TYPE_CHECKING:
    from roll_migrate.rules import Convert, Key

DEFAULT_PROMPT_LENGTH = 1024
"""Default of `prompt_length` in both ROLL and roll-core, in tokens."""
MAX_RUNNING = 128
"""ROLL's default of `max_running_requests`."""
VIDEO_ROWS = "video_r1_get_data_kwargs"
"""ROLL's `custom_data_kwargs_func` of rows with videos."""

# -- the run -----------------------------------------------------------------------------------------------------------

TRAINED = {"sft": "sft_train", "distill": "student"}
"""ROLL's trained role, by pipeline; otherwise `actor_train`."""
WHOLE_ROWS = {"sft": "sft", "preference": "dpo", "distill": "distill"}
"""Pipelines whose rows are bounded as a whole, by roll-core's name, with ROLL's name."""


def exp_name(value: Any, key: Key) -> Outcome:
    """ROLL accepts any text; here the name is that of a directory."""
    outcome = experiment(key, "roll")
    return outcome if outcome.status == "changed" else key.unchanged()


def response_length(value: Any, key: Key) -> Outcome:
    """ROLL reads it only if there is no `sequence_length` (roll/configs/base_config.py)."""
    has_other = key.get("sequence_length") is not None
    return key.dead("ROLL reads it only without sequence_length") if has_other else key.unchanged()


def sequence_length(value: Any, key: Key) -> Outcome:
    """Limit of prompt plus response: a response gets the rest after `prompt_length` (roll/configs/base_config.py)."""
    if not isinstance(value, int):
        return key.unchanged()
    if key.pipeline in WHOLE_ROWS:
        # It bounds the whole row (roll/pipeline/sft/sft_pipeline.py, roll/pipeline/dpo/dpo_pipeline.py).
        writes = {"prompt_length": value, "response_length": value}
        return key.renamed(writes, "prompt and response may each have up to this length")
    prompt = key.get("prompt_length")
    if key.pipeline == "agentic" and prompt is None and DEFAULT_PROMPT_LENGTH >= value > 1:
        writes = {"prompt_length": value // 2, "response_length": value - value // 2}
        return key.changed(writes, f"an episode has at most {value} tokens, prompt_length + response_length")
    prompt = prompt if isinstance(prompt, int) else DEFAULT_PROMPT_LENGTH
    return key.renamed({"response_length": value - prompt}, f"{value} - prompt_length {prompt}")


def prompt_length(value: Any, key: Key) -> Outcome:
    """ROLL's sft and dpo read only `sequence_length` if that is given (roll/pipeline/sft/sft_pipeline.py)."""
    if key.pipeline in WHOLE_ROWS and key.get("sequence_length") is not None:
        return key.dead(f"ROLL's {WHOLE_ROWS[key.pipeline]} reads only sequence_length")
    return key.unchanged()


def val_sequence_length(value: Any, key: Key) -> Outcome:
    """Limit of an evaluation's response plus `val_prompt_length` (roll/pipeline/rlvr/rlvr_config.py)."""
    prompt = key.get("val_prompt_length")
    if key.get("validation") is None or not (isinstance(value, int) and isinstance(prompt, int)):
        return key.unneeded("there is no evaluation")
    note = f"{value} - val_prompt_length {prompt}"
    return key.renamed({"validation.generating_args.max_new_tokens": value - prompt}, note)


def val_prompt_length(value: Any, key: Key) -> Outcome:
    """roll-core has no separate prompt limit for evaluations."""
    length = key.get("prompt_length") or DEFAULT_PROMPT_LENGTH
    if value == length:
        return key.unneeded("equal to prompt_length, which also applies to evaluations")
    return key.lacking(f"prompt_length {length} also applies to evaluations")


def resume_from_checkpoint(value: Any, key: Key) -> Outcome:
    """A path refers to a checkpoint of ROLL, which roll-core cannot read."""
    note = "ROLL's checkpoints cannot be read: convert it to a Hugging Face model, and set pretrain to that"
    return key.lacking(note) if isinstance(value, str) else key.unchanged()


NO_TRACKER = ("stdout", "None", "none", "", None, False)


def track_with(value: Any, key: Key) -> Outcome:
    """`stdout` prints metrics, as every run here does; a false value means no tracker (roll/utils/tracking.py)."""
    if value in NO_TRACKER:
        return key.changed({key.path: []}, "runs print metrics and write metrics.jsonl without a tracker")
    return key.unchanged() if value in key.trackers else key.lacking(_no_tracker(value, key), {key.path: []})


def tracker_kwargs(value: Any, key: Key) -> Outcome:
    """ROLL has one tracker and its options; roll-core groups options by tracker."""
    name = key.source.get("track_with", "tensorboard")
    if name in NO_TRACKER or not value:
        return key.unneeded("there is no tracker")
    if name not in key.trackers:
        return key.lacking(_no_tracker(name, key))
    return key.renamed({(*key.path, name): value}, "options are grouped by tracker")


def _no_tracker(name: Any, key: Key) -> str:
    return f"tracker {name} is not installed (installed: {', '.join(key.trackers)}); metrics.jsonl has every metric"


def environment_variable(value: Any, key: Key) -> Outcome:
    """Booleans become text; text and numbers are kept, and numbers are read as text."""
    return key.changed({key.path: str(value).lower()}) if isinstance(value, bool) else key.unchanged()


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
    name, note = ROUTERS.get(value, ROUTERS["SglangRouter"])
    return key.changed({key.path: name}, note)


def model_download_type(value: Any, key: Key) -> Outcome:
    """ROLL's default is ModelScope; that of roll-core is the Hugging Face Hub."""
    if value == "HUGGINGFACE_HUB":
        return key.unneeded("ids refer to the Hugging Face hub")
    return key.changed({"system_envs.MODEL_DOWNLOAD_TYPE": "MODELSCOPE"}, "needs roll-core[modelscope]")


def rollout_mock(value: Any, key: Key) -> Outcome:
    """In ROLL `dump` writes pickles of each step and `mock` reads them (roll/configs/base_config.py)."""
    if isinstance(value, Mapping) and not value.get("enable"):
        return key.unneeded("it is not enabled")
    if key.pipeline == "rlvr" and value_at(value, ("mode",)) == "dump":
        return key.renamed({"record_rollouts": True}, "recorded in the run's directory")
    return key.lacking(
        "ROLL's dumps cannot be read: record with record_rollouts: true, then set replay_rollouts to that run"
    )


# -- the algorithm -----------------------------------------------------------------------------------------------------

KL = {"kl": "k1", "mse": "k2"}
OWN_LOSS = "ActorPGWorker"


def adv_estimator(value: Any, key: Key) -> Outcome:
    """Convert estimators of turns, which `check` rejects in rlvr.

    In ROLL's rlvr all but gae and grpo are the discounted return (compute_advantage in roll/utils/functionals.py).
    """
    if value in ("gigpo", "step_reinforce"):
        return key.changed({key.path: "reinforce"}, f"ROLL's rlvr computes the same for {value}")
    return key.unchanged()


def norm_type(value: Any, key: Key) -> Outcome:
    """With grpo, ROLL ignores the value and uses the group (reward_postprocess in roll/utils/functionals.py)."""
    if key.get("adv_estimator") == "grpo":
        return key.dead("with grpo, ROLL always uses the group's mean and deviation")
    return key.unchanged()


def kl_penalty(value: Any, key: Key) -> Outcome:
    """Convert ROLL's names of KL estimators (compute_approx_kl in roll/utils/functionals.py).

    `full` expects distributions, but ROLL passes it the logprobs of tokens.
    """
    return (
        key.changed({key.path: KL[value]}, "the same estimator by its usual name") if value in KL else key.unchanged()
    )


def target_kl(value: Any, key: Key) -> Outcome:
    """ROLL adapts only the coefficient of the KL penalty in the reward."""
    if not key.get("add_token_level_kl"):
        return key.unneeded("it adapts the KL penalty in the reward, which is off")
    note = "ROLL adapts the coefficient by the KL of each domain in turn, roll-core by the KL of the whole batch"
    return key.differs(note, {key.path: value}) if has_domains(key) else key.unchanged()


def has_domains(key: Key) -> bool:
    """True if there are several domains, which ROLL processes one by one (roll/pipeline/rlvr/rlvr_pipeline.py)."""
    rewards = key.get("rewards")
    return isinstance(rewards, Mapping) and len(rewards) > 1


SAMPLE_MASKS = ("max_len_mask", "difficulty_mask", "error_max_len_clip")


def whiten(value: Any, key: Key) -> Outcome:
    """ROLL whitens each domain over the samples that masks keep (compute_advantage in roll/utils/functionals.py)."""
    masks = [name for name in SAMPLE_MASKS if key.get(name)]
    scopes = ["each domain separately"] if has_domains(key) else []
    if masks:
        scopes.append(f"only the samples that {' and '.join(masks)} {'keep' if masks[1:] else 'keeps'}")
    if not (value and scopes):
        return key.unchanged()
    return key.differs(f"ROLL whitens {', '.join(scopes)}; roll-core whitens the whole batch", {key.path: value})


def loss_agg_mode(value: Any, key: Key) -> Outcome:
    """ROLL's modes are those of agg_loss in roll/utils/functionals.py."""
    if value != "seq-mean-token-sum-norm":
        return key.unchanged()
    note = (
        "ROLL divides the sum over all tokens of a step by sequence_length - 1. roll-core divides by response_length"
        " and by the number of sequences, as in Dr. GRPO, so gradients before clipping are smaller by about that number"
    )
    return key.differs(note, {key.path: value})


AT_TEMPERATURE = (
    "training computes logprobs and entropy at the sampling temperature; as in ROLL with logprob_temperature: 1"
)


def temperature(value: Any, key: Key) -> Outcome:
    """ROLL's trainers do not scale logits by temperature (op_compute_log_probs of roll/distributed/strategy)."""
    if key.path[0] != "actor_infer" or not isinstance(value, (int, float)) or value in (0, 1):
        return key.unchanged()
    return key.differs(AT_TEMPERATURE, {key.path: value})


def max_new_tokens(value: Any, key: Key) -> Outcome:
    """The agentic pipeline limits a reply by it and by `max_tokens_per_step` (traj_env_manager.py)."""
    if key.pipeline != "agentic":
        return key.dead("ROLL overwrites it with the length that prompt_length leaves")
    environments = key.get("custom_envs")
    environments = environments.values() if isinstance(environments, Mapping) else ()
    limits = [lookup(keys, "max_tokens_per_step") or key.get("max_tokens_per_step") for keys in environments]
    if limits and all(isinstance(limit, int) and isinstance(value, int) and limit <= value for limit in limits):
        return key.unneeded("max_tokens_per_step is the lower limit of a reply")
    return key.differs(
        "in ROLL the lower of it and max_tokens_per_step limits a reply: set max_tokens_per_step to that"
    )


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
        return key.dead(f"only worker_cls {OWN_LOSS} reads it")
    if value not in LOSSES:
        return key.renamed("pg_variant", "the run has one policy loss")
    return key.changed(_loss(*LOSSES[value]), "the run has one policy loss; with ROLL's constants as options")


def _loss(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a policy loss and its options."""
    return {"pg_variant": name, **{f"pg_options.{option}": value for option, value in options.items()}}


def expand(value: Any, key: Key) -> Outcome:
    """Requests per response, which here come with a limit."""
    if not value or key.get("max_running_requests") is not None:
        return key.unneeded("with max_running_requests each response is a request")
    return key.changed({"max_running_requests": MAX_RUNNING}, "with it each response is a request")


def clip_switch(value: Any, key: Key) -> Outcome:
    """ROLL's bounds are 0.2 by default; here they default to `pg_clip`."""
    if not value:
        return key.unneeded("pg_clip_low and pg_clip_high default to pg_clip")
    missing = [name for name in ("pg_clip_low", "pg_clip_high") if key.get(name) is None]
    return key.renamed(dict.fromkeys(missing, 0.2), "the bounds alone enable it")


def clip_bound(value: Any, key: Key) -> Outcome:
    """A bound of clip-higher."""
    return key.unchanged() if key.get("use_pg_clip_range") else key.dead("ROLL reads it only with use_pg_clip_range")


def dual_clip(value: Any, key: Key) -> Outcome:
    """ROLL's bound is not a key (roll/utils/functionals.py)."""
    if not value:
        return key.unneeded("it is off by default")
    clip = key.get("pg_clip")
    clip = clip if isinstance(clip, (int, float)) else 0.2
    return key.renamed({"dual_clip": 1 + 2 * clip}, f"ROLL's bound is 1 + 2 × pg_clip {clip:g}")


def importance_sampling(value: Any, key: Key) -> Outcome:
    """`seq` is GSPO with the clip range of PPO's keys (roll/pipeline/rlvr/actor_worker.py)."""
    if value == "token":
        return key.unneeded("ratios of pg_variant ppo are per token")
    if value != "seq":
        return key.unchanged()
    names = {end: f"pg_clip_{end}" if key.get("use_pg_clip_range") else "pg_clip" for end in ("low", "high")}
    clips = {f"clip_{end}": float(key.get(name) or 0.2) for end, name in names.items()}
    return key.changed(_loss("gspo", clips), "the ratio of a sequence is pg_variant gspo, with a clip range of its own")


def router_replay(value: Any, key: Key) -> Outcome:
    """Only R3 of the policy's trainer and engine is supported.

    R2, which would replay the experts that the trainer itself chose, is implemented neither in ROLL nor here.
    """
    if value in (None, "disable"):
        return key.unneeded("disable has no effect")
    if value == "R3" and key.pipeline == "rlvr" and key.role in (("actor_train",), ("actor_infer",)):
        return key.renamed("router_replay.mode", "one key for trainer and engine")
    return key.refused("only R3 of the policy is supported")


def topr_weight(value: Any, key: Key) -> Outcome:
    """Factors of the two terms of the topr loss, for positive and negative samples."""
    if key.beside("pg_variant") != "topr" or not isinstance(value, (int, float)) or value == 1:
        return key.unneeded("only topr has this weight, and 1 has no effect")
    return key.renamed({f"pg_options.{key.name.removeprefix('topr_')}": float(value)}, "an option of the loss")


def worker_cls(value: Any, key: Key) -> Outcome:
    """ROLL's own classes follow from the role and `pg_variant`; a class of the user is refused."""
    if str(value).startswith("roll."):
        return key.unneeded("the role and pg_variant decide")
    return key.refused("custom code: see docs/plugins.md")


def reward_pretrain(value: Any, key: Key) -> Outcome:
    """Model of the critic, if the critic names none (roll/configs/base_config.py)."""
    if key.get("critic") is None or key.get("critic", "model_args", "model_name_or_path") is not None:
        return key.unneeded("every role has its own model")
    return key.renamed("critic.model_args.model_name_or_path")


def additional_prompts(value: Any, key: Key) -> Outcome:
    """Applies only to synchronous training: asynchronous training keeps the engine full without it."""
    asynchronous = key.get("async_generation_ratio")
    return key.unneeded("async_generation_ratio keeps the engine full") if asynchronous else key.unchanged()


# -- data --------------------------------------------------------------------------------------------------------------

TEMPLATES = {
    **dict.fromkeys(("native", "qwen2_5", "qwen3", "qwen2-5-vl", "qwen2-vl"), "native"),
    **dict.fromkeys(("chatml", "empty"), "chatml"),
}
"""ROLL's name -> roll-core's. Most are the tokenizer's own template (roll/datasets/chat_template.py)."""


def template(value: Any, key: Key) -> Outcome:
    """Template of a role. The run's global_template takes precedence (roll/pipeline/rlvr/rlvr_pipeline.py)."""
    trained = TRAINED.get(key.pipeline, "actor_train")
    if key.get("global_template") is not None:
        return key.dead("global_template takes precedence")
    return (
        global_template(value, key)
        if key.path[0] == trained
        else key.dead(f"the template of {trained} applies to every row")
    )


def global_template(value: Any, key: Key) -> Outcome:
    """Template of the training rows, which evaluation rows use too."""
    trained = TRAINED.get(key.pipeline, "actor_train")
    if has_bare_prompts(key.get(trained, "data_args"), key.pipeline) and not has_images(key.source):
        return key.dead("ROLL applies no chat template to the column prompt")
    name = TEMPLATES.get(value, value)
    target = {f"{trained}.data_args.template": name}
    if value not in TEMPLATES:
        return key.lacking("unknown template; `roll-core check` rejects it and lists the known ones", target)
    if key.name == "global_template":
        return key.renamed(target, f"{value} is called {name}" if name != value else "")
    if name == value:
        return replace(key.renamed(target), status="kept")
    return key.changed(target, f"{value} is the tokenizer's own template" if name == "native" else "the same text")


def row_column(name: str) -> Convert:
    """Build the conversion of a top-level key of ROLL that names a column."""
    return lambda value, key: key.renamed(f"{TRAINED.get(key.pipeline, 'actor_train')}.data_args.{name}")


def has_bare_prompts(data: Any, pipeline: str) -> bool:
    """True if prompts get no chat template, as in rlvr without messages (get_encode_function in rlvr_pipeline.py)."""
    return pipeline == "rlvr" and bool(value_at(data, ("prompt",))) and not value_at(data, ("messages",))


def prompt_column(value: Any, key: Key) -> Outcome:
    """Column with the text of prompts, which is read if there are no messages."""
    if not has_bare_prompts(key.get(*key.path[:-1]), key.pipeline):
        reads = {"preference": "the column instruction", "distill": "question_key", "sft": "prompt_key"}
        reason = reads.get(key.pipeline)
        return key.dead(f"ROLL reads {reason}" if reason else "messages takes precedence")
    if has_images(key.source):
        return key.unchanged()
    writes = ((key.path, value), ((*key.path[:-1], "template"), "plain"))
    return Outcome("kept", writes, "with template: plain, because ROLL applies no chat template to this column")


def messages_column(value: Any, key: Key) -> Outcome:
    """ROLL's sft ignores it and reads prompt_key and response_key (roll/pipeline/sft/sft_pipeline.py)."""
    reads = {
        "sft": "ROLL's sft reads prompt_key and response_key",
        "preference": "ROLL's dpo reads the columns instruction, chosen_key and rejected_key",
        "distill": "ROLL's distill reads question_key and answer_key",
    }
    if key.pipeline in reads:
        return key.dead(reads[key.pipeline])
    if _makes_video_rows(key.beside("custom_data_kwargs_func")):
        return key.unneeded("the prompts that custom_data_kwargs_func makes are texts")
    return key.unchanged()


def _makes_video_rows(function: Any) -> bool:
    return str(function).rpartition(".")[2] == VIDEO_ROWS


def file_name(value: Any, key: Key) -> Outcome:
    """Replace glob patterns by the files that match them now; names are literal in roll-core.

    ROLL passes names to `datasets.load_dataset`, which expands patterns (roll/pipeline/rlvr/rlvr_pipeline.py).
    """
    names = value if isinstance(value, list) else [value]
    patterns = [name for name in names if isinstance(name, str) and glob.has_magic(name)]
    if not patterns:
        return key.unchanged()
    matches = {name: sorted(glob.glob(name)) for name in patterns}
    if absent := [name for name in patterns if not matches[name]]:
        return key.rejected(f"ROLL expands the pattern {absent[0]}, which matches no file: list the files")
    files = [file for name in names for file in matches.get(name, [name])]
    return key.changed({key.path: files}, f"{', '.join(patterns)}: the files that match now")


def image_root(value: Any, key: Key) -> Outcome:
    """ROLL joins it with the names of images or videos in rows."""
    return key.renamed({(*key.path[:-1], "image_roots"): [value]})


def video_pixels(value: Any, key: Key) -> Outcome:
    """ROLL divides it by half the number of frames, since a token has two (qwen_vl_utils.fetch_video)."""
    if not isinstance(value, int):
        return key.unneeded("null has no effect") if value is None else key.rejected("expected a number of pixels")
    return key.changed({(*key.path[:-1], "max_video_pixels"): 2 * value}, "of all frames; ROLL counts two as one")


def row_function(value: Any, key: Key) -> Outcome:
    """Function that makes rows (roll/datasets/vlm_dataset_utils.py); ROLL has one for data with videos."""
    if value is None:
        return key.unneeded("null has no effect")
    if not _makes_video_rows(value):
        return key.refused("custom code that makes rows: compute them by `columns`, or write them to a file")
    columns = {"prompt": "{{ problem }}", "ground_truth": "{{ solution }}"}
    written = {"columns": columns, "videos": "video", "tag": "modality_type"}
    return key.differs(
        "ROLL appends requests for <think> and <answer> tags to prompts, by problem_type: write them in columns.prompt",
        {(*key.path[:-1], name): entry for name, entry in written.items()},
    )


def dataset_type(value: Any, key: Key) -> Outcome:
    """ROLL has loaders for json, arrow, csv, parquet and text (roll/datasets/dataset.py)."""
    if value in ("json", "arrow", "csv", "parquet"):
        return key.unchanged()
    return key.rejected("only json, parquet, csv and arrow files are supported")


# -- roles -------------------------------------------------------------------------------------------------------------


def attention(value: Any, key: Key) -> Outcome:
    """ROLL's values are auto, sdpa and fa2; None means auto (roll/configs/model_args.py)."""
    if value != "sdpa":
        return key.unneeded("auto selects the fastest exact one")
    # Here, sdpa means padded rows, which context parallelism refuses.
    if (key.beside("ulysses_size") or 1) == 1:
        return key.unchanged()
    return key.unneeded("auto is sdpa without padding, which ulysses_size needs")


def lora(value: Any, key: Key) -> Outcome:
    """Options of LoRA, which is enabled if `lora_target` is given."""
    if key.beside("lora_target") is None:
        return key.dead("LoRA is enabled by lora_target")
    if key.role[0] not in ("actor_train", "critic", "sft_train", "student"):
        return key.unneeded("only the trained role has adapters; other roles receive merged weights")
    return key.unchanged()


FROZEN = {
    "vision_model": ["vision", "projector"],
    "visual": ["vision", "projector"],
    "vision_tower": ["vision"],
    "multi_modal_projector": ["projector"],
}
"""Prefixes of parameters, of Megatron's models and of transformers', and the parts that have them."""


def freeze(value: Any, key: Key) -> Outcome:
    """ROLL freezes the parameters whose names have one of these prefixes."""
    if value is None:
        return key.unneeded("nothing is frozen")
    if key.role[0] not in ("actor_train", "sft_train", "student"):
        return key.unneeded("only the trained role has trained parameters")
    names = [name.strip().removeprefix("model.") for name in str(value).split(",")]
    if not all(name in FROZEN for name in names):
        return key.refused(f"only parts of a model with images can be frozen: {', '.join(FROZEN)}")
    parts = [part for part in ("vision", "projector") if any(part in FROZEN[name] for name in names)]
    return key.changed({(*key.role, "model_args", "freeze"): parts}, f"the parts named {', '.join(names)}")


def ulysses_size(value: Any, key: Key) -> Outcome:
    """Only ROLL's fsdp2 strategy reads it."""
    if is_neutral(value, (1,)):
        return key.unneeded("1 disables it")
    return key.renamed({(*key.role, "strategy_args", "strategy_config", "ulysses_size"): value})


BY_SEQUENCE = "roll-core balances each sequence, ROLL each micro-batch"


def moe_aux_loss_coef(value: Any, key: Key) -> Outcome:
    """Megatron's own key takes precedence (model_providers.py). Other strategies add no auxiliary router loss."""
    if is_neutral(value, (0,)):
        return key.unneeded("it has no effect")
    strategy = (*key.role, "strategy_args")
    if not str(key.get(*strategy, "strategy_name")).startswith("megatron"):
        return key.refused(
            "ROLL adds it with Megatron only; moe_aux_loss_coeff of strategy_config does with any strategy"
        )
    for name in ("moe_aux_loss_coeff", "moe_aux_loss_coef"):
        if key.get(*strategy, "strategy_config", name) is not None:
            return key.unneeded(f"{name} of its strategy_config takes precedence, as in ROLL")
    return key.renamed({(*strategy, "strategy_config", "moe_aux_loss_coeff"): value}, BY_SEQUENCE)


def sequence_parallel(value: Any, key: Key) -> Outcome:
    """Keep Megatron's sequence parallelism if there is tensor parallelism."""
    if key.beside("tensor_model_parallel_size") in (None, 1):
        return key.unneeded("it has no effect without tensor parallelism")
    return key.unchanged()


def virtual_pipeline(value: Any, key: Key) -> Outcome:
    """Number of model chunks on each pipeline stage."""
    return key.unneeded("one chunk per stage is a plain pipeline") if is_neutral(value, (1,)) else key.unchanged()


TORCH_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def torch_dtype(value: Any, key: Key) -> Outcome:
    """Convert torch's dtype names to roll-core's; ROLL accepts both spellings."""
    name = str(value).removeprefix("torch.")
    name = TORCH_DTYPES.get(name, name)
    return key.unchanged() if name == value else key.changed({key.path: name})


def fsdp_size(value: Any, key: Key) -> Outcome:
    """A size <= 1 or >= the number of ranks means one group of all ranks (fsdp2_strategy.py)."""
    try:
        ranks = len(parse_device_mapping(key.get(*key.role, "device_mapping")))
    except ValueError:
        ranks = 0
    if isinstance(value, int) and (value <= 1 or 0 < ranks <= value):
        return key.unneeded("without it, all ranks share one copy")
    return key.unchanged()


def world_size(value: Any, key: Key) -> Outcome:
    """ROLL computes it from device_mapping if that is given (roll/configs/worker_config.py)."""
    if key.beside("device_mapping") is not None and key.path[0] != "rewards":
        return key.unneeded("set by device_mapping")
    return key.unchanged()


def num_train_epochs(value: Any, key: Key) -> Outcome:
    """rlvr and distill use `max_steps` instead."""
    if key.pipeline == "distill":
        return key.differs("distill trains max_steps batches of rollout_batch_size rows: set max_steps")
    return key.unchanged() if key.pipeline == "sft" else key.dead("set by max_steps")


# -- distillation ------------------------------------------------------------------------------------------------------


def kd_teacher(value: Any, key: Key) -> Outcome:
    """Temperature of the teacher, 1 by default as that of the student (roll/pipeline/distill/distill_config.py)."""
    student = key.get("kd_temperature") or 1
    if value == student:
        return key.unneeded("kd_temperature applies to both models")
    return key.refused(f"kd_temperature {student} applies to both models")


def logits_topk(value: Any, key: Key) -> Outcome:
    """0 means the whole vocabulary (roll/pipeline/distill/distill_worker.py)."""
    return key.changed({"kd_support": "full"}, "the whole vocabulary") if value == 0 else key.unchanged()


def distill_loss_weight(value: Any, key: Key) -> Outcome:
    """Weight of the divergence; the rest is that of the likelihood (roll/pipeline/distill/distill_worker.py)."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return key.rejected("expected a number")
    if not value:
        return key.rejected("without a divergence it is sft: import it as sft")
    return key.renamed({"kd_coef": float(value), "nll_coef": 1.0 - value}, "their sum is 1")


SPLITS_MODEL = ("tensor_model", "pipeline_model", "context")
"""Kinds of Megatron's parallelism within a replica, whose size is that of a key of `strategy_config`."""


def rows_of_a_step(source: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    """Rows of a batch, which ROLL's distill has for each optimizer step."""
    role = config.get("actor_train", {})
    rows, steps = _rows_of_a_pass(role), lookup(role, "training_args.gradient_accumulation_steps", 1)
    return None if rows is None or not isinstance(steps, int) else rows * steps


def _rows_of_a_pass(role: Mapping[str, Any]) -> int | None:
    """Rows of one micro-batch of each replica of a trained role."""
    keys = lookup(role, "strategy_args.strategy_config") or {}
    try:
        number = len(parse_device_mapping(role.get("device_mapping")))
        number //= prod(int(keys.get(f"{name}_parallel_size", 1)) for name in SPLITS_MODEL)
        number //= int(keys.get("ulysses_size") or lookup(role, "model_args.ulysses_size") or 1)
        return number * int(lookup(role, "training_args.per_device_train_batch_size", 8))
    except (TypeError, ValueError, AttributeError):
        return None


def accumulation(value: Any, key: Key) -> Outcome:
    """ROLL fills a batch with copies of its rows to whole optimizer steps (AgenticPipeline.adjust_batch)."""
    rows = key.get("rollout_batch_size")
    fills = key.pipeline == "agentic" and (key.get("batch_adjust_mode") or "copy") == "copy"
    a_pass = _rows_of_a_pass(key.get("actor_train") or {}) if fills and key.role == ("actor_train",) else None
    if not (a_pass and isinstance(value, int) and isinstance(rows, int)) or rows >= a_pass * value or rows % a_pass:
        return key.unchanged()
    note = f"ROLL fills the batch of {rows} with copies to {a_pass * value} rows; here a step has the {rows}"
    return key.differs(note, {key.path: rows // a_pass})


def mix_precision(value: Any, key: Key) -> Outcome:
    """ROLL reduces gradients in bf16 without it (roll/distributed/strategy/fsdp_strategy.py)."""
    if value or key.beside("reduce_dtype") is not None:
        return key.unneeded("parameters are bf16 and gradients are reduced in fp32" if value else "reduce_dtype has it")
    return key.changed({(*key.path[:-1], "reduce_dtype"): "bf16"})


def is_pure(source: Mapping[str, Any]) -> bool:
    """True for on-policy distillation without rewards in the credit, which has roles of its own names."""
    return source.get("student_train") is not None


def unless_pure(rule: KeyRule) -> KeyRule:
    """Rule for a key that ROLL overwrites in pure distillation (roll/pipeline/rlvr/rlvr_config.py)."""

    def convert(value: Any, key: Key) -> Outcome:
        return key.dead("ROLL overwrites it in pure distillation") if is_pure(key.source) else rule(value, key)

    return KeyRule(f"as in `rlvr` with use_opd: {rule.says}; otherwise ROLL overwrites it", convert)


def use_opd(value: Any, key: Key) -> Outcome:
    """The advantages of rewards are added to those of the teacher (compute_advantage of rlvr_pipeline.py)."""
    if not value or is_pure(key.source):
        return key.unneeded("without rewards, task_coef is 0")
    return key.renamed({"task_coef": 1.0}, "the weight of the advantages of rewards")


def opd_kl_coef(value: Any, key: Key) -> Outcome:
    """Weight of a teacher, 1 by default (roll/configs/worker_config.py). Here all teachers have one."""
    teachers = key.get("teachers") or {}
    weights = {value_at(teacher, ("opd_kl_coef",)) or 1.0 for teacher in teachers.values()}
    if len(weights) > 1:
        texts = ", ".join(f"{weight:g}" for weight in sorted(weights))
        return key.rejected(f"the teachers have weights {texts}: kd_coef is one for all")
    return key.renamed("kd_coef", "the weight of all teachers")


# -- rewards -----------------------------------------------------------------------------------------------------------

REWARDS = {
    "MathRuleRewardWorker": "math_rule",
    "CodeSandboxRewardWorker": "code",
    "GeneralRuleRewardWorker": "ifeval",
    "CrossThinkQARuleRewardWorker": "crossthink_qa",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
}
"""ROLL's worker class -> the reward here, of roll-core or roll-rewards."""
JUDGE = "LLMJudgeRewardWorker"
"""Becomes the reward `judge` if it uses an API."""
MODULE = "imported_rewards"
"""Module in which users write functions that replace ROLL's rewards without an equivalent here."""
OTHER_VALUES = {
    "ifeval": "ROLL adds a penalty of repetitions: a `composite` with `repetition_penalty`, ngram_size 3 and"
    " max_penalty -0.5, has both",
    "crossthink_qa": "1 or 0 here; in ROLL 1 to -1 by `reward_type`, plus a penalty of repetitions",
    "multiple_choice": r"ROLL's needs \boxed{…}; here other marks of an answer count too",
}
"""Rewards whose values differ from those of ROLL's workers (roll/pipeline/rlvr/rewards)."""


def reward_of(key: Key) -> str:
    """roll-core's reward for the `rewards.<domain>` of a key; empty if there is none."""
    reward = key.get(*key.role)
    if not isinstance(reward, Mapping):
        return ""
    worker = str(reward.get("worker_cls")).rpartition(".")[2]
    if worker == JUDGE and reward.get("judge_model_type") == "api":
        return "judge"
    return REWARDS.get(worker, "")


def reward_worker(value: Any, key: Key) -> Outcome:
    """In ROLL the worker class determines the reward (roll/pipeline/rlvr/rewards)."""
    if reward := reward_of(key):
        target = {(*key.role, "reward"): reward}
        return key.differs(OTHER_VALUES[reward], target) if reward in OTHER_VALUES else key.renamed(target)
    name = re.sub(r"\W", "_", key.path[1])
    name = f"_{name}" if name[:1].isdigit() else name
    target = {(*key.role, "reward"): "function", (*key.role, "function"): f"{MODULE}:{name}"}
    return key.lacking(f"write {name}(prompt, response, **columns) in {MODULE}.py", target)


def judge_api(value: Any, key: Key) -> Outcome:
    """The API of a judge."""
    return key.unchanged() if reward_of(key) == "judge" else of_reward_worker(value, key)


def judge_prompt(value: Any, key: Key) -> Outcome:
    """ROLL selects one of its own prompts by name."""
    note = "a name of ROLL's prompts: write the text of judge_prompt, see docs/rewards.md"
    return key.lacking(note) if reward_of(key) == "judge" else of_reward_worker(value, key)


def reward_type(value: Any, key: Key) -> Outcome:
    """Only CrossThinkQARuleRewardWorker reads it."""
    note = "ROLL's values of right and wrong answers; here 1 and 0"
    return key.differs(note) if reward_of(key) == "crossthink_qa" else of_reward_worker(value, key)


def response_length_penalty_coef(value: Any, key: Key) -> Outcome:
    """Only CrossThinkQARuleRewardWorker adds the result to its reward."""
    if reward_of(key) != "crossthink_qa":
        return key.dead("ROLL discards the result")
    if not value:
        return key.unneeded("0 has no effect")
    return key.differs("not converted: ROLL adds a penalty of responses below 400 tokens")


def code_url(value: Any, key: Key) -> Outcome:
    """The service in which ROLL runs programs."""
    if reward_of(key) == "code" and value:
        return key.differs("programs run in a sandbox: see sandbox_command and sandbox_url")
    return of_reward_worker(value, key)


def of_reward_worker(value: Any, key: Key) -> Outcome:
    """Keys that only ROLL's reward worker reads."""
    if reward_of(key):
        return key.unneeded("a rule has no model and no devices")
    return key.lacking("your function replaces it")


# -- environments ------------------------------------------------------------------------------------------------------


def env_type(value: Any, key: Key) -> Outcome:
    """Name of an environment. `check` rejects names that no installed package provides."""
    return key.renamed({(*key.path[:-1], "environment"): value}, "its prompts differ from ROLL's")


def env_config(value: Any, key: Key) -> Outcome:
    """Options of the environments that both have; those of others are kept.

    ROLL's slippery ice is gymnasium's: two of three moves go to one of the sides. `p` is the probability of ice.
    """
    kind = key.beside("env_type")
    if not isinstance(value, dict) or kind not in BOARDS:
        return key.unchanged()
    options: dict[str, Any] = {}
    if kind == "sokoban":
        room = value.get("dim_room")
        if isinstance(room, list) and len(room) == 2:
            options |= {"rows": room[0], "columns": room[1]}
        if "num_boxes" in value:
            options["boxes"] = value["num_boxes"]
    else:
        if "size" in value:
            options["size"] = value["size"]
        if isinstance(value.get("p"), int | float):
            options["holes"] = round(1 - value["p"], 6)
        if value.get("is_slippery"):
            options["slippery"] = round(2 / 3, 6)
    if value.get("render_mode") == "rgb_array":
        options["observation"] = "image"
    note = f"options of {kind} here: {', '.join(options) or 'none given'}; its other options are ROLL's own"
    return key.changed({key.path: options} if options else {}, note)


def env_concurrency(value: Any, key: Key) -> Outcome:
    """ROLL limits concurrent steps, roll-core concurrent episodes of an environment."""
    if not value:
        return key.unneeded("0 has no limit")
    return key.renamed({(*key.path[:-1], "concurrency"): value}, "limits episodes, not steps")


def env_manager(value: Any, key: Key) -> Outcome:
    """The class that runs an episode."""
    if str(value).endswith(".TrajEnvManager"):
        return key.unneeded("episodes are trained on as whole trajectories")
    if str(value).endswith(".VLTrajEnvManager") and key.beside("env_type") in BOARDS:
        return key.unneeded("episodes are trained on as whole trajectories; messages have the images")
    return key.refused("only TrajEnvManager has an equivalent, and VLTrajEnvManager with sokoban or frozen_lake")


def llm_proxy(value: Any, key: Key) -> Outcome:
    """What answers an environment: the policy, or a service."""
    if not isinstance(value, dict) or value.get("proxy_type", "policy") == "policy":
        return key.unneeded("the policy generates the replies")
    return key.refused("only the policy generates replies")


def group_filter(value: Any, key: Key) -> Outcome:
    """ROLL's own class keeps all groups."""
    return key.unneeded("it keeps all groups") if str(value).startswith("roll.") else key.refused("custom code")


TURN_ESTIMATORS = ("step_reinforce", "gigpo", "agentic_reinforce")
"""Estimators that do not read `norm_mean_type` and `norm_std_type`."""


def _normalisation(key: Key) -> tuple[str, str]:
    """`method` and `grouping` of ROLL's reward_normalization. `asym_clip` computes the same as `mean_std`."""
    settings = key.get("reward_normalization")
    settings = settings if isinstance(settings, dict) else {}
    method, grouping = str(settings.get("method", "identity")), str(settings.get("grouping", "state"))
    return {"asym_clip": "mean_std"}.get(method, method), {"traj_group_id": "group"}.get(grouping, grouping)


def agentic_estimator(value: Any, key: Key) -> Outcome:
    """In ROLL's agentic pipeline grpo is the return of rewards that `reward_normalization` normalises."""
    if value == "grpo" and _normalisation(key) != ("mean_std", "group"):
        return key.changed({key.path: "reinforce"}, "grpo normalises by group; ROLL uses reward_normalization")
    return key.unchanged()


def reward_normalization(value: Any, key: Key) -> Outcome:
    """Normalisation of rewards, by the estimator that reads it (agentic_reward_norm in roll/pipeline/agentic)."""
    estimator, (method, grouping) = key.get("adv_estimator"), _normalisation(key)
    by_norm_type = isinstance(value, dict) and bool({"norm_mean_type", "norm_std_type"} & value.keys())
    if not by_norm_type and method in ("identity", "mean", "mean_std"):
        if estimator == "step_reinforce" and grouping in ("batch", "group", "state"):
            return key.changed({"adv_options.method": method, "adv_options.grouping": grouping})
        if estimator == "gigpo" and grouping in ("group", "state") and method != "identity":
            mode = "mean_std_norm" if method == "mean_std" else "mean_norm"
            return key.changed({"adv_options.mode": mode}, "episodes are compared within their group")
        if estimator == "agentic_reinforce" and method == "identity":
            return key.unneeded("agentic_reinforce does not normalise rewards")
        if estimator == "grpo" and (method, grouping) == ("mean_std", "group"):
            return key.unneeded("grpo normalises by group")
        if estimator not in TURN_ESTIMATORS and (method == "identity" or grouping in ("batch", "group")):
            names = {"identity": (), "mean": ("norm_mean_type",), "mean_std": ("norm_mean_type", "norm_std_type")}
            return key.changed(dict.fromkeys(names[method], grouping))
    return key.refused("this estimator has no such normalisation")


def turn_option(value: Any, key: Key) -> Outcome:
    """Weights and discount of the estimators that credit turns."""
    readers = {"gigpo"} | ({"step_reinforce"} if key.name == "step_reward_gamma" else set())
    if key.get("adv_estimator") not in readers:
        return key.dead("the estimator does not read it")
    return key.renamed(f"adv_options.{key.name}")


# -- Reward-FL ---------------------------------------------------------------------------------------------------------


def mid_timestep(value: Any, key: Key) -> Outcome:
    """Reward-FL had gradients from step `mid_timestep` to step `final_timestep`, counted from 0."""
    final = key.beside("final_timestep")
    final = 7 if final is None else final
    if not isinstance(value, int) or not isinstance(final, int) or not 0 <= value <= final:
        return key.rejected(f"expected a step from 0 to final_timestep {final}")
    return key.changed({"objective_options.grad_steps": final - value + 1}, f"{final} - {value} + 1")


def final_timestep(value: Any, key: Key) -> Outcome:
    """Reward-FL decoded the sample after step `final_timestep`."""
    steps = key.beside("num_inference_steps")
    steps = 8 if steps is None else steps
    if not isinstance(value, int) or not isinstance(steps, int) or not 0 <= value < steps:
        return key.rejected(f"expected a step below num_inference_steps {steps}")
    if value == steps - 1:
        return key.unneeded("the last step, where `stop: last` stops")
    stop = {"objective_options.stop": "uniform", "objective_options.stop_range": [value, value + 1]}
    return key.changed(stop, "the trajectory stops there")
