"""Ring attention: context parallelism that passes keys and values around the ranks (2310.01889).

    step 0   rank 0: q0 · k0 v0   rank 1: q1 · k1 v1   rank 2: q2 · k2 v2
    step 1   rank 0: q0 · k2 v2   rank 1: q1 · k0 v0   rank 2: q2 · k1 v1     and so on, limited to visible keys

Partial outputs are kept with the logarithm of their softmax denominator (LSE), which merges them exactly. The backward
pass sends keys and values around once more, together with their gradients, until these return to their owner.

Of 2 P chunks each rank has one from the front and one from the back (0 and 5, 1 and 4, 2 and 3). This balances the work
of causal attention. A pair of chunks is computed in blocks of one sequence each, and invisible blocks are skipped.
Scores are float32 and exist for a few queries at a time, in both passes.

Shapes: T tokens of this rank, K key heads, G query heads of each, D head size, Q queries and E keys of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from roll_core.errors import UnsupportedError
from roll_modeling.context_parallel import ContextParallel
from roll_modeling.varlen_attention import sinks_gradient, with_sinks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from roll_modeling.attention import AttentionOptions

MAX_SCORES = 1 << 24
"""Maximum number of scores that exist at once."""


class Ring(ContextParallel):
    """Context parallelism in which keys and values travel around the ranks; each rank computes all heads."""

    @property
    @override
    def multiple(self) -> int:
        return 2 * self.size

    @override
    def part(self, num_tokens: int) -> Tensor:
        length = -(-num_tokens // self.multiple)
        return torch.cat([torch.arange(start, start + length) for start, _ in chunks(self.rank, self.size, length)])

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, how: AttentionOptions) -> Tensor:
        if key.shape != value.shape:
            raise UnsupportedError(
                f"ring attention needs values of the keys' size {key.shape[-1]}, found {value.shape[-1]}: use Ulysses"
            )
        attended: Tensor = _Ring.apply(query[0], key[0], value[0], how.sinks_H, how, self)  # type: ignore[no-untyped-call]
        return attended[None]

    def pass_on(self, tensor: Tensor) -> _Passing:
        """Start sending `tensor` to the next rank and receiving from the previous one."""
        return _Passing(tensor, self)


class _Passing:
    """Transfer in the background, while this rank computes."""

    def __init__(self, sent: Tensor, ring: Ring) -> None:
        self._sent, self._received = sent, torch.empty_like(sent)
        after, before = (dist.get_global_rank(ring.group, (ring.rank + step) % ring.size) for step in (1, -1))
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, ring.group),
                dist.P2POp(dist.irecv, self._received, before, ring.group),
            ]
        )

    def wait(self) -> Tensor:
        """Block until the transfer is complete; returns the received tensor."""
        for request in self._work:
            request.wait()
        return self._received


# -- visible keys ------------------------------------------------------------------------------------------------------


def chunks(rank: int, size: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The two chunks of a rank: the start of each among all tokens, and among the rank's own tokens."""
    return (rank * length, 0), ((2 * size - 1 - rank) * length, length)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and keys of one sequence; every query sees at least one of the keys."""

    queries: slice
    """Queries, as a slice of the rank's own tokens."""
    keys: slice
    """Keys, as a slice of the tokens of the rank that owns them."""
    ahead: int
    """Number of tokens from the first key to the first query."""

    def cut(self, num_queries: int) -> Iterator[Block]:
        """Split into blocks of at most `num_queries` queries."""
        for start in range(self.queries.start, self.queries.stop, num_queries):
            stop = min(start + num_queries, self.queries.stop)
            yield Block(slice(start, stop), self.keys, self.ahead + start - self.queries.start)

    def hidden(self, window: int, device: torch.device) -> Tensor | None:
        """Mask of keys that a query does not see, bool `[Q, E]`; None if all are visible."""
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        if self.ahead >= keys - 1 and (not window or self.ahead + queries <= window):
            return None
        distance = self.ahead + torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
        return (distance < 0) | (distance >= window) if window else distance < 0


@lru_cache(maxsize=256)
def blocks(rank: int, other: int, size: int, lengths: tuple[int, ...], window: int) -> tuple[Block, ...]:
    """Blocks of keys of rank `other` that queries of `rank` see. `window` 0 means no window."""
    length = sum(lengths) // (2 * size)
    blocks_seen = []
    for q_start, q_own in chunks(rank, size, length):
        for k_start, k_own in chunks(other, size, length):
            if k_start > q_start:
                continue
            for first, end in pairwise(accumulate(lengths, initial=0)):
                q_low, q_high = max(first, q_start), min(end, q_start + length)
                k_low, k_high = max(first, k_start), min(k_start + length, q_high)
                if window:
                    k_low, q_high = max(k_low, q_low - window + 1), min(q_high, k_high - 1 + window)
                if q_low < q_high and k_low < k_high:
                    queries = slice(q_low - q_start + q_own, q_high - q_start + q_own)
                    keys = slice(k_low - k_start + k_own, k_high - k_start + k_own)
                    blocks_seen.append(Block(queries, keys, q_low - k_low))
    return tuple(blocks_seen)


# -- attention ---------------------------------------------------------------------------------------------------------


class _Ring(torch.autograd.Function):
    """`[K * G, T, D]` queries and `[K, T, D]` keys and values to `[T, K * G, D]`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor | None,
        how: AttentionOptions,
        ring: Ring,
    ) -> Tensor:
        q_KGTD = query.view(len(key), -1, *query.shape[1:])
        out_KGTD = torch.zeros(q_KGTD.shape, dtype=torch.float32, device=query.device)
        lse_KGT = out_KGTD.new_full(q_KGTD.shape[:3], -torch.inf)
        kv = torch.stack([key, value])
        for step in range(ring.size):
            passing = ring.pass_on(kv) if step + 1 < ring.size else None
            for block in _pieces(ring, step, how, len(query)):
                scores_KGQE, _ = _scores(q_KGTD, kv[0], block, how)
                lse_KGQ = scores_KGQE.logsumexp(dim=-1)
                seen_KGQD = torch.matmul((scores_KGQE - lse_KGQ[..., None]).exp_(), kv[1][:, None, block.keys].float())
                _merge(out_KGTD[:, :, block.queries], lse_KGT[:, :, block.queries], seen_KGQD, lse_KGQ)
            kv = passing.wait() if passing is not None else kv
        out_THD, lse_HT = out_KGTD.flatten(0, 1).transpose(0, 1), lse_KGT.flatten(0, 1)
        if sinks_H is not None:
            out_THD, lse_HT = with_sinks(out_THD, lse_HT, sinks_H)
        ctx.save_for_backward(query, key, value, sinks_H, out_THD, lse_HT)
        ctx.how, ctx.ring = how, ring
        return out_THD.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_H, out_THD, lse_HT = ctx.saved_tensors
        how, ring = ctx.how, ctx.ring
        d_sinks_H = None if sinks_H is None else sinks_gradient(grads[0], out_THD, lse_HT, sinks_H)
        q_KGTD = query.view(len(key), -1, *query.shape[1:])
        out_KGTD, lse_KGT = out_THD.transpose(0, 1).view_as(q_KGTD), lse_HT.view(q_KGTD.shape[:3])
        d_KGTD = grads[0].float().transpose(0, 1).reshape(q_KGTD.shape)
        delta_KGT = (d_KGTD * out_KGTD).sum(dim=-1)
        dq_KGTD = torch.zeros_like(out_KGTD)
        kv = torch.stack([key, value])
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for step in range(ring.size):
            passing = ring.pass_on(kv) if step + 1 < ring.size else None
            for block in _pieces(ring, step, how, len(query)):
                rows, keys = block.queries, block.keys
                scores_KGQE, slope_KGQE = _scores(q_KGTD, kv[0], block, how)
                weights_KGQE = (scores_KGQE - lse_KGT[:, :, rows, None]).exp_()
                d_KGQD, k_K1ED, v_K1ED = d_KGTD[:, :, rows], kv[0][:, None, keys].float(), kv[1][:, None, keys].float()
                d_scores_KGQE = torch.matmul(d_KGQD, v_K1ED.transpose(-1, -2))
                d_scores_KGQE.sub_(delta_KGT[:, :, rows, None]).mul_(weights_KGQE).mul_(how.scale)
                if slope_KGQE is not None:
                    d_scores_KGQE.mul_(slope_KGQE)
                dq_KGTD[:, :, rows] += torch.matmul(d_scores_KGQE, k_K1ED)
                q_KGQD = q_KGTD[:, :, rows].float()
                dkv[0][:, keys] += torch.matmul(d_scores_KGQE.transpose(-1, -2), q_KGQD).sum(dim=1)
                dkv[1][:, keys] += torch.matmul(weights_KGQE.transpose(-1, -2), d_KGQD).sum(dim=1)
            kv = passing.wait() if passing is not None else kv
            dkv = ring.pass_on(dkv).wait()
        dq = dq_KGTD.flatten(0, 1).to(query.dtype)
        return dq, dkv[0].to(key.dtype), dkv[1].to(value.dtype), d_sinks_H, None, None


def _pieces(ring: Ring, step: int, how: AttentionOptions, heads: int) -> Iterator[Block]:
    """Blocks for the keys that this rank has after `step` transfers, limited to `MAX_SCORES`."""
    other = (ring.rank - step) % ring.size
    for block in blocks(ring.rank, other, ring.size, how.lengths, how.window):
        yield from block.cut(max(1, MAX_SCORES // (heads * (block.keys.stop - block.keys.start))))


def _scores(q_KGTD: Tensor, k_KTD: Tensor, block: Block, how: AttentionOptions) -> tuple[Tensor, Tensor | None]:
    """Scores before the softmax, minus infinity for invisible keys; and the soft-cap's derivative, if there is one."""
    k_K1DE = k_KTD[:, None, block.keys].float().transpose(-1, -2)
    scores_KGQE = torch.matmul(q_KGTD[:, :, block.queries].float(), k_K1DE).mul_(how.scale)
    slope = None
    if how.softcap:
        squashed = torch.tanh(scores_KGQE / how.softcap)
        scores_KGQE, slope = squashed * how.softcap, 1 - squashed.square()
    hidden = block.hidden(how.window, scores_KGQE.device)
    return scores_KGQE if hidden is None else scores_KGQE.masked_fill_(hidden, -torch.inf), slope


def _merge(out: Tensor, lse: Tensor, seen: Tensor, its_lse: Tensor) -> None:
    """Merge a new partial output into `out` and its LSE, in place."""
    both = torch.logaddexp(lse, its_lse)
    out.mul_((lse - both).exp_()[..., None]).add_(seen.mul_((its_lse - both).exp_()[..., None]))
    lse.copy_(both)
