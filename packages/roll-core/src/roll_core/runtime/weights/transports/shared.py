"""A fingerprint of some of the bytes of many tensors: enough to see that an optimizer step changed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

SAMPLE_BYTES = 16 << 20
"""Read at most about this much; models that are smaller are read completely."""
_PAGE = 64 << 10


def sample_fingerprint(tensors: Sequence[tuple[str, Tensor]], sample_bytes: int = SAMPLE_BYTES) -> str:
    """Hash of names and of every k-th page of each tensor, the smallest k for which it is not more than `sample_bytes`
    (and the first page of each tensor).

    Fingerprints that differ prove that a value differs. Fingerprints that are equal prove the opposite only where
    everything is read; but an optimizer step that moves no value in so many pages of every tensor has moved none.
    """
    total = sum(tensor.nbytes for _, tensor in tensors)
    every = max(1, -(-total // sample_bytes))
    running = xxhash.xxh3_128()
    for name, tensor in tensors:
        running.update(f"\0{name}\0".encode())
        for page in _pages(tensor, every):
            running.update(page.numpy().data)
    return running.hexdigest()


def _pages(tensor: Tensor, every: int) -> Iterator[Tensor]:
    """Every `every`-th page of the tensor's bytes, on the host."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if every == 1:
        yield flat.cpu()
        return
    for start in range(0, flat.numel(), _PAGE * every):
        yield flat[start : start + _PAGE].cpu()
