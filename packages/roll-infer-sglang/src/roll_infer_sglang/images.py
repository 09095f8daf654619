"""Prompts with images and videos: SGLang gets the run's token ids, and the pixels of the run's processor.

SGLang's own way is to expand one placeholder per image, with the processor of torchvision. Tokens and pixels could then
differ from those that the trainer computes logprobs for. Its processor is replaced by `RunProcessor`, in the server
process, where the expanded ids stay as they are:

    GenerateRequest ── ids, bytes of media ──► RunProcessor ── ids, pixels, ranges, positions ──► SGLang's model
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from roll_core.data.media import received_image
from roll_core.data.processor import SECONDS, processor_of
from roll_core.data.video import stored_video
from roll_infer_sglang.sampling import image_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from roll_core.data.processor import Processor
    from roll_core.types import Media

PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
"""Arrays of a processor with the patches by time, height and width: its model has positions on 3 axes."""
MODALITIES = {"image": Modality.IMAGE, "video": Modality.VIDEO}


class RunProcessor(BaseMultimodalProcessor):  # type: ignore[misc]  # SGLang is untyped to mypy
    """SGLang's processor of requests with images or videos."""

    generates_input_ids_from_raw_prompt = True
    auto_mm_processor_worker_num = 1

    def __init__(self, config: Any, arguments: Any, tokenizer: Any, *others: Any, **options: Any) -> None:
        super().__init__(config, arguments, tokenizer, *others, **options)
        processor = processor_of(tokenizer)
        if processor is None:
            raise ValueError(f"{tokenizer.name_or_path} has no processor of images")
        self._run_processor: Processor = processor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="roll-images")
        """One thread, because the processor has a cache."""

    async def process_mm_data_async(
        self, image_data: Sequence[Any], input_text: str | list[int], *arguments: Any, **options: Any
    ) -> MultimodalProcessorOutput:
        """Ids, pixels and positions of a prompt: its ids are returned as they are, a text is expanded and encoded.

        Raises `ValueError` (`DataError`), which SGLang returns as a client error.
        """
        request: Any = arguments[0] if arguments else options["request_obj"]
        if request.audio_data:
            raise ValueError("audio is not supported")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread, self._process, image_data or (), request.video_data or (), input_text
        )

    def _process(
        self, image_data: Sequence[Any], video_data: Sequence[Any], prompt: str | list[int]
    ) -> MultimodalProcessorOutput:
        processor = self._run_processor
        images = [received_image(getattr(image, "url", image)) for image in image_data]
        if isinstance(prompt, str):
            if video_data:
                raise ValueError("videos of texts are not supported")
            prompt = self._tokenizer.encode(processor.expand(prompt, images, "prompt"), add_special_tokens=False)
        ids = np.asarray(prompt)
        places: list[tuple[list[tuple[int, int]], Media]] = []
        for media in (images, [*map(stored_video, video_data)]):
            if media:
                is_media, nums = ids == processor.token_id(media[0]), [*map(processor.num_features, media)]
                places += zip(image_ranges(is_media, nums), media, strict=True)
        places.sort(key=lambda place: place[0])
        items = [self._item(item, runs) for runs, item in places]
        positions, delta = self._positions(ids, places)
        return MultimodalProcessorOutput(
            input_ids=ids.tolist(),
            mm_items=items,
            im_token_id=processor.image_token_id,
            video_token_id=processor.video_token_id,
            mrope_positions=positions,
            mrope_position_delta=delta,
        )

    def _item(self, media: Media, runs: list[tuple[int, int]]) -> MultimodalDataItem:
        arrays = self._arrays(media)
        if media.frames and GRIDS["video"] in arrays:
            # A row for each frame: in SGLang's encoder of Qwen2.5-VL the frames of one row attend to each other.
            ((num, *size),) = arrays[GRIDS["video"]].tolist()
            arrays[GRIDS["video"]] = torch.tensor([[1, *size]] * num)
        item = MultimodalDataItem(
            modality=MODALITIES[media.kind],
            offsets=runs,
            feature=arrays.pop(PIXELS[media.kind]),
            model_specific_data=arrays,
        )
        item.set_hash(int(media.digest[:16], 16))  # SGLang caches features by 64 bits
        return item

    def _arrays(self, media: Media) -> dict[str, Tensor]:
        return {name: torch.from_numpy(array) for name, array in self._run_processor.inputs([media]).items()}

    def _positions(
        self, ids: npt.NDArray[Any], places: Sequence[tuple[list[tuple[int, int]], Media]]
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Positions `[3, L]` of the tokens, and their distance `[1, 1]` to the indices of later tokens.

        None for a model with one axis of positions. The rule is that of Qwen2-VL (arXiv:2409.12191, section 2.1): text
        continues behind the largest position before it. SGLang's own finds images by the token before them, which may
        be missing.
        """
        if not places:
            return None, None
        parts: list[Tensor] = []
        start = end = 0  # the next position, and the number of tokens that have one
        for runs, media in places:
            arrays = self._arrays(media)
            grid = arrays.get(GRIDS[media.kind])
            if grid is None:
                return None, None
            ((time, height, width),) = grid.tolist()
            merge, num_frames = self.spatial_merge_size, time // len(runs)  # of Qwen3-VL, each frame has a run
            sides = num_frames, height // merge, width // merge
            cells_AT = torch.stack(torch.meshgrid(*map(torch.arange, sides), indexing="ij")).flatten(1)
            if SECONDS in arrays:
                cells_AT[0] = (cells_AT[0] * arrays[SECONDS] * self.hf_config.vision_config.tokens_per_second).long()
            for first, last in runs:
                parts += [torch.arange(start, start + first - end).expand(3, -1), cells_AT + start + first - end]
                start, end = int(parts[-1].max()) + 1, last + 1
        parts.append(torch.arange(start, start + len(ids) - end).expand(3, -1))
        return torch.cat(parts, dim=1), torch.tensor([[start - end]])
