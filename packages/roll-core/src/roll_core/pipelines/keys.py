"""Groups of keys that the pipelines' schemas are composed of, with ROLL's names. Light: imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations of class variables
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from roll_core.algorithms.correction_options import TrainInferCorrectionConfig
from roll_core.spec.config import (
    Config,
    Fraction,
    InferWorkerConfig,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ScoreWorkerConfig,
    TrainWorkerConfig,
)


class SoftOverlongPenaltyConfig(Config):
    """`soft_overlong_penalty`: DAPO's penalty for responses near the length limit (arXiv:2503.14476 eq. 13).

    A response of more than `l_max - l_cache` tokens loses up to `penalty_factor`, linearly in its length.
    """

    l_max: PositiveInt | None = None
    """Length in tokens from which a response gets the whole penalty. Default: the maximum number of new tokens."""
    l_cache: PositiveInt
    """Tokens before `l_max` in which the penalty grows."""
    penalty_factor: PositiveFloat = 1.0
    """Largest penalty."""


class RouterReplayConfig(Config):
    """`router_replay`: repeats in training the experts that the engine's routers chose for the policy's tokens."""

    mode: Literal["disable", "R3"] = "disable"
    """`R3` is rollout routing replay: each token is routed to the experts that the engine chose for it.

    It applies to the old policy's logprobs and to the update.
    """

    @property
    def enabled(self) -> bool:
        """True if router replay is enabled."""
        return self.mode != "disable"


class PolicyRoleKeys(Config):
    """The roles of the policy."""

    actor_train: TrainWorkerConfig
    """The policy."""
    actor_infer: InferWorkerConfig
    """Engine that generates rollouts with the policy's weights."""


class BatchKeys(Config):
    """Keys of the passes over a batch of rollouts."""

    max_steps: PositiveInt = 500
    """Pipeline steps: one batch of rollouts each."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    shuffle: bool = True
    """Assign groups to the optimizer steps of a batch in a random order of each pass. If false, in batch order."""


class PromptKeys(Config):
    """Keys of the prompts of a step."""

    rollout_batch_size: PositiveInt = 128
    """Prompts per step."""
    num_return_sequences_in_group: PositiveInt = 8
    """Responses per prompt (group size)."""
    prompt_sampler: str | None = None
    """Choice of the rows of each domain: `pass_rate`, a plugin's, or your own class, `module:Class`.

    Default: all rows in a new random order in each pass over the data.
    """
    prompt_sampler_options: Annotated[dict[str, Any], Needs("prompt_sampler", strict=True)] = Field(
        default_factory=dict
    )
    """Options of the prompt sampler."""


class CutMaskKeys(Config):
    """The exclusion of responses that reach the length limit."""

    max_len_mask: bool = False
    """Exclude responses that reach the length limit from the loss."""


class RolloutKeys(Config):
    """Keys of rollouts: how far they run ahead of training, and what happens to unfinished and recorded ones."""

    async_generation_ratio: NonNegativeFloat = 0.0
    """Batches that are generated while earlier ones are trained on.

    0 is synchronous, 0.5 is half a batch, 2 is two batches. Rounded up, it is the maximum number of steps between a
    group's first token and its training. `actor_infer` needs its own slots.
    """
    is_use_additional_prompts: bool = False
    """In synchronous training, fill the engine with prompts of the next batch.

    It generates responses to them while the last responses of this batch are generated.
    """
    max_additional_running_prompts: Annotated[PositiveInt, Needs("is_use_additional_prompts")] = 16
    """Maximum number of extra prompts in flight."""
    take_first_ready: bool = False
    """Fill a batch with the groups that finish first.

    The next batch takes the groups that were passed over. Requires that generation runs ahead of training by less than
    one batch.
    """
    partial_rollout: bool = True
    """Resume responses that are unfinished when a batch is complete from their last token in the next step.

    If false, regenerate them.
    """
    stale_groups: Literal["drop", "reuse"] = "drop"
    """Handling of groups of a resumed run that are older than `async_generation_ratio` now allows.

    `drop` samples their prompts again, `reuse` trains on them.
    """
    seeded_rollouts: bool | Literal["auto"] = "auto"
    """Seed each request of a rollout.

    A synchronous run then repeats its responses if the engine computes the same logits. `auto` enables seeds if they
    cost nothing (`hf_infer`). `vllm` and `sglang` have faster sampling without seeds. Validation is always seeded.
    """
    record_rollouts: bool = False
    """Write each step's rollouts to `rollouts/` of the run directory, without loss."""
    replay_rollouts: str | None = None
    """Directory of a run that recorded its rollouts: train on these, step by step.

    Starts no engine and no reward workers.
    """
    dynamic_sampling_max_tries: Annotated[float, Field(ge=1)] = 10.0
    """With a `query_filter_config`, samples at most this times `rollout_batch_size` prompts per batch.

    The batch may then be smaller than `rollout_batch_size`.
    """
    router_replay: RouterReplayConfig = RouterReplayConfig()
    """Router replay for mixture-of-experts models.

    Their routers sometimes choose different experts in trainer and engine.
    """

    @field_validator("replay_rollouts")
    @classmethod
    def _expand_home(cls, value: str | None) -> str | None:
        return None if value is None else os.path.expanduser(value)


class LogprobKeys(Config):
    """Keys of the logprobs of the old policy, and of the correction for differences between engine and trainer."""

    train_infer_correction: TrainInferCorrectionConfig = TrainInferCorrectionConfig()
    """Correction for tokens that older weights sampled, or an engine that computes slightly differently."""
    force_disable_old_logprobs_recompute: bool = False
    """Use the engine's logprobs as the old policy's, instead of recomputing them in the trainer."""
    logprob_temperature: PositiveFloat | None = None
    """Divisor of the logits in the trainer's logprobs, KL and entropy. Default: the temperature of `actor_infer`.

    With another value, as ROLL's 1, the trainer's and the engine's logprobs are not comparable: `logprob_gap` is not
    computed.
    """


class AdvantageKeys(Config):
    """Keys of the advantages that are computed from rewards."""

    adv_estimator: str = "grpo"
    """Advantage estimator: grpo, reinforce, rloo, gae, a plugin's, or your own function, `module:function`."""
    adv_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the advantage estimator."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lambd: Fraction = 0.95
    """Lambda of GAE: trade-off between bias and variance."""
    norm_mean_type: Literal["batch", "group", "running"] | None = None
    """Samples whose mean reward is subtracted: the batch, the group, or all batches so far.

    Null subtracts nothing. An estimator with its own normalisation (`grpo`: by group) accepts only its own value.
    """
    norm_std_type: Literal["batch", "group", "running"] | None = None
    """Samples whose standard deviation divides rewards: the batch, the group, or all batches so far.

    Null divides by nothing. An estimator with its own normalisation (`grpo`: by group) accepts only its own value.
    """
    min_group_size: PositiveInt = 1
    """Minimum number of samples with a reward in a group. A smaller group is not trained on."""
    norm_epsilon: PositiveFloat = 1e-6
    """Added to a standard deviation that divides rewards. A deviation of at most this value does not divide."""
    reward_clip: PositiveFloat | None = None
    """Clamp rewards to ± this value after normalisation."""
    whiten_rewards: bool = False
    """Whiten the batch's token rewards to mean 0 and variance 1 before advantages are computed."""
    whiten_advantages: bool = False
    """Whiten the batch's advantages to mean 0 and variance 1 over tokens."""
    whiten_epsilon: PositiveFloat = 1e-8
    """Added to the variance when token rewards or advantages are whitened."""
    advantage_clip: PositiveFloat | None = None
    """Clamp advantages to ± this value."""


class CriticKeys(Config):
    """Keys of the critic."""

    critic: TrainWorkerConfig | None = None
    """Value model, for estimators that need values (gae)."""
    critic_lambd: Annotated[Fraction | None, Needs("critic", strict=True)] = None
    """Lambda of the critic's regression target (decoupled GAE, arXiv:2503.01491). Default: `lambd`."""
    value_clip: Annotated[PositiveFloat | None, Needs("critic")] = None
    """Clip range of the critic's update."""
    value_loss_coef: Annotated[PositiveFloat, Needs("critic")] = 0.5
    """Factor of the critic's squared error."""
    value_loss_agg_mode: Annotated[
        Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"], Needs("critic")
    ] = "token-mean"
    """Aggregation of the critic's per-token losses, as in `loss_agg_mode`."""
    critic_epochs: Annotated[PositiveInt | None, Needs("critic", strict=True)] = None
    """The critic's passes over each batch. Default: `ppo_epochs`."""
    critic_warmup: NonNegativeInt = 0
    """Number of initial steps that train only the critic."""


class PolicyLossKeys(Config):
    """Keys of the policy loss."""

    switches: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "use_pg_clip_range": {"pg_clip_low": 0.2, "pg_clip_high": 0.2},
        "dual_clip_loss": {"dual_clip": 3.0},
    }

    pg_variant: str = "ppo"
    """Policy loss: a name of docs/algorithms.md, a plugin's, or your own function, `module:function`."""
    pg_clip: Annotated[
        float, Field(gt=0, lt=1), Needs("reads_pg_clip", remedy="remove pg_clip_low or pg_clip_high")
    ] = 0.2
    """PPO's clip range in both directions."""
    pg_clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Clip ratios below 1 - this value. Default: `pg_clip`."""
    pg_clip_high: PositiveFloat | None = None
    """Clip ratios above 1 + this value (clip-higher). Default: `pg_clip`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound the objective of negative advantages from below at this factor of the advantage (arXiv:1912.09729).

    Default: no bound.
    """
    pg_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the policy loss. Each loss has its own."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "seq-mean-token-mean"
    )
    """Aggregation of per-token losses into a scalar."""

    @property
    def reads_pg_clip(self) -> bool:
        """True if a bound of the clip range is that of `pg_clip`."""
        return self.pg_clip_low is None or self.pg_clip_high is None


class EntropyKeys(Config):
    """Keys of the entropy bonus and of the selection of tokens by entropy."""

    entropy_loss_coef: float = 0.0
    """Weight of the entropy bonus. Its initial value if `entropy_target` is given."""
    entropy_target: PositiveFloat | None = None
    """Mean entropy per token to which the weight adapts. If it is not given, the weight is fixed."""
    entropy_coef_delta: Annotated[PositiveFloat, Needs("entropy_target")] = 0.005
    """Change of the weight per step."""
    entropy_coef_min: Annotated[float, Needs("entropy_target")] = 0.0
    """Minimum weight."""
    entropy_coef_max: Annotated[float, Needs("entropy_target")] = 1.0
    """Maximum weight."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the batch's tokens in the policy loss: those with the highest entropy. The others have advantage 0."""


class PositiveNLLKeys(Config):
    """Keys of the log-likelihood of positive responses (VAPO)."""

    positive_nll_coef: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of positive responses, which is added to the loss (VAPO)."""
    positive_nll_threshold: Annotated[float, Needs("positive_nll_coef")] = 0.0
    """Reward above which a response is positive."""


class KLKeys(Config):
    """Keys of the KL penalty to the initial policy."""

    reference: ScoreWorkerConfig | None = None
    """Frozen copy of the initial policy, for KL penalties.

    Not needed if `actor_train` trains adapters (`lora_target`): the policy without its adapters is then the reference.
    """
    use_kl_loss: bool = False
    """Add a KL penalty to the reference to the loss."""
    kl_loss_coef: Annotated[NonNegativeFloat, Needs("use_kl_loss")] = 0.001
    """Weight of the KL loss."""
    add_token_level_kl: bool = False
    """Subtract a KL penalty to the reference from each token's reward."""
    kl_penalty: Annotated[Literal["k1", "k2", "k3", "abs"], Needs("add_token_level_kl")] = "k1"
    """Estimator of the KL in the reward."""
    kl_loss_penalty: Annotated[Literal["k1", "k2", "k3", "abs"], Needs("use_kl_loss")] = "k3"
    """Estimator of the KL in the loss."""
    kl_loss_unbiased: Annotated[bool, Needs("use_kl_loss")] = False
    """Multiply the KL in the loss by the importance ratio, so that its gradient is unbiased (DeepSeek-V3.2)."""
    init_kl_coef: Annotated[NonNegativeFloat, Needs("add_token_level_kl")] = 0.2
    """Weight of the KL in the reward. Its initial value if `target_kl` is given."""
    target_kl: Annotated[PositiveFloat | None, Needs("add_token_level_kl", strict=True)] = None
    """Target KL of the adaptive controller. If it is not given, the weight is fixed."""
    target_kl_agg_mode: Annotated[Literal["seq-mean-token-mean", "token-mean"], Needs("add_token_level_kl")] = (
        "seq-mean-token-mean"
    )
    """Aggregation of the KL for `target_kl`: mean over sequences of the mean over tokens, or mean over all tokens.

    The metric `kl/mean` is the same number.
    """
    kl_horizon: Annotated[PositiveInt, Needs("target_kl")] = 10000
    """Horizon of the adaptive KL controller, in samples."""
    kl_error_clip: Annotated[PositiveFloat, Needs("target_kl")] = 0.2
    """Clamp the adaptive KL controller's relative error `KL / target_kl - 1` to ± this value."""
    kl_log_ratio_clamp: PositiveFloat = 20.0
    """Maximum |log-ratio| that a KL estimator exponentiates."""
    k3_clamp: PositiveFloat = 10.0
    """Clamp the k3 estimator to ± this value."""


class DifficultyMaskKeys(Config):
    """Keys of the selection of groups by their mean reward."""

    difficulty_mask: bool = False
    """Keep only groups whose mean reward lies between the two thresholds."""
    difficulty_low_threshold: Annotated[float, Needs("difficulty_mask")] = 0.0
    """Lower bound of a group's mean reward, exclusive."""
    difficulty_high_threshold: Annotated[float, Needs("difficulty_mask")] = 1.0
    """Upper bound of a group's mean reward, exclusive."""


class OverlongPenaltyKeys(Config):
    """The penalty for the length of a response."""

    soft_overlong_penalty: SoftOverlongPenaltyConfig | None = None
    """Subtract a penalty from the rewards of long responses. Default: no penalty."""


class OverlongMaskKeys(Config):
    """Keys of the exclusion of wrong responses that are too long."""

    error_max_len_clip: bool = False
    """Exclude wrong responses that are too long from the loss. Correct responses are kept at any length."""
    error_max_len_threshold: Annotated[PositiveInt | None, Needs("error_max_len_clip")] = None
    """Number of tokens from which a wrong response is too long. Default: the maximum number of new tokens."""
    error_max_len_reward: Annotated[float, Needs("error_max_len_clip")] = 1.0
    """Reward from which a response is correct."""
