"""Token sampling from logits: vectorised over the rows of a batch; each row is sampled independently of the others.

Sampling inverts the cumulative distribution function (CDF) of a row at one uniform number. Rows without filters need
two passes over the vocabulary: a softmax, and sums over blocks. The token is then located within one block. Only rows
with top-k or top-p are sorted.

N rows    S rows with more than a temperature    V vocabulary    K candidates    B tokens of a block
"""

from __future__ import annotations

from dataclasses import dataclass
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
TINY = 1e-30
"""Probability below which the float32 softmax is too inexact for a logarithm; `log_softmax` is used instead."""


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


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled token and its logprob for each row."""

    tokens_N: npt.NDArray[np.int64]
    logprobs_N: npt.NDArray[np.float32]
    """Log probabilities under softmax(logits / temperature), before filters; not finite if the logits are not."""


@torch.inference_mode()
def sample(
    logits_NV: Tensor,
    uniforms_N: npt.NDArray[np.float64],
    table_N: npt.NDArray[np.void],
    *,
    shaped: npt.NDArray[np.int64],
    seen_SV: Tensor | None = None,
    banned_SV: Tensor | None = None,
) -> SampledTokens:
    """Sample one token for each row of `logits_NV` (float32, overwritten) with the parameters `table_N` (dtype `ROW`).

    `uniforms_N` are uniform numbers in [0, 1), one per row. `shaped` are the numbers of the rows that need more than a
    temperature. `seen_SV` and `banned_SV` (bool) have one row for each of them: tokens subject to the repetition
    penalty, and tokens that must not be sampled.
    """
    device = logits_NV.device
    temperature_N = table_N["temperature"]
    if (temperature_N != 1).any():
        logits_NV.div_(torch.from_numpy(np.ascontiguousarray(temperature_N)).to(device).unsqueeze(1))
    probs_NV = torch.softmax(logits_NV, dim=-1)
    u_N = torch.from_numpy(np.minimum(uniforms_N, 1 - 1e-12)).to(device)
    if len(shaped) == 0:
        tokens_N = invert_cdf(probs_NV, u_N)
    elif len(shaped) == len(uniforms_N):
        tokens_N = _sample_shaped(logits_NV, u_N, table_N, shaped, seen_SV, banned_SV)
    else:
        rows = torch.from_numpy(shaped).to(device)
        tokens_N = invert_cdf(probs_NV, u_N)
        tokens_N[rows] = _sample_shaped(logits_NV[rows], u_N[rows], table_N, shaped, seen_SV, banned_SV)
    sampled_N = probs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
    logprobs = sampled_N.log().cpu().numpy()
    tiny = np.flatnonzero(~(logprobs > np.log(TINY)))
    if len(tiny):
        rows = torch.from_numpy(tiny).to(device)
        exact = torch.log_softmax(logits_NV[rows], dim=-1).gather(1, tokens_N[rows].unsqueeze(1)).squeeze(1)
        logprobs[tiny] = exact.cpu().numpy()
    return SampledTokens(tokens_N.cpu().numpy(), logprobs)


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


def _sample_shaped(
    logits_SV: Tensor,
    u_S: Tensor,
    table_N: npt.NDArray[np.void],
    rows: npt.NDArray[np.int64],
    seen_SV: Tensor | None,
    banned_SV: Tensor | None,
) -> Tensor:
    """Apply repetition penalty and bans, then sample: greedy, with filters, or plainly. Returns tokens `[S]`.

    The logits are already divided by the temperature. This commutes with the penalty, which divides positive logits and
    multiplies negative ones.
    """
    device = logits_SV.device
    penalty_S = table_N["penalty"][rows]
    if seen_SV is not None and (penalty_S != 1).any():
        factor = torch.from_numpy(penalty_S).to(device).unsqueeze(1)
        punished = torch.where(logits_SV > 0, logits_SV / factor, logits_SV * factor)
        logits_SV = torch.where(seen_SV, punished, logits_SV)
    if banned_SV is not None:
        logits_SV = logits_SV.masked_fill(banned_SV, -torch.inf)
    tokens_S = torch.empty(len(rows), dtype=torch.int64, device=device)
    greedy_S = table_N["greedy"][rows]
    top_k_S = np.where(table_N["top_k"][rows] < logits_SV.shape[1], table_N["top_k"][rows], 0)
    sorted_S = ~greedy_S & ((top_k_S > 0) | (table_N["top_p"][rows] < 1))
    plain_S = ~greedy_S & ~sorted_S
    if greedy_S.any():
        which = torch.from_numpy(np.flatnonzero(greedy_S)).to(device)
        tokens_S[which] = logits_SV[which].argmax(-1)
    if plain_S.any():
        chosen = np.flatnonzero(plain_S)
        which = torch.from_numpy(chosen).to(device)
        probs = torch.softmax(logits_SV[which], dim=-1)
        min_p = table_N["min_p"][rows[chosen]]
        if (min_p > 0).any():
            floor = probs.amax(-1, keepdim=True) * torch.from_numpy(min_p.astype(np.float32)).to(device).unsqueeze(1)
            probs = torch.where(probs >= floor, probs, 0.0)
        tokens_S[which] = invert_cdf(probs, u_S[which])
    # One call per value of top_k: ties between equally likely tokens must not be resolved depending on other rows.
    for top_k in np.unique(top_k_S[sorted_S]):
        chosen = np.flatnonzero(sorted_S & (top_k_S == top_k))
        which = torch.from_numpy(chosen).to(device)
        tokens_S[which] = _sample_sorted(
            torch.softmax(logits_SV[which], dim=-1),
            u_S[which],
            int(top_k),
            torch.from_numpy(table_N["top_p"][rows[chosen]]).to(device),
            torch.from_numpy(table_N["min_p"][rows[chosen]]).to(device),
        )
    return tokens_S


def _sample_sorted(probs_SV: Tensor, u_S: Tensor, top_k: int, top_p_S: Tensor, min_p_S: Tensor) -> Tensor:
    """Sample after top-k (0 keeps all), then top-p of the remaining mass, then min-p; in descending probability."""
    vocabulary = probs_SV.shape[1]
    num = top_k or min(FIRST_CANDIDATES, vocabulary)
    found = probs_SV.topk(num, dim=-1)
    values_SK, indices_SK = found.values.double(), found.indices
    total_S = values_SK.sum(-1) if top_k else torch.ones_like(top_p_S)
    tokens_S = _sample_candidates(values_SK, indices_SK, u_S, top_p_S * total_S, min_p_S)
    short = values_SK.sum(-1) < top_p_S * total_S
    if not top_k and num < vocabulary and bool(short.any()):
        values, indices = probs_SV[short].sort(dim=-1, descending=True, stable=True)
        tokens_S[short] = _sample_candidates(values.double(), indices, u_S[short], top_p_S[short], min_p_S[short])
    return tokens_S


def _sample_candidates(values_SK: Tensor, indices_SK: Tensor, u_S: Tensor, mass_S: Tensor, min_p_S: Tensor) -> Tensor:
    before = running_sums(values_SK) - values_SK
    kept = (before < mass_S.unsqueeze(1)) & (values_SK >= min_p_S.unsqueeze(1) * values_SK[:, :1])
    cumulative = running_sums(torch.where(kept, values_SK, 0.0))
    target = u_S.unsqueeze(1) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True).clamp_(max=values_SK.shape[1] - 1)
    return indices_SK.gather(1, place).squeeze(1)
