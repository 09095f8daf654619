"""Digest that a tensor's own device computes, with integer operators that every device of torch has.

Exact definition, so that other implementations can reproduce it:

1. Take the tensor's elements in row-major order as little-endian bytes: N bytes, in chunks of 256 KiB (`CHUNK_BYTES`).
2. View a chunk as little-endian signed 32-bit words `w[0], w[1], ...`; zero bytes complete the last one.
3. `leaf[k]` is `(Σ w[i]·a[i] mod 2⁶⁴, Σ w[i]·b[i] mod 2⁶⁴)` of chunk k, as two little-endian 64-bit words. The keys `a`
   are the first 65,536 outputs of SplitMix64 with seed 0, and the keys `b` are the next 65,536.
4. The digest is `multilinear:`, and then the XXH3 128-bit hash (seed 0) of N as a little-endian 64-bit word, followed
   by all leaves, as 32 lower-case hex digits.

Sums modulo 2⁶⁴ do not depend on their order, so every device computes the same digest. torch has no matrix products of
integers on CUDA. Elementwise products and sums of int64 wrap on all devices, and this module needs nothing else.

The leaves are multilinear hashes (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). The difference
of two words is below 2³² and so has at most 31 factors of two. Two different chunks therefore have an equal sum for at
most one in 2³³ choices of the keys, and an equal leaf for at most one in 2⁶⁶. The keys are fixed: this detects
accidents, not attacks. On a host, XXH3 is about 8 times as fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MULTILINEAR = "multilinear:"
"""Prefix of these digests."""
CHUNK_BYTES = 256 * 1024
"""Bytes of one leaf."""
NUM_KEYS = CHUNK_BYTES // 4
HOST_SPAN_BYTES, SPAN_BYTES = 2 << 20, 8 << 20
"""Bytes whose products are in memory at a time, on the host and on a device. The products take four times as much."""


def keys(device: torch.device | str = "cpu") -> Tensor:
    """The keys `[2, NUM_KEYS]` in int64, computed on `device`: SplitMix64 (Steele, Lea and Flood, 2014)."""
    import torch

    def mixed(bits_K: Tensor, shift: int, factor: int) -> Tensor:
        shifted = (bits_K >> shift) & ((1 << (64 - shift)) - 1)  # torch shifts signed numbers arithmetically
        return (bits_K ^ shifted) * factor

    states = torch.arange(1, 2 * NUM_KEYS + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    states = mixed(mixed(states, 30, _signed(0xBF58476D1CE4E5B9)), 27, _signed(0x94D049BB133111EB))
    return mixed(states, 31, 1).view(2, NUM_KEYS)


def leaves_of(tensor: Tensor, keys_2K: Tensor) -> Tensor:
    """Leaves of a contiguous tensor, `[num_chunks, 2]` in int64 on its device. `keys_2K` are `keys` on that device."""
    import torch

    flat = tensor.reshape(-1).view(torch.uint8)
    leaves = [torch.zeros(0, 2, dtype=torch.int64, device=flat.device)]
    span_bytes = HOST_SPAN_BYTES if flat.is_cpu else SPAN_BYTES
    for start in range(0, flat.numel(), span_bytes):
        words = _words(flat[start : start + span_bytes])
        num_full = len(words) // NUM_KEYS
        if num_full:
            leaves.append((words[: num_full * NUM_KEYS].view(num_full, 1, NUM_KEYS) * keys_2K).sum(dim=-1))
        rest = words[num_full * NUM_KEYS :]
        if len(rest):
            leaves.append((rest * keys_2K[:, : len(rest)]).sum(dim=-1, keepdim=True).T)
    return torch.cat(leaves)


def hexdigest(leaves: bytes, num_bytes: int) -> str:
    """Digest of a tensor of `num_bytes`, whose leaves were read back from the device."""
    return MULTILINEAR + xxhash.xxh3_128_hexdigest(num_bytes.to_bytes(8, "little") + leaves)


def _signed(bits: int) -> int:
    """The signed 64-bit number with these bits."""
    return bits - (1 << 64 if bits >> 63 else 0)


def _words(flat: Tensor) -> Tensor:
    """Bytes as signed 32-bit words, copied if they are not aligned or do not fill the last word."""
    import torch

    if flat.numel() % 4 or flat.storage_offset() % 4:
        padded = flat.new_zeros(-(-flat.numel() // 4) * 4)
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int32)
