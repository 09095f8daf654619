"""The interface of pipelines, and what the runtime provides to them: roles, rollouts, weight sync, metrics.

A pipeline is a short program over roles. The runtime owns the loop:

    build roles -> setup -> [resume] -> evaluate? -> { step -> log -> evaluate? -> checkpoint? } * max_steps -> export
    -> close

so `step` reads like the algorithm's pseudo-code, and everything that pipelines share is in the runtime.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from heapq import nsmallest
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from roll_core.errors import ContractError, UnsupportedError
from roll_core.field_docs import document_fields
from roll_core.spec.platform import ROLE_KINDS, RoleKind
from roll_core.spec.providers import TASKS, Provider, Task, TrainCapabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from roll_core.spec.config import DataArguments, RunConfig, WorkerConfig
    from roll_core.spec.module_program import ModuleLoss, ModuleProgram, ModuleRow
    from roll_core.spec.rollout import Prompt, RolloutProgram
    from roll_core.spec.train import LossFn, WantedOutputs
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
P = TypeVar("P", bound=Provider)
Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """A role that a pipeline needs."""

    name: str
    """Dotted name of its config, for example `actor_train` or `rewards.math`."""
    kind: RoleKind
    """`train`, `score` (forward only), `generate` or `reward`."""
    task: Task = "causal_lm"
    library: str = ""
    """`ModelSpec.library` of its model."""
    row_tokens: int = 0
    """Tokens of a row of a module program in one call of the module, for memory estimates. 0: unknown."""
    calls_with_gradients: int = 1
    """Calls of the module per row whose activations a loss keeps, for memory estimates."""
    num_steps: int = 0
    """Optimizer steps of the whole run, for roles that train: the length of the schedule."""
    ema_decay: float | None = None
    """Decay of the moving average of a trained role's parameters, for `WantedOutputs.ema`. None: keep none."""
    ema_ramp: float | None = None
    """`TrainingSpec.ema_ramp`."""
    ema_per_batch: bool = False
    """`TrainingSpec.ema_per_batch`: move the average once per `update` or `update_program`."""
    model_from: str = ""
    """Role whose model this role uses if its own `model_args` name none. An engine with this field receives weights by
    `publish_weights`, so it may lose them while other roles use its slots."""

    def __post_init__(self) -> None:
        """Raises `ContractError` for an unknown kind or task."""
        for name, value, known in (("kind", self.kind, ROLE_KINDS), ("task", self.task, TASKS)):
            if value not in known:
                raise ContractError(
                    f"RoleSpec {self.name!r}: {name} is {value!r}, expected one of {', '.join(map(repr, known))}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredSequences:
    """Per-token outputs of a scoring pass: one array per sequence, of the sequence's length L, in the order of the
    sequences."""

    logprobs: list[Floats] | None = None
    entropy: list[Floats] | None = None
    values: list[Floats] | None = None
    topk_logprobs: list[Floats] | None = None
    """`[L, K]`, best first; 0 for a sequence's first token."""
    topk_ids: list[TokenIds] | None = None
    """`[L, K]`: K most likely tokens at each position, given the tokens before it; 0 for a sequence's first token."""
    gathered_logprobs: list[Floats] | None = None
    """`[L, K]`: logprobs of `TrainSequence.gather_ids`."""
    hidden: list[Floats] | None = None
    """`[L, H]`: inputs of the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of one or more optimizer steps on a batch."""

    metrics: Mapping[str, float]
    """Metrics of the loss, averaged over the steps; `grad_norm`; `lr`."""
    num_steps: int
    num_skipped: int
    num_tokens: int
    """Tokens that passed through the model, prompts included, without padding; 0 for `update_program`."""
    num_overflows: int = 0
    """Skipped steps that only lowered the loss scale (float16)."""

    @property
    def num_not_finite(self) -> int:
        """Steps skipped because of a non-finite gradient, loss scale overflows excluded."""
        return self.num_skipped - self.num_overflows

    def named(self, prefix: str) -> dict[str, float]:
        """Metrics as `<prefix>/<name>`, with `skipped_steps` if any steps were skipped."""
        skipped = {f"{prefix}/skipped_steps": float(self.num_skipped)} if self.num_skipped else {}
        return {f"{prefix}/{name}": value for name, value in self.metrics.items()} | skipped


class SampledPrompts(Protocol):
    """Prompts whose choice depends on earlier scores, by tag."""

    def observe(self, tag: str, group: Group) -> None:
        """Receive a scored group of a prompt. Groups of one call of the scheduler are in the order of positions."""

    def restore(self, tag: str, id: str) -> Prompt:
        """A prompt of an earlier position. Raises `CheckpointMismatchError` if there is no such row."""

    def state(self, tag: str) -> Mapping[str, Any]:
        """State of a tag, as plain JSON values."""

    def load_state(self, tag: str, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned. Raises `CheckpointMismatchError`."""

    def metrics(self) -> Mapping[str, float]:
        """Metrics of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """How a pipeline's batches of groups are made; see docs/rollouts.md."""

    counts: Mapping[str, float]
    """Mean number of groups per batch by tag, in batch order. A fraction is the share of batches with one more group
    (`batch_counts`). The sum is the size of each batch."""
    params: SamplingParams
    n: int
    """Samples per group."""
    prompt: Callable[[str, int], Prompt]
    """Returns the prompt at a position of a tag's endless sequence. Must be deterministic, unless `sampled` is set."""
    counts_at: Callable[[int], Mapping[str, float]] | None = None
    """Mean number of groups by tag in the batch of a step, if it changes. All have the tags and the sum of `counts`."""
    sampled: SampledPrompts | None = None
    """Prompts that depend on earlier scores. `prompt` is then called once for each position, in order."""
    keep: Callable[[Group], bool] | None = None
    """True if a scored group may be in a batch. Other groups are replaced by the tag's next prompts. None keeps every
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
    """A batch takes the groups that finish first, and the next batch takes the groups passed over. For an `ahead` below
    1."""
    stale: Literal["drop", "reuse"] = "drop"
    """What to do with groups older than `ahead` allows: sample their prompts again (`drop`), or train on them
    (`reuse`). Such groups exist only in a run resumed with a different config."""
    record: bool = False
    """Write the batches to the run directory."""
    routed_experts: bool = False
    """Samples include the experts to which the engine routed their tokens."""
    seeded: bool | None = None
    """Seed each request, so that sampling is independent of batching. None: seed if the engine's capability
    `free_seeds` declares that seeds cost nothing."""
    replay: str = ""
    """Directory of a run whose recorded batches are replayed. The generating role is then not among the pipeline's
    `roles`, and nothing is scored."""
    program: Callable[[], RolloutProgram] | None = None
    """Creates the rollout program of each group; None for a single turn."""


def batch_counts(
    means: Mapping[str, float], means_at: Callable[[int], Mapping[str, float]] | None = None
) -> Iterator[dict[str, int]]:
    """Number of groups of each tag in the batch of step 0, 1, ..., whose mean over the steps is `means`.

    With `means_at`, the means are those that it returns for each step.

    Each batch rounds what is due: the sum of the means until this step, less the groups of earlier batches. Largest
    remainders are rounded up, so that the size of batches is always the sum of the means. A tag with a mean of 0.1 is
    in every tenth batch. Means that are integers are the counts of each batch.
    """
    size = round(math.fsum(means.values()))
    taken: Counter[str] = Counter()
    sums = dict.fromkeys(means, 0.0)
    for step in count(1):
        if means_at is None:
            sums = {tag: step * mean for tag, mean in means.items()}
        else:
            sums = {tag: sums[tag] + mean for tag, mean in means_at(step - 1).items()}
        due = {tag: number - taken[tag] for tag, number in sums.items()}
        groups = ((number - left, tag) for tag, left in due.items() for number in range(math.ceil(left)))
        chosen = Counter(tag for _, tag in nsmallest(size, groups))
        taken += chosen
        yield {tag: chosen[tag] for tag in means}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPart(Generic[P]):
    """A part that the config names."""

    provider: P
    owner: str
    """Description with the package, for messages."""
    options: Mapping[str, Any]
    """Options of the config, with the defaults of the provider's schema. Plain JSON values."""
    load: Callable[[], Any]
    """Imports the provider's target. Raises `PluginLoadError`."""


class RolloutBatches(ABC):
    """Batches of scored groups, in prompt order. The groups of a batch do not depend on the order in which they finish,
    unless the plan has `first_ready`.

    Coroutines: `batch`.
    """

    @abstractmethod
    async def batch(self) -> list[Group]:
        """The next batch. Call `publish_weights` first, so that the engine has the current weights. A batch is smaller
        than planned, possibly empty, only after `max_tries`."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Plain JSON values for the pipeline's own `state`: positions in the prompts, and groups that are not trained
        on yet."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned."""


class StreamedSequences(Protocol):
    """Training sequences of rows that stay on the disk. Raises `DataError`."""

    def __len__(self) -> int:
        """Number of rows, also of those that `read` drops."""

    def read(self, numbers: Sequence[int]) -> list[TrainSequence]:
        """Sequences of the rows with these numbers, from 0, in order. Dropped rows are missing."""


class TrainRole(ABC):
    """A role with a train strategy: it trains, or only computes forward passes (kind `score`).

    Coroutines: `score`, `update`, `run_program`, `update_program`, `export_head`.
    """

    name: str
    config: WorkerConfig
    capabilities: TrainCapabilities
    """Capabilities of its strategy."""
    weight_version: int
    """Number of optimizer steps so far, without skipped steps and without warm-up steps of learning rate 0."""

    @abstractmethod
    async def score(self, sequences: Sequence[TrainSequence], want: WantedOutputs) -> ScoredSequences:
        """Run forward passes on all data-parallel ranks; returns the selected outputs.

        Raises `UnsupportedError` if `want` selects what the strategy does not declare, or the base model of a role that
        trains no adapters. `want.ema` needs `RoleSpec.ema_decay`.
        """

    @abstractmethod
    async def update(
        self,
        sequences: Sequence[TrainSequence],
        loss: LossFn,
        *,
        epochs: int = 1,
        max_length: int = 1,
        max_steps: int | None = None,
        shuffle_seed: int | None = None,
    ) -> UpdateResult:
        """Run optimizer steps over `sequences`, at most `sequences_per_step` at a time, for `epochs` epochs.

        All rows of a rollout are in one step and count as one sequence, and so do all sequences of a unit. An epoch has
        as few steps as possible, of nearly equal size. If these are more than `max_steps`, it has `max_steps`, which
        are larger than `sequences_per_step`. `max_length` is `Totals.max_length`. Without `shuffle_seed`,
        steps follow the order of `sequences`. With it, each epoch has its own random order of their groups, the same
        for the same seed. An epoch of a single step is the same with any seed.
        """

    async def run_program(
        self, rows: Sequence[ModuleRow], program: ModuleProgram
    ) -> list[Mapping[str, NDArray[np.generic]]]:
        """Run a program without gradients on all data-parallel ranks; returns its outputs for each row, without batch
        dimension. Needs `capabilities.module_programs`, as does `update_program`.

        Batches have at most `infer_batch_size` rows.
        """
        raise UnsupportedError(f"{self.name} runs no module programs")

    async def update_program(
        self, rows: Sequence[ModuleRow], loss: ModuleLoss, *, epochs: int = 1, shuffle_seed: int | None = None
    ) -> UpdateResult:
        """Run optimizer steps over `rows`, at most `sequences_per_step` at a time, for `epochs` epochs. Like `update`;
        every row is a unit of its own, and the loss reads `ModuleBatch.epoch`."""
        raise UnsupportedError(f"{self.name} runs no module programs")

    @abstractmethod
    async def export_head(self, path: Path) -> None:
        """Write the model's output layer to a file, for `WantedOutputs.comparison` of another role. Needs
        `capabilities.whole_vocabulary`."""

    @property
    @abstractmethod
    def sequences_per_step(self) -> int:
        """gradient_accumulation_steps × per_device_train_batch_size × data-parallel size."""


class InferRole(ABC):
    """A role with an infer strategy. Requests are distributed over its replicas.

    Coroutines: `generate`.
    """

    name: str
    config: WorkerConfig
    weight_version: int
    """Version of its weights; 0 before the first publish."""

    @abstractmethod
    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Generate completions, returned in the order of `requests`."""


class Run(ABC):
    """A run, as its pipeline and the event hooks see it.

    Coroutines: `publish_weights`, `rollout`. All other methods return at once.
    """

    config: RunConfig
    dir: Path
    """The run directory."""
    tokenizer: PreTrainedTokenizerBase
    """Missing if the pipeline's record has `tokenizer=False`."""
    step: int
    """Steps done so far."""

    @abstractmethod
    def train_role(self, name: str) -> TrainRole:
        """The role of this name that trains or scores."""

    @abstractmethod
    def infer_role(self, name: str) -> InferRole:
        """The role of this name that generates."""

    @abstractmethod
    def stage(self, name: str) -> AbstractContextManager[Any]:
        """Context manager that attributes time to `name` in the time ledger. Stages nest; time is counted once."""

    @abstractmethod
    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the current step's."""

    @abstractmethod
    def log_samples(self, samples: Sequence[Sample], *, split: Split = "train", all: bool = False) -> None:
        """Record samples in `samples.jsonl`: the first few of each step, or `all`. Of the split `val`, which an
        evaluation passes in one call, also all scores in `scores.jsonl`.

        The step is that of `log_images`; with `all`, always the current one."""

    @abstractmethod
    def log_images(self, images: Sequence[bytes], captions: Sequence[str], *, split: Split = "train") -> None:
        """Record PNG images with captions in `images.jsonl`, for the report. All images of a step and split make one
        grid; `val` counts the steps done, `train` the current one."""

    @abstractmethod
    def guard(self, guard_id: str, ok: bool, message: str, *, fatal: bool = False) -> None:
        """Trip a guard unless `ok`: raise, warn or do nothing, as configured. `fatal`: raise even if the action is
        `warn`.

        `{steps}` in `message` is replaced by the consecutive steps at which the guard tripped: `step 3`, or `steps
        3–7`.
        """

    @abstractmethod
    async def publish_weights(self, source: str, target: str) -> None:
        """Send the weights of train role `source` to infer role `target`, and verify that it loaded them. Returns at
        once if they are up to date: call it before every rollout."""

    @abstractmethod
    async def rollout(
        self,
        role: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        n: int,
        split: Split = "train",
        program: Callable[[], RolloutProgram] | None = None,
    ) -> list[Group]:
        """Sample `n` responses to each prompt, and score each group when it is complete. `program` as in `RolloutPlan`.

        Groups are in prompt order. A sample's `reward` is a value or a failure. Call `publish_weights` first, so that
        the engine has the current weights. Requests of `val` are seeded if the engine supports it (`seeds`), with the
        same seeds at every step; those of `train` only if seeds cost the engine nothing (`free_seeds`).
        """

    @abstractmethod
    def rollout_batches(self, role: str, plan: RolloutPlan) -> RolloutBatches:
        """Batches of groups, generated by `role` and scored, or replayed. Called once per role, in `setup`."""

    @abstractmethod
    def prompts(self, data: DataArguments) -> Sequence[Prompt]:
        """Rows as prompts: template applied and tokenised. Prompts longer than `prompt_length` are dropped and
        counted."""

    @abstractmethod
    def sequences(
        self,
        data: DataArguments,
        *,
        overlong: Literal["drop", "truncate"] = "drop",
        on_prompt: bool = False,
        require_response: bool = True,
    ) -> Sequence[TrainSequence]:
        """Rows with prompt and response as training sequences; `on_prompt` also trains on the prompt's tokens. A row
        without a response raises `DataError`, or is skipped if `require_response` is false."""

    @abstractmethod
    def streamed_sequences(
        self, data: DataArguments, *, overlong: Literal["drop", "truncate"] = "drop", on_prompt: bool = False
    ) -> StreamedSequences:
        """As `sequences`, of rows that stay on the disk until the pipeline reads them."""

    @abstractmethod
    def rows(self, data: DataArguments) -> Any:
        """The `roll_core.data.rows.Rows` of all files, for a pipeline that encodes them itself. Read once per run."""

    @abstractmethod
    def part(self, kind: type[P], name: str, options: Mapping[str, Any]) -> NamedPart[P]:
        """The part that a plugin offers under this name, or the user's code. `options` are those of the config."""


class Pipeline(ABC, Generic[ConfigT]):
    """The algorithm of a run. Everything stateful that a resumed run needs is in `state`.

        prepare -> roles -> setup -> [load_state] -> { step, evaluate?, state? } * prepare's result

    Coroutines: `setup`, `step`, `evaluate`, `close`.
    """

    def __init__(self, config: ConfigT) -> None:
        """Keep the config; do nothing else."""
        self.config = config

    @abstractmethod
    def prepare(self, run: Run) -> int:
        """Read the data and build what needs no role (order of rows, sampling, objective); returns the number of steps
        of the whole run. Called once, first, with the tokenizer loaded and no role built."""

    @abstractmethod
    def roles(self) -> Sequence[RoleSpec]:
        """The roles to build, trained ones first. Called once, after `prepare`. If `PipelineProvider.plan` names a
        function, its plan must have the same roles."""

    async def setup(self, run: Run) -> None:
        """Set up the pipeline. All roles are built; a resumed run's state is loaded afterwards."""

    @abstractmethod
    async def step(self, run: Run) -> None:
        """Run one step. `run.step` counts the steps done before it."""

    async def evaluate(self, run: Run) -> Mapping[str, float]:
        """Metrics of held-out data, recorded under the returned names, for example `val/score/mean`."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """Plain JSON values that a resumed run needs besides the roles' own state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned."""

    async def close(self) -> None:
        """Release what `prepare` and `setup` acquired. Called once, after the roles are closed, also after an error."""

    def export_role(self) -> str:
        """Name of the role whose model is exported at the end; empty for none."""
        return ""


class Tracker(ABC):
    """Receives the metrics of a run, in the driver. Several trackers may be active at once."""

    def __init__(self, run_dir: Path, run_name: str, options: Mapping[str, Any]) -> None:
        """Open the tracker; `options` are `tracker_kwargs.<name>`.

        Files in `run_dir / "trackers"` are copied into the directory of a run that resumes this one, before its tracker
        is opened. Store the id of a remote run there.
        """

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Record the resolved configuration, with secrets removed."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Context manager around each stage of the driver, such as `rollout`, and around each `step`.

        Stages nest, and stages of several asyncio tasks overlap. Trackers are opened before the roles are built;
        earlier stages are not passed. The context manager may enter with a `TraceContext`.
        """
        return nullcontext()

    def run_finished(self, *, failed: bool, files: Sequence[Path]) -> None:
        """Record the end of the run. `failed` is true after an error, Ctrl-C or SIGTERM.

        `files` are those of the run directory to upload: config, report and samples, with secrets removed from config
        and report. Called before `close`; not called if the run's trackers could not all be opened.
        """

    @abstractmethod
    def close(self) -> None:
        """Flush and close. Called exactly once, also after an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Span of the driver that its calls carry to workers: the parent of the spans that they record."""

    parent: str
    """The span in the form of W3C's header `traceparent`."""
    target: str
    """`"module:Class"` of the `WorkerSpans`, imported in the worker's process."""
    options: Mapping[str, Any]
    """Plain values for that class."""


class WorkerSpans(ABC):
    """Records the calls of one worker as spans, in its process. Constructed as `Class(role, rank, options)`."""

    @abstractmethod
    def call(self, name: str, parent: str) -> AbstractContextManager[object]:
        """Context manager around a call, on the thread or in the task that runs it. `parent` is that of the context."""

    @abstractmethod
    def close(self) -> None:
        """Send what is left. Called once, after the worker is closed."""


document_fields(__name__)
