"""Hooks that provide the pipelines. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PipelineProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_pipelines() -> Iterator[PipelineProvider]:
    """Preference training, under two names, and reward models."""
    for name in ("preference", "dpo"):
        yield PipelineProvider(
            name=name,
            target="roll_pipeline_preference.preference:PreferencePipeline",
            config="roll_pipeline_preference.config:PreferenceConfig",
            plan="roll_pipeline_preference.plans:preference",
            starter="roll_pipeline_preference.starters:preference",
            summary="Direct alignment on pairs or labelled responses: DPO, IPO, SimPO, ORPO, KTO",
        )
    yield PipelineProvider(
        name="reward_model",
        target="roll_pipeline_preference.reward_model:RewardModelPipeline",
        config="roll_pipeline_preference.config:RewardModelConfig",
        plan="roll_pipeline_preference.plans:reward_model",
        summary="Reward model on pairs of responses (Bradley-Terry)",
    )
