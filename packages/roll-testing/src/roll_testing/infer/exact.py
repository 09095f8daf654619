"""Exact probabilities of the next token under `SamplingParams`, and a test of whether tokens were sampled from them.

Shapes: T sampled tokens, V vocabulary size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from roll_testing.infer.models import log_softmax

if TYPE_CHECKING:
    import numpy.typing as npt

    from roll_core.types import SamplingParams, TokenIds
    from roll_testing.infer.models import Logits

FALSE_ALARM = 1e-6
"""Probability with which a correct engine fails one test of a distribution. With seeds the outcome is fixed."""
BINS = 20
HAIR = 1e-3
"""Relative change of top-p and min-p, and minimum difference of the logits at the limit of top-k. If the change alters
which tokens are kept, or the difference is smaller, rounding decides and the position is not tested."""


def probabilities(rows: Logits, params: SamplingParams) -> Logits:
    """Return `[T, V]` probabilities under `SamplingParams`.

    The order is temperature, top-k, top-p of the remaining mass, min-p.
    """
    probs = np.exp(log_softmax(rows / params.temperature))
    order = np.argsort(-probs, axis=-1, kind="stable")
    sorted_probs = np.take_along_axis(probs, order, -1)
    if params.top_k:
        sorted_probs[:, params.top_k :] = 0
    before = np.cumsum(sorted_probs, -1) - sorted_probs
    sorted_probs[before >= params.top_p * sorted_probs.sum(-1, keepdims=True)] = 0
    sorted_probs[sorted_probs < params.min_p * sorted_probs[:, :1]] = 0
    result = np.zeros_like(probs)
    np.put_along_axis(result, order, sorted_probs / sorted_probs.sum(-1, keepdims=True), -1)
    return result


def clear(rows: Logits, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Return `[T]`: True where rounding cannot change which tokens are kept."""
    low, high = (
        replace(params, top_p=params.top_p if params.top_p == 1 else params.top_p * by, min_p=params.min_p * by)
        for by in (1 - HAIR, 1 + HAIR)
    )
    equal: npt.NDArray[np.bool_] = ((probabilities(rows, low) > 0) == (probabilities(rows, high) > 0)).all(-1)
    if params.top_k:
        falling = -np.sort(-rows, axis=-1)
        equal &= falling[:, params.top_k - 1] - falling[:, params.top_k] > HAIR
    return equal


class SampledTokens:
    """Sampled tokens, each compared with the exact distribution that it should come from.

    The mass of all tokens that are likelier than the sampled one, plus a random part of its own mass, is uniform in
    [0,1]. It is independent of all earlier tokens, whatever the distributions are (the probability integral transform;
    Rosenblatt, 1952). So tokens of many distributions make one chi-square test.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._places: list[float] = []
        self._random = np.random.default_rng(2718)

    def add(self, logits: Logits, tokens: TokenIds) -> None:
        """Add tokens; `tokens[t]` was sampled from `logits[t]`. Fails if a token has probability 0."""
        probs = probabilities(logits, self.params)
        chosen = np.take_along_axis(probs, tokens[:, None], -1)
        certain = clear(logits, self.params)
        for row in np.flatnonzero(certain & (chosen[:, 0] == 0))[:1]:
            rank = int((logits[row] > logits[row, tokens[row]]).sum()) + 1
            raise AssertionError(
                f"token {tokens[row]} was sampled, but {self.params} excludes it: its rank by probability is {rank},"
                f" and only {int((probs[row] > 0).sum())} are kept"
            )
        above = np.where(probs > chosen, probs, 0).sum(-1)
        level = np.where(probs == chosen, probs, 0).sum(-1)
        self._places += (above + level * self._random.random(len(tokens)))[certain].tolist()

    def statistic(self) -> float:
        """Return the chi-square statistic over equally likely bins."""
        expected = len(self._places) / BINS
        return float(np.square(self._counts() - expected).sum() / expected)

    def check(self) -> None:
        """Fail if the p-value of the tokens is below `FALSE_ALARM`, or if there are too few tokens for the test."""
        assert len(self._places) >= 10 * BINS, (
            f"only {len(self._places)} tokens can be tested: the model's responses are too similar"
        )
        statistic = self.statistic()
        p = _tail(statistic, BINS - 1)
        assert p >= FALSE_ALARM, (
            f"{len(self._places)} tokens do not come from the distribution of {self.params}: chi-square"
            f" {statistic:.1f} on {BINS - 1} degrees of freedom, p = {p:.2g}; tokens by the probability mass of"
            f" likelier ones, in twentieths: {self._counts().tolist()}"
        )

    def _counts(self) -> npt.NDArray[np.int64]:
        counts: npt.NDArray[np.int64] = np.histogram(self._places, bins=BINS, range=(0.0, 1.0))[0]
        return counts


def _tail(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square variable is larger."""
    shape, point = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(shape, point))
