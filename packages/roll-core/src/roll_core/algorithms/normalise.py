"""Normalisation of rewards (before advantages) and of advantages: means, standard deviations, clipping, whitening.

S sequences, T flat tokens, G groups.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from roll_core.algorithms.segments import dense, require_finite, sums_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

NormType = Literal["batch", "group", "running"]
"""Source of the statistics: the current batch, the samples of one prompt, or all batches so far."""

EPSILON = 1e-6
"""Default of the config key `norm_epsilon`."""

WHITEN_EPSILON = 1e-8
"""Default of the config key `whiten_epsilon`."""


@dataclass(slots=True)
class RunningMoments:
    """Mean and variance of all values so far, merged batch by batch (Chan, Golub, LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def update(self, values: Tensor) -> None:
        """Merge a batch of values. Raises `NonFiniteError`."""
        require_finite("values of running statistics", values)
        added = values.numel()
        if added == 0:
            return
        pivot = values.double().flatten()[0]  # so that equal values have exactly this mean, and no spread
        mean = float(pivot + (values.double() - pivot).mean())
        squares = float((values.double() - mean).square().sum())
        total, gap = self.count + added, mean - self.mean
        self.squares += squares + gap * gap * self.count * added / total
        self.mean += gap * added / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two values."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


class RewardNormaliser:
    """Normalise rewards to `(R - mean) / (std + epsilon)`, then clamp them to `± clip`.

    Config keys: `norm_mean_type`, `norm_std_type`, `reward_clip` and `norm_epsilon`. Mean and standard deviation are
    chosen independently; None skips the subtraction or the division. Standard deviations are unbiased (divided by
    n - 1), as in ROLL.

    Rewards without spread (equal rewards, a group of one) are centred but not scaled, because dividing by the epsilon
    would inflate them. Batch and running statistics are kept per domain. A domain with higher rewards therefore does
    not look like a domain with better responses. `running` includes the current batch.
    """

    def __init__(
        self, mean: NormType | None, std: NormType | None, clip: float | None = None, epsilon: float = EPSILON
    ) -> None:
        self.mean, self.std, self.clip, self.epsilon = mean, std, clip, epsilon
        self._running: dict[str, RunningMoments] = {}

    def __call__(self, rewards_S: Tensor, groups_S: Tensor, domains: Sequence[str] | None = None) -> Tensor:
        """Return normalised rewards `[S]`, float32.

        `groups_S` are arbitrary integers, one per prompt. `domains` names each sequence's key of `rewards` in the
        config; None means one domain. Leave failed sequences out of `rewards_S`, so that they affect no statistics.
        Raises `NonFiniteError`.
        """
        require_finite("rewards", rewards_S)
        rewards = rewards_S.double()
        domains = domains or [""] * rewards_S.numel()
        names = list(dict.fromkeys(domains))
        positions = {name: index for index, name in enumerate(names)}
        domain_S = torch.tensor([positions[name] for name in domains], dtype=torch.int64, device=rewards_S.device)
        if "running" in (self.mean, self.std):
            for index, name in enumerate(names):
                self._running.setdefault(name, RunningMoments()).update(rewards[domain_S == index])
        if self.mean is not None:
            rewards = rewards - self._statistics(self.mean, rewards_S, groups_S, domain_S, names)[0]
        if self.std is not None:
            std_S = self._statistics(self.std, rewards_S, groups_S, domain_S, names)[1]
            rewards = divide_by_std(rewards, std_S, self.epsilon)
        return clip(rewards, self.clip).float()

    def state(self) -> dict[str, dict[str, Any]]:
        """Running statistics by domain, as plain values for a checkpoint."""
        return {name: asdict(moments) for name, moments in self._running.items()}

    def load_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the value returned by `state`."""
        self._running = {name: RunningMoments(**moments) for name, moments in state.items()}

    def _statistics(
        self, kind: NormType, rewards_S: Tensor, groups_S: Tensor, domain_S: Tensor, names: Sequence[str]
    ) -> tuple[Tensor, Tensor]:
        if kind == "running":
            moments = torch.tensor(
                [(self._running[name].mean, self._running[name].std) for name in names], dtype=torch.float64
            ).reshape(-1, 2)
            means_S, stds_S = moments.to(rewards_S.device)[domain_S].unbind(-1)
            return means_S, stds_S
        return moments_by(rewards_S, groups_S if kind == "group" else domain_S)


def moments_by(values_S: Tensor, groups_S: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of each element's group, both `[S]` float64.

    The deviation is 0 for groups of one, and where it is within the rounding of the values (`rounding`).
    """
    values = values_S.double()
    index_S, num_groups = dense(groups_S)
    counts_G = torch.bincount(index_S, minlength=num_groups)
    # Distances from a member of the group: equal values have exactly their own mean, whatever their size.
    least_G = values.new_zeros(num_groups).scatter_reduce_(0, index_S, values, "amin", include_self=False)
    means_G = least_G + sums_by(values - least_G[index_S], index_S, num_groups) / counts_G
    squares_G = sums_by((values - means_G[index_S]).square(), index_S, num_groups)
    stds_G = (squares_G / (counts_G - 1).clamp(min=1)).sqrt()
    largest_G = values.new_zeros(num_groups).scatter_reduce_(0, index_S, values.abs(), "amax")
    stds_G = torch.where(stds_G > rounding(values_S.dtype) * largest_G, stds_G, 0.0)
    return means_G[index_S], stds_G[index_S]


def rounding(dtype: torch.dtype) -> float:
    """Relative difference of equal numbers that were computed in different ways: 1.2e-7 in float32."""
    return max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0, 1e-14)


def divide_by_std(values: Tensor, stds: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return `values / (stds + epsilon)`. Values with a standard deviation of at most `epsilon` are not scaled.

    `epsilon` has the unit of the rewards. What is only rounding, in values of any size, `moments_by` makes 0.
    """
    return torch.where(stds > epsilon, values / (stds + epsilon), values)


def clip(values: Tensor, bound: float | None) -> Tensor:
    """Clamp values to `± bound`; None returns them unchanged."""
    return values if bound is None else values.clamp(-bound, bound)


def whiten(values_T: Tensor, mask_T: Tensor, epsilon: float = WHITEN_EPSILON) -> Tensor:
    """Whiten masked values to mean 0 and unbiased variance 1; 0 outside the mask. float32.

    Computes `(x - mean) / sqrt(var + epsilon)`, as ROLL, TRL and verl do. Fewer than two masked values become 0, and so
    do values that differ only by rounding. Raises `NonFiniteError`.
    """
    values_N = values_T[mask_T].double()
    require_finite("values to whiten", values_N)
    white_T = torch.zeros(mask_T.shape, dtype=torch.float32, device=values_T.device)
    if values_N.numel():
        means_N, stds_N = moments_by(values_T[mask_T], torch.zeros_like(values_N, dtype=torch.int64))
        white_N = (values_N - means_N) / (stds_N.square() + epsilon).sqrt()
        white_T[mask_T] = torch.where(stds_N > 0, white_N, 0.0).float()
    return white_T
