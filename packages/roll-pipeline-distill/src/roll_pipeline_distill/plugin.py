"""Hook that provides the pipeline. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PipelineProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_pipelines() -> Iterator[PipelineProvider]:
    """Register the pipeline `distill`."""
    yield PipelineProvider(
        name="distill",
        target="roll_pipeline_distill.pipeline:DistillPipeline",
        config="roll_pipeline_distill.config:DistillConfig",
        plan="roll_pipeline_distill.plans:distill",
        starter="roll_pipeline_distill.starters:distill",
        evaluation="evaluate",
        summary="Distillation of a teacher, on-policy or on a data set: GKD, MiniLLM, DistiLLM, on-policy distillation",
    )
