"""The reward of this run. Replace the body by your own."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def color(pixels: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Rewards `[B]`: 1 minus the mean distance of the pixels to the colour of the prompt.

    `pixels` are `[B, 3, height, width]` in [0, 1]. `columns` has the columns of the rows that `numbers` names, here
    `color` `[B, 3]`. Operations of torch keep the reward differentiable.
    """
    target = columns["color"].to(pixels)[:, :, None, None]
    return 1 - (pixels - target).abs().mean(dim=(1, 2, 3))
