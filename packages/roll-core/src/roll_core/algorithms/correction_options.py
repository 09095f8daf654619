"""Options of the correction `train_infer_correction`. Imports nothing heavy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from roll_core.spec.config import Config, NonNegativeFloat, PositiveFloat

Level = Literal["token", "segment", "geometric", "sequence"]


class ImportanceWeightConfig(Config):
    """`train_infer_correction.is_weight`: importance sampling, truncated (TIS) or masked (MIS, IcePop).

    Multiplies advantages by the ratio of the trainer's to the engine's probability of a token, within bounds.
    """

    enabled: bool | None = None
    """Enable importance weights.

    Default: on if generation runs ahead of training or the engine uses fp8 weights, and the old policy's logprobs are
    recomputed. Without the weights, the gradient on stale responses or on responses of fp8 engines is biased, and no
    clipping limits it. PPO's ratio compares with the policy at the start of the update, not with the policy that
    sampled.
    """
    weight_type: Level = "token"
    """Level of the ratio: `token` is the token's own ratio.

    `segment` and `geometric` are the geometric mean over the token's segment or sequence. `sequence` is the product
    over the sequence.
    """
    upper_bound: PositiveFloat = 1.2
    """Maximum ratio."""
    lower_bound: NonNegativeFloat = 0.0
    """Minimum ratio."""
    outside: Literal["truncate", "mask"] = "truncate"
    """Weight of a ratio outside the bounds: `truncate` is the bound itself (TIS), `mask` is 0.

    `mask` is MIS at levels `sequence` and `geometric`, and IcePop at level `token` (bounds 0.5 and 5). Tokens of weight
    0 still count in the loss's denominator; `filters` remove them from it.
    """
    batch_normalize: bool = False
    """Divide weights by their mean over the batch: over tokens, segments or rollouts, as `weight_type` says."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> ImportanceWeightConfig:
        if self.lower_bound > self.upper_bound:
            raise ValueError(f"lower_bound {self.lower_bound:g} is above upper_bound {self.upper_bound:g}")
        return self


class CorrectionFilterConfig(Config):
    """`train_infer_correction.filters`: removes tokens outside of a range from the loss."""

    enabled: bool = False
    """Apply this filter."""
    agg_type: Level | Literal["max"] = "token"
    """Level at which the ratio, the difference, k2 and k3 are computed, as in `weight_type`.

    `max` is the largest value of the rollout, only for `k2_max` and `k3_max`.
    """
    ratio_enabled: bool = True
    """Filter by the ratio of the trainer's probability to the engine's."""
    ratio_low: NonNegativeFloat = 0.8
    """Minimum ratio of kept tokens."""
    ratio_high: PositiveFloat = 1.2
    """Maximum ratio of kept tokens."""
    diff_enabled: bool = False
    """Filter by the trainer's probability minus the engine's, averaged over the span of `agg_type`."""
    diff_low: float = -0.2
    """Minimum difference of kept tokens."""
    diff_high: float = 0.2
    """Maximum difference of kept tokens."""
    k2_max: PositiveFloat | None = None
    """Maximum of `d² / 2`, with `d` the logarithm of the ratio: of the token, or its mean, sum or maximum."""
    k3_max: PositiveFloat | None = None
    """Maximum of `exp(d) - 1 - d`, like `k2_max`: an estimate of the KL from the trainer to the engine."""

    @model_validator(mode="after")
    def _max_is_of_k2_or_k3(self) -> CorrectionFilterConfig:
        if self.agg_type == "max" and (self.ratio_enabled or self.diff_enabled):
            key = "ratio_enabled" if self.ratio_enabled else "diff_enabled"
            raise ValueError(f"agg_type max is only for k2_max and k3_max: set {key} to false")
        return self


class TrainInferCorrectionConfig(Config):
    """`train_infer_correction`: corrects tokens that the trained policy would sample with a different probability."""

    is_weight: ImportanceWeightConfig = ImportanceWeightConfig()
    """Importance weights."""
    filters: list[CorrectionFilterConfig] = Field(default_factory=list)
    """Ranges of ratios or differences. A token is kept only if all filters keep it."""
    off_policy_mask_threshold: PositiveFloat | None = None
    """Off-policy sequence mask (OPSM, arXiv:2512.02556): ignore negative advantages of rollouts above this threshold.

    Compared is the mean over the rollout of the engine's logprob minus the trainer's, in nats. Default: no mask.
    """
    is_log_ratio_clamp: PositiveFloat = 20.0
    """Maximum |logarithm| of a ratio of the trainer's to the engine's probability."""

    @property
    def enabled(self) -> bool:
        """True if weights, the off-policy mask or a filter are enabled."""
        masks = self.off_policy_mask_threshold is not None
        return masks or bool(self.is_weight.enabled) or any(filter_options.enabled for filter_options in self.filters)
