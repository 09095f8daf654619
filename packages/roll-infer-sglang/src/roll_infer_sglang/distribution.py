"""Which tokens are kept, and which of them a seed chooses: on tensors, wherever they are.

B requests of a batch    V tokens of the vocabulary
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

GAMMA, MIX_A, MIX_B = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64's constants (Steele, Lea, Flood, 2014), as signed numbers: torch multiplies these modulo 2**64."""


def kept(probs_BV: Tensor, top_ks_B: Tensor, top_ps_B: Tensor, min_ps_B: Tensor) -> Tensor:
    """The probabilities, with 0 for what top-k, then top-p of what is left, then min-p cut; their sum may be any."""
    falling, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    falling = falling.double()
    ranks = torch.arange(falling.shape[-1], device=falling.device)
    falling[ranks >= top_ks_B.view(-1, 1)] = 0.0
    before = falling.cumsum(dim=-1) - falling
    falling[before >= top_ps_B.view(-1, 1).double() * falling.sum(dim=-1, keepdim=True)] = 0.0
    falling[falling < min_ps_B.view(-1, 1).double() * falling[:, :1]] = 0.0
    return torch.zeros_like(probs_BV).scatter_(-1, order, falling.to(probs_BV.dtype))


def seeded_choice(weights_BV: Tensor, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """`[B]` tokens, drawn with these weights, that depend on weights, seed and position alone."""
    # Of exponential variables with these rates, each is the smallest with the probability of its share.
    chances = uniform(seeds_B, positions_B, weights_BV.shape[-1])
    return (weights_BV.double() / -chances.log()).argmax(dim=-1)


def uniform(seeds_B: Tensor, positions_B: Tensor, num: int) -> Tensor:
    """`[B, num]` numbers between 0 and 1, without their ends, that depend on seed, position and column alone."""
    columns = torch.arange(1, num + 1, device=seeds_B.device, dtype=torch.int64)
    keys_B = _mix(_mix(seeds_B) + positions_B.to(torch.int64) * GAMMA)
    bits = _shifted(_mix(keys_B[:, None] + columns * GAMMA), 12)
    return (bits.double() + 0.5) * 2.0**-52


def _mix(values: Tensor) -> Tensor:
    values = (values ^ _shifted(values, 30)) * MIX_A
    values = (values ^ _shifted(values, 27)) * MIX_B
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left as of an unsigned number."""
    return (values >> by) & ((1 << (64 - by)) - 1)
