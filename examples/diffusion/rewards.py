"""Rewards of drawn shapes: the right label, and the distance to the training images.

Both are differentiable. An image is compared with all 96 clean drawings. No image is good for all labels: their mean of
`label` is 13/36 for any image, and a flat image also loses by `drawn`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from examples.diffusion.make_data import LABELS, OFFSETS, draw, parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

TEMPERATURE = 0.02
"""Of the softmax over drawings. Two drawings that differ in shape have a mean squared distance of 0.08."""


@lru_cache
def drawings() -> tuple[Tensor, Tensor]:
    """The clean drawings `[96, 3, 8, 8]` in [-1, 1], and their shape, colour and place as indices `[96, 3]`."""
    pixels = torch.stack([torch.from_numpy(draw(*label, offset)) for label in LABELS for offset in OFFSETS])
    return pixels, torch.tensor([parts(label) for label in LABELS for _ in OFFSETS])


def distances(pixels: Tensor) -> Tensor:
    """Mean squared distance of images with values in [0, 1] to each drawing, `[B, 96]`."""
    clean, _ = drawings()
    return ((2 * pixels.float() - 1)[:, None] - clean.to(pixels.device)).square().mean(dim=(2, 3, 4))


def label(pixels: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Mean probability of the right shape, the right colour and the right place, `[B]`."""
    _, found = drawings()
    right = columns["parts"][:, None] == found.to(pixels.device)  # [B, 96, 3]
    probabilities = torch.softmax(-distances(pixels) / TEMPERATURE, dim=1)
    return (probabilities[..., None] * right).sum(dim=1).mean(dim=1)


def drawn(pixels: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Minus the mean squared distance to the nearest drawing, `[B]`."""
    return -distances(pixels).min(dim=1).values
