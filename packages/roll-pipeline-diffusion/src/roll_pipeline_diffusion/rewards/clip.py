"""Rewards by CLIP models: similarity of image and prompt, and aesthetic heads. Weights come from local paths."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from roll_core.errors import ModelError
from roll_pipeline_diffusion.rewards.base import DifferentiableReward

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from roll_pipeline_diffusion.rewards.base import Row
    from roll_pipeline_diffusion.rewards.config import AestheticConfig, ClipScoreConfig

MEAN = (0.48145466, 0.4578275, 0.40821073)
"""Mean of the pixels that CLIP models were trained on, unless `preprocessor_config.json` has others."""
STD = (0.26862954, 0.26130258, 0.27577711)


class _Clip(DifferentiableReward):
    """Embeds images by a CLIP model."""

    config: ClipScoreConfig | AestheticConfig

    @override
    def load(self, device: str) -> None:
        import torch
        from transformers import CLIPModel

        super().load(device)
        self.path = Path(self.config.model_name_or_path).expanduser()
        if not (self.path / "config.json").is_file():
            raise ModelError(f"{self.path}: no config.json, expected the directory of a CLIP model")
        try:
            self.model: Any = CLIPModel.from_pretrained(self.path, local_files_only=True, dtype=torch.float32)
            file = self.path / "preprocessor_config.json"
            keys = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except Exception as error:  # transformers raises many classes for bad files
            raise ModelError(f"{self.path}: the CLIP model cannot be loaded: {error}") from error
        self.model = self.model.to(device).eval().requires_grad_(False)
        self.mean, self.std = keys.get("image_mean", MEAN), keys.get("image_std", STD)

    def embed(self, pixels: Tensor) -> Tensor:
        """Embeddings `[B, D]` of length 1 of pixels in [0, 1].

        The shorter side is resized to the model's size, and the centre is cropped, as CLIP's preprocessing does.
        """
        from torch.nn.functional import interpolate, normalize

        size = int(self.model.config.vision_config.image_size)
        height, width = pixels.shape[-2:]
        scale = size / min(height, width)
        if scale != 1:
            shape = [max(size, round(side * scale)) for side in (height, width)]
            pixels = interpolate(pixels, shape, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
        top, left = (pixels.shape[-2] - size) // 2, (pixels.shape[-1] - size) // 2
        pixels = pixels[..., top : top + size, left : left + size].float()
        mean, std = (pixels.new_tensor(channels).view(3, 1, 1) for channels in (self.mean, self.std))
        features = self.model.vision_model(pixel_values=(pixels - mean) / std).pooler_output
        return normalize(self.model.visual_projection(features), dim=-1)


class ClipScoreReward(_Clip):
    """Cosine similarity of the embeddings of image and prompt (arXiv:2104.08718), without its factor 2.5 and clipping.

    With `logits`, it is multiplied by `exp(logit_scale)`, as in PickScore (arXiv:2305.01569).
    """

    config: ClipScoreConfig

    @override
    def load(self, device: str) -> None:
        from transformers import AutoTokenizer

        super().load(device)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except Exception as error:  # transformers raises many classes for bad files
            raise ModelError(f"{self.path}: the tokenizer cannot be loaded: {error}") from error
        self.texts: dict[str, NDArray[np.generic]] = {}

    @override
    def row_arrays(self, prompt: str, row: Row) -> Mapping[str, NDArray[np.generic]]:
        import torch
        from torch.nn.functional import normalize

        if prompt not in self.texts:
            limit = self.model.config.text_config.max_position_embeddings
            tokens = self.tokenizer([prompt], truncation=True, max_length=limit, return_tensors="pt").to(self.device)
            with torch.no_grad():
                text = self.model.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
                embedding = normalize(self.model.text_projection(text.pooler_output), dim=-1)
            self.texts[prompt] = embedding[0].float().cpu().numpy()
        return {"text": self.texts[prompt]}

    @override
    def score_tensor(self, pixels: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        cosines = (self.embed(pixels) * arrays["text"].to(pixels.device).float()).sum(-1)
        return cosines * self.model.logit_scale.exp() if self.config.logits else cosines


class AestheticReward(_Clip):
    """Linear layers on the normalised embedding of the image, as in LAION's improved aesthetic predictor."""

    config: AestheticConfig

    @override
    def load(self, device: str) -> None:
        super().load(device)
        self.layers = [(weight.to(device), bias.to(device)) for weight, bias in _read_head(Path(self.config.head))]
        width, expected = self.layers[0][0].shape[1], self.model.config.projection_dim
        if width != expected:
            raise ModelError(f"{self.config.head}: takes {width} features, {self.path} has {expected}")

    @override
    def score_tensor(self, pixels: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        features = self.embed(pixels)
        for weight, bias in self.layers:
            features = features @ weight.T + bias
        return features[:, 0]


def _read_head(file: Path) -> list[tuple[Tensor, Tensor]]:
    """Weights and biases of linear layers, in the order of the numbers in their names. Raises `ModelError`."""
    import torch

    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
        names = sorted(
            (name.removesuffix(".weight") for name in state if name.endswith(".weight")),
            key=lambda name: [int(digits) for digits in re.findall(r"\d+", name)],
        )
        layers = [(state[f"{name}.weight"].float(), state[f"{name}.bias"].float()) for name in names]
    except Exception as error:  # torch and safetensors raise many classes for bad files
        raise ModelError(f"{file}: the head cannot be read: {error}") from error
    widths = [tuple(weight.shape) for weight, _ in layers]
    fits = all(after[1] == before[0] for before, after in pairwise(widths))
    if not layers or not fits or widths[-1][0] != 1:
        raise ModelError(f"{file}: shapes of weights {widths}, expected linear layers that end in one value")
    return layers
