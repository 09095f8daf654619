"""Prompts with images: vLLM gets the run's token ids, and the pixels of the run's processor.

vLLM's own way is to receive one placeholder per image and to expand it. The tokens of the prompt could then differ from
those that the trainer computes logprobs for. Here the expanded ids stay as they are, and vLLM gets the ranges of images
in them.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.processor import loaded_processor
from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.data.processor import Processor
    from roll_core.types import GenerateRequest, TokenIds


def use_image_processor_of_run() -> None:
    """Make vLLM process images with the run's image processor (Pillow), as the trainer does. Idempotent.

    vLLM loads the one of torchvision, whose resize gives other pixels.
    """
    from vllm.multimodal.processing.context import InputProcessingContext

    load = InputProcessingContext.get_hf_processor
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def get_hf_processor(context: Any, *types: Any, **options: Any) -> Any:
        processor = load(context, *types, **options)
        of_run = loaded_processor(context.tokenizer) if context.tokenizer is not None else None
        if of_run is not None:
            processor.image_processor = of_run.image_processor
        return processor

    InputProcessingContext.get_hf_processor = get_hf_processor


def image_input(renderer: Any, request: GenerateRequest, processor: Processor) -> Any:
    """vLLM's input for a request with images. `renderer` is the engine's, `processor` that of the run.

    Raises `DataError` if vLLM has another number of features for an image.
    """
    from vllm.inputs import mm_input
    from vllm.multimodal.parse import parse_mm_uuids
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    ids, media = request.prompt_ids, request.media
    vllm_processor = renderer.get_mm_processor()
    images = vllm_processor.info.parse_mm_data({"image": [image.image() for image in media]})
    digests = parse_mm_uuids({"image": [image.digest for image in media]})
    inputs = ProcessorInputs(ids.tolist(), images, digests)
    processed = vllm_processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
    nums = [processor.num_features(image) for image in media]
    for num, image, (update, *_) in zip(nums, media, processed.prompt_updates["image"], strict=True):
        vllm_num = update.content.full.count(processor.image_token_id)
        if vllm_num != num:
            raise DataError(
                f"request {request.id!r}: an image of {image.width} x {image.height} pixels has {num} features, and"
                f" {vllm_num} in vLLM ({type(vllm_processor).__name__}): this model is not supported with images"
            )
    return mm_input(
        prompt_token_ids=inputs.prompt,
        mm_kwargs=processed.kwargs,
        mm_hashes=processed.hashes,
        mm_placeholders={"image": _ranges(ids, processor.image_token_id, nums)},
    )


def _ranges(ids: TokenIds, image_token_id: int, nums: Sequence[int]) -> list[Any]:
    """Ranges of images in a prompt: from the first to the last token of their `nums` features.

    Models may have other tokens between those of an image, such as the ends of its rows.
    """
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    ranges = []
    for places in np.split(np.flatnonzero(ids == image_token_id), np.cumsum(nums)[:-1]):
        first, last = int(places[0]), int(places[-1])
        is_embed = torch.from_numpy(ids[first : last + 1] == image_token_id)
        contiguous = len(places) == len(is_embed)
        ranges.append(PlaceholderRange(first, len(is_embed), None if contiguous else is_embed))
    return ranges
