"""Configuration schemas of the built-in pipelines, with ROLL's keys. Light: imports no torch."""

from __future__ import annotations

import os
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import override

from roll_core.algorithms.correction_options import TrainInferCorrectionConfig
from roll_core.spec.config import (
    Config,
    Fraction,
    InferWorkerConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RewardRunConfig,
    ScoreWorkerConfig,
    TrainWorkerConfig,
    WorkerConfig,
)
from roll_core.spec.providers import PolicyLossProvider

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.providers import Provider


def num_workers(role: WorkerConfig) -> int:
    """Number of workers of a role: from its `device_mapping`, else its `world_size`, else 1."""
    if role.device_mapping is not None:
        return len(role.device_mapping) // (role.num_gpus_per_worker or 1)
    return role.world_size or 1


def sequences_per_step(role: WorkerConfig) -> tuple[int, str]:
    """Sequences per optimizer step of a training role, and the product as text for messages."""
    args, ranks, replica = role.training_args, num_workers(role), role.ranks_per_replica or 1
    data_parallel = max(ranks // replica, 1)  # fewer ranks than a replica needs are a mistake of their own
    product = args.gradient_accumulation_steps * args.per_device_train_batch_size * data_parallel
    spelled = f"{ranks}" if replica == 1 else f"({ranks} ranks / {replica} per replica = {data_parallel})"
    return product, (
        f"gradient_accumulation_steps {args.gradient_accumulation_steps} × per_device_train_batch_size"
        f" {args.per_device_train_batch_size} × data parallel {spelled} = {product}"
    )


class SFTConfig(RewardRunConfig):
    """`pipeline: sft`: supervised fine-tuning on prompts and responses."""

    policy_role: ClassVar[str] = "sft_train"
    row_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"sft_train": ("prompt", "response"), "validation": ("prompt",)}

    sft_train: TrainWorkerConfig
    """The trained model."""
    actor_infer: InferWorkerConfig | None = None
    """Engine that generates responses for an evaluation by `rewards`.

    Without it, evaluation only computes the held-out loss.
    """
    train_on_prompt: bool = False
    """Train on the prompts' tokens too."""
    shuffle: bool = True
    """Shuffle the rows of each epoch. If false, rows keep the order of the files."""
    overlong: Literal["drop", "truncate"] = "drop"
    """Handling of rows longer than prompt_length + response_length: drop them, or truncate the response.

    Both are counted.
    """

    @model_validator(mode="after")
    def _evaluation_is_complete(self) -> SFTConfig:
        if not self.sft_train.data_args.file_name:
            raise ValueError("sft_train.data_args.file_name is missing: name the files with the rows to train on")
        if self.actor_infer is not None and (not self.rewards or self.validation is None):
            raise ValueError("actor_infer is only used for evaluation: configure validation.data_args and rewards too")
        if self.rewards and self.actor_infer is None:
            raise ValueError("rewards score generated responses: configure actor_infer too")
        return self


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


READ_WITH: dict[str, tuple[str, ...]] = {
    "use_kl_loss": ("kl_loss_coef", "kl_loss_penalty", "kl_loss_unbiased"),
    "add_token_level_kl": ("init_kl_coef", "kl_penalty", "target_kl_agg_mode"),
    "target_kl": ("kl_horizon", "kl_error_clip"),
    "entropy_target": ("entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"),
    "positive_nll_coef": ("positive_nll_threshold",),
    "critic": ("value_clip", "value_loss_coef", "value_loss_agg_mode"),
    "difficulty_mask": ("difficulty_low_threshold", "difficulty_high_threshold"),
    "error_max_len_clip": ("error_max_len_threshold", "error_max_len_reward"),
    "is_use_additional_prompts": ("max_additional_running_prompts",),
    "dual_clip_loss": ("dual_clip",),
}
"""Keys that enable others, which nothing reads without them."""


class RLVRConfig(RewardRunConfig):
    """`pipeline: rlvr`: reinforcement learning from verifiable rewards (GRPO, PPO, RLOO, REINFORCE and variants)."""

    policy_role: ClassVar[str] = "actor_train"
    group_size_key: ClassVar[str] = "num_return_sequences_in_group"
    row_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"actor_train": ("prompt",), "validation": ("prompt",)}
    learning_rates: ClassVar[Mapping[str, float]] = {"actor_train": 1e-6, "critic": 1e-5}
    unread: ClassVar[Mapping[str, str]] = {
        "num_train_epochs": "set max_steps, the number of batches: epochs × prompts / rollout_batch_size"
    }

    actor_train: TrainWorkerConfig
    """The policy."""
    actor_infer: InferWorkerConfig
    """Engine that generates rollouts with the policy's weights."""
    reference: ScoreWorkerConfig | None = None
    """Frozen copy of the initial policy, for KL penalties.

    Not needed if `actor_train` trains adapters (`lora_target`): the policy without its adapters is then the reference.
    """
    critic: TrainWorkerConfig | None = None
    """Value model, for estimators that need values (gae)."""
    max_steps: PositiveInt = 500
    """Pipeline steps: one batch of rollouts each."""

    rollout_batch_size: PositiveInt = 128
    """Prompts per step."""
    num_return_sequences_in_group: PositiveInt = 8
    """Responses per prompt (group size)."""
    ppo_epochs: PositiveInt = 1
    """Passes over each batch."""
    shuffle: bool = True
    """Assign groups to the optimizer steps of a batch in a random order of each pass. If false, in batch order."""

    async_generation_ratio: NonNegativeFloat = 0.0
    """Batches that are generated while earlier ones are trained on.

    0 is synchronous, 0.5 is half a batch, 2 is two batches. Rounded up, it is the maximum number of steps between a
    group's first token and its training. `actor_infer` needs its own slots.
    """
    is_use_additional_prompts: bool = False
    """In synchronous training, fill the engine with prompts of the next batch.

    It generates responses to them while the last responses of this batch are generated.
    """
    max_additional_running_prompts: PositiveInt = 16
    """Maximum number of extra prompts in flight, with `is_use_additional_prompts`."""
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
    train_infer_correction: TrainInferCorrectionConfig = TrainInferCorrectionConfig()
    """Correction for tokens that older weights sampled, or an engine that computes slightly differently."""
    router_replay: RouterReplayConfig = RouterReplayConfig()
    """Router replay for mixture-of-experts models.

    Their routers sometimes choose different experts in trainer and engine.
    """

    adv_estimator: str = "grpo"
    """Advantage estimator: grpo, reinforce, rloo, gae, a plugin's, or your own function, `module:function`."""
    adv_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the advantage estimator."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lambd: Fraction = 0.95
    """Lambda of GAE: trade-off between bias and variance."""
    critic_lambd: Fraction | None = None
    """Lambda of the critic's regression target (decoupled GAE, arXiv:2503.01491). Default: `lambd`."""
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

    pg_variant: str = "ppo"
    """Policy loss: a name of docs/algorithms.md, a plugin's, or your own function, `module:function`."""
    pg_clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """PPO's clip range in both directions."""
    use_pg_clip_range: bool = False
    """Use `pg_clip_low` and `pg_clip_high` instead of `pg_clip` (clip-higher)."""
    pg_clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Clip ratios below 1 - this value."""
    pg_clip_high: PositiveFloat = 0.2
    """Clip ratios above 1 + this value."""
    dual_clip_loss: bool = False
    """Use dual-clip PPO: bound the objective of negative advantages from below (arXiv:1912.09729)."""
    dual_clip: Annotated[float, Field(gt=1)] = 3.0
    """Bound of dual-clip PPO, as a factor of the advantage."""
    pg_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the policy loss. Each loss has its own."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "seq-mean-token-mean"
    )
    """Aggregation of per-token losses into a scalar."""
    entropy_loss_coef: float = 0.0
    """Weight of the entropy bonus. Its initial value if `entropy_target` is given."""
    entropy_target: PositiveFloat | None = None
    """Mean entropy per token to which the weight adapts. If it is not given, the weight is fixed."""
    entropy_coef_delta: PositiveFloat = 0.005
    """Change of the weight per step, with `entropy_target`."""
    entropy_coef_min: float = 0.0
    """Minimum weight, with `entropy_target`."""
    entropy_coef_max: float = 1.0
    """Maximum weight, with `entropy_target`."""
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the batch's tokens in the policy loss: those with the highest entropy. The others have advantage 0."""
    positive_nll_coef: NonNegativeFloat = 0.0
    """Weight of the negative log-likelihood of positive responses, which is added to the loss (VAPO)."""
    positive_nll_threshold: float = 0.0
    """Reward above which a response is positive, with `positive_nll_coef`."""

    use_kl_loss: bool = False
    """Add a KL penalty to the reference to the loss."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """Weight of the KL loss."""
    add_token_level_kl: bool = False
    """Subtract a KL penalty to the reference from each token's reward."""
    kl_penalty: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL in the reward."""
    kl_loss_penalty: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL in the loss."""
    kl_loss_unbiased: bool = False
    """Multiply the KL in the loss by the importance ratio, so that its gradient is unbiased (DeepSeek-V3.2)."""
    init_kl_coef: NonNegativeFloat = 0.2
    """Weight of the KL in the reward. Its initial value if `target_kl` is given."""
    target_kl: PositiveFloat | None = None
    """Target KL of the adaptive controller. If it is not given, the weight is fixed."""
    target_kl_agg_mode: Literal["seq-mean-token-mean", "token-mean"] = "seq-mean-token-mean"
    """Aggregation of the KL for `target_kl`: mean over sequences of the mean over tokens, or mean over all tokens.

    The metric `kl/mean` is the same number.
    """
    kl_horizon: PositiveInt = 10000
    """Horizon of the adaptive KL controller, in samples."""
    kl_error_clip: PositiveFloat = 0.2
    """Clamp the adaptive KL controller's relative error `KL / target_kl - 1` to ± this value."""

    kl_log_ratio_clamp: PositiveFloat = 20.0
    """Maximum |log-ratio| that a KL estimator exponentiates."""
    k3_clamp: PositiveFloat = 10.0
    """Clamp the k3 estimator to ± this value."""

    value_clip: PositiveFloat | None = None
    """Clip range of the critic's update."""
    value_loss_coef: PositiveFloat = 0.5
    """Factor of the critic's squared error."""
    value_loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Aggregation of the critic's per-token losses, as in `loss_agg_mode`."""
    critic_epochs: PositiveInt | None = None
    """The critic's passes over each batch. Default: `ppo_epochs`."""
    critic_warmup: NonNegativeInt = 0
    """Number of initial steps that train only the critic."""
    force_disable_old_logprobs_recompute: bool = False
    """Use the engine's logprobs as the old policy's, instead of recomputing them in the trainer."""
    logprob_temperature: PositiveFloat | None = None
    """Divisor of the logits in the trainer's logprobs, KL and entropy. Default: the temperature of `actor_infer`.

    With another value, as ROLL's 1, the trainer's and the engine's logprobs are not comparable: `logprob_gap` is not
    computed.
    """

    soft_overlong_penalty: SoftOverlongPenaltyConfig | None = None
    """Subtract a penalty from the rewards of long responses. Default: no penalty."""
    max_len_mask: bool = False
    """Exclude responses that reach the length limit from the loss."""
    error_max_len_clip: bool = False
    """Exclude wrong responses that are too long from the loss. Correct responses are kept at any length."""
    error_max_len_threshold: PositiveInt | None = None
    """Number of tokens from which a wrong response is too long. Default: the maximum number of new tokens."""
    error_max_len_reward: float = 1.0
    """Reward from which a response is correct, for `error_max_len_clip`."""
    difficulty_mask: bool = False
    """Keep only groups whose mean reward lies between the two thresholds."""
    difficulty_low_threshold: float = 0.0
    """Lower bound of a group's mean reward, exclusive."""
    difficulty_high_threshold: float = 1.0
    """Upper bound of a group's mean reward, exclusive."""

    @model_validator(mode="after")
    def _epochs_are_unread(self) -> RLVRConfig:
        for name in ("actor_train", "critic"):
            args = None if (role := getattr(self, name)) is None else role.training_args
            # A resolved config has the default of every key, and max_steps.
            if args is None or "num_train_epochs" not in args.model_fields_set:
                continue
            if args.num_train_epochs != 1 or "max_steps" not in self.model_fields_set:
                raise ValueError(
                    f"{name}.training_args.num_train_epochs is not read, and the run takes max_steps {self.max_steps}"
                    f" batches of {self.rollout_batch_size}: remove it, and {self.unread['num_train_epochs']}"
                )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> RLVRConfig:
        for name in ("actor_train", "critic"):
            self._take_one_step(name)
        self.check_batches()
        return self

    def _take_one_step(self, name: str) -> None:
        """One optimizer step per batch for a role without batch sizes."""
        role = getattr(self, name)
        if role is None or {"per_device_train_batch_size", "gradient_accumulation_steps"} & (
            role.training_args.model_fields_set
        ):
            return
        data_parallel = sequences_per_step(role)[0] // role.training_args.per_device_train_batch_size
        samples, rest = divmod(self.num_groups * self.group_size, data_parallel)
        if samples and not rest:
            size = gcd(samples, role.training_args.per_device_train_batch_size)
            self.set_training_defaults(
                name, per_device_train_batch_size=size, gradient_accumulation_steps=samples // size
            )

    def check_batches(self) -> None:
        """Raise `ValueError` if a batch is no multiple of the sequences of an optimizer step."""
        samples = self.num_groups * self.group_size
        for name in ("actor_train", "critic"):
            role = getattr(self, name)
            if role is None:
                continue
            per_step, spelled = sequences_per_step(role)
            if samples % per_step:
                raise ValueError(f"{self.batch_arithmetic} is not a multiple of {name}'s {spelled}")

    @model_validator(mode="after")
    def _ahead_of_training(self) -> RLVRConfig:
        ratio = self.async_generation_ratio
        if ratio and self.is_use_additional_prompts:
            raise ValueError(
                "is_use_additional_prompts requires synchronous training: remove it or async_generation_ratio"
            )
        if 0 < ratio * self.num_groups < 1:
            raise ValueError(
                f"async_generation_ratio {ratio:g} × {self.num_groups} groups of rollout_batch_size ="
                f" {ratio * self.num_groups:g} groups, expected 0 or at least one"
            )
        if self.take_first_ready and not 0 < self.ahead < 1:
            raise ValueError(
                f"take_first_ready needs generation to run ahead of training by less than one batch, but not by"
                f" {self.ahead:g}: set is_use_additional_prompts with max_additional_running_prompts below"
                " rollout_batch_size, or async_generation_ratio between 0 and 1"
            )
        mine = set(self.actor_infer.device_mapping or ())
        for name, role in self.roles().items() if ratio else ():
            shared = sorted(mine.intersection(role.device_mapping or ()))
            if name != "actor_infer" and shared:
                raise ValueError(
                    f"async_generation_ratio {ratio:g} needs slots that only actor_infer uses, but {name} has slot"
                    f" {shared[0]} too"
                )
        if self.train_infer_correction.enabled and self.force_disable_old_logprobs_recompute:
            raise ValueError(
                "train_infer_correction needs the trainer's logprobs: set force_disable_old_logprobs_recompute to false"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_large_enough(self) -> RLVRConfig:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size {self.min_group_size} is above {self.group_size_key} {self.group_size}: no group would"
                " be trained on"
            )
        return self

    @model_validator(mode="after")
    def _the_penalty_applies(self) -> RLVRConfig:
        given = self.soft_overlong_penalty
        if given is None:
            return self
        l_max, limit = given.l_max or self.max_new_tokens, self.max_new_tokens
        if not 0 <= l_max - given.l_cache < limit:
            raise ValueError(
                f"soft_overlong_penalty begins at l_max {l_max} - l_cache {given.l_cache} = {l_max - given.l_cache}"
                f" tokens, expected at least 0 and less than the {limit} tokens of the longest response"
            )
        return self

    @field_validator("critic_epochs", "critic_lambd")
    @classmethod
    def _has_a_critic(cls, value: float | None, info: ValidationInfo) -> float | None:
        # An invalid critic is missing from `data`.
        if value is not None and "critic" in info.data and info.data["critic"] is None:
            raise ValueError("no critic is configured: remove this key, or configure critic")
        return value

    @field_validator("replay_rollouts")
    @classmethod
    def _follow_links(cls, value: str | None) -> str | None:
        """Resolve links: `latest` points to another run as soon as this one begins."""
        return None if value is None else os.path.realpath(os.path.expanduser(value))

    @model_validator(mode="after")
    def _replay_is_possible(self) -> RLVRConfig:
        if self.replay_rollouts is None:
            return self
        if self.record_rollouts:
            raise ValueError("record_rollouts would write the rollouts that replay_rollouts reads: remove one of them")
        if self.validation is not None and self.eval_steps:
            raise ValueError("replay_rollouts starts no engine, but validation needs one: set eval_steps to 0")
        from roll_core.runtime.rollout.recording import BatchTerms, Recording

        terms = BatchTerms(
            rollout_batch_size=self.num_groups,
            num_return_sequences_in_group=self.group_size,
            temperature=self.actor_infer.generating_args.temperature,
        )
        # A resumed run starts at its checkpoint's step, which is not known here. If a later step is missing, it raises
        # then.
        first = self.max_steps if self.resume_from_checkpoint else 1
        Recording(Path(self.replay_rollouts)).check(terms, range(first, self.max_steps + 1))
        return self

    @model_validator(mode="after")
    def _logprobs_are_comparable(self) -> RLVRConfig:
        if self.same_temperature:
            return self
        for key, needs in (
            ("force_disable_old_logprobs_recompute", self.force_disable_old_logprobs_recompute),
            ("train_infer_correction", self.correction.enabled),
        ):
            if needs:
                raise ValueError(
                    f"{key} compares the trainer's logprobs with the engine's, but logprob_temperature"
                    f" {self.logprob_temperature:g} is not the temperature of actor_infer,"
                    f" {self.actor_infer.generating_args.temperature:g}: remove logprob_temperature, or disable {key}"
                )
        return self

    @model_validator(mode="after")
    def _reference_is_used(self) -> RLVRConfig:
        if self.stays_close and self.reference is None and not self.actor_train.model_args.trains_adapters:
            key = "use_kl_loss" if self.use_kl_loss else "add_token_level_kl"
            raise ValueError(f"{key} needs the role reference: configure reference")
        if self.reference is not None and not self.stays_close:
            raise ValueError(
                "the role reference is not used: set use_kl_loss or add_token_level_kl, or remove reference"
            )
        if self.target_kl is not None and not self.add_token_level_kl:
            raise ValueError("target_kl adapts the KL in the reward: set add_token_level_kl to true")
        return self

    @model_validator(mode="after")
    def _entropy_is_known(self) -> RLVRConfig:
        if self.top_entropy_quantile < 1 and self.force_disable_old_logprobs_recompute:
            raise ValueError(
                f"top_entropy_quantile {self.top_entropy_quantile:g} needs the entropies that the trainer computes with"
                " the old logprobs: set force_disable_old_logprobs_recompute to false"
            )
        if self.entropy_target is None:
            return self
        low, high = self.entropy_coef_min, self.entropy_coef_max
        if not low <= self.entropy_loss_coef <= high or low == high:
            raise ValueError(
                f"entropy_loss_coef {self.entropy_loss_coef:g} with entropy_target: expected a value from"
                f" entropy_coef_min {low:g} to a larger entropy_coef_max, found {high:g}"
            )
        return self

    @model_validator(mode="after")
    def _data_and_rewards_are_given(self) -> RLVRConfig:
        if not self.actor_train.data_args.file_name:
            raise ValueError("actor_train.data_args.file_name is missing: name the files with the prompts")
        if not self.rewards:
            raise ValueError("rewards is empty: configure at least one, for example rewards.math.reward: math_rule")
        return self

    @override
    def warnings(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.use_kl_loss and self.kl_loss_coef and self.kl_loss_penalty == "k1" and not self.kl_loss_unbiased:
            found["kl_loss_penalty"] = (
                "the expected gradient of k1 in the loss is zero, so it only adds noise: set k2 or k3, or"
                " kl_loss_unbiased. k1 is for the KL in the reward (kl_penalty)"
            )
        if self.use_kl_loss and self.kl_loss_unbiased and self.kl_loss_penalty not in ("k1", "k3"):
            found["kl_loss_unbiased"] = (
                f"found kl_loss_penalty {self.kl_loss_penalty}, whose expected value is not the KL, so that the ratio"
                " does not make its gradient unbiased: set k3"
            )
        num_steps = self.steps_per_batch(self.actor_train)
        loss = parts["pg_variant"]
        from roll_core.algorithms.options import PolicyLossOptions
        from roll_core.plugins.targets import schema_of

        schema = schema_of(loss, Config, owner=loss.name)
        if issubclass(schema, PolicyLossOptions):
            found |= schema(**self.pg_options).warnings(self, parts)
        if isinstance(loss, PolicyLossProvider) and not loss.off_policy and num_steps > 1:
            found["pg_variant"] = (
                f"{loss.name} has no importance ratio, but the policy takes {num_steps} optimizer steps on each batch"
                f" (ppo_epochs {self.ppo_epochs}), all but the first off-policy: set ppo, or take one step per batch"
            )
        if isinstance(loss, PolicyLossProvider) and not loss.off_policy and self.ahead and not self.correction.enabled:
            found["pg_variant"] = (
                f"{loss.name} has no importance ratio, but older weights sample part of the tokens: enable"
                " train_infer_correction.is_weight, or set ppo"
            )
        return found | self._truncated() | self._without_effect() | self._without_signal(parts) | self._other_rewards()

    def _truncated(self) -> dict[str, str]:
        """Warnings about sampling parameters after which the sampled distribution is not the trained one."""
        given = self.actor_infer.generating_args
        neutral = {"top_p": 1, "min_p": 0, "repetition_penalty": 1, "min_new_tokens": 0}
        changed = [key for key, value in neutral.items() if getattr(given, key) != value]
        return {
            f"actor_infer.generating_args.{key}": (
                f"found {getattr(given, key):g}: logprobs of engine and trainer are those before it, so the policy"
                " samples from another distribution than it trains. Remove it, or keep it close to no effect"
            )
            for key in (*changed, *(["top_k"] if given.top_k > 0 else []))
            if self.generates
        }

    def _other_rewards(self) -> dict[str, str]:
        """Warnings about thresholds for rewards of 0 and 1 that are not written, with other rewards."""
        found: dict[str, str] = {}
        others = [name for name, reward in self.rewards.items() if not (reward.zero_or_one and reward.weight == 1)]
        why = "keeps groups whose mean reward is between 0 and 1, which is meant for rewards of 0 and 1, but"
        written = self.model_fields_set & {"difficulty_low_threshold", "difficulty_high_threshold"}
        if self.difficulty_mask and others and not written:
            found["difficulty_mask"] = (
                f"{why} rewards.{others[0]} may have other values: set difficulty_low_threshold and"
                " difficulty_high_threshold"
            )
        for name in others:
            given = self.rewards[name].query_filter_config
            if given.type == "mean_filter" and not given.filter_args.model_fields_set:
                found[f"rewards.{name}.query_filter_config.type"] = (
                    f"{why} rewards.{name} may have other values: set filter_args.threshold_down and threshold_up"
                )
        return found

    def _without_effect(self) -> dict[str, str]:
        """Warnings about keys that nothing reads, or whose value disables what another key enables."""
        found: dict[str, str] = {}
        unread = {"pg_clip"} if self.use_pg_clip_range else {"pg_clip_low", "pg_clip_high"}
        for key in sorted(unread & self.model_fields_set):
            if getattr(self, key) != type(self).model_fields[key].default:
                found[key] = f"is not read while use_pg_clip_range is {str(self.use_pg_clip_range).lower()}"
        for enables, keys in READ_WITH.items():
            for key in keys if not getattr(self, enables) else ():
                if getattr(self, key) != type(self).model_fields[key].default:
                    found[key] = f"is not read: set {enables}, or remove this key"
        if self.use_kl_loss and not self.kl_loss_coef:
            found["kl_loss_coef"] = (
                "found 0: the KL in the loss has no effect. Set a coefficient, or remove use_kl_loss"
            )
        if self.add_token_level_kl and not self.init_kl_coef:
            adapts = ", and target_kl multiplies it" if self.target_kl is not None else ""
            found["init_kl_coef"] = (
                f"found 0: the KL in the reward has no effect{adapts}. Set a coefficient, or remove add_token_level_kl"
            )
        return found

    def _without_signal(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        """Warnings about runs or steps that train nothing, or end at a reward."""
        found: dict[str, str] = {}
        if self.critic_warmup and self.critic is None:
            found["critic_warmup"] = "no critic is configured, so the first steps train nothing: remove it"
        elif self.critic_warmup >= self.max_steps:
            found["critic_warmup"] = f"the policy is never trained: max_steps is {self.max_steps}"
        if self.generates and self.actor_infer.generating_args.temperature == 0:
            found["actor_infer.generating_args.temperature"] = (
                "found 0: all responses to a prompt are equal, so comparing them gives no signal"
            )
        if getattr(parts["adv_estimator"], "non_negative", False):
            scores = [name for name, reward in self.rewards.items() if reward.kind == "score"]
            why = "soft_overlong_penalty" if self.soft_overlong_penalty else f"rewards.{scores[0]}" if scores else ""
            if why:
                found["adv_estimator"] = (
                    f"{self.adv_estimator} ends the run at a negative reward, which {why} can give: set grpo"
                )
        bound = self.error_max_len_reward
        scaled = [name for name, reward in self.rewards.items() if reward.weight < bound]
        if self.error_max_len_clip and scaled:
            found["error_max_len_clip"] = (
                f"takes responses with a reward below {bound:g} as wrong, which includes correct ones if"
                f" rewards.{scaled[0]} has a lower weight: set error_max_len_reward"
            )
        return found

    @property
    @override
    def replays_experts(self) -> bool:
        return self.router_replay.enabled

    @property
    def num_groups(self) -> int:
        """Groups per step."""
        return self.rollout_batch_size

    @property
    def group_size(self) -> int:
        """Samples per group."""
        return self.num_return_sequences_in_group

    @property
    def batch_arithmetic(self) -> str:
        """Samples per step as a product of keys, for messages."""
        return (
            f"rollout_batch_size {self.rollout_batch_size} prompts × num_return_sequences_in_group"
            f" {self.num_return_sequences_in_group} = {self.num_groups * self.group_size} samples"
        )

    @property
    def ahead(self) -> float:
        """Number of batches that may be generated ahead of the next batch to train on."""
        if self.is_use_additional_prompts:
            return self.max_additional_running_prompts / self.num_groups
        return self.async_generation_ratio

    @property
    def correction(self) -> TrainInferCorrectionConfig:
        """`train_infer_correction` with `is_weight.enabled` resolved to True or False."""
        given = self.train_infer_correction
        if given.is_weight.enabled is not None:
            return given
        off_policy = self.ahead > 0 or self.actor_infer.weight_format != "dtype"
        weighs = off_policy and not self.force_disable_old_logprobs_recompute
        return given.model_copy(update={"is_weight": given.is_weight.model_copy(update={"enabled": weighs})})

    @property
    def generates(self) -> bool:
        """True if an engine generates responses; False if recorded rollouts are replayed."""
        return self.replay_rollouts is None

    @property
    def filters(self) -> bool:
        """True if groups are filtered by their rewards."""
        return any(reward.query_filter_config.type != "no_filter" for reward in self.rewards.values())

    @property
    def stays_close(self) -> bool:
        """True if a KL penalty to a reference is enabled."""
        return self.use_kl_loss or self.add_token_level_kl

    @property
    def same_temperature(self) -> bool:
        """True if the trainer computes logprobs at the temperature of the engine's. Greedy sampling has 1."""
        return self.logprob_temperature in (None, self.actor_infer.generating_args.temperature or 1.0)

    @property
    def recomputes_logprobs(self) -> bool:
        """True if the trainer computes the old policy's logprobs before it trains."""
        if self.force_disable_old_logprobs_recompute:
            return False
        several_steps = self.steps_per_batch(self.actor_train) > 1
        older_tokens = self.ahead > 0 or self.correction.enabled
        return several_steps or self.add_token_level_kl or older_tokens or self.top_entropy_quantile < 1

    def clip_range(self) -> tuple[float, float]:
        """PPO's clip range as (low, high)."""
        return (self.pg_clip_low, self.pg_clip_high) if self.use_pg_clip_range else (self.pg_clip, self.pg_clip)

    @override
    def optimizer_steps(self) -> dict[str, int]:
        roles = {"actor_train": self.actor_train, "critic": self.critic}
        return {name: self.steps_per_batch(role) for name, role in roles.items() if role is not None}

    def steps_per_batch(self, role: WorkerConfig) -> int:
        """Optimizer steps of `role` per pipeline step."""
        return self.epochs(role) * self.steps_per_epoch(role)

    def steps_per_epoch(self, role: WorkerConfig) -> int:
        """Optimizer steps of `role` per pass over a batch."""
        return self.num_groups * self.group_size // sequences_per_step(role)[0]

    def epochs(self, role: WorkerConfig) -> int:
        """Passes of `role` over each batch."""
        return self.critic_epochs or self.ppo_epochs if role is self.critic else self.ppo_epochs

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of tokens of a response."""
        return self.actor_infer.generating_args.max_new_tokens or self.response_length
