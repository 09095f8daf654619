"""`RunConfig`, the keys that all pipelines have: guards, profile, checkpoints. With ROLL's names."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - pydantic reads the annotations of class variables
from os.path import expanduser
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from roll_core.field_docs import document_fields
from roll_core.spec.config.arguments import DataArguments, TokenizerConfig
from roll_core.spec.config.base import (
    AUTO,
    GAP_BOUNDS,
    MAX_NAME_BYTES,
    PROBE_BOUNDS,
    Config,
    EnvVars,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    WeightFormat,
)
from roll_core.spec.config.worker import Rewards, ValidationConfig, WorkerConfig

if TYPE_CHECKING:
    from typing import Self

    from roll_core.spec.providers import Provider


GuardAction = Literal["error", "warn", "off"]


class GuardConfig(Config):
    """`guards.<id>`: action when the guard trips. `guards.<id>: warn` is short for `guards.<id>.action: warn`."""

    action: GuardAction = "error"
    """`error` ends the run, `warn` logs a warning and continues, `off` disables the guard."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"action": value}
        if value is False:  # YAML 1.1 reads a bare `off` as false
            return {"action": "off"}
        return value


class WarningGuardConfig(GuardConfig):
    """A guard that only warns by default."""

    action: GuardAction = "warn"
    """`error` ends the run, `warn` logs a warning and continues, `off` disables the guard."""


class LogprobProbeConfig(GuardConfig):
    """`guards.logprob_probe`."""

    every: PositiveInt = 10
    """Steps between two probes. The first publish, and the first publish with changed weights, are also probed."""
    threshold: PositiveFloat | None = None
    """Maximum mean absolute difference of logprobs, in nats. Default: 0.05, or 0.3 for an fp8 engine. bf16 engines
    differ by about 0.01, fp32 engines by less than 1e-4."""
    error_threshold: PositiveFloat = 0.5
    """Above this, in nats, the run ends even if the action is `warn`. Also the bound for the few sampled tokens. A
    larger `threshold` replaces it."""

    def bound(self, weight_format: WeightFormat) -> float:
        """Threshold for an engine that receives weights in this format."""
        return PROBE_BOUNDS[weight_format] if self.threshold is None else self.threshold

    def error_bound(self, weight_format: WeightFormat) -> float:
        """Threshold above which the run ends, whatever the action is."""
        return max(self.error_threshold, self.bound(weight_format))


class LogprobGapConfig(WarningGuardConfig):
    """`guards.logprob_gap`."""

    threshold: PositiveFloat | None = None
    """Maximum mean absolute difference of logprobs, in nats. Default: 0.05, or 0.1 for an fp8 engine."""
    error_threshold: PositiveFloat = 0.3
    """Above this, in nats, the run ends even if the action is `warn`. A larger `threshold` replaces it."""

    def bound(self, weight_format: WeightFormat) -> float:
        """Threshold for an engine that receives weights in this format."""
        return GAP_BOUNDS[weight_format] if self.threshold is None else self.threshold

    def error_bound(self, weight_format: WeightFormat) -> float:
        """Threshold above which the run ends, whatever the action is."""
        return max(self.error_threshold, self.bound(weight_format))


class RewardFailuresConfig(GuardConfig):
    """`guards.reward_failures`."""

    threshold: Fraction = 0.2
    """Maximum fraction of the samples scored since the last step whose reward could not be computed, retries
    included."""


class AdvantageSizeConfig(WarningGuardConfig):
    """`guards.advantage_size`."""

    threshold: PositiveFloat = 100.0
    """Maximum absolute advantage and loss, as a multiple of the batch's largest absolute reward, or of 1 if all are
    smaller."""


class FallingRewardConfig(WarningGuardConfig):
    """`guards.falling_reward`."""

    after: NonNegativeInt = 20
    """Number of steps at the start of a run whose scores are ignored."""
    window: Annotated[int, Field(ge=8, le=1000)] = 50
    """Number of last steps in which a trend of `score/mean` is tested."""
    p_value: Annotated[float, Field(gt=0, lt=0.5)] = 1e-5
    """Maximum probability of such a trend in noise, in one test. Each step is a test."""
    val_window: Annotated[int, Field(ge=5, le=1000)] = 8
    """Number of last evaluations in which a trend of `val/score/mean` is tested."""
    val_p_value: Annotated[float, Field(gt=0, lt=0.5)] = 0.001
    """Maximum probability of such a trend in noise, in one test. Each evaluation is a test."""
    threshold: Fraction = 0.1
    """Minimum fall over the window, as a fraction of the range of the run's scores."""


class GuardsConfig(Config):
    """`guards`: checks while a run progresses. Pipelines with their own guards use a subclass."""

    weights_unchanged: GuardConfig = GuardConfig()
    """Optimizer steps with a gradient were published, but no weight differs from the previous version."""
    zero_gradient: WarningGuardConfig = WarningGuardConfig()
    """There were non-zero advantages, but the gradient was exactly zero."""
    weight_manifest: GuardConfig = GuardConfig()
    """A receiver does not have exactly the tensors that were published to it."""
    logprob_probe: LogprobProbeConfig = LogprobProbeConfig()
    """On fixed probe tokens, engine and trainer compute different logprobs although both should have the same
    weights."""
    logprob_gap: LogprobGapConfig = LogprobGapConfig()
    """On rollout tokens, engine and trainer compute different logprobs although both had the same weights."""
    reward_failures: RewardFailuresConfig = RewardFailuresConfig()
    """Too many samples have no reward because scoring failed."""
    non_finite: GuardConfig = GuardConfig()
    """A loss, gradient or logprob is NaN or infinite."""
    zero_steps: GuardConfig = GuardConfig()
    """The run has no steps to do: none are configured, or the run in the checkpoint has finished all of them."""
    staleness: GuardConfig = GuardConfig()
    """A group is trained on more steps after it was started than `async_generation_ratio` allows."""
    token_round_trip: GuardConfig = GuardConfig()
    """The tokens or the mask sent to the trainer differ from those that the engine generated."""
    all_groups_filtered: WarningGuardConfig = WarningGuardConfig()
    """A step has no group with a learning signal: all were filtered, failed, or have equal rewards."""
    advantage_size: AdvantageSizeConfig = AdvantageSizeConfig()
    """Advantages or the policy's loss are out of proportion to the rewards."""
    falling_reward: FallingRewardConfig = FallingRewardConfig()
    """The reward of training samples or of the validation falls over a window of steps."""
    dead_worker: GuardConfig = GuardConfig()
    """A worker process exited or stopped responding."""


class RouterArguments(Config):
    """`router_args`: how requests are distributed over an engine's replicas."""

    router_name: Literal["least_loaded", "prompt_affinity", "sticky"] = "least_loaded"
    """`least_loaded`: the replica with the fewest running outputs. `prompt_affinity`: the replica that had the prompt
    before, unless it is full or much busier than another. `sticky`: always that replica."""


class ProfileConfig(Config):
    """`profile`: timelines of torch's profiler."""

    roles: list[str] = Field(min_length=1)
    """Roles that train or score, each with workers in processes of its own."""
    steps: list[PositiveInt] = Field(min_length=2, max_length=2)
    """First and last profiled step, counted from 1. Profiled steps are slower, and their events stay in host memory."""
    memory: bool = False
    """Also record each allocation and release, in bytes, with the total on its device."""

    @field_validator("steps")
    @classmethod
    def _in_order(cls, value: list[int]) -> list[int]:
        if value[0] > value[1]:
            raise ValueError(f"found {value}, expected the first step and the last one")
        return value


class CheckpointStoreConfig(Config):
    """`checkpoint_store`: where copies of checkpoints are written. Written as text, it is `url`."""

    url: str = Field(pattern=r"^[A-Za-z][\w+.-]*://")
    """URL of fsspec: `s3://bucket/prefix`, `gs://…`, `file:///…`. Copies are below `<url>/<exp_name>`."""
    required: bool = False
    """Fail the run if a checkpoint cannot be copied. Otherwise it warns and continues."""
    storage_options: dict[str, Any] = {}
    """Options of the file system, such as `endpoint_url`. Credentials belong in its environment variables."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _file_system_is_installed(cls, value: str) -> str:
        import fsspec

        try:
            fsspec.get_filesystem_class(value.partition("://")[0])
        except (ImportError, ValueError) as error:
            raise ValueError(f"found {value.partition('://')[0]}://, which fsspec cannot open: {error}") from error
        return value


class BestCheckpointConfig(Config):
    """`save_best`: which checkpoint is the best. Written as text, it is `metric`."""

    metric: str = Field(pattern=r"^[^-\s]\S*$")
    """Metric of a step, as in `metrics.jsonl`. Metrics that start with `val/` are of the held-out data."""
    mode: Literal["max", "min"] | None = None
    """`min`: lower is better. Default: `min` for losses, perplexities, divergences and failures, otherwise `max`.
    `-val/x` means `{metric: val/x, mode: min}`."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_metric(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return {"metric": value[1:], "mode": "min"} if value.startswith("-") else {"metric": value}


MAX_LEARNING_RATE = 1e-3
"""Learning rate of AdamW above which `roll-core check` warns; ten times as much for models of random weights."""
MAX_OPTIMIZER_STEPS = 8
"""Optimizer steps per batch above which `roll-core check` warns."""


class RunConfig(Config):
    """Keys of every run. A pipeline's schema adds its roles and its algorithm."""

    policy_role: ClassVar[str] = ""
    """Trained role whose weights generating roles receive; empty if none does."""
    multi_turn: ClassVar[bool] = False
    """True if rollouts have several turns, which advantage estimators can credit."""
    group_size_key: ClassVar[str] = ""
    """Dotted key with the number of samples of a prompt; empty if none are compared."""
    row_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Keys of `data_args` that name a required column, by the key above `data_args`: `{"sft_train": ("prompt",
    "response")}`. Rows without a response are prompts, whose responses `rewards` scores. `roll-core check` does not
    check the columns of other rows."""
    learning_rates: ClassVar[Mapping[str, float]] = {}
    """Default learning rate of trained roles by name. Others have that of `training_args`."""
    unread: ClassVar[Mapping[str, str]] = {}
    """Keys of roles that the pipeline cannot use, with what to do instead, for hints."""

    pipeline: str
    """Pipeline to run: see `roll-core plugins`."""
    exp_name: str = Field(default="roll", pattern=r"^[\w.-]+$")
    """Name of the experiment, at most 255 bytes. Runs are written to `<output_dir>/<exp_name>/<number>`."""
    output_dir: str = "./output"
    """Parent folder of run directories."""
    seed: Seed = 42
    """Seed of all random numbers, below 2^64."""
    executor: str = AUTO
    """Executor that starts the workers: see `roll-core plugins`. `local`: everything in this process. `auto`: `local`
    if every role has one worker and weights can be transferred within one process, otherwise the installed executor
    with the highest priority."""
    platform: str | None = None
    """Hardware platform. Default: detected."""
    num_gpus_per_node: PositiveInt | None = None
    """Slots per node. Default: the number that the platform detects on this host."""
    max_steps: PositiveInt | None = None
    """Number of pipeline steps."""
    save_steps: NonNegativeInt = 50
    """Steps between checkpoints; the last step is always saved. 0 writes one only after SIGTERM."""
    max_ckpt_to_keep: NonNegativeInt = 0
    """Number of checkpoints to keep, over all attempts of a run that were resumed from each other; older ones are
    deleted, except the best one of `save_best`. 0 keeps all."""
    save_best: BestCheckpointConfig | None = None
    """Metric of the best checkpoint, such as `val/score/mean`. A step that improves it is saved, whatever `save_steps`
    is, and `max_ckpt_to_keep` does not delete it."""
    checkpoint_store: CheckpointStoreConfig | None = None
    """Copy complete checkpoints in the background to this URL, such as `s3://bucket/prefix`. `max_ckpt_to_keep` and
    `save_best` apply there too."""
    portable_checkpoints: bool = False
    """Also write the training state in a format that all strategies load. Needed to continue under another strategy or
    to convert a checkpoint to a model. 12 bytes per trained parameter."""
    eval_steps: NonNegativeInt = 10
    """Steps between validations; also before the first step and after the last. 0 disables validation."""
    logging_steps: PositiveInt = 1
    """Steps between metrics in trackers, and between lines on the console. Evaluations and the last step are always
    logged. `metrics.jsonl` gets every step."""
    export_model: bool = True
    """At the end, write `export/`, a directory that transformers loads."""
    resume_from_checkpoint: bool | str = False
    """`true`: resume from the newest valid checkpoint of this experiment. `auto`: the same, but start from the
    beginning if there is none. Or a path to a run or a checkpoint, or the URL of
    one in a `checkpoint_store`."""
    preemption_timeout: NonNegativeFloat = 120.0
    """Seconds after SIGTERM to finish the current step and write its checkpoint. 0 ends the run at once, as Ctrl-C
    does."""
    profile: ProfileConfig | None = None
    """Write a timeline of some steps for each rank of some roles: `{roles: [actor_train], steps: [3, 5]}`."""
    track_with: list[str] = ["tensorboard"]
    """Metrics trackers. `metrics.jsonl` is always written as well."""
    tracker_kwargs: dict[str, dict[str, Any]] = {}
    """Options by tracker."""
    pretrain: str | None = None
    """Model directory or hub id, for every role that does not set its own model."""
    tokenizer: TokenizerConfig | None = None
    """Create a tokenizer. Default: load the model's own."""
    prompt_length: PositiveInt = 1024
    """Maximum prompt length in tokens. Longer rows are dropped and counted."""
    response_length: PositiveInt = 1024
    """Maximum response length in tokens."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Global 2-norm to which gradients are clipped; 0 disables clipping."""
    is_offload_states: bool = True
    """Offload roles that share slots while they are idle: weights, gradients and optimizer state move to the host,
    engines sleep. `false` keeps everything on the device, which is faster if it fits."""
    rpc_timeout: PositiveFloat = 3600.0
    """Timeout in seconds of calls to workers. Generation has no timeout: see `replica_timeout`."""
    replica_timeout: PositiveFloat = 900.0
    """Seconds without new tokens or responses after which a busy engine replica is killed and replaced. If the engine
    does not report progress, only responses count, and they may take `rpc_timeout`. Also the timeout for an idle
    replica's reply to health checks, and for an engine to sleep and to wake."""
    router_args: RouterArguments = RouterArguments()
    """How requests are distributed over an engine's replicas."""
    max_running_requests: PositiveInt | None = None
    """Maximum number of responses that one engine replica generates concurrently; each is a separate request. Further
    requests wait for the first free replica. With `router_name: least_loaded` a group is then distributed over
    replicas, each of which computes the prompt; with the other routers it stays on one. Default: no limit; a group is
    one request, and the engine queues requests."""
    model_update_timeout: PositiveFloat = 120.0
    """Seconds within which every engine must confirm that it has the published weights."""
    model_update_buffer_size_mb: PositiveInt = 1024
    """Maximum bucket size of weight transfers, in MiB."""
    model_update_dir: str | None = None
    """Transfer weights as files in this folder, or below this URL (`s3://…`, anything that fsspec supports), with the
    transport `disk`. For hosts that cannot connect to each other. Trainer and engines must be able to reach it."""
    weight_transport: str | None = None
    """Weight transport between trainer and engines, for example `shm`. Default: the available one with the highest
    priority."""
    system_envs: EnvVars = {}
    """Environment variables of all workers."""
    guards: GuardsConfig = GuardsConfig()
    """Actions when a run goes wrong without failing, by guard id."""
    deterministic: bool = True
    """Request deterministic kernels from the libraries while training roles compute, so that a resumed run equals an
    uninterrupted one bit for bit. An operator without one on the device is an error that names it."""

    @field_validator("exp_name")
    @classmethod
    def _names_a_directory(cls, value: str) -> str:
        size = len(value.encode("utf-8", "surrogatepass"))
        if size > MAX_NAME_BYTES:
            raise ValueError(f"found {size} bytes, expected at most {MAX_NAME_BYTES}: it is the name of a directory")
        if not value.strip("."):
            raise ValueError(f"found {value}, which cannot be the name of a new directory: add a letter")
        return value

    @field_validator("output_dir")
    @classmethod
    def _is_a_path(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError(f"found {value!r}, expected a path: it contains the character NUL")
        if expanduser(value).startswith("~"):
            raise ValueError(f"found {value}, which is in the home of an unknown user: write ./{value} for that name")
        return value

    @field_validator("track_with", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _set_learning_rates(self) -> Self:
        for role, rate in self.learning_rates.items():
            self.set_training_defaults(role, learning_rate=rate)
        return self

    def set_training_defaults(self, role: str, **defaults: Any) -> None:
        """Set what the `training_args` of a role leave out. Only for validators: later, the config does not change."""
        worker = getattr(self, role, None)
        if isinstance(worker, WorkerConfig):
            missing = {
                key: value for key, value in defaults.items() if key not in worker.training_args.model_fields_set
            }
            args = worker.training_args.model_copy(update=missing)
            # Models are frozen for everybody else.
            object.__setattr__(self, role, worker.model_copy(update={"training_args": args}) if missing else worker)

    @model_validator(mode="after")
    def _profiled_roles_run_torch(self) -> Self:
        able = [name for name, role in self.roles().items() if role.kind in ("train", "score")]
        for name in self.profile.roles if self.profile is not None else ():
            if name not in able:
                raise ValueError(f"profile.roles: found {name}, expected roles that train or score: {', '.join(able)}")
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Self:
        if self.save_best is not None and self.save_best.metric.startswith("val/"):
            if not self.eval_steps:
                raise ValueError(
                    f"save_best: {self.save_best.metric} is measured on held-out data, but eval_steps is 0: set it to"
                    " the steps between validations"
                )
            if "validation" in type(self).model_fields and getattr(self, "validation", None) is None:
                raise ValueError(
                    f"save_best: {self.save_best.metric} is measured on held-out data, but there is none: add"
                    " validation, or name a metric of training"
                )
        return self

    @property
    def replays_experts(self) -> bool:
        """True if router replay is enabled: in training, the routers of `policy_role` repeat the engine's choices."""
        return False

    def capabilities(self) -> Mapping[str, tuple[str, ...]]:
        """Capabilities that the strategies of roles must declare, by role: flags of `TrainCapabilities` or
        `InferCapabilities`. `roll-core check` and `run` refuse other strategies. Called on a valid config."""
        return {}

    def optimizer_steps(self) -> Mapping[str, int]:
        """Optimizer steps per batch of each trained role, for `roll-core check`. Called on a valid config."""
        return {name: 1 for name, role in self.roles().items() if role.kind == "train"}

    def training_warnings(self) -> Mapping[str, str]:
        """Like `warnings`, about the training arguments of all roles."""
        warnings: dict[str, str] = {}
        from_scratch = any(role.model_args.random_init for role in self.roles().values())
        bound = MAX_LEARNING_RATE * (10 if from_scratch else 1)
        for name, role in self.roles().items():
            if role.kind != "train":
                continue
            args, key = role.training_args, f"{name}.training_args"
            if args.learning_rate > bound:
                warnings[f"{key}.learning_rate"] = (
                    f"found {args.learning_rate:g}, expected at most {bound:g} for AdamW: pretrained models need 1e-6"
                    " to 1e-4"
                )
            if self.max_steps is not None and args.num_train_epochs != 1 and not self.unread:
                warnings[f"{key}.num_train_epochs"] = f"is not read: max_steps is {self.max_steps}. Remove one of them"
            num_steps = self.optimizer_steps().get(name, 1)
            if num_steps > MAX_OPTIMIZER_STEPS:
                warnings[f"{key}.gradient_accumulation_steps"] = (
                    f"{num_steps} optimizer steps per batch, expected at most {MAX_OPTIMIZER_STEPS}: all but the first"
                    " train on samples of older weights. Raise it, or per_device_train_batch_size"
                )
        return warnings

    def warnings(self, parts: Mapping[str, Provider]) -> Mapping[str, str]:
        """Dotted keys whose values are valid but probably unintended, each with the reason and a remedy.

        `parts` has the provider records of `adv_estimator` and `pg_variant`, by key. `roll-core check` prints the
        warnings with the key's position, a run logs them. Called on a valid config.
        """
        return {}

    @classmethod
    def check_rows(cls, key: str, rows: Any, data: DataArguments, values: Mapping[Any, Any]) -> None:
        """Raise `DataError` for rows that the pipeline cannot use, if `row_keys` cannot express its requirements.

        `rows` are the first `roll_core.data.rows.Rows` of a file, and `key` is the key above its `data_args`. `values`
        are the config's values as written, which may be invalid. `roll-core check` and `run` call this before anything
        is built.
        """

    def file_problems(self) -> Mapping[str, str]:
        """Problems of files that the config names, by dotted key. Called on a valid config by `roll-core check` and
        `run`, but not with `--no-files`: validators read no files."""
        return {}

    @classmethod
    def tool_problems(cls, values: Mapping[Any, Any]) -> Mapping[str, str]:
        """Dotted keys because of which the policy cannot use the tools of an environment, each with the reason.

        `values` are the config's values as written, which may be invalid. `roll-core check` and `run` call this if an
        environment has tools (`EnvironmentProvider.tools`) and no agent.
        """
        return {}

    def roles(self) -> dict[str, WorkerConfig]:
        """All roles of this config by dotted name (`actor_train`, `rewards.math`), in the order of the schema."""
        configs: dict[str, WorkerConfig] = {}
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, WorkerConfig):
                configs[name] = value
            elif isinstance(value, dict):
                configs.update({f"{name}.{k}": v for k, v in value.items() if isinstance(v, WorkerConfig)})
        return configs


class RewardKeys(Config):
    """The rewards of responses."""

    rewards: Rewards = Field(default_factory=dict)
    """Rewards by domain. A row's tag selects its reward; a single reward scores all rows."""


class RewardRunConfig(RewardKeys, RunConfig):
    """Keys of pipelines that generate responses to prompts and score them with `rewards`. Base of their schemas."""

    validation: ValidationConfig | None = None
    """Held-out prompts. Default: no validation."""
    val_batch_size: PositiveInt = 1024
    """Prompts per batch in an evaluation."""


document_fields(__name__)
