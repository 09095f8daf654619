"""Runs of the pipeline `reward_flow` with a random model of one layer on images of 4 × 4 pixels."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from shared_tests.runs import PipelineRuns

MODEL = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 4,
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 3,
    "num_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 8,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 8,
    "pos_embed_max_size": 4,
}
REWARDS = """
def red(pixels, columns):
    return pixels[:, 0].mean((1, 2)) - columns["level"]

def sometimes(images, prompts, rows):
    failed = {"failure": "blue"}
    return [failed if "blue" in prompt else float(image.mean()) for image, prompt in zip(images, prompts)]

def moving(images, prompts, rows):
    return [float(len(video)) for video in images]

def broken(images, prompts, rows):
    raise RuntimeError("no idea")
"""
RED = {"reward": "image_function", "function": "imagerewards:red", "differentiable": True, "numbers": ["level"]}
LORA = {"lora_target": ["to_q", "to_v"], "lora_rank": 4}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "refl": {},
    "flow_grpo": {"window": "random", "window_options": {"size": 2}},
    "nft": {"ema_decay": 0.5, "objective_options": {"kl_coef": 0.0}, "ppo_epochs": 2},
    "flow_matching": {},
    "diffusion_dpo": {},
}


def flow_runs(folder: Path) -> PipelineRuns:
    """Runs in this process, with rows, images and the module `imagerewards`; `folder` must be on the module path."""
    from PIL import Image

    from shared_tests.runs import PipelineRuns

    (folder / "imagerewards.py").write_text(REWARDS, encoding="utf-8")
    sys.modules.pop("imagerewards", None)
    rng = np.random.default_rng(0)
    for name in range(8):
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(folder / f"{name}.png")
    rows = [
        {"prompt": f"{colour} {place}", "image": f"{at}.png", "chosen": f"{at}.png", "rejected": "0.png", "level": 0.1}
        for at, (colour, place) in enumerate([(c, p) for c in ("red", "green", "blue") for p in ("left", "right")], 1)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return PipelineRuns(folder, "local")


def flow_config(runs: PipelineRuns, objective: str, **given: Any) -> dict[str, Any]:
    """Config of a run of an objective."""
    base = runs.base("reward_flow")
    for key in ("tokenizer", "prompt_length", "response_length"):
        del base[key]
    rewards = {"red": RED} if objective in ("refl", "flow_grpo", "nft") else {}
    config = (
        base
        | {
            "objective": objective,
            "max_steps": 3,
            "height": 4,
            "width": 4,
            "num_inference_steps": 4,
            "prompt_encoder": "words",
            "prompt_tokens": 2,
            "rollout_batch_size": 3,
            "num_images_per_prompt": 4,
            "rewards": rewards,
            "actor_train": {
                "model_args": runs.model() | {"random_init": MODEL},
                "training_args": {
                    "learning_rate": 3e-3,
                    "lr_scheduler_type": "constant",
                    "per_device_train_batch_size": 12,
                },
                "data_args": {"file_name": str(runs.folder / "rows.jsonl")},
                "strategy_args": {"strategy_name": "hf_train"},
                "device_mapping": [0],
            },
        }
        | OBJECTIVES.get(objective, {})
        | given
    )
    if objective == "diffusion_dpo":
        config["actor_train"]["model_args"] |= LORA
    return config


def validated(runs: PipelineRuns) -> dict[str, Any]:
    """`validation` on the same rows."""
    return {"data_args": {"file_name": str(runs.folder / "rows.jsonl")}, "num_images_per_prompt": 2}
