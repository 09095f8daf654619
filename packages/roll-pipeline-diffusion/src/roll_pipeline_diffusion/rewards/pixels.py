"""Rewards computed from the pixels alone: brightness, colour, size as JPEG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from roll_core.errors import DataError
from roll_core.types import Reward
from roll_pipeline_diffusion.rewards.base import DifferentiableReward, ImageReward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from roll_pipeline_diffusion.rewards.base import Images, Row
    from roll_pipeline_diffusion.rewards.config import ColorConfig, JpegSizeConfig

LUMINANCE = (0.2126, 0.7152, 0.0722)
"""Weights of red, green and blue (ITU-R BT.709)."""


class BrightnessReward(DifferentiableReward):
    """Mean of `0.2126 R + 0.7152 G + 0.0722 B` over the pixels."""

    @override
    def score_tensor(self, pixels: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        weights = pixels.new_tensor(LUMINANCE).view(3, 1, 1)
        return (pixels * weights).sum(1).mean((1, 2))


class ColorReward(DifferentiableReward):
    """`1 − mean |pixel − colour|` over pixels and channels."""

    config: ColorConfig

    @override
    def row_arrays(self, prompt: str, row: Row) -> Mapping[str, NDArray[np.generic]]:
        rgb = row.get("color") if self.config.color is None else self.config.color
        try:
            color = np.asarray(rgb, np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"column 'color' is {rgb!r}, expected three numbers") from error
        if color.shape != (3,) or not ((color >= 0) & (color <= 1)).all():
            raise DataError(f"column 'color' is {rgb!r}, expected red, green and blue from 0 to 1")
        return {"color": color}

    @override
    def score_tensor(self, pixels: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
        return 1 - (pixels - arrays["color"].to(pixels)[:, :, None, None]).abs().mean((1, 2, 3))


class JpegSizeReward(ImageReward):
    """Size as JPEG in kB (1000 bytes). In DDPO (arXiv:2305.13301): incompressibility, and with weight -1
    compressibility."""

    config: JpegSizeConfig

    @override
    def score_images(self, images: Images, prompts: Sequence[str], rows: Sequence[Row]) -> Sequence[Reward]:
        return [Reward(value=self._size(image) / 1000) for image in images]

    def _size(self, image: Images) -> int:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=self.config.quality)
        return len(file.getvalue())
