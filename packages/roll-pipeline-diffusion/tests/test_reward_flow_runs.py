"""Runs of the pipeline `reward_flow` with a random model of one layer on images of 4 × 4 pixels."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys

import pytest

from roll_core.errors import GuardTrippedError, NonFiniteError
from roll_testing.errors import mentions
from shared_tests.flow_runs import LORA, OBJECTIVES, RED, flow_config, flow_runs, validated


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs in this process, with rows and images."""
    pytest.importorskip("diffusers")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return flow_runs(tmp_path)


def test_reward_backpropagation_raises_the_held_out_reward(runs):
    result = runs.ok(flow_config(runs, "refl", max_steps=8, eval_steps=8, validation=validated(runs)))
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
    given = flow_config(
        runs, "flow_grpo", rewards=rewards, max_steps=1, guards={"reward_failures": "warn"}, shuffle=False
    )
    given["rollout_batch_size"] = 6
    given["actor_train"]["training_args"]["per_device_train_batch_size"] = 24
    (line,) = runs.metrics(runs.ok(given))
    assert line["train/ratio"] == pytest.approx(1, abs=1e-6)
    assert line["reward_failures"] == 8  # of the two blue prompts
    assert line["train/images"] == 16
    assert line["score/mean"] == pytest.approx(line["score/red/mean"] + line["score/other/mean"])


def test_a_reward_that_always_fails_ends_the_run_with_its_name(runs):
    rewards = {"other": {"reward": "image_function", "function": "imagerewards:broken"}}
    result = runs.run(flow_config(runs, "flow_grpo", rewards=rewards))
    assert isinstance(result.error, GuardTrippedError)
    assert mentions(str(result.error), "reward_failures", "imagerewards:broken")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(runs, objective):
    import torch
    from safetensors.torch import load_file

    validation = {"eval_steps": 2, "validation": validated(runs)} if objective != "diffusion_dpo" else {}
    whole = runs.ok(flow_config(runs, objective, exp_name="whole", max_steps=4, save_steps=2, **validation))
    checkpoint = whole.run_dir.checkpoints / "step-2"
    again = flow_config(runs, objective, exp_name="resumed", max_steps=4, save_steps=4, **validation)
    second = runs.ok(again | {"resume_from_checkpoint": str(checkpoint)})
    assert runs.timeless(second) == runs.timeless(whole)
    if validation:
        assert second.run_dir.images.read_text() == whole.run_dir.images.read_text()
    one, other = (load_file(each.run_dir.export / "diffusion_pytorch_model.safetensors") for each in (whole, second))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_whose_rewards_all_fail_trains_on_nothing(runs):
    rewards = {"other": {"reward": "image_function", "function": "imagerewards:broken"}}
    given = flow_config(runs, "flow_grpo", rewards=rewards, max_steps=1, guards={"reward_failures": "warn"})
    (line,) = runs.metrics(runs.ok(given))
    assert (line["reward_failures"], line["train/images"]) == (12, 0)
    assert "train/loss" not in line


def test_equal_rewards_trip_the_guard_of_a_missing_signal(runs):
    rewards = {"same": {"reward": "image_function", "function": "imagerewards:moving"}}
    given = flow_config(runs, "flow_grpo", rewards=rewards, max_steps=1, guards={"all_groups_filtered": "error"})
    result = runs.run(given)
    assert isinstance(result.error, GuardTrippedError)
    assert mentions(str(result.error), "all_groups_filtered")


def test_the_learning_rate_of_several_epochs_ends_with_the_run(runs):
    given = flow_config(runs, "flow_matching", ppo_epochs=2, max_steps=4)
    given["actor_train"]["training_args"] |= {"learning_rate": 1.0, "lr_scheduler_type": "linear"}
    rates = [line["train/lr"] for line in runs.metrics(runs.ok(given))]
    # Of optimizer steps 1 to 8 with the factors 8/8, 7/8, ..., 1/8: the means of two each.
    assert rates == pytest.approx([15 / 16, 11 / 16, 7 / 16, 3 / 16])


def test_refl_with_a_pretraining_term_reads_the_images(runs):
    given = flow_config(runs, "refl", objective_options={"pretrain_loss_coef": 0.1}, max_steps=1)
    (line,) = runs.metrics(runs.ok(given))
    assert line["train/images"] == 12
    assert line["train/pretrain_loss"] > 0


def test_a_student_learns_its_teachers_velocities(runs):
    exported = runs.ok(flow_config(runs, "flow_matching", exp_name="teacher", max_steps=6)).run_dir.export
    teacher = {
        "model_args": {"dtype": "fp32", "model_name_or_path": str(exported)},
        "strategy_args": {"strategy_name": "hf_infer"},
        "device_mapping": [0],
    }
    given = flow_config(runs, "distill", teacher=teacher, max_steps=8, objective_options={"loss": "velocity"})
    lines = runs.metrics(runs.ok(given))
    assert lines[-1]["train/velocity_error"] < lines[0]["train/velocity_error"]


def test_guidance_and_adapters_train(runs):
    given = flow_config(runs, "flow_grpo", guidance_scale=2.0, objective_options={"kl_coef": 0.01}, max_steps=2)
    given["actor_train"]["model_args"] |= LORA
    lines = runs.metrics(runs.ok(given))
    assert lines[0]["train/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert lines[1]["train/kl_loss"] > 0


def test_pipeline_with_encoders_and_vae_is_trained_and_exported(runs):
    """Prompts by the model's own encoders, gradients through its VAE, and an export that diffusers loads whole."""
    import diffusers
    import torch

    from shared_tests.flow_models import tiny_sd3

    tiny_sd3(runs.folder / "sd3")
    source = {"model_args": runs.model() | {"model_name_or_path": str(runs.folder / "sd3")}}
    given = flow_config(runs, "refl", max_steps=2, eval_steps=2, validation=validated(runs))
    given |= {"height": 16, "width": 16, "prompt_encoder": "pipeline", "decode_batch_size": 5}
    given["actor_train"] |= source
    result = runs.ok(given)
    lines = runs.metrics(result)
    assert lines[-1]["val/score/mean"] != lines[0]["val/score/mean"]
    assert math.isfinite(lines[-1]["train/grad_norm"])
    assert lines[-1]["train/grad_norm"] > 0
    shown = [json.loads(line) for line in result.run_dir.images.read_text(encoding="utf-8").splitlines()]
    assert len(shown) > 0
    before, after = (
        diffusers.DiffusionPipeline.from_pretrained(each, text_encoder_3=None, tokenizer_3=None)
        for each in (runs.folder / "sd3", result.run_dir.export)
    )
    for part, same in (("vae", True), ("text_encoder", True), ("transformer", False)):
        one, other = (getattr(each, part).state_dict() for each in (before, after))
        assert all(torch.equal(one[name], other[name]) for name in one) == same


def test_videos_of_two_experts_are_decoded_and_scored(runs):
    from shared_tests.flow_models import save_without_text, wan_pipeline

    save_without_text(wan_pipeline(2), runs.folder / "wan")
    rewards = {
        "bright": {"reward": "image_brightness"},
        "moving": {"reward": "image_function", "function": "imagerewards:moving", "frames": "together"},
    }
    given = flow_config(runs, "flow_grpo", rewards=rewards, max_steps=1, eval_steps=1, validation=validated(runs))
    given |= {"height": 16, "width": 16, "num_frames": 5, "window": "all", "window_options": {}}
    given["actor_train"]["model_args"] = runs.model() | {"model_name_or_path": str(runs.folder / "wan")}
    result = runs.ok(given)
    line = runs.metrics(result)[-1]
    assert line["train/ratio"] == pytest.approx(1, abs=1e-5)
    assert 0 < line["score/bright/mean"] < 1
    assert line["score/moving/mean"] == 5  # frames of each video
    assert (result.run_dir.export / "transformer_2").is_dir()


def test_non_finite_latents_end_the_run_with_step_and_images(runs):
    given = flow_config(runs, "flow_grpo", max_steps=3)
    given["actor_train"]["training_args"]["learning_rate"] = 1e30
    result = runs.run(given)
    assert isinstance(result.error, NonFiniteError)
    assert mentions(str(result.error), "step 0 of 4", "actor_train", "/1/0")
    assert result.steps_done == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from roll_core.config import load
from roll_core.plugins.registry import load_registry
from roll_core.runtime.records import checkpoints
from roll_core.runtime.run.loop import execute

def killing(path, step, *rest, function=checkpoints.write_manifest, **named):
    if step == 4:
        if sys.argv[2] == "torn":
            largest = max((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
            os.truncate(largest, largest.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    return function(path, step, *rest, **named)

checkpoints.write_manifest = killing
registry = load_registry()
execute(load(Path(sys.argv[1]), [], registry), registry)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["torn", "whole"])
def test_a_run_that_is_killed_while_it_saves_resumes_bit_for_bit(runs, moment):
    """SIGKILL in the save of step 4, with half a file or with all of them, before the checkpoint is renamed."""
    given = flow_config(runs, "nft", max_steps=6, save_steps=2, exp_name="killed")
    whole = runs.ok(given | {"exp_name": "whole"})
    config = runs.folder / "killed.yaml"
    config.write_text(json.dumps(given), encoding="utf-8")  # JSON is YAML
    done = subprocess.run([sys.executable, "-c", KILLED, str(config), moment], cwd=runs.folder, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    found = runs.ok(given | {"resume_from_checkpoint": "auto"})
    assert json.loads(found.run_dir.record.read_text(encoding="utf-8"))["resumed_step"] == 2
    assert runs.timeless(found) == runs.timeless(whole)
    weights = [each.run_dir.export / "diffusion_pytorch_model.safetensors" for each in (found, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert sorted(each.name for each in found.run_dir.checkpoints.iterdir()) == ["step-4", "step-6"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("objective", ["refl", "flow_grpo", "nft"])
def test_ranks_of_fsdp2_equal_hf_train(runs, monkeypatch, objective):
    monkeypatch.setenv("PYTHONPATH", str(runs.folder))
    given = flow_config(runs, objective, max_steps=2, eval_steps=2, validation=validated(runs))
    expected = runs.learnt(runs.ok(given))
    found = runs.learnt(runs.ok(runs.on_ranks(given, "fsdp2", 2, replicas=2)))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-7)


def test_the_old_policy_of_nft_moves_once_per_batch(runs, monkeypatch):
    from roll_strategy_hf.train import HFTrainStrategy

    steps = []
    monkeypatch.setattr(
        HFTrainStrategy,
        "move_averages",
        lambda self: (steps.append(self.optimizer.step_count), self.optimizer.move_averages()),
    )
    (first, _) = runs.metrics(runs.ok(flow_config(runs, "nft", max_steps=2)))  # two epochs, so two steps per batch
    assert steps == [2, 4]
    # The first step compares equal policies, the second one with the policy that sampled.
    assert first["train/old_distance"] > 0
