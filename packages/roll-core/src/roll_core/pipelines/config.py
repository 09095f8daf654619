"""Configuration schemas of the built-in pipelines, with ROLL's keys. Light: imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from typing_extensions import override

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

NormType = Literal["batch", "group", "running"]
Level = Literal["token", "segment", "geometric", "sequence"]


def num_workers(role: WorkerConfig) -> int:
    """Number of workers of a role: from its `device_mapping`, else its `world_size`, else 1."""
    if role.device_mapping is not None:
        return len(role.device_mapping) // (role.num_gpus_per_worker or 1)
    return role.world_size or 1


def sequences_per_step(role: WorkerConfig) -> tuple[int, str]:
    """Sequences per optimizer step of a training role, and the product as text for messages."""
    args, ranks, replica = role.training_args, num_workers(role), role.ranks_per_replica or 1
    product = args.gradient_accumulation_steps * args.per_device_train_batch_size * (ranks // replica)
    spelled = f"{ranks}" if replica == 1 else f"({ranks} ranks / {replica} per replica = {ranks // replica})"
    return product, (
        f"gradient_accumulation_steps {args.gradient_accumulation_steps} × per_device_train_batch_size"
        f" {args.per_device_train_batch_size} × data parallel {spelled} = {product}"
    )


class SFTConfig(RewardRunConfig):
    """`pipeline: sft`: supervised fine-tuning on prompts and responses."""

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


class ImportanceWeightConfig(Config):
    """`train_infer_correction.is_weight`: truncated importance sampling (TIS).

    Multiplies advantages by the ratio of the trainer's to the engine's probability of a token, up to `upper_bound`.
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
    """Maximum weight."""


class CorrectionFilterConfig(Config):
    """`train_infer_correction.filters`: removes tokens outside of a range from the loss."""

    enabled: bool = False
    """Apply this filter."""
    agg_type: Level = "token"
    """Level at which the ratio and the difference are computed, as in `weight_type`."""
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


class TrainInferCorrectionConfig(Config):
    """`train_infer_correction`: corrects tokens that the trained policy would sample with a different probability."""

    is_weight: ImportanceWeightConfig = ImportanceWeightConfig()
    """Importance weights."""
    filters: list[CorrectionFilterConfig] = Field(default_factory=list)
    """Ranges of ratios or differences. A token is kept only if all filters keep it."""

    @property
    def enabled(self) -> bool:
        """True if weights or a filter are enabled."""
        return bool(self.is_weight.enabled) or any(each.enabled for each in self.filters)


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


class RLVRConfig(RewardRunConfig):
    """`pipeline: rlvr`: reinforcement learning from verifiable rewards (GRPO, PPO, RLOO, REINFORCE and variants)."""

    policy_role: ClassVar[str] = "actor_train"
    row_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"actor_train": ("prompt",), "validation": ("prompt",)}

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
    """Advantage estimator: grpo, reinforce, rloo, gae, or a plugin's."""
    adv_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of a plugin's advantage estimator."""
    gamma: Fraction = 1.0
    """Discount per token."""
    lambd: Fraction = 0.95
    """Lambda of GAE: trade-off between bias and variance."""
    norm_mean_type: NormType | None = None
    """Samples whose mean reward is subtracted: the batch, the group, or all batches so far.

    Null subtracts nothing. An estimator with its own normalisation (`grpo`: by group) accepts only its own value.
    """
    norm_std_type: NormType | None = None
    """Samples whose standard deviation divides rewards: the batch, the group, or all batches so far.

    Null divides by nothing. An estimator with its own normalisation (`grpo`: by group) accepts only its own value.
    """
    reward_clip: PositiveFloat | None = None
    """Clamp rewards to ± this value after normalisation."""
    whiten_rewards: bool = False
    """Whiten the batch's token rewards to mean 0 and variance 1 before advantages are computed."""
    whiten_advantages: bool = False
    """Whiten the batch's advantages to mean 0 and variance 1 over tokens."""
    advantage_clip: PositiveFloat | None = None
    """Clamp advantages to ± this value."""

    pg_variant: str = "ppo"
    """Policy loss: ppo, vanilla, or a plugin's."""
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
    pg_options: dict[str, float] = Field(default_factory=dict)
    """Further options of a plugin's policy loss."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "seq-mean-token-mean"
    )
    """Aggregation of per-token losses into a scalar."""
    entropy_loss_coef: float = 0.0
    """Weight of the entropy bonus."""

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

    log_ratio_clamp: PositiveFloat = 20.0
    """Maximum |log-ratio| that a KL estimator exponentiates."""
    k3_clamp: PositiveFloat = 10.0
    """Clamp the k3 estimator to ± this value."""

    value_clip: PositiveFloat | None = None
    """Clip range of the critic's update."""
    critic_epochs: PositiveInt | None = None
    """The critic's passes over each batch. Default: `ppo_epochs`."""
    critic_warmup: NonNegativeInt = 0
    """Number of initial steps that train only the critic."""
    force_disable_old_logprobs_recompute: bool = False
    """Use the engine's logprobs as the old policy's, instead of recomputing them in the trainer."""

    max_len_mask: bool = False
    """Exclude responses that reach the length limit from the loss."""
    error_max_len_clip: bool = False
    """Exclude wrong responses that are too long from the loss. Correct responses are kept at any length."""
    error_max_len_threshold: PositiveInt | None = None
    """Number of tokens from which a wrong response is too long. Default: `response_length`."""
    difficulty_mask: bool = False
    """Keep only groups whose mean reward lies between the two thresholds."""
    difficulty_low_threshold: float = 0.0
    """Lower bound of a group's mean reward, exclusive."""
    difficulty_high_threshold: float = 1.0
    """Upper bound of a group's mean reward, exclusive."""

    @model_validator(mode="after")
    def _batches_divide(self) -> RLVRConfig:
        samples = self.rollout_batch_size * self.num_return_sequences_in_group
        for name in ("actor_train", "critic"):
            role = getattr(self, name)
            if role is None:
                continue
            per_step, spelled = sequences_per_step(role)
            if samples % per_step:
                raise ValueError(
                    f"rollout_batch_size {self.rollout_batch_size} prompts × num_return_sequences_in_group"
                    f" {self.num_return_sequences_in_group} = {samples} samples is not a multiple of {name}'s {spelled}"
                )
        return self

    @model_validator(mode="after")
    def _ahead_of_training(self) -> RLVRConfig:
        ratio = self.async_generation_ratio
        if ratio and self.is_use_additional_prompts:
            raise ValueError(
                "is_use_additional_prompts requires synchronous training: remove it or async_generation_ratio"
            )
        if 0 < ratio * self.rollout_batch_size < 1:
            raise ValueError(
                f"async_generation_ratio {ratio:g} × rollout_batch_size {self.rollout_batch_size} ="
                f" {ratio * self.rollout_batch_size:g} prompts, expected 0 or at least one"
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

    @field_validator("critic_epochs")
    @classmethod
    def _has_a_critic(cls, value: int | None, info: ValidationInfo) -> int | None:
        # An invalid critic is missing from `data`.
        if value is not None and "critic" in info.data and info.data["critic"] is None:
            raise ValueError("no critic is configured: remove this key, or configure critic")
        return value

    @field_validator("replay_rollouts")
    @classmethod
    def _follow_links(cls, value: str | None) -> str | None:
        """Resolve links: `latest` points to another run as soon as this one begins."""
        return None if value is None else str(Path(value).expanduser().resolve())

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
            rollout_batch_size=self.rollout_batch_size,
            num_return_sequences_in_group=self.num_return_sequences_in_group,
            temperature=self.actor_infer.generating_args.temperature,
        )
        # A resumed run starts at its checkpoint's step, which is not known here. If a later step is missing, it raises
        # then.
        first = self.max_steps if self.resume_from_checkpoint else 1
        Recording(Path(self.replay_rollouts)).check(terms, range(first, self.max_steps + 1))
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
    def _data_and_rewards_are_given(self) -> RLVRConfig:
        if not self.actor_train.data_args.file_name:
            raise ValueError("actor_train.data_args.file_name is missing: name the files with the prompts")
        if not self.rewards:
            raise ValueError("rewards is empty: configure at least one, for example rewards.math.reward: math_rule")
        return self

    @override
    def warnings(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.use_kl_loss and self.kl_loss_coef and self.kl_loss_penalty == "k1":
            found["kl_loss_penalty"] = (
                "the expected gradient of k1 in the loss is zero, so it only adds noise: set k2 or k3. k1 is for the KL"
                " in the reward (kl_penalty)"
            )
        num_steps = self.steps_per_batch(self.actor_train)
        loss = parts["pg_variant"]
        if isinstance(loss, PolicyLossProvider) and not loss.off_policy and num_steps > 1:
            found["pg_variant"] = (
                f"{loss.name} has no importance ratio, but the policy takes {num_steps} optimizer steps on each batch"
                f" (ppo_epochs {self.ppo_epochs}), all but the first off-policy: set ppo, or take one step per batch"
            )
        others = [name for name, reward in self.rewards.items() if not (reward.zero_or_one and reward.weight == 1)]
        written = self.model_fields_set & {"difficulty_low_threshold", "difficulty_high_threshold"}
        if self.difficulty_mask and others and not written:
            found["difficulty_mask"] = (
                "keeps groups whose mean reward is between 0 and 1, which is meant for rewards of 0 and 1, but"
                f" rewards.{others[0]} may have other values: set difficulty_low_threshold and"
                " difficulty_high_threshold"
            )
        return found

    @property
    @override
    def replays_experts(self) -> bool:
        return self.router_replay.enabled

    @property
    def ahead(self) -> float:
        """Number of batches that may be generated ahead of the next batch to train on."""
        if self.is_use_additional_prompts:
            return self.max_additional_running_prompts / self.rollout_batch_size
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
    def recomputes_logprobs(self) -> bool:
        """True if the trainer computes the old policy's logprobs before it trains."""
        if self.force_disable_old_logprobs_recompute:
            return False
        several_steps = self.steps_per_batch(self.actor_train) > 1
        older_tokens = self.ahead > 0 or self.correction.enabled
        return several_steps or self.add_token_level_kl or older_tokens

    def clip_range(self) -> tuple[float, float]:
        """PPO's clip range as (low, high)."""
        return (self.pg_clip_low, self.pg_clip_high) if self.use_pg_clip_range else (self.pg_clip, self.pg_clip)

    def steps_per_batch(self, role: WorkerConfig) -> int:
        """Optimizer steps of `role` per pipeline step."""
        samples = self.rollout_batch_size * self.num_return_sequences_in_group
        return self.epochs(role) * samples // sequences_per_step(role)[0]

    def epochs(self, role: WorkerConfig) -> int:
        """Passes of `role` over each batch."""
        return self.critic_epochs or self.ppo_epochs if role is self.critic else self.ppo_epochs

    def sampling_defaults(self) -> dict[str, Any]:
        """`generating_args` of the rollouts with `max_new_tokens` resolved."""
        args = self.actor_infer.generating_args
        return args.model_dump() | {"max_new_tokens": args.max_new_tokens or self.response_length}
