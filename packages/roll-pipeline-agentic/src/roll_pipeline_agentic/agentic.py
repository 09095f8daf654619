"""Reinforcement learning in multi-turn environments.

for step in steps:
    publish the policy's weights to the engine
    groups      = `group_size` episodes per seed, see `episodes`
    experience  = the rows of the episodes; the rest of the step is that of `rlvr`
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import statistics
from collections import Counter, defaultdict
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from roll_core.algorithms.losses import CrossEntropy
from roll_core.data.rollouts import num_read, rows, tokens_of
from roll_core.errors import ContractError, DataError, PluginLoadError
from roll_core.pipelines.evaluate import Evaluation
from roll_core.pipelines.experience import sample_metrics
from roll_core.pipelines.prompt_order import PromptOrder, RowOrder, group_filter, mean_counts
from roll_core.pipelines.rlvr import PolicyPipeline
from roll_core.pipelines.score_metrics import validation_metrics
from roll_core.pipelines.stages import (
    CollectRollouts,
    PolicyStages,
    RewardCredit,
    ScorePolicy,
    SelectTokens,
    UpdatePolicy,
    policy_masks,
    rollout_plan,
)
from roll_core.spec.environment import Environment
from roll_core.spec.pipeline import batch_counts
from roll_core.spec.providers import AgentProvider, EnvironmentProvider
from roll_core.spec.rollout import Prompt
from roll_pipeline_agentic.agents import AgentHost
from roll_pipeline_agentic.calls import seed_of
from roll_pipeline_agentic.chat_encoder import ChatEncoder
from roll_pipeline_agentic.config import AgenticConfig, EvaluateEpisodesConfig
from roll_pipeline_agentic.environment_process import CallFailed, describe
from roll_pipeline_agentic.episodes import EpisodeGroup, Episodes
from roll_pipeline_agentic.hosting import EnvironmentHost
from roll_pipeline_agentic.recording_server import RecordingServer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from roll_core.data.rows import Rows
    from roll_core.pipelines.experience import Experience
    from roll_core.spec.pipeline import Run
    from roll_core.spec.providers import Isolation
    from roll_core.types import Group, Rollout, Sample, TokenIds
    from roll_pipeline_agentic.config import EnvManagerConfig, EpisodeConfig, PricesConfig

log = logging.getLogger(__name__)


class EpisodeOrder(PromptOrder):
    """Endless sequence of episodes per tag. `counts` is the mean number of groups per tag in a batch."""

    def __init__(self, counts: Mapping[str, float], tasks: Mapping[str, Rows], *, seed: int, split: str = "") -> None:
        """`tasks` are the rows of tags with data. The split `val/` keeps their order."""
        self.counts, self.split, self.tasks = dict(counts), split, tasks
        self.orders = {
            tag: RowOrder(len(rows), seed=seed_of(seed, "tasks", tag), shuffle=not split) for tag, rows in tasks.items()
        }

    @override
    def prompt(self, tag: str, position: int) -> Prompt:
        """Placeholder for the episodes at a position. Its id determines their seed."""
        task: Mapping[str, Any] = {}
        id, row_id = f"{self.split}{tag}/{position}", ""
        if tag in self.tasks:
            row = self.tasks[tag][self.orders[tag].row(position)]
            row_id, task = f"{self.split}{tag}/{row.id}", dict(row.values)
            id = f"{row_id}/{position // len(self.tasks[tag])}"
        return Prompt(id=id, row=row_id, tokens=np.zeros(0, dtype=np.int64), text="", tag=tag, metadata=task)


class SelectWithEcho(SelectTokens):
    """The tokens of the policy's loss, and those of the environments' messages in the loss term `echo`."""

    @override
    def __call__(self, run: Run, experience: Experience) -> Experience:
        return super().__call__(run, with_echo(experience)).with_loss()


class EpisodeEnvironments:
    """Environments, agents and encoders of a pipeline's episodes."""

    config: EpisodeConfig

    def _prepare_environments(self, run: Run) -> None:
        """Load classes and chat templates. Raises `DataError`, `PluginLoadError` and `ContractError`."""
        config = self.config
        tags = list(config.custom_envs)
        self.with_success: set[str] = set()
        """Tags whose environments report success."""
        self.prices = {tag: entry.prices for tag, entry in config.custom_envs.items() if entry.prices is not None}
        self.hosts = {tag: self._host(run, tag) for tag in tags if config.custom_envs[tag].environment}
        endpoint = config.agent_endpoint
        self.server = RecordingServer(endpoint.host, endpoint.port, endpoint.url)
        self.encoders = {
            tag: ChatEncoder(
                run.tokenizer,
                config.roles()[config.chat_role].data_args,
                where=f"custom_envs.{tag}",
                tool_format=config.tool_format,
                thinking=config.thinking,
            )
            for tag in tags
        }
        for tag in tags:
            parts = config.custom_envs[tag].response_mask.parts or ()
            if "tool_calls" in parts and self.encoders[tag].tool_format == "none":
                raise DataError(
                    f"custom_envs.{tag}.response_mask.parts: tool_calls needs replies with tool calls, and the chat"
                    " template describes none: set tool_format to how the model writes them"
                )
        self.agents = {
            tag: AgentHost(
                tag, config, run.part(AgentProvider, entry.agent, entry.agent_config), self.encoders[tag], self.server
            )
            for tag, entry in config.custom_envs.items()
            if entry.agent
        }
        if self.agents:
            self.server.check()

    def _host(self, run: Run, tag: str) -> EnvironmentHost:
        """Load the class of an environment and check where it can run. Raises `PluginLoadError` and `ContractError`."""
        entry = self.config.custom_envs[tag]
        part = run.part(EnvironmentProvider, entry.environment, entry.env_config)
        provider, owner, options = part.provider, part.owner, part.options
        isolation: Isolation = "process" if entry.python else entry.host_isolation or provider.isolation
        cls: type[Environment] | None = None
        if entry.python:
            try:
                reports_success = describe(entry.python, provider.target, json.dumps(dict(options)))["reports_success"]
            except CallFailed as error:
                raise PluginLoadError(f"custom_envs.{tag}: {owner}: {error}") from error
        else:
            cls = part.load()
            if not (isinstance(cls, type) and issubclass(cls, Environment)):
                raise PluginLoadError(f"custom_envs.{tag}: {owner}: {provider.target} is not a subclass of Environment")
            reports_success = cls.reports_success
            blocking = [name for name in ("reset", "step") if not asyncio.iscoroutinefunction(getattr(cls, name))]
            if isolation == "inline" and blocking:
                raise ContractError(
                    f"custom_envs.{tag}: {owner}: isolation is inline, but {', '.join(blocking)} is no coroutine"
                    " function and would block all other episodes: set isolation: thread or process"
                )
        self.with_success |= {tag} if reports_success else set()
        return EnvironmentHost(
            tag,
            entry,
            target=provider.target,
            options=options,
            owner=owner,
            isolation=isolation,
            concurrency=entry.concurrency or provider.concurrency,
            create=partial(cls, **options) if cls else None,
            python=entry.python,
        )

    def _order(self, run: Run, manager: EnvManagerConfig, num_groups: int, split: str = "") -> EpisodeOrder:
        """Order of the episodes of a manager, with the tasks of environments with data."""
        shares, tasks = self.config.shares(manager), {}
        for tag in shares:
            entry = self.config.custom_envs[tag]
            data = (entry.val_data_args if split else None) or entry.data_args
            if data is not None:
                tasks[tag] = run.rows(data)
        return EpisodeOrder(mean_counts(num_groups, shares), tasks, seed=self.config.seed, split=split)

    def _episodes(self, run: Run, manager: EnvManagerConfig) -> Episodes:
        return Episodes(
            config=self.config,
            tokenizer=run.tokenizer,
            encoders=self.encoders,
            hosts=self.hosts,
            agents=self.agents,
            groups=asyncio.Semaphore(manager.num_env_groups),
            counts=Counter(),
            format_penalty=manager.format_penalty,
        )

    def _host_metrics(self) -> dict[str, float]:
        """Durations of the environments' calls, and counts of the agents' recorders, since the last call."""
        metrics: dict[str, float] = {}
        for tag, agent in self.agents.items():
            metrics |= {f"agent/{tag}/{name}": number for name, number in agent.take_counts().items()}
        for tag, host in (*self.hosts.items(), *self.agents.items()):
            for method, seconds in host.take_seconds().items():
                if seconds:
                    metrics[f"env/{tag}/{method}_s/mean"] = statistics.fmean(seconds)
                    metrics[f"env/{tag}/{method}_s/max"] = max(seconds)
        return metrics

    async def close(self) -> None:
        """Close environments, agents and the server."""
        for host in (*getattr(self, "hosts", {}).values(), *getattr(self, "agents", {}).values()):
            await host.close()
        if hasattr(self, "server"):
            await self.server.close()


class AgenticPipeline(EpisodeEnvironments, PolicyPipeline[AgenticConfig]):
    """Trains a policy in environments."""

    config: AgenticConfig

    @override
    def compose(self, run: Run) -> PolicyStages:
        config = self.config
        self.warned_of_forks: set[str] = set()
        self._prepare_environments(run)
        self.episodes = self._episodes(run, config.train_env_manager)
        order = self._order(run, config.train_env_manager, config.num_groups)
        plan = rollout_plan(
            config,
            order,
            keep=group_filter(config.rewards) if config.filters else None,
            program=partial(EpisodeGroup, self.episodes),
        )
        self.validation_order = None
        if (manager := config.val_env_manager) is not None:
            num_groups = config.val_batch_size // manager.group_size
            self.validation_order = self._order(run, manager, num_groups, split="val/")
        echoes = config.echo_coef
        masks = policy_masks(config)
        return PolicyStages(
            collect=CollectRollouts(config, plan, metrics=self.batch_metrics),
            score=ScorePolicy(config),
            credit=RewardCredit(run, config),
            select=SelectWithEcho(config, masks) if echoes else SelectTokens(config, masks),
            update=UpdatePolicy(
                run,
                config,
                terms={ECHO: CrossEntropy(stream=ECHO)} if echoes else {},
                coefs={ECHO: echoes} if echoes else {},
            ),
        )

    def batch_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Metrics of a batch's samples and of its episodes."""
        samples = [sample for group in groups for sample in group.samples]
        metrics = episode_metrics(samples, self.with_success, self.prices) | self._host_metrics()
        metrics |= {f"env/{tag}/{what}": float(number) for (tag, what), number in self.episodes.counts.items()}
        self.episodes.counts.clear()
        self._warn_of_forks(samples)
        return sample_metrics(groups) | metrics

    def _warn_of_forks(self, samples: Sequence[Sample]) -> None:
        """Log once per tag that turns do not continue earlier ones, with the first text that differs."""
        for tag in {sample.tag for sample in samples} - self.warned_of_forks:
            rollouts = [sample.rollout for sample in samples if sample.tag == tag and sample.rollout]
            later = sum(len(rollout.turns) - 1 for rollout in rollouts)
            forks = sum(len(rows(rollout)) - 1 for rollout in rollouts)
            if later and forks / later > FORK_SHARE:
                self.warned_of_forks.add(tag)
                differences = (first_difference(rollout, self.encoders[tag].text) for rollout in rollouts)
                log.warning(
                    "custom_envs.%s: %d of %d later turns begin a new training row, because their prompts do not"
                    " continue an earlier conversation%s. Set thinking: keep if the template removes reasoning, or keep"
                    " what the agent sends unchanged",
                    tag,
                    forks,
                    later,
                    next(filter(None, differences), ""),
                )

    @override
    async def evaluate(self, run: Run) -> Mapping[str, float]:
        config, manager, order = self.config, self.config.val_env_manager, self.validation_order
        if manager is None or order is None:
            return {}
        await run.publish_weights("actor_train", "actor_infer")
        prompts = validation_prompts(order)
        params = manager.generating_args.sampling_params(default_max_new_tokens=config.response_length)
        program = partial(EpisodeGroup, self._episodes(run, manager))
        groups = await run.rollout("actor_infer", prompts, params, n=manager.group_size, split="val", program=program)
        samples = [sample for group in groups for sample in group.samples]
        run.log_samples(samples, split="val")
        self._host_metrics()  # those of a step do not contain the evaluation
        metrics = episode_metrics(samples, self.with_success, self.prices)
        return validation_metrics(samples) | {f"val/{name}": value for name, value in metrics.items()}


class EvaluateEpisodesPipeline(EpisodeEnvironments, Evaluation[EvaluateEpisodesConfig]):
    """Scores a model in environments. A step has the episodes of `num_env_groups` groups."""

    config: EvaluateEpisodesConfig

    @override
    def load(self, run: Run) -> int:
        config, manager = self.config, self.config.val_env_manager
        self._prepare_environments(run)
        self.episodes = self._episodes(run, manager)
        order = self._order(run, manager, config.val_batch_size // manager.group_size, split="val/")
        self.prompts = validation_prompts(order)
        return math.ceil(len(self.prompts) / manager.num_env_groups)

    @override
    async def batch(self, run: Run, index: int) -> list[Sample]:
        config, manager = self.config, self.config.val_env_manager
        prompts = self.prompts[index * manager.num_env_groups : (index + 1) * manager.num_env_groups]
        params = manager.generating_args.sampling_params(default_max_new_tokens=config.response_length)
        program = partial(EpisodeGroup, self.episodes)
        groups = await run.rollout("actor_infer", prompts, params, n=manager.group_size, split="val", program=program)
        samples = [sample for group in groups for sample in group.samples]
        run.log(episode_metrics(samples, self.with_success, self.prices) | self._host_metrics())
        return samples


def validation_prompts(order: EpisodeOrder) -> list[Prompt]:
    """Placeholders for the episodes of an evaluation. Each tag has at least one group."""
    counts = next(batch_counts(order.counts))
    return [order.prompt(tag, position) for tag, number in counts.items() for position in range(max(number, 1))]


ECHO = "echo"
"""Stream of the environments' messages."""


def with_echo(experience: Experience) -> Experience:
    """Set the stream `echo`: 1 on the tokens of the messages that followed a turn, each in one row."""
    masks = [row.observation_mask for sample in experience.samples if sample.rollout for row in rows(sample.rollout)]
    return experience.with_stream(ECHO, torch.from_numpy(np.concatenate(masks)))


FORK_SHARE = 0.1
"""Share of the turns after the first that may begin a new row without a warning."""
NUM_SHOWN = 32
"""Tokens of a difference in a warning."""


def first_difference(rollout: Rollout, text: Callable[[TokenIds], str]) -> str:
    """Where the first prompt that continues no turn leaves the earlier turn with which it has most tokens in common.

    Empty if there is none: the prompts are equal, or continue each other.
    """
    sequences = [tokens_of(rollout, index) for index in range(len(rollout.turns))]
    for index, turn in enumerate(rollout.turns):
        prompt = sequences[index][: len(sequences[index]) - len(turn.sampled_ids)]
        common = [_num_common(prompt, other) for other in sequences[:index]]
        if index and all(
            number < min(len(prompt), len(sequence)) for number, sequence in zip(common, sequences, strict=False)
        ):
            other = int(np.argmax(common))
            offset = common[other]
            before, after = (text(ids[offset : offset + NUM_SHOWN]) for ids in (sequences[other], prompt))
            return f": turn {index + 1} has {after!r:.120} where turn {other + 1} has {before!r:.120}"
    return ""


def _num_common(ids: TokenIds, other: TokenIds) -> int:
    """Number of tokens with which both begin."""
    length = min(len(ids), len(other))
    differs = np.flatnonzero(ids[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


NUM_TURNS = 8
"""Turns of an episode with metrics of their own."""


def episode_metrics(
    samples: Sequence[Sample],
    with_success: Collection[str] = (),
    prices: Mapping[str, PricesConfig] = MappingProxyType({}),
) -> dict[str, float]:
    """Metrics of episodes per environment, `env/<tag>/…`, and of their rows. Failed episodes count only as failed.

    Tags in `with_success` have the metric `success` also if no episode reports it. Each player of an episode counts.
    Tags with prices have the metric `cost`.
    """
    metrics: dict[str, float] = {}
    by_tag: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.reward is not None and not sample.reward.failed:
            by_tag[sample.tag].append(sample)
    valid = [sample for tagged in by_tag.values() for sample in tagged]
    if not valid:
        return metrics
    metrics["rollout/forks"] = float(sum(len(rows(sample.rollout)) - 1 for sample in valid if sample.rollout))
    for tag, episodes in by_tag.items():
        turns = [len(sample.rollout.turns) for sample in episodes if sample.rollout]
        replies = [turn for sample in episodes if sample.rollout for turn in sample.rollout.turns]
        metrics |= {
            f"env/{tag}/score/mean": statistics.fmean(map(_value, episodes)),
            f"env/{tag}/turns/mean": statistics.fmean(turns),
            f"env/{tag}/turns/max": float(max(turns)),
            f"env/{tag}/truncated_share": statistics.fmean(sample.finish_reason == "length" for sample in episodes),
            f"env/{tag}/tokens_per_turn/mean": statistics.fmean(len(turn.sampled_ids) for turn in replies),
            f"env/{tag}/cut_reply_share": statistics.fmean(turn.finish_reason == "length" for turn in replies),
            f"env/{tag}/trained_share": sum(int(turn.loss_mask.sum()) for turn in replies)
            / max(1, sum(len(turn.sampled_ids) for turn in replies)),
        }
        rollouts = [sample.rollout for sample in episodes if sample.rollout]
        read, sampled = sum(map(num_read, rollouts)), sum(len(turn.sampled_ids) for turn in replies)
        metrics |= {
            f"env/{tag}/read_tokens/mean": read / len(rollouts),
            f"env/{tag}/sampled_tokens/mean": sampled / len(rollouts),
        }
        if tag in prices:
            cost = (prices[tag].read * read + prices[tag].sampled * sampled) / 1e6
            metrics |= {f"env/{tag}/cost/mean": cost / len(rollouts), f"env/{tag}/cost/sum": cost}
        for index in range(min(max(turns), NUM_TURNS)):
            reached = [rollout.turns[index] for rollout in rollouts if len(rollout.turns) > index]
            prefix = f"env/{tag}/turn_{index + 1}"
            metrics[f"{prefix}/share"] = len(reached) / len(rollouts)
            metrics[f"{prefix}/tokens"] = statistics.fmean(len(turn.sampled_ids) for turn in reached)
            if rewards := [turn.reward for turn in reached if turn.reward is not None]:
                metrics[f"{prefix}/reward"] = statistics.fmean(rewards)
        num_episodes = len({sample.episode for sample in episodes})
        for player in dict.fromkeys(sample.player for sample in episodes if sample.player):
            of_player = [sample for sample in episodes if sample.player == player]
            metrics[f"env/{tag}/player_{player}/score/mean"] = statistics.fmean(map(_value, of_player))
            metrics[f"env/{tag}/player_{player}/share"] = len(of_player) / num_episodes
        means: defaultdict[str, list[float]] = defaultdict(list)
        for sample in episodes:
            values: defaultdict[str, list[float]] = defaultdict(list)
            for turn in sample.rollout.turns if sample.rollout else ():
                for name, value in turn.metrics.items():
                    values[name].append(value)
            for name, numbers in values.items():
                # `success` is a state of the episode, which its last turn has.
                means[name].append(numbers[-1] if name == "success" else statistics.fmean(numbers))
        if tag in with_success:
            means["success"] += []
        # An episode that ends without `success`, for example after its last turn, is none.
        nums = {name: len(episodes) if name == "success" else len(numbers) for name, numbers in means.items()}
        metrics |= {f"env/{tag}/{name}": sum(numbers) / nums[name] for name, numbers in means.items()}
    return metrics


def _value(sample: Sample) -> float:
    """Reward of a sample that has one."""
    if sample.reward is None or sample.reward.value is None:
        raise AssertionError("a valid sample has a reward")
    return sample.reward.value
