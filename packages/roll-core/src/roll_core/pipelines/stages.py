"""Stages of a training step, which pipelines compose, and parts that several pipelines share.

A pipeline that trains a policy on rollouts has one stage of each kind (`PolicyStages`):

    collect ─► score ─► credit ─► select ─► update          evaluate, every `eval_steps` steps

    collect    rollouts and their rewards                   an `Experience`
    score      logprobs of policy and reference, values     its per-token fields
    credit     advantages
    select     tokens in the loss, corrections
    update     optimizer steps of the critic and the policy

A stage is a callable with the signature of its protocol. One that keeps state between steps has the methods `state` and
`load_state` of `Stage`; checkpoints contain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from typing_extensions import override

from roll_core.algorithms.entropy import EntropyController, top_entropy
from roll_core.algorithms.kl import KLController, approx_kl, mean_kl
from roll_core.algorithms.losses import CrossEntropy, ValueObjective, policy_objective
from roll_core.algorithms.normalise import RewardNormaliser, clip, whiten
from roll_core.algorithms.rewards import difficulty_mask, error_max_len_clip, max_len_mask, soft_overlong_penalty
from roll_core.data.processor import processor_of
from roll_core.pipelines.config import sequences_per_step
from roll_core.pipelines.experience import (
    Experience,
    component_metrics,
    correct,
    logprob_gaps,
    logprob_rows,
    sample_metrics,
    scores_of,
    without_experts,
)
from roll_core.pipelines.prompt_order import SampledOrder, domains
from roll_core.pipelines.score_metrics import validation_metrics
from roll_core.runtime.records.mismatch import NOISE, SAMPLING, LogprobBatch, command, write_logprobs
from roll_core.runtime.rollout.program import GreedyBaseline
from roll_core.runtime.rollout.requests import stable_seed
from roll_core.spec.algorithms import AdvantageEstimator, PolicyLossParams, bind_options
from roll_core.spec.pipeline import RolloutPlan
from roll_core.spec.providers import AdvantageProvider, PolicyLossProvider
from roll_core.spec.train import WantedOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.pipelines.config import PolicyConfig, PromptRunConfig
    from roll_core.pipelines.prompt_order import PromptOrder
    from roll_core.spec.config import (
        AdvantageSizeConfig,
        RewardRunConfig,
        RunConfig,
        TrainWorkerConfig,
        ValidationConfig,
    )
    from roll_core.spec.pipeline import Run, UpdateResult
    from roll_core.spec.train import LossFn
    from roll_core.types import Group, Sample


class Stage:
    """Base of stages that keep state between steps."""

    def state(self) -> Mapping[str, Any]:
        """State after a step, by names that no other stage uses."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state. `state` also has the names of other stages."""


class Collect(Protocol):
    """Generates and scores the rollouts of a step."""

    def start(self, run: Run) -> None:
        """Begin. Called once, when all roles have started."""

    async def __call__(self, run: Run) -> Experience | None:
        """Return the samples to train on; None if there are none."""


class Score(Protocol):
    """Computes what models say about the tokens of an experience."""

    async def __call__(self, run: Run, experience: Experience) -> Experience:
        """Return the experience with further fields, such as `old_logprobs`."""


class Credit(Protocol):
    """Computes advantages."""

    def __call__(self, run: Run, experience: Experience) -> Experience:
        """Return the experience with `advantages`, and `returns` for a critic."""


class Select(Protocol):
    """Selects the tokens of the policy's loss."""

    def __call__(self, run: Run, experience: Experience) -> Experience:
        """Return the samples to train on, with their final loss mask, advantages and streams."""


class Update(Protocol):
    """Takes the optimizer steps of a batch."""

    async def __call__(self, run: Run, experience: Experience, selected: Experience) -> None:
        """Update the critic on the whole experience, and the policy on the selected part."""


class Evaluate(Protocol):
    """Measures the policy on held-out data."""

    async def evaluate(self, run: Run) -> Mapping[str, float]:
        """Return metrics, whose names begin with `val/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStages:
    """The stages of a step."""

    collect: Collect | None
    """None for a pipeline whose steps train on rows."""
    score: Score
    credit: Credit
    select: Select
    update: Update
    evaluation: Evaluate | None = None

    def state(self) -> dict[str, Any]:
        """States of all stages."""
        return {name: value for stage in self._with_state() for name, value in stage.state().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the states of all stages."""
        for stage in self._with_state():
            stage.load_state(state)

    def _with_state(self) -> list[Stage]:
        return [stage for field in fields(self) if isinstance(stage := getattr(self, field.name), Stage)]


def num_steps(config: RunConfig, role: TrainWorkerConfig, num_rows: int) -> int:
    """Steps of a run of one optimizer step per batch of rows: `max_steps`, or as many as `num_train_epochs` need."""
    per_epoch = math.ceil(num_rows / sequences_per_step(role)[0])
    return config.max_steps or math.ceil(role.training_args.num_train_epochs * per_epoch)


class Validation:
    """Held-out prompts of a run and their sampling parameters. `val_batch_size` prompts are a batch."""

    def __init__(self, run: Run, config: RewardRunConfig, validation: ValidationConfig, *, source: str = "") -> None:
        """`actor_infer` generates with the weights of the role `source`; without one, with the model that it loaded."""
        self.source, self.batch_size = source, config.val_batch_size
        self.num_responses = validation.generating_args.num_return_sequences
        self.params = validation.generating_args.sampling_params(default_max_new_tokens=config.response_length)
        self.prompts = run.prompts(validation.data_args)
        self.num_batches = math.ceil(len(self.prompts) / self.batch_size)

    @classmethod
    def of(cls, run: Run, config: RewardRunConfig, *, source: str) -> Validation | None:
        """That of the key `validation`; None without it."""
        return None if config.validation is None else cls(run, config, config.validation, source=source)

    async def evaluate(self, run: Run) -> Mapping[str, float]:
        """Publish the weights, generate responses and score them. Returns the metrics of `validation_metrics`."""
        await run.publish_weights(self.source, "actor_infer")
        samples = [sample for index in range(self.num_batches) for sample in await self.batch(run, index)]
        run.log_samples(samples, split="val")
        return validation_metrics(samples)

    async def batch(self, run: Run, index: int) -> list[Sample]:
        """Generate and score responses to a batch of prompts."""
        prompts = self.prompts[index * self.batch_size : (index + 1) * self.batch_size]
        groups = await run.rollout("actor_infer", prompts, self.params, n=self.num_responses, split="val")
        return [sample for group in groups for sample in group.samples]


def check_size(run: Run, guard: AdvantageSizeConfig, what: str, value: float, reward_size: float) -> None:
    """Trip the guard `advantage_size` if the absolute `value` of `what` is out of proportion to the rewards."""
    run.guard(
        "advantage_size",
        abs(value) <= guard.threshold * reward_size,
        f"{what} at {{steps}} is {value:.4g}, more than {guard.threshold:g} times {reward_size:.4g}, the largest"
        " absolute reward or 1",
    )


def log_update(run: Run, update: UpdateResult, name: str) -> None:
    """Log an update's metrics as `<name>/...`. Trips the guard `non_finite` if steps were skipped."""
    run.log(update.named(name))
    run.guard(
        "non_finite",
        update.num_not_finite == 0,
        f"step {run.step + 1}: {update.num_not_finite} of {update.num_steps} optimizer steps were skipped, because the"
        " gradient was NaN or infinite: lower the learning rate, clip the gradient, or check the rewards",
    )


class CollectRollouts(Stage):
    """Publishes the policy's weights, and takes the next batch of groups."""

    def __init__(
        self,
        config: PolicyConfig,
        plan: RolloutPlan,
        *,
        role: str = "actor_infer",
        metrics: Callable[[Sequence[Group]], Mapping[str, float]] = sample_metrics,
        scored: bool = True,
    ) -> None:
        """`role` generates the rollouts; only `actor_infer` receives the policy's weights.

        Samples need a reward, unless `scored` is false.
        """
        self.config, self.plan, self.role, self.metrics, self.scored = config, plan, role, metrics, scored

    def start(self, run: Run) -> None:
        """See `Collect`."""
        self.batches = run.rollout_batches(self.role, self.plan)

    async def __call__(self, run: Run) -> Experience | None:
        """See `Collect`."""
        config = self.config
        if self.role == "actor_infer":
            await run.publish_weights("actor_train", "actor_infer")
        groups = await self.batches.batch()
        if not groups:
            return self._without_signal(run, "query_filter_config rejected every group")
        samples = [sample for group in groups for sample in group.samples]
        run.log_samples(samples)
        run.log(self.metrics(groups))
        run.log(self.plan.sampled.metrics() if self.plan.sampled is not None else {})
        run.log(component_metrics(samples, domains(config.rewards, {sample.tag for sample in samples})))
        experience = Experience.of(
            groups,
            routed_experts=config.replays_experts,
            min_group_size=config.min_group_size,
            scored=self.scored,
        )
        if not experience.samples and config.min_group_size > 1:
            few = f"no group has {config.min_group_size} responses with a reward (min_group_size)"
            return self._without_signal(run, few)
        if not experience.samples:
            return self._without_signal(run, "no response has a reward")
        if not experience.mask_T.any():
            run.guard("all_groups_filtered", False, "no token to train on at {steps}: no response has a sampled token")
            return None
        return experience if config.same_temperature else experience.without_behaviour()

    def _without_signal(self, run: Run, reason: str) -> Experience | None:
        """Trip the guard of a step without a learning signal."""
        run.guard("all_groups_filtered", False, f"no reward signal at {{steps}}: {reason}")
        return None

    @override
    def state(self) -> Mapping[str, Any]:
        return {"rollouts": self.batches.state()}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.batches.load_state(state["rollouts"])


def rollout_plan(config: PolicyConfig, order: PromptOrder, **changes: Any) -> RolloutPlan:
    """How the batches of groups are made, from the config and the order of the prompts."""
    generating = config.actor_infer.generating_args
    plan = RolloutPlan(
        counts=order.counts,
        params=generating.sampling_params(default_max_new_tokens=config.response_length),
        n=config.group_size,
        prompt=order.prompt,
        counts_at=order.counts_at if order.schedule else None,
        sampled=order if isinstance(order, SampledOrder) else None,
        max_tries=config.dynamic_sampling_max_tries,
        ahead=config.ahead,
        concurrent=config.async_generation_ratio > 0,
        keep_partials=config.partial_rollout,
        first_ready=config.take_first_ready,
        stale=config.stale_groups,
        record=config.record_rollouts,
        seeded=None if config.seeded_rollouts == "auto" else config.seeded_rollouts,
        routed_experts=config.replays_experts,
        replay=config.replay_rollouts or "",
    )
    return replace(plan, **changes)


class ScorePolicy:
    """Logprobs of the current policy and of the reference, and values of the critic."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config

    async def __call__(self, run: Run, experience: Experience) -> Experience:
        """See `Score`."""
        config = self.config
        sequences = experience.sampled
        want = WantedOutputs(logprobs=True, masked_only=True, temperature=config.temperature)
        if config.force_disable_old_logprobs_recompute:
            experience = experience.with_flat(old_logprobs=experience.require("behaviour_logprobs"))
        elif config.recomputes_logprobs:
            entropy = config.top_entropy_quantile < 1
            scored = await run.train_role("actor_train").score(sequences, replace(want, entropy=entropy))
            experience = experience.with_rows(old_logprobs=scored.logprobs)
            if scored.entropy is not None:
                experience = replace(experience, entropies_T=torch.from_numpy(np.concatenate(scored.entropy)))
            gap, lag = logprob_gaps(experience, run.infer_role("actor_infer").weight_version)
            run.log({"actor/logprob_gap": gap} if gap is not None else {})
            run.log({"actor/logprob_lag": lag} if lag is not None else {})
            hint = record_logprobs(run, config, experience, gap)
            check_gap(run, config, gap, hint)
        if config.stays_close:
            # A policy with adapters still contains the initial policy, so it needs no second copy.
            by_policy = config.reference is None
            role = run.train_role("actor_train" if by_policy else "reference")
            # The reference routes by itself: the policy's experts are not replayed in it.
            scored = await role.score(without_experts(sequences), replace(want, base=by_policy))
            experience = experience.with_rows(ref_logprobs=scored.logprobs)
        if config.critic is not None:
            scored = await run.train_role("critic").score(without_experts(sequences), WantedOutputs(values=True))
            experience = experience.with_rows(values=scored.values)
        return experience


class RewardCredit(Stage):
    """Advantages of an estimator, from rewards, the critic's values and the KL to the reference."""

    def __init__(
        self, run: Run, config: PolicyConfig, penalty: Callable[[Sequence[Sample]], torch.Tensor] | None = None
    ) -> None:
        """`penalty` gives what is added to the reward of each sample, float64 `[S]`."""
        self.config, self.penalty = config, penalty
        part = run.part(AdvantageProvider, config.adv_estimator, config.adv_options)
        self.estimator = bind_options(part.load(), AdvantageEstimator, config.adv_options)
        self.program = GreedyBaseline if part.provider.needs_baseline else None
        """Program of the rollouts, if the estimator needs another one than `RolloutPlan`'s default."""
        self.normaliser = (
            RewardNormaliser(config.norm_mean_type, config.norm_std_type, config.reward_clip, config.norm_epsilon)
            if part.provider.normalise == "config"
            else RewardNormaliser(None, None)
        )
        self.kl = KLController(config.init_kl_coef, config.target_kl, config.kl_horizon, config.kl_error_clip)

    def __call__(self, run: Run, experience: Experience) -> Experience:
        """See `Credit`. Samples and tokens that a mask excludes later still count in their group's statistics."""
        config = self.config
        mask_T = experience.mask_T
        tags = [sample.tag for sample in experience.samples]
        entries = domains(config.rewards, set(tags))
        raw_S, components_S = experience.scores_S, experience.components_S
        baselines_S = None if experience.baselines is None else scores_of(experience.baselines)
        if self.penalty is not None:
            penalty_S = self.penalty(experience.samples)
            raw_S, components_S = raw_S + penalty_S, {**components_S, "overlong_penalty": penalty_S.float()}
            run.log({"reward/overlong_penalty/mean": float(penalty_S.mean())})
            if baselines_S is not None and experience.baselines is not None:
                baselines_S = baselines_S + self.penalty(experience.baselines)
        scores_S = self.normaliser(raw_S.float(), experience.groups_S, [entries.get(tag, tag) for tag in tags])
        kl_coef = self.kl.coef  # for this step: `_kl` adapts the next one's
        credit = self.estimator(
            experience.advantage_input(
                scores_S,
                baselines_S=None if baselines_S is None else baselines_S.float(),
                components_S=components_S,
                gamma=config.gamma,
                lambd=config.lambd,
                critic_lambd=config.critic_lambd,
                kl_T=self._kl(run, experience) if config.add_token_level_kl else None,
                kl_coef=kl_coef,
                reward_clip=config.reward_clip,
                whiten_rewards=config.whiten_rewards,
                norm_epsilon=config.norm_epsilon,
                whiten_epsilon=config.whiten_epsilon,
                options=config.adv_options,
            )
        )
        advantages_T = credit.advantages_T
        if config.whiten_advantages:
            advantages_T = whiten(advantages_T, mask_T, config.whiten_epsilon)
        advantages_T = clip(advantages_T, config.advantage_clip)
        trained_N = advantages_T[experience.loss_mask_T]
        if credit.token_rewards_T is not None:
            run.log({"reward/normalised_mean": float(credit.token_rewards_T.sum() / len(experience.samples))})
        if trained_N.numel():
            run.log(
                {
                    "advantage/mean": float(trained_N.mean()),
                    "advantage/max": float(trained_N.max()),
                    "advantage/min": float(trained_N.min()),
                }
            )
            largest = float(trained_N[trained_N.abs().argmax()])
            check_size(run, config.guards.advantage_size, "the largest advantage", largest, experience.reward_size)
        run.guard(  # `UpdatePolicy` reports a batch without a token in the loss
            "all_groups_filtered",
            not trained_N.numel() or bool((trained_N != 0).any()),
            f"no reward signal at {{steps}}: all {config.group_size} samples of each group scored the same",
        )
        return experience.with_flat(advantages=advantages_T, returns=credit.returns_T)

    def _kl(self, run: Run, experience: Experience) -> torch.Tensor:
        """Per-token KL of the policy to the reference, `[T]`.

        Also adapts the controller's coefficient for the next step.
        """
        config, mask_T = self.config, experience.mask_T
        per_token_T = approx_kl(
            experience.require("old_logprobs"),
            experience.require("ref_logprobs"),
            config.kl_penalty,
            log_ratio_clamp=config.kl_log_ratio_clamp,
            k3_clamp=config.k3_clamp,
        )
        kl_T = torch.where(mask_T, per_token_T, 0.0)
        mean = mean_kl(kl_T, mask_T, experience.segments_T, config.target_kl_agg_mode)
        run.log({"kl/mean": mean, "kl/coef": self.kl.coef})
        self.kl.update(mean, len(experience.samples))
        return kl_T

    @override
    def state(self) -> Mapping[str, Any]:
        return {"kl": self.kl.state(), "normaliser": self.normaliser.state()}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state(state["kl"])
        self.normaliser.load_state(state["normaliser"])


def overlong_penalty(config: PromptRunConfig) -> Callable[[Sequence[Sample]], torch.Tensor] | None:
    """Penalty for the length of each response (`soft_overlong_penalty`), float64 `[S]`; None without the key."""
    penalty = config.soft_overlong_penalty
    if penalty is None:
        return None
    return lambda samples: soft_overlong_penalty(
        torch.tensor([len(sample.response_ids) for sample in samples]),
        max_length=penalty.l_max or config.max_new_tokens,
        cache_length=penalty.l_cache,
        factor=penalty.penalty_factor,
    )


Mask = Callable[[Experience], torch.Tensor]
"""True for the samples to train on, bool `[S]`."""


def policy_masks(config: PolicyConfig) -> list[Mask]:
    """Masks of `max_len_mask` and `difficulty_mask`."""
    masks: list[Mask] = []
    if config.max_len_mask:
        masks.append(lambda experience: max_len_mask([sample.finish_reason for sample in experience.samples]))
    if config.difficulty_mask:
        low, high = config.difficulty_low_threshold, config.difficulty_high_threshold
        masks.append(lambda batch: difficulty_mask(batch.scores_S, batch.groups_S, low=low, high=high))
    return masks


def overlong_masks(config: PromptRunConfig) -> list[Mask]:
    """Mask of `error_max_len_clip`."""
    if not config.error_max_len_clip:
        return []
    threshold = config.error_max_len_threshold or config.max_new_tokens

    def mask(experience: Experience) -> torch.Tensor:
        lengths_S = torch.tensor([len(sample.response_ids) for sample in experience.samples])
        correct = config.error_max_len_reward
        return error_max_len_clip(experience.scores_S, lengths_S, threshold=threshold, correct=correct)

    return [mask]


class SelectSamples:
    """The samples that every mask keeps."""

    def __init__(self, masks: Sequence[Mask]) -> None:
        self.masks = masks

    def __call__(self, run: Run, experience: Experience) -> Experience:
        """See `Select`."""
        kept_S = torch.ones(len(experience.samples), dtype=torch.bool)
        for mask in self.masks:
            kept_S &= mask(experience)
        return experience.keep(kept_S)


class SelectTokens(SelectSamples):
    """The tokens of the policy's loss, after masks, selection by entropy and corrections."""

    def __init__(self, config: PolicyConfig, masks: Sequence[Mask]) -> None:
        super().__init__(masks)
        self.config, self.correction = config, config.correction

    @override
    def __call__(self, run: Run, experience: Experience) -> Experience:
        advantages_T = experience.flat("advantages")
        if experience.entropies_T is not None and advantages_T is not None:
            quantile = self.config.top_entropy_quantile
            top_T = top_entropy(experience.entropies_T, experience.loss_mask_T, quantile)
            experience = experience.with_flat(advantages=torch.where(top_T, advantages_T, 0.0))
        selected = super().__call__(run, experience).with_loss()
        if self.correction.enabled and selected.rows:
            selected, metrics = correct(selected, self.correction)
            run.log(metrics)
        if self.config.positive_nll_coef and selected.rows:
            selected = selected.with_positives(self.config.positive_nll_threshold)
        return selected


class UpdatePolicy(Stage):
    """Optimizer steps of the critic and the policy.

    The players of an episode are several samples: a batch may have more samples than the config counts. It has the
    planned number of optimizer steps nevertheless, which the schedule and the need for old logprobs depend on.
    """

    def __init__(
        self,
        run: Run,
        config: PolicyConfig,
        *,
        terms: Mapping[str, LossFn] | None = None,
        coefs: Mapping[str, float] | None = None,
    ) -> None:
        """`terms` are further terms of the policy's loss, with their weights `coefs`."""
        self.config = config
        self.entropy = EntropyController(
            config.entropy_loss_coef,
            config.entropy_target,
            delta=config.entropy_coef_delta,
            minimum=config.entropy_coef_min,
            maximum=config.entropy_coef_max,
        )
        policy_loss = run.part(PolicyLossProvider, config.pg_variant, config.pg_options).provider
        self.whole_rollouts = policy_loss.whole_rollouts
        low, high = config.clip_range()
        positive = config.positive_nll_coef
        self.objective = policy_objective(
            policy_loss=policy_loss.target,
            params=PolicyLossParams(
                pg_clip_low=low, pg_clip_high=high, dual_clip=config.dual_clip, options=config.pg_options
            ),
            aggregation=config.loss_agg_mode,
            kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
            kl_kind=config.kl_loss_penalty,
            kl_unbiased=config.kl_loss_unbiased,
            log_ratio_clamp=config.kl_log_ratio_clamp,
            k3_clamp=config.k3_clamp,
            temperature=config.temperature,
            terms={**(terms or {}), **({"positive_nll": CrossEntropy(stream="positive")} if positive else {})},
            coefs={**(coefs or {}), **({"positive_nll": positive} if positive else {})},
        )

    async def __call__(self, run: Run, experience: Experience, selected: Experience) -> None:
        """See `Update`."""
        config = self.config
        num_tokens = 0 if config.critic is None else await self._update_critic(run, experience, config.critic)
        if run.step >= config.critic_warmup:
            if selected.rows:
                num_tokens += await self._update_policy(run, selected)
            else:
                excluded = "no sample to train on at {steps}: the masks excluded all samples"
                run.guard("all_groups_filtered", False, excluded)
        run.log({"tokens/trained": num_tokens})

    async def _update_critic(self, run: Run, experience: Experience, critic: TrainWorkerConfig) -> int:
        """Update the critic on all sampled tokens. Returns their number."""
        config = self.config
        objective = ValueObjective(
            value_clip=config.value_clip, coef=config.value_loss_coef, aggregation=config.value_loss_agg_mode
        )
        update = await run.train_role("critic").update(
            without_experts(experience.sampled),
            objective,
            epochs=config.epochs(critic),
            max_length=config.response_length,
            max_steps=config.steps_per_epoch(critic),
            shuffle_seed=shuffle_seed(run, config),
        )
        log_update(run, update, "critic")
        return update.num_tokens

    async def _update_policy(self, run: Run, selected: Experience) -> int:
        """Update the policy. Returns the number of tokens in its loss."""
        config, objective = self.config, self.objective
        update = await run.train_role("actor_train").update(
            (selected.in_units() if self.whole_rollouts else selected).sequences,
            replace(objective, coefs={**objective.coefs, "entropy": -self.entropy.current}),
            epochs=config.ppo_epochs,
            max_length=config.response_length,
            max_steps=config.steps_per_epoch(config.actor_train),
            shuffle_seed=shuffle_seed(run, config),
        )
        log_update(run, update, "actor")
        if config.entropy_target is not None:
            run.log({"actor/entropy_coef": self.entropy.current})
            self.entropy.update(update.metrics["entropy"])
        run.guard(
            "zero_gradient",
            update.metrics["grad_norm"] != 0 or not selected.has_advantages,
            "the gradient was exactly zero at {steps}, but the advantages were not",
        )
        # A sum over the tokens of a response is as many times larger.
        num_summed = config.response_length if config.loss_agg_mode == "seq-mean-token-sum" else 1
        loss, size = update.metrics["loss"] / num_summed, selected.reward_size
        check_size(run, config.guards.advantage_size, "the policy's loss", loss, size)
        check_gap(run, config, update.metrics.get("logprob_gap"))
        return update.num_tokens

    @override
    def state(self) -> Mapping[str, Any]:
        return {"entropy": self.entropy.state()}

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.entropy.load_state(state["entropy"])


def shuffle_seed(run: Run, config: PolicyConfig) -> int | None:
    """Seed of the order of optimizer steps in this step's batch; None keeps the batch's order."""
    return stable_seed(config.seed, "optimizer steps", run.step) if config.shuffle else None


def record_logprobs(run: Run, config: PolicyConfig, experience: Experience, gap: float | None) -> str:
    """Write the logprobs of both sides if the gap is too large, or rollouts are recorded.

    Returns the causes that they show and the command that examines them; empty for a gap within its bound.
    """
    guard = config.guards.logprob_gap
    exceeds = guard.action != "off" and gap is not None and not gap <= guard.bound(config.actor_infer.weight_format)
    if not exceeds and not config.record_rollouts:
        return ""
    params = config.actor_infer.generating_args.sampling_params(default_max_new_tokens=config.response_length)
    processor = processor_of(run.tokenizer)
    dtypes = {config.actor_train.model_args.dtype, config.actor_infer.model_args.dtype}
    batch = LogprobBatch(
        rows=logprob_rows(experience),
        version=run.infer_role("actor_infer").weight_version,
        dtype=max(dtypes, key=NOISE.__getitem__),
        sampling={name: getattr(params, name) for name in SAMPLING},
        end_tokens=() if run.tokenizer.eos_token_id is None else (int(run.tokenizer.eos_token_id),),
        image_tokens=() if processor is None else tuple(processor.media_token_ids),
        step=run.step + 1,
    )
    write_logprobs(run.dir, batch)
    return f"; {batch.diagnose().summary()}: {command(run.dir, batch.step)}" if exceeds else ""


def check_gap(run: Run, config: PolicyConfig, gap: float | None, hint: str = "") -> None:
    """Check that engine and trainer, with the same weights, give the sampled tokens similar logprobs. `hint` is
    appended to the message."""
    if gap is None:
        return
    guard, weight_format = config.guards.logprob_gap, config.actor_infer.weight_format
    fatal = gap > guard.error_bound(weight_format)
    threshold = guard.error_bound(weight_format) if fatal else guard.bound(weight_format)
    run.guard(
        "logprob_gap",
        gap <= threshold,
        f"step {run.step + 1}: mean |trainer's logprob - engine's logprob| of the sampled tokens is {gap:.4g},"
        f" above the threshold of {threshold:g}{hint}",
        fatal=fatal,
    )
