"""Normalising rewards before credit is given, and advantages after: means, deviations, clipping, whitening.

S sequences, T flat tokens, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from roll_core.algorithms._segments import counts_by, dense, require_finite, sums_by
from roll_core.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

NormType = Literal["batch", "group", "running"]
"""Whose statistics: of this batch, of the samples of one prompt, of all batches so far."""

EPSILON = 1e-6
"""Added to a deviation; a deviation no larger than this counts as none."""


@dataclass(slots=True)
class RunningMoments:
    """Mean and variance of everything seen so far, merged batch by batch (Chan, Golub, LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of squared distances from the mean."""

    def update(self, values: Tensor) -> None:
        """Merge a batch in. Raises `NonFiniteError`."""
        require_finite("values of running statistics", values)
        added = values.numel()
        if added == 0:
            return
        mean = float(values.double().mean())
        squares = float((values.double() - mean).square().sum())
        total, gap = self.count + added, mean - self.mean
        self.squares += squares + gap * gap * self.count * added / total
        self.mean += gap * added / total
        self.count = total

    @property
    def std(self) -> float:
        """Unbiased; 0 for fewer than two values."""
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0

    def state(self) -> dict[str, float]:
        """Plain values for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_state(cls, state: Mapping[str, float]) -> RunningMoments:
        """The moments that `state` was taken from."""
        return cls(count=int(state["count"]), mean=float(state["mean"]), squares=float(state["squares"]))


class RewardNormaliser:
    """`(R - mean) / (std + 1e-6)`, then clamped to `± clip`; the config keys `norm_mean_type`, `norm_std_type` and
    `reward_clip`.

    Mean and deviation are chosen independently; None subtracts, or divides by, nothing. Deviations are unbiased
    (divided by n - 1) as in ROLL. Where there is no spread (equal rewards, a group of one) a reward is centred and not
    scaled: dividing by an epsilon would blow it up. Batch and running statistics are kept per domain, so that a domain
    whose rewards lie higher does not look like one that is answered better. `running` counts the batch at hand.
    """

    def __init__(self, mean: NormType | None, std: NormType | None, clip: float | None = None) -> None:
        self.mean, self.std, self.clip = mean, std, clip
        self._running: dict[str, RunningMoments] = {}

    def __call__(self, rewards_S: Tensor, groups_S: Tensor, domains: Sequence[str] | None = None) -> Tensor:
        """Normalised rewards, float32. `groups_S` are any integers; `domains` names each sequence's entry of `rewards`
        in the config, all one if None.

        Failures are not among `rewards_S`: they belong to no statistics. Raises `NonFiniteError`.
        """
        require_finite("rewards", rewards_S)
        rewards = rewards_S.double()
        domain_S, names = _index_domains(domains, rewards_S)
        if "running" in (self.mean, self.std):
            for index, name in enumerate(names):
                self._running.setdefault(name, RunningMoments()).update(rewards[domain_S == index])
        if self.mean is not None:
            rewards = rewards - self._statistics(self.mean, rewards_S, groups_S, domain_S, names)[0]
        if self.std is not None:
            std_S = self._statistics(self.std, rewards_S, groups_S, domain_S, names)[1]
            rewards = divide_by_std(rewards, std_S)
        return clip(rewards, self.clip).float()

    def state(self) -> dict[str, dict[str, float]]:
        """The running statistics by domain, plain values for a checkpoint."""
        return {name: moments.state() for name, moments in self._running.items()}

    def load_state(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from what `state` returned."""
        self._running = {name: RunningMoments.from_state(each) for name, each in state.items()}

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
    """`[S]` mean and unbiased deviation of each element's group, float64; the deviation of a group of one is 0."""
    values = values_S.double()
    index_S, num_groups = dense(groups_S)
    counts_G = counts_by(index_S, num_groups)
    means_S = (sums_by(values, index_S, num_groups) / counts_G)[index_S]
    squares_G = sums_by((values - means_S).square(), index_S, num_groups)
    stds_G = (squares_G / (counts_G - 1).clamp(min=1)).sqrt()
    return means_S, stds_G[index_S]


def divide_by_std(values: Tensor, stds: Tensor) -> Tensor:
    """`values / (stds + 1e-6)`; a value without spread (a deviation of at most 1e-6) is not scaled."""
    return torch.where(stds > EPSILON, values / (stds + EPSILON), values)


def clip(values: Tensor, bound: float | None) -> Tensor:
    """Clamped to `± bound`; as they are where `bound` is None."""
    return values if bound is None else values.clamp(-bound, bound)


def whiten(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Masked values shifted and scaled to mean 0 and (unbiased) variance 1; 0 elsewhere. float32.

    `(x - mean) / sqrt(var + 1e-8)`, as ROLL and TRL whiten; fewer than two masked values become 0.
    """
    values_N = values_T[mask_T].double()
    if not torch.isfinite(values_N).all():
        raise NonFiniteError("cannot whiten: some of the masked values are not finite")
    white_T = torch.zeros(mask_T.shape, dtype=torch.float32, device=values_T.device)
    if values_N.numel() > 1:
        variance = values_N.var(unbiased=True)
        white_T[mask_T] = ((values_N - values_N.mean()) / (variance + 1e-8).sqrt()).float()
    return white_T


def _index_domains(domains: Sequence[str] | None, rewards_S: Tensor) -> tuple[Tensor, list[str]]:
    if domains is None:
        domains = [""] * rewards_S.numel()
    names = list(dict.fromkeys(domains))
    positions = {name: index for index, name in enumerate(names)}
    index = [positions[name] for name in domains]
    return torch.tensor(index, dtype=torch.int64, device=rewards_S.device), names
