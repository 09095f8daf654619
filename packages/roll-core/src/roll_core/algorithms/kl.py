"""Estimators of the KL divergence from samples of the policy, and the controller of the KL coefficient.

T flat tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from roll_core.algorithms.segments import dense, sums_by
from roll_core.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

KLKind = Literal["k1", "k2", "k3", "abs"]
"""Estimator names after Schulman, "Approximating KL divergence" (2020).

ROLL calls k1 `kl` and k2 `mse`. Other libraries call k3 `low_var_kl`.
"""

KLMean = Literal["seq-mean-token-mean", "token-mean"]
"""Values of the config key `target_kl_agg_mode`, named like those of `loss_agg_mode`."""

LOG_RATIO_CLAMP = 20.0
"""Largest |log-ratio| that is exponentiated: exp(20) is about 5e8. A clamped log-ratio has gradient 0."""

K3_CLAMP = 10.0
"""k3 is clamped to ± this value, as in ROLL, so that one outlier token cannot dominate a batch."""


def approx_kl(
    logprobs_T: Tensor,
    ref_logprobs_T: Tensor,
    kind: KLKind,
    *,
    log_ratio_clamp: float = LOG_RATIO_CLAMP,
    k3_clamp: float = K3_CLAMP,
) -> Tensor:
    """Per-token estimate of KL(policy || reference) at sampled tokens, with `d = logprob - ref_logprob`.

    * `k1`: `d`; unbiased, may be negative.
    * `k2`: `d² / 2`; biased, but its *gradient* is the gradient of the KL (ROLL's `mse`).
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
    """Mean KL that `KLController` compares with its target.

    The mean is over masked tokens, or over sequences of each sequence's mean over masked tokens. Sequences without a
    masked token are ignored. Returns 0 if no token is masked in.
    """
    if mode == "token-mean":
        return float(torch.where(mask_T, kl_T, 0.0).sum() / mask_T.sum().clamp(min=1))
    segments_N, num_sequences = dense(segments_T[mask_T])
    means_S = sums_by(kl_T[mask_T].double(), segments_N, num_sequences) / torch.bincount(
        segments_N, minlength=num_sequences
    )
    return float(means_S.mean()) if num_sequences else 0.0


class KLController:
    """Coefficient of the KL penalty in the reward: fixed, or adapted to a target KL (arXiv:1909.08593 §2.2).

    Config keys: `init_kl_coef`, `target_kl` (None keeps the coefficient fixed), `kl_horizon` and `kl_error_clip`.
    """

    def __init__(
        self, init_coef: float, target: float | None = None, horizon: int = 10000, error_clip: float = 0.2
    ) -> None:
        self.coef, self.target, self.horizon, self.error_clip = init_coef, target, horizon, error_clip

    def update(self, kl: float, num_samples: int) -> None:
        """Apply `coef *= 1 + clip(kl / target - 1, ±error_clip) * num_samples / horizon`, with `kl` from `mean_kl`.

        Raises `NonFiniteError` for a NaN or infinite `kl`, because a NaN would stay in the coefficient.
        """
        if not abs(kl) < float("inf"):
            raise NonFiniteError(f"the mean KL is {kl}, expected a finite number: the KL coefficient cannot be adapted")
        if self.target is None:
            return
        error = min(max(kl / self.target - 1.0, -self.error_clip), self.error_clip)
        self.coef *= 1.0 + error * num_samples / self.horizon

    def state(self) -> dict[str, float]:
        """State as plain values for a checkpoint."""
        return {"coef": self.coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the value returned by `state`."""
        self.coef = float(state["coef"])
