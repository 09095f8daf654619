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

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import override

from roll_core.pipelines.config import PolicyConfig, PromptRunConfig, RLVRConfig
from roll_core.pipelines.plans import rlvr
from roll_core.pipelines.prompt_order import PromptOrder, SampledOrder, domains, group_filter
from roll_core.pipelines.stages import (
    CollectRollouts,
    PolicyStages,
    RewardCredit,
    ScorePolicy,
    SelectTokens,
    UpdatePolicy,
    Validation,
    overlong_masks,
    overlong_penalty,
    policy_masks,
    rollout_plan,
)
from roll_core.spec.pipeline import Pipeline
from roll_core.spec.providers import PromptSamplerProvider

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from roll_core.spec.pipeline import RoleSpec, Run

C = TypeVar("C", bound=PolicyConfig)


class PolicyPipeline(Pipeline[C], Generic[C]):
    """Trains a policy on its rollouts, in the stages that a subclass composes. Base of pipelines."""

    stages: PolicyStages

    @abstractmethod
    def compose(self, run: Run) -> PolicyStages:
        """The stages of a step. Called once, before the roles start."""

    @override
    def prepare(self, run: Run) -> int:
        self.stages = self.compose(run)
        return self.config.max_steps

    @override
    def roles(self) -> Sequence[RoleSpec]:
        return rlvr(self.config).roles

    @override
    async def setup(self, run: Run) -> None:
        if self.stages.collect is not None:
            self.stages.collect.start(run)

    @override
    async def step(self, run: Run) -> None:
        stages = self.stages
        experience = None if stages.collect is None else await stages.collect(run)
        if experience is None:
            return
        with run.stage("logprobs"):
            experience = await stages.score(run, experience)
        with run.stage("advantages"):
            experience = stages.credit(run, experience)
            selected = stages.select(run, experience)
        with run.stage("train"):
            await stages.update(run, experience, selected)

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        return {} if self.stages.evaluation is None else await self.stages.evaluation.evaluate(run)

    @override
    def state(self) -> Mapping[str, Any]:
        return self.stages.state()

    @override
    def load_state(self, state: Mapping[str, Any]) -> None:
        self.stages.load_state(state)

    @override
    def export_role(self) -> str:
        return "actor_train"


class RLVRPipeline(PolicyPipeline[RLVRConfig]):
    """Trains a policy with an engine and rewards, and with a reference and a critic if the algorithm needs them."""

    @override
    def compose(self, run: Run) -> PolicyStages:
        config = self.config
        order = prompt_order(run, config)
        credit = RewardCredit(run, config, overlong_penalty(config))
        plan = rollout_plan(
            config,
            order,
            keep=group_filter(config.rewards) if config.filters else None,
            program=credit.program,
        )
        return PolicyStages(
            collect=CollectRollouts(config, plan),
            score=ScorePolicy(config),
            credit=credit,
            select=SelectTokens(config, [*policy_masks(config), *overlong_masks(config)]),
            update=UpdatePolicy(run, config),
            evaluation=Validation.of(run, config, source="actor_train"),
        )


def prompt_order(run: Run, config: PromptRunConfig) -> PromptOrder:
    """Order of the prompts in the rows of `actor_train`."""
    data = config.actor_train.data_args
    prompts = run.prompts(data)
    create: Callable[..., PromptOrder] = PromptOrder
    if config.prompt_sampler is not None:
        part = run.part(PromptSamplerProvider, config.prompt_sampler, config.prompt_sampler_options)
        create = partial(SampledOrder, partial(part.load(), **part.options))
    return create(
        prompts,
        size=config.num_groups,
        shares=data.domain_interleave_probs,
        seed=config.seed,
        domains=domains(config.rewards, {prompt.tag for prompt in prompts}),
        schedule=data.domain_interleave_schedule,
    )
