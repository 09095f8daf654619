"""Hooks that provide the pipeline, its estimators, its environments and its agent. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import AdvantageProvider, AgentProvider, EnvironmentProvider, PipelineProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_pipelines() -> Iterator[PipelineProvider]:
    """Register the pipelines `agentic`, `evaluate_agentic` and `evaluate_harness`."""
    yield PipelineProvider(
        name="agentic",
        target="roll_pipeline_agentic.agentic:AgenticPipeline",
        config="roll_pipeline_agentic.config:AgenticConfig",
        plan="roll_core.pipelines.plans:rlvr",
        starter="roll_pipeline_agentic.starters:agentic",
        evaluation="evaluate_agentic",
        summary="Reinforcement learning in multi-turn environments",
    )
    yield PipelineProvider(
        name="evaluate_agentic",
        target="roll_pipeline_agentic.agentic:EvaluateEpisodesPipeline",
        config="roll_pipeline_agentic.config:EvaluateEpisodesConfig",
        plan="roll_core.pipelines.plans:evaluate",
        summary="Scores of a model in multi-turn environments, without training",
    )
    yield PipelineProvider(
        name="evaluate_harness",
        target="roll_pipeline_agentic.harness:EvaluateHarnessPipeline",
        config="roll_pipeline_agentic.config:EvaluateHarnessConfig",
        plan="roll_core.pipelines.plans:evaluate",
        summary="Scores of a model by lm-evaluation-harness or Inspect, without training",
    )


@hookimpl
def roll_advantage_estimators() -> Iterator[AdvantageProvider]:
    """Advantage estimators of turns, see docs/algorithms.md."""
    turns = "roll_pipeline_agentic.turn_advantages"
    yield AdvantageProvider(
        name="step_reinforce",
        target=f"{turns}:step_reinforce",
        config="roll_pipeline_agentic.config:StepReinforceOptions",
        summary="Discounted reward to go of each turn",
        needs_turns=True,
        normalise="none",
    )
    yield AdvantageProvider(
        name="agentic_reinforce",
        target=f"{turns}:agentic_reinforce",
        summary="Reward to go of each turn, with the pipeline's discount",
        needs_turns=True,
        normalise="none",
    )
    yield AdvantageProvider(
        name="gigpo",
        target=f"{turns}:gigpo",
        config="roll_pipeline_agentic.config:GiGPOOptions",
        summary="Relative reward of the rollout, and of turns from the same state",
        needs_groups=True,
        needs_turns=True,
        normalise="group",
    )
    yield AdvantageProvider(
        name="turn_gae",
        target=f"{turns}:turn_gae",
        summary="Generalised advantage estimation over turns, with a critic",
        needs_critic=True,
        needs_turns=True,
        normalise="none",
    )


@hookimpl
def roll_environments() -> Iterator[EnvironmentProvider]:
    """Environments whose episodes depend only on the seed. Their methods never block."""
    package = "roll_pipeline_agentic.environments"
    for name, cls, summary in (
        ("guess_number", "GuessNumber", "Find a number by guesses that are answered with higher or lower"),
        ("frozen_lake", "FrozenLake", "Walk to the goal without falling into a hole"),
        ("sokoban", "Sokoban", "Push boxes onto targets"),
        ("nim", "Nim", "Take stones in turns; two players, the last stone wins"),
    ):
        yield EnvironmentProvider(
            name=name,
            target=f"{package}.{name}:{cls}",
            config=f"{package}.config:{cls}Config",
            summary=summary,
            isolation="inline",
        )


@hookimpl
def roll_agents() -> Iterator[AgentProvider]:
    """An agent that is a program of any kind. Its processes are children of the driver."""
    yield AgentProvider(
        name="command",
        target="roll_pipeline_agentic.agents:CommandAgent",
        config="roll_pipeline_agentic.config:CommandConfig",
        summary="Run a program that calls the policy at OPENAI_BASE_URL or ANTHROPIC_BASE_URL",
        isolation="inline",
        concurrency=32,
    )
