"""Configs of `reward_flow`: what is refused, with its place, before a model is built."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path

import pytest

from roll_core.api.files import FileCheck
from roll_core.config import load
from roll_core.data.rows import read_rows
from roll_core.errors import ConfigError, DataError
from roll_core.plugins.registry import Registry
from roll_pipeline_diffusion import plans
from roll_pipeline_diffusion.samples import FlowData, read_image
from roll_testing.errors import raises_error
from shared_tests.hf_plugins import hf_plugins

REGISTRY = Registry(hf_plugins("roll-pipeline-diffusion"))
SAMPLES = """\
pipeline: reward_flow
height: 8
width: 8
rollout_batch_size: 2
num_images_per_prompt: 4
prompt_encoder: words
max_steps: 3
actor_train:
  model_args: {random_init: {_class_name: SD3Transformer2DModel, in_channels: 3}}
  training_args: {per_device_train_batch_size: 8}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
REWARDS = "rewards: {bright: {reward: image_brightness}}\n"
GRPO = SAMPLES + REWARDS
LORA = GRPO.replace("channels: 3}", "channels: 3}, lora_target: all-linear")
MATCHING = SAMPLES + "objective: flow_matching\n"
EMBEDDED = {"cond.prompt_embeds": [[0.0] * 4096], "cond.pooled_prompt_embeds": [0.0] * 2048}
QWEN = GRPO.replace("SD3Transformer2DModel", "QwenImageTransformer2DModel, joint_attention_dim: 4")
QWEN = QWEN.replace("in_channels: 3", "in_channels: 12")
FLUX = GRPO.replace("SD3", "Flux2")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write({"prompt": "red square", "image": "0.png", "chosen": "0.png", "rejected": "0.png"})
    Path("0.png").touch()
    return tmp_path


def write(*rows):
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def loaded(text, *overrides):
    Path("run.yaml").write_text(text, encoding="utf-8")
    return load(Path("run.yaml"), overrides, REGISTRY, FileCheck())


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (GRPO, []),
        (GRPO, ["guidance_scale=4.5"]),
        (GRPO, ["window=random", "window_options={size: 2}"]),
        (GRPO, ["rollout_batch_size=1", "num_images_per_prompt=8", "advantage_options={std: group}"]),
        (GRPO, ["objective=refl"]),
        (GRPO, ["objective=nft", "objective_options={kl_coef: 0.0}", "ema_decay=0.5", "ema_ramp=0.001"]),
        (LORA, ["objective_options={kl_coef: 0.04}"]),
        (MATCHING, []),
        (LORA.replace(REWARDS, ""), ["objective=diffusion_dpo"]),
        (SAMPLES, ["objective=distill", "teacher={strategy_args: {strategy_name: hf_infer}}"]),
    ],
)
def test_a_config_is_accepted(text, overrides):
    assert not loaded(text, *overrides).warnings


@pytest.mark.parametrize(
    ("text", "overrides", "key"),
    [
        (SAMPLES, [], ""),  # no reward
        (MATCHING + REWARDS, [], ""),  # a reward that nothing reads
        (GRPO, ["rollout_batch_size=3"], ""),  # 12 images, 8 per optimizer step
        (
            GRPO.replace("batch_size: 8", "batch_size: 2"),
            ["num_images_per_prompt=1", "advantage_options={std: group}"],
            "",
        ),
        (GRPO.replace("batch_size: 8", "batch_size: 2"), ["num_images_per_prompt=1"], ""),  # advantages of 0
        (GRPO, ["window_options.step_range=[0, 10]", "window=random"], "window_options.step_range"),
        (GRPO, ["sampler=ode"], "sampler"),
        (GRPO, ["objective_options={kl_coef: 0.04}"], ""),  # a reference without adapters
        (GRPO, ["objective=nft", "objective_options={kl_coef: 0.0}"], ""),  # no moving average
        (GRPO, ["ema_ramp=0.001"], "ema_ramp"),
        (GRPO, ["ema_decay=0.5", "portable_checkpoints=true"], ""),
        (GRPO, ["objective=distill"], ""),  # no teacher
        (GRPO, ["teacher={strategy_args: {strategy_name: hf_infer}}"], ""),
        (GRPO, ["objective=grpo"], "objective"),
        (GRPO, ["num_inference_steps=1"], "num_inference_steps"),
        (GRPO, ["negative_prompt=blurred"], "negative_prompt"),  # without guidance
        (GRPO, ["embedded_guidance=3.5"], "embedded_guidance"),  # SD3 embeds none
        (GRPO, ["objective=refl", "rewards.bright.reward=jpeg_size"], "rewards.bright"),  # no gradients
        (GRPO, ["rewards.bright={reward: math_rule}"], "rewards.bright"),  # scores text
        (GRPO, ["height=7"], "height"),  # patches of 2
        (GRPO, ["num_frames=5"], "num_frames"),
        (GRPO, ["actor_train.model_args.random_init.in_channels=16"], "actor_train.model_args"),  # no VAE
        (GRPO, ["actor_train.model_args.random_init._class_name=UNet2DModel"], "actor_train.model_args"),
        (GRPO, ["actor_train.data_args.file_name=null"], ""),
        (GRPO, ["actor_train.data_args.query=input"], "actor_train.data_args.query"),
        (GRPO, ["actor_train.data_args.file_name=none.jsonl"], "actor_train.data_args.file_name"),
    ],
)
def test_a_wrong_config_is_refused(text, overrides, key):
    with pytest.raises(ConfigError) as raised:
        loaded(text, *overrides)
    (problem,) = raised.value.problems
    assert problem.key == key


@pytest.mark.parametrize(("name", "column"), [("0.png", "image"), ("0.npy", "target")])
@pytest.mark.parametrize("content", [b"", b"no file of an image or of latents"])
def test_a_file_that_cannot_be_read_is_located(name, column, content):
    Path(name).write_bytes(content)
    write({"prompt": "red square", column: name})
    config = loaded(MATCHING, f"image_column={column}").config
    data = config.actor_train.data_args
    with raises_error(DataError, "rows.jsonl row 1", repr(column), name):
        FlowData(config).read(read_rows(data), data, images=config.image_columns)


def test_an_image_that_is_too_large_is_located(monkeypatch):
    from PIL import Image

    Image.new("RGB", (40, 40)).save("0.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with raises_error(DataError, "row 1", "0.png"):
        read_image(Path("0.png"), "row 1")


@pytest.mark.parametrize(("model", "num_tokens"), [(GRPO, 1024), (FLUX, 4096)])
def test_a_dynamic_shift_counts_the_tokens_of_the_model(model, num_tokens):
    """64 × 64 latents: SD3 has patches of 2 × 2, the latents of FLUX.2 are patchified already."""
    flux = ["embedded_guidance=3.5", "actor_train.model_args.random_init.in_channels=3"] if model == FLUX else []
    config = loaded(model, "dynamic_shift=true", "height=64", "width=64", "num_inference_steps=2", *flux).config
    data = FlowData(config)

    shift = exp(0.5 + (1.15 - 0.5) / (4096 - 256) * (num_tokens - 256))  # `calculate_shift` of diffusers
    assert data.schedule().sigmas(data.latent_shape)[1] == pytest.approx(shift * 0.5 / (1 + (shift - 1) * 0.5))
    assert len(data.schedule(5).sigmas(data.latent_shape)) == 6


@pytest.mark.parametrize(
    ("text", "overrides", "row"),
    [
        (MATCHING, [], {"prompt": "red square", "image": "1.png"}),
        (MATCHING, [], {"prompt": "red square", "image": 3}),
        (MATCHING, [], {"prompt": "red square"}),
        (GRPO, [], {"text": "red square"}),
        (GRPO, ["guidance_scale=4.5"], {"cond.prompt_embeds": [[0.0]]}),
        (LORA.replace(REWARDS, ""), ["objective=diffusion_dpo"], {"prompt": "red square", "chosen": "0.png"}),
        (MATCHING, ["objective_options={conditioning_dropout: 0.1}"], EMBEDDED | {"image": "0.png"}),
        (GRPO, ["objective=refl", "objective_options={pretrain_loss_coef: 0.1}"], {"prompt": "red square"}),
        (GRPO, ["prompt_encoder=pipeline"], {"prompt": "red square"}),
        (GRPO, [], {**EMBEDDED, "cond.pooled_prompt_embeds": [0.0] * 3}),
        (GRPO, [], {**EMBEDDED, "cond.pooled_prompt_embeds": [float("nan")] * 2048}),
        (GRPO, [], {"cond.prompt_embeds": EMBEDDED["cond.prompt_embeds"]}),
        (GRPO, ["guidance_scale=2"], {**EMBEDDED, "uncond.prompt_embeds": [[0.0]]}),
        (QWEN, [], {"cond.prompt_embeds": [[0.0] * 4] * 3, "cond.prompt_embeds_mask": [True, True]}),
        (QWEN, [], {"cond.prompt_embeds": [[0.0] * 4] * 2, "cond.prompt_embeds_mask": [False, False]}),
        (FLUX, [], {"prompt": "red square"}),
    ],
    ids=[
        "no file",
        "no name",
        "no column",
        "no prompt",
        "no unconditional embedding",
        "no pair",
        "no unconditional embedding for dropout",
        "no image for the pretraining term",
        "no text encoder",
        "an embedding of wrong width",
        "an embedding that is not finite",
        "an embedding too few",
        "an unconditional embedding of wrong shape",
        "a mask of wrong length",
        "a mask without tokens",
        "no embedded guidance",
    ],
)
def test_a_wrong_row_is_located(text, overrides, row):
    write(row)
    with pytest.raises(ConfigError) as raised:
        loaded(text, *overrides)
    (problem,) = raised.value.problems
    assert problem.key == "actor_train.data_args.file_name"
    assert problem.where == "run.yaml:11:26"
    assert "rows.jsonl" in problem.message


def test_the_strategy_must_run_programs():
    with pytest.raises(ConfigError) as raised:
        loaded(GRPO, "actor_train.strategy_args.strategy_name=megatron_train")
    assert {each.key for each in raised.value.problems} == {"actor_train.strategy_args.strategy_name"}


def test_the_plan_follows_the_objective():
    def phases(text, *overrides):
        return [phase.name for phase in plans.reward_flow(loaded(text, *overrides, "save_steps=0").config).phases]

    assert phases(GRPO) == ["sample", "train", "train: step"]
    assert phases(GRPO, "objective=refl") == ["train", "train: step"]
    assert phases(MATCHING) == ["train", "train: step"]
    distill = ["objective=distill", "teacher={strategy_args: {strategy_name: hf_infer}}"]
    assert phases(SAMPLES, *distill) == ["sample", "velocities of the teacher", "train", "train: step"]
    (role,) = plans.reward_flow(loaded(GRPO, "actor_train.training_args.per_device_train_batch_size=4").config).roles
    assert (role.task, role.num_steps) == ("flow", 6)
    assert role.row_tokens == 4 * 4 + 256  # patches of 2 × 2, and text


@pytest.mark.parametrize(
    ("text", "overrides", "calls"),
    [
        (GRPO, [], 9),
        (GRPO, ["window=random", "guidance_scale=2"], 4),
        (GRPO, ["objective=refl", "objective_options={grad_steps: 3}"], 3),
        (MATCHING, [], 1),
        (LORA.replace(REWARDS, ""), ["objective=diffusion_dpo"], 2),
    ],
)
def test_the_plan_counts_calls_whose_activations_are_kept(text, overrides, calls):
    assert plans.reward_flow(loaded(text, *overrides).config).roles[0].calls_with_gradients == calls
