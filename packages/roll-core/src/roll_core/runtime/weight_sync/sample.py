"""A fingerprint of some of the bytes of many tensors: enough to see that an optimizer step changed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from roll_core.spec.weights import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

SAMPLE_BYTES = 64 << 20
"""Read at most about this much; models that are smaller are read completely."""
_PAGE = 4096


def sample_fingerprint(tensors: Sequence[tuple[str, Tensor]], sample_bytes: int = SAMPLE_BYTES) -> str:
    """Hash of names and of every k-th page of each tensor, the smallest k for which it is not more than `sample_bytes`.

    Fingerprints that differ prove that a value differs. Fingerprints that are equal prove the opposite only where
    everything is read; but an optimizer step that moves no value in so many pages of every tensor has moved none.
    """
    total = sum(tensor.nbytes for _, tensor in tensors)
    every = max(1, -(-total // sample_bytes))
    running = xxhash.xxh3_128()
    for name, tensor in tensors:
        running.update(f"{name}\0{digest(_pages(tensor, every))}\0".encode())
    return running.hexdigest()


def _pages(tensor: Tensor, every: int) -> Tensor:
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    num_pages = flat.numel() // _PAGE
    if every == 1 or num_pages == 0:
        return flat
    return flat[: num_pages * _PAGE].view(num_pages, _PAGE)[::every]
