"""The contract of pipelines, and what the runtime gives them: roles, rollouts, weight publishing, metrics.

A pipeline is a short program over roles. The runtime owns the loop:

    build roles -> setup -> [resume] -> evaluate? -> { step -> log -> evaluate? -> checkpoint? } * max_steps -> export
    -> close

so `step` reads like the algorithm's pseudo-code and everything that pipelines share lives in the runtime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from roll_core.errors import ContractError
from roll_core.field_docs import document_fields
from roll_core.spec.platform import ROLE_KINDS, RoleKind
from roll_core.spec.providers import TASKS, Task, TrainCapabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from roll_core.spec.algorithms import AdvantageEstimator
    from roll_core.spec.config import DataArguments, RunConfig, WorkerConfig
    from roll_core.spec.providers import AdvantageProvider
    from roll_core.spec.rollout import Prompt, RolloutProgram
    from roll_core.spec.train import LossFn
    from roll_core.types import (
        Completion,
        Floats,
        GenerateRequest,
        Group,
        Sample,
        SamplingParams,
        TokenIds,
        TrainSequence,
    )

ConfigT = TypeVar("ConfigT", bound="RunConfig")
Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role that a pipeline needs."""

    name: str
    """Dotted name of its config, `actor_train` or `rewards.math`."""
    kind: RoleKind
    """`train`, `score` (forward only), `generate` or `reward`."""
    task: Task = "causal_lm"
    num_steps: int = 0
    """Optimizer steps of the whole run, for roles that train: the length of the schedule."""
    model_from: str = ""
    """Name of the role whose model this one has where its own `model_args` name none. An engine with this is taken to
    get its weights by `publish_weights`, so that it may lose them while others use its slots."""

    def __post_init__(self) -> None:
        """Raises `ContractError` for a kind or task that there is not."""
        for name, value, known in (("kind", self.kind, ROLE_KINDS), ("task", self.task, TASKS)):
            if value not in known:
                raise ContractError(
                    f"RoleSpec {self.name!r}: {name} is {value!r}, expected one of {', '.join(map(repr, known))}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequences:
    """Per-token outputs of a scoring pass, one array of length L for each sequence, in their order."""

    logprobs: list[Floats] | None = None
    entropy: list[Floats] | None = None
    values: list[Floats] | None = None
    first_choices: list[TokenIds] | None = None
    """The token to which the model gives the greatest probability in place of each one, given those before it; 0 for a
    sequence's first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one or more optimizer steps on a batch did."""

    metrics: Mapping[str, float]
    """Of the loss, averaged over the steps; `grad_norm`, `lr`."""
    num_steps: int
    num_skipped: int
    num_tokens: int
    """Tokens that went through the model, prompts included, without padding."""
    num_overflows: int = 0
    """Of the skipped steps, those that only lowered the scale of the loss (float16)."""

    @property
    def num_not_finite(self) -> int:
        """Steps that were skipped because something is wrong."""
        return self.num_skipped - self.num_overflows

    def named(self, prefix: str) -> dict[str, float]:
        """The metrics as `<prefix>/<name>`, with the number of steps that were skipped if there were any."""
        skipped = {f"{prefix}/skipped_steps": float(self.num_skipped)} if self.num_skipped else {}
        return {f"{prefix}/{name}": value for name, value in self.metrics.items()} | skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """How a pipeline's batches of groups are made; see docs/rollouts.md."""

    counts: Mapping[str, int]
    """Groups of a batch by tag, in the order in which the batch has them."""
    params: SamplingParams
    n: int
    """Samples of a group."""
    prompt: Callable[[str, int], Prompt]
    """Returns the prompt at a position of a tag's endless order: the same in every call."""
    keep: Callable[[Group], bool] | None = None
    """True if a scored group may be in a batch. Others are replaced by the tag's next prompts. None keeps every
    group."""
    max_tries: float = 10.0
    """Samples at most `max_tries` × batch size prompts per batch. The batch may then be smaller than requested."""
    ahead: float = 0.0
    """Batches that may be generated beyond the requested one. Rounded up, the maximum number of steps between a group's
    first token and its training."""
    concurrent: bool = False
    """Continue generation during training. If false, unfinished groups are paused until the next batch."""
    keep_partials: bool = True
    """Resume paused responses from their last token. If false, regenerate them."""
    first_ready: bool = False
    """A batch takes the groups that finish first, and the next batch the groups that were passed over. For an `ahead`
    of less than 1."""
    stale: Literal["drop", "reuse"] = "drop"
    """Sample the prompts of groups again that are older than `ahead` allows, or train on them. Only a run that was
    resumed with another config has such groups."""
    record: bool = False
    """Write the batches to the run directory."""
    routed_experts: bool = False
    """Samples carry the experts to which the engine routed their tokens."""
    seeded: bool | None = None
    """Seed each request, so that sampling is independent of batching. None: if the engine's capability `free_seeds`
    declares that seeds cost nothing."""
    replay: str = ""
    """Directory of a run whose recorded batches are replayed. The generating role is then not among the pipeline's
    `roles`, and nothing is scored."""
    program: Callable[[], RolloutProgram] | None = None
    """Makes the rollout program of each group; None for a single turn."""


class Rollouts(ABC):
    """Batches of scored groups, in prompt order. Which groups a batch has does not depend on the order in which they
    finished, unless the plan has `first_ready`.

    Coroutines, to be awaited: `batch`.
    """

    @abstractmethod
    async def batch(self) -> list[Group]:
        """The next batch. Call `publish_weights` first, so that the engine has the current weights. Has fewer groups
        than planned, possibly none, only after `max_tries`."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Plain values (JSON) for the pipeline's own `state`: positions in the prompts, and groups that are not trained
        on yet."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""


class TrainRole(ABC):
    """A role with a train strategy: it trains, or (kind `score`) only computes.

    Coroutines, to be awaited: `score`, `update`.
    """

    name: str
    config: WorkerConfig
    capabilities: TrainCapabilities
    """Of its strategy."""

    @abstractmethod
    async def score(
        self,
        sequences: Sequence[TrainSequence],
        *,
        logprobs: bool = False,
        entropy: bool = False,
        values: bool = False,
        temperature: float = 1.0,
        base: bool = False,
        first_choices: bool = False,
    ) -> ScoredSequences:
        """Forward passes over all data-parallel ranks. `base`: by the model without the adapters that the role trains;
        raises `UnsupportedError` where it trains none. `first_choices` needs `capabilities.topk`."""

    @abstractmethod
    async def update(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        epochs: int = 1,
        max_length: int = 1,
        shuffle_seed: int | None = None,
    ) -> UpdateResult:
        """Optimizer steps over `sequences`, `sequences_per_step` at a time, `epochs` times.

        `max_length` is `Totals.max_length`. A last step takes what is left over. Steps go through `sequences` in order.
        With `shuffle_seed` each epoch goes through their groups in a random order of its own instead: the same order
        for the same seed. An epoch of one step is the same with any seed.
        """

    @property
    @abstractmethod
    def sequences_per_step(self) -> int:
        """gradient_accumulation_steps × per_device_train_batch_size × data parallel."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Optimizer steps done so far, skipped ones not counted."""


class InferRole(ABC):
    """A role with an infer strategy: requests are spread over its replicas.

    Coroutines, to be awaited: `generate`.
    """

    name: str
    config: WorkerConfig

    @abstractmethod
    async def generate(
        self,
        requests: Sequence[GenerateRequest],
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Answers in the order of `requests`; `on_completion` is called on the event loop as each is ready."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """Of the weights it holds; 0 before the first publish."""


class Run(ABC):
    """A run, as its pipeline and the event hooks see it.

    Coroutines, to be awaited: `publish_weights`, `rollout`. Everything else returns at once.
    """

    config: RunConfig
    dir: Path
    """The run directory."""
    tokenizer: PreTrainedTokenizerBase
    step: int
    """Steps done so far."""

    @abstractmethod
    def train_role(self, name: str) -> TrainRole:
        """A role that trains or scores."""

    @abstractmethod
    def infer_role(self, name: str) -> InferRole:
        """A role that generates."""

    @abstractmethod
    def stage(self, name: str) -> AbstractContextManager[Any]:
        """Account what happens inside to `name` in the ledger of where the time went. Stages nest; time is counted
        once."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the current step's."""

    @abstractmethod
    def log_samples(self, samples: Sequence[Sample], *, split: Split = "train") -> None:
        """Record samples in `samples.jsonl`: the first few of each step."""

    @abstractmethod
    def guard(self, guard_id: str, ok: bool, message: str, *, fatal: bool = False) -> None:
        """Trip a guard unless `ok`: raise, warn or do nothing, as the config says. `fatal`: raise where it says `warn`.

        `{steps}` in `message` stands for the consecutive steps at which it has tripped: `step 3`, or `steps 3–7`."""

    @abstractmethod
    async def publish_weights(self, source: str, target: str) -> None:
        """Bring the infer role `target` to the weights of the train role `source`, and prove that it holds them. Costs
        nothing where it does already: call it before every rollout."""

    @abstractmethod
    async def rollout(
        self, role: str, prompts: Sequence[Prompt], params: SamplingParams, *, n: int, split: Split = "train"
    ) -> list[Group]:
        """Sample `n` responses to each prompt, and score each group when it is complete. Groups are in prompt order; a
        sample's `reward` is a value or a failure. Call `publish_weights` first, so that the engine has the current
        weights. Requests of `val` are seeded, those of `train` if seeds cost the engine nothing (`free_seeds`)."""

    @abstractmethod
    def rollouts(self, role: str, plan: RolloutPlan) -> Rollouts:
        """Batches of groups, generated by `role` and scored, or replayed. Called once for a role, in `setup`."""

    @abstractmethod
    def prompts(self, data: DataArguments) -> Sequence[Prompt]:
        """Rows as prompts: template applied, tokenised, those longer than `prompt_length` left out and counted."""

    @abstractmethod
    def sequences(
        self,
        data: DataArguments,
        *,
        overlong: Literal["drop", "truncate"] = "drop",
        on_prompt: bool = False,
        require_response: bool = True,
    ) -> Sequence[TrainSequence]:
        """Rows with prompt and response as sequences to learn; `on_prompt` also learns the prompt's tokens. A row
        without a response raises `DataError`, or is left out if `require_response` is false."""

    @abstractmethod
    def columns(self, data: DataArguments) -> Sequence[str]:
        """Names of the columns that the rows have."""

    @abstractmethod
    def advantage_estimator(self, name: str) -> AdvantageEstimator:
        """The estimator that a plugin offers under this name."""

    @abstractmethod
    def advantage_provider(self, name: str) -> AdvantageProvider:
        """The record of that estimator: what it needs, and what it does itself."""

    @abstractmethod
    def policy_loss(self, name: str) -> str:
        """`"module:attribute"` of the policy loss that a plugin offers under this name: it travels to the workers."""


class Pipeline(ABC, Generic[ConfigT]):
    """The algorithmic program of a run. Everything stateful that a resumed run needs is in `state`.

        prepare -> roles -> setup -> [load_state] -> { step, evaluate?, state? } * prepare's result

    Coroutines, awaited by the runtime: `setup`, `step`, `evaluate`.
    """

    def __init__(self, config: ConfigT) -> None:
        """Keep the config; touch nothing."""
        self.config = config

    @abstractmethod
    def prepare(self, run: Run) -> int:
        """Read the data and build what needs no role (order of rows, sampling, objective); return the number of steps
        of the whole run. Called once, first, with the tokenizer loaded and no role built."""

    @abstractmethod
    def roles(self) -> Sequence[RoleSpec]:
        """The roles to build, trained ones first. Called once, after `prepare`. If `PipelineProvider.plan` names a
        function, its plan has the same roles."""

    async def setup(self, run: Run) -> None:
        """All roles are built. Runs before a resumed run's state is loaded."""

    @abstractmethod
    async def step(self, run: Run) -> None:
        """One step: `run.step` counts the ones done before it."""

    async def evaluate(self, run: Run) -> Mapping[str, float]:
        """Metrics of held-out data, recorded under the names given here (`val/score/mean`)."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """Plain values (JSON) that a resumed run needs besides the roles' own state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""

    def export_role(self) -> str:
        """Name of the role whose model is exported at the end; empty for none."""
        return ""


document_fields(__name__)
