"""Configuration schema of the pipeline `agentic`, with ROLL's keys. Light: imports no torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator
from typing_extensions import override

from roll_core.data.tokenizers import has_tokenizer, stored_chat_template
from roll_core.errors import install_command
from roll_core.pipelines.config import EvaluationConfig, PolicyConfig
from roll_core.spec.config import (
    AdvantageOptions,
    Config,
    CustomEnvConfig,
    DataArguments,
    Fraction,
    GeneratingArguments,
    Needs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RewardKeys,
    RunConfig,
)
from roll_core.spec.providers import Isolation  # noqa: TC001 - pydantic reads the annotation
from roll_pipeline_agentic.tool_calls import ReplyPart, ToolFormat, tool_format_of

if TYPE_CHECKING:
    from collections.abc import Mapping


class ResponseMaskConfig(Config):
    """`custom_envs.<tag>.response_mask`: the sampled tokens in the policy's loss. Others are context."""

    turns: Literal["all", "last", "valid"] = "all"
    """Turns to train on: all, the last one of the episode, or those without an invalid action.

    A turn has an invalid action if the environment's metric `valid` is 0.
    """
    parts: list[ReplyPart] | None = None
    """Parts of a reply to train on: `reasoning`, `tool_calls` and `content`. Default: the whole reply.

    Each part includes its marks. Tokens that end the turn belong to the last part.
    """
    pattern: str | None = None
    """Regular expression: train only on the tokens of its matches in a reply, for example tool calls.

    The reply's text has its special tokens. `.` matches line breaks. Default: the whole reply.
    """

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            pattern = None if value is None else re.compile(value, re.DOTALL)
        except re.error as error:
            raise ValueError(f"{value!r} is not a regular expression: {error}") from None
        if pattern is not None and pattern.fullmatch(""):
            raise ValueError(f"{value!r} matches the empty text, expected a pattern of at least one character")
        return value

    @model_validator(mode="after")
    def _selects_tokens_in_one_way(self) -> Self:
        if self.parts == []:
            raise ValueError("parts is empty, so that no token is trained on")
        if self.parts is not None and self.pattern is not None:
            raise ValueError("parts and pattern select tokens of a reply, expected one of them")
        return self


class PricesConfig(Config):
    """`custom_envs.<tag>.prices`: prices of a million tokens, in any currency, for the metric `cost`."""

    read: NonNegativeFloat = 0.0
    """Price of tokens that the policy read: the whole prompt of each turn, as hosted models count it."""
    sampled: NonNegativeFloat = 0.0
    """Price of tokens that the policy sampled."""


class AgenticEnvConfig(CustomEnvConfig):
    """`custom_envs.<tag>`: an environment, its options and its limits."""

    max_steps: PositiveInt | None = None
    """Maximum number of turns of an episode. Default: `max_actions_per_traj`."""
    max_tokens_per_step: PositiveInt | None = None
    """Maximum number of tokens of a reply. Default: the run's `max_tokens_per_step`."""
    response_mask: ResponseMaskConfig = ResponseMaskConfig()
    """Turns and tokens to train on. Default: all sampled tokens."""
    data_args: DataArguments | None = None
    """Rows with tasks, in a random order of each pass: `reset` gets the columns of one row per group.

    Default: no rows, the environment creates tasks from the seed.
    """
    val_data_args: DataArguments | None = None
    """Rows for evaluations, in the order of the files. Default: `data_args`."""
    isolation: Isolation | Literal["environment"] | None = None
    """Where the environment runs: `inline`, `thread`, `process` or `environment`. Default: as its package declares.

    Your own class runs in processes by default. `inline` needs coroutine functions that never block. `environment`:
    processes of the interpreter `python`.
    """
    concurrency: PositiveInt | None = None
    """Maximum number of episodes at the same time. Default: as its package declares, or 32 processes."""
    setup_timeout_s: PositiveFloat = 60.0
    """Maximum seconds to create the environment and its first messages."""
    step_timeout_s: PositiveFloat = 60.0
    """Maximum seconds of one turn of the environment."""
    score_timeout_s: PositiveFloat = 60.0
    """Maximum seconds to score an episode."""
    prices: PricesConfig | None = None
    """Prices of tokens, to report the cost of episodes. Default: no cost."""
    max_retries: NonNegativeInt = 2
    """Further attempts after an episode failed. After the last one the episode is excluded."""
    agent_timeout_s: PositiveFloat = 600.0
    """Maximum seconds that the agent takes outside of its calls to the policy."""
    unrecorded_replies: Literal["fail", "allow"] = "fail"
    """What to do if a call has an assistant message that the policy did not write and the first call did not have.

    The agent then called another model, or changed a reply. `fail` excludes the rollout; `allow` reads the message as
    context.
    """

    @field_validator("python")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        return os.path.expanduser(value)

    @model_validator(mode="after")
    def _python_runs_an_environment(self) -> Self:
        if self.python and not self.environment:
            raise ValueError("python has no effect without environment: an agent of another interpreter is a command")
        if self.python and self.isolation not in (None, "environment"):
            raise ValueError(f"isolation is {self.isolation}, but python needs isolation: environment")
        if self.isolation == "environment" and not self.python:
            raise ValueError("isolation: environment needs python, the interpreter of its virtual environment")
        return self

    @property
    def host_isolation(self) -> Isolation | None:
        """`isolation` without `environment`, which does not concern the agent of the entry."""
        return None if self.isolation == "environment" else self.isolation


class EnvManagerConfig(Config):
    """`train_env_manager`: the episodes of a step."""

    tags: list[str] = Field(default_factory=list)
    """Keys of `custom_envs` to use. Default: all."""
    num_env_groups: PositiveInt = 128
    """Maximum number of groups whose episodes run at the same time."""
    group_size: PositiveInt = 1
    """Episodes per group. All begin with the same seed, and are compared with each other."""
    format_penalty: Annotated[float, Field(le=0, allow_inf_nan=False)] = 0.0
    """Added to the reward of each turn with an invalid action, whose metric `valid` is 0."""
    num_groups_partition: list[PositiveInt] | None = None
    """Share of each tag in `num_env_groups`, and so in a batch. Default: equal shares."""

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        if len(set(self.tags)) < len(self.tags):
            raise ValueError(f"tags names a tag twice: {self.tags}; shares are those of num_groups_partition")
        shares = self.num_groups_partition
        if shares is None:
            return self
        if self.tags and len(shares) != len(self.tags):
            raise ValueError(f"num_groups_partition has {len(shares)} numbers, expected one for each of {self.tags}")
        if sum(shares) != self.num_env_groups:
            raise ValueError(
                f"num_groups_partition adds up to {sum(shares)}, expected num_env_groups {self.num_env_groups}"
            )
        return self


class ValEnvManagerConfig(EnvManagerConfig):
    """`val_env_manager`: the episodes of an evaluation. Their seeds are the same in every evaluation."""

    generating_args: GeneratingArguments = GeneratingArguments()
    """Sampling parameters of the evaluation, independent of the rollouts'."""


class AgentEndpointConfig(Config):
    """`agent_endpoint`: where agents reach the policy."""

    host: str = "127.0.0.1"
    """Address to listen on. The default admits only processes of this machine."""
    port: NonNegativeInt = 0
    """Port to listen on. 0: a free one."""
    url: str = ""
    """Base URL for agents on other hosts or in containers, ending with `/v1`. Default: host and port."""

    @model_validator(mode="after")
    def _url_ends_with_v1(self) -> Self:
        if self.url and not (self.url.startswith(("http://", "https://")) and self.url.endswith("/v1")):
            raise ValueError(f"url is {self.url!r}, expected http://HOST:PORT/v1")
        if self.host in ("0.0.0.0", "::") and not self.url:
            raise ValueError(f"host {self.host} is no address that agents can use: set url as well")
        return self


class CommandConfig(Config):
    """Options of the agent `command`."""

    command: list[str] = Field(min_length=1)
    """Program and arguments. Its standard input is the task as JSON, its standard output the reply.

    The environment variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`, `ANTHROPIC_BASE_URL`,
    `ANTHROPIC_API_KEY` and `ANTHROPIC_MODEL` describe the endpoint.
    """
    directory: str | None = None
    """Working directory. Default: the driver's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables in addition to the driver's."""


class EpisodeConfig(RewardKeys, RunConfig):
    """Keys of pipelines whose rollouts are episodes. Base of their schemas."""

    multi_turn: ClassVar[bool] = True
    chat_role: ClassVar[str]
    """Role whose `data_args` describe how conversations become tokens."""

    custom_envs: dict[str, AgenticEnvConfig]
    """Config of each environment, by tag."""
    val_env_manager: ValEnvManagerConfig | None = None
    """Episodes of an evaluation. Default: no evaluation."""
    val_batch_size: PositiveInt = 128
    """Episodes per evaluation, a multiple of `val_env_manager.group_size`. Each tag has at least one group."""
    max_actions_per_traj: PositiveInt = 10
    """Maximum number of turns of an episode. An episode that reaches it is truncated."""
    max_tokens_per_step: PositiveInt | None = None
    """Maximum number of tokens of a reply. Default: `response_length`.

    An episode has at most `prompt_length` + `response_length` tokens, including the environment's messages.
    """
    agent_endpoint: AgentEndpointConfig = AgentEndpointConfig()
    """Where agents reach the policy."""
    tool_format: Literal["auto"] | ToolFormat = "auto"
    """How replies write tool calls. `auto`: as the tokenizer's chat template describes them to the model."""
    thinking: Literal["template", "keep", "strip"] = "template"
    """Reasoning of earlier replies in later prompts: what the chat template keeps, all, or nothing.

    Where reasoning is removed, the episode continues in another training row, which `rollout/forks` counts.
    """
    max_tokens_per_traj: PositiveInt | None = None
    """Maximum number of sampled tokens of an episode. An episode that reaches it is truncated. Default: no limit."""
    max_consecutive_failures: PositiveInt = 32
    """Number of episodes in a row that may fail after their last attempt. One more ends the run."""

    @model_validator(mode="after")
    def _episodes_are_scored(self) -> Self:
        if self.roles()[self.chat_role].data_args.file_name:
            raise ValueError(f"{self.chat_role}.data_args.file_name has no effect: environments create the prompts")
        if self.rewards and not self.scored_by_rewards:
            raise ValueError(f"rewards has no effect in pipeline {self.pipeline}: environments score their episodes")
        tags = set(self.rewards) | {tag for reward in self.rewards.values() for tag in reward.tag_included}
        if len(self.rewards) > 1 and (missing := [tag for tag in self.scored_by_rewards if tag not in tags]):
            raise ValueError(f"no entry of rewards scores custom_envs.{missing[0]}: set rewards.<domain>.tag_included")
        agents = [tag for tag, entry in self.custom_envs.items() if entry.agent]
        if agents and any(manager.format_penalty for manager, _ in self.managers().values()):
            raise ValueError(
                f"format_penalty has no effect on custom_envs.{agents[0]}: its agent composes the messages itself"
            )
        if not self.custom_envs:
            raise ValueError("custom_envs is empty: configure at least one environment")
        return self

    def managers(self) -> dict[str, tuple[EnvManagerConfig, str]]:
        """Managers of episodes by their key, each with the key of its number of episodes."""
        return {} if self.val_env_manager is None else {"val_env_manager": (self.val_env_manager, "val_batch_size")}

    def check_managers(self) -> None:
        """Raise `ValueError` if a number of episodes is no multiple of the group size, or a tag is unknown."""
        for key, (manager, size_key) in self.managers().items():
            size = getattr(self, size_key)
            if size % manager.group_size:
                raise ValueError(f"{size_key} {size} is not a multiple of {key}.group_size {manager.group_size}")
            missing = [tag for tag in manager.tags if tag not in self.custom_envs]
            if missing:
                raise ValueError(
                    f"{key}.tags names {missing[0]!r}, expected keys of custom_envs: {list(self.custom_envs)}"
                )
            if not manager.tags and len(manager.num_groups_partition or self.custom_envs) != len(self.custom_envs):
                raise ValueError(f"{key}.num_groups_partition needs one number for each of custom_envs")

    @override
    def file_problems(self) -> Mapping[str, str]:
        """Checks the interpreters of environments, and your own classes in them. Named environments are checked when
        the run starts."""
        from roll_pipeline_agentic.environment_process import CallFailed, describe

        problems = dict(super().file_problems())
        for tag, entry in self.custom_envs.items():
            key = f"custom_envs.{tag}.python"
            if entry.python and shutil.which(entry.python) is None:
                problems[key] = (
                    f"{entry.python!r} is not a program, expected a Python interpreter such as venv/bin/python"
                )
            elif entry.python and ":" in entry.environment:
                try:
                    describe(entry.python, entry.environment, json.dumps(entry.env_config, default=str))
                except CallFailed as error:
                    problems[key] = str(error)
        return problems

    @classmethod
    @override
    def tool_problems(cls, values: Mapping[Any, Any]) -> Mapping[str, str]:
        policy, tokenizer = _keys_of(values, cls.chat_role), values.get("tokenizer")
        data, model = _keys_of(policy, "data_args"), _keys_of(policy, "model_args")
        if data.get("template", "native") != "native":
            return {f"{cls.chat_role}.data_args.template": f"{data['template']!r} cannot describe them to the model"}
        if isinstance(tokenizer, dict):
            key, source = "tokenizer", tokenizer.get("chat_template")
        elif model.get("model_name_or_path") is not None:
            key, source = f"{cls.chat_role}.model_args.model_name_or_path", model["model_name_or_path"]
        else:
            key, source = "pretrain", values.get("pretrain")
        if key != "tokenizer" and source is None:
            return {}
        if isinstance(source, str) and not os.path.exists(os.path.expanduser(source)):
            return {}  # of the Hub, or written by an earlier run, or reported as missing
        template = stored_chat_template(Path(source).expanduser()) if isinstance(source, str) else ""
        if key != "tokenizer" and not template and not has_tokenizer(os.path.expanduser(str(source))):
            return {}  # only a config.json, for a plan; a run reports the missing tokenizer
        if "tools" not in template:
            return {key: "its chat template describes none" if template else "it has no chat template"}
        if values.get("tool_format", "auto") == "auto" and tool_format_of(template) == "none":
            return {key: "its chat template describes calls in a format that no parser reads, and tool_format is auto"}
        return {}

    @property
    def has_message_loss(self) -> bool:
        """True if there is a loss for the environments' messages."""
        return False

    @property
    def reply_tokens(self) -> int:
        """Maximum number of tokens of a reply, unless an environment or `max_tokens_per_step` sets another."""
        raise NotImplementedError

    @property
    def scored_by_rewards(self) -> list[str]:
        """Tags whose rollouts `rewards` score, if there are any: agents without an environment."""
        return [tag for tag, entry in self.custom_envs.items() if not entry.environment]

    def shares(self, manager: EnvManagerConfig) -> dict[str, float]:
        """Share of each tag in a batch."""
        tags = manager.tags or list(self.custom_envs)
        shares = manager.num_groups_partition or [1] * len(tags)
        return {tag: float(share) for tag, share in zip(tags, shares, strict=True)}

    def max_turns(self, tag: str) -> int:
        """Maximum number of turns of a tag's episodes."""
        return self.custom_envs[tag].max_steps or self.max_actions_per_traj

    def max_reply_tokens(self, tag: str) -> int:
        """Maximum number of tokens of a reply in a tag's episodes."""
        return self.custom_envs[tag].max_tokens_per_step or self.max_tokens_per_step or self.reply_tokens


class AgenticConfig(EpisodeConfig, PolicyConfig):
    """`pipeline: agentic`: reinforcement learning in multi-turn environments."""

    chat_role: ClassVar[str] = "actor_train"
    group_size_key: ClassVar[str] = "train_env_manager.group_size"
    unread: ClassVar[Mapping[str, str]] = {
        **PolicyConfig.unread,
        "num_return_sequences_in_group": "set train_env_manager.group_size",
        "validation": "set val_env_manager",
        "soft_overlong_penalty": "set the limits of turns and tokens",
        "error_max_len_clip": "set max_len_mask",
    }

    max_steps: PositiveInt = 500  # that of `RunConfig`, by `EpisodeConfig`, would come before that of `BatchKeys`
    """Pipeline steps: one batch of rollouts each."""
    train_env_manager: EnvManagerConfig = EnvManagerConfig()
    """Episodes of a step."""
    rollout_batch_size: PositiveInt = 128
    """Episodes per step, a multiple of `train_env_manager.group_size`."""
    echo_coef: NonNegativeFloat = 0.0
    """Weight of the cross-entropy of the environments' messages, which is added to the loss. 0 disables it.

    It trains on messages after the first turn's, averaged over their tokens. Templates' markers do not count.
    """

    @model_validator(mode="after")
    def _messages_are_of_environments(self) -> Self:
        agents = [tag for tag, entry in self.custom_envs.items() if entry.agent]
        if agents and self.echo_coef:
            raise ValueError(
                f"echo_coef has no effect on custom_envs.{agents[0]}: its agent composes the messages itself"
            )
        return self

    @override
    def managers(self) -> dict[str, tuple[EnvManagerConfig, str]]:
        return {"train_env_manager": (self.train_env_manager, "rollout_batch_size")} | super().managers()

    @override
    def check_batches(self) -> None:
        """Check whole groups first: of other batches, the number of episodes has no meaning."""
        self.check_managers()
        super().check_batches()

    @property
    @override
    def has_message_loss(self) -> bool:
        return bool(self.echo_coef)

    @property
    @override
    def reply_tokens(self) -> int:
        return self.max_new_tokens

    @property
    @override
    def num_groups(self) -> int:
        return self.rollout_batch_size // self.train_env_manager.group_size

    @property
    @override
    def group_size(self) -> int:
        return self.train_env_manager.group_size

    @property
    @override
    def batch_arithmetic(self) -> str:
        return f"rollout_batch_size {self.rollout_batch_size} episodes"


class EvaluateEpisodesConfig(EvaluationConfig, EpisodeConfig):
    """`pipeline: evaluate_agentic`: scores of a model in environments, without training it."""

    chat_role: ClassVar[str] = "actor_infer"
    terms_of: ClassVar[frozenset[str]] = EvaluationConfig.terms_of | EpisodeConfig.model_fields.keys() - {
        *RunConfig.model_fields,
        *("agent_endpoint", "max_consecutive_failures"),
    }

    val_env_manager: ValEnvManagerConfig
    """Episodes of the evaluation. Those of `num_env_groups` groups are a step."""

    @property
    @override
    def outputs(self) -> int:
        return self.val_env_manager.num_env_groups * self.val_env_manager.group_size

    @property
    @override
    def reply_tokens(self) -> int:
        return self.val_env_manager.generating_args.max_new_tokens or self.response_length

    @model_validator(mode="after")
    def _groups_are_whole(self) -> Self:
        self.check_managers()
        return self


INSTALL = {"lm_eval": "lm-eval[api]", "inspect_ai": "inspect-ai openai"}
"""Distributions of the harnesses."""
MODULES = {"lm_eval": ("lm_eval", "aiohttp", "tenacity"), "inspect_ai": ("inspect_ai", "openai")}
"""Modules that a harness needs to call the endpoint."""


def missing_harness(python: str, harness: str) -> str:
    """Why an interpreter cannot run a harness; empty if it can."""
    if shutil.which(python) is None:
        return f"{python!r} is not a program, expected a Python interpreter such as venv/bin/python"
    modules = ", ".join(map(repr, MODULES[harness]))
    code = f"import importlib.util as u; print(*[m for m in ({modules},) if u.find_spec(m) is None])"
    import subprocess

    completed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    missing = completed.stdout.split() if not completed.returncode else [completed.stderr.strip()[-500:]]
    if not missing:
        return ""
    install = install_command(*INSTALL[harness].split())
    return f"{python} lacks {', '.join(missing)}: run {install} in its environment, or name another harness_python"


class EvaluateHarnessConfig(EvaluationConfig):
    """`pipeline: evaluate_harness`: scores of a model by the tasks of an evaluation harness, which calls the engine."""

    terms_of: ClassVar[frozenset[str]] = EvaluationConfig.terms_of | {"harness", "tasks", "harness_args", "harness_api"}

    harness: Literal["lm_eval", "inspect_ai"]
    """Harness: lm-evaluation-harness (`lm_eval`) or Inspect (`inspect_ai`). It runs in a process of its own."""
    tasks: list[str] = Field(min_length=1)
    """Tasks, one after the other. `lm_eval`: names, or YAML files. `inspect_ai`: files with tasks, `FILE@TASK`, or
    names of registered tasks."""
    harness_python: str = ""
    """Python interpreter of an environment with the harness. Default: that of this run."""
    harness_args: list[str] = Field(default_factory=list)
    """Further words for the harness's command, for example `[--limit, '100']`."""
    harness_api: Annotated[
        Literal["auto", "chat", "completions"], Needs("harness", frozenset({"lm_eval"}), strict=True)
    ] = "auto"
    """API that lm-evaluation-harness calls. `chat`: chats in the model's template, for tasks that generate.
    `completions`: text without a template, and logprobs of given answers, for tasks of multiple choice. `auto`: `chat`,
    then `completions` if the task needs logprobs."""
    max_connections: PositiveInt = 64
    """Requests of the harness at the same time."""
    agent_endpoint: AgentEndpointConfig = AgentEndpointConfig()
    """Where the harness reaches the engine."""

    @property
    @override
    def outputs(self) -> int:
        return self.max_connections

    @property
    def python(self) -> str:
        """Interpreter of the harness."""
        return os.path.expanduser(self.harness_python) or sys.executable

    @override
    def capabilities(self) -> Mapping[str, tuple[str, ...]]:
        needs = ("prompt_logprobs", "prompt_topk") if self.harness_api == "completions" else ()
        return {"actor_infer": needs}

    @override
    def file_problems(self) -> Mapping[str, str]:
        """Checks that the interpreter has the harness."""
        problem = missing_harness(self.python, self.harness)
        return {"harness_python" if self.harness_python else "harness": problem} if problem else {}


def _keys_of(values: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    """The block `name` as written; empty if it is none."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}


class StepReinforceOptions(AdvantageOptions):
    """Options (`adv_options`) of `step_reinforce`."""

    step_reward_gamma: Fraction = 0.95
    """Discount factor per turn."""
    method: Literal["identity", "mean", "mean_std"] = "identity"
    """Normalisation of the turns' returns: none, less their mean, or also over their deviation."""
    grouping: Literal["batch", "group", "state"] = "group"
    """Turns that are compared: of the batch, of the prompt's rollouts, or of those from the same state."""


class GiGPOOptions(AdvantageOptions):
    """Options (`adv_options`) of `gigpo`."""

    episode_reward_weight: NonNegativeFloat = 1.0
    """Weight of the rollout's advantage in its group."""
    step_reward_weight: NonNegativeFloat = 1.0
    """Weight of the turn's advantage among turns from the same state."""
    step_reward_gamma: Fraction = 0.95
    """Discount factor per turn."""
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    """Subtract the mean, or also divide by the standard deviation."""
