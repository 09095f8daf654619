"""Placement of a microbatch's sequences on the ranks that share it.

Context parallelism splits each sequence into 2 · CP pieces; rank r gets the r-th piece from both ends, which balances
the attention work (load-balanced sharding in arXiv:2411.01783). Sequences are padded to a multiple of 2 · CP. Sequence
parallelism splits the tokens between layers once more, over TP ranks; the microbatch is padded at its end to fit.

    CP = 2    sequence  a0 a1 a2 a3 | b0 b1 b2 .        rank 0: a0 a3 b0 .        rank 1: a1 a2 b1 b2

Shapes: T flat tokens of S sequences, P with padding, L on this rank, N on this rank from whose state an output is
computed, M MoE layers, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from roll_core.spec.module_program import move_tensors
from roll_modeling.attention import FlatLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.spec.train import MicroBatch


@dataclass(kw_only=True)
class Packed(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed sequence parameters, whose bounds are on the host: its rotary embeddings read them in every
    layer."""

    layout: FlatLayout
    """Padded sequences, over all context-parallel ranks."""

    def on_device(self, device: torch.device) -> Packed:
        """With bounds on `device`, as kernels of attention take them."""
        bounds = self.layout.sequences(device).bounds
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        moved: dict[str, Any] = {name: bounds for name in names if getattr(self, name) is not None}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """Expert choices of the inference engine for this rank's tokens.

    The choices for all layers and microbatches stay on the host. A stage copies those of its own routers when it
    computes a microbatch.
    """

    experts_TMK: Tensor
    places_L: Tensor
    """Index of each token among the T, -1 for padding; on the device of `experts_TMK`."""
    device: torch.device
    """Device of the computation."""

    def of(self, layers: Sequence[int], part: int = 0, num_parts: int = 1) -> Tensor:
        """Experts of one slice of the tokens, `[L / num_parts, layers, K]`, int64 on `device`; -1 for padding."""
        places = self.places_L.chunk(num_parts)[part]
        columns = torch.tensor(layers, dtype=torch.int64, device=places.device)
        experts = self.experts_TMK[places.clamp(min=0)[:, None], columns[None]]
        return experts.masked_fill_((places < 0)[:, None, None], -1).to(self.device).to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """This rank's tokens of a microbatch."""

    tokens_1L: Tensor
    """Token ids; 0 for padding."""
    packed: Packed
    rows_N: Tensor
    """Indices among the L of the tokens from whose state an output is computed."""
    targets_N: Tensor
    """Target token of each output."""
    places_N: Tensor
    """Index of each target token among the T."""
    routed_experts: RoutedExperts | None = None
    """Experts to replay, if given."""
    members_SL: Tensor | None = None
    """`[S, L]`, for router losses: True if a token of this rank belongs to a trained sequence. Otherwise None."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A microbatch in the pipeline."""

    micro: MicroBatch
    packing: Packing
    idle: bool
    """True for a dummy microbatch that runs only because other ranks need this rank in collectives."""


def num_padded(lengths: Sequence[int], *, cp_size: int, align: int) -> int:
    """Number of tokens P after padding, of sequences with these lengths; see `pack_for`."""
    pieces = _pieces(cp_size)
    tokens = sum(-(-length // pieces) * pieces for length in lengths)
    return -(-tokens // (pieces * align)) * pieces * align


def pack_for(
    micro: MicroBatch,
    *,
    device: torch.device,
    cp_rank: int,
    cp_size: int,
    align: int,
    masked_only: bool = False,
    own_state: bool = False,
    at_least: int = 0,
    members: bool = False,
) -> Packing:
    """This rank's `Packing` of a microbatch in host memory: computed there, and moved to `device` in one copy.

    - `align` divides the number of tokens of each context-parallel rank.
    - `masked_only` restricts outputs to tokens in the loss. Outputs are computed from the state before their token.
    - `own_state` computes outputs of every token from its own state instead.
    - `at_least` is a lower bound of the total number of tokens P, a value of `num_padded`.
    - `members` also computes `members_SL`.
    """
    lengths = list(micro.lengths)
    pieces = _pieces(cp_size)
    padded = [-(-length // pieces) * pieces for length in lengths]
    short = max(num_padded(lengths, cp_size=cp_size, align=align), at_least) - sum(padded)
    if short:  # padding as a separate sequence, so that no other gets longer
        padded, lengths = [*padded, short], [*lengths, 0]
    places = torch.cat(
        [_share(length, padded_length, cp_rank, cp_size) for length, padded_length in zip(lengths, padded, strict=True)]
    )
    # Indices within each sequence, -1 for padding; below, within the whole microbatch.
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    share = torch.tensor([length // cp_size for length in padded])
    places = torch.where(places < 0, -1, places + starts.repeat_interleave(share))
    tokens_L = torch.where(places < 0, 0, micro.tokens_T[places.clamp(min=0)])
    if own_state:
        rows_N = (places >= 0).nonzero()[:, 0]
        places_N = places[rows_N]
    else:
        followed = _followed(micro, masked_only)
        rows_N = ((places >= 0) & followed[places.clamp(min=0)]).nonzero()[:, 0]
        places_N = places[rows_N] + 1
    layout = FlatLayout(tuple(padded))
    cu_seqlens = torch.tensor([0, *accumulate(padded)], dtype=torch.int32)
    options: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": max(padded),
        "max_seqlen_kv": max(padded),
    }
    if cp_size > 1:
        # Transformer Engine requires both. Padding is at the end of a sequence, where causal attention ignores it.
        options |= {"cu_seqlens_q_padded": cu_seqlens, "cu_seqlens_kv_padded": cu_seqlens}
    tensors = {
        "tokens_1L": tokens_L[None],
        "rows_N": rows_N,
        "targets_N": micro.tokens_T[places_N],
        "places_N": places_N,
    }
    if members:
        tensors["members_SL"] = _members(micro, places)
    return Packing(
        packed=Packed(**options, layout=layout),
        routed_experts=_routed_experts(micro, places, device),
        **move_tensors(tensors, device),
    )


def on_device(micro: MicroBatch, device: torch.device | str) -> MicroBatch:
    """Move a microbatch to `device`, except for the large `routed_experts_TMK`; see `RoutedExperts`."""
    return replace(replace(micro, routed_experts_TMK=None).to(device), routed_experts_TMK=micro.routed_experts_TMK)


def _routed_experts(micro: MicroBatch, places_L: Tensor, device: torch.device) -> RoutedExperts | None:
    experts_TMK = micro.routed_experts_TMK
    if experts_TMK is None:
        return None
    return RoutedExperts(experts_TMK=experts_TMK, places_L=places_L.to(experts_TMK.device), device=device)


def _pieces(cp_size: int) -> int:
    """Number of pieces that a sequence is split into."""
    return 2 * cp_size if cp_size > 1 else 1


def _share(length: int, padded: int, cp_rank: int, cp_size: int) -> Tensor:
    """Token indices of one sequence on a context-parallel rank; -1 for padding."""
    every = torch.arange(padded)
    every[length:] = -1
    if cp_size == 1:
        return every
    pieces = every.view(2 * cp_size, -1)
    return torch.cat([pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]])


def _members(micro: MicroBatch, places_L: Tensor) -> Tensor:
    """`members_SL` of a packing: False for padding, and for sequences without tokens in the loss."""
    trained_S = torch.zeros(micro.num_sequences, dtype=torch.bool, device=places_L.device)
    trained_S[micro.segments_T[micro.loss_mask_T]] = True
    mine_L = micro.segments_T[places_L.clamp(min=0)]
    numbers_S1 = torch.arange(micro.num_sequences, device=places_L.device)[:, None]
    return (mine_L == numbers_S1) & (places_L >= 0) & trained_S[:, None]


def _followed(micro: MicroBatch, masked_only: bool) -> Tensor:
    """Mask `[T]` of the tokens that are followed by an output token of the same sequence."""
    wanted_T = micro.positions_T > 0
    if masked_only:
        wanted_T = wanted_T & micro.read_T
    return torch.cat([wanted_T[1:], wanted_T.new_zeros(1)])
