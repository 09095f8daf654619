"""Provider records: frozen dataclasses by which plugins offer their parts.

A record is data: strings, numbers and tuples. It can be listed, compared and pickled without importing its target.
`target` and `config` are `"module:attribute"` strings, imported only by the process that uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from pathlib import Path

Task = Literal["causal_lm", "value", "reward", "flow"]
"""What a model computes: next-token logprobs, a value per token, a score per sequence, or, without tokens, the velocity
of a flow."""
TASKS: tuple[Task, ...] = get_args(Task)

ModelParallelism = Literal["tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"]
"""Kinds of model parallelism within one replica. Each is a capability flag of train strategies with the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCapabilities:
    """Capabilities of a train strategy. The runtime checks these flags, never a strategy's name."""

    tasks: tuple[Task, ...] = ("causal_lm",)
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: honours `ModelSpec.gradient_checkpointing`. Otherwise the runtime
    sets `disable_gradient_checkpointing`, and `check` rejects a config that enables checkpointing."""
    data_parallel: bool = False
    """Sums gradients over replicas. Otherwise `check` rejects a role with more ranks than one replica has."""
    tensor_parallel: bool = False
    """Supports this kind of model parallelism, like the flags below. `check` rejects a `strategy_config` whose
    `parallel_sizes` has a size above 1 of an undeclared kind."""
    pipeline_parallel: bool = False
    context_parallel: bool = False
    expert_parallel: bool = False
    lora: bool = False
    """Trains adapters: honours `ModelSpec.lora` and `WantedOutputs.base`."""
    adapter_export: bool = False
    """Exports adapters separately from the base model: `TrainStrategy.export_adapters`."""
    load_in_4bit: bool = False
    """Trains adapters of a base model in 4 bits: honours `LoraSpec.load_in_4bit`."""
    offload: bool = False
    topk: bool = False
    """Returns top-k logprobs, which SFT's token accuracy and distillation need."""
    ema: bool = False
    """Keeps a moving average of the trained parameters: honours `TrainingSpec.ema_decay` and `WantedOutputs.ema`."""
    module_programs: bool = False
    """Runs module programs (`roll_core.spec.module_program`), for models that `ModelSpec.library` loads."""
    gathered: bool = False
    """Returns logprobs of given token ids: honours `WantedOutputs.gathered`, which distillation needs."""
    whole_vocabulary: bool = False
    """Compares distributions over the whole vocabulary with those of another model: honours `WantedOutputs.hidden` and
    `WantedOutputs.comparison`, and exports its head, for distillation with `kd_support: full`."""
    portable_state: bool = False
    """Exports its training state for other strategies, and continues from theirs: `TrainStrategy.export_state`,
    `import_state`, `save_portable` and `load_portable`."""
    images: bool = False
    """Trains on sequences with images: honours `MicroBatch.media_S` and `ModelSpec.freeze`."""
    videos: bool = False
    """Trains on sequences with videos, too."""
    router_replay: bool = False
    """Routes tokens to given experts: honours `ModelSpec.router_replay` and `MicroBatch.routed_experts_TMK`."""
    optimizers: Literal["adamw", "sharded", "any"] = "adamw"
    """Optimizers besides AdamW that it runs: honours `TrainingSpec.optimizer`. `sharded`: those of
    `OptimizerProvider.sharded`, because a rank has only shards of matrices."""
    activations: bool = False
    """Returns activations by module: `TrainStrategy.activations`, for `roll-core doctor mismatch`."""
    any_world_size: bool = False
    """`load` accepts checkpoints saved by a different number of ranks."""
    weight_transports: tuple[str, ...] = ()
    """Names of the weight transports that can send its weights. Empty: it cannot publish weights to an engine."""

    @property
    def media(self) -> tuple[str, ...]:
        """Kinds of `Media` that it reads."""
        return _media(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCapabilities:
    """Capabilities of an infer strategy."""

    dtypes: tuple[str, ...] = ("fp32", "bf16")
    sleeps: bool = False
    """`sleep` releases device memory, `wake` allocates it again."""
    lora: bool = False
    """Serves a trained adapter on top of a fixed base model: honours `ModelSpec.lora`, and updates carry only A and B.
    If the strategy's configuration does not enable this (`StrategyConfig.serves_adapters`), it gets merged weights."""
    prompt_logprobs: bool = False
    prompt_topk: bool = False
    """Returns the most likely tokens of a prompt: honours `GenerateRequest.prompt_topk`."""
    images: bool = False
    """Reads images of prompts: honours `GenerateRequest.media`."""
    videos: bool = False
    """Reads videos of prompts, too."""
    routed_experts: bool = False
    """Returns the experts chosen in a mixture-of-experts model: honours `ModelSpec.router_replay` and
    `GenerateRequest.routed_experts`."""
    seeds: bool = True
    """Supports `SamplingParams.seed`. Otherwise runs send no seeds, and `generate` rejects them with
    `UnsupportedError`."""
    free_seeds: bool = False
    """Seeding a request costs nothing. Rollouts are then seeded by default; `seeded_rollouts` overrides this."""
    in_flight_update: bool = False
    """`update_weights` may be called while requests run. They continue with the new weights."""
    activations: bool = False
    """Returns activations by module and its weights: `InferStrategy.activations` and `loaded_weights`, for `roll-core
    doctor mismatch`."""
    endpoint: bool = False
    """Serves an OpenAI-compatible HTTP endpoint."""
    tensor_parallel: bool = False
    """One worker can partition the model over several slots. Otherwise `check` rejects more than one slot per
    worker."""
    device_weights: bool = False
    """`update_weights` accepts tensors on the worker's own device. Otherwise they are always on the host."""
    weight_transports: tuple[str, ...] = ()
    """Names of the weight transports that can deliver weights to it. Empty: its weights cannot be updated."""
    keeps_weights: bool = False
    """Keeps tensors that an update does not contain, `WeightManifest.unsent`. Otherwise each update contains all."""

    @property
    def media(self) -> tuple[str, ...]:
        """Kinds of `Media` that it reads."""
        return _media(self)


def _media(capabilities: TrainCapabilities | InferCapabilities) -> tuple[str, ...]:
    return tuple(compress(("image", "video"), (capabilities.images, capabilities.videos)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Common fields of all provider records."""

    name: str
    """User-facing name, used in configs and error messages."""
    target: str
    """`"module:attribute"` of the class (or function) that implements the part."""
    summary: str
    """One line for `roll-core plugins -v`."""
    config: str = ""
    """`"module:attribute"` of the pydantic schema of its configuration; empty if it has none."""
    needs: tuple[str | tuple[str, ...], ...] = ()
    """Requirements (PEP 508, `"vllm>=0.30,<0.34"`) that must be installed where the part runs. A nested tuple lists
    alternatives, for an engine published under several names: any of them suffices, and the first one is
    recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformProvider(Provider):
    """Offers a hardware platform; `target` is a subclass of `roll_core.spec.platform.Platform`."""

    priority: int = 0
    """Of the platforms whose probe succeeds, the one with the highest priority is used; `cpu` has 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProvider(Provider):
    """Offers a train strategy; `target` is a subclass of `roll_core.spec.train.TrainStrategy`."""

    capabilities: TrainCapabilities = field(default_factory=TrainCapabilities)
    platforms: tuple[str, ...] = ()
    """Names of the platforms it runs on; empty means every platform."""
    forward_only: bool = False
    """True for a variant without optimizer, for roles that only score."""
    memory: str = ""
    """`"module:function"` that estimates a worker's memory, see `roll_core.spec.plan`. Empty: estimated by parameters
    alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferProvider(Provider):
    """Offers an infer strategy; `target` is a subclass of `roll_core.spec.infer.InferStrategy`."""

    capabilities: InferCapabilities = field(default_factory=InferCapabilities)
    platforms: tuple[str, ...] = ()
    """Names of the platforms it runs on; empty means every platform."""
    memory: str = ""
    """`"module:function"` that estimates a worker's memory, see `roll_core.spec.plan`. Empty: estimated by parameters
    alone."""
    follower: str = ""
    """`"module:Class"`, a subclass of `roll_core.spec.infer.InferFollower`, for replicas over several nodes. Empty: all
    slots of a replica must be on one node."""


def replays_experts(provider: TrainProvider | InferProvider) -> bool:
    """True if the strategy supports router replay: an engine returns experts, or a trainer replays them."""
    can = provider.capabilities
    return can.routed_experts if isinstance(can, InferCapabilities) else can.router_replay


def exports_state(provider: TrainProvider | InferProvider) -> bool:
    """True if another strategy can continue from its checkpoints."""
    return isinstance(provider, TrainProvider) and provider.capabilities.portable_state


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProvider(Provider):
    """Offers a pipeline; `target` is a subclass of `roll_core.spec.pipeline.Pipeline`, `config` of `RunConfig`."""

    plan: str = ""
    """`"module:function"` that returns its roles and what they do in a step, see `roll_core.spec.plan`. Empty:
    `roll-core plan` assumes that each role of the config works on its own."""
    tokenizer: bool = True
    """False for models without tokens: the run has no tokenizer, and the config needs none."""
    starter: str = ""
    """`"package:KIND"`, a folder of that package with a first run, which `roll-core init KIND DIR` copies; empty if it
    has none. In its texts `starter/` and `starter.` are replaced by the new folder. Configs run in order of their
    names."""
    evaluation: str = ""
    """Pipeline by which `roll-core eval` scores models with a config of this one. Its schema has the keys that both
    need, such as `rewards`, with the same meaning. Empty: `roll-core eval` runs this pipeline itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardProvider(Provider):
    """Offers a reward; `target` is a subclass of `roll_core.spec.rollout.RewardFunction`, `config` one of
    `RewardConfig`. If the schema has `kind` `score` or `generate`, a role with a model computes the outputs or replies
    that `target` turns into rewards."""

    enforces_timeout: bool = False
    """True if `score` itself raises `RewardFailure` at `timeout_s`, for any response; it then runs on threads of the
    worker. Otherwise it runs in child processes of the worker, which are killed at `timeout_s`."""


Isolation = Literal["inline", "thread", "process"]
"""Where the methods of an environment run: on the driver's event loop, in threads of the driver, or in processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentProvider(Provider):
    """Offers an environment; `target` is a subclass of `roll_core.spec.environment.Environment`. The values of `config`
    are its keyword arguments."""

    isolation: Isolation = "process"
    """`inline`: coroutine functions that never block. `thread`: a call that exceeds its deadline is abandoned, its
    thread cannot be stopped. `process`: one process per running episode, which is killed at a deadline."""
    concurrency: int = 0
    """Maximum number of episodes at the same time; 0: no limit."""
    tools: bool = False
    """True if every episode has tools. `roll-core check` then refuses a chat template that cannot describe them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProvider(Provider):
    """Offers an agent; `target` is a subclass of `roll_core.spec.agent.Agent`. The values of `config` are its keyword
    arguments."""

    isolation: Isolation = "process"
    """As for `EnvironmentProvider`."""
    concurrency: int = 0
    """Maximum number of rollouts at the same time; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerProvider(Provider):
    """Offers a metrics tracker; `target` is a subclass of `roll_core.spec.pipeline.Tracker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageProvider(Provider):
    """Offers an advantage estimator; `target` is a function, see `roll_core.spec.algorithms.AdvantageEstimator`."""

    needs_critic: bool = False
    """True if it reads the critic's values."""
    needs_groups: bool = False
    """True if it compares the samples of one prompt. Each prompt then needs at least two samples."""
    needs_baseline: bool = False
    """True if it reads `AdvantageInput.baselines_S`. The pipeline then generates and scores a greedy response for each
    prompt, and does not train on it. Not with `RunConfig.multi_turn`."""
    non_negative: bool = False
    """True if it refuses negative rewards. `roll-core check` warns if the config's rewards may be negative."""
    needs_turns: bool = False
    """True if it reads `AdvantageInput.turns`. Only pipelines with `RunConfig.multi_turn` have them."""
    normalise: Literal["config", "group", "batch", "none"] = "config"
    """Where rewards are normalised. `config`: by the pipeline, as `norm_mean_type` and `norm_std_type` say. `group` or
    `batch`: by the estimator itself, with the mean and deviation of groups or of the batch. It then receives rewards as
    scored, and a config may set the two keys only to this value. `none`: nowhere; a config may not set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossProvider(Provider):
    """Offers a policy loss; `target` is a function, see `roll_core.spec.algorithms.PolicyLoss`."""

    off_policy: bool = True
    """False if it has no importance ratio. `check` then warns about several optimizer steps per batch."""
    whole_rollouts: bool = False
    """True if it reads statistics of a whole rollout. The rows of a rollout are then in one microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerProvider(Provider):
    """Offers an optimizer; `target` is a function, see `roll_core.spec.train.OptimizerFactory`."""

    sharded: bool = False
    """True if it can step the shards of matrices: the update of an element depends only on its own value, gradient and
    state, or it is `torch.optim.Muon`, whose matrices the strategy gathers. Alone, or a part of `Joint`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSamplerProvider(Provider):
    """Offers a prompt sampler; `target` is a subclass of `roll_core.spec.rollout.PromptSampler`. The values of `config`
    are its keyword arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransportProvider(Provider):
    """Offers a weight transport; `target` is a subclass of `roll_core.spec.transport.WeightTransport`."""

    priority: int = 0
    """The available transport with the highest priority is used. A transport with priority 0 is used only if
    `weight_transport` in the config names it."""
    in_process: bool = False
    """True if it passes the exported tensors themselves to engines in the trainer's process. Otherwise it copies
    tensors between processes."""
    any_strategy: bool = False
    """True if strategies need not list it in their `weight_transports`: it requires only tensors on the host."""
    uses_directory: bool = False
    """True if it transfers weights through `model_update_dir`. If that key is set, no other transport is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorProvider(Provider):
    """Offers an executor; `target` is a subclass of `roll_core.runtime.cluster.executors.base.Executor`."""

    priority: int = 0
    """`executor: auto` uses the suitable executor with the highest priority. An executor with priority 0 is used only
    if `executor` in the config names it."""
    in_process: bool = False
    """True if all workers run in the driver's process. `auto` uses such an executor if each role has one worker."""
    python_environments: bool = False
    """True if it starts workers in their role's own Python environment (`GroupSpec.environment`)."""
    address_variable: str = ""
    """Environment variable with the address of an existing cluster that it connects to. If the variable is set and not
    `local`, workers run on other hosts, which may have other devices, files and packages."""
    placement_timeout_s: int = 0
    """Seconds that `start` waits for slots that other jobs occupy, as `roll-core plan` reports; 0 if it does not
    reserve slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentProvider(Provider):
    """Offers a YAML file that configs can name in `defaults:`.

    `target` is `"package:NAME.yaml"`, a file in the folder of that package. The package needs no `__init__.py` and is
    never imported. `name` is NAME.

    The file contains one block, under its own name, so that configs refer to it as `${NAME}`. ROLL's configs say
    `../config/NAME`; they find the file if its folder is called `config`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckProvider(Provider):
    """Offers a check for `roll-core doctor`; `target` is a function, see `roll_core.spec.diagnostics.Check`."""

    platform: str = ""
    """Run the check only if a run would select this platform; empty means always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownErrorsProvider(Provider):
    """Offers known errors with remedies. `target` is a tuple of `roll_core.spec.diagnostics.KnownError`, imported only
    after a run failed."""

    general: bool = False
    """True for errors of the machine and of common libraries. They are compared after those of all other lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImporterProvider(Provider):
    """Offers an importer of another framework's configs. `target` is an `Importer`, and `name` is NAME in
    `roll-core import NAME FILE`."""


class Importer(Protocol):
    """Function that converts one config file, for the command `import` of roll-migrate."""

    def __call__(self, path: Path, registry: Any) -> Any:
        """Convert the file at `path`. Returns a `roll_migrate.conversion.ImportedConfig`.

        `registry` is the `roll_core.plugins.registry.Registry` of the installed plugins. An importer of shell scripts
        has a third parameter, `variables`: a mapping with those of `--set`. Raises `ConfigError` if the file cannot be
        read, and `UnsupportedError` for a pipeline that has no equivalent.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandProvider(Provider):
    """Offers the command `roll-core NAME`. `target` is a `Command`. Names of the core's own commands have no effect."""


class Command(Protocol):
    """Function that runs a command."""

    def __call__(self, words: list[str], registry: Any) -> int:
        """Run the command and return its exit code.

        `words` are the words after NAME, without `--disable-plugin`. `registry` is the
        `roll_core.plugins.registry.Registry` of the plugins that are not disabled. Raises `RollError`, which
        `roll-core` prints, with its exit code.
        """


document_fields(__name__)
