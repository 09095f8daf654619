"""Reinforcement learning from verifiable rewards: GRPO, PPO, RLOO, REINFORCE and combinations of their parts.

for step in steps:
    publish the policy's weights to the engine
    groups      = generate n responses per prompt and score them; with `async_generation_ratio`, part of this
                  runs while earlier batches are trained on, which is the only difference of an asynchronous run
    experience  = scored responses, with logprobs of policy and reference, and values of the critic
    advantages  = estimator(rewards, normalised by group, batch or history, minus the KL to the reference)
    update the critic, then the policy, on mini-batches of the experience
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from roll_core.algorithms.entropy import EntropyController, top_entropy
from roll_core.algorithms.kl import KLController, approx_kl, mean_kl
from roll_core.algorithms.losses import CrossEntropy, ValueObjective, policy_objective
from roll_core.algorithms.normalise import RewardNormaliser, clip, whiten
from roll_core.algorithms.rewards import (
    difficulty_mask,
    error_max_len_clip,
    max_len_mask,
    soft_overlong_penalty,
)
from roll_core.pipelines.config import RLVRConfig
from roll_core.pipelines.experience import (
    Experience,
    component_metrics,
    correct,
    logprob_gaps,
    sample_metrics,
    scores_of,
    without_experts,
)
from roll_core.pipelines.plans import rlvr
from roll_core.pipelines.prompt_order import PromptOrder, domains, group_filter
from roll_core.pipelines.stages import Validation, check_size, log_update
from roll_core.runtime.rollout.program import GreedyBaseline
from roll_core.runtime.rollout.requests import stable_seed
from roll_core.spec.algorithms import AdvantageEstimator, AdvantageInput, PolicyLossParams, bind_options
from roll_core.spec.pipeline import Pipeline, RolloutPlan, Run
from roll_core.spec.providers import AdvantageProvider, PolicyLossProvider
from roll_core.spec.train import WantedOutputs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.pipelines.config import SoftOverlongPenaltyConfig
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.types import Group, Sample


class RLVRPipeline(Pipeline[RLVRConfig]):
    """Trains a policy with an engine and rewards, and with a reference and a critic if the algorithm needs them."""

    rollout_role = "actor_infer"
    """Role that generates the rollouts. Only `actor_infer` receives the policy's weights."""

    @override
    def prepare(self, run: Run) -> int:
        config, data = self.config, self.config.actor_train.data_args
        prompts = run.prompts(data)
        self.order = PromptOrder(
            prompts,
            size=config.num_groups,
            shares=data.domain_interleave_probs,
            seed=config.seed,
            domains=domains(config.rewards, {prompt.tag for prompt in prompts}),
        )
        self.sampling = config.actor_infer.generating_args.sampling_params(
            default_max_new_tokens=config.response_length
        )
        # Greedy sampling has no temperature to divide by: its logprobs are those of the model itself.
        self.temperature = config.logprob_temperature or self.sampling.temperature or 1.0
        self.validation = None
        if config.validation is not None:
            self.validation = Validation(run, config, config.validation, source="actor_train")
        self.set_up_objective(run)
        return config.max_steps

    def set_up_objective(self, run: Run) -> None:
        """Set up the reward normaliser, advantage estimator, KL controller and policy objective."""
        config = self.config
        self.correction, self.recomputes_logprobs = config.correction, config.recomputes_logprobs
        estimator = run.part(AdvantageProvider, config.adv_estimator, config.adv_options)
        self.estimator = bind_options(estimator.load(), AdvantageEstimator, config.adv_options)
        self.program = GreedyBaseline if estimator.provider.needs_baseline else None
        normalises = estimator.provider.normalise != "config"
        self.normaliser = (
            RewardNormaliser(None, None)
            if normalises
            else RewardNormaliser(config.norm_mean_type, config.norm_std_type, config.reward_clip, config.norm_epsilon)
        )
        self.entropy = EntropyController(
            config.entropy_loss_coef,
            config.entropy_target,
            delta=config.entropy_coef_delta,
            minimum=config.entropy_coef_min,
            maximum=config.entropy_coef_max,
        )
        self.kl = KLController(config.init_kl_coef, config.target_kl, config.kl_horizon, config.kl_error_clip)
        policy_loss = run.part(PolicyLossProvider, config.pg_variant, config.pg_options).provider
        self.whole_rollouts = policy_loss.whole_rollouts
        low, high = config.clip_range()
        self.policy_objective = policy_objective(
            policy_loss=policy_loss.target,
            params=PolicyLossParams(
                pg_clip_low=low,
                pg_clip_high=high,
                dual_clip=config.dual_clip if config.dual_clip_loss else None,
                options=config.pg_options,
            ),
            aggregation=config.loss_agg_mode,
            kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
            kl_kind=config.kl_loss_penalty,
            kl_unbiased=config.kl_loss_unbiased,
            log_ratio_clamp=config.kl_log_ratio_clamp,
            k3_clamp=config.k3_clamp,
            temperature=self.temperature,
            terms={"positive_nll": CrossEntropy(stream="positive")} if config.positive_nll_coef else {},
            coefs={"positive_nll": config.positive_nll_coef} if config.positive_nll_coef else {},
        )

    @override
    def roles(self) -> Sequence[RoleSpec]:
        return rlvr(self.config).roles

    @override
    async def setup(self, run: Run) -> None:
        self.rollouts = run.rollouts(self.rollout_role, self.rollout_plan())

    def rollout_plan(self) -> RolloutPlan:
        """How the batches of groups are made."""
        config = self.config
        return RolloutPlan(
            counts=self.order.counts,
            params=self.sampling,
            n=config.group_size,
            prompt=self.order.prompt,
            keep=group_filter(config.rewards) if config.filters else None,
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
            program=self.program,
        )

    @override
    async def step(self, run: Run) -> None:
        if self.rollout_role == "actor_infer":
            await run.publish_weights("actor_train", "actor_infer")
        groups = await self.rollouts.batch()
        if not groups:
            run.guard(
                "all_groups_filtered", False, "no reward signal at {steps}: query_filter_config rejected every group"
            )
            return
        config, samples = self.config, [sample for group in groups for sample in group.samples]
        run.log_samples(samples)
        run.log(self.batch_metrics(groups))
        run.log(component_metrics(samples, domains(config.rewards, {sample.tag for sample in samples})))
        experience = self.experience(groups)
        if not experience.samples:
            reason = "no response has a reward"
            if config.min_group_size > 1:
                reason = f"no group has {config.min_group_size} responses with a reward (min_group_size)"
            run.guard("all_groups_filtered", False, f"no reward signal at {{steps}}: {reason}")
            return
        if not experience.mask_T.any():
            run.guard("all_groups_filtered", False, "no token to train on at {steps}: no response has a sampled token")
            return
        with run.stage("logprobs"):
            experience, entropy_T = await self._score(run, experience)
        with run.stage("advantages"):
            experience = self.assign_credit(run, experience)
            chosen = self._chosen(run, experience if entropy_T is None else self._on_top_entropy(experience, entropy_T))
        with run.stage("train"):
            await self._train(run, experience, chosen)

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        return {} if self.validation is None else await self.validation.evaluate(run)

    @override
    def state(self) -> Mapping[str, Any]:
        return {
            "kl": self.kl.state(),
            "entropy": self.entropy.state(),
            "normaliser": self.normaliser.state(),
            "rollouts": self.rollouts.state(),
        }

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state(state["kl"])
        self.entropy.load_state(state["entropy"])
        self.normaliser.load_state(state["normaliser"])
        self.rollouts.load_state(state["rollouts"])

    @override
    def export_role(self) -> str:
        return "actor_train"

    # -- the stages of a step ------------------------------------------------------------------------------------------

    def batch_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of a batch's samples."""
        return sample_metrics(groups)

    def experience(self, groups: Sequence[Group]) -> Experience:
        """Samples of a batch to train on."""
        config = self.config
        experience = Experience.of(groups, routed_experts=config.replays_experts, min_group_size=config.min_group_size)
        return experience if config.same_temperature else experience.without_behaviour()

    async def _score(self, run: Run, experience: Experience) -> tuple[Experience, torch.Tensor | None]:
        """Add logprobs of the current policy, logprobs of the reference, and values of the critic.

        Also returns the policy's entropies `[T]`, if they select tokens.
        """
        config = self.config
        entropy_T = None
        sequences = experience.sampled
        want = WantedOutputs(logprobs=True, masked_only=True, temperature=self.temperature)
        if config.force_disable_old_logprobs_recompute:
            experience = experience.with_rows(old_logprobs=[s.behaviour_logprobs for s in sequences])  # type: ignore[misc]
        elif self.recomputes_logprobs:
            scored = await run.train_role("actor_train").score(
                sequences, replace(want, entropy=config.top_entropy_quantile < 1)
            )
            experience = experience.with_rows(old_logprobs=scored.logprobs)
            entropy_T = None if scored.entropy is None else torch.from_numpy(np.concatenate(scored.entropy))
            gap, lag = logprob_gaps(experience, run.infer_role("actor_infer").weight_version)
            run.log({"actor/logprob_gap": gap} if gap is not None else {})
            run.log({"actor/logprob_lag": lag} if lag is not None else {})
            self._check_gap(run, gap)
        if config.stays_close:
            # A policy with adapters still contains the initial policy, so it needs no second copy.
            own = config.reference is None
            role = run.train_role("actor_train" if own else "reference")
            # The reference routes by itself: the policy's experts are not replayed in it.
            scored = await role.score(without_experts(sequences), replace(want, base=own))
            experience = experience.with_rows(ref_logprobs=scored.logprobs)
        if config.critic is not None:
            scored = await run.train_role("critic").score(without_experts(sequences), WantedOutputs(values=True))
            experience = experience.with_rows(values=scored.values)
        return experience, entropy_T

    def _penalties(self, given: SoftOverlongPenaltyConfig, samples: Sequence[Sample]) -> torch.Tensor:
        """Penalty for the length of each response, float64 `[S]`."""
        return soft_overlong_penalty(
            torch.tensor([len(sample.response_ids) for sample in samples]),
            max_length=given.l_max or self.config.max_new_tokens,
            cache_length=given.l_cache,
            factor=given.penalty_factor,
        )

    def assign_credit(self, run: Run, experience: Experience) -> Experience:
        """Compute advantages from scores.

        Samples and tokens that a mask excludes later still count in their group's statistics.
        """
        config = self.config
        groups_S, mask_T = experience.groups_S, experience.mask_T
        tags = [sample.tag for sample in experience.samples]
        entries = domains(config.rewards, set(tags))
        raw_S, components_S = experience.scores_S, experience.components_S
        baselines_S = None if experience.baselines is None else scores_of(experience.baselines)
        if (penalty := config.soft_overlong_penalty) is not None:
            penalty_S = self._penalties(penalty, experience.samples)
            raw_S, components_S = raw_S + penalty_S, {**components_S, "overlong_penalty": penalty_S.float()}
            run.log({"reward/overlong_penalty/mean": float(penalty_S.mean())})
            if baselines_S is not None and experience.baselines is not None:
                baselines_S = baselines_S + self._penalties(penalty, experience.baselines)
        scores_S = self.normaliser(raw_S.float(), groups_S, [entries.get(tag, tag) for tag in tags])
        kl_coef = self.kl.coef  # for this step: `_penalty` adapts the next one's
        found = self.estimator(
            AdvantageInput(
                scores_S=scores_S,
                mask_T=mask_T,
                segments_T=experience.segments_T,
                groups_S=groups_S,
                baselines_S=None if baselines_S is None else baselines_S.float(),
                components_S=components_S,
                turns=experience.turns,
                values_T=experience.flat("values"),
                gamma=config.gamma,
                lambd=config.lambd,
                critic_lambd=config.critic_lambd,
                kl_T=self._penalty(run, experience) if config.add_token_level_kl else None,
                kl_coef=kl_coef,
                reward_clip=config.reward_clip,
                whiten_rewards=config.whiten_rewards,
                norm_epsilon=config.norm_epsilon,
                whiten_epsilon=config.whiten_epsilon,
                options=config.adv_options,
            )
        )
        advantages_T = found.advantages_T
        if config.whiten_advantages:
            advantages_T = whiten(advantages_T, mask_T, config.whiten_epsilon)
        advantages_T = clip(advantages_T, config.advantage_clip)
        trained_N = advantages_T[experience.loss_mask_T]
        if found.token_rewards_T is not None:
            run.log({"reward/normalised_mean": float(found.token_rewards_T.sum() / len(experience.samples))})
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
        run.guard(  # `_train` reports a batch without a token in the loss
            "all_groups_filtered",
            not trained_N.numel() or bool((trained_N != 0).any()),
            f"no reward signal at {{steps}}: all {config.group_size} samples of each group scored the same",
        )
        return experience.with_flat(advantages=advantages_T, returns=found.returns_T)

    def _on_top_entropy(self, experience: Experience, entropy_T: torch.Tensor) -> Experience:
        """Set advantages to 0 where the entropy is not among the highest of the batch."""
        advantages_T = experience.flat("advantages")
        if advantages_T is None:
            return experience
        top_T = top_entropy(entropy_T, experience.loss_mask_T, self.config.top_entropy_quantile)
        return experience.with_flat(advantages=torch.where(top_T, advantages_T, 0.0))

    def _chosen(self, run: Run, experience: Experience) -> Experience:
        """Samples and tokens of the policy's loss, after masks and corrections."""
        chosen = experience.keep(self._kept(experience)).with_loss()
        if self.correction.enabled and chosen.sequences:
            chosen, metrics = correct(chosen, self.correction)
            run.log(metrics)
        if self.config.positive_nll_coef and chosen.sequences:
            chosen = chosen.with_positives(self.config.positive_nll_threshold)
        return chosen

    def _penalty(self, run: Run, experience: Experience) -> torch.Tensor:
        """Per-token KL of the policy to the reference, `[T]`.

        Also adapts the controller's coefficient for the next step.
        """
        policy_T, reference_T = experience.flat("old_logprobs"), experience.flat("ref_logprobs")
        if policy_T is None or reference_T is None:  # the schema requires the reference, `_score` computes both
            raise AssertionError("the KL in the reward needs logprobs of policy and reference")
        mask_T = experience.mask_T
        config = self.config
        per_token_T = approx_kl(
            policy_T,
            reference_T,
            config.kl_penalty,
            log_ratio_clamp=config.kl_log_ratio_clamp,
            k3_clamp=config.k3_clamp,
        )
        kl_T = torch.where(mask_T, per_token_T, 0.0)
        mean = mean_kl(kl_T, mask_T, experience.segments_T, config.target_kl_agg_mode)
        run.log({"kl/mean": mean, "kl/coef": self.kl.coef})
        self.kl.update(mean, len(experience.samples))
        return kl_T

    def _kept(self, experience: Experience) -> torch.Tensor:
        """Mask of the samples in the policy's loss, bool `[S]`."""
        config = self.config
        kept_S = torch.ones(len(experience.samples), dtype=torch.bool)
        if config.max_len_mask:
            kept_S &= max_len_mask([sample.finish_reason for sample in experience.samples])
        if config.difficulty_mask:
            kept_S &= difficulty_mask(
                experience.scores_S,
                experience.groups_S,
                low=config.difficulty_low_threshold,
                high=config.difficulty_high_threshold,
            )
        if config.error_max_len_clip:
            lengths_S = torch.tensor([len(sample.response_ids) for sample in experience.samples])
            threshold = config.error_max_len_threshold or config.max_new_tokens
            kept_S &= error_max_len_clip(
                experience.scores_S, lengths_S, threshold=threshold, correct=config.error_max_len_reward
            )
        return kept_S

    def _shuffle_seed(self, run: Run) -> int | None:
        """Seed of the order of optimizer steps in this step's batch; None keeps the batch's order."""
        return stable_seed(self.config.seed, "optimizer steps", run.step) if self.config.shuffle else None

    async def _train(self, run: Run, experience: Experience, chosen: Experience) -> None:
        """Update the critic on the whole experience, and the policy on the chosen part.

        The players of an episode are several samples: a batch may have more samples than the config counts. It has the
        planned number of optimizer steps nevertheless, which the schedule and the need for old logprobs depend on.
        """
        config = self.config
        shuffle_seed = self._shuffle_seed(run)
        num_tokens = 0
        if config.critic is not None:
            objective = ValueObjective(
                value_clip=config.value_clip, coef=config.value_loss_coef, aggregation=config.value_loss_agg_mode
            )
            critic = run.train_role("critic")
            update = await critic.update(
                without_experts(experience.sampled),
                objective,
                epochs=config.epochs(config.critic),
                max_length=config.response_length,
                max_steps=config.steps_per_epoch(config.critic),
                shuffle_seed=shuffle_seed,
            )
            log_update(run, update, "critic")
            num_tokens += update.num_tokens
        if run.step >= config.critic_warmup and not chosen.sequences:
            run.guard("all_groups_filtered", False, "no sample to train on at {steps}: the masks excluded all samples")
        elif run.step >= config.critic_warmup:
            policy = self.policy_objective
            update = await run.train_role("actor_train").update(
                (chosen.in_units() if self.whole_rollouts else chosen).sequences,
                replace(policy, coefs={**policy.coefs, "entropy": -self.entropy.current}),
                epochs=config.ppo_epochs,
                max_length=config.response_length,
                max_steps=config.steps_per_epoch(config.actor_train),
                shuffle_seed=shuffle_seed,
            )
            log_update(run, update, "actor")
            if config.entropy_target is not None:
                run.log({"actor/entropy_coef": self.entropy.current})
                self.entropy.update(update.metrics["entropy"])
            run.guard(
                "zero_gradient",
                update.metrics["grad_norm"] != 0 or not chosen.has_advantages,
                "the gradient was exactly zero at {steps}, but the advantages were not",
            )
            # A sum over the tokens of a response is as many times larger.
            num_summed = config.response_length if config.loss_agg_mode == "seq-mean-token-sum" else 1
            loss, size = update.metrics["loss"] / num_summed, chosen.reward_size
            check_size(run, config.guards.advantage_size, "the policy's loss", loss, size)
            self._check_gap(run, update.metrics.get("logprob_gap"))
            num_tokens += update.num_tokens
        run.log({"tokens/trained": num_tokens})

    def _check_gap(self, run: Run, gap: float | None) -> None:
        """Check that engine and trainer, with the same weights, give the sampled tokens similar logprobs."""
        if gap is None:
            return
        guard, weight_format = self.config.guards.logprob_gap, self.config.actor_infer.weight_format
        fatal = gap > guard.error_bound(weight_format)
        threshold = guard.error_bound(weight_format) if fatal else guard.bound(weight_format)
        run.guard(
            "logprob_gap",
            gap <= threshold,
            f"step {run.step + 1}: mean |trainer's logprob - engine's logprob| of the sampled tokens is {gap:.4g},"
            f" above the threshold of {threshold:g}",
            fatal=fatal,
        )
