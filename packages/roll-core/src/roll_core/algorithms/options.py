"""Options of advantage estimators (`adv_options`), policy losses (`pg_options`) and optimizers (`optimizer_kwargs`).

Imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from roll_core.spec.config import AdvantageOptions, Config, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from roll_core.spec.providers import AdvantageProvider

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.providers import Provider

# -- advantage estimators ----------------------------------------------------------------------------------------------


class GRPOOptions(AdvantageOptions):
    """Options (`adv_options`) of `grpo`."""

    leave_one_out: bool = False
    """Compare each reward with the mean and deviation of the group's other samples."""


class PassAtKOptions(AdvantageOptions):
    """Options (`adv_options`) of `pass_at_k`."""

    k: PositiveInt
    """Number of responses of which the best counts."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """`mean`: compare with all subsets, over their deviation. `leave_one_out`: with the subset without the response."""

    @property
    @override
    def min_samples(self) -> int:
        return self.k + (self.baseline == "mean")

    @model_validator(mode="after")
    def _others_remain(self) -> PassAtKOptions:
        if self.baseline == "leave_one_out" and self.k == 1:
            raise ValueError("baseline leave_one_out compares a response with k - 1 others: set k to at least 2")
        return self


class GDPOOptions(AdvantageOptions):
    """Options (`adv_options`) of `gdpo`."""

    weights: Annotated[dict[str, float], Field(min_length=1)]
    """Weight of each component of the reward, by its name in the reward's detail."""
    batch_norm: bool = True
    """Normalise the weighted sum over the batch."""


# -- optimizers --------------------------------------------------------------------------------------------------------


class SGDOptions(Config):
    """Options (`optimizer_kwargs`) of `sgd`."""

    momentum: Fraction = 0.9
    """Decay of the sum of gradients; 0 disables momentum."""
    nesterov: bool = False
    """Nesterov's momentum."""


class MuonOptions(Config):
    """Options (`optimizer_kwargs`) of `muon`."""

    momentum: Fraction = 0.95
    """Decay of the sum of gradients."""
    nesterov: bool = True
    """Nesterov's momentum."""
    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations that orthogonalise the momentum."""


# -- policy losses -----------------------------------------------------------------------------------------------------


class PolicyLossOptions(Config):
    """Options of `ppo`, `vanilla`, `gpg` and `raft_plus_plus`, and base of the other policy losses' options."""

    reads_pg_clip: ClassVar[bool] = False
    """True if the loss clips by the run's keys `pg_clip…`."""
    reads_dual_clip: ClassVar[bool] = False
    """True if the loss reads the run's keys `dual_clip…`."""
    expects_agg_mode: ClassVar[str] = ""
    """The `loss_agg_mode` of the paper, if the loss is another algorithm with any other."""

    log_ratio_clamp: PositiveFloat = 20.0
    """Maximum absolute logarithm of the importance ratio; beyond it a token has no gradient."""

    def warnings(self, run: Any, parts: Mapping[str, Provider]) -> Mapping[str, str]:
        """Dotted keys of the run's config with a probably unintended value, each with the reason and a remedy.

        `run` is a valid config of a pipeline with the key `pg_variant`; `parts` as in `RunConfig.warnings`.
        """
        warnings: dict[str, str] = {}
        changed, unread = _changed(run), f"pg_variant {run.pg_variant} does not read it: "
        if not self.reads_pg_clip:
            names = [name for name in type(self).model_fields if name != "log_ratio_clamp"]
            reason = f"its constants are pg_options.{', pg_options.'.join(names)}" if names else "it has no clip"
            warnings |= {key: unread + reason for key in sorted(changed) if key.startswith("pg_clip")}
        if not self.reads_dual_clip and "dual_clip" in changed:
            warnings["dual_clip"] = f"{unread}it has no dual clip"
        if self.expects_agg_mode and run.loss_agg_mode != self.expects_agg_mode:
            warnings["loss_agg_mode"] = (
                f"found {run.loss_agg_mode}, but {run.pg_variant} is defined with {self.expects_agg_mode}: with"
                " another mode, sequences have other weights"
            )
        return warnings


def _changed(run: Any) -> set[str]:
    """Keys whose values differ from their defaults. A saved config contains every default explicitly."""
    return {name for name, field in type(run).model_fields.items() if getattr(run, name) != field.default}


class PPOOptions(PolicyLossOptions):
    """Options of `ppo`. Its clip ranges are the run's keys `pg_clip…` and `dual_clip…`."""

    reads_pg_clip: ClassVar[bool] = True
    reads_dual_clip: ClassVar[bool] = True


class GSPOOptions(PolicyLossOptions):
    """Options of `gspo`, `gspo_token` and `luspo`."""

    expects_agg_mode: ClassVar[str] = "seq-mean-token-mean"

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """Clip a sequence's ratio below 1 - this value. The default is the paper's."""
    clip_high: PositiveFloat = 4e-4
    """Clip a sequence's ratio above 1 + this value. The default is the paper's."""


class CISPOOptions(PolicyLossOptions):
    """Options of `cispo`."""

    bounds: Literal["absolute", "relative"] = "absolute"
    """`absolute`: the weight is between `clip_low` and `clip_high`. `relative`: between 1 - `clip_low` and
    1 + `clip_high`."""
    clip_low: NonNegativeFloat = 0.0
    """Lower bound of the weight. The paper has none."""
    clip_high: PositiveFloat = 5.0
    """Upper bound of the weight."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> CISPOOptions:
        low, high = self.interval
        if not 0 <= low < high:
            raise ValueError(
                f"clip_low {self.clip_low:g} and clip_high {self.clip_high:g} with bounds: {self.bounds} give weights"
                f" from {low:g} to {high:g}, expected 0 <= lower < upper"
            )
        return self

    @override
    def warnings(self, run: Any, parts: Mapping[str, Provider]) -> Mapping[str, str]:
        warnings = dict(super().warnings(run, parts))
        if self.bounds == "absolute" and self.clip_high < 1:
            warnings["pg_options.clip_high"] = (
                f"found {self.clip_high:g}, which bounds the weight itself: even on-policy tokens have this weight"
                " instead of 1. For a distance from 1, as in verl, set bounds: relative"
            )
        return warnings

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the weight as ratios."""
        relative = self.bounds == "relative"
        return (1 - self.clip_low, 1 + self.clip_high) if relative else (self.clip_low, self.clip_high)


class GMPOOptions(PolicyLossOptions):
    """Options of `gmpo`."""

    expects_agg_mode: ClassVar[str] = "seq-mean-token-mean"

    clip_low: PositiveFloat = 0.4
    """Clip a token's log-ratio below minus this value, where the advantage is negative. The default is the paper's."""
    clip_high: PositiveFloat = 0.4
    """Clip a token's log-ratio above this value, where the advantage is positive. The default is the paper's."""


class SAPOOptions(PolicyLossOptions):
    """Options of `sapo`."""

    tau_pos: PositiveFloat = 1.0
    """Temperature of the gate for positive advantages. The default is the paper's."""
    tau_neg: PositiveFloat = 1.05
    """Temperature of the gate for other advantages; a higher one decays faster. The default is the paper's."""


class DPPOOptions(PolicyLossOptions):
    """Options of `dppo`."""

    divergence: Literal["tv", "kl"] = "tv"
    """Divergence of a token's probability from the engine's, by which tokens are masked."""
    delta_low: PositiveFloat = 0.2
    """Maximum divergence of tokens with negative advantage that became less likely."""
    delta_high: PositiveFloat = 0.2
    """Maximum divergence of tokens with positive advantage that became more likely."""
    ratio_high: PositiveFloat = 20.0
    """Maximum importance weight."""
    probability_epsilon: PositiveFloat = 1e-8
    """Added to the probability of other tokens in the logarithm of `divergence: kl`, as in verl."""

    @override
    def warnings(self, run: Any, parts: Mapping[str, Provider]) -> Mapping[str, str]:
        warnings = dict(super().warnings(run, parts))
        if run.correction.enabled:
            warnings["pg_variant"] = (
                f"{run.pg_variant} weighs tokens by their ratio to the engine's probabilities itself:"
                " train_infer_correction weighs them twice, set train_infer_correction.is_weight.enabled to false"
            )
        if not run.same_temperature:
            warnings["logprob_temperature"] = (
                f"found {run.logprob_temperature:g}, but {run.pg_variant} needs the engine's logprobs, which have its"
                " temperature and are then left out: the first update fails. Remove logprob_temperature"
            )
        return warnings


class TOPROptions(PolicyLossOptions):
    """Options of `topr`."""

    positive_weight: NonNegativeFloat = 1.0
    """Weight of tokens with positive advantage."""
    negative_weight: NonNegativeFloat = 1.0
    """Weight of other tokens."""
    level: Literal["sequence", "token"] = "sequence"
    """Ratio of negative advantages: `sequence` is the product over the row (the paper), `token` the token's own."""
    clip_low: NonNegativeFloat = 0.0
    """Minimum ratio of negative advantages."""
    clip_high: PositiveFloat = 1.0
    """Maximum ratio of negative advantages."""


class RAFTOptions(PolicyLossOptions):
    """Options of `raft_plus_plus`. Its clip ranges are the run's keys `pg_clip…`."""

    reads_pg_clip: ClassVar[bool] = True

    @override
    def warnings(self, run: Any, parts: Mapping[str, Provider]) -> Mapping[str, str]:
        warnings = dict(super().warnings(run, parts))
        estimator = parts["adv_estimator"]
        if not isinstance(estimator, AdvantageProvider):
            return warnings
        compares = estimator.needs_groups or estimator.needs_critic or estimator.normalise != "config"
        if compares or run.norm_mean_type is not None or run.whiten_advantages:
            warnings["pg_variant"] = (
                f"{run.pg_variant} trains on positive advantages only, weighted by them. With a baseline these are"
                " responses above it, and groups of correct responses are lost: set adv_estimator: reinforce without"
                " norm_mean_type and whiten_advantages, and rewards that are 0 for wrong responses"
            )
        return warnings


class DROOptions(PolicyLossOptions):
    """Options of `dro` and `kimi`."""

    beta: NonNegativeFloat = 0.1
    """Weight of the squared log-ratio."""


class VESPOOptions(PolicyLossOptions):
    """Options of `vespo`."""

    k_pos: PositiveFloat = 2.0
    """Shape of the weight for advantages of at least 0. The default is the paper's, as are the others."""
    lambda_pos: PositiveFloat = 3.0
    """Rate of the weight for advantages of at least 0."""
    k_neg: PositiveFloat = 3.0
    """Shape of the weight for negative advantages."""
    lambda_neg: PositiveFloat = 2.0
    """Rate of the weight for negative advantages."""


class ClipCovOptions(PolicyLossOptions):
    """Options of `clip_cov`. Its clip ranges are the run's keys `pg_clip…`."""

    reads_pg_clip: ClassVar[bool] = True

    cov_low: float = 1.0
    """Minimum covariance of tokens that may lose their gradient. The default is the paper's."""
    cov_high: float = 5.0
    """Maximum covariance of tokens that may lose their gradient. The default is the paper's."""
    probability: Fraction = 0.01
    """Probability with which such a token loses its gradient."""

    @model_validator(mode="after")
    def _covariances_are_ordered(self) -> ClipCovOptions:
        if not self.cov_low < self.cov_high:
            raise ValueError(f"cov_low {self.cov_low:g} is not below cov_high {self.cov_high:g}: no token is affected")
        return self


class KLCovOptions(PolicyLossOptions):
    """Options of `kl_cov`."""

    cov_threshold: float = 2.0
    """Covariance above which a token has the penalty."""
    kl_coef: NonNegativeFloat = 1.0
    """Weight of the penalty. The default is the paper's."""

    @override
    def warnings(self, run: Any, parts: Mapping[str, Provider]) -> Mapping[str, str]:
        warnings = dict(super().warnings(run, parts))
        if run.steps_per_batch(run.actor_train) == 1 and not run.ahead:
            warnings["pg_variant"] = (
                f"{run.pg_variant} penalizes the distance to the policy that sampled, which is 0 with one optimizer"
                " step per batch: set ppo_epochs to 2 or more, or smaller steps"
            )
        return warnings
