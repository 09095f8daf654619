"""Schemas of roles: workers of models, rewards and environments. With ROLL's names."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations of class variables
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from roll_core.field_docs import document_fields
from roll_core.spec.config.arguments import (
    DataArguments,
    FilterArguments,
    GeneratingArguments,
    ModelArguments,
    StrategyArguments,
    TrainingArguments,
    template_variables,
)
from roll_core.spec.config.base import (
    Config,
    EnvVars,
    FiniteFloat,
    Needs,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    WeightFormat,
)
from roll_core.spec.devices import parse_device_mapping
from roll_core.spec.platform import RoleKind  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from collections.abc import Collection

    from roll_core.types import SamplingParams


class EnvironmentConfig(Config):
    """`environment`: the Python environment of a role's workers. `environment: PATH` is short for `environment.python:
    PATH`."""

    python: str | None = None
    """Python interpreter, or the folder of a virtual environment. With `packages`: the interpreter, or its version such
    as `3.12`, for the new environment. Default: the driver's."""
    packages: list[str] = []
    """Packages that uv installs into a new environment: requirements, paths, `-e PATH`. The environment is cached by
    the digest of this list. roll-core and the plugin of the role's strategy are added automatically, in the driver's
    versions."""
    exclude: list[str] = []
    """Distributions to exclude even if `packages` require them."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"python": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _names_something(self) -> EnvironmentConfig:
        if not self.packages and not self.python:
            raise ValueError("needs python (an interpreter or the folder of a virtual environment) or packages")
        if self.exclude and not self.packages:
            raise ValueError("exclude has no effect without packages")
        return self


class WorkerConfig(Config):
    """One role: its model, its strategy and its slots. Schemas use the subclass for the role's kind."""

    kind: ClassVar[RoleKind]
    """Registry in which `strategy_name` is looked up: train strategies for `train` and `score`, infer strategies for
    `generate`, none for `reward`."""

    model_args: ModelArguments = ModelArguments()
    training_args: TrainingArguments = TrainingArguments()
    data_args: DataArguments = DataArguments()
    generating_args: GeneratingArguments = GeneratingArguments()
    strategy_args: StrategyArguments | None = None
    device_mapping: tuple[int, ...] | None = None
    """Slots: a list, or an expression such as `list(range(0,8))`. None for CPU roles, which set `world_size`
    instead."""
    num_gpus_per_worker: PositiveInt | None = None
    """Slots per worker. Default: determined by the strategy, otherwise 1."""
    world_size: PositiveInt | None = None
    """Number of workers of a role without `device_mapping`. Default: 1."""
    ranks_per_replica: PositiveInt | None = None
    """Ranks that share one replica of a trained or scored model. Default: determined by the strategy, otherwise 1. The
    data-parallel size is the number of ranks divided by it."""
    weight_format: WeightFormat = "dtype"
    """Weight format of a role that generates: all tensors in `model_args.dtype`, or the layers' matrices in fp8.
    Computed from `strategy_config`."""
    infer_batch_size: PositiveInt = 16
    """Sequences per microbatch if the role only computes logprobs or values."""
    use_dynamic_batching_in_train: bool = False
    """Fill microbatches up to `max_tokens_per_microbatch_in_train` tokens instead of by number of sequences."""
    max_tokens_per_microbatch_in_train: Annotated[PositiveInt | None, Needs("use_dynamic_batching_in_train")] = None
    """Maximum number of tokens of a training microbatch."""
    use_dynamic_batching_in_infer: bool = False
    """Fill microbatches up to `max_tokens_per_microbatch_in_infer` tokens instead of by `infer_batch_size`."""
    max_tokens_per_microbatch_in_infer: Annotated[PositiveInt | None, Needs("use_dynamic_batching_in_infer")] = None
    """Maximum number of tokens of a microbatch that is only scored."""
    is_offload_states: bool | None = None
    """Offload this role's states to the host while other roles on the same slots work. Default: the run's
    `is_offload_states`."""
    system_envs: EnvVars = {}
    """Environment variables of this role's workers. They override the pipeline's and the platform's."""
    environment: EnvironmentConfig | None = None
    """Python environment of this role's workers. Default: the driver's. Requires an executor that supports it, such
    as `ray`."""

    @field_validator("device_mapping", mode="before")
    @classmethod
    def _parse_devices(cls, value: Any) -> Any:
        return None if value is None else parse_device_mapping(value)

    @model_validator(mode="after")
    def _consistent(self) -> WorkerConfig:
        if self.device_mapping is None and self.num_gpus_per_worker is not None:
            raise ValueError("num_gpus_per_worker needs device_mapping, which is missing")
        if self.device_mapping is not None:
            if self.world_size is not None:
                raise ValueError("device_mapping and world_size exclude each other: remove world_size")
            per_worker = self.num_gpus_per_worker or 1
            if len(self.device_mapping) % per_worker:
                raise ValueError(
                    f"device_mapping has {len(self.device_mapping)} slots, expected a multiple of num_gpus_per_worker"
                    f" {per_worker}"
                )
        if self.model_args.trains_adapters and self.kind != "train":
            raise ValueError("model_args.lora_target has no effect: this role is not trained; remove it")
        for phase in ("train", "infer"):
            if getattr(self, f"use_dynamic_batching_in_{phase}") and (
                getattr(self, f"max_tokens_per_microbatch_in_{phase}") is None
            ):
                raise ValueError(f"use_dynamic_batching_in_{phase} needs max_tokens_per_microbatch_in_{phase}")
        return self


class TrainWorkerConfig(WorkerConfig):
    """A role whose model is trained."""

    kind: ClassVar[RoleKind] = "train"
    trains_scores: ClassVar[bool] = False
    """True for a reward model: its checkpoints are those of a sequence classifier."""


class ScoreWorkerConfig(WorkerConfig):
    """A role whose model only computes logprobs, values or scores."""

    kind: ClassVar[RoleKind] = "score"


class InferWorkerConfig(WorkerConfig):
    """A role that generates."""

    kind: ClassVar[RoleKind] = "generate"
    receives_weights: ClassVar[bool] = True
    """False if no role publishes weights to it. It then keeps the weights of its own model, which it cannot offload."""
    scores_sequences: ClassVar[bool] = False
    """True if whole sequences are its prompts. An engine samples one token after a prompt that it only scores."""


class QueryFilterConfig(Config):
    """`rewards.<domain>.query_filter_config`: selects the groups to train on (dynamic sampling)."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """Filter by the mean or the standard deviation of a group's rewards. The next prompt of the domain replaces a
    filtered group."""
    filter_args: FilterArguments = FilterArguments()
    """Thresholds, exclusive."""

    @model_validator(mode="after")
    def _band(self) -> QueryFilterConfig:
        args = self.filter_args
        if self.type == "mean_filter" and not args.threshold_down < args.threshold_up:  # nor if one is NaN
            raise ValueError(
                f"mean_filter keeps means between threshold_down {args.threshold_down:g} and threshold_up"
                f" {args.threshold_up:g}, an empty range"
            )
        return self


class ProcessKeys(Config):
    """Keys of rewards that score in processes of their own."""

    timeout_s: PositiveFloat = 10.0
    """Maximum seconds to score one sample. After that its process is killed and the sample counts as failed."""
    processes: PositiveInt = 8
    """Maximum number of processes per worker, each with the reward loaded. More are started as responses queue up. A
    reward whose provider declares `enforces_timeout` may score without processes."""
    start_timeout_s: PositiveFloat = 300.0
    """Maximum seconds to load the reward in a process."""
    max_retries: NonNegativeInt = 2
    """Retries after scoring a sample failed, on another worker if there are several. After the last retry the sample is
    excluded."""


class RewardConfig(ProcessKeys, WorkerConfig):
    """`rewards.<domain>`: one reward. Schemas of specific rewards subclass this."""

    kind: ClassVar[RoleKind] = "reward"
    zero_or_one: ClassVar[bool] = False
    """True if every value is 0 or 1, before `weight`."""

    reward: str
    """Name of the reward: see `roll-core plugins`."""
    tag_included: list[str] = []
    """Domains (tags) that this reward scores. Default: its own key."""
    weight: FiniteFloat = 1.0
    """Factor by which the value is multiplied."""
    query_filter_config: QueryFilterConfig = QueryFilterConfig()
    """Which of its groups to train on."""

    def columns(self) -> Mapping[str, str]:
        """Columns that each row it scores must have, by the key of this config that names the column."""
        return {}

    def check_row(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Problems in the columns of a row that it scores, by the key of this config that names the column.

        `roll-core check` and `run` call this for the first rows of each file before anything starts.
        """
        return {}

    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        """Problems in user code that scores rows with these columns, by the key of this config that names the code.

        `columns` is None if they are unknown. `roll-core check` and `run` call this before anything starts. Never
        imports the code into this process. Raises `TimeoutError` if checking takes longer than `timeout_s`.
        """
        return {}


class RoleRewardConfig(RewardConfig):
    """A reward that is a role with a model. Base of the schemas of such rewards."""

    group_needs: ClassVar[Mapping[type[Config], tuple[Needs, ...]]] = {
        ProcessKeys: (
            Needs("has_processes", strict=True, remedy="set rpc_timeout, which limits each call of the model"),
        )
    }

    strategy_args: StrategyArguments
    """How the model computes."""

    @property
    def has_processes(self) -> bool:
        """False: the model computes in the role's workers."""
        return False


class EngineRewardConfig(RoleRewardConfig):
    """A reward computed from the replies of a model that generates: a role with an infer strategy.

    A plugin's reward whose schema subclasses this one is a `roll_core.spec.rollout.EngineReward`.
    """

    kind: ClassVar[RoleKind] = "generate"

    strategy_args: StrategyArguments
    """How the model generates: an infer strategy."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(template_variables)] = {}
    """Variables of the model's chat template, for example `enable_thinking: false`."""

    @property
    def num_replies(self) -> int:
        """Replies per sample."""
        return self.generating_args.num_return_sequences

    def sampling_params(self) -> SamplingParams:
        """Sampling parameters of the replies. Their seeds derive from the run's and the sample's id."""
        return self.generating_args.sampling_params(default_max_new_tokens=1024)


class ModelRewardConfig(RoleRewardConfig):
    """`reward: model`: the score of a reward model. The reward is a role with a model, like `reference`.

    A plugin's reward whose schema subclasses this one gets the outputs of such a model, too.
    """

    kind: ClassVar[RoleKind] = "score"

    strategy_args: StrategyArguments
    """How the model computes: a train strategy, or its forward-only `_infer` variant."""
    input: Literal["auto", "tokens", "text"] = "auto"
    """`tokens`: the token ids of prompt and response, as sampled. `text`: the prompt's messages and the response's
    text, in the chat template and the tokens of the reward model's own tokenizer. `auto`: `tokens` if both tokenizers
    have the same vocabulary and chat template, or the reward model has no tokenizer; otherwise `text`."""

    @model_validator(mode="after")
    def _is_a_model(self) -> ModelRewardConfig:
        if self.model_args.model_name_or_path is None and self.model_args.random_init is None:
            raise ValueError("model_args names no model: set model_name_or_path to a reward model")
        if self.input == "text" and self.model_args.random_init is not None:
            raise ValueError("input is text, but random_init has no tokenizer of its own: set input: tokens")
        return self


Rewards = dict[str, SerializeAsAny[RewardConfig]]
"""Reward configs by domain. They are saved with the keys of their own schemas."""


class CustomEnvConfig(Config):
    """`custom_envs.<tag>`: an environment or an agent, and its options. Base of the schemas of such entries."""

    environment: str = ""
    """Name of the environment: see `roll-core plugins`. Or your own class, `module:Class`."""
    env_config: dict[str, Any] = {}
    """Options of the environment. Each environment has its own; those of your own class are its parameters."""
    python: str = ""
    """Interpreter that runs the environment, for example of a virtual environment of its own. Default: the driver's."""
    agent: str = ""
    """Name of an agent, which calls the policy at an endpoint. Or your own function or class, `module:function`.

    With an environment as well, the agent writes the replies to its messages.
    """
    agent_config: dict[str, Any] = {}
    """Options of the agent: those of the function are its parameters after `task` and `session`."""

    @model_validator(mode="before")
    @classmethod
    def _accept_env_type(cls, value: Any) -> Any:
        """ROLL calls the key `env_type`."""
        if isinstance(value, dict) and "env_type" in value and "environment" not in value:
            return {("environment" if key == "env_type" else key): entry for key, entry in value.items()}
        return value

    @model_validator(mode="after")
    def _environment_or_agent(self) -> CustomEnvConfig:
        if not self.environment and not self.agent:
            raise ValueError("neither environment nor agent is given: name an environment, an agent, or both")
        for part, options in (("environment", "env_config"), ("agent", "agent_config")):
            if getattr(self, options) and not getattr(self, part):
                raise ValueError(f"{options} has no effect without {part}")
        return self


class ValidationConfig(Config):
    """`validation`: held-out prompts. Every `eval_steps` steps, responses to them are generated and scored."""

    data_args: DataArguments
    generating_args: GeneratingArguments = GeneratingArguments()
    """Sampling parameters of the evaluation, independent of the rollouts'."""


document_fields(__name__)
