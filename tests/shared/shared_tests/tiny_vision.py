"""Rows, images and videos for the tiny models of `roll_testing.image_models`, and their logprobs by transformers."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

from roll_core.data.media import image_media
from roll_core.data.processor import processor_of
from roll_core.data.rows import RowVideo
from roll_core.data.video import load_video
from roll_core.spec.config import DataArguments
from roll_core.spec.rollout import IMAGE
from roll_core.types import Media, TrainSequence
from roll_testing.image_models import IMAGE_TOKEN, PLACEHOLDERS, VIDEO_TOKEN, VIDEO_TYPES
from roll_testing.images import qwen_positions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


def picture(width: int, height: int, seed: int = 0, *, black: bool = False) -> Any:
    """A random image of Pillow, or a black one."""
    import numpy as np
    from PIL import Image

    if black:
        return Image.new("RGB", (width, height))
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def tiny_video(folder: Path, *frames: Any, fps: float = 2.0) -> Media:
    """A video with all of these images of Pillow as frames, for the model in `folder`."""
    from transformers import AutoTokenizer

    processor = processor_of(AutoTokenizer.from_pretrained(folder))
    assert processor is not None
    assert processor.video_processor is not None
    video = RowVideo([image_media(frame) for frame in frames], fps)
    return load_video(video, "row", DataArguments(videos="videos"), folder, processor.video_processor)


def vision_sequence(folder: Path, prompt: str, response: str, *images: Any, id: str = "row") -> TrainSequence:
    """A row whose prompt has an `IMAGE` for each of the images of Pillow and videos; its response is trained."""
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = processor_of(tokenizer)
    assert processor is not None
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    media = tuple(image if isinstance(image, Media) else image_media(image) for image in images)
    for item in media:
        placeholder = PLACEHOLDERS[model_type]
        prompt = prompt.replace(IMAGE, placeholder.replace(IMAGE_TOKEN, VIDEO_TOKEN) if item.frames else placeholder, 1)
    text = processor.expand(prompt, media)
    prompt_ids, response_ids = (tokenizer.encode(part, add_special_tokens=False) for part in (text, response))
    tokens = np.array([*prompt_ids, *response_ids])
    return TrainSequence(id=id, tokens=tokens, media=media, loss_mask=np.arange(len(tokens)) >= max(1, len(prompt_ids)))


def vision_batch(folder: Path) -> list[TrainSequence]:
    """Rows of text, of one and two images of different sizes, and of images side by side; one token is a row. With
    videos for models that read them."""
    first, second, third = picture(56, 84), picture(28, 28, 1), picture(64, 96, 2)
    rows = [
        vision_sequence(folder, "no image", "ab", id="text"),
        vision_sequence(folder, f"one{IMAGE}!", "cde", first, id="one"),
        vision_sequence(folder, f"a{IMAGE}b{IMAGE}", "f", second, third, id="two"),
        vision_sequence(folder, "", "g", id="single"),
        vision_sequence(folder, f"{IMAGE}{IMAGE}", "hijk", third, first, id="adjacent"),
        vision_sequence(folder, "", "lm", id="short"),
    ]
    if json.loads((folder / "config.json").read_text())["model_type"] not in VIDEO_TYPES:
        return rows
    long = tiny_video(folder, *(picture(70, 98, seed) for seed in range(6)))
    short = tiny_video(folder, *(picture(56, 56, seed) for seed in range(2)), fps=0.7)
    return [
        *rows,
        vision_sequence(folder, f"see{IMAGE}so", "nop", long, id="video"),
        vision_sequence(folder, f"{IMAGE}a{IMAGE}b{IMAGE}c", "qr", short, first, long, id="all"),
    ]


def transformers_logprobs(
    folder: Path, sequences: Sequence[TrainSequence], model: Any = None, temperature: float = 1.0
) -> Tensor:
    """Logprob of each token by transformers alone, one row at a time, `[T]`. Default: the model in `folder`."""
    import torch

    rows = []
    for sequence in sequences:
        logits_LV, tokens_L = transformers_logits(folder, sequence, model), torch.from_numpy(sequence.tokens)
        logprobs_LV = torch.log_softmax(logits_LV.float() / temperature, dim=-1)
        rows.append(torch.cat([torch.zeros(1), logprobs_LV[:-1].gather(1, tokens_L[1:, None])[:, 0]]))
    return torch.cat(rows)


def transformers_logits(folder: Path, sequence: TrainSequence, model: Any = None) -> Tensor:
    """Output of a model of transformers for a row: logits `[L, V]`, or `[C]` of a sequence classifier.

    Default: the language model in `folder`.
    """
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    if model is None:
        model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = processor_of(AutoTokenizer.from_pretrained(folder))
    assert processor is not None
    tokens = torch.from_numpy(sequence.tokens)[None]
    inputs: dict[str, Tensor] = {}
    for kind in ("image", "video"):
        arrays = processor.inputs([media for media in sequence.media if media.kind == kind])
        inputs |= {name: torch.from_numpy(array) for name, array in arrays.items()}
    if sequence.media and model.config.model_type in VIDEO_TYPES:
        inputs["position_ids"] = qwen_positions(tokens[0], sequence.media, processor, model.config)[:, None]
    arguments = inspect.signature(model.forward).parameters
    if sequence.media and "position_ids" not in inputs:
        types = (tokens == processor.image_token_id).long()
        inputs |= {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in arguments}
    logits: Tensor = model(input_ids=tokens, use_cache=False, **inputs).logits[0]
    return logits
