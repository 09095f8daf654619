"""Token sampling from logits: vectorised over the rows of a batch; each row is sampled independently of the others.

Sampling inverts the cumulative distribution function (CDF) of a row at one uniform number. Rows without filters need
two passes over the vocabulary: a softmax, and sums over blocks. The token is then located within one block. Only rows
with top-k or top-p are sorted. Nothing waits for the device, except that top-p without top-k tests each time if the
first candidates suffice.

N rows    S rows with more than a temperature    V vocabulary    K candidates    W steps
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from roll_core.algorithms.segments import running_sums

if TYPE_CHECKING:
    from torch import Tensor

    from roll_core.types import SamplingParams

BLOCK = 128
FIRST_CANDIDATES = 256
"""Number of most likely tokens that top-p considers first; the whole vocabulary is sorted only if their probability sum
is below `top_p`."""
LOG_TINY = math.log(1e-30)
"""Log probability below which the float32 softmax is too inexact for a logarithm."""


ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("greedy", np.bool_),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("penalty", np.float32),
        ("min_new", np.int64),
        ("max_new", np.int64),
    ],
    align=True,
)
"""NumPy dtype of one row's sampling parameters. `temperature` is 1 for greedy rows. Aligned, because torch rejects
fields whose stride is not a multiple of their size."""


def sampling_row(params: SamplingParams) -> npt.NDArray[np.void]:
    """Sampling parameters as one element of dtype `ROW`."""
    greedy = params.temperature == 0
    return np.array(
        (
            1.0 if greedy else params.temperature,
            greedy,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.min_new_tokens,
            params.max_new_tokens,
        ),
        dtype=ROW,
    )


def shaped_rows(table_N: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Mask of rows whose tokens are not sampled from softmax(logits / temperature): greedy, filters, or penalty."""
    cut = (table_N["top_k"] > 0) | (table_N["top_p"] < 1) | (table_N["min_p"] > 0)
    shaped: npt.NDArray[np.bool_] = table_N["greedy"] | cut | (table_N["penalty"] != 1)
    return shaped


class Sampler:
    """Samples the next tokens of a fixed set of rows. What it needs is copied to the device when it is made."""

    def __init__(
        self,
        table_N: npt.NDArray[np.void],
        uniforms_WN: npt.NDArray[np.float64],
        device: torch.device,
        *,
        vocab_size: int,
        banned_B2: npt.NDArray[np.int64] | None = None,
        seen: tuple[Tensor, npt.NDArray[np.int64]] | None = None,
    ) -> None:
        """Sampling with the parameters `table_N` (dtype `ROW`) and one row of uniform numbers in [0, 1) for each step.

        `banned_B2` are pairs of a row and a token that must not be sampled there. `seen` is a mask `[X, V]` on the
        device of the tokens that are subject to the repetition penalty, and each row's index `[N]` in it; sampled
        tokens are added to the mask.
        """
        self.num_steps_left = len(uniforms_WN)
        self._device = device
        self._uniforms_WN = _copy(np.minimum(uniforms_WN, 1 - 1e-12), device)
        temperature_N = table_N["temperature"]
        self._temperature_N1 = _copy(temperature_N[:, None], device) if (temperature_N != 1).any() else None
        shaped_N = shaped_rows(table_N)
        if banned_B2 is not None:
            shaped_N[banned_B2[:, 0]] = True
        rows_S = np.flatnonzero(shaped_N)
        self._rows_S: Tensor | None = None
        self._shaped: _ShapedSampler | None = None
        if len(rows_S):
            if banned_B2 is not None:
                banned_B2 = np.stack([np.searchsorted(rows_S, banned_B2[:, 0]), banned_B2[:, 1]], axis=1)
            if seen is not None:
                seen = seen[0], seen[1][rows_S]
            self._shaped = _ShapedSampler(table_N[rows_S], device, vocab_size, banned_B2, seen)
            if len(rows_S) < len(table_N):
                self._rows_S = _copy(rows_S, device)

    @torch.inference_mode()
    def sample(self, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """Sample one token for each row of `logits_NV` (float32, overwritten).

        Returns tokens `[N]` and their log probabilities under softmax(logits / temperature), before filters; these are
        not finite if the logits are not.
        """
        u_N = self._uniforms_WN[-self.num_steps_left]
        self.num_steps_left -= 1
        if self._temperature_N1 is not None:
            logits_NV.div_(self._temperature_N1)
        probs_NV = torch.softmax(logits_NV, dim=-1)
        if self._shaped is None:
            tokens_N = invert_cdf(probs_NV, u_N)
        elif self._rows_S is None:
            tokens_N = self._shaped.sample(logits_NV, u_N)
        else:
            tokens_N = invert_cdf(probs_NV, u_N)
            tokens_N[self._rows_S] = self._shaped.sample(logits_NV[self._rows_S], u_N[self._rows_S])
        index_N1 = tokens_N.unsqueeze(1)
        logprobs_N = probs_NV.gather(1, index_N1).squeeze(1).log()
        if self._device.type != "cpu" or not (logprobs_N.numpy() > LOG_TINY).all():
            # The most likely token has the largest probability: log p = logit - largest logit + log(largest p).
            exact_N = logits_NV.gather(1, index_N1).squeeze(1) - logits_NV.amax(-1) + probs_NV.amax(-1).log()
            logprobs_N = torch.where(logprobs_N > LOG_TINY, logprobs_N, exact_N)
        return tokens_N, logprobs_N


class _ShapedSampler:
    """Samples rows that are greedy, or have filters, a penalty or banned tokens."""

    def __init__(
        self,
        table_S: npt.NDArray[np.void],
        device: torch.device,
        vocab_size: int,
        banned_B2: npt.NDArray[np.int64] | None,
        seen: tuple[Tensor, npt.NDArray[np.int64]] | None,
    ) -> None:
        self._device = device
        copy = partial(_copy, device=device)
        self._seen = None
        if seen is not None:
            self._seen = seen[0], copy(seen[1])
            self._penalty_S1 = copy(table_S["penalty"][:, None])
        self._banned = None
        if banned_B2 is not None:
            self._banned = copy(banned_B2[:, 0]), copy(banned_B2[:, 1])
            self._never = copy(np.array(-np.inf, dtype=np.float32))
        greedy_S = table_S["greedy"]
        top_k_S = np.where(table_S["top_k"] < vocab_size, table_S["top_k"], 0)
        sorted_S = ~greedy_S & ((top_k_S > 0) | (table_S["top_p"] < 1))
        plain = np.flatnonzero(~greedy_S & ~sorted_S)
        self._greedy = copy(np.flatnonzero(greedy_S)) if greedy_S.any() else None
        self._plain = copy(plain) if len(plain) else None
        min_p = table_S["min_p"][plain].astype(np.float32)[:, None]
        self._plain_min_p = copy(min_p) if (min_p > 0).any() else None
        # One call per value of top_k: ties between equally likely tokens must not be resolved depending on other rows.
        self._sorted: list[tuple[int, Tensor, Tensor, Tensor]] = []
        for top_k in np.unique(top_k_S[sorted_S]):
            which = np.flatnonzero(sorted_S & (top_k_S == top_k))
            cuts = copy(table_S["top_p"][which]), copy(table_S["min_p"][which])
            self._sorted.append((int(top_k), copy(which), *cuts))

    def sample(self, logits_SV: Tensor, u_S: Tensor) -> Tensor:
        """Sample tokens `[S]` from logits that are already divided by the temperature.

        The division commutes with the penalty, which divides positive logits and multiplies negative ones.
        """
        if self._seen is not None:
            seen_XV, index_S = self._seen
            factor = self._penalty_S1
            punished = torch.where(logits_SV > 0, logits_SV / factor, logits_SV * factor)
            logits_SV = torch.where(seen_XV[index_S], punished, logits_SV)
        if self._banned is not None:
            logits_SV = logits_SV.index_put(self._banned, self._never)
        tokens_S = torch.empty(len(logits_SV), dtype=torch.int64, device=self._device)
        if self._greedy is not None:
            tokens_S[self._greedy] = logits_SV[self._greedy].argmax(-1)
        if self._plain is not None:
            probs = torch.softmax(logits_SV[self._plain], dim=-1)
            if self._plain_min_p is not None:
                floor = probs.amax(-1, keepdim=True) * self._plain_min_p
                probs = torch.where(probs >= floor, probs, 0.0)
            tokens_S[self._plain] = invert_cdf(probs, u_S[self._plain])
        for top_k, which, top_p, min_p in self._sorted:
            tokens_S[which] = _sample_sorted(torch.softmax(logits_SV[which], dim=-1), u_S[which], top_k, top_p, min_p)
        if self._seen is not None:
            seen_XV[index_S, tokens_S] = True
        return tokens_S


def _copy(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    # `non_blocking`, or torch waits until the device has done all earlier work.
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def invert_cdf(weights_NV: Tensor, u_N: Tensor) -> Tensor:
    """Index `[N]` of each row: the first whose cumulative weight exceeds `u * total`, with `u` in [0, 1).

    Weights need not sum to 1; an index of weight 0 is never chosen.
    """
    rows, size = weights_NV.shape
    body = size // BLOCK * BLOCK
    sums = weights_NV[:, :body].reshape(rows, -1, BLOCK).sum(-1) if body else weights_NV.new_zeros(rows, 0)
    if body < size:
        sums = torch.cat([sums, weights_NV[:, body:].sum(-1, keepdim=True)], dim=1)
    cumulative = running_sums(sums)
    target = u_N.unsqueeze(1) * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp_(min=0)), 0.0)
    columns = block * BLOCK + torch.arange(min(BLOCK, size), device=weights_NV.device)
    inside = weights_NV.gather(1, columns.clamp(max=size - 1))
    if body < size:
        inside.masked_fill_(columns >= size, 0.0)
    within = running_sums(inside)
    # Block sums are rounded to float32, so the remaining target may exceed the block's sum by a rounding error.
    rest = torch.minimum(target - before, within[:, -1:] * (1 - 1e-12))
    place = torch.searchsorted(within, rest, right=True).clamp_(max=within.shape[1] - 1)
    return (block * BLOCK + place).clamp_(max=size - 1).squeeze(1)


def _sample_sorted(probs_SV: Tensor, u_S: Tensor, top_k: int, top_p_S: Tensor, min_p_S: Tensor) -> Tensor:
    """Sample after top-k (0 keeps all), then top-p of the remaining mass, then min-p; in descending probability."""
    vocabulary = probs_SV.shape[1]
    num = top_k or min(FIRST_CANDIDATES, vocabulary)
    largest = probs_SV.topk(num, dim=-1)
    values_SK, indices_SK = largest.values.double(), largest.indices
    total_S = values_SK.sum(-1) if top_k else torch.ones_like(top_p_S)
    tokens_S = _sample_candidates(values_SK, indices_SK, u_S, top_p_S * total_S, min_p_S)
    if not top_k and num < vocabulary:
        short = torch.nonzero(values_SK.sum(-1) < top_p_S * total_S).squeeze(1)
        if len(short):
            values, indices = probs_SV[short].sort(dim=-1, descending=True, stable=True)
            tokens_S[short] = _sample_candidates(values.double(), indices, u_S[short], top_p_S[short], min_p_S[short])
    return tokens_S


def _sample_candidates(values_SK: Tensor, indices_SK: Tensor, u_S: Tensor, mass_S: Tensor, min_p_S: Tensor) -> Tensor:
    before = running_sums(values_SK) - values_SK
    eligible = (before < mass_S.unsqueeze(1)) & (values_SK >= min_p_S.unsqueeze(1) * values_SK[:, :1])
    cumulative = running_sums(torch.where(eligible, values_SK, 0.0))
    target = u_S.unsqueeze(1) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).clamp_(max=values_SK.shape[1] - 1)
    return indices_SK.gather(1, place).squeeze(1)
