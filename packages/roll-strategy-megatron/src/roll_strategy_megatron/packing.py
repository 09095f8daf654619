"""How the sequences of a microbatch lie on the ranks that share it.

Context parallel ranks cut each sequence into 2 · CP pieces, and rank r takes the r-th from both ends, so that all have
as much to attend to (arXiv:2411.01783 calls it load balance); sequences are padded to a multiple of that. With sequence
parallel the tokens between layers are cut once more, over TP ranks; the end of the microbatch is padded to fit.

    CP = 2    sequence  a0 a1 a2 a3 | b0 b1 b2 .        rank 0: a0 a3 b0 .        rank 1: a1 a2 b1 b2

Shapes: T flat tokens of S sequences, P with padding, L on this rank, N on this rank from whose state an output is
computed, M layers that have experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_core.spec.train import MicroBatch


@dataclass(kw_only=True)
class Packed(PackedSeqParams):  # type: ignore[misc]
    """What Megatron's layers are told, and the same as plain numbers, so that no layer waits for the device."""

    padded_lengths: tuple[int, ...]
    """Of the sequences, over all context parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """The engine's choices for this rank's tokens. Those of all layers and microbatches stay where they came, on the
    host: a stage takes what its own routers need when it computes a microbatch."""

    experts_TMK: Tensor
    places_L: Tensor
    """Among the T, -1 for padding; where the experts are."""
    device: torch.device
    """That computes."""

    def of(self, layers: Sequence[int], part: int = 0, num_parts: int = 1) -> Tensor:
        """`[L / num_parts, layers, K]`, int64 on the device, of one part of the tokens; -1 for padding."""
        places = self.places_L.chunk(num_parts)[part]
        columns = torch.tensor(layers, dtype=torch.int64, device=places.device)
        found = self.experts_TMK[places.clamp(min=0)[:, None], columns[None]]
        return found.masked_fill_((places < 0)[:, None, None], -1).to(self.device).to(torch.int64)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """This rank's share of a microbatch."""

    tokens_1L: Tensor
    """With 0 where there is padding."""
    packed: Packed
    rows_N: Tensor
    """Among the L, those from whose state an output is computed."""
    targets_N: Tensor
    """The token of which it speaks."""
    places_N: Tensor
    """Where that token stands among the T."""
    routed_experts: RoutedExperts | None = None
    """Experts that the tokens are sent to."""
    members_SL: Tensor | None = None
    """For losses of routers: which of this rank's tokens belong to which of the sequences that are trained."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A microbatch under way."""

    micro: MicroBatch
    packing: Packing
    idle: bool
    """It counts for nothing: other ranks need this one."""


def num_padded(lengths: Sequence[int], *, cp_size: int, align: int) -> int:
    """P, of sequences of these lengths; see `pack_for`."""
    pieces = _pieces(cp_size)
    tokens = sum(-(-each // pieces) * pieces for each in lengths)
    return -(-tokens // (pieces * align)) * pieces * align


def pack_for(
    micro: MicroBatch,
    *,
    cp_rank: int,
    cp_size: int,
    align: int,
    masked_only: bool = False,
    own: bool = False,
    at_least: int = 0,
    members: bool = False,
) -> Packing:
    """`align` divides the number of tokens of each context parallel rank. All of them together have `at_least` so many,
    a number that `num_padded` gives. Outputs are computed of tokens from the state before them, those in the loss alone
    if `masked_only`; if `own`, of every token from its own state. `members` as well, if asked for."""
    lengths = list(micro.lengths)
    pieces = _pieces(cp_size)
    padded = [-(-each // pieces) * pieces for each in lengths]
    short = max(num_padded(lengths, cp_size=cp_size, align=align), at_least) - sum(padded)
    if short:  # a sequence of padding, of its own so that no other gets longer
        padded, lengths = [*padded, short], [*lengths, 0]
    device = micro.tokens_T.device
    places = torch.cat([_share(length, whole, cp_rank, cp_size) for length, whole in zip(lengths, padded, strict=True)])
    # Each place is counted in its own sequence, -1 for padding; from here on in the whole microbatch.
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    share = torch.tensor([each // cp_size for each in padded])
    on_host = torch.where(places < 0, -1, places + starts.repeat_interleave(share))
    places = on_host.to(device)
    tokens_L = torch.where(places < 0, 0, micro.tokens_T[places.clamp(min=0)])
    if own:
        rows_N = (places >= 0).nonzero()[:, 0]
        places_N = places[rows_N]
    else:
        followed = _followed(micro, masked_only)
        rows_N = ((places >= 0) & followed[places.clamp(min=0)]).nonzero()[:, 0]
        places_N = places[rows_N] + 1
    cu_seqlens = torch.tensor([0, *padded], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    options: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": max(padded),
        "max_seqlen_kv": max(padded),
    }
    if cp_size > 1:
        # Transformer Engine asks for both. What a sequence is padded with stands at its end, where no token sees it.
        options |= {"cu_seqlens_q_padded": cu_seqlens, "cu_seqlens_kv_padded": cu_seqlens}
    return Packing(
        tokens_1L=tokens_L[None],
        packed=Packed(**options, padded_lengths=tuple(padded)),
        rows_N=rows_N,
        targets_N=micro.tokens_T[places_N],
        places_N=places_N,
        routed_experts=_routed_experts(micro, on_host, device),
        members_SL=_members(micro, places) if members else None,
    )


def on_device(micro: MicroBatch, device: torch.device | str) -> MicroBatch:
    """With its tensors on `device`, but for the experts, which are many numbers for each token: see `RoutedExperts`."""
    return replace(replace(micro, routed_experts_TMK=None).to(device), routed_experts_TMK=micro.routed_experts_TMK)


def _routed_experts(micro: MicroBatch, places_L: Tensor, device: torch.device) -> RoutedExperts | None:
    experts_TMK = micro.routed_experts_TMK
    if experts_TMK is None:
        return None
    return RoutedExperts(experts_TMK=experts_TMK, places_L=places_L.to(experts_TMK.device), device=device)


def _pieces(cp_size: int) -> int:
    """Into which a sequence is cut."""
    return 2 * cp_size if cp_size > 1 else 1


def _share(length: int, padded: int, cp_rank: int, cp_size: int) -> Tensor:
    """Places in a sequence that a rank takes; -1 beyond its end."""
    every = torch.arange(padded)
    every[length:] = -1
    if cp_size == 1:
        return every
    pieces = every.view(2 * cp_size, -1)
    return torch.cat([pieces[cp_rank], pieces[2 * cp_size - 1 - cp_rank]])


def _members(micro: MicroBatch, places_L: Tensor) -> Tensor:
    """Of padding, and of sequences none of whose tokens is in the loss, nothing."""
    trained_S = torch.zeros(micro.num_sequences, dtype=torch.bool, device=places_L.device)
    trained_S[micro.segments_T[micro.loss_mask_T]] = True
    mine_L = micro.segments_T[places_L.clamp(min=0)]
    numbers_S1 = torch.arange(micro.num_sequences, device=places_L.device)[:, None]
    return (mine_L == numbers_S1) & (places_L >= 0) & trained_S[:, None]


def _followed(micro: MicroBatch, masked_only: bool) -> Tensor:
    """Which tokens have one of their sequence after them that is asked for."""
    wanted_T = micro.positions_T > 0
    if masked_only:
        wanted_T = wanted_T & micro.loss_mask_T
    return torch.cat([wanted_T[1:], wanted_T.new_zeros(1)])
