"""Filters (top-k, top-p, min-p) and seeded sampling, on tensors of any device.

B requests of a batch    V tokens of the vocabulary
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

GAMMA, MIX_A, MIX_B = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Constants of SplitMix64 (Steele, Lea, Flood, 2014) as signed integers; torch multiplies int64 modulo 2**64."""


def filtered(probs_BV: Tensor, top_ks_B: Tensor, top_ps_B: Tensor, min_ps_B: Tensor) -> Tensor:
    """Probabilities `[B, V]` after top-k, then top-p of the remaining mass, then min-p; removed tokens have 0.

    The result is not renormalized.
    """
    falling, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    falling = falling.double()
    ranks = torch.arange(falling.shape[-1], device=falling.device)
    falling[ranks >= top_ks_B.view(-1, 1)] = 0.0
    before = falling.cumsum(dim=-1) - falling
    falling[before >= top_ps_B.view(-1, 1).double() * falling.sum(dim=-1, keepdim=True)] = 0.0
    falling[falling < min_ps_B.view(-1, 1).double() * falling[:, :1]] = 0.0
    return torch.zeros_like(probs_BV).scatter_(-1, order, falling.to(probs_BV.dtype))


def seeded_choice(weights_BV: Tensor, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Tokens `[B]` sampled in proportion to the weights; the result depends only on weights, seed and position."""
    # Exponential race: of exponential variables with these rates, each is the minimum with probability proportional to
    # its rate.
    chances = uniform(seeds_B, positions_B, weights_BV.shape[-1])
    return (weights_BV.double() / -chances.log()).argmax(dim=-1)


def uniform(seeds_B: Tensor, positions_B: Tensor, num: int) -> Tensor:
    """Uniform numbers `[B, num]` in the open interval (0, 1); they depend only on seed, position and column."""
    columns = torch.arange(1, num + 1, device=seeds_B.device, dtype=torch.int64)
    keys_B = _mix(_mix(seeds_B) + positions_B.to(torch.int64) * GAMMA)
    bits = _shifted(_mix(keys_B[:, None] + columns * GAMMA), 12)
    return (bits.double() + 0.5) * 2.0**-52


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shifted(values, 30)) * MIX_A
    values = (values ^ _shifted(values, 27)) * MIX_B
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Logical right shift: fills with zeros, as for an unsigned integer."""
    return (values >> by) & ((1 << (64 - by)) - 1)
