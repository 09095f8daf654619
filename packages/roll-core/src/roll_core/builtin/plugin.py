"""Hooks that provide roll-core's own parts. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import (
    AdvantageProvider,
    ExecutorProvider,
    OptimizerProvider,
    PipelineProvider,
    PlatformProvider,
    PolicyLossProvider,
    PromptSamplerProvider,
    RewardProvider,
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
    """Supervised fine-tuning, reinforcement learning and evaluation."""
    yield PipelineProvider(
        name="sft",
        target="roll_core.pipelines.sft:SFTPipeline",
        config="roll_core.pipelines.config:SFTConfig",
        plan="roll_core.pipelines.plans:sft",
        starter="roll_core.pipelines.starters:sft",
        evaluation="evaluate",
        summary="Supervised fine-tuning on prompts and responses, or chats",
    )
    yield PipelineProvider(
        name="rlvr",
        target="roll_core.pipelines.rlvr:RLVRPipeline",
        config="roll_core.pipelines.config:RLVRConfig",
        plan="roll_core.pipelines.plans:rlvr",
        starter="roll_core.pipelines.starters:rlvr",
        evaluation="evaluate",
        summary="Reinforcement learning with verifiable rewards: GRPO, PPO, REINFORCE, RLOO",
    )
    yield PipelineProvider(
        name="evaluate",
        target="roll_core.pipelines.evaluate:EvaluatePipeline",
        config="roll_core.pipelines.config:EvaluateConfig",
        plan="roll_core.pipelines.plans:evaluate",
        summary="Scores of a model on held-out prompts, without training: pass@k, maj@k, confidence intervals",
    )


@hookimpl
def roll_rewards() -> Iterator[RewardProvider]:
    """The reward by a model."""
    yield RewardProvider(
        name="model",
        target="roll_core.runtime.rollout.model_rewards:ModelReward",
        config="roll_core.spec.config:ModelRewardConfig",
        summary="The score of a reward model, which is a role of its own",
    )


@hookimpl
def roll_advantage_estimators() -> Iterator[AdvantageProvider]:
    """Advantage estimators of whole responses, see docs/algorithms.md."""
    module, options = "roll_core.algorithms.advantages", "roll_core.algorithms.options"
    for name, function, schema, summary in (
        ("grpo", "grpo", "GRPOOptions", "Reward less the group's mean, over the group's deviation"),
        (
            "reinforce++_baseline",
            "reinforce_plus_plus_baseline",
            "",
            "Reward less the group's mean, whitened over tokens",
        ),
        ("opo", "opo", "", "Reward less the group's length-weighted mean"),
        ("max_rl", "max_rl", "", "Reward less the group's mean, over that mean"),
        ("pass_at_k", "pass_at_k", "PassAtKOptions", "Best reward of k responses, over all subsets of the group"),
        ("gdpo", "gdpo", "GDPOOptions", "Weighted components of the reward, each normalised in its group"),
    ):
        yield AdvantageProvider(
            name=name,
            target=f"{module}:{function}",
            config=f"{options}:{schema}" if schema else "",
            summary=summary,
            needs_groups=True,
            non_negative=name == "max_rl",
            normalise="group",
        )
    yield AdvantageProvider(
        name="reinforce",
        target=f"{module}:reinforce",
        summary="Discounted reward to go",
    )
    yield AdvantageProvider(
        name="reinforce++",
        target=f"{module}:reinforce_plus_plus",
        summary="Discounted reward to go, whitened over tokens",
    )
    yield AdvantageProvider(
        name="rloo",
        target=f"{module}:rloo",
        summary="Reward less the mean of the group's other samples",
        needs_groups=True,
    )
    yield AdvantageProvider(
        name="remax",
        target=f"{module}:remax",
        summary="Reward less that of a greedy response to the same prompt",
        needs_baseline=True,
        normalise="none",
    )
    yield AdvantageProvider(
        name="gae",
        target=f"{module}:gae",
        summary="Generalised advantage estimation with a critic",
        needs_critic=True,
    )


@hookimpl
def roll_optimizers() -> Iterator[OptimizerProvider]:
    """torch's optimizers that language models are trained with."""
    module = "roll_core.algorithms.optimizers"
    summary = "AdamW (arXiv:1711.05101)"
    yield OptimizerProvider(name="adamw", target=f"{module}:adamw", summary=summary, sharded=True)
    yield OptimizerProvider(
        name="sgd",
        target=f"{module}:sgd",
        config="roll_core.algorithms.options:SGDOptions",
        summary="Gradient descent with momentum",
        sharded=True,
    )
    yield OptimizerProvider(
        name="muon",
        target=f"{module}:muon",
        config="roll_core.algorithms.options:MuonOptions",
        summary="Orthogonalised momentum for matrices, AdamW for the rest (Muon, arXiv:2502.16982)",
        sharded=True,
    )


@hookimpl
def roll_policy_losses() -> Iterator[PolicyLossProvider]:
    """Policy losses, see docs/algorithms.md. A name with the function of another is an alias."""
    for name, function, schema, summary in (
        ("ppo", "ppo", "PPOOptions", "Clipped importance ratio, with clip-higher and dual clip"),
        ("vanilla", "vanilla", "PolicyLossOptions", "Log-probability times advantage"),
        ("gpg", "vanilla", "PolicyLossOptions", "The same as vanilla"),
        ("gspo", "gspo", "GSPOOptions", "Clipped ratio of the sequence"),
        ("gspo_token", "gspo_token", "GSPOOptions", "gspo, with advantages per token"),
        ("luspo", "luspo", "GSPOOptions", "gspo, with sequences weighted by their lengths"),
        ("gmpo", "gmpo", "GMPOOptions", "Geometric mean of clipped ratios"),
        ("cispo", "cispo", "CISPOOptions", "Policy gradient, weighted by a clipped ratio"),
        ("sapo", "sapo", "SAPOOptions", "Smooth gate of the ratio instead of a clip"),
        ("dppo", "dppo", "DPPOOptions", "Masks tokens by the divergence of their probability"),
        ("topr", "topr", "TOPROptions", "Positives without a ratio, negatives with a truncated one"),
        ("raft_plus_plus", "raft_plus_plus", "RAFTOptions", "Clipped ratio of positive advantages only"),
        ("raft++", "raft_plus_plus", "RAFTOptions", "The same as raft_plus_plus"),
        ("dro", "dro", "DROOptions", "Policy gradient with a squared log-ratio as penalty"),
        ("kimi", "dro", "DROOptions", "The same as dro"),
        ("vespo", "vespo", "VESPOOptions", "Sequences weighted by a smooth function of their ratio"),
        ("clip_cov", "clip_cov", "ClipCovOptions", "ppo, without gradients of some tokens of high covariance"),
        ("kl_cov", "kl_cov", "KLCovOptions", "Importance ratio, with a penalty on tokens of high covariance"),
    ):
        yield PolicyLossProvider(
            name=name,
            target=f"roll_core.algorithms.policy_losses:{function}",
            config=f"roll_core.algorithms.options:{schema}",
            summary=summary,
            off_policy=function != "vanilla",
            whole_rollouts=function in ("gspo", "gspo_token", "luspo", "gmpo", "topr", "vespo", "clip_cov", "kl_cov"),
        )


@hookimpl
def roll_prompt_samplers() -> Iterator[PromptSamplerProvider]:
    """The sampler by measured difficulty."""
    module = "roll_core.pipelines.prompt_samplers"
    yield PromptSamplerProvider(
        name="pass_rate",
        target=f"{module}:PassRateSampler",
        config=f"{module}:PassRateOptions",
        summary="Rows whose measured pass rate is in a window",
    )


@hookimpl
def roll_weight_transports() -> Iterator[WeightTransportProvider]:
    """The transport within one process."""
    yield WeightTransportProvider(
        name="shared",
        target="roll_core.runtime.weights.transfer:SharedTransport",
        summary="The trainer's tensors themselves, within one process",
        priority=50,
        in_process=True,
    )


@hookimpl
def roll_executors() -> Iterator[ExecutorProvider]:
    """The `local` executor."""
    yield ExecutorProvider(
        name="local",
        target="roll_core.runtime.cluster.executors.local:LocalExecutor",
        summary="All workers in the driver's process",
        priority=10,
        in_process=True,
    )
