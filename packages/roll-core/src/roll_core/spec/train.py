"""The interface of train strategies: how a model is sharded, trained and saved. Strategies are independent of
algorithms.

Shapes: T tokens of a microbatch (sequences concatenated), S sequences, K top-k or given ids, V vocabulary size,
M layers with experts.

Order of calls, all from one thread:

    __init__(config, training) -> build(model, mesh) -> { forward | forward_backward+ optimizer_step | export_weights
                                                         | save | load | export_state | import_state
                                                         | offload | onload }* -> close()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from roll_core.errors import NotBuiltError, UnsupportedError
from roll_core.field_docs import document_fields
from roll_core.spec.config import TrainingArguments
from roll_core.spec.module_program import LossOutput as LossOutput  # for importers of this module
from roll_core.spec.module_program import move_tensors
from roll_core.types import DataRank, Media, Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from roll_core.spec.config import StrategyConfig
    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.module_program import ModuleBatch, ModuleLoss, ModuleProgram

StateKind = Literal["weights", "grads", "optimizer"]
"""States that can be offloaded to the host between phases."""

LossMetrics = dict[str, float]
"""Metrics of one microbatch, as its share of the batch: the sum over microbatches and data-parallel ranks is the
batch's value. Names that end in `/max` and `/min` are combined by maximum and minimum instead: a maximum of -inf and a
minimum of inf belong to a microbatch without values, and are not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Concatenated sequences, as tensors on the strategy's device. Optional fields are set if the loss needs them."""

    ids: tuple[str, ...]
    """Ids of the S sequences."""
    tokens_T: Tensor
    """Token ids, int64."""
    positions_T: Tensor
    """int64, counted from 0 in each sequence."""
    segments_T: Tensor
    """int64, index of each token's sequence in this microbatch, 0..S-1."""
    cu_seqlens: Tensor
    """int32 `[S + 1]`, start of each sequence; the last entry is T."""
    lengths: tuple[int, ...]
    """Lengths of the S sequences, as Python integers."""
    loss_mask_T: Tensor
    """bool, tokens that contribute to the loss; never True at a sequence's first token."""
    rollouts_S: Tensor
    """int64, index of each sequence's rollout in the whole batch; distinct negative numbers for sequences that are
    rollouts of their own."""
    rollout_tokens_S: Tensor
    """int64, masked tokens of each sequence's whole rollout, also of its rows in other microbatches."""
    units_S: Tensor
    """int64, unit of each sequence; distinct negative numbers for sequences that are units of their own."""
    totals: Totals
    """Denominators over the whole optimizer step."""
    media_S: tuple[tuple[Media, ...], ...] = ()
    """Images of each sequence, in the order of their tokens; empty if no sequence has any (capability `images`)."""
    streams: Mapping[str, Tensor] = field(default_factory=dict)
    """float32 `[T]`, weights of each stream of `totals.streams`: of a further loss term, by name."""
    old_logprobs_T: Tensor | None = None
    behaviour_logprobs_T: Tensor | None = None
    ref_logprobs_T: Tensor | None = None
    advantages_T: Tensor | None = None
    returns_T: Tensor | None = None
    values_T: Tensor | None = None
    gather_ids_TK: Tensor | None = None
    """int64 `[T, K]`: token ids whose logprobs `WantedOutputs.gathered` requests."""
    teacher_logprobs_TK: Tensor | None = None
    teacher_hidden_TH: Tensor | None = None
    """float32 `[T, H]`, `TokenOutputs.hidden_TH` of another model, for `WantedOutputs.comparison`."""
    routed_experts_TMK: Tensor | None = None
    """int16 `[T, M, K]`: experts to which each token is routed in each layer with experts; -1 lets the router choose.

    Recomputation in the backward pass uses the same experts. Their weights are the router's own: computed from its
    current logits at these indices, with gradients. Not combined with `WantedOutputs.base`.
    """

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return sum(self.lengths)

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S."""
        return len(self.lengths)

    @property
    def read_T(self) -> Tensor:
        """bool, tokens whose outputs a loss may read: in the loss mask, or with a weight in some stream."""
        read_T = self.loss_mask_T
        for weights_T in self.streams.values():
            read_T = read_T | (weights_T != 0)
        return read_T

    def to(self, device: torch.device | str) -> MicroBatch:
        """Copy of the microbatch with its tensors on `device`; see `move_tensors`."""
        import torch

        named = {field.name: getattr(self, field.name) for field in fields(self)}
        named |= {f"streams.{name}": weights_T for name, weights_T in self.streams.items()}
        present = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
        moved: dict[str, Any] = move_tensors(present, device)
        streams = {name: moved.pop(f"streams.{name}") for name in self.streams}
        return replace(self, **moved, streams=streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A value per token from its distributions under another model and under this one, over the whole vocabulary.

    The strategy computes the logprobs of both models chunk by chunk: logits of all tokens never exist at once.
    """

    head: str
    """File that `TrainStrategy.export_head` of the other model wrote."""
    function: Callable[[Tensor, Tensor], Tensor]
    """Returns values `[C]` from logprobs `[C, V]` of the other model and of this one. Picklable, and independent of how
    tokens are split."""
    stream: str = ""
    """Stream whose weights the loss probably multiplies the values with. A hint: a strategy may then compute gradients
    in the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedOutputs:
    """Selects the outputs of a forward pass. Nothing else is computed."""

    logprobs: bool = False
    entropy: bool = False
    entropy_grad: bool = True
    """True if the entropy needs gradients. False if it is only reported, so that a strategy can save work."""
    values: bool = False
    topk: int = 0
    """Number K of most likely tokens to return with their logprobs, best first. With K = 1, ties go to the lowest id.
    Used only with `capabilities.topk`. `UnsupportedError` if K is greater than V."""
    gathered: bool = False
    """Logprobs of the K ids of `MicroBatch.gather_ids_TK`, with gradients. Used only with `capabilities.gathered`.
    `UnsupportedError` if K is greater than V. K counts as 0 for microbatches without ids."""
    hidden: bool = False
    """Input of the head. Used only with `capabilities.whole_vocabulary`."""
    comparison: Comparison | None = None
    """Compares with the model whose hidden states are `MicroBatch.teacher_hidden_TH`, both at `temperature`, with
    gradients. Used only with `capabilities.whole_vocabulary`."""
    masked_only: bool = False
    """Only positions where `MicroBatch.read_T` is True are read. A strategy may leave the others 0 to save work."""
    temperature: float = 1.0
    """Divisor of the logits before the softmax: the sampling temperature of the rollouts."""
    ema: bool = False
    """Compute with the moving average of the trained parameters. Used only with `capabilities.ema`, never by a loss."""
    base: bool = False
    """Compute with the base model, without adapters (`ModelSpec.lora`): a reference policy without a second copy. Used
    only with `capabilities.lora`, and never by a loss."""

    @property
    def head(self) -> bool:
        """True if an output of the language model's head is selected."""
        return self.logprobs or self.entropy or self.topk > 0 or self.gathered or self.comparison is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutputs:
    """Selected outputs of a forward pass, one per token; float32. Logits never leave the strategy.

    Index `t` refers to token `t` given the tokens before it in its sequence; it is 0 for a sequence's first token.
    `values_T[t]` is the value of the state *before* token `t` is sampled. With task `reward`, `values_T[t]` is instead
    the score of the sequence up to and including token `t`; the value at the last token is the sequence's score.
    """

    logprobs_T: Tensor | None = None
    entropy_T: Tensor | None = None
    """Entropy of the distribution of token `t`, in nats."""
    values_T: Tensor | None = None
    topk_logprobs_TK: Tensor | None = None
    topk_ids_TK: Tensor | None = None
    gathered_logprobs_TK: Tensor | None = None
    """Logprob of each id of `MicroBatch.gather_ids_TK`, given the tokens before token `t`."""
    hidden_TH: Tensor | None = None
    """Input of the head from which the distribution of token `t` is computed."""
    compared_T: Tensor | None = None
    """Values of `WantedOutputs.comparison`."""
    routing_disagreement_T: Tensor | None = None
    """With router replay, if the strategy provides it: fraction of replayed experts that the router would not have
    chosen.

    Averaged over layers and top-k, for the token *before* `t`, whose state determines the distribution of token `t`.
    Without gradients.
    """


class LossFn(Protocol):
    """A loss function. It must be pure and picklable (it is sent to workers), and independent of how the batch is
    split."""

    @property
    def want(self) -> WantedOutputs:
        """The outputs that `__call__` reads."""
        ...

    def __call__(self, outputs: TokenOutputs, micro: MicroBatch) -> LossOutput:
        """This microbatch's share of the objective. `outputs` have gradients."""
        ...


_ARGUMENTS = TrainingArguments.model_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """Optimizer settings, which the runtime derives from `training_args` and the pipeline's `max_grad_norm`."""

    learning_rate: float
    weight_decay: float = _ARGUMENTS["weight_decay"].default
    adam_beta1: float = _ARGUMENTS["adam_beta1"].default
    adam_beta2: float = _ARGUMENTS["adam_beta2"].default
    adam_epsilon: float = _ARGUMENTS["adam_epsilon"].default
    optimizer: str = ""
    """`"module:function"` of an `OptimizerFactory`; empty for AdamW. Only with `capabilities.optimizers`."""
    optimizer_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Options of that function, validated."""
    lr_scheduler_type: str = _ARGUMENTS["lr_scheduler_type"].default
    """Name of the schedule, as in transformers."""
    lr_scheduler_kwargs: Mapping[str, float] = field(default_factory=dict)
    """Further arguments of the schedule."""
    warmup_steps: int = _ARGUMENTS["warmup_steps"].default
    num_steps: int = 1
    """Optimizer steps of the whole run: the length of the schedule."""
    ema_decay: float | None = None
    """Keep a moving average of the trained parameters, in float32: `average = d × average + (1 - d) × parameter` after
    each optimizer step that is not skipped. It begins with the first weights and is part of `save` and `load`. None:
    keep none. Used only with `capabilities.ema`."""
    ema_ramp: float | None = None
    """The decay of step t, counted from 1, is min(`ema_decay`, `ema_ramp` × t). None: `ema_decay` from the start."""
    ema_per_batch: bool = False
    """Move the average by `TrainStrategy.move_averages` instead of after each optimizer step: a loss that compares with
    the average compares with the same one in all optimizer steps of a batch."""
    max_grad_norm: float = 0.0
    """Global 2-norm to which gradients are clipped; 0 disables clipping."""


class OptimizerFactory(Protocol):
    """Function that makes an optimizer. Its further parameters are its options, `training_args.optimizer_kwargs`.

    The result's state must consist of tensors, created by the first step; a 0-dimensional `step` counts steps. With
    learning rate 0 and gradients of 0, a step must not change parameters. The strategy sets `lr` of the parameter
    groups before each step, and saves the state of each parameter by its name.
    """

    def __call__(self, parameters: Mapping[str, Tensor], training: TrainingSpec) -> torch.optim.Optimizer:
        """Make the optimizer of float32 leaf tensors, by the parameters' names."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Result of an optimizer step."""

    grad_norm: float
    """Global 2-norm of the summed gradient, before clipping."""
    learning_rate: float
    """Learning rate of this step."""
    skipped: bool = False
    """True if the gradient was not finite. Nothing was changed."""
    overflow: bool = False
    """True if the step was skipped only because of the loss scale (float16). The scale was lowered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """AdamW's state of one trained parameter: full tensors of its shape, in float32 whatever the model's dtype."""

    master: Tensor
    """Master weights: the parameter before rounding to the model's dtype."""
    exp_avg: Tensor
    """First moment of the clipped gradients, without bias correction."""
    exp_avg_sq: Tensor
    """Second moment of the clipped gradients, without bias correction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableState:
    """Training state in the format shared by all strategies: step count, and master weights and moments of every
    trained parameter. Frozen parameters are not included. Nor is the random state, which training does not use."""

    step_count: int
    """Optimizer steps taken, without skipped ones: the position in the schedule and in the bias correction."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the trained parameters, in a fixed order, by their names in the Hugging Face module. Tied parameters
    appear once, under the first name. Adapters have peft's names, `….q_proj.lora_A.default.weight`."""
    read: Callable[[str], ParameterState]
    """Reads one parameter. Exported states: all ranks read all names in the order of `shapes`; rank 0 gets whole
    tensors, valid until the next read. States to import: each rank reads any names, in any order, any number of
    times."""
    adapters: Mapping[str, Any] | None = None
    """With adapters: identity of the base model (`Adapters.identity` of `roll_modeling.lora`). Otherwise None."""
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    """Buffers that transformers saves with the model, such as DeepSeek-V3's `e_score_correction_bias`: whole, with
    their names and dtypes there. Empty with adapters: the base model has its own."""


class TrainStrategy(ABC):
    """One worker's part of a model that is trained or scored. Constructed in the worker's process."""

    def __init__(self, config: StrategyConfig, training: TrainingSpec | None) -> None:
        """Keep the arguments; do not touch devices. `training` is None for roles that only score."""
        self.config = config
        self.training = training

    @abstractmethod
    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load or initialise the model, and the optimizer unless the role only scores. Called once, on all ranks
        together."""

    @property
    def data_rank(self) -> DataRank:
        """Share of the data that this rank works on; valid after `build`. Pure data parallelism unless overridden."""
        return DataRank(index=self._mesh.rank, size=self._mesh.world_size)

    @property
    def microbatch_multiple(self) -> int:
        """Preferred divisor of the number of microbatches of `forward_backward` and `forward_all`, for example the
        number of pipeline stages. The runtime uses it when it fills microbatches by tokens."""
        return 1

    _mesh: MeshInfo

    if not TYPE_CHECKING:  # with it, type checkers would accept misspelt attributes

        def __getattr__(self, name: str) -> Any:
            """Called only for missing attributes. Raises `NotBuiltError` before `build` has set `_mesh`."""
            if "_mesh" in vars(self):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise NotBuiltError(f"{type(self).__name__} has no {name!r}: call build first")

    @abstractmethod
    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Compute the outputs without gradients, on the host or the device, complete on leader ranks. If a model is
        spread over ranks, these ranks call it together."""

    def forward_all(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Call `forward` for each microbatch.

        Called on all ranks together. Each rank passes its own microbatches, any number of them, possibly none. A
        strategy whose `forward` is collective over ranks must equalise these numbers here.
        """
        return (self.forward(micro, want) for micro in micros)

    def activations(self, micro: MicroBatch) -> Mapping[str, Tensor]:
        """Activations `[T, W]` of a forward pass of one sequence, float32 on the host, by point.

        A point is the output of a module, by its name in the Hugging Face model, or the input of a linear layer, by its
        name and `:input`. The strategy returns those that it has. Only with `capabilities.activations`.
        """
        raise UnsupportedError(f"{type(self).__name__} returns no activations")

    @abstractmethod
    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Add the gradients of all `micros` to the accumulated ones; returns the metrics of each microbatch.

        Gradients are *summed* over microbatches and data-parallel ranks: the gradient of a batch does not depend on how
        it is split. May be called several times before a step.
        """

    def run_module(self, batches: Sequence[ModuleBatch], program: ModuleProgram) -> Iterator[Mapping[str, Tensor]]:
        """Run a program for each batch, without gradients. Called on all ranks together, like `forward_all`: each rank
        passes its own batches, possibly none, and a strategy whose forward pass is collective equalises their numbers.
        Only with `capabilities.module_programs`."""
        raise UnsupportedError(f"{type(self).__name__} runs no module programs")

    def forward_backward_module(self, batches: Sequence[ModuleBatch], loss: ModuleLoss) -> list[LossMetrics]:
        """Like `forward_backward`, for a loss that calls the module itself. Raises `NonFiniteError` on every rank,
        naming the rows, if a loss is not finite. Only with `capabilities.module_programs`."""
        raise UnsupportedError(f"{type(self).__name__} runs no module programs")

    @abstractmethod
    def optimizer_step(self) -> StepStats:
        """Clip, step, advance the schedule and clear the gradients. A non-finite gradient changes nothing
        (`skipped`)."""

    def move_averages(self) -> None:
        """Move the moving average once, with the decay of the last optimizer step. Called on all ranks together after
        the last optimizer step of a batch, only with `TrainingSpec.ema_per_batch`."""
        raise UnsupportedError(f"{type(self).__name__} moves its average after each optimizer step only")

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors, in a fixed order.

        All ranks iterate together; only leader ranks get the tensors. A tensor may be the live parameter: read it
        before the next step. With adapters, it is the merged weight W + scale · B A, a new tensor that the caller may
        keep; names are those of the model without adapters, and the parameters do not change.
        """

    def frozen_weights(self) -> Collection[str]:
        """Names in `export_weights` whose values never change, such as those of a frozen image encoder.

        Engines with `keeps_weights` receive them once. Parameters of a layer are frozen together, because engines fuse
        them. Valid after `build` on every rank. Default: none.
        """
        return ()

    def export_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of buffers that an engine needs as well, such as routers' `e_score_correction_bias`.

        Iterated like `export_weights`. They are sent after the weights, in their own dtype: rounded to bfloat16 they
        would choose other experts.
        """
        return iter(())

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield A `[R, I]` and B `[O, R]` of every target, in a fixed order.

        Names are `<path of the layer>.lora_A.weight` and `.lora_B.weight`. The layer computes x Wᵀ + (x Aᵀ) Bᵀ: the
        scale is included in B. Iterated like `export_weights`; called only with `capabilities.adapter_export`.

        Raises `UnsupportedError` if modules are trained in full next to the adapters.
        """
        raise UnsupportedError(f"{type(self).__name__} does not export adapters apart from the model")

    @abstractmethod
    def save(self, path: Path) -> Callable[[], None] | None:
        """Save everything needed to continue bit for bit into the directory `path`, which the caller creates. Called on
        all ranks together.

        May return a function that finishes writing. It writes the state as of this call, without using the device or
        other ranks, and raises if it fails. The runtime calls it once, on another thread, while the strategy continues;
        or never, if the run ends before. A checkpoint is complete once the functions of all ranks have returned. The
        next save waits for them.
        """

    @abstractmethod
    def load(self, path: Path) -> None:
        """Continue from a directory that `save` wrote."""

    def export_state(self) -> PortableState:
        """Export the training state for `import_state` of any other strategy. Changes nothing. Called on all ranks
        together, and only with `capabilities.portable_state`."""
        raise UnsupportedError(f"{type(self).__name__} does not export its training state")

    def import_state(self, state: PortableState) -> None:
        """Continue from a state exported by another strategy or another number of ranks, within float32 rounding.

        Discards gradients and all other previous state. Called on all ranks together, each of which can read all of
        `state`; only with `capabilities.portable_state`.

        Raises `CheckpointError` if the parameters, or the base model of adapters, are not those of this role.
        `roll_modeling.portable_state` implements the comparison.
        """
        raise UnsupportedError(f"{type(self).__name__} does not import another strategy's training state")

    def save_portable(self, path: Path) -> None:
        """Write the files of `export_state` into the directory `path` (`roll_modeling.portable_files` does this).

        Called on all ranks together, of which rank 0 writes, and only with `capabilities.portable_state`.
        """
        raise UnsupportedError(f"{type(self).__name__} does not write its training state for other strategies")

    def load_portable(self, path: Path) -> None:
        """`import_state` from the files that `save_portable` of any strategy wrote. Called on all ranks together, and
        only with `capabilities.portable_state`. Raises `CheckpointError`."""
        raise UnsupportedError(f"{type(self).__name__} does not read another strategy's training state")

    def export_model(self, path: Path) -> None:
        """Write a directory that `transformers` loads with `from_pretrained`, tokenizer included.

        Raises `UnsupportedError` if the task has no such format.
        """
        raise UnsupportedError(f"{type(self).__name__} does not export models")

    def export_head(self, path: Path) -> None:
        """Write the output layer to the file `path`, for `Comparison.head`. Called on all ranks together, and only with
        `capabilities.whole_vocabulary`; rank 0 writes. Raises `UnsupportedError` if the head is no linear layer."""
        raise UnsupportedError(f"{type(self).__name__} does not export its head")

    def offload(self, parts: Sequence[StateKind]) -> None:
        """Move `parts` to the host and free their device memory. Parts that are already offloaded stay there.

        Called on all ranks, only with `capabilities.offload`. Not called on platforms whose slots are the host's cores
        (`slots_share_cores`), where it would free nothing. With `grads` and `optimizer` offloaded, `forward` and
        `export_weights` may be called; everything else only after all parts are onloaded.
        """

    def onload(self, parts: Sequence[StateKind]) -> None:
        """Move offloaded `parts` back to the device. Changes no value."""

    def memory(self) -> Mapping[str, int]:
        """Bytes of `weights`, `grads` and `optimizer` on this rank, as far as known."""
        return {}

    def close(self) -> None:
        """Release everything. May be called more than once, also after an error."""


document_fields(__name__)
