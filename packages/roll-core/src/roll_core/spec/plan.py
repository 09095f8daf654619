"""The interface of `roll-core plan`: memory estimates of strategies, and the phases of pipelines.

Inputs and outputs are plain data, and nothing heavy is imported: an estimate is arithmetic on the sizes of a model.
docs/plan.md gives the source of each formula.

    PipelineProvider.plan    "module:function"   (RunConfig) -> PipelinePlan
    TrainProvider.memory     "module:function"   (MemoryInput) -> MemoryEstimate
    InferProvider.memory     "module:function"   (MemoryInput) -> MemoryEstimate
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import ModelSize
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.spec.providers import Task

Activity = Literal["start", "score", "backward", "step", "publish", "save", "generate", "receive", "wait"]
"""Activity of a role in a phase.

`start`: construction. `score`: forward passes. `backward`: gradients of a microbatch. `step`: reduction of gradients
over ranks, and the optimizer step. `publish`: sending weights. `save`: writing a checkpoint. `generate`: sampling by an
engine. `receive`: an engine receiving weights. `wait`: idle while other roles work.
"""
UPDATE: tuple[Activity, ...] = ("backward", "step")
"""Activities of training."""
LATER: tuple[Activity, ...] = ("score", "backward", "step", "publish", "save", "generate", "receive", "wait")
"""All activities except `start`: for memory that the first step or the first request allocates and never frees."""

Memory = Literal["device", "host"]
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


# -- pipelines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a step in which the same roles work."""

    name: str
    acts: Mapping[str, Activity]
    """Activity of each working role, by name; the other roles wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedComparison:
    """A trained role's comparison of its distributions with another role's, over the whole vocabulary
    (`roll_core.spec.train.Comparison`)."""

    role: str
    """Role of the other model."""
    num_arrays: int
    """Float32 numbers per token and id of a chunk that exist at once: of both models, and of the comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """Roles and phases of a pipeline, known before anything is loaded."""

    roles: tuple[RoleSpec, ...]
    """As returned by the pipeline's `roles()`. The optimizer steps of schedules may still be 0."""
    phases: tuple[Phase, ...]
    """Phases of one step, in order."""
    outputs: int = 0
    """Sequences that the generating role samples in one phase, over all its workers."""
    comparisons: Mapping[str, PlannedComparison] = field(default_factory=dict)
    """Comparison over the whole vocabulary, by trained role."""
    one_response: bool = False
    """True if logprobs are computed for one response of each sequence, and not for its prompt."""


# -- strategies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """The other model of a comparison over the whole vocabulary."""

    hidden_size: int
    dtype: str
    num_arrays: int
    """As in `PlannedComparison`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInput:
    """Input of a memory estimate. The estimate is for the worker of the role that needs the most memory."""

    model: ModelSize
    config: StrategyConfig
    """The strategy's own configuration, validated by its schema."""
    task: Task = "causal_lm"
    dtype: str = "bf16"
    """Dtype of the computation."""
    trains: bool = False
    trained_parameters: int = 0
    """Parameters with gradients: all of them, or those of adapters."""
    averages: bool = False
    """True if the role keeps a moving average of the trained parameters (`TrainingSpec.ema_decay`)."""
    added_parameters: int = 0
    """Parameters of adapters, in addition to the model's own."""
    quantized_parameters: int = 0
    """Parameters of frozen layers in 4 bits (`load_in_4bit`)."""
    gradient_checkpointing: bool = False
    on_host: bool = False
    """True if the device is the host (`slots_share_cores`)."""
    slot_bytes: int | None = None
    """Memory of a slot, if known. Some engines allocate a fraction of it."""
    world_size: int = 1
    num_slots: int = 1
    """Slots of one worker (`num_gpus_per_worker`)."""
    train_tokens: int = 0
    """Tokens of the largest training microbatch."""
    train_sequences: int = 1
    """Sequences of that microbatch."""
    num_micro_batches: int = 1
    """Microbatches per optimizer step on each data-parallel rank."""
    score_tokens: int = 0
    """Tokens of the largest microbatch that is only scored."""
    longest: int = 0
    """Tokens of the longest sequence, prompt and response together."""
    prompt_tokens: int = 0
    """Tokens of the longest prompt."""
    image_tokens: int = 0
    """Tokens of images in the longest prompt; 0 if no rows have images."""
    trains_vision: bool = False
    """True if the image encoder is trained."""
    logprob_tokens: int | None = None
    """Tokens of the longest sequence whose logprobs are computed; None for all."""
    outputs: int = 0
    """Sequences that one worker samples in a phase."""
    random_weights: bool = False
    """True if the weights are initialised randomly instead of loaded."""
    shares_weights: bool = False
    """True for an engine that, once weights are published, computes with the tensors of a trainer in its process."""
    compared: ComparedModel | None = None
    """Model whose distributions the role's are compared with in training, over the whole vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One item of a worker's memory."""

    what: str
    """`weights`, `gradients`, `optimizer`, `activations`, `logits`, `kv cache`, `buffers` or `libraries`."""
    num_bytes: int
    formula: str
    """The calculation with its numbers, for example `16 bits × 494 M parameters / 8 ranks`."""
    during: tuple[Activity, ...] = ()
    """Activities during which the memory is allocated; empty: for the whole life of the worker."""
    on: Memory = "device"
    offloads: bool = False
    """True if it moves to the host while other roles use the slots (`is_offload_states`). An engine frees it
    instead."""

    @classmethod
    def of(
        cls,
        what: str,
        size: int,
        count: int,
        shards: int = 1,
        note: str = "",
        *,
        less: int = 0,
        during: tuple[Activity, ...] = (),
        on: Memory = "device",
        offloads: bool = False,
    ) -> MemoryItem:
        """`size` bytes for each of `count` elements, divided by `shards`. `note` precedes this in the formula.

        `less` are bytes that another item counts.
        """
        formula = f"{note}: " * bool(note) + f"{size} × {count / 1e6:.1f} M" + f" / {shards}" * (shards > 1)
        num_bytes = max(0, size * count // shards - less)
        return cls(what=what, num_bytes=num_bytes, formula=formula, during=during, on=on, offloads=offloads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySaving:
    """A change to a role's `strategy_config` that saves memory."""

    keys: Mapping[str, Any]
    """Dotted keys below `strategy_config`, and their values."""
    costs: str
    """Disadvantage of the change, as text for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory estimate of one worker."""

    uses: tuple[MemoryItem, ...]
    savings: tuple[MemorySaving, ...] = field(default=())
    """Suggestions to save memory, least costly first."""


document_fields(__name__)
