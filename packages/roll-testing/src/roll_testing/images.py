"""A small model with images and videos, and its reference logits."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_core.data.media import image_media
from roll_core.data.processor import processor_of
from roll_core.data.rows import RowVideo
from roll_core.data.video import load_video
from roll_core.errors import ModelError
from roll_core.spec.config import DataArguments
from roll_core.spec.model import ModelSpec
from roll_core.types import TrainSequence
from roll_modeling.model import DTYPES, quiet
from roll_testing.image_models import tiny_vision
from roll_testing.reference import ReferenceModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from roll_core.data.processor import Processor
    from roll_core.types import Media, TokenIds

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names of the input that is 1 at image tokens and 2 at video tokens."""


def write_image_model(folder: Path) -> ModelSpec:
    """Write a directory with a small Qwen2.5-VL, whose heads have 32 units: few kernels of engines support smaller."""
    with quiet():
        return ModelSpec(path=str(tiny_vision(folder, "qwen2_5_vl", num_heads=2)))


def random_image(width: int, height: int, seed: int = 0) -> Media:
    """Return an image with random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return image_media(Image.fromarray(pixels))


class ImageReference:
    """A stored model with images and videos, run by transformers one sequence at a time."""

    def __init__(self, spec: ModelSpec) -> None:
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        with quiet():
            # Weights are rounded to the strategy's dtype, then computed with in float32.
            rounded = AutoModelForImageTextToText.from_pretrained(
                spec.path, dtype=DTYPES[spec.dtype], attn_implementation="eager"
            )
            self._tokenizer = AutoTokenizer.from_pretrained(spec.path)
        self.module: Any = rounded.float().eval().requires_grad_(False)
        processor = processor_of(self._tokenizer)
        if processor is None:
            raise ModelError(f"{spec.path}: no processor of images")
        self.processor = processor

    def random_video(self, width: int, height: int, num_frames: int, seed: int = 0, *, fps: float = 2.0) -> Media:
        """Return a video with random frames."""
        processor = self.processor.video_processor
        if processor is None:
            raise ModelError(f"{self._tokenizer.name_or_path}: no processor of videos")
        frames = RowVideo([random_image(width, height, 100 * seed + i) for i in range(num_frames)], fps)
        return load_video(frames, "video", DataArguments(videos="videos"), Path(), processor)

    def prompt(self, media: Sequence[Media]) -> TokenIds:
        """Return the ids of a text with these images and videos."""
        parts: list[dict[str, str]] = [{"type": "text", "text": "a"}]
        for i, item in enumerate(media):
            parts += [{"type": item.kind}, {"type": "text", "text": "bc"[i % 2] * 3}]
        text = self._tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        ids = self._tokenizer.encode(self.processor.expand(text, media), add_special_tokens=False)
        return np.asarray(ids, dtype=np.int64)

    def logits(self, tokens: TokenIds, media: Sequence[Media]) -> npt.NDArray[np.float64]:
        """Return `[L, V]` logits of tokens with all of these images and videos.

        Row `t` predicts the token after token `t`.
        """
        with torch.no_grad():
            return self.logits_of(torch.from_numpy(np.asarray(tokens, dtype=np.int64)), media).double().numpy()

    def logits_of(self, tokens_L: Tensor, media: Sequence[Media]) -> Tensor:
        """Return `logits` as a tensor, with gradients if parameters have them."""
        ids = tokens_L[None]
        known = inspect.signature(self.module.forward).parameters
        inputs: dict[str, Tensor] = {}
        for kind in ("image", "video"):
            arrays = self.processor.inputs([item for item in media if item.kind == kind])
            inputs |= {name: torch.from_numpy(array) for name, array in arrays.items() if name in known}
        if media:
            types = (ids == self.processor.image_token_id).long() + 2 * (ids == self.processor.video_token_id)
            inputs |= {name: types for name in TOKEN_TYPES if name in known}
        if any(item.frames for item in media):
            inputs["position_ids"] = qwen_positions(tokens_L, media, self.processor, self.module.config)[:, None]
        logits_LV: Tensor = self.module(input_ids=ids, use_cache=False, **inputs).logits[0]
        return logits_LV

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights, by the names under which they are published."""
        return {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights."""
        for name, parameter in self.module.named_parameters():
            parameter.copy_(weights[name])


def qwen_positions(tokens_L: Tensor, media: Sequence[Media], processor: Processor, config: Any) -> Tensor:
    """Return `[3, L]` positions by the rule of Qwen2-VL (arXiv:2409.12191 §2.1) and its successors, token by token.

    Text continues behind the largest position before it; in transformers' own, text after a video of many frames has
    positions of these. Frames of Qwen2.5-VL have their time as the first position.
    """
    merge = config.vision_config.spatial_merge_size
    grids: list[tuple[int, int, int, float]] = []
    for item in media:
        arrays = processor.inputs([item])
        t, h, w = arrays["image_grid_thw" if item.frames is None else "video_grid_thw"][0].tolist()
        if item.frames is not None and config.model_type == "qwen3_vl":  # the text has the times
            grids += [(1, h, w, 0.0)] * t
        else:
            seconds = float(arrays["second_per_grid_ts"][0]) if "second_per_grid_ts" in arrays else 0.25
            grids.append((t, h, w, seconds * getattr(config.vision_config, "tokens_per_second", 4)))
    positions: list[tuple[int, int, int]] = []
    tokens, start = tokens_L.tolist(), 0
    while len(positions) < len(tokens):
        if tokens[len(positions)] in processor.feature_token_ids:
            t, h, w, speed = grids.pop(0)
            cells = itertools.product(range(t), range(h // merge), range(w // merge))
            positions += [(start + int(i * speed), start + j, start + k) for i, j, k in cells]
        else:
            positions.append((start, start, start))
        start = max(map(max, positions)) + 1
    return torch.tensor(positions).T


class SeenModel(ReferenceModel):
    """The reference of train strategies: logits of the rows of `batch`, with their images and videos."""

    def __init__(self, spec: ModelSpec, *, videos: bool = False) -> None:
        self._reference = ImageReference(spec)
        self.module = self._reference.module
        rows = [*_images(), *(self._videos() if videos else ())]
        self._batch = [self._row(number, media) for number, media in enumerate(rows)]

    def batch(self) -> list[TrainSequence]:
        """Return rows with no, one and two images, and with `videos` also with a video.

        The last token of a row may be the only one in the loss.
        """
        return list(self._batch)

    def logits(self, tokens_L: Tensor) -> Tensor:
        """Run the model's own forward pass with the images of the row that has these tokens."""
        (row,) = (row for row in self._batch if np.array_equal(row.tokens, tokens_L.numpy()))
        return self._reference.logits_of(tokens_L, row.media)

    def _videos(self) -> list[tuple[Media, ...]]:
        """A long video, and a short one beside an image."""
        long, short = (self._reference.random_video(56, 28, num, num) for num in (6, 2))
        return [(long,), (short, random_image(28, 56, 4))]

    def _row(self, number: int, media: tuple[Media, ...]) -> TrainSequence:
        tokens = self._reference.prompt(media)
        text = tokens[~np.isin(tokens, self._reference.processor.media_token_ids)]
        response = np.random.default_rng(number).choice(text, 1 + number)
        tokens = np.concatenate([tokens, response])
        mask = np.arange(len(tokens)) >= len(tokens) - len(response)
        return TrainSequence(id=f"row {number}", tokens=tokens, media=media, loss_mask=mask)


def _images() -> list[tuple[Media, ...]]:
    first, second, third = (random_image(*size, seed) for seed, size in enumerate([(56, 84), (28, 28), (84, 28)]))
    return [(), (first,), (second, third), (third, first), ()]
