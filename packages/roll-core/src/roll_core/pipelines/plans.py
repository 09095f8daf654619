"""Roles and phases of the built-in pipelines, computed only from the config.

Used by the pipelines and by `roll-core plan`. Light: imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import Phase, PipelinePlan

if TYPE_CHECKING:
    from roll_core.pipelines.config import RLVRConfig, SFTConfig
    from roll_core.pipelines.distill_config import DistillConfig


def sft(config: SFTConfig) -> PipelinePlan:
    """Plan of the SFT pipeline.

    The number of optimizer steps is 0 here: it is known only after the data are read.
    """
    roles = [RoleSpec(name="sft_train", kind="train")]
    phases = _training("train", "sft_train")
    if config.save_steps:
        phases.append(Phase(name="checkpoint", acts={"sft_train": "save"}))
    if config.validation is not None:
        phases.append(Phase(name="held-out loss", acts={"sft_train": "score"}))
    if config.actor_infer is not None:
        roles.append(RoleSpec(name="actor_infer", kind="generate", model_from="sft_train"))
        roles += [RoleSpec(name=f"rewards.{domain}", kind="reward") for domain in config.rewards]
        phases.append(Phase(name="publish", acts={"sft_train": "publish", "actor_infer": "receive"}))
        phases.append(Phase(name="held-out responses", acts={"actor_infer": "generate"}))
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=config.val_batch_size)


def rlvr(config: RLVRConfig) -> PipelinePlan:
    """Plan of the RLVR pipeline, in the order of `RLVRPipeline.step`."""
    steps = config.max_steps
    roles = [
        RoleSpec(
            name="actor_train",
            kind="train",
            num_steps=(steps - config.critic_warmup) * config.steps_per_batch(config.actor_train),
        ),
    ]
    phases = []
    if config.generates:
        roles.append(RoleSpec(name="actor_infer", kind="generate", model_from="actor_train"))
        phases.append(Phase(name="publish", acts={"actor_train": "publish", "actor_infer": "receive"}))
        phases.append(Phase(name="rollout", acts={"actor_infer": "generate"}))
    if config.recomputes_logprobs or (config.stays_close and config.reference is None):
        phases.append(Phase(name="logprobs of the policy", acts={"actor_train": "score"}))
    if config.reference is not None:
        roles.append(RoleSpec(name="reference", kind="score", model_from="actor_train"))
        phases.append(Phase(name="logprobs of the reference", acts={"reference": "score"}))
    if config.critic is not None:
        num_steps = steps * config.steps_per_batch(config.critic)
        roles.append(RoleSpec(name="critic", kind="train", task="value", num_steps=num_steps, model_from="actor_train"))
        phases.append(Phase(name="values", acts={"critic": "score"}))
        phases += _training("train the critic", "critic")
    phases += _training("train", "actor_train")
    if config.save_steps:
        trained = [role.name for role in roles if role.kind == "train"]
        phases += [Phase(name=f"checkpoint of {name}", acts={name: "save"}) for name in trained]
    if config.generates:
        roles += [RoleSpec(name=f"rewards.{domain}", kind="reward") for domain in config.rewards]
    outputs = config.rollout_batch_size * config.num_return_sequences_in_group
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=outputs)


def distill(config: DistillConfig) -> PipelinePlan:
    """Plan of the distillation pipeline: that of `rlvr` with teachers."""
    base = rlvr(config)
    teachers = [RoleSpec(name=f"teachers.{domain}", kind="score") for domain in config.teachers]
    roles = [*base.roles[:1], *teachers, *base.roles[1:]]
    training = next(at for at, phase in enumerate(base.phases) if phase.acts.get("actor_train") == "backward")
    support = [Phase(name="the student's support", acts={"actor_train": "score"})]
    teaching = [
        *(support if config.kd_support == "student_topk" else []),
        *(Phase(name=f"logprobs of {teacher.name}", acts={teacher.name: "score"}) for teacher in teachers),
    ]
    phases = [*base.phases[:training], *teaching, *base.phases[training:]]
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=base.outputs)


def _training(name: str, role: str) -> list[Phase]:
    """Phases of one optimizer step: its microbatches, then the step itself."""
    return [Phase(name=name, acts={role: "backward"}), Phase(name=f"{name}: step", acts={role: "step"})]
