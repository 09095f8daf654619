"""Recognises the ROLL pipeline of a config. ROLL's files do not name it: each pipeline has its own launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError
from roll_migrate.rules import value_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.config.positions import Positions

SIGNS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("sft", "", ("sft_train",)),
    ("agentic", "environments and agents", ("train_env_manager", "val_env_manager", "custom_envs")),
    ("on-policy distillation", "", ("student_train", "student_infer", "pure_opd_pipeline_type", "use_opd")),
    ("distill", "", ("student", "teacher", "student_pretrain", "teacher_pretrain")),
    ("dpo", "", ("chosen_key", "rejected_key", "ipo", "label_smoothing")),
    ("rlvr with images", "images or video", ("vlm_filter",)),
    ("rlvr", "", ("rewards",)),
)
"""Pipelines in the order of detection: ROLL's name, what distinguishes it, and keys that only it has."""
IMPORTABLE = ("rlvr", "sft")
OF_IMAGES = ("image", "video", "audio")
REWARDS_OF_IMAGES = ("DetectionRewardWorker", "VideoR1RewardWorker")


def recognise(data: Mapping[str, Any], written: Positions) -> str:
    """Return roll-core's pipeline for a config. Raises `UnsupportedError`, with the decisive key, if there is none."""
    name, lacks, seen = _kind(data)
    if name in IMPORTABLE:
        return name
    if not name:
        raise UnsupportedError(
            f"{written.name} is not a ROLL config for {' or '.join(IMPORTABLE)}: it has neither sft_train"
            " nor rewards, actor_train and actor_infer"
        )
    ours = {"dpo": "preference", "distill": "distill", "on-policy distillation": "distill"}.get(name)
    reason = f"write a config for pipeline {ours}" if ours else f"roll-core has no pipeline with {lacks}"
    raise UnsupportedError(
        f"{written.key(seen)}: {'.'.join(seen)} belongs to ROLL's {name} pipeline, which cannot be imported: {reason}."
        f" Supported pipelines: {', '.join(IMPORTABLE)} (docs/from-roll.md)"
    )


def _kind(data: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    found: tuple[str, str, tuple[str, ...]] = ("", "", ())
    for name, lacks, keys in SIGNS:
        present = [key for key in keys if data.get(key) not in (None, False)]
        if present:
            found = (name, lacks, (present[0],))
            break
    if found[0] != "rlvr":
        return found
    if data.get("actor_train") is None:
        return "rollout-only", "rollouts but no training", ("actor_infer",) if "actor_infer" in data else ("rewards",)
    columns = value_at(data, ("actor_train", "data_args"))
    for key in columns if isinstance(columns, dict) else ():
        if str(key).startswith(OF_IMAGES):
            return "rlvr with images", "images or video", ("actor_train", "data_args", str(key))
    for domain, reward in (data["rewards"] if isinstance(data["rewards"], dict) else {}).items():
        if str(value_at(reward, ("worker_cls",))).endswith(REWARDS_OF_IMAGES):
            return "rlvr with images", "images or video", ("rewards", str(domain), "worker_cls")
    return found
