"""Roles and phases of the pipeline, computed only from the config. Light: imports no torch.

The number of optimizer steps is 0 for objectives on data without `max_steps`: it is known only after the data are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.pipelines.plans import training
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import Phase, PipelinePlan

if TYPE_CHECKING:
    from roll_pipeline_diffusion.config import RewardFlowConfig

LIBRARY = "roll_pipeline_diffusion.models.library:DiffusersLibrary"
"""`ModelSpec.library` of flow models."""


def reward_flow(config: RewardFlowConfig) -> PipelinePlan:
    """Plan of the pipeline, in the order of `RewardFlowPipeline.step`."""
    roles = [
        RoleSpec(
            name="actor_train",
            kind="train",
            task="flow",
            library=LIBRARY,
            num_steps=(config.max_steps or 0) * config.num_steps_per_batch,
            ema_decay=config.ema_decay,
            ema_ramp=config.ema_ramp,
        )
    ]
    phases = []
    if config.samples_images and "score" not in config.objective_inputs:
        phases.append(Phase(name="sample", acts={"actor_train": "score"}))
    if config.teacher is not None:
        roles.append(RoleSpec(name="teacher", kind="score", task="flow", library=LIBRARY))
        phases.append(Phase(name="velocities of the teacher", acts={"teacher": "score"}))
    phases += training("train", "actor_train")
    if config.save_steps:
        phases.append(Phase(name="checkpoint", acts={"actor_train": "save"}))
    if config.validation is not None:
        phases.append(Phase(name="held-out images", acts={"actor_train": "score"}))
    images = config.rollout_batch_size * config.num_images_per_prompt if config.samples_images else 0
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=images)
