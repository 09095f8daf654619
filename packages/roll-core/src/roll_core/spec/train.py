"""The contract of train strategies: how a model is sharded, stepped and stored. No strategy knows an algorithm.

Shapes: T flat tokens of a microbatch, S its sequences, K top-k, V the vocabulary, M layers that have experts.

Life of a strategy, all calls from one thread:

    __init__(config, training) -> build(model, mesh) -> { forward | forward_backward+ optimizer_step | export_weights
                                                         | save | load | export_state | import_state
                                                         | offload | onload }* -> close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from roll_core.field_docs import document_fields
from roll_core.types import DataRank, Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.providers import TrainCapabilities

Part = Literal["weights", "grads", "optimizer"]
"""What can be moved to the host between phases."""

LossMetrics = dict[str, float]
"""Metrics of one microbatch, as its share: adding them up over microbatches and data-parallel ranks gives the batch's.
Names ending in `/max` and `/min` are combined by maximum and minimum instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences laid end to end, as tensors on the strategy's device. Optional fields are there if the loss needs
    them."""

    ids: tuple[str, ...]
    """Of the S sequences."""
    tokens_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, counted from 0 in each sequence."""
    segments_T: Tensor
    """int64, index of each token's sequence in this microbatch, 0..S-1."""
    cu_seqlens: Tensor
    """int32 `[S + 1]`, where each sequence begins; the last entry is T."""
    lengths: tuple[int, ...]
    """Of the S sequences, as plain numbers."""
    loss_mask_T: Tensor
    """bool; never true at a sequence's first token."""
    groups_S: Tensor
    """int64, index of each sequence's group in the whole batch."""
    totals: Totals
    """Denominators over the whole optimizer step."""
    old_logprobs_T: Tensor | None = None
    behaviour_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    advantages_T: Tensor | None = None
    returns_T: Tensor | None = None
    values_T: Tensor | None = None
    routed_experts_TMK: Tensor | None = None
    """int16 `[T, M, K]`: experts to send each token to, in every layer that has experts; -1 where the router chooses
    itself. What is computed again in the backward pass goes to the same ones. Their weights are the router's own, of
    its current logits at these indices, and carry its gradient. Not given together with `Want.base`."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same microbatch with its tensors on `device`."""
        import torch

        moved: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, torch.Tensor):
                moved[each.name] = value.to(device, non_blocking=True)
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Which outputs a forward pass shall return. Nothing else is computed."""

    logprobs: bool = False
    entropy: bool = False
    entropy_grad: bool = True
    """Whether the entropy carries gradients; False where it is only reported, which a strategy may use to save work."""
    values: bool = False
    topk: int = 0
    """The K best tokens and their logprobs, the best first; where K is 1 and several are equal, the one with the lowest
    id. Asked only of strategies with `capabilities.topk`."""
    masked_only: bool = False
    """Only what stands where `loss_mask_T` is true will be read: a strategy may leave the rest 0 and save the work."""
    temperature: float = 1.0
    """Logits are divided by it before the softmax; the rollouts' own temperature."""
    base: bool = False
    """Of the model without its adapters (`ModelSpec.lora`), as it was before training: a reference policy that needs no
    second copy. Asked only of strategies with `capabilities.lora`, and never by a loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """What was wanted, aligned to the flat tokens; float32. Logits never leave the strategy.

    Index `t` speaks of token `t` given those before it in its sequence, and is 0 for a sequence's first token,
    except `values_T[t]`, which is the value of the state *before* token `t` is drawn (0 for a sequence's first token).
    With task `reward`, `values_T[t]` is the score of the sequence up to and with token `t`: its last one is the score.
    """

    logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    """Of the distribution from which token `t` was drawn, in nats."""
    values_T: Tensor | None = None
    topk_logprobs_TK: Tensor | None = None
    topk_ids_TK: Tensor | None = None
    routing_disagreement_T: Tensor | None = None
    """Where experts were replayed, and the strategy knows: the share of them, over layers and top-k, that the router
    would not have chosen itself for the token *before* `t`, whose state decides how token `t` is drawn. Without
    gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss returns for one microbatch."""

    loss: Tensor
    """Scalar: this microbatch's share of the global objective, denominators taken from `micro.totals`."""
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    """As shares, see `LossMetrics`; tensors are detached by the strategy."""


class LossFn(Protocol):
    """A loss: picklable (it travels to the workers), pure, and ignorant of how the batch is split."""

    @property
    def want(self) -> Want:
        """The outputs that `__call__` reads."""
        ...

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """This microbatch's share of the objective. `outputs` carry gradients."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """What the optimizer needs to know; made by the runtime from `training_args` and the pipeline's `max_grad_norm`."""

    learning_rate: float
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    lr_scheduler_type: str = "linear"
    """As transformers names schedules."""
    lr_scheduler_kwargs: Mapping[str, float] = field(default_factory=dict)
    """Further arguments of the schedule."""
    warmup_steps: int = 0
    num_steps: int = 1
    """Optimizer steps of the whole run; the schedule's length."""
    max_grad_norm: float = 0.0
    """Global 2-norm to which gradients are clipped; 0 does not clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What an optimizer step did."""

    grad_norm: float
    """Global 2-norm of the summed gradient, before clipping."""
    learning_rate: float
    """Used for this step."""
    skipped: bool = False
    """The gradient was not finite and nothing changed."""
    overflow: bool = False
    """Skipped, though nothing is wrong: the loss was scaled too far for float16, and the scale has been lowered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """What AdamW keeps of one trained parameter: whole tensors of its shape, in float32 whatever the model's dtype."""

    master: Tensor
    """The parameter itself, before it is rounded to the model's dtype."""
    exp_avg: Tensor
    """First moment, without bias correction, of gradients as they were after clipping."""
    exp_avg_sq: Tensor
    """Second moment, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableState:
    """A training state in the form that all strategies share: the step, and of every trained parameter its master and
    moments. What is frozen is not in it, nor is the random state, which nothing that is trained here draws from."""

    step_count: int
    """Optimizer steps that were taken (skipped ones are not): the schedule's and the bias correction's position."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the trained parameters, by the names that they have in the Hugging Face module, in a fixed order. Tied ones
    come once, under the first name; adapters as peft calls them there, `….q_proj.lora_A.default.weight`."""
    read: Callable[[str], ParameterState]
    """One parameter. Of an exported state all ranks read all names in the order of `shapes`, and rank 0 gets whole
    tensors, good until the next is read. One that is to be imported is read by each rank in any order, as often as
    it likes."""
    adapters: Mapping[str, Any] | None = None
    """Where adapters are trained, what identifies the model beneath them (`Adapters.identity` of
    `roll_modeling.lora`)."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """What transformers stores of the model beside its parameters, whole, by its names and in its dtypes: DeepSeek-V3's
    `e_score_correction_bias`. None where adapters are trained: the model beneath them has its own."""


class TrainStrategy(ABC):
    """One worker's share of a model that is trained or scored. Constructed in the worker's process."""

    capabilities: TrainCapabilities
    """The same that the provider's record declares."""

    def __init__(self, config: StrategyConfig, training: TrainingSpec | None) -> None:
        """Keep the arguments; touch no device. `training` is None for roles that only score."""
        self.config = config
        self.training = training

    @abstractmethod
    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load or make the model, and the optimizer unless the role only scores. Called once, on all ranks together."""

    @property
    def data_rank(self) -> DataRank:
        """Which share of the data this rank works on; valid after `build`. Pure data parallelism unless overridden."""
        return DataRank(index=self._mesh.rank, size=self._mesh.world_size)

    @property
    def microbatch_multiple(self) -> int:
        """A number that divides how many microbatches `forward_backward` and `forward_all` best get: that of the stages
        of a pipeline. The runtime heeds it where microbatches are filled by tokens."""
        return 1

    _mesh: MeshInfo

    if not TYPE_CHECKING:  # a type checker would take any misspelt attribute for granted

        def __getattr__(self, name: str) -> Any:
            """Only asked for what is not there. Raises `NotBuiltError` as long as `build` has not begun."""
            from roll_core.errors import NotBuiltError

            if "_mesh" in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise NotBuiltError(f"{type(self).__name__} has no {name!r}: call build first")

    @abstractmethod
    def forward(self, micro: MicroBatch, want: Want) -> TokenOutputs:
        """Outputs without gradients, on the host or the device, complete on leader ranks. Where a model is spread over
        ranks, these call it together."""

    def forward_all(self, micros: Sequence[MicroBatch], want: Want) -> Iterator[TokenOutputs]:
        """`forward` of each. Called on all ranks together, each with microbatches of its own in any number, also none:
        a strategy whose ranks need each other in `forward` evens the numbers out here."""
        return (self.forward(micro, want) for micro in micros)

    @abstractmethod
    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Add the gradients of all `micros` to those already there. Gradients are *summed* over microbatches and
        data-parallel ranks: the gradient of a batch is the same however it is split. May be called several times
        before a step."""

    @abstractmethod
    def optimizer_step(self) -> StepStats:
        """Clip, step, advance the schedule, clear the gradients. A non-finite gradient changes nothing (`skipped`)."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and full tensors, one after the other, in a fixed order. All ranks iterate together;
        leader ranks get the tensors. A tensor may be the live parameter: read it before the next step. Where adapters
        are trained it is the merged weight, W + scale · B A, a new tensor that is the reader's to keep; the names are
        those of the model without adapters, and the parameters stay as they are."""

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """A [R, I] and B [O, R] of every target, in a fixed order, as `<path of the layer>.lora_A.weight` and
        `.lora_B.weight`, for a layer that computes x Wᵀ + (x Aᵀ) Bᵀ: the scale is in B. Iterated like
        `export_weights`, and only with `capabilities.adapter_export`.

        Raises `UnsupportedError` where modules are trained in full beside the adapters.
        """
        from roll_core.errors import UnsupportedError

        raise UnsupportedError(f"{type(self).__name__} does not export adapters apart from the model")

    @abstractmethod
    def save(self, path: Path) -> Callable[[], None] | None:
        """Write everything needed to continue bit for bit into the directory `path` (made by the caller). Called on all
        ranks together.

        What is only left to be written may be returned as a function. It is called once, on another thread and while
        this strategy is used on, or never if the run ends before: it writes the state as it is now, needs neither
        device nor other ranks, and raises where it cannot. What was saved is complete once that of every rank has
        returned; the next save waits for it.
        """

    @abstractmethod
    def load(self, path: Path) -> None:
        """Continue from what `save` wrote."""

    def export_state(self) -> PortableState:
        """What `import_state` of any other strategy continues from. Changes nothing. Called on all ranks together, and
        only with `capabilities.portable_state`."""
        from roll_core.errors import UnsupportedError

        raise UnsupportedError(f"{type(self).__name__} does not export its training state")

    def import_state(self, state: PortableState) -> None:
        """Continue, within float32 rounding, from what another strategy or another number of ranks exported; gradients
        and everything else that was there before is forgotten. Called on all ranks together, each of which can read all
        of `state`, and only with `capabilities.portable_state`.

        Raises `CheckpointError` where the parameters or the model beneath adapters are not those of this role:
        `roll_modeling.portable_state` has the comparison.
        """
        from roll_core.errors import UnsupportedError

        raise UnsupportedError(f"{type(self).__name__} does not import another strategy's training state")

    def export_model(self, path: Path) -> None:
        """Write a directory that `transformers` loads with `from_pretrained`, tokenizer included.

        Raises `UnsupportedError` where the task has no such form.
        """
        from roll_core.errors import UnsupportedError

        raise UnsupportedError(f"{type(self).__name__} does not export models")

    def offload(self, parts: Sequence[Part]) -> None:
        """Move `parts` to the host and give their device memory back; those that are there stay. Called only if
        `capabilities.offload`, on all ranks; never on platforms whose slots are the host's (`slots_share_cores`), where
        nothing is to be gained.

        With `grads` and `optimizer` away, `forward` and `export_weights` are called; everything else only when all
        parts are back.
        """

    def onload(self, parts: Sequence[Part]) -> None:
        """Move `parts` back, those that are away. Changes no number."""

    def memory(self) -> Mapping[str, int]:
        """Bytes held by `weights`, `grads` and `optimizer` on this rank, as far as known."""
        return {}

    def close(self) -> None:
        """Give everything back. Called once or several times, also after an error."""


document_fields(__name__)
