"""Configuration schemas of the built-in pipelines, with ROLL's keys. Light: imports no torch."""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator
from typing_extensions import override

from roll_core.pipelines.keys import (
    AdvantageKeys,
    BatchKeys,
    CriticKeys,
    CutMaskKeys,
    DifficultyMaskKeys,
    EntropyKeys,
    KLKeys,
    LogprobKeys,
    OverlongMaskKeys,
    OverlongPenaltyKeys,
    PolicyLossKeys,
    PolicyRoleKeys,
    PositiveNLLKeys,
    PromptKeys,
    RolloutKeys,
)
from roll_core.spec.config import (
    Config,
    GeneratingArguments,
    InferWorkerConfig,
    NonNegativeInt,
    PositiveInt,
    RewardKeys,
    RewardRunConfig,
    RunConfig,
    TrainWorkerConfig,
    ValidationConfig,
    WorkerConfig,
    invalid,
)
from roll_core.spec.providers import PolicyLossProvider

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.algorithms.correction_options import TrainInferCorrectionConfig
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
    streaming: bool = False
    """Leave the rows of sft_train on the disk, and read and encode those of a step when it begins.

    For data larger than memory. Needs `max_steps`, because the number of dropped rows is unknown.
    """
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

    @model_validator(mode="after")
    def _streamed_rows_suffice(self) -> SFTConfig:
        if not self.streaming:
            return self
        if self.max_steps is None:
            message = "streaming does not know how many rows an epoch keeps: set max_steps"
            raise invalid(message, None, "max_steps")
        made = self.tokenizer
        if made is not None and (made.kind == "bpe" or (made.kind == "char" and not made.alphabet)):
            message = "is built from all rows, which streaming leaves on the disk: use byte, or a model's tokenizer"
            raise invalid(message, made.kind, "tokenizer", "kind")
        return self


class PolicyConfig(
    DifficultyMaskKeys,
    CutMaskKeys,
    KLKeys,
    PositiveNLLKeys,
    EntropyKeys,
    PolicyLossKeys,
    CriticKeys,
    AdvantageKeys,
    LogprobKeys,
    RolloutKeys,
    BatchKeys,
    PolicyRoleKeys,
    RewardKeys,
    RunConfig,
):
    """Keys of pipelines that train a policy on its rollouts. Base of their schemas.

    A subclass defines how many groups of how many samples a step has.
    """

    policy_role: ClassVar[str] = "actor_train"
    learning_rates: ClassVar[Mapping[str, float]] = {"actor_train": 1e-6, "critic": 1e-5}
    unread: ClassVar[Mapping[str, str]] = {
        "num_train_epochs": "set max_steps, the number of batches: epochs × prompts / rollout_batch_size"
    }

    @property
    def num_groups(self) -> int:
        """Groups per step."""
        raise NotImplementedError

    @property
    def group_size(self) -> int:
        """Samples per group."""
        raise NotImplementedError

    @property
    def batch_arithmetic(self) -> str:
        """Samples per step as a product of keys, for messages."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _epochs_are_unread(self) -> Self:
        for name in ("actor_train", "critic"):
            args = None if (role := getattr(self, name)) is None else role.training_args
            # A resolved config has the default of every key, and max_steps.
            if args is None or "num_train_epochs" not in args.model_fields_set:
                continue
            if args.num_train_epochs != 1 or "max_steps" not in self.model_fields_set:
                raise ValueError(
                    f"{name}.training_args.num_train_epochs is not read, and the run takes max_steps {self.max_steps}"
                    f" batches of {self.num_groups} groups: remove it, and {self.unread['num_train_epochs']}"
                )
        return self

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
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
    def _ahead_of_training(self) -> Self:
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
    def _groups_can_be_large_enough(self) -> Self:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size {self.min_group_size} is above {self.group_size_key} {self.group_size}: no group would"
                " be trained on"
            )
        return self

    @model_validator(mode="after")
    def _replay_is_possible(self) -> Self:
        if self.replay_rollouts is None:
            return self
        if self.record_rollouts:
            raise ValueError("record_rollouts would write the rollouts that replay_rollouts reads: remove one of them")
        return self

    @override
    def file_problems(self) -> Mapping[str, str]:
        if self.replay_rollouts is None:
            return {}
        from roll_core.runtime.rollout.recording import BatchTerms, Recording

        terms = BatchTerms(
            rollout_batch_size=self.num_groups,
            num_return_sequences_in_group=self.group_size,
            temperature=self.actor_infer.generating_args.temperature,
        )
        # A resumed run starts at its checkpoint's step, which is not known here. If a later step is missing, it raises
        # then.
        first = self.max_steps if self.resume_from_checkpoint else 1
        try:
            Recording(Path(self.replay_rollouts)).check(terms, range(first, self.max_steps + 1))
        except ValueError as error:
            return {"replay_rollouts": str(error)}
        return {}

    @model_validator(mode="after")
    def _logprobs_are_comparable(self) -> Self:
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
    def _reference_is_used(self) -> Self:
        if self.stays_close and self.reference is None and not self.actor_train.model_args.trains_adapters:
            key = "use_kl_loss" if self.use_kl_loss else "add_token_level_kl"
            raise ValueError(f"{key} needs the role reference: configure reference")
        if self.reference is not None and not self.stays_close:
            raise ValueError(
                "the role reference is not used: set use_kl_loss or add_token_level_kl, or remove reference"
            )
        return self

    @model_validator(mode="after")
    def _entropy_is_known(self) -> Self:
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

    @override
    def warnings(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        warnings: dict[str, str] = {}
        if self.use_kl_loss and self.kl_loss_coef and self.kl_loss_penalty == "k1" and not self.kl_loss_unbiased:
            warnings["kl_loss_penalty"] = (
                "the expected gradient of k1 in the loss is zero, so it only adds noise: set k2 or k3, or"
                " kl_loss_unbiased. k1 is for the KL in the reward (kl_penalty)"
            )
        if self.use_kl_loss and self.kl_loss_unbiased and self.kl_loss_penalty not in ("k1", "k3"):
            warnings["kl_loss_unbiased"] = (
                f"found kl_loss_penalty {self.kl_loss_penalty}, whose expected value is not the KL, so that the ratio"
                " does not make its gradient unbiased: set k3"
            )
        num_steps = self.steps_per_batch(self.actor_train)
        loss = parts["pg_variant"]
        from roll_core.algorithms.options import PolicyLossOptions
        from roll_core.plugins.targets import schema_of

        schema = schema_of(loss, Config, owner=loss.name)
        if issubclass(schema, PolicyLossOptions):
            warnings |= schema(**self.pg_options).warnings(self, parts)
        if isinstance(loss, PolicyLossProvider) and not loss.off_policy and num_steps > 1:
            warnings["pg_variant"] = (
                f"{loss.name} has no importance ratio, but the policy takes {num_steps} optimizer steps on each batch"
                f" (ppo_epochs {self.ppo_epochs}), all but the first off-policy: set ppo, or take one step per batch"
            )
        if isinstance(loss, PolicyLossProvider) and not loss.off_policy and self.ahead and not self.correction.enabled:
            warnings["pg_variant"] = (
                f"{loss.name} has no importance ratio, but older weights sample part of the tokens: enable"
                " train_infer_correction.is_weight, or set ppo"
            )
        return (
            warnings | self._truncated() | self._without_effect() | self._without_signal(parts) | self._other_rewards()
        )

    def _truncated(self) -> dict[str, str]:
        """Warnings about sampling parameters after which the sampled distribution is not the trained one."""
        sampling = self.actor_infer.generating_args
        neutral = {"top_p": 1, "min_p": 0, "repetition_penalty": 1, "min_new_tokens": 0}
        changed = [key for key, value in neutral.items() if getattr(sampling, key) != value]
        return {
            f"actor_infer.generating_args.{key}": (
                f"found {getattr(sampling, key):g}: logprobs of engine and trainer are those before it, so the policy"
                " samples from another distribution than it trains. Remove it, or keep it close to no effect"
            )
            for key in (*changed, *(["top_k"] if sampling.top_k > 0 else []))
            if self.generates
        }

    def _other_rewards(self) -> dict[str, str]:
        """Warnings about thresholds for rewards of 0 and 1 that are not written, with other rewards."""
        warnings: dict[str, str] = {}
        others = [name for name, reward in self.rewards.items() if not (reward.zero_or_one and reward.weight == 1)]
        why = "keeps groups whose mean reward is between 0 and 1, which is meant for rewards of 0 and 1, but"
        written = self.model_fields_set & {"difficulty_low_threshold", "difficulty_high_threshold"}
        if self.difficulty_mask and others and not written:
            warnings["difficulty_mask"] = (
                f"{why} rewards.{others[0]} may have other values: set difficulty_low_threshold and"
                " difficulty_high_threshold"
            )
        for name in others:
            query_filter = self.rewards[name].query_filter_config
            if query_filter.type == "mean_filter" and not query_filter.filter_args.model_fields_set:
                warnings[f"rewards.{name}.query_filter_config.type"] = (
                    f"{why} rewards.{name} may have other values: set filter_args.threshold_down and threshold_up"
                )
        return warnings

    def _without_effect(self) -> dict[str, str]:
        """Warnings about keys whose value disables what another key enables."""
        warnings: dict[str, str] = {}
        if self.use_kl_loss and not self.kl_loss_coef:
            warnings["kl_loss_coef"] = (
                "found 0: the KL in the loss has no effect. Set a coefficient, or remove use_kl_loss"
            )
        if self.add_token_level_kl and not self.init_kl_coef:
            adapts = ", and target_kl multiplies it" if self.target_kl is not None else ""
            warnings["init_kl_coef"] = (
                f"found 0: the KL in the reward has no effect{adapts}. Set a coefficient, or remove add_token_level_kl"
            )
        return warnings

    def _without_signal(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        """Warnings about runs or steps that train nothing, or end at a reward."""
        warnings: dict[str, str] = {}
        if self.critic_warmup and self.critic is None:
            warnings["critic_warmup"] = "no critic is configured, so the first steps train nothing: remove it"
        elif self.critic_warmup >= self.max_steps:
            warnings["critic_warmup"] = f"the policy is never trained: max_steps is {self.max_steps}"
        if self.generates and self.actor_infer.generating_args.temperature == 0:
            warnings["actor_infer.generating_args.temperature"] = (
                "found 0: all responses to a prompt are equal, so comparing them gives no signal"
            )
        if getattr(parts["adv_estimator"], "non_negative", False):
            scores = [name for name, reward in self.rewards.items() if reward.kind == "score"]
            if why := self.negative_rewards() or (f"rewards.{scores[0]}" if scores else ""):
                warnings["adv_estimator"] = (
                    f"{self.adv_estimator} ends the run at a negative reward, which {why} can give: set grpo"
                )
        return warnings

    @property
    @override
    def replays_experts(self) -> bool:
        return self.router_replay.enabled

    @property
    def ahead(self) -> float:
        """Number of batches that may be generated ahead of the next batch to train on."""
        if self.is_use_additional_prompts:
            return self.max_additional_running_prompts / self.num_groups
        return self.async_generation_ratio

    @property
    def correction(self) -> TrainInferCorrectionConfig:
        """`train_infer_correction` with `is_weight.enabled` resolved to True or False."""
        options = self.train_infer_correction
        if options.is_weight.enabled is not None:
            return options
        off_policy = self.ahead > 0 or self.actor_infer.weight_format != "dtype"
        weighs = off_policy and not self.force_disable_old_logprobs_recompute
        return options.model_copy(update={"is_weight": options.is_weight.model_copy(update={"enabled": weighs})})

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
    def temperature(self) -> float:
        """Divisor of the logits in the trainer's logprobs. Greedy sampling has none: its logprobs are the model's."""
        return self.logprob_temperature or self.actor_infer.generating_args.temperature or 1.0

    @property
    def recomputes_logprobs(self) -> bool:
        """True if the trainer computes the old policy's logprobs before it trains."""
        if self.force_disable_old_logprobs_recompute:
            return False
        several_steps = self.steps_per_batch(self.actor_train) > 1
        older_tokens = self.ahead > 0 or self.correction.enabled
        return several_steps or self.add_token_level_kl or older_tokens or self.top_entropy_quantile < 1

    def negative_rewards(self) -> str:
        """Key that can make a reward negative; empty if there is none."""
        return ""

    def clip_range(self) -> tuple[float, float]:
        """PPO's clip range as (low, high)."""
        return self.pg_clip_low or self.pg_clip, self.pg_clip_high or self.pg_clip

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


class PromptRunConfig(OverlongMaskKeys, OverlongPenaltyKeys, PromptKeys, PolicyConfig, RewardRunConfig):
    """Keys of pipelines that train a policy on responses to the prompts of rows. Base of their schemas."""

    group_size_key: ClassVar[str] = "num_return_sequences_in_group"
    row_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"actor_train": ("prompt",), "validation": ("prompt",)}

    @model_validator(mode="after")
    def _an_engine_validates(self) -> Self:
        if self.replay_rollouts is not None and self.validation is not None and self.eval_steps:
            raise ValueError("replay_rollouts starts no engine, but validation needs one: set eval_steps to 0")
        return self

    @model_validator(mode="after")
    def _the_penalty_applies(self) -> Self:
        penalty = self.soft_overlong_penalty
        if penalty is None:
            return self
        l_max, limit = penalty.l_max or self.max_new_tokens, self.max_new_tokens
        if not 0 <= l_max - penalty.l_cache < limit:
            raise ValueError(
                f"soft_overlong_penalty begins at l_max {l_max} - l_cache {penalty.l_cache} = {l_max - penalty.l_cache}"
                f" tokens, expected at least 0 and less than the {limit} tokens of the longest response"
            )
        return self

    @property
    @override
    def num_groups(self) -> int:
        return self.rollout_batch_size

    @property
    @override
    def group_size(self) -> int:
        return self.num_return_sequences_in_group

    @property
    @override
    def batch_arithmetic(self) -> str:
        return (
            f"rollout_batch_size {self.rollout_batch_size} prompts × num_return_sequences_in_group"
            f" {self.num_return_sequences_in_group} = {self.num_groups * self.group_size} samples"
        )

    @override
    def negative_rewards(self) -> str:
        return "soft_overlong_penalty" if self.soft_overlong_penalty else ""

    @override
    def warnings(self, parts: Mapping[str, Provider]) -> dict[str, str]:
        warnings = super().warnings(parts)
        bound = self.error_max_len_reward
        scaled = [name for name, reward in self.rewards.items() if reward.weight < bound]
        if self.error_max_len_clip and scaled:
            warnings["error_max_len_clip"] = (
                f"takes responses with a reward below {bound:g} as wrong, which includes correct ones if"
                f" rewards.{scaled[0]} has a lower weight: set error_max_len_reward"
            )
        return warnings


class RLVRConfig(PromptRunConfig):
    """`pipeline: rlvr`: reinforcement learning from verifiable rewards (GRPO, PPO, RLOO, REINFORCE and variants)."""

    @model_validator(mode="after")
    def _data_and_rewards_are_given(self) -> Self:
        if not self.actor_train.data_args.file_name:
            raise ValueError("actor_train.data_args.file_name is missing: name the files with the prompts")
        if not self.rewards:
            raise ValueError("rewards is empty: configure at least one, for example rewards.math.reward: math_rule")
        return self


class EvaluatedModelConfig(InferWorkerConfig):
    """`actor_infer`: the engine that generates with the evaluated model."""

    receives_weights: ClassVar[bool] = False


class EvaluationConfig(RewardKeys, RunConfig):
    """Keys of evaluations of a model that the run does not train. Base of their schemas."""

    terms_of: ClassVar[frozenset[str]] = frozenset({"pretrain", "rewards", "seed", "prompt_length", "response_length"})
    """Keys on which the responses depend, besides those of the model."""

    actor_infer: EvaluatedModelConfig
    """Engine that generates with the evaluated model, which `pretrain` or its `model_args` name."""
    save_steps: NonNegativeInt = 1
    """Steps between checkpoints of the scores; the last step is always saved."""
    max_ckpt_to_keep: NonNegativeInt = 1
    """Number of checkpoints to keep. 0 keeps all."""
    eval_steps: PositiveInt = 10
    """Steps between metrics of the responses so far; also after the last step."""

    @property
    def outputs(self) -> int:
        """Maximum number of responses of a step."""
        raise NotImplementedError

    @property
    def terms(self) -> dict[str, Any]:
        """Values of the keys on which the responses depend."""
        include: dict[str, Any] = dict.fromkeys(self.terms_of, True)
        return self.model_dump(mode="json", include={**include, "actor_infer": {"model_args"}})

    @model_validator(mode="after")
    def _sampling_is_read(self) -> Self:
        if self.actor_infer.generating_args != GeneratingArguments():
            key = "validation" if "validation" in type(self).model_fields else "val_env_manager"
            raise ValueError(f"actor_infer.generating_args is not read: set {key}.generating_args")
        return self


class EvaluateConfig(EvaluationConfig, RewardRunConfig):
    """`pipeline: evaluate`: scores of a model on held-out prompts, without training it."""

    row_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"validation": ("prompt",)}
    terms_of: ClassVar[frozenset[str]] = EvaluationConfig.terms_of | {"validation", "val_batch_size"}

    validation: ValidationConfig
    """Held-out prompts and the sampling parameters of their responses."""
    val_batch_size: PositiveInt = 128
    """Prompts per step.

    Their responses are generated together. A resumed run continues after the last complete step.
    """

    @property
    @override
    def outputs(self) -> int:
        return self.val_batch_size * self.validation.generating_args.num_return_sequences

    @model_validator(mode="after")
    def _evaluation_is_complete(self) -> Self:
        if not self.rewards:
            raise ValueError("rewards is empty: configure at least one, for example rewards.math.reward: math_rule")
        if not self.validation.data_args.file_name:
            raise ValueError("validation.data_args.file_name is missing: name the files with the prompts")
        return self
