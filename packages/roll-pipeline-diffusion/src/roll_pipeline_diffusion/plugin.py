"""Hook that provides the pipeline. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.spec.hooks import hookimpl
from roll_core.spec.providers import PipelineProvider, RewardProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

ROLL_HOOK_API = 1


@hookimpl
def roll_pipelines() -> Iterator[PipelineProvider]:
    """Flow models."""
    yield PipelineProvider(
        name="reward_flow",
        target="roll_pipeline_diffusion.pipeline:RewardFlowPipeline",
        config="roll_pipeline_diffusion.config:RewardFlowConfig",
        plan="roll_pipeline_diffusion.plans:reward_flow",
        tokenizer=False,
        summary="Flow models for images and video: reward backpropagation, Flow-GRPO, DiffusionNFT, DPO, flow matching",
    )


@hookimpl
def roll_rewards() -> Iterator[RewardProvider]:
    """Rewards of images and videos."""
    rewards = "roll_pipeline_diffusion.rewards"
    yield RewardProvider(
        name="image_brightness",
        target=f"{rewards}.pixels:BrightnessReward",
        config=f"{rewards}.config:BrightnessConfig",
        summary="Mean luminance of an image; differentiable",
    )
    yield RewardProvider(
        name="image_color",
        target=f"{rewards}.pixels:ColorReward",
        config=f"{rewards}.config:ColorConfig",
        summary="1 minus the mean distance of an image's pixels to a colour; differentiable",
    )
    yield RewardProvider(
        name="jpeg_size",
        target=f"{rewards}.pixels:JpegSizeReward",
        config=f"{rewards}.config:JpegSizeConfig",
        summary="Size of an image as JPEG (DDPO's compressibility and incompressibility)",
    )
    yield RewardProvider(
        name="clip_score",
        target=f"{rewards}.clip:ClipScoreReward",
        config=f"{rewards}.config:ClipScoreConfig",
        summary="Similarity of image and prompt by CLIP or PickScore; differentiable",
    )
    yield RewardProvider(
        name="aesthetic",
        target=f"{rewards}.clip:AestheticReward",
        config=f"{rewards}.config:AestheticConfig",
        summary="Linear head on an image's CLIP embedding; differentiable",
    )
    yield RewardProvider(
        name="image_text",
        target=f"{rewards}.function:TextReward",
        config=f"{rewards}.config:ImageTextConfig",
        summary="Text in an image, read by a function of yours, compared with the text wanted",
    )
    yield RewardProvider(
        name="image_function",
        target=f"{rewards}.function:FunctionReward",
        config=f"{rewards}.config:ImageFunctionConfig",
        summary="Your Python function of images or videos, with or without gradients",
    )
    yield RewardProvider(
        name="image_http",
        target=f"{rewards}.http:HttpReward",
        config=f"{rewards}.config:ImageHttpConfig",
        summary="Scores of an HTTP endpoint that gets images as PNG",
    )
