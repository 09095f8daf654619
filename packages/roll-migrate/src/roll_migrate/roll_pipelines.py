"""Recognises the ROLL pipeline of a config. ROLL's files do not name it: each pipeline has its own launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.errors import UnsupportedError
from roll_migrate.rules import value_at
from roll_migrate.shared_rules import reads_images, refuse_audio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
WITHOUT_IMAGES = {
    "agentic": "only sokoban and frozen_lake are converted with images: write env_config, see docs/agentic.md",
    "on-policy distillation": "ROLL's reads none; roll-core's pipeline distill does, see docs/vision.md",
    "Reward-FL": "a flow model is trained without them",
}
"""Pipelines whose configs with images are not imported, and why."""
BOARDS = ("sokoban", "frozen_lake")
"""Environments that both have, and that show text or images."""
MODELS = ("pretrain", "model_name_or_path", "template", "reward_pretrain", "student_pretrain", "teacher_pretrain")
"""Keys whose values tell whether a model reads images."""
VIDEO_KEYS = ("video_key", "video_folder")
"""Keys of `data_args` of rows with videos."""


def recognise(data: Mapping[str, Any], written: Positions) -> str:
    """Return the name of a config's tables, see `IMPORTABLE`.

    Raises `UnsupportedError`, with the decisive key, if there is none.
    """
    name, lacks, seen = _kind(data)
    refuse_audio({str(written.key(path)): value for path, value in _keys(data) if path[-1] in MODELS})
    for path, value in _keys(data):
        if "data_args" in path and path[-1].startswith("audio") and value is not None:
            raise UnsupportedError(f"{written.key(path)}: {'.'.join(path)}: rows with audio are not supported")
    refused = name in WITHOUT_IMAGES and not (name == "agentic" and _has_boards_alone(data))
    if refused and (of_images := next(_of_images(data), None)):
        decisive = (_unknown_environment(data) if name == "agentic" else None) or of_images
        where = f"{written.key(decisive)}: {'.'.join(decisive)}"
        raise UnsupportedError(f"{where} belongs to ROLL's {name} pipeline with images: {WITHOUT_IMAGES[name]}")
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
    return kind


def only_evaluates(data: Mapping[str, Any]) -> bool:
    """True for ROLL's rollout-only pipeline, which scores responses to the rows of `validation` and ends."""
    return data.get("actor_train") is None and bool(data.get("rewards")) and bool(data.get("validation"))


def _has_boards_alone(data: Mapping[str, Any]) -> bool:
    environments = data.get("custom_envs")
    return isinstance(environments, dict) and bool(environments) and _unknown_environment(data) is None


def _unknown_environment(data: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Path of the first environment that is no board."""
    environments = data.get("custom_envs")
    if not isinstance(environments, dict):
        return None
    for tag, environment in environments.items():
        if not isinstance(environment, dict):
            return ("custom_envs", str(tag))
        if environment.get("env_type") not in BOARDS:
            return ("custom_envs", str(tag), "env_type")[: 2 + ("env_type" in environment)]
    return None


def has_images(data: Mapping[str, Any]) -> bool:
    """True if a model or a template reads images, by its name, or if a run of rlvr freezes an image encoder."""
    return next(_of_images(data), None) is not None


def has_videos(data: Mapping[str, Any]) -> bool:
    """True if rows have videos."""
    return any("data_args" in path and path[-1] in VIDEO_KEYS and value is not None for path, value in _keys(data))


def _of_images(data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the keys that tell of images or videos."""
    is_rlvr = _kind(data)[0] == "rlvr"
    for path, value in _keys(data):
        prefix = str(value).removeprefix("model.")
        freezes = is_rlvr and path[-1] == "freeze_module_prefix" and prefix.startswith(("vision", "visual"))
        columns = "data_args" in path and path[-1] in VIDEO_KEYS and value is not None
        if (path[-1] in MODELS and reads_images(value)) or freezes or columns:
            yield path


def _keys(data: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and value of each key whose value is not a mapping."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from _keys(value, (*path, str(name)))
        else:
            yield (*path, str(name)), value
