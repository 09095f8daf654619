"""Registers the pipeline `acme`. Imports nothing heavy."""

from collections.abc import Iterator

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PipelineProvider

ROLL_HOOK_API = 1


@hookimpl
def roll_pipelines() -> Iterator[PipelineProvider]:
    """Pipeline `acme`."""
    yield PipelineProvider(
        name="acme",
        target="roll_pipeline_acme.pipeline:AcmePipeline",
        config="roll_pipeline_acme.config:AcmePipelineConfig",
        plan="roll_pipeline_acme.plans:acme",
        summary="REINFORCE with the mean reward of a prompt's responses as baseline",
    )
