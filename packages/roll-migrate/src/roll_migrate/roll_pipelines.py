"""Recognises the ROLL pipeline of a config. ROLL's files do not name it: each pipeline has its own launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError
from roll_migrate.rules import value_at
from roll_migrate.shared_rules import reads_images

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.config.positions import Positions

AGENTIC_KEYS = ("train_env_manager", "val_env_manager", "custom_envs")
SIGNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("sft", "", ("sft_train",)),
    (
        "on-policy distillation",
        "on-policy distillation of agents",
        ("student_train", "student_infer", "pure_opd_pipeline_type", "use_opd"),
    ),
    ("agentic", "", AGENTIC_KEYS),
    ("distill", "", ("student", "teacher", "student_pretrain", "teacher_pretrain")),
    ("dpo", "", ("chosen_key", "rejected_key", "ipo", "beta", "label_smoothing")),
    ("rlvr", "", ("rewards",)),
)
"""Pipelines in the order of detection: ROLL's name, what distinguishes it, and keys that only it has."""
ON_POLICY = "on-policy distill"
"""Name of the tables of ROLL's on-policy distillation, whose pipeline here is `distill`."""
IMPORTABLE = {
    "rlvr": "rlvr",
    "sft": "sft",
    "dpo": "preference",
    "distill": "distill",
    "agentic": "agentic",
    "on-policy distillation": ON_POLICY,
    "Reward-FL": "reward_flow",
}
"""ROLL's pipelines that are imported, and the names of their tables: roll-core's pipelines, and `ON_POLICY`."""
REWARD_FL_STRATEGY = "diffusion_deepspeed_train"
OF_OTHER_MEDIA = ("video", "audio")
WITHOUT_IMAGES = ("agentic", "on-policy distillation", "Reward-FL")
"""Pipelines whose configs with images are not imported."""
MODELS = ("pretrain", "model_name_or_path", "template", "reward_pretrain", "student_pretrain", "teacher_pretrain")
"""Keys whose values tell whether a model reads images."""
REWARDS_OF_VIDEO = ("VideoR1RewardWorker",)


def recognise(data: Mapping[str, Any], written: Positions) -> str:
    """Return the name of a config's tables, see `IMPORTABLE`.

    Raises `UnsupportedError`, with the decisive key, if there is none.
    """
    name, lacks, seen = _kind(data)
    if name and (of_images := _of_images(data, others_only=name not in WITHOUT_IMAGES)):
        name, lacks, seen = f"{name.removesuffix(' with images')} with images", "images or video", of_images
    has_environments = any(data.get(key) for key in AGENTIC_KEYS)
    of_agents = name == "on-policy distillation" and (
        has_environments or data.get("pure_opd_pipeline_type") == "agentic"
    )
    if name in IMPORTABLE and not of_agents:
        return IMPORTABLE[name]
    if not name:
        raise UnsupportedError(
            f"{written.name} is not a ROLL config for {' or '.join(IMPORTABLE)}: it has neither sft_train, nor student"
            " and teacher, nor rewards, actor_train and actor_infer, nor actor_train and reference"
        )
    raise UnsupportedError(
        f"{written.key(seen)}: {'.'.join(seen)} belongs to ROLL's {name} pipeline, which cannot be imported: roll-core"
        f" has no pipeline with {lacks}. Supported pipelines: {', '.join(IMPORTABLE)} (docs/from-roll.md)"
    )


def _kind(data: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    strategy = ("actor_train", "strategy_args", "strategy_name")
    if value_at(data, strategy) == REWARD_FL_STRATEGY:
        return "Reward-FL", "", strategy
    kind: tuple[str, str, tuple[str, ...]] = ("", "", ())
    for name, lacks, keys in SIGNS:
        present = [key for key in keys if data.get(key) not in (None, False)]
        if present:
            kind = (name, lacks, (present[0],))
            break
    if not kind[0] and data.get("actor_train") is not None and data.get("reference") is not None:
        return "dpo", "", ("reference",)
    if kind[0] != "rlvr":
        return kind
    if only_evaluates(data):
        return kind
    if data.get("actor_train") is None:
        return "rollout-only", "rollouts but no training", ("actor_infer",) if "actor_infer" in data else ("rewards",)
    for domain, reward in (data["rewards"] if isinstance(data["rewards"], dict) else {}).items():
        if str(value_at(reward, ("worker_cls",))).endswith(REWARDS_OF_VIDEO):
            return "rlvr with images", "images or video", ("rewards", str(domain), "worker_cls")
    return kind


def only_evaluates(data: Mapping[str, Any]) -> bool:
    """True for ROLL's rollout-only pipeline, which scores responses to the rows of `validation` and ends."""
    return data.get("actor_train") is None and bool(data.get("rewards")) and bool(data.get("validation"))


def has_images(data: Mapping[str, Any]) -> bool:
    """True if a model or a template reads images, by its name."""
    return bool(_of_images(data, others_only=False))


def _of_images(data: Mapping[str, Any], path: tuple[str, ...] = (), *, others_only: bool) -> tuple[str, ...]:
    """Path of the first key that names a model with images, or a column of video or audio; empty without one."""
    for name, value in data.items():
        here = (*path, str(name))
        if isinstance(value, dict):
            if inner := _of_images(value, here, others_only=others_only):
                return inner
        elif (name in MODELS and not others_only and reads_images(value)) or (
            "data_args" in path and str(name).startswith(OF_OTHER_MEDIA) and value is not None
        ):
            return here
    return ()
