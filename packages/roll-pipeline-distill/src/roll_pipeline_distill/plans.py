"""Roles and phases of the pipeline, computed only from the config. Light: imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.pipelines.plans import rewards, rlvr
from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import Phase, PipelinePlan, PlannedComparison

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_pipeline_distill.config import DistillConfig, Divergence

ARRAYS: Mapping[Divergence, int] = {
    "forward_kl": 5,
    "reverse_kl": 6,
    "js_divergence": 10,
    "skewed_forward_kl": 9,
    "skewed_reverse_kl": 10,
    "adaptive_kl": 12,
}
"""`PlannedComparison.num_arrays` of `divergences.divergence`, as measured."""


def distill(config: DistillConfig) -> PipelinePlan:
    """Plan of the pipeline: that of `rlvr` with teachers."""
    base = rlvr(config)
    teachers = [RoleSpec(name=f"teachers.{domain}", kind="score") for domain in config.teachers]
    student = replace(base.roles[0], ema_decay=config.ema_decay if config.self_teacher == "ema" else None)
    roles, phases = [student, *teachers, *base.roles[1:]], list(base.phases)
    if config.rollout_role == "teacher_infer" and config.replay_rollouts is None:
        roles.append(RoleSpec(name="teacher_infer", kind="generate"))
        phases.insert(0, Phase(name="rollout of the teacher", acts={"teacher_infer": "generate"}))
        roles += [] if config.generates else rewards(config)
    for domain in config.served_teachers:
        served = RoleSpec(name=f"served_teachers.{domain}", kind="generate")
        roles.append(served)
        phases.append(Phase(name=f"logprobs of {served.name}", acts={served.name: "generate"}))
    training = next(index for index, phase in enumerate(phases) if phase.acts.get("actor_train") == "backward")
    teaching = [Phase(name=f"logprobs of {teacher.name}", acts={teacher.name: "score"}) for teacher in teachers]
    if config.kd_support == "student_topk" or config.self_teacher:
        teaching.insert(0, Phase(name="logprobs of the student", acts={"actor_train": "score"}))
    phases[training:training] = teaching
    comparisons = {}
    if config.kd_support == "full" and teachers:
        compared = PlannedComparison(role=teachers[0].name, num_arrays=ARRAYS[config.objective])
        comparisons["actor_train"] = compared
    return replace(base, roles=tuple(roles), phases=tuple(phases), comparisons=comparisons)
