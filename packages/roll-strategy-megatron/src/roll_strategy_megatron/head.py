"""Vocabulary-parallel logprobs, entropies and top-k, computed in chunks of tokens.

Each tensor-parallel rank has the output layer's rows of a shard of the vocabulary. The full logits, over all tokens or
over the whole vocabulary, are never in memory.

Shapes: N tokens, C tokens of a chunk, H hidden size, V this rank's shard of the vocabulary, K top-k or given ids,
J the target and the given ids.

With `z = softcap(scale * logits) / temperature`, `log Z` and the entropy `S` are computed from maxima and sums over all
ranks' shards. With upstream gradients `g` of the logprob of token `y` and `e` of the entropy, and `p = exp(z - log Z)`:

    d z = g * (onehot(y) - p) - e * p * (log p + S)

The logprob of each given id adds a term like that of `y`. The gradient of the logits is `d z * scale / temperature`,
multiplied by the soft-cap's derivative `1 - (z * temperature / cap)²`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from typing_extensions import override

from roll_core.errors import UnsupportedError
from roll_modeling.logprobs import HeadOutputs, VocabularyShards, compared

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from roll_modeling.logprobs import HeadRequest, LinearHead


@dataclass(frozen=True, kw_only=True)
class VocabularyShare:
    """This rank's shard of the vocabulary."""

    group: Any
    """Process group of the ranks that shard the vocabulary."""
    first: int
    """Token id of row 0 of this rank's weight."""
    num_real: int
    """Number of rows that are tokens; the rest is padding."""


def sharded_head_outputs(
    hidden_NH: Tensor,
    head: LinearHead,
    targets_N: Tensor,
    request: HeadRequest,
    share: VocabularyShare,
    gather_ids_NK: Tensor | None = None,
) -> HeadOutputs:
    """Logprobs of targets and given ids, entropies and top-k. Collective over the ranks that shard the vocabulary.

    `head` has this rank's rows, and no bias. The gradient of `hidden_NH` is this rank's part of a sum over these ranks.
    """
    wanted_NJ = targets_N[:, None] if gather_ids_NK is None else torch.cat([targets_N[:, None], gather_ids_NK], dim=1)
    logprobs_NJ, entropy_N, topk_NK, ids_NK = _ShardedHead.apply(  # type: ignore[no-untyped-call]
        hidden_NH, head.weight, wanted_NJ, head, request, share
    )
    return HeadOutputs(
        logprobs_N=logprobs_NJ[:, 0],
        entropy_N=entropy_N if request.entropy else None,
        topk_logprobs_NK=topk_NK if request.topk else None,
        topk_ids_NK=ids_NK if request.topk else None,
        gathered_logprobs_NK=None if gather_ids_NK is None else logprobs_NJ[:, 1:],
    )


class ExchangedIds(VocabularyShards):
    """Exchange between tensor-parallel ranks: each compares a part of a chunk's tokens over the whole vocabulary.

    rank 0: all tokens, its ids  ─┐ all-to-all ┌─  rank 0: first tokens, all ids  ─► values, gradient ─┐ all-to-all
    rank 1: all tokens, its ids  ─┘            └─  rank 1: last tokens, all ids   ─► values, gradient ─┘ and back
    """

    def __init__(self, group: Any, vocab: int, rows: int) -> None:
        """`vocab` ids of the whole vocabulary, `rows` of them per rank, padding included."""
        self.group, self.vocab, self.rows = group, vocab, rows

    @override
    def all_ids(self, logits_Cv: Tensor) -> Tensor:
        ranks = self.group.size()
        received = self._exchanged(logits_Cv).view(ranks, -1, self.rows)
        return received.transpose(0, 1).reshape(-1, ranks * self.rows)[:, : self.vocab].contiguous()

    @override
    def own_ids(self, gradient_cV: Tensor) -> Tensor:
        ranks = self.group.size()
        padded = F.pad(gradient_cV, (0, ranks * self.rows - self.vocab))
        return self._exchanged(padded.view(-1, ranks, self.rows).transpose(0, 1).reshape(-1, self.rows))

    @override
    def own_tokens(self, values_C: Tensor) -> Tensor:
        values_c: Tensor = values_C.chunk(self.group.size())[self.group.rank()]
        return values_c

    @override
    def all_tokens(self, values_c: Tensor) -> Tensor:
        values_C = values_c.new_empty(self.group.size() * len(values_c))
        dist.all_gather_into_tensor(values_C, values_c.contiguous(), group=self.group)
        return values_C

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Send the i-th of equal parts to rank i."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received


def share_of_head(head: LinearHead, share: VocabularyShare, rows: int, vocab: int) -> LinearHead:
    """This rank's rows of another model's head, padded with zeros to `rows`.

    Raises `UnsupportedError` unless the head has `vocab` rows.
    """
    if len(head.weight) != vocab:
        raise UnsupportedError(f"the models have vocabularies of {len(head.weight)} and {vocab} ids, which differ")
    weight_vH = head.weight[share.first : share.first + rows]
    more = rows - len(weight_vH)
    bias_v = None if head.bias is None else F.pad(head.bias[share.first : share.first + rows], (0, more))
    return replace(head, weight=F.pad(weight_vH, (0, 0, 0, more)), bias=bias_v)


def sharded_comparison(
    hidden_NH: Tensor,
    head: LinearHead,
    other: LinearHead,
    other_hidden_NH: Tensor,
    function: Callable[[Tensor, Tensor], Tensor],
    request: HeadRequest,
    weights_N: Tensor | None,
    shards: ExchangedIds,
) -> Tensor:
    """Values of a comparison with another model, see `roll_modeling.logprobs.compared`. Collective over `shards`.

    The gradient of `hidden_NH` is this rank's part of a sum over these ranks.
    """
    ranks, num_tokens = shards.group.size(), len(hidden_NH)
    if more := -num_tokens % ranks:
        hidden_NH, other_hidden_NH = F.pad(hidden_NH, (0, 0, 0, more)), F.pad(other_hidden_NH, (0, 0, 0, more))
        weights_N = None if weights_N is None else F.pad(weights_N, (0, more))
    size = request.chunk(len(head.weight), hidden_NH.device)
    request = replace(request, chunk_tokens=size + -size % ranks)
    return compared(head, hidden_NH, other, other_hidden_NH, function, request, weights_N, shards)[:num_tokens]


class _ShardedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        wanted_NJ: Tensor,
        head: LinearHead,
        request: HeadRequest,
        share: VocabularyShare,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chunks: list[tuple[Tensor, ...]] = []
        size = request.chunk(len(weight_VH), hidden_NH.device)
        for hidden_CH, wanted_CJ in zip(*_chunks(size, hidden_NH, wanted_NJ), strict=True):
            chunks.append(_of_chunk(hidden_CH, head, wanted_CJ, request, share))
        logprobs_NJ, log_norm_N, expected_N, topk_NK, ids_NK = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        entropy_N = log_norm_N - expected_N
        ctx.mark_non_differentiable(topk_NK, ids_NK)
        if not (request.entropy and request.entropy_grad):
            ctx.mark_non_differentiable(entropy_N)
        ctx.save_for_backward(hidden_NH, weight_VH, wanted_NJ, log_norm_N, entropy_N)
        ctx.head, ctx.request, ctx.share = head, request, share
        return logprobs_NJ, entropy_N, topk_NK, ids_NK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, wanted_NJ, log_norm_N, entropy_N = ctx.saved_tensors
        head, request, share = ctx.head, ctx.request, ctx.share
        nothing_N = log_norm_N.new_zeros(len(wanted_NJ))
        grad_NJ = log_norm_N.new_zeros(wanted_NJ.shape) if grads[0] is None else grads[0]
        slope_N = grads[1] if request.entropy and request.entropy_grad else None
        trained = ctx.needs_input_grad[1]
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if trained else None
        grad_hidden: list[Tensor] = []
        slopes_N = nothing_N if slope_N is None else slope_N
        parts = _chunks(
            request.chunk(len(weight_VH), hidden_NH.device),
            hidden_NH,
            wanted_NJ,
            log_norm_N,
            entropy_N,
            grad_NJ,
            slopes_N,
        )
        for hidden_CH, wanted_CJ, log_norm_C, entropy_C, grad_CJ, slope_C in zip(*parts, strict=True):
            d_CV = _logits(hidden_CH, head, request, share)
            capped_CV = _softcap_slope(d_CV, head, request, share) if head.softcap else None
            d_CV.sub_(log_norm_C[:, None])
            d_CV = _d_logits(d_CV, grad_CJ.sum(dim=1), None if slope_N is None else slope_C, entropy_C)
            here_CJ, columns_CJ = _mine(wanted_CJ, share)
            d_CV.scatter_add_(1, columns_CJ, torch.where(here_CJ, grad_CJ, 0.0))
            d_CV.mul_(head.scale / request.temperature)
            if capped_CV is not None:
                d_CV.mul_(capped_CV)
            d_CV = d_CV.to(weight_VH.dtype)
            grad_hidden.append(d_CV @ weight_VH)
            if grad_weight_VH is not None:
                grad_weight_VH += d_CV.T @ hidden_CH
            del d_CV, capped_CV  # free them before the next chunk's logits are allocated
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        return torch.cat(grad_hidden).to(hidden_NH.dtype), grad_weight, None, None, None, None


def _of_chunk(
    hidden_CH: Tensor, head: LinearHead, wanted_CJ: Tensor, request: HeadRequest, share: VocabularyShare
) -> tuple[Tensor, ...]:
    """Logprobs, log Z, expected logits, top-k logprobs and top-k token ids of a chunk."""
    z_CV = _logits(hidden_CH, head, request, share)
    mine_C, columns_C = z_CV.max(dim=1)
    greatest_C = mine_C.clone()
    dist.all_reduce(greatest_C, dist.ReduceOp.MAX, group=share.group)
    log_norm_C, expected_C = _norm(z_CV, greatest_C, share, request.entropy)
    chosen_CJ = _at(z_CV, wanted_CJ, share)
    if request.topk == 1:
        top_CK, ids_CK = greatest_C[:, None], _first_choice(mine_C, columns_C, greatest_C, share)[:, None]
    else:
        top_CK, ids_CK = _topk(z_CV, request.topk, share)
    return chosen_CJ - log_norm_C[:, None], log_norm_C, expected_C, top_CK - log_norm_C[:, None], ids_CK


def _d_logits(logp_CV: Tensor, grad_C: Tensor, slope_C: Tensor | None, entropy_C: Tensor) -> Tensor:
    """Gradient with respect to `z`, without the one-hot part. Overwrites `logp_CV`."""
    if slope_C is None:
        return logp_CV.exp_().mul_(-grad_C[:, None])
    # -(e * (log p + S) + g) * p. For padding, p is 0 and log p the lowest float32: multiply by p first, because other
    # products overflow.
    p_CV = logp_CV.exp()
    d_CV = logp_CV.clamp_(min=torch.finfo(logp_CV.dtype).min).add_(entropy_C[:, None]).mul_(p_CV)
    return d_CV.mul_(-slope_C[:, None]).sub_(p_CV.mul_(grad_C[:, None]))


def _chunks(size: int, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    return [torch.split(tensor, size) for tensor in tensors]


def _logits(hidden_CH: Tensor, head: LinearHead, request: HeadRequest, share: VocabularyShare) -> Tensor:
    """Logits divided by the temperature, in float32; the lowest float32 for padding."""
    z_CV = head.logits(hidden_CH).div_(request.temperature)
    z_CV[:, share.num_real :] = torch.finfo(torch.float32).min
    return z_CV


def _softcap_slope(z_CV: Tensor, head: LinearHead, request: HeadRequest, share: VocabularyShare) -> Tensor:
    """Derivative of the soft-cap; 0 for padding."""
    slope_CV = 1.0 - (z_CV * (request.temperature / head.softcap)).square_()
    slope_CV[:, share.num_real :] = 0.0
    return slope_CV


def _norm(z_CV: Tensor, greatest_C: Tensor, share: VocabularyShare, entropy: bool) -> tuple[Tensor, Tensor]:
    """`log Z` and the expected logit, from which the entropy follows."""
    e_CV = (z_CV - greatest_C[:, None]).exp_()
    sum_C = e_CV.sum(dim=1)
    sums_2C = torch.stack([sum_C, e_CV.mul_(z_CV).sum(dim=1) if entropy else torch.zeros_like(sum_C)])
    dist.all_reduce(sums_2C, group=share.group)
    return greatest_C + sums_2C[0].log(), sums_2C[1] / sums_2C[0]


def _mine(wanted_CJ: Tensor, share: VocabularyShare) -> tuple[Tensor, Tensor]:
    """Mask of the ids in this rank's shard, and their columns; column 0 for the others."""
    columns_CJ = wanted_CJ - share.first
    here_CJ = (columns_CJ >= 0) & (columns_CJ < share.num_real)
    return here_CJ, torch.where(here_CJ, columns_CJ, 0)


def _at(z_CV: Tensor, wanted_CJ: Tensor, share: VocabularyShare) -> Tensor:
    here_CJ, columns_CJ = _mine(wanted_CJ, share)
    chosen_CJ = torch.where(here_CJ, z_CV.gather(1, columns_CJ), 0.0)
    dist.all_reduce(chosen_CJ, group=share.group)
    return chosen_CJ


def _first_choice(mine_C: Tensor, columns_C: Tensor, greatest_C: Tensor, share: VocabularyShare) -> Tensor:
    """The argmax token; ties are resolved to the smallest id. Computed from each rank's own argmax column."""
    none = torch.iinfo(torch.int64).max
    ids_C = torch.where(mine_C < greatest_C, none, columns_C + share.first)
    dist.all_reduce(ids_C, dist.ReduceOp.MIN, group=share.group)
    return ids_C


def _topk(z_CV: Tensor, k: int, share: VocabularyShare) -> tuple[Tensor, Tensor]:
    """Global top-k from each rank's local top-k."""
    if not k:
        return z_CV.new_zeros(len(z_CV), 0), torch.zeros(len(z_CV), 0, dtype=torch.int64, device=z_CV.device)
    mine = z_CV.topk(min(k, z_CV.shape[1]), dim=1)
    size = share.group.size()
    values, ids = ([torch.empty_like(topk) for _ in range(size)] for topk in (mine.values, mine.indices))
    dist.all_gather(values, mine.values.contiguous(), group=share.group)
    dist.all_gather(ids, (mine.indices + share.first).contiguous(), group=share.group)
    every, named = torch.cat(values, dim=1), torch.cat(ids, dim=1)
    best = every.topk(min(k, every.shape[1]), dim=1)
    return best.values, named.gather(1, best.indices)
