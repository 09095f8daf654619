"""Qwen's processors of videos: which frames they sample, and the arrays of these frames for the model.

transformers' own need torchvision, which may be missing, and whose resize gives other pixels than Pillow's. Sampling,
sizes and patches are those of transformers 5.24: `Qwen2VLVideoProcessor` and `Qwen3VLVideoProcessor`. Frames are
processed by the image processor of the model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from roll_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from PIL import Image

    from roll_core.types import SampledFrames

FPS = 2.0
"""Sampled frames per second of Qwen's own tools (qwen-vl-utils), for processors without a rate of their own."""


class Qwen2VideoProcessor:
    """Processor of Qwen2-VL and Qwen2.5-VL, which `ProcessorMixin` of transformers calls."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")
    least_pixels, most_pixels, max_video_tokens = 128 * 28 * 28, 768 * 28 * 28, 128_000
    marks_frames = False
    """True if frames have a time, a start and an end of their own in the text."""

    def __init__(self, image_processor: Any, settings: Mapping[str, Any]) -> None:
        """`settings` are the keys of the model's `video_preprocessor_config.json`. Default: those of images."""
        self._image_processor = image_processor
        of_images = ("patch_size", "temporal_patch_size", "merge_size")
        self.patch_size, self.temporal_patch_size, self.merge_size = (
            int(settings.get(key) or getattr(image_processor, key)) for key in of_images
        )
        names = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
        self._pixels = {name: settings[name] for name in names if settings.get(name) is not None}
        size = settings.get("size") or {}
        self._min_pixels = int(settings.get("min_pixels") or size.get("shortest_edge") or self.least_pixels)
        self._max_pixels = int(settings.get("max_pixels") or size.get("longest_edge") or self.most_pixels)
        self._caps = bool(settings.get("cap_pixels_per_frame"))
        self._max_video_tokens = int(settings.get("max_video_tokens") or self.max_video_tokens)
        self._min_frames, self._max_frames = (int(settings.get(f"{end}_frames") or num) for end, num in _FRAMES)
        self._num_frames = settings.get("num_frames")
        self.fps = float(settings.get("fps") or FPS)
        """Sampled frames per second."""

    def sample(
        self, num_frames: int, fps: float, *, target_fps: float | None = None, max_frames: int | None = None
    ) -> tuple[int, ...]:
        """Indices of the frames to read of a video with `num_frames` frames and `fps` frames per second.

        `target_fps` replaces the processor's rate or number of frames, and `max_frames` lowers its maximum. Raises
        `DataError` for a video that is too short.
        """
        num_target: float = num_frames / fps * (target_fps or self.fps)
        if self._num_frames is not None and target_fps is None:
            num_target = int(self._num_frames)
        most = min(self._max_frames, num_frames, max_frames or num_frames)
        num = self._num_sampled(num_target, most)
        if num < self.temporal_patch_size:
            raise DataError(
                f"a video has {num_frames} frames, of which {num} would be sampled: the model reads at least"
                f" {self.temporal_patch_size}"
            )
        return self._indices(num_frames, num)

    def _num_sampled(self, num_target: float, most: int) -> int:
        step = self.temporal_patch_size
        return math.floor(min(max(num_target, self._min_frames), most // step * step) / step) * step

    def _indices(self, num_frames: int, num: int) -> tuple[int, ...]:
        import torch

        # Rounded as by the original: an index of other arithmetic may be one lower.
        return tuple(torch.arange(0, num_frames, num_frames / num).int().tolist())

    def _frame_size(self, num: int, height: int, width: int) -> tuple[int, int]:
        """Height and width to which frames are resized. Raises `ValueError` for a video that is too narrow."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor, most = self.patch_size * self.merge_size, self._max_pixels
        if self._caps:
            budget = int(self._max_video_tokens * factor * factor * 0.9) * self.temporal_patch_size // num
            most = max(min(most, budget), int(self._min_pixels * 1.05))
        size: tuple[int, int] = smart_resize(height, width, factor, min_pixels=self._min_pixels, max_pixels=most)
        return size

    def __call__(
        self, videos: Sequence[Sequence[Image.Image]], *, video_metadata: Sequence[SampledFrames], **_: Any
    ) -> dict[str, Any]:
        """Arrays of videos, given as sampled frames: `pixel_values_videos` `[patches, values]`, `video_grid_thw`
        `[videos, 3]`, and `video_metadata`."""
        import numpy as np
        from transformers.video_utils import VideoMetadata

        patches, grids = zip(*map(self._patches, videos), strict=True)
        metadata = [
            VideoMetadata(total_num_frames=sampled.num_frames, fps=sampled.fps, frames_indices=list(sampled.indices))
            for sampled in video_metadata
        ]
        arrays = {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": np.array(grids, dtype=np.int64)}
        return {**arrays, "video_metadata": metadata}

    def _patches(self, frames: Sequence[Image.Image]) -> tuple[npt.NDArray[Any], tuple[int, int, int]]:
        import numpy as np

        height, width = self._frame_size(len(frames), frames[0].height, frames[0].width)
        tube, merge, patch = self.temporal_patch_size, self.merge_size, self.patch_size
        # Frames have their size already: the image processor rescales and normalises, and repeats each frame in time.
        arrays = [
            self._image_processor(
                images=[frame.resize((width, height), self._image_processor.resample)],
                do_resize=False,
                **self._pixels,
                patch_size=patch,
                merge_size=merge,
                temporal_patch_size=1,
                return_tensors="np",
            )["pixel_values"]
            for frame in frames
        ]
        arrays += arrays[-1:] * (-len(arrays) % tube)
        grid = len(arrays) // tube, height // patch, width // patch
        cells_FNCV = np.stack(arrays).reshape(len(arrays), grid[1] * grid[2], 3, patch * patch)
        by_tube = cells_FNCV.reshape(grid[0], tube, *cells_FNCV.shape[1:]).transpose(0, 2, 3, 1, 4)
        return np.ascontiguousarray(by_tube).reshape(grid[0] * grid[1] * grid[2], -1), grid


class Qwen3VideoProcessor(Qwen2VideoProcessor):
    """Processor of Qwen3-VL. Its limits of pixels are those of all frames together."""

    least_pixels, most_pixels, max_video_tokens = 128 * 32 * 32, 768 * 32 * 32, 768
    marks_frames = True

    def _num_sampled(self, num_target: float, most: int) -> int:
        return min(max(int(num_target), self._min_frames), most)

    def _indices(self, num_frames: int, num: int) -> tuple[int, ...]:
        import numpy as np

        return tuple(np.linspace(0, num_frames - 1, num).round().astype(int).tolist())

    def _frame_size(self, num: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        factor, most = self.patch_size * self.merge_size, self._max_pixels
        if self._caps:
            budget = min(self._max_video_tokens * factor * factor, most // num)
            most = max(budget, int(self._min_pixels * 1.05)) * num
        size: tuple[int, int] = smart_resize(
            num, height, width, self.temporal_patch_size, factor, min_pixels=self._min_pixels, max_pixels=most
        )
        return size


_FRAMES = ("min", 4), ("max", 768)

VIDEO_PROCESSORS: Mapping[str, type[Qwen2VideoProcessor]] = {
    "Qwen2VLProcessor": Qwen2VideoProcessor,
    "Qwen2_5_VLProcessor": Qwen2VideoProcessor,
    "Qwen3VLProcessor": Qwen3VideoProcessor,
}
"""By the class of the model's processor in transformers."""
