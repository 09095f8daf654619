"""Compares the processors of videos with transformers' own. Run as a program: torchvision, which these need, is stood
in for, with the only function that they call for frames of the right size."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Raise `AssertionError` for the first difference."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))  # before transformers finds out that it is missing
    import numpy as np
    import torch
    from PIL import Image
    from transformers import image_processing_backends
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    from roll_core.data.video_processor import Qwen2VideoProcessor, Qwen3VideoProcessor
    from roll_core.errors import DataError
    from roll_core.types import SampledFrames

    def normalize(images: torch.Tensor, mean: list[float], std: list[float], inplace: bool) -> torch.Tensor:
        return (images - torch.as_tensor(mean)[:, None, None]) / torch.as_tensor(std)[:, None, None]

    def resize(self: Any, image: Any, size: Any, resample: Any) -> Any:
        sizes.append((size.height, size.width))
        return image

    sizes: list[tuple[int, int]] = []
    backends: Any = image_processing_backends
    backends.tvF.normalize, backends.TorchvisionBackend.resize = normalize, resize

    settings: dict[str, Any] = {"size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 96 * 32 * 32}}
    settings |= {"patch_size": 16, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    for (ours, theirs), caps in itertools.product(
        [(Qwen2VideoProcessor, Qwen2VLVideoProcessor), (Qwen3VideoProcessor, Qwen3VLVideoProcessor)], (False, True)
    ):
        keys = {**settings, "cap_pixels_per_frame": caps, "max_video_tokens": 40}
        processor, reference = ours(Qwen2VLImageProcessorPil(), keys), theirs(**keys)
        for num, fps, target in itertools.product(range(2, 70), (1.0, 23.976, 30.0), (0.5, 2.0)):
            metadata = VideoMetadata(total_num_frames=num, fps=fps)
            expected = reference.sample_frames(metadata, fps=target)
            assert list(processor.sample(num, fps, target_fps=target)) == expected.tolist(), (ours, num, fps, target)
        try:
            processor.sample(1, 2.0)
        except DataError:
            pass
        else:
            raise AssertionError("a video of one frame is read")
        rng = np.random.default_rng(0)
        num_equal = 0
        for num, height, width in [(2, 64, 96), (5, 64, 64), (4, 300, 90), (7, 30, 200), (12, 500, 400)]:
            arrays = rng.integers(0, 256, (num, height, width, 3), dtype=np.uint8)
            frames = [Image.fromarray(array) for array in arrays]
            sampled = SampledFrames(indices=tuple(range(num)), num_frames=num, fps=2.0)
            found = processor([frames], video_metadata=[sampled])
            sizes.clear()
            videos = [torch.from_numpy(arrays).permute(0, 3, 1, 2)]
            inputs = {"do_sample_frames": False, "do_convert_rgb": False, "return_tensors": "np"}
            made = reference(videos, **inputs) if height % 32 == width % 32 == 0 else None
            if made is None:
                reference.resize(
                    videos[0][None], reference.size, None, factor=32, temporal_factor=2, cap_pixels_per_frame=caps
                )
            assert (found["video_grid_thw"][0][1:] * 16).tolist() == list(sizes[0]), (ours, caps, num, height, width)
            if sizes[0] == (height, width) and made is not None:
                assert (found["video_grid_thw"] == made["video_grid_thw"]).all()
                np.testing.assert_allclose(found["pixel_values_videos"], made["pixel_values_videos"], atol=2e-6)
                num_equal += 1
        assert num_equal == 2, ours


if __name__ == "__main__":
    main()
