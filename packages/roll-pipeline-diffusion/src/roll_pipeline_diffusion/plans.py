"""Roles and phases of the pipeline, computed only from the config. Light: imports no torch.

The number of optimizer steps is 0 for objectives on data without `max_steps`: it is known only after the data are read.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from roll_core.pipelines.plans import training
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import Phase, PipelinePlan
from roll_pipeline_diffusion.algorithm_config import RandomWindowOptions, ReflOptions
from roll_pipeline_diffusion.models.description import describe_args

if TYPE_CHECKING:
    from roll_pipeline_diffusion.config import RewardFlowConfig

LIBRARY = "roll_pipeline_diffusion.models.library:DiffusersLibrary"
"""`ModelSpec.library` of flow models."""


def reward_flow(config: RewardFlowConfig) -> PipelinePlan:
    """Plan of the pipeline, in the order of `RewardFlowPipeline.step`."""
    tokens = _row_tokens(config)
    roles = [
        RoleSpec(
            name="actor_train",
            kind="train",
            task="flow",
            library=LIBRARY,
            row_tokens=tokens,
            calls_with_gradients=_calls_with_gradients(config),
            num_steps=(config.max_steps or 0) * config.num_steps_per_batch,
            ema_decay=config.ema_decay,
            ema_ramp=config.ema_ramp,
            ema_per_batch=config.uses_average,
        )
    ]
    phases = []
    if config.samples_images and "score" not in config.objective_inputs:
        phases.append(Phase(name="sample", acts={"actor_train": "score"}))
    if config.teacher is not None:
        roles.append(RoleSpec(name="teacher", kind="score", task="flow", library=LIBRARY, row_tokens=tokens))
        phases.append(Phase(name="velocities of the teacher", acts={"teacher": "score"}))
    phases += training("train", "actor_train")
    if config.save_steps:
        phases.append(Phase(name="checkpoint", acts={"actor_train": "save"}))
    if config.validation is not None:
        phases.append(Phase(name="held-out images", acts={"actor_train": "score"}))
    images = config.rollout_batch_size * config.num_images_per_prompt if config.samples_images else 0
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=images)


def _row_tokens(config: RewardFlowConfig) -> int:
    """Tokens of an image or video and of its prompt; 0 if the model is not a local directory."""
    args = config.actor_train.model_args
    model = describe_args(args, config.pretrain)
    if model is None:
        return 0
    latents = model.latent_shape(config.height, config.width, config.num_frames)
    return prod(latents[1:]) // model.family.patch(model.config) ** 2 + (
        config.prompt_tokens or model.family.max_text_tokens
    )


def _calls_with_gradients(config: RewardFlowConfig) -> int:
    """Calls of the module whose activations the loss of a row keeps until its backward pass."""
    options = config.objective_settings
    guided = 2 if config.guidance_scale != 1 else 1
    if isinstance(options, ReflOptions):
        return guided * (options.grad_steps + options.lv_samples)
    if "steps" in config.objective_inputs:
        windows = config.window_settings
        size = windows.size if isinstance(windows, RandomWindowOptions) else config.num_inference_steps - 1
        return guided * size
    return 2 if "pairs" in config.objective_inputs else 1
