"""Prompts with images and videos: vLLM gets the run's token ids, and the pixels of the run's processor.

vLLM's own way is to receive one placeholder per image and to expand it. The tokens of the prompt could then differ from
those that the trainer computes logprobs for. Here the expanded ids stay as they are, and vLLM gets the ranges of images
and videos in them.
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
    from roll_core.types import GenerateRequest, Media, TokenIds


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


def media_input(renderer: Any, request: GenerateRequest, processor: Processor) -> Any:
    """vLLM's input for a request with images or videos. `renderer` is the engine's, `processor` that of the run.

    Raises `DataError` if vLLM has another number of features for an image.
    """
    from vllm.inputs import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    vllm_processor = renderer.get_mm_processor()
    items: dict[str, Any] = {}
    hashes, places = {}, {}
    for kind, inputs_of in (("image", _image_items), ("video", _video_items)):
        media = [item for item in request.media if item.kind == kind]
        if not media:
            continue
        items[kind], hashes[kind] = inputs_of(vllm_processor, request, media, processor)
        token_id = processor.token_id(media[0])
        # vLLM looks for the start of each frame of a marked video, the first of which is before its tokens.
        before = kind == "video" and processor.video_processor is not None and processor.video_processor.marks_frames
        places[kind] = _ranges(request.prompt_ids, token_id, [*map(processor.num_features, media)], int(before))
    return mm_input(
        prompt_token_ids=request.prompt_ids.tolist(),
        mm_kwargs=MultiModalKwargsItems(items),
        mm_hashes=hashes,
        mm_placeholders=places,
    )


def _image_items(
    vllm_processor: Any, request: GenerateRequest, media: Sequence[Media], processor: Processor
) -> tuple[Any, Any]:
    """Arrays of each image by vLLM's processor of the model, whose pixels are those of the run, and their hashes."""
    from vllm.multimodal.parse import parse_mm_uuids
    from vllm.multimodal.processing import ProcessorInputs, TimingContext

    images = vllm_processor.info.parse_mm_data({"image": [image.image() for image in media]})
    digests = parse_mm_uuids({"image": [image.digest for image in media]})
    inputs = ProcessorInputs(request.prompt_ids.tolist(), images, digests)
    processed = vllm_processor._cached_apply_hf_processor(inputs, TimingContext(enabled=False))
    for image, (update, *_) in zip(media, processed.prompt_updates["image"], strict=True):
        num, vllm_num = processor.num_features(image), update.content.full.count(processor.image_token_id)
        if vllm_num != num:
            raise DataError(
                f"request {request.id!r}: an image of {image.width} x {image.height} pixels has {num} features, and"
                f" {vllm_num} in vLLM ({type(vllm_processor).__name__}): this model is not supported with images"
            )
    return processed.kwargs["image"], processed.hashes["image"]


def _video_items(
    vllm_processor: Any, request: GenerateRequest, media: Sequence[Media], processor: Processor
) -> tuple[Any, Any]:
    """Arrays of each video by the run's processor, and their digests. vLLM's own would sample the frames again."""
    import torch
    from vllm.multimodal.inputs import MultiModalKwargsItems

    arrays = {name: torch.from_numpy(array) for name, array in processor.inputs(media).items()}
    items = MultiModalKwargsItems.from_hf_inputs(arrays, vllm_processor._get_mm_fields_config(arrays, {}))
    return items["video"], [video.digest for video in media]


def _ranges(ids: TokenIds, token_id: int, nums: Sequence[int], before: int) -> list[Any]:
    """Ranges of images or videos in a prompt: from `before` the first to the last token of their `nums` features.

    Models may have other tokens between those of an image, such as the ends of its rows.
    """
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    ranges = []
    for places in np.split(np.flatnonzero(ids == token_id), np.cumsum(nums)[:-1]):
        first, last = int(places[0]) - before, int(places[-1])
        is_embed = torch.from_numpy(ids[first : last + 1] == token_id)
        contiguous = len(places) == len(is_embed)
        ranges.append(PlaceholderRange(first, len(is_embed), None if contiguous else is_embed))
    return ranges
