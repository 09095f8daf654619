"""The frozen records by which plugins offer their parts.

A record is data: strings, numbers and tuples. It can be listed, compared and pickled without importing what it points
at;
`target` and `config` are `"module:attribute"` strings that are imported by the process that uses them, and only there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from roll_core.field_docs import document_fields

Task = Literal["causal_lm", "value", "reward"]
"""What a model computes: next-token logprobs, a value per token, a score per sequence, a velocity field."""
TASKS: tuple[Task, ...] = get_args(Task)

ModelParallelism = Literal["tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"]
"""Ways to spread one replica of a model over ranks; each is a capability of train strategies by the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCapabilities:
    """What a train strategy can do. The runtime asks here, never for a name."""

    tasks: tuple[Task, ...] = ("causal_lm",)
    dtypes: tuple[str, ...] = ("fp32", "bf16")
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass: honours `ModelSpec.gradient_checkpointing`. Without it the
    runtime sets `disable_gradient_checkpointing`, and `check` refuses a config that asks for checkpointing."""
    data_parallel: bool = False
    """Adds gradients up over replicas. Without it `check` refuses a role with more ranks than one replica has."""
    tensor_parallel: bool = False
    """Each kind of model parallelism: `check` refuses a `strategy_config` whose `parallel_sizes` has a kind above 1
    that is not declared."""
    pipeline_parallel: bool = False
    context_parallel: bool = False
    expert_parallel: bool = False
    lora: bool = False
    """Trains adapters: honours `ModelSpec.lora` and `Want.base`."""
    adapter_export: bool = False
    """Yields them apart from the model beneath: `TrainStrategy.export_adapters`."""
    offload: bool = False
    topk: bool = False
    """Returns the top-k logprobs: what SFT's token accuracy and distillation need."""
    portable_state: bool = False
    """Exports its training state for other strategies, and continues from theirs: `TrainStrategy.export_state`,
    `import_state`."""
    router_replay: bool = False
    """Sends tokens to the experts that it is given: honours `ModelSpec.router_replay` and
    `MicroBatch.routed_experts_TMK`."""
    any_world_size: bool = False
    """`load` continues from what another number of ranks saved."""
    weight_transports: tuple[str, ...] = ()
    """Names of the weight transports by which its weights can be sent; empty: it cannot feed an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferCapabilities:
    """What an infer strategy can do."""

    dtypes: tuple[str, ...] = ("fp32", "bf16")
    sleeps: bool = False
    """`sleep` gives the device's memory back and `wake` takes it again."""
    lora: bool = False
    """Serves a trained adapter on a model that stays as it is: honours `ModelSpec.lora`, and updates bring A and B
    alone. A strategy whose configuration does not ask for it (`StrategyConfig.serves_adapters`) gets merged weights."""
    prompt_logprobs: bool = False
    routed_experts: bool = False
    """Returns the experts that a mixture of experts chose: honours `ModelSpec.router_replay` and
    `GenerateRequest.routed_experts`."""
    free_seeds: bool = False
    """A request with a seed takes no longer than one without: rollouts are seeded unless `seeded_rollouts` says
    otherwise."""
    in_flight_update: bool = False
    """`update_weights` may be called while requests run: they go on with the new weights."""
    endpoint: bool = False
    """Serves an OpenAI-compatible HTTP endpoint."""
    tensor_parallel: bool = False
    """One worker spreads the model over several slots. Without it `check` refuses more than one slot per worker."""
    device_weights: bool = False
    """`update_weights` takes tensors that lie on the worker's own device; otherwise they are always on the host."""
    weight_transports: tuple[str, ...] = ()
    """Names of the weight transports from which it takes weights; empty: its weights cannot be updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """What every record says."""

    name: str
    """User-facing name, used in configs and error messages."""
    target: str
    """`"module:attribute"` of the class (or function) that does the work."""
    summary: str
    """One line for `roll-core plugins -v`."""
    config: str = ""
    """`"module:attribute"` of the pydantic schema of its own configuration; empty if it takes none."""
    needs: tuple[str | tuple[str, ...], ...] = ()
    """Requirements (PEP 508, `"vllm>=0.30,<0.34"`) that must be installed where it runs. A tuple among them is met by
    any one of its own, where the same engine is published under several names; the first is the one to advise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformProvider(Provider):
    """Offers a hardware platform; `target` is a subclass of `roll_core.spec.platform.Platform`."""

    priority: int = 0
    """Among the platforms whose probe succeeds the highest priority is chosen; `cpu` has 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProvider(Provider):
    """Offers a train strategy; `target` is a subclass of `roll_core.spec.train.TrainStrategy`."""

    capabilities: TrainCapabilities = field(default_factory=TrainCapabilities)
    platforms: tuple[str, ...] = ()
    """Names of the platforms it runs on; empty means every platform."""
    forward_only: bool = False
    """A twin without optimizer, for roles that only score."""
    memory: str = ""
    """`"module:function"` that says how much memory a worker takes: `roll_core.spec.plan`; empty if nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferProvider(Provider):
    """Offers an infer strategy; `target` is a subclass of `roll_core.spec.infer.InferStrategy`."""

    capabilities: InferCapabilities = field(default_factory=InferCapabilities)
    platforms: tuple[str, ...] = ()
    """Names of the platforms it runs on; empty means every platform."""
    memory: str = ""
    """`"module:function"` that says how much memory a worker takes: `roll_core.spec.plan`; empty if nobody knows."""


def replays_experts(provider: TrainProvider | InferProvider) -> bool:
    """True if the strategy does its part of router replay: an engine returns experts, a trainer follows them."""
    can = provider.capabilities
    return can.routed_experts if isinstance(can, InferCapabilities) else can.router_replay


def exports_state(provider: TrainProvider | InferProvider) -> bool:
    """True if another strategy can continue from its checkpoints."""
    return isinstance(provider, TrainProvider) and provider.capabilities.portable_state


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProvider(Provider):
    """Offers a pipeline; `target` is a subclass of `roll_core.spec.pipeline.Pipeline`, `config` of `RunConfig`."""

    plan: str = ""
    """`"module:function"` that says which roles it has and what they do in a step, see `roll_core.spec.plan`; where it
    is empty every role of the config is taken to work by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardProvider(Provider):
    """Offers a reward; `target` is a subclass of `roll_core.spec.reward.RewardFunction`, `config` of `RewardConfig`."""

    enforces_timeout: bool = False
    """`score` raises `RewardFailure` at `timeout_s` by itself, whatever the response makes it do; it is called on
    threads of the worker. Otherwise it is called in child processes of the worker, which are killed at `timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerProvider(Provider):
    """Offers a metrics tracker; `target` is a subclass of `roll_core.spec.tracker.Tracker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageProvider(Provider):
    """Offers an advantage estimator; `target` is a function, see `roll_core.spec.algorithms.AdvantageEstimator`."""

    needs_critic: bool = False
    """True if it reads the critic's values."""
    needs_groups: bool = False
    """True if it compares the samples of one prompt: each prompt then needs at least two."""
    normalise: Literal["config", "group", "batch"] = "config"
    """Who normalises rewards. `config`: the pipeline, by `norm_mean_type` and `norm_std_type`. `group` or `batch`: the
    estimator itself, by mean and deviation of these; it then receives rewards as scored, and a config may set the two
    keys to this value only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossProvider(Provider):
    """Offers a policy loss; `target` is a function, see `roll_core.spec.algorithms.PolicyLoss`."""

    off_policy: bool = True
    """False if it has no importance ratio: `check` then warns of several optimizer steps per batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransportProvider(Provider):
    """Offers a weight transport; `target` is a subclass of `roll_core.spec.transport.WeightTransport`."""

    priority: int = 0
    """The available transport with the highest priority is used. With 0 it is used only if `weight_transport` of the
    config names it."""
    in_process: bool = False
    """Hands the exported tensors themselves to engines in the trainer's process. Otherwise it copies tensors between
    processes."""
    any_strategy: bool = False
    """Strategies need not list it in their `weight_transports`: it wants nothing of them but tensors on the host."""
    uses_directory: bool = False
    """Travels through `model_update_dir`. With that key no other transport is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentProvider(Provider):
    """Offers a YAML file that configs name in `defaults:`. `target` is `"package:NAME.yaml"`, the file in the folder of
    that package, which needs no `__init__.py` and is never imported; `name` is NAME.

    The file holds one block, under its own name: `${NAME}` then refers to it wherever a config wants it. Files that say
    `../config/NAME`, as ROLL's do, find it where the folder is called `config`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckProvider(Provider):
    """Offers a check for `roll-core doctor`; `target` is a function, see `roll_core.spec.checks.Check`."""

    platform: str = ""
    """It is of use only where a run would take this platform; empty means everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownErrorsProvider(Provider):
    """Offers errors that people meet, with remedies; `target` is a tuple of `roll_core.spec.known_errors.KnownError`,
    imported when a run has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImporterProvider(Provider):
    """Offers an importer of another framework's configs; `target` is a `roll_core.spec.importing.Importer`, and `name`
    is what `roll-core import NAME FILE` calls it."""


document_fields(__name__)
