"""Entropy of the policy: which tokens to train on, and the coefficient of the entropy bonus.

T flat tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from roll_core.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def top_entropy(entropy_T: Tensor, mask_T: Tensor, quantile: float) -> Tensor:
    """Masked tokens whose entropy is among the highest share `quantile`, bool `[T]` (arXiv:2506.01939 eq. 5).

    `quantile` 0.2 selects a fifth of the masked tokens, rounded up, and all tokens whose entropy equals the lowest
    selected one. The share is of all tokens given. TRL takes that of a microbatch on all ranks, and interpolates the
    threshold, which may select one token less.
    """
    entropy_N = entropy_T[mask_T]
    num_kept = math.ceil(quantile * entropy_N.numel())
    if num_kept == 0:
        return torch.zeros_like(mask_T)
    threshold = entropy_N.topk(num_kept, sorted=False).values.min()  # CUDA has no deterministic kthvalue
    return mask_T & (entropy_T >= threshold)


class EntropyController:
    """Coefficient of the entropy bonus: fixed, or adapted to a target entropy (Skywork-OR1, arXiv:2505.22312 §4).

    After a step with mean entropy `e`, `coef` changes by `+ delta` if `e < target`, else by `- delta`, within `minimum`
    and `maximum`. The bonus applies while `e <= target`. The paper measures `e` before the update of the same step;
    here it is that of the previous step, which costs no forward pass.
    """

    def __init__(
        self, init_coef: float, target: float | None = None, *, delta: float, minimum: float, maximum: float
    ) -> None:
        self.coef, self.target, self.delta, self.minimum, self.maximum = init_coef, target, delta, minimum, maximum
        self._applies = True

    @property
    def current(self) -> float:
        """Coefficient of the next update."""
        return self.coef if self._applies else 0.0

    def update(self, entropy: float) -> None:
        """Adapt to the mean entropy of the last update.

        Raises `NonFiniteError` for a NaN or infinite value, because it would never be noticed again.
        """
        if not math.isfinite(entropy):
            raise NonFiniteError(f"the mean entropy is {entropy}: the entropy coefficient cannot be adapted")
        if self.target is None:
            return
        step = self.delta if entropy < self.target else -self.delta
        self.coef = min(max(self.coef + step, self.minimum), self.maximum)
        self._applies = entropy <= self.target

    def state(self) -> dict[str, float]:
        """State as plain values for a checkpoint."""
        return {"coef": self.coef, "applies": float(self._applies)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the value returned by `state`."""
        self.coef, self._applies = float(state["coef"]), bool(state["applies"])
