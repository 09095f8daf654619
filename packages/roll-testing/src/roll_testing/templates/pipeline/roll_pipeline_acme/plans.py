"""Roles of `acme` and what they do in a step, computed from the config alone. Imports nothing heavy."""

from roll_core.pipelines.plans import add_generation, training
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import Phase, PipelinePlan
from roll_pipeline_acme.config import AcmePipelineConfig


def acme(config: AcmePipelineConfig) -> PipelinePlan:
    """The plan, for `roll-core plan` and for the pipeline's `roles`."""
    roles, phases = [RoleSpec(name="actor_train", kind="train", num_steps=config.max_steps)], list[Phase]()
    add_generation(roles, phases, "actor_train", config)
    phases += training("train", "actor_train")
    if config.save_steps:
        phases.append(Phase(name="checkpoint", acts={"actor_train": "save"}))
    outputs = config.rollout_batch_size * config.num_return_sequences_in_group
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=outputs)
