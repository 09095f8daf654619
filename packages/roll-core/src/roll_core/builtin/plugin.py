"""Hooks that provide roll-core's own parts. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import (
    AdvantageProvider,
    CheckProvider,
    KnownErrorsProvider,
    PipelineProvider,
    PlatformProvider,
    PolicyLossProvider,
    RewardProvider,
    TrackerProvider,
    WeightTransportProvider,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_platforms() -> Iterator[PlatformProvider]:
    """The `cpu` platform, which is always available."""
    yield PlatformProvider(
        name="cpu", target="roll_core.builtin.cpu:CpuPlatform", summary="The host's cores; always available"
    )


@hookimpl
def roll_pipelines() -> Iterator[PipelineProvider]:
    """Supervised fine-tuning, and reinforcement learning with verifiable rewards."""
    yield PipelineProvider(
        name="sft",
        target="roll_core.pipelines.sft:SFTPipeline",
        config="roll_core.pipelines.config:SFTConfig",
        plan="roll_core.pipelines.plans:sft",
        summary="Supervised fine-tuning on prompts and responses, or chats",
    )
    yield PipelineProvider(
        name="rlvr",
        target="roll_core.pipelines.rlvr:RLVRPipeline",
        config="roll_core.pipelines.config:RLVRConfig",
        plan="roll_core.pipelines.plans:rlvr",
        summary="Reinforcement learning with verifiable rewards: GRPO, PPO, REINFORCE, RLOO",
    )
    yield PipelineProvider(
        name="distill",
        target="roll_core.pipelines.distill:DistillPipeline",
        config="roll_core.pipelines.distill_config:DistillConfig",
        plan="roll_core.pipelines.plans:distill",
        summary="Distillation of a teacher, on the student's rollouts or on a data set",
    )


@hookimpl
def roll_rewards() -> Iterator[RewardProvider]:
    """Rewards by rule and by a user's function."""
    yield RewardProvider(
        name="math_rule",
        target="roll_core.builtin.rewards.math_rule:MathRuleReward",
        config="roll_core.builtin.config:MathRuleConfig",
        needs=("math-verify[antlr4_9_3]>=0.8",),
        enforces_timeout=True,
        summary="1 if the response's final answer equals the ground truth, mathematically",
    )
    yield RewardProvider(
        name="function",
        target="roll_core.builtin.rewards.function:FunctionReward",
        config="roll_core.builtin.config:FunctionConfig",
        enforces_timeout=True,
        summary="A Python function of the user",
    )


@hookimpl
def roll_trackers() -> Iterator[TrackerProvider]:
    """TensorBoard. `metrics.jsonl` is always written and needs no tracker."""
    yield TrackerProvider(
        name="tensorboard",
        target="roll_core.builtin.tensorboard:TensorBoardTracker",
        config="roll_core.builtin.config:TensorBoardOptions",
        needs=("tensorboard>=2.16",),
        summary="Event files for TensorBoard, in the run directory",
    )


@hookimpl
def roll_advantage_estimators() -> Iterator[AdvantageProvider]:
    """Advantage estimators: GRPO, REINFORCE, RLOO and GAE."""
    yield AdvantageProvider(
        name="grpo",
        target="roll_core.algorithms.advantages:grpo",
        summary="Reward less the group's mean, over the group's deviation",
        needs_groups=True,
        normalise="group",
    )
    yield AdvantageProvider(
        name="reinforce",
        target="roll_core.algorithms.advantages:reinforce",
        summary="Discounted reward to go",
    )
    yield AdvantageProvider(
        name="rloo",
        target="roll_core.algorithms.advantages:rloo",
        summary="Reward less the mean of the group's other samples",
        needs_groups=True,
    )
    yield AdvantageProvider(
        name="gae",
        target="roll_core.algorithms.advantages:gae",
        summary="Generalised advantage estimation with a critic",
        needs_critic=True,
    )


@hookimpl
def roll_policy_losses() -> Iterator[PolicyLossProvider]:
    """Policy losses: clipped PPO and the plain policy gradient."""
    yield PolicyLossProvider(
        name="ppo",
        target="roll_core.algorithms.policy_losses:ppo",
        config="roll_core.builtin.config:PolicyLossOptions",
        summary="Clipped importance ratio, with clip-higher and dual clip",
    )
    yield PolicyLossProvider(
        name="vanilla",
        target="roll_core.algorithms.policy_losses:vanilla",
        config="roll_core.builtin.config:PolicyLossOptions",
        summary="Log-probability times advantage",
        off_policy=False,
    )


@hookimpl
def roll_weight_transports() -> Iterator[WeightTransportProvider]:
    """Transports within a process, on a device, on a host, over a network and through a file system."""
    package = "roll_core.runtime.weights.transports"
    yield WeightTransportProvider(
        name="shared",
        target=f"{package}.shared:SharedTransport",
        summary="The trainer's tensors themselves, within one process",
        priority=50,
        in_process=True,
    )
    yield WeightTransportProvider(
        name="cuda_ipc",
        target=f"{package}.cuda_ipc:CudaIpcTransport",
        summary="Device memory, between processes on the same device",
        priority=40,
    )
    yield WeightTransportProvider(
        name="shm",
        target=f"{package}.shm:ShmTransport",
        summary="Shared memory, between processes of one host",
        priority=30,
    )
    yield WeightTransportProvider(
        name="collective",
        target=f"{package}.collective:CollectiveTransport",
        summary="Broadcasts by gloo, nccl or hccl, between any processes",
        priority=20,
    )
    yield WeightTransportProvider(
        name="disk",
        target=f"{package}.disk:DiskTransport",
        summary="Files in model_update_dir, for hosts without a connection",
        priority=10,
        uses_directory=True,
    )


@hookimpl
def roll_checks() -> Iterator[CheckProvider]:
    """Checks that `roll-core doctor` runs on every machine."""
    for name, module, summary in (
        ("operating_system", "host", "Linux, and the version of its kernel"),
        ("shared_memory", "host", "Space in /dev/shm, for weight transfers between processes"),
        ("threads", "host", "Threads of a step on this host, and whether other programs use the cores"),
        ("open_files", "host", "Limit of open files and connections of a process"),
        ("disk", "host", "Free space in output_dir"),
        ("python", "software", "The interpreter's version"),
        ("libraries", "software", "Whether roll-core's own requirements are met, torch and Ray among them"),
        ("ray_cluster", "software", "Whether RAY_ADDRESS accepts connections"),
        ("dtypes", "devices", "Dtypes that the devices support"),
        ("device_memory", "devices", "Memory of the devices, and its use by other programs"),
        ("output", "files", "Whether the config's output_dir can be written"),
        ("models", "files", "Whether the models of the config exist"),
        ("data", "files", "Whether the data files of the config exist"),
    ):
        yield CheckProvider(name=name, target=f"roll_core.builtin.checks.{module}:{name}", summary=summary)


@hookimpl
def roll_known_errors() -> Iterator[KnownErrorsProvider]:
    """Errors of the libraries that every run needs, and of the machine."""
    yield KnownErrorsProvider(
        name="core",
        target="roll_core.builtin.known_errors:KNOWN_ERRORS",
        summary="Errors of torch, its libraries, Ray and the machine",
    )
