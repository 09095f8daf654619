"""Module programs: training, sampling and scoring of models without tokens, such as flow models.

A program is a picklable function that a pipeline sends to the workers of a role. The strategy calls it with the role's
torch module, sharded and in the compute dtype as the strategy keeps it, and with a batch. The program calls the module
any number of times and returns tensors, or a loss. The strategy does what it does for tokens: it sums gradients, keeps
optimizer and checkpoints, and knows no algorithm.

Shapes: B rows of a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from roll_core.errors import ModelError
from roll_core.field_docs import document_fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from roll_core.spec.model import ModelSize, ModelSpec


_ALIGNMENT = 64
"""Bytes to which the tensors of one copy are aligned, so that kernels read them as if they were alone."""


def move_tensors(tensors: Mapping[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """`tensors` on `device`.

    From the host to an accelerator they travel in one copy from pinned memory, for which the host does not wait, and
    then share one storage.
    """
    import torch

    target, accelerator = torch.device(device), torch.accelerator.current_accelerator()
    on_host = all(tensor.device.type == "cpu" for tensor in tensors.values())
    if accelerator is None or target.type != accelerator.type or not on_host:
        return {name: tensor.to(target) for name, tensor in tensors.items()}
    spans: dict[str, slice] = {}
    end = 0
    for name, tensor in tensors.items():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.nbytes
        spans[name] = slice(start, end)

    def view(buffer: Tensor, name: str) -> Tensor:
        return buffer[spans[name]].view(tensors[name].dtype).view(tensors[name].shape)

    pinned = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for name, tensor in tensors.items():
        view(pinned, name).copy_(tensor)
    moved = pinned.to(target, non_blocking=True)
    return {name: view(moved, name) for name in tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One row of data for a program. Rows with equal names, shapes and dtypes of arrays may be in one batch."""

    id: str
    arrays: Mapping[str, NDArray[np.generic]]
    """Arrays by name, without batch dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBatch:
    """Rows as tensors on the strategy's device."""

    ids: tuple[str, ...]
    """Ids of the B rows."""
    tensors: Mapping[str, Tensor]
    """`[B, ...]`, in the dtypes of the rows."""
    total_rows: int = 1
    """Rows of the whole optimizer step, over all batches and data-parallel ranks: the denominator of losses. 1 if
    nothing is trained."""
    epoch: int = 0
    """Pass over the rows of an update, counted from 0. A loss with random numbers needs new ones in each."""

    def to(self, device: torch.device | str) -> ModuleBatch:
        """Copy of the batch with its tensors on `device`; see `move_tensors`."""
        return replace(self, tensors=move_tensors(self.tensors, device))


class ProgramModule(Protocol):
    """The module as a program sees it.

    Ranks may hold shards of the module and call it together: a program calls it equally often, and enters `base` and
    `average` equally often, for every batch.
    """

    @property
    def device(self) -> torch.device:
        """Device of inputs and outputs."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, in evaluation mode. Floating-point inputs of two or more dimensions are cast to
        the compute dtype; inputs `[B]`, such as the time of a flow, keep their precision."""
        ...

    def base(self) -> AbstractContextManager[None]:
        """Within it, calls use the model without its adapters, and have no gradients. Raises `UnsupportedError` without
        adapters (`ModelSpec.lora`)."""
        ...

    def average(self) -> AbstractContextManager[None]:
        """Within it, calls use the moving average of the trained parameters, and have no gradients. Raises
        `UnsupportedError` without `TrainingSpec.ema_decay`."""
        ...


class ModuleProgram(Protocol):
    """A picklable function without gradients: sampling, or outputs of the model."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> Mapping[str, Tensor]:
        """Tensors `[B, ...]` by name, on any device."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Result of a loss for one batch, of a program or of tokens (`roll_core.spec.train.LossFn`)."""

    loss: Tensor
    """Scalar: this batch's share of the global objective, with denominators from `ModuleBatch.total_rows` or
    `MicroBatch.totals`."""
    metrics: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Shares, see `LossMetrics` in `roll_core.spec.train`. The strategy detaches tensors."""


class ModuleLoss(Protocol):
    """A picklable loss. It must be independent of how rows are split into batches."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> LossOutput:
        """This batch's share of the objective, with denominator `batch.total_rows`. `LossOutput.metrics` are shares,
        too."""
        ...


class ModelLibrary(ABC):
    """Loads and writes the models of a task that transformers does not have. `ModelSpec.library` names a subclass,
    which strategies construct without arguments."""

    @abstractmethod
    def load(self, spec: ModelSpec) -> nn.Module:
        """Build the module on the host in evaluation mode, with parameters in `spec.dtype`: from `spec.path`, or with
        random weights from `spec.random_init` and `spec.seed`. Equal seeds give equal weights for every dtype, and the
        global random state is unchanged. Raises `ModelError`."""

    @abstractmethod
    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """The module's repeated blocks: units of sharding and of gradient checkpointing."""

    def call_together(self, module: nn.Module) -> None:
        """Called once, before the first call of the module, if the ranks of the default process group shard it and call
        it together: each call must then use the same parameters on every rank. Without it, ranks call the module
        independently. Default: does nothing, for modules that always use all their parameters."""

    def size(self, spec: ModelSpec) -> ModelSize:
        """Size of the model for memory estimates, from its configuration: no weights are loaded. Raises `ModelError`,
        also if the library has no sizes."""
        raise ModelError(f"sizes of models of {spec.library} are not known to plans")

    @abstractmethod
    def write(self, module: nn.Module, spec: ModelSpec, state: Mapping[str, Tensor], path: Path) -> None:
        """Write `state`, by the names of the module's parameters and stored buffers, to the directory `path`, so that
        `load` and the library's users read it. `module` has the configuration; its own weights may be sharded,
        and adapters may be in it."""


document_fields(__name__)
