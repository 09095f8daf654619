"""The configuration schema that all pipelines share, in the vocabulary of ROLL's users.

A pipeline's own schema subclasses `RunConfig`; a strategy's subclasses `StrategyConfig`; a reward's `RewardConfig`.
All are frozen
and refuse unknown keys. Validation has no side effects: what a value means for the machine is decided when a run
starts.
Cross-field rules belong into `model_validator`s that raise `ValueError` with the arithmetic spelled out.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from roll_core.spec.devices import parse_device_mapping
from roll_core.spec.platform import EnvVar, RoleKind  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from roll_core.spec.providers import ModelParallelism, Provider
    from roll_core.types import SamplingParams

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["fp32", "bf16", "fp16"]
WeightFormat = Literal["dtype", "fp8"]
"""In which an engine takes weights: in its `model_args.dtype`; or with the matrices of layers in 8 bits, E4M3 with a
scale per row, and everything else in that dtype."""


def _numbers_as_text(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        name: str(each) if isinstance(each, (int, float)) and not isinstance(each, bool) else each
        for name, each in value.items()
    }


EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.()-]*$")]
EnvValue = Annotated[str, Field(pattern=r"^[^\x00]*$")]
EnvVars = Annotated[dict[EnvName, EnvValue], BeforeValidator(_numbers_as_text)]
"""Environment variables; a number is taken for its text."""
Seed = Annotated[int, Field(ge=0, lt=2**64)]
MAX_NAME_BYTES = 255
"""Of a directory, on file systems of today."""


class Config(BaseModel):
    """Base of every schema: frozen, unknown keys refused, no silent conversion of strings to numbers."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        validate_default=True,
    )


NAMES = re.compile(r"[\w.\s,-]*")
"""Names of modules, separated by commas; a text with other characters is a regular expression."""
LORA_KEYS = ("lora_rank", "lora_alpha", "lora_dropout", "additional_target", "lora_export")
"""Keys that mean something only beside `lora_target`."""


def _names(value: str | list[str] | None) -> tuple[str, ...]:
    listed = value.split(",") if isinstance(value, str) else value or ()
    return tuple(each.strip() for each in listed if each.strip())


class StrategyConfig(Config):
    """Base of the schemas that strategies bring for `strategy_args.strategy_config`."""

    def slots_per_worker(self) -> int | None:
        """Slots that one worker takes, where the configuration decides it (tensor × pipeline parallel); else None."""
        return None

    def serves_adapters(self) -> bool:
        """Of an infer strategy: whether it takes trained adapters as they are, not merged into the weights."""
        return False

    def weight_format(self) -> WeightFormat:
        """Of an infer strategy: in which it takes weights. Those in 8 bits come as `roll_core.weights.eight_bits` has
        them, and receipts are of these very tensors."""
        return "dtype"

    def worker_environment(self) -> tuple[EnvVar, ...]:
        """Variables for its workers, besides the platform's and above them. What the driver's environment says is
        handed on instead, unless they are required; `system_envs` win over both."""
        return ()

    def parallel_sizes(self) -> Mapping[ModelParallelism, int]:
        """Of a train strategy: ranks over which each kind of model parallelism spreads a replica, as configured:
        `{"tensor_parallel": 2}`. `check` refuses a size above 1 of a kind that the provider does not declare."""
        return {}

    def ranks_per_replica(self) -> int:
        """Of a train strategy: ranks over which it spreads one replica of the model, a divisor of the role's. The
        product of `parallel_sizes`, without that of experts: these are spread over the same ranks."""
        return prod(size for kind, size in self.parallel_sizes().items() if kind != "expert_parallel")

    def replica_arithmetic(self) -> str:
        """The product that `ranks_per_replica` is, spelled out by keys, for error messages."""
        return str(self.ranks_per_replica())

    def check_model(self, keys: Mapping[str, Any]) -> None:
        """Raises `ValueError`, with the arithmetic where there is some, for a model that cannot be spread or computed
        as configured. `keys` are those of its transformers config that are known before anything is loaded."""

    def check_architecture(self, keys: Mapping[str, Any]) -> None:
        """Raises `ValueError` for a model whose architecture the installed packages do not support; `keys` as for
        `check_model`. Not called for a role with an `environment` of its own, nor by `check --no-files`. Reads files
        rather than importing these packages: `roll_modeling.architectures` helps."""

    def check_lengths(self, prompt: int, response: int) -> None:
        """Of an infer strategy: raises `ValueError`, with the arithmetic, for a prompt and a response that are together
        longer than its sequences may be. Both are numbers of tokens."""

    def check_model_args(self, given: Mapping[str, Any]) -> None:
        """Of a train strategy: raises `ValueError` for keys that mean nothing beside the role's `model_args`, as these
        are written."""

    def check_router_replay(self, keys: Mapping[str, Any]) -> None:
        """Of a strategy that returns or replays the experts of a model: raises `ValueError`, with what is needed, for a
        model with which it cannot. `keys` as for `check_model`, empty where nothing is known."""


class ModelArguments(Config):
    """`model_args`: which model a role has, and how it is computed."""

    model_name_or_path: str | None = None
    """Directory or hub id; the pipeline's `pretrain` if neither this nor `random_init` is given."""
    random_init: dict[str, Any] | None = None
    """A model with random weights instead: keys of a transformers config, `model_type` among them."""
    model_config_kwargs: dict[str, Any] = {}
    """Keys set on the loaded model's config."""
    dtype: Dtype = "bf16"
    """Of the computation."""
    attn_implementation: str = "auto"
    """`auto` takes what is fastest and exact here; or a name that transformers knows."""
    disable_gradient_checkpointing: bool = False
    """Keep all activations: faster, more memory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora_target: str | list[str] | None = None
    """Train low-rank adapters on these linear layers instead of the model's own weights: names, `all-linear`, or a
    regular expression for whole paths."""
    lora_rank: NonNegativeInt | None = 8
    """Rank of the adapters; 0 trains the whole model whatever `lora_target` says."""
    lora_alpha: PositiveFloat | None = None
    """Adapters act with weight `lora_alpha / lora_rank`; twice `lora_rank` where not given."""
    lora_dropout: Fraction = 0.0
    """Must be 0: dropout is off in training, so that logprobs before an update and in it come from one function."""
    additional_target: str | list[str] | None = None
    """Modules that are trained in full beside the adapters; value and reward heads always are."""
    lora_export: Literal["merged", "adapter"] = "merged"
    """`export/` holds a whole model with the adapters merged, or the adapters alone as peft loads them."""

    @property
    def trains_adapters(self) -> bool:
        """Whether LoRA is on."""
        return self.lora_target is not None and bool(self.lora_rank)

    def lora_targets(self) -> str | tuple[str, ...]:
        """Names, or a regular expression for whole paths."""
        if isinstance(self.lora_target, str) and not NAMES.fullmatch(self.lora_target):
            return self.lora_target
        return _names(self.lora_target)

    def extra_modules(self) -> tuple[str, ...]:
        """Names of `additional_target`."""
        return _names(self.additional_target)

    @model_validator(mode="after")
    def _adapters_make_sense(self) -> ModelArguments:
        if self.lora_target is None:
            # A saved config has every key, so only values that are not the defaults tell that somebody wants adapters.
            beside = [key for key in LORA_KEYS if getattr(self, key) != type(self).model_fields[key].default]
            if beside and self.lora_rank:
                raise ValueError(f"{beside[0]} would not be used: LoRA is on where lora_target names modules")
            return self
        targets = self.lora_targets()
        if not targets:
            raise ValueError("lora_target names no module: give names, or all-linear for every linear layer")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"lora_target is neither names nor a regular expression: {error}") from error
        elif "all-linear" in targets and len(targets) > 1:
            raise ValueError("lora_target: all-linear takes every linear layer; name it alone")
        if self.lora_dropout:
            raise ValueError(
                f"lora_dropout {self.lora_dropout:g} cannot be honoured: dropout is off in training, so that logprobs"
                " before an update and in it come from the same function; leave it out (weight_decay also regularises)"
            )
        if self.lora_export == "adapter" and self.random_init is not None:
            raise ValueError("lora_export: adapter needs a base model that others have, and random_init is none")
        return self

    @model_validator(mode="after")
    def _one_source(self) -> ModelArguments:
        if self.model_name_or_path is not None and self.random_init is not None:
            raise ValueError("model_name_or_path and random_init exclude each other: give one of them")
        if self.random_init is not None and "model_type" not in self.random_init:
            raise ValueError("random_init needs a model_type, for example qwen3")
        return self


class TrainingArguments(Config):
    """`training_args`: the optimizer's settings."""

    learning_rate: NonNegativeFloat = 5e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr", "polynomial", "inverse_sqrt"
    ] = "linear"
    """Schedule after warm-up, as transformers names it."""
    lr_scheduler_kwargs: dict[str, float] = {}
    """Further arguments of the schedule, for example `min_lr_rate`."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's; not applied to biases and norms."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the denominator."""
    per_device_train_batch_size: PositiveInt = 8
    """Sequences of one microbatch on one data-parallel rank."""
    gradient_accumulation_steps: PositiveInt = 1
    """Microbatches of one optimizer step."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises from 0, as in transformers' schedules: the first of them
    changes no weight. Wins over `warmup_ratio`."""
    warmup_ratio: Fraction = 0.0
    """Warm-up as a share of all optimizer steps."""
    num_train_epochs: PositiveFloat = 1.0
    """Passes over the data; only pipelines that pass over data use it, and only if `max_steps` is not given."""


class DataArguments(Config):
    """`data_args`: where rows come from and what their columns mean."""

    file_name: str | list[str] | None = None
    """A file or a list of files with one row per line or record. Names are literal, and relative to the working
    directory."""
    dataset_type: Literal["auto", "json", "parquet", "csv", "arrow"] = "auto"
    """`auto` goes by the file's ending."""
    prompt: str = "prompt"
    """Column with the prompt's text."""
    response: str = "response"
    """Column with the response's text (sft)."""
    messages: str | None = None
    """Column with a list of chat messages (or its JSON) instead of prompt and response."""
    system: str | None = None
    """Column with a system message."""
    tag: str = "tag"
    """Column with the domain."""
    id: str = "id"
    """Column with the row's id; the row's number where it is missing."""
    template: str = "native"
    """Chat template: `native` is the tokenizer's own (without one, prompts stay as they are and chats are an error),
    else a name from the docs. A named template is exported with the tokenizer."""
    domain_interleave_probs: dict[str, NonNegativeFloat] = {}
    """Share of each domain in a batch, by tag or by the entry of `rewards` that judges its tags; equal to their shares
    in the data where empty."""
    max_samples: PositiveInt | None = None
    """Take only the first rows."""


class GeneratingArguments(Config):
    """`generating_args`: how responses are drawn. Nothing is truncated unless you say so."""

    temperature: NonNegativeFloat = 1.0
    """0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens whose probability reaches it."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Most likely tokens kept; 0 and -1 keep all."""
    min_p: Fraction = 0.0
    """Tokens at least this many times as likely as the most likely one."""
    repetition_penalty: PositiveFloat = 1.0
    """1 is none."""
    max_new_tokens: PositiveInt | None = None
    """`response_length` where it is not given."""
    min_new_tokens: NonNegativeInt = 0
    """No end before so many tokens."""
    num_return_sequences: PositiveInt = 1
    """Responses per prompt; in rollouts `num_return_sequences_in_group` decides."""
    stop_strings: list[str] = []
    """A response ends with the first of these."""
    seed: Seed | None = None
    """For repeatable evaluation, below 2^64; rollouts are seeded by the run."""

    def sampling_params(self, *, default_max_new_tokens: int) -> SamplingParams:
        """The same as a request has it: what `Run.rollout`, `RolloutPlan` and `GenerateRequest` take.
        `default_max_new_tokens`, such as `response_length`, where `max_new_tokens` is not given."""
        from roll_core.types import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=self.max_new_tokens or default_max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=tuple(self.stop_strings),
            seed=self.seed,
        )


class StrategyArguments(Config):
    """`strategy_args`: how a role computes."""

    strategy_name: str
    """A train strategy, its `_infer` twin, or an infer strategy: see `roll-core plugins`."""
    strategy_config: dict[str, Any] = {}
    """The strategy's own keys, validated by the schema that it brings."""

    @field_validator("strategy_config", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value


class EnvironmentConfig(Config):
    """`environment`: the Python environment of a role's workers. `environment: PATH` is short for
    `environment.python: PATH`."""

    python: str | None = None
    """An interpreter, or the folder of a virtual environment; beside `packages` the interpreter, or the version as in
    `3.12`, that the environment is made from: the driver's where not given."""
    packages: list[str] = []
    """What uv installs, once, into an environment that is kept by the digest of this list: requirements, paths, `-e
    PATH`. roll-core and the plugin of the role's strategy come by themselves, as the driver has them."""
    exclude: list[str] = []
    """Distributions that are left out although others among `packages` require them."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"python": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _names_something(self) -> EnvironmentConfig:
        if not self.packages and not self.python:
            raise ValueError("needs python, an interpreter or the folder of a virtual environment, or packages")
        if self.exclude and not self.packages:
            raise ValueError("exclude would not be used: nothing is installed where packages are not given")
        return self


class WorkerConfig(Config):
    """One role: its model, its strategy, and the slots it sits on. Schemas use the subclass of the role's kind."""

    kind: ClassVar[RoleKind]
    """Decides in which registry `strategy_name` is looked up: train strategies for `train` and `score`, infer
    strategies for `generate`, none for `reward`."""

    model_args: ModelArguments = ModelArguments()
    training_args: TrainingArguments = TrainingArguments()
    data_args: DataArguments = DataArguments()
    generating_args: GeneratingArguments = GeneratingArguments()
    strategy_args: StrategyArguments | None = None
    device_mapping: tuple[int, ...] | None = None
    """Slots: a list, or an expression such as `list(range(0,8))`. None for CPU roles, which have `world_size`
    instead."""
    num_gpus_per_worker: PositiveInt | None = None
    """Slots per worker; computed where the strategy decides it, 1 where nothing does."""
    world_size: PositiveInt | None = None
    """Number of workers of a role without `device_mapping`; 1 where not given."""
    ranks_per_replica: PositiveInt | None = None
    """Ranks that share one replica of a model that trains or scores; computed where the strategy decides it, 1 where
    nothing does. Data parallel is the number of ranks divided by it."""
    weight_format: WeightFormat = "dtype"
    """In which the engine of a role that generates takes weights: all in `model_args.dtype`, or the matrices of layers
    in 8 bits (`fp8`); computed from `strategy_config`."""
    infer_batch_size: PositiveInt = 16
    """Sequences of one microbatch where the role only computes logprobs or values."""
    use_dynamic_batching_in_train: bool = False
    """Fill microbatches by `max_tokens_per_microbatch_in_train` instead of by number of sequences."""
    max_tokens_per_microbatch_in_train: PositiveInt | None = None
    """Token budget of a microbatch that is trained on."""
    use_dynamic_batching_in_infer: bool = False
    """Fill microbatches by `max_tokens_per_microbatch_in_infer` instead of by `infer_batch_size`."""
    max_tokens_per_microbatch_in_infer: PositiveInt | None = None
    """Token budget of a microbatch that is only scored."""
    is_offload_states: bool | None = None
    """Whether this role moves what it can to the host while others that share its slots work; the run's
    `is_offload_states` where not given."""
    system_envs: EnvVars = {}
    """Environment variables of this role's workers; they win over the pipeline's and the platform's."""
    environment: EnvironmentConfig | None = None
    """The Python environment of this role's workers; the driver's where not given. Needs the executor ray."""

    @field_validator("device_mapping", mode="before")
    @classmethod
    def _parse_devices(cls, value: Any) -> Any:
        return None if value is None else parse_device_mapping(value)

    @model_validator(mode="after")
    def _consistent(self) -> WorkerConfig:
        if self.device_mapping is None and self.num_gpus_per_worker is not None:
            raise ValueError("num_gpus_per_worker is the share of device_mapping that a worker takes, which is missing")
        if self.device_mapping is not None:
            if self.world_size is not None:
                raise ValueError("device_mapping and world_size exclude each other: the first decides the second")
            per_worker = self.num_gpus_per_worker or 1
            if len(self.device_mapping) % per_worker:
                raise ValueError(
                    f"device_mapping has {len(self.device_mapping)} slots, which is not a multiple of"
                    f" num_gpus_per_worker {per_worker}"
                )
        if self.model_args.trains_adapters and self.kind != "train":
            why = (
                "engines get merged weights, which need no adapters"
                if self.kind == "generate"
                else "adapters that are never trained change nothing"
            )
            raise ValueError(f"model_args.lora_target belongs to a role that is trained; leave it out here: {why}")
        for phase in ("train", "infer"):
            if getattr(self, f"use_dynamic_batching_in_{phase}") and (
                getattr(self, f"max_tokens_per_microbatch_in_{phase}") is None
            ):
                raise ValueError(
                    f"use_dynamic_batching_in_{phase} needs max_tokens_per_microbatch_in_{phase}, the token budget"
                )
        return self


class TrainWorkerConfig(WorkerConfig):
    """A role whose model is trained."""

    kind: ClassVar[RoleKind] = "train"


class ScoreWorkerConfig(WorkerConfig):
    """A role whose model only computes logprobs, values or scores."""

    kind: ClassVar[RoleKind] = "score"


class InferWorkerConfig(WorkerConfig):
    """A role that generates."""

    kind: ClassVar[RoleKind] = "generate"


class FilterArguments(Config):
    """`query_filter_config.filter_args`: what a group must be like to be trained on."""

    threshold_down: float = 0.0
    """`mean_filter`: the mean reward must be above this,"""
    threshold_up: float = 1.0
    """and below this."""
    std_threshold: NonNegativeFloat = 0.0
    """`std_filter`: the standard deviation of the rewards must be above this."""


class QueryFilterConfig(Config):
    """`rewards.<domain>.query_filter_config`: which groups are worth training on (dynamic sampling)."""

    type: Literal["no_filter", "mean_filter", "std_filter"] = "no_filter"
    """By the mean or the standard deviation of a group's rewards. A group that is left out is replaced by the next
    prompt of its domain."""
    filter_args: FilterArguments = FilterArguments()
    """Thresholds, exclusive."""

    @model_validator(mode="after")
    def _band(self) -> QueryFilterConfig:
        args = self.filter_args
        if self.type == "mean_filter" and args.threshold_down >= args.threshold_up:
            raise ValueError(
                f"mean_filter keeps means between threshold_down {args.threshold_down:g} and threshold_up"
                f" {args.threshold_up:g}: there are none"
            )
        return self


class RewardConfig(WorkerConfig):
    """`rewards.<domain>`: one judge. Schemas of other rewards subclass this."""

    kind: ClassVar[RoleKind] = "reward"
    zero_or_one: ClassVar[bool] = False
    """True if every value is 0 or 1, before `weight`."""

    reward: str
    """Name of the reward, see `roll-core plugins`."""
    tag_included: list[str] = []
    """Domains (tags) that this entry judges; its own key where empty."""
    weight: float = 1.0
    """Factor on the value."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that scoring one sample may take. After that its process is killed, and the sample is a failure."""
    processes: PositiveInt = 8
    """Processes per worker at most, each with the reward loaded; more are started as responses queue up. A reward whose
    provider declares `enforces_timeout` may do without."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that loading the reward in a process may take."""
    max_retries: NonNegativeInt = 2
    """How often a judgement that failed is tried again, on another worker where there are several. What fails then is
    excluded."""
    query_filter_config: QueryFilterConfig = QueryFilterConfig()
    """Which of its groups are worth training on."""

    def columns(self) -> Mapping[str, str]:
        """Columns that each row it scores must have, by the key of this config that names the column."""
        return {}

    def check_code(self, columns: Collection[str] | None, timeout_s: float) -> Mapping[str, str]:
        """What is wrong with code of the user's that scores rows with these columns (None: unknown), by the key of this
        config that names the code.

        `roll-core check` and `run` call this before anything starts. Never imports the code into this process. Raises
        `TimeoutError` if the answer takes longer than `timeout_s`.
        """
        return {}


Rewards = dict[str, SerializeAsAny[RewardConfig]]
"""Reward configs by domain; saved with the keys of their own schemas."""


class TokenizerConfig(Config):
    """`tokenizer`: one of ours, for models that are made from nothing. Otherwise the model's own is loaded."""

    kind: Literal["char", "byte", "bpe"]
    """One token per character of `alphabet`; per byte; or byte-pair merges trained on the data."""
    alphabet: str | None = None
    """Characters of a `char` tokenizer; those of the training data where not given."""
    vocab_size: Annotated[int, Field(ge=260)] = 1024
    """Size of a `bpe` tokenizer, special tokens included."""


class ValidationConfig(Config):
    """`validation`: held-out prompts that are answered and judged every `eval_steps`."""

    data_args: DataArguments
    generating_args: GeneratingArguments = GeneratingArguments()
    """Sampling of the evaluation, independent of the rollouts'."""


GuardAction = Literal["error", "warn", "off"]


class GuardConfig(Config):
    """`guards.<id>`: what happens when it trips. `guards.<id>: warn` is short for `guards.<id>.action: warn`."""

    action: GuardAction = "error"
    """`error` ends the run, `warn` says so and goes on, `off` looks away."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"action": value}
        if value is False:  # YAML 1.1 reads a bare `off` as false
            return {"action": "off"}
        return value


class WarningGuardConfig(GuardConfig):
    """A guard that only warns unless it is told otherwise."""

    action: GuardAction = "warn"
    """`error` ends the run, `warn` says so and goes on, `off` looks away."""


PROBE_BOUNDS: dict[WeightFormat, float] = {"dtype": 0.05, "fp8": 0.3}
"""Of tokens at random, most of which are unlikely; nats. What was measured is in docs/guards.md."""
GAP_BOUNDS: dict[WeightFormat, float] = {"dtype": 0.05, "fp8": 0.1}
"""Of tokens that were drawn; nats."""


class LogprobProbeConfig(GuardConfig):
    """`guards.logprob_probe`."""

    every: PositiveInt = 10
    """Steps between two probes. The first publish and the first with changed weights are probed as well."""
    threshold: PositiveFloat | None = None
    """Largest mean absolute difference of logprobs in nats; where not given 0.05, and 0.3 for an engine in 8
    bits. bf16 engines differ by about 0.01, fp32 by less than 1e-4."""
    error_threshold: PositiveFloat = 0.5
    """Above it the run ends even if the action is `warn`. The bound of the few sampled tokens. `threshold` if that is
    larger."""

    def bound(self, weight_format: WeightFormat) -> float:
        """The threshold for an engine that takes weights in this."""
        return PROBE_BOUNDS[weight_format] if self.threshold is None else self.threshold

    def error_bound(self, weight_format: WeightFormat) -> float:
        """The threshold that ends the run whatever the action is."""
        return max(self.error_threshold, self.bound(weight_format))


class LogprobGapConfig(WarningGuardConfig):
    """`guards.logprob_gap`."""

    threshold: PositiveFloat | None = None
    """Largest mean absolute difference of logprobs in nats; where not given 0.05, and 0.1 for an engine in 8
    bits."""
    error_threshold: PositiveFloat = 0.3
    """Above it the run ends even if the action is `warn`. `threshold` if that is larger."""

    def bound(self, weight_format: WeightFormat) -> float:
        """The threshold for an engine that takes weights in this."""
        return GAP_BOUNDS[weight_format] if self.threshold is None else self.threshold

    def error_bound(self, weight_format: WeightFormat) -> float:
        """The threshold that ends the run whatever the action is."""
        return max(self.error_threshold, self.bound(weight_format))


class RewardFailuresConfig(GuardConfig):
    """`guards.reward_failures`."""

    threshold: Fraction = 0.2
    """Largest share of the samples judged since the last step whose reward could not be computed, retries included."""


class GuardsConfig(Config):
    """`guards`: what is watched while a run goes on. Pipelines with guards of their own use a subclass."""

    # The docstrings are the guards' meanings at run time. Elsewhere they are for readers: reading them costs start-up.
    model_config = ConfigDict(use_attribute_docstrings=True)

    weights_unchanged: GuardConfig = GuardConfig()
    """Optimizer steps with a gradient were published, but no weight differs from the version before."""
    zero_gradient: WarningGuardConfig = WarningGuardConfig()
    """There were advantages to learn from, but the gradient was exactly zero."""
    weight_manifest: GuardConfig = GuardConfig()
    """A receiver does not hold exactly the tensors that were published to it."""
    logprob_probe: LogprobProbeConfig = LogprobProbeConfig()
    """On fixed probe tokens the engine and the trainer disagree although both should hold the same weights."""
    logprob_gap: LogprobGapConfig = LogprobGapConfig()
    """On the tokens of a rollout the engine and the trainer disagree although both held the same weights."""
    reward_failures: RewardFailuresConfig = RewardFailuresConfig()
    """Too many samples have no reward because judging them failed."""
    non_finite: GuardConfig = GuardConfig()
    """A loss, gradient or logprob is NaN or infinite."""
    zero_steps: GuardConfig = GuardConfig()
    """The run has nothing to do: it asks for no step, or a run from the checkpoint has finished all of them."""
    staleness: GuardConfig = GuardConfig()
    """A group is trained on more steps after it was begun than `async_generation_ratio` allows."""
    token_round_trip: GuardConfig = GuardConfig()
    """The tokens or the mask that go to the trainer are not those that the engine drew."""
    all_groups_filtered: WarningGuardConfig = WarningGuardConfig()
    """No group of a step is left to learn from: all were filtered, failed, or have equal rewards."""
    dead_worker: GuardConfig = GuardConfig()
    """A worker's process is gone or has stopped answering."""


class RouterArguments(Config):
    """`router_args`: how requests are spread over the replicas of an engine."""

    router_name: Literal["least_loaded", "prompt_affinity", "sticky"] = "least_loaded"
    """`least_loaded`: where the fewest outputs run; `prompt_affinity`: where the prompt was before, unless that replica
    is full or far busier than another; `sticky`: there, whatever else."""


class RunConfig(Config):
    """What every run has. A pipeline's schema adds its roles and its algorithm."""

    policy_role: ClassVar[str] = ""
    """The role that is trained on what an engine generates with its weights; empty where there is none."""
    row_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Keys of `data_args` that name a column which every row must have, by the key above `data_args`: `{"sft_train":
    ("prompt", "response")}`. Rows without a response are prompts, which `rewards` score the responses of. `roll-core
    check` looks at no column of other rows."""

    pipeline: str
    """Which pipeline runs: see `roll-core plugins`."""
    exp_name: str = Field(default="roll", pattern=r"^[\w.-]+$")
    """Name of the experiment, at most 255 bytes; runs are written to `<output_dir>/<exp_name>/<number>`."""
    output_dir: str = "./output"
    """Where run directories are made."""
    seed: Seed = 42
    """Of everything that is random; below 2^64."""
    executor: Literal["auto", "local", "ray"] = "auto"
    """`local`: everything in this process; `ray`: actors. `auto` is local where every role has one worker and weights
    can travel within one process."""
    platform: str | None = None
    """Hardware; found by probing where not given."""
    num_gpus_per_node: PositiveInt | None = None
    """Slots per node; what the platform counts on this host where not given."""
    max_steps: PositiveInt | None = None
    """Pipeline steps."""
    save_steps: NonNegativeInt = 50
    """A checkpoint every so many steps, and at the end; 0 writes none."""
    max_ckpt_to_keep: NonNegativeInt = 0
    """Older checkpoints are removed; 0 keeps all."""
    portable_checkpoints: bool = False
    """Checkpoints hold, beside each strategy's own files, the state that all strategies read: to go on under another
    one, or to convert to a model. 12 bytes per trained parameter."""
    eval_steps: NonNegativeInt = 10
    """Validation every so many steps, before the first and after the last; 0 never."""
    logging_steps: PositiveInt = 1
    """Trackers and the console get every so many steps' metrics; `metrics.jsonl` gets all."""
    export_model: bool = True
    """At the end write `export/`, a directory that transformers loads."""
    resume_from_checkpoint: bool | str = False
    """True: the newest good checkpoint of this experiment; `auto`: the same, or from the beginning where there is none;
    or a path to a run or to a checkpoint."""
    preemption_timeout: NonNegativeFloat = 120.0
    """Seconds that SIGTERM leaves the step in progress to end and its checkpoint to be written; 0 ends the run at once,
    as Ctrl-C does."""
    track_with: list[str] = ["tensorboard"]
    """Trackers, besides `metrics.jsonl` which is always written."""
    tracker_kwargs: dict[str, dict[str, Any]] = {}
    """Options by tracker."""
    pretrain: str | None = None
    """Model directory or hub id of every role that names no model of its own."""
    tokenizer: TokenizerConfig | None = None
    """Make a tokenizer; the model's own is loaded where not given."""
    prompt_length: PositiveInt = 1024
    """Longest prompt in tokens; longer rows are left out, and counted."""
    response_length: PositiveInt = 1024
    """Longest response in tokens."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Global 2-norm to which gradients are clipped; 0 does not clip."""
    is_offload_states: bool = True
    """Roles that share slots take turns: those that do not work move weights, gradients and optimizer state to the
    host, and engines sleep. False keeps everything where it is: faster where it all fits."""
    rpc_timeout: PositiveFloat = 3600.0
    """Seconds until a worker that does not answer is an error. What an engine is asked to draw has no deadline: see
    `replica_timeout`."""
    replica_timeout: PositiveFloat = 900.0
    """Seconds in which a replica of an engine that has work draws no token and answers nothing, after which it is given
    up: killed, and replaced as one that died. Of an engine that does not tell what it has drawn the answers alone are
    seen, and they may take `rpc_timeout`."""
    router_args: RouterArguments = RouterArguments()
    """Which replica of an engine a request goes to."""
    max_running_requests: PositiveInt | None = None
    """Responses that one replica of an engine is given at once, each asked for by itself; the others wait, and go where
    there is room first. All at once where not given: the engine queues them."""
    is_num_return_sequences_expand: bool = False
    """Ask for each response of a group by itself. With `router_name: least_loaded` a group then spreads over replicas,
    each of which computes the prompt; with the others it stays on one."""
    model_update_timeout: PositiveFloat = 120.0
    """Seconds within which every engine must have proved that it holds the published weights."""
    model_update_buffer_size_mb: PositiveInt = 1024
    """Largest bucket in which weights travel."""
    model_update_dir: str | None = None
    """Weights travel as files in this folder, or below this URL (`s3://…`, whatever fsspec reads), which trainer and
    engines reach: the transport `disk`, for hosts between which no connection can be made."""
    weight_transport: str | None = None
    """Weight transport between trainer and engines, `shm`. Without it the available one with the highest priority."""
    system_envs: EnvVars = {}
    """Environment variables of every role's workers."""
    guards: GuardsConfig = GuardsConfig()
    """What happens when a run goes wrong without failing, by id of the guard."""
    deterministic: bool = True
    """Ask the libraries for repeatable kernels, so that a resumed run equals an uninterrupted one bit for bit."""

    @field_validator("exp_name")
    @classmethod
    def _names_a_directory(cls, value: str) -> str:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > MAX_NAME_BYTES:
            raise ValueError(f"names a directory, and has {size} bytes: at most {MAX_NAME_BYTES} are possible")
        if not value.strip("."):
            raise ValueError(f"names a directory, and {value} is one that exists already: add a letter")
        return value

    @field_validator("track_with", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_process_has_one_environment(self) -> RunConfig:
        foreign = [name for name, role in self.roles().items() if role.environment is not None]
        if self.executor == "local" and foreign:
            raise ValueError(
                f"executor: local keeps every worker in this process, but {', '.join(foreign)} has a Python environment"
                " of its own: leave executor out"
            )
        return self

    @property
    def replays_experts(self) -> bool:
        """Whether the routers of `policy_role` repeat, in training, what they chose in the engine."""
        return False

    def warnings(self, parts: Mapping[str, Provider]) -> Mapping[str, str]:
        """Dotted keys of this config that are valid but probably not meant, each with the reason and the way out.

        `parts` has the records of the parts that `adv_estimator` and `pg_variant` name, by key. `roll-core check`
        prints the warnings with the place of the key, a run logs them. Called on a valid config.
        """
        return {}

    def roles(self) -> dict[str, WorkerConfig]:
        """Every role of this config by dotted name, `actor_train` or `rewards.math`, in the order of the schema."""
        found: dict[str, WorkerConfig] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, WorkerConfig):
                found[name] = value
            elif isinstance(value, dict):
                found.update({f"{name}.{k}": v for k, v in value.items() if isinstance(v, WorkerConfig)})
        return found


class RewardRunConfig(RunConfig):
    """What pipelines share that generate responses and score them by `rewards`. Base of their schemas."""

    rewards: Rewards = Field(default_factory=dict)
    """Judges by domain; a row's tag chooses its judge, and the only one there is judges every row."""
    validation: ValidationConfig | None = None
    """Held-out prompts; none where not given."""
    val_batch_size: PositiveInt = 1024
    """Prompts that are answered at once in an evaluation."""
