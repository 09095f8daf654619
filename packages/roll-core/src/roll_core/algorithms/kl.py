"""Estimators of the KL divergence between two policies from samples of the first, and the controller of its weight.

T flat tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from roll_core.algorithms._segments import counts_by, dense, sums_by
from roll_core.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "abs"]
"""Names after Schulman, "Approximating KL divergence" (2020). ROLL calls k1 `kl` and k2 `mse`; others call k3
`low_var_kl`."""

KLMean = Literal["seq-mean-token-mean", "token-mean"]
"""Config key `target_kl_agg_mode`, in the names of `loss_agg_mode`."""

LOG_RATIO_CLAMP = 20.0
"""Largest |log-ratio| that is exponentiated: exp(20) is about 5e8. Beyond it the gradient is 0."""

K3_CLAMP = 10.0
"""k3 is clamped to ± this, as in ROLL: one stray token does not decide a batch."""


def approx_kl(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    kind: KLKind,
    *,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
    k3_clamp: float = K3_CLAMP,
) -> Tensor:
    """Per-token estimate of KL(policy || reference) at tokens drawn from the policy, with `d = logprob - ref_logprob`:

    * `k1`: `d`; unbiased, may be negative.
    * `k2`: `d² / 2`; biased, its *gradient* is that of the KL (it is ROLL's `mse`).
    * `k3`: `exp(-d) - 1 + d`; unbiased and never negative, with `d` clamped to ± `log_ratio_clamp` and the result to
      ± `k3_clamp`.
    * `abs`: `|d|`.
    """
    gap_T = logprobs_T - ref_logprobs_T
    if kind == "k1":
        return gap_T
    if kind == "k2":
        return 0.5 * gap_T.square()
    if kind == "abs":
        return gap_T.abs()
    gap_T = gap_T.clamp(-log_ratio_clamp, log_ratio_clamp)
    return (torch.expm1(-gap_T) + gap_T).clamp(-k3_clamp, k3_clamp)


def mean_kl(kl_T: Tensor, mask_T: Tensor, segments_T: Tensor, mode: KLMean) -> float:
    """The number that `KLController` compares with its target: over masked tokens, or over sequences of the mean over
    their masked tokens. Sequences without a masked token do not count; 0 if there are none."""
    if mode == "token-mean":
        return float(torch.where(mask_T, kl_T, 0.0).sum() / mask_T.sum().clamp(min=1))
    segments_N, num_sequences = dense(segments_T[mask_T])
    means_S = sums_by(kl_T[mask_T].double(), segments_N, num_sequences) / counts_by(segments_N, num_sequences)
    return float(means_S.mean()) if num_sequences else 0.0


class KLController:
    """The weight of the KL penalty in the reward: fixed, or adapted to keep the KL near a target (arXiv:1909.08593
    §2.2).

    Config keys `init_kl_coef`, `target_kl` (None keeps it fixed) and `kl_horizon`.
    """

    def __init__(self, init_coef: float, target: float | None = None, horizon: int = 10000) -> None:
        self.coef, self.target, self.horizon = init_coef, target, horizon

    def update(self, kl: float, num_samples: int) -> None:
        """`coef *= 1 + clip(kl / target - 1, ±0.2) * num_samples / horizon`, with the measured `mean_kl`.

        Raises `NonFiniteError`: a NaN would stay in the weight for ever.
        """
        if not abs(kl) < float("inf"):
            raise NonFiniteError(f"the KL that the controller of the KL weight was given is {kl}")
        if self.target is None:
            return
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * num_samples / self.horizon

    def state(self) -> dict[str, float]:
        """Plain values for a checkpoint."""
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned."""
        self.coef = float(state["coef"])
