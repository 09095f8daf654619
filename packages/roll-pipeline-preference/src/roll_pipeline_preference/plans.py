"""Roles and phases of the pipelines, computed only from the config. Light: imports no torch.

The number of optimizer steps is 0 here: it is known only after the data are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.pipelines.plans import add_generation, training
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import Phase, PipelinePlan

if TYPE_CHECKING:
    from roll_pipeline_preference.config import PreferenceConfig, RewardModelConfig


def preference(config: PreferenceConfig) -> PipelinePlan:
    """Plan of the pipeline `preference`."""
    roles = [RoleSpec(name="actor_train", kind="train")]
    phases = []
    if config.reference is not None:
        roles.append(RoleSpec(name="reference", kind="score", model_from="actor_train"))
        phases.append(Phase(name="logprobs of the reference", acts={"reference": "score"}))
    elif config.uses_reference:
        phases.append(Phase(name="logprobs of the initial policy", acts={"actor_train": "score"}))
    phases += training("train", "actor_train")
    if config.save_steps:
        phases.append(Phase(name="checkpoint", acts={"actor_train": "save"}))
    if config.validation is not None:
        phases.append(Phase(name="held-out preferences", acts={"actor_train": "score"}))
    if config.actor_infer is not None:
        add_generation(roles, phases, "actor_train", config)
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=config.val_batch_size)


def reward_model(config: RewardModelConfig) -> PipelinePlan:
    """Plan of the pipeline `reward_model`."""
    phases = training("train", "reward_train")
    if config.save_steps:
        phases.append(Phase(name="checkpoint", acts={"reward_train": "save"}))
    if config.validation is not None:
        phases.append(Phase(name="held-out preferences", acts={"reward_train": "score"}))
    return PipelinePlan(roles=(RoleSpec(name="reward_train", kind="train", task="reward"),), phases=tuple(phases))
