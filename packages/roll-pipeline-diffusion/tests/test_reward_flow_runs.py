"""Runs of the pipeline `reward_flow` with a random model of one layer on images of 4 × 4 pixels."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from roll_core.errors import GuardTrippedError, RollError
from roll_testing.errors import mentions

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

def broken(images, prompts, rows):
    raise RuntimeError("no idea")
"""
RED = {"reward": "image_function", "function": "imagerewards:red", "differentiable": True, "numbers": ["level"]}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs in this process, with rows and images."""
    pytest.importorskip("diffusers")
    from PIL import Image

    from roll_testing.runs import Runs

    (tmp_path / "imagerewards.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in range(8):
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).save(tmp_path / f"{name}.png")
    rows = [
        {"prompt": f"{colour} {place}", "image": f"{at}.png", "chosen": f"{at}.png", "rejected": "0.png", "level": 0.1}
        for at, (colour, place) in enumerate([(c, p) for c in ("red", "green", "blue") for p in ("left", "right")], 1)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return Runs(tmp_path, "local")


def config(runs, objective, **given):
    base = runs.base("reward_flow")
    for key in ("tokenizer", "prompt_length", "response_length"):
        del base[key]
    rewards = {"red": RED} if objective in ("refl", "flow_grpo", "nft") else {}
    return (
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
        | given
    )


LORA = {"lora_target": ["to_q", "to_v"], "lora_rank": 4}
OBJECTIVES = {
    "refl": {},
    "flow_grpo": {"window": "random", "window_options": {"size": 2}},
    "nft": {"ema_decay": 0.5, "objective_options": {"kl_coef": 0.0}},
    "flow_matching": {},
    "diffusion_dpo": {},
}


def of(runs, objective, **given):
    found = config(runs, objective, **{**OBJECTIVES[objective], **given})
    if objective == "diffusion_dpo":
        found["actor_train"]["model_args"] |= LORA
    return found


def validated(runs):
    return {"data_args": {"file_name": str(runs.folder / "rows.jsonl")}, "num_images_per_prompt": 2}


def test_reward_backpropagation_raises_the_held_out_reward_and_shows_the_images(runs):
    result = runs.ok(of(runs, "refl", max_steps=8, eval_steps=8, validation=validated(runs)))
    lines = runs.metrics(result)
    assert lines[-1]["val/score/mean"] > lines[0]["val/score/mean"] + 0.02
    assert math.isfinite(lines[1]["train/score"])
    page = result.run_dir.report.read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 24
    assert f"reward {lines[-1]['val/score/mean']:.3f}"[:6] in page
    assert (result.run_dir.export / "config.json").is_file()
    assert not result.run_dir.tokenizer.exists()


def test_the_first_ratio_is_one_and_failed_rewards_have_no_vote(runs):
    rewards = {"red": RED, "other": {"reward": "image_function", "function": "imagerewards:sometimes"}}
    given = of(runs, "flow_grpo", rewards=rewards, max_steps=1, guards={"reward_failures": "warn"}, shuffle=False)
    given["rollout_batch_size"] = 6
    given["actor_train"]["training_args"]["per_device_train_batch_size"] = 24
    (line,) = runs.metrics(runs.ok(given))
    assert line["train/ratio"] == pytest.approx(1, abs=1e-6)
    assert line["reward_failures"] == 8  # of the two blue prompts
    assert line["train/images"] == 16
    assert line["score/mean"] == pytest.approx(line["score/red/mean"] + line["score/other/mean"])


def test_a_reward_that_always_fails_ends_the_run_with_its_name(runs):
    rewards = {"other": {"reward": "image_function", "function": "imagerewards:broken"}}
    result = runs.run(of(runs, "flow_grpo", rewards=rewards))
    assert isinstance(result.error, GuardTrippedError)
    assert mentions(str(result.error), "reward_failures", "imagerewards:broken")


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [("height", 5, "5"), ("num_frames", 5, "5"), ("objective", "refl", "imagerewards:broken")],
)
def test_what_the_model_or_the_reward_cannot_do_ends_the_run_before_a_model_is_built(
    runs, monkeypatch, key, value, named
):
    from roll_strategy_hf.train import HFTrainStrategy

    monkeypatch.setattr(HFTrainStrategy, "build", lambda *_: pytest.fail("a model was built"))
    rewards = {"other": {"reward": "image_function", "function": "imagerewards:broken"}}
    result = runs.run(of(runs, "flow_grpo", rewards=rewards) | {key: value})
    assert isinstance(result.error, RollError)
    assert named in str(result.error) or key == "objective"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(runs, objective):
    import torch
    from safetensors.torch import load_file

    validation = {"eval_steps": 2, "validation": validated(runs)} if objective != "diffusion_dpo" else {}
    whole = runs.ok(of(runs, objective, exp_name="whole", max_steps=4, save_steps=4, **validation))
    first = runs.ok(of(runs, objective, exp_name="halves", max_steps=4, save_steps=2, **validation))
    checkpoint = first.run_dir.checkpoints / "step-2"
    again = of(runs, objective, exp_name="halves", max_steps=4, save_steps=4, **validation)
    second = runs.ok(again | {"resume_from_checkpoint": str(checkpoint)})
    assert runs.timeless(second) == runs.timeless(whole)
    if validation:
        assert second.run_dir.images.read_text() == whole.run_dir.images.read_text()
    one, other = (load_file(each.run_dir.export / "diffusion_pytorch_model.safetensors") for each in (whole, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_whose_rewards_all_fail_trains_on_nothing(runs):
    rewards = {"other": {"reward": "image_function", "function": "imagerewards:broken"}}
    given = of(runs, "flow_grpo", rewards=rewards, max_steps=1, guards={"reward_failures": "warn"})
    (line,) = runs.metrics(runs.ok(given))
    assert (line["reward_failures"], line["train/images"]) == (12, 0)
    assert "train/loss" not in line


def test_refl_with_a_pretraining_term_reads_the_images(runs):
    given = of(runs, "refl", objective_options={"pretrain_loss_coef": 0.1}, max_steps=1)
    (line,) = runs.metrics(runs.ok(given))
    assert line["train/images"] == 12
    assert line["train/pretrain_loss"] > 0


def test_a_student_learns_its_teachers_velocities(runs):
    exported = runs.ok(of(runs, "flow_matching", exp_name="teacher", max_steps=6)).run_dir.export
    teacher = {
        "model_args": {"dtype": "fp32", "model_name_or_path": str(exported)},
        "strategy_args": {"strategy_name": "hf_infer"},
        "device_mapping": [0],
    }
    given = config(runs, "distill", teacher=teacher, max_steps=8, objective_options={"loss": "velocity"})
    lines = runs.metrics(runs.ok(given))
    assert lines[-1]["train/velocity_error"] < lines[0]["train/velocity_error"]


def test_guidance_and_adapters_train(runs):
    given = of(runs, "flow_grpo", guidance_scale=2.0, objective_options={"kl_coef": 0.01}, max_steps=2)
    given["actor_train"]["model_args"] |= LORA
    lines = runs.metrics(runs.ok(given))
    assert lines[0]["train/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert lines[1]["train/kl_loss"] > 0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("objective", ["flow_grpo", "nft"])
def test_two_ranks_of_fsdp2_equal_one_of_hf_train(runs, monkeypatch, objective):
    monkeypatch.setenv("PYTHONPATH", str(runs.folder))
    given = of(runs, objective, max_steps=2, eval_steps=2, validation=validated(runs))
    expected = runs.learnt(runs.ok(given))
    found = runs.learnt(runs.ok(runs.on_ranks(given, "fsdp2", 2, replicas=2)))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
