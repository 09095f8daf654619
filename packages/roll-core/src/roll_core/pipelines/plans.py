"""Roles and phases of the built-in pipelines, computed only from the config, and parts for plans of plugins.

Used by the pipelines and by `roll-core plan`. Light: imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.pipeline import RoleSpec
from roll_core.spec.plan import Phase, PipelinePlan

if TYPE_CHECKING:
    from roll_core.pipelines.config import EvaluationConfig, PolicyConfig, SFTConfig
    from roll_core.spec.config import RewardKeys
    from roll_core.spec.plan import Activity


def sft(config: SFTConfig) -> PipelinePlan:
    """Plan of the SFT pipeline.

    The number of optimizer steps is 0 here: it is known only after the data are read.
    """
    roles = [RoleSpec(name="sft_train", kind="train")]
    phases = training("train", "sft_train")
    if config.save_steps:
        phases.append(Phase(name="checkpoint", acts={"sft_train": "save"}))
    if config.validation is not None:
        phases.append(Phase(name="held-out loss", acts={"sft_train": "score"}))
    if config.actor_infer is not None:
        add_generation(roles, phases, "sft_train", config)
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=config.val_batch_size)


def rlvr(config: PolicyConfig) -> PipelinePlan:
    """Plan of a pipeline that trains a policy, in the order of `RLVRPipeline.step`."""
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
        phases.append(_rollout("rollout", config))
    if config.recomputes_logprobs or (config.stays_close and config.reference is None):
        phases.append(Phase(name="logprobs of the policy", acts={"actor_train": "score"}))
    if config.reference is not None:
        roles.append(RoleSpec(name="reference", kind="score", model_from="actor_train"))
        phases.append(Phase(name="logprobs of the reference", acts={"reference": "score"}))
    if config.critic is not None:
        num_steps = steps * config.steps_per_batch(config.critic)
        roles.append(RoleSpec(name="critic", kind="train", task="value", num_steps=num_steps, model_from="actor_train"))
        phases.append(Phase(name="values", acts={"critic": "score"}))
        phases += training("train the critic", "critic")
    phases += training("train", "actor_train")
    if config.save_steps:
        trained = [role.name for role in roles if role.kind == "train"]
        phases += [Phase(name=f"checkpoint of {name}", acts={name: "save"}) for name in trained]
    if config.generates:
        roles += rewards(config)
    outputs = config.num_groups * config.group_size
    return PipelinePlan(roles=tuple(roles), phases=tuple(phases), outputs=outputs, one_response=not config.multi_turn)


def evaluate(config: EvaluationConfig) -> PipelinePlan:
    """Plan of an evaluation: an engine with a model of its own, and rewards."""
    roles = (RoleSpec(name="actor_infer", kind="generate"), *rewards(config))
    phases, one_response = (_rollout("responses", config),), not config.multi_turn
    return PipelinePlan(roles=roles, phases=phases, outputs=config.outputs, one_response=one_response)


def add_generation(roles: list[RoleSpec], phases: list[Phase], source: str, config: RewardKeys) -> None:
    """Add an engine that generates held-out responses with the weights of `source`, and the rewards that score them."""
    roles.append(RoleSpec(name="actor_infer", kind="generate", model_from=source))
    roles += rewards(config)
    phases.append(Phase(name="publish", acts={source: "publish", "actor_infer": "receive"}))
    phases.append(_rollout("held-out responses", config))


def rewards(config: RewardKeys) -> list[RoleSpec]:
    """The roles of the rewards."""
    return [
        RoleSpec(name=f"rewards.{domain}", kind=reward.kind, task="reward") for domain, reward in config.rewards.items()
    ]


def _rollout(name: str, config: RewardKeys) -> Phase:
    """The engine generates, and the models of rewards score or generate beside it."""
    acts: dict[str, Activity] = {"actor_infer": "generate"}
    for domain, reward in config.rewards.items():
        if reward.kind in ("score", "generate"):
            acts[f"rewards.{domain}"] = "score" if reward.kind == "score" else "generate"
    return Phase(name=name, acts=acts)


def training(name: str, role: str) -> list[Phase]:
    """Phases of one optimizer step: its microbatches, then the step itself."""
    return [Phase(name=name, acts={role: "backward"}), Phase(name=f"{name}: step", acts={role: "step"})]
