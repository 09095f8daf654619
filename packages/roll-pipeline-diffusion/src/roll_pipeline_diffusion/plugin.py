"""Hook that provides the pipeline. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PipelineProvider, RewardProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1
REWARDS = (
    ("image_brightness", "pixels:BrightnessReward", "BrightnessConfig", "Mean luminance of an image; differentiable"),
    (
        "image_color",
        "pixels:ColorReward",
        "ColorConfig",
        "1 minus the mean distance of an image's pixels to a colour; differentiable",
    ),
    (
        "jpeg_size",
        "pixels:JpegSizeReward",
        "JpegSizeConfig",
        "Size of an image as JPEG (DDPO's compressibility and incompressibility)",
    ),
    (
        "clip_score",
        "clip:ClipScoreReward",
        "ClipScoreConfig",
        "Similarity of image and prompt by CLIP or PickScore; differentiable",
    ),
    (
        "aesthetic",
        "clip:AestheticReward",
        "AestheticConfig",
        "Linear head on an image's CLIP embedding; differentiable",
    ),
    (
        "image_text",
        "function:TextReward",
        "ImageTextConfig",
        "Text in an image, read by RapidOCR or a function of yours, compared with the text wanted",
    ),
    (
        "image_function",
        "function:FunctionReward",
        "ImageFunctionConfig",
        "Your Python function of images or videos, with or without gradients",
    ),
    ("image_http", "http:HttpReward", "ImageHttpConfig", "Scores of an HTTP endpoint that gets images as PNG"),
)
"""Name, class, schema and summary of each reward."""


@hookimpl
def roll_pipelines() -> Iterator[PipelineProvider]:
    """Register the pipelines of flow models."""
    yield PipelineProvider(
        name="reward_flow",
        target="roll_pipeline_diffusion.pipeline:RewardFlowPipeline",
        config="roll_pipeline_diffusion.config:RewardFlowConfig",
        plan="roll_pipeline_diffusion.plans:reward_flow",
        tokenizer=False,
        starter="roll_pipeline_diffusion.starters:diffusion",
        summary="Flow models for images and video: reward backpropagation, Flow-GRPO, DiffusionNFT, DPO, flow matching",
    )


@hookimpl
def roll_rewards() -> Iterator[RewardProvider]:
    """Rewards of images and videos."""
    package = "roll_pipeline_diffusion.rewards"
    for name, target, config, summary in REWARDS:
        yield RewardProvider(
            name=name, target=f"{package}.{target}", config=f"{package}.config:{config}", summary=summary
        )
