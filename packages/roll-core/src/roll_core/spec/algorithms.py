"""The contracts of advantage estimators and policy losses: pure functions on flat tensors.

T response and prompt tokens laid end to end, S sequences, G groups (see `roll_core.types`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from roll_core.spec.train import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInput:
    """What an estimator may read. All sequences of the batch that have a reward.

    `roll_core.algorithms.rewards.token_rewards` computes the reward of each token from it.
    """

    scores_S: Tensor
    """float32, the reward of each sequence: normalised as the config says, or as scored if the estimator normalises
    (`AdvantageProvider.normalise`)."""
    mask_T: Tensor
    """bool, tokens that the policy generated."""
    segments_T: Tensor
    """int64, index of each token's sequence."""
    groups_S: Tensor
    """int64, index of each sequence's group."""
    values_T: Tensor | None = None
    """float32, the critic's value before each token; None without a critic."""
    gamma: float = 1.0
    lambd: float = 1.0
    kl_T: Tensor | None = None
    """float32, KL to the reference of each token, if the config puts it into the reward."""
    kl_coef: float = 0.0
    reward_clip: float | None = None
    """Bound of a normalised reward, and of a token's reward."""
    whiten_rewards: bool = False
    """Whiten the token rewards before credit is given."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """`adv_options` as they are written; the schema of the estimator's record has judged them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageOutput:
    """Per token; 0 where the mask is false."""

    advantages_T: Tensor
    returns_T: Tensor | None = None
    """The critic's target, where there is one."""
    token_rewards_T: Tensor | None = None
    """The token rewards that were credited; their mean is the metric `reward/normalised_mean`."""


class AdvantageEstimator(Protocol):
    """Credit for each token. Reads nothing but its input; never modifies it."""

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        """Advantages of a whole batch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossParams:
    """The knobs of policy losses; each is a config key of the same name."""

    pg_clip_low: float = 0.2
    pg_clip_high: float = 0.2
    dual_clip: float | None = None
    """Lower bound on the objective of negative advantages, as a factor > 1 of the advantage (arXiv:1912.09729)."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Keys of `pg_options`, for losses that plugins bring."""


class PolicyLoss(Protocol):
    """The per-token policy objective, to be *minimised*."""

    def __call__(
        self, logprobs_T: Tensor, micro: MicroBatch, params: PolicyLossParams
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """`(loss_T, per-token metrics)`; the runtime masks and aggregates both."""
        ...


document_fields(__name__)
