"""Layouts of weights that vLLM shuffles after loading, learned as permutations.

Kernels want weights packed in tiles, with rows exchanged, or padded. Where the elements go does not depend on their
values. So matrices that hold the digits of their elements' indices are shuffled by vLLM's own functions, and the digits
are read at their new places. Each index must then occur exactly once; other layouts are not accepted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

DIGIT_BITS = 7
"""Bits of an index in one shuffled matrix; bfloat16 represents integers up to 256."""
_learned: dict[Hashable, Sequence[Tensor | None]] = {}


def learned(
    kernel: Hashable,
    shuffle: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    shapes: Sequence[tuple[int, int]],
    like: Tensor,
) -> Sequence[Tensor | None]:
    """For each element of matrices of these shapes, in row-major order, its index in the shuffled matrix.

    `shuffle` takes several of each matrix, `[2, *shape]` in the dtype and on the device of `like`, and returns them
    shuffled. `kernel` identifies what it does. None for a matrix whose layout is no permutation, or mixes it with the
    others. Results are kept: 8 bytes per element of one matrix.
    """
    key = kernel, tuple(shapes), like.dtype, like.device
    if key not in _learned:
        numbers = [torch.zeros((), dtype=torch.int64, device=like.device) for _ in shapes]
        for shift in range(0, max(map(math.prod, shapes)).bit_length(), DIGIT_BITS):
            shuffled = shuffle([_digits(shape, shift, like) for shape in shapes])
            for index, bytes_2N in enumerate(shuffled):
                numbers[index] = numbers[index] + (bytes_2N.reshape(2, -1).to(torch.int64) << shift)
        _learned[key] = [
            _inverse(numbers_2N, math.prod(shape)) for numbers_2N, shape in zip(numbers, shapes, strict=True)
        ]
    return _learned[key]


def _digits(shape: tuple[int, int], shift: int, like: Tensor) -> Tensor:
    """`[2, *shape]`: digits of each element's index plus 1, and a matrix of zeros, which padding has too."""
    index = torch.arange(1, math.prod(shape) + 1, device=like.device)
    digits = ((index >> shift) & ((1 << DIGIT_BITS) - 1)).to(like.dtype).view(1, *shape)
    return torch.cat([digits, torch.zeros_like(digits)])


def _inverse(found_2N: Tensor, numel: int) -> Tensor | None:
    """Place of each index minus 1 in the first row; None unless each occurs once, and none in the second row."""
    indices, others = found_2N[0], found_2N[1]
    places = indices.nonzero().flatten()
    inverse = torch.full((numel,), -1, dtype=torch.int64, device=indices.device)
    if len(places) != numel or int(indices.max()) > numel or others.any():
        return None
    inverse[indices[places] - 1] = places
    return inverse if bool((inverse >= 0).all()) else None
