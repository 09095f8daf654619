"""What `roll-core plan` asks of plugins: the memory that a strategy takes, and what a pipeline's roles do when.

Plain data in, plain data out, and nothing heavy is imported: a formula is arithmetic on the sizes of a model. Where
each formula comes from is written in docs/plan.md.

    PipelineProvider.plan    "module:function"   (RunConfig) -> PipelinePlan
    TrainProvider.memory     "module:function"   (MemoryQuestion) -> MemoryAnswer
    InferProvider.memory     "module:function"   (MemoryQuestion) -> MemoryAnswer
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.pipeline import RoleSpec
    from roll_core.spec.providers import Task

Act = Literal["start", "score", "backward", "step", "publish", "save", "generate", "receive", "wait"]
"""What a role does at a time: come into being; forward passes; gradients of a microbatch; adding them up over ranks and
the optimizer's step; send weights; write a checkpoint; an engine draws tokens; it takes weights; others work."""
UPDATE: tuple[Act, ...] = ("backward", "step")
"""What training consists of."""
LATER: tuple[Act, ...] = ("score", "backward", "step", "publish", "save", "generate", "receive", "wait")
"""Whenever it does not start: what is made by the first step, or by the first request, and stays."""

Memory = Literal["device", "host"]
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


# -- pipelines ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a run in which the same roles work."""

    name: str
    acts: Mapping[str, Act]
    """What each of them does, by role; the other roles wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """What a pipeline will do, known before anything is loaded."""

    roles: tuple[RoleSpec, ...]
    """As the pipeline's `roles()` gives them; the optimizer steps of a schedule may still be 0."""
    phases: tuple[Phase, ...]
    """Of one step, in order."""
    outputs: int = 0
    """Sequences that the role that generates draws in one phase, over all of its workers."""


# -- models ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A matrix of a layer."""

    path: str
    """Within the layer, `self_attn.q_proj`."""
    outputs: int
    inputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSize:
    """A decoder layer, in numbers of elements."""

    parameters: int
    linears: tuple[Linear, ...] = ()
    """Its matrices but for experts and their router; empty where only the total is known."""
    active_width: int = 0
    """Hidden units of the feed-forward part that one token goes through: of a mixture, those of its chosen experts."""
    experts: int = 0
    """Parameters that belong to experts."""
    chosen: int = 0
    """Experts that one token goes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A causal language model, or one with a scalar head, by its sizes."""

    model_type: str
    vocab_size: int
    hidden_size: int
    query_width: int
    """Query heads × their size."""
    key_width: int
    """Key heads × their size."""
    num_heads: int
    normed_heads: bool
    """Queries and keys are normed."""
    max_positions: int
    layers: tuple[LayerSize, ...]
    embedding: int
    head: int
    """Parameters of the output layer; 0 where it is the embedding."""
    final_norm: int

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.embedding + self.head + self.final_norm + sum(each.parameters for each in self.layers)

    @property
    def largest_matrix(self) -> int:
        """Elements of the largest weight: a matrix of a layer, or the embedding."""
        return max([self.embedding, *(each.outputs * each.inputs for layer in self.layers for each in layer.linears)])

    @property
    def tied(self) -> bool:
        """The output layer is the embedding."""
        return self.head == 0


# -- strategies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuestion:
    """What a strategy is asked: how much memory does one worker take, the one that takes most?"""

    model: ModelSize
    config: StrategyConfig
    """Its own configuration, validated by its schema."""
    task: Task = "causal_lm"
    dtype: str = "bf16"
    """Of the computation."""
    trains: bool = False
    trained_parameters: int = 0
    """Those that have gradients: all, or those of adapters."""
    added_parameters: int = 0
    """Adapters, which stand beside the model's own."""
    gradient_checkpointing: bool = False
    on_host: bool = False
    """The device is the host (`slots_share_cores`)."""
    slot_bytes: int | None = None
    """Memory of a slot, as far as it is known: some engines take a share of it."""
    world_size: int = 1
    num_slots: int = 1
    """Of one worker (`num_gpus_per_worker`)."""
    train_tokens: int = 0
    """Of the largest microbatch that is trained on."""
    train_sequences: int = 1
    """In it."""
    num_micro_batches: int = 1
    """Of an optimizer step, on each data-parallel rank."""
    score_tokens: int = 0
    """Of the largest microbatch that is only scored."""
    longest: int = 0
    """Tokens of the longest sequence, prompt and response."""
    prompt_tokens: int = 0
    """Of the longest prompt."""
    outputs: int = 0
    """Sequences that one worker draws in a phase."""
    random_weights: bool = False
    """The model is drawn, not read."""
    borrows_weights: bool = False
    """An engine that computes with the very weights of a trainer in its process, once they are published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Memory that one worker takes."""

    what: str
    """`weights`, `gradients`, `optimizer`, `activations`, `logits`, `kv cache`, `buffers`, `libraries`."""
    num_bytes: int
    formula: str
    """How it comes about, with the numbers: `16 bits × 494 M parameters / 8 ranks`."""
    during: tuple[Act, ...] = ()
    """While the role does one of these; empty: as long as it lives."""
    on: Memory = "device"
    leaves: bool = False
    """It goes to the host while others use the slots (`is_offload_states`); of an engine: it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """A change of a role's own strategy that takes less memory."""

    keys: Mapping[str, Any]
    """Dotted keys below `strategy_config`, and their values."""
    costs: str
    """What is lost by it, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAnswer:
    """What a strategy says of one worker."""

    uses: tuple[Use, ...]
    levers: tuple[Lever, ...] = field(default=())
    """The least painful first."""


document_fields(__name__)
