"""`HuggingFaceStrategy`: what train strategies for Hugging Face models have in common."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from roll_core.errors import UnsupportedError
from roll_core.spec.train import PortableState, StateKind, TrainStrategy, WantedOutputs
from roll_modeling.activations import recorded
from roll_modeling.blocks import prepare_blocks, transformer_blocks
from roll_modeling.lora import Adapters, adapters_off, add_adapters, base_name
from roll_modeling.model import DTYPES, frozen_parameters, load_model, trained_parameters
from roll_modeling.module_programs import StrategyModule, load_module, model_library
from roll_modeling.offload import Offloader
from roll_modeling.pieces import warn_of_mtp, write_gathered
from roll_modeling.portable_files import opened_portable_state, write_portable_state
from roll_modeling.portable_state import check_same, router_buffers, stored_buffers
from roll_modeling.process_group import select_device

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.module_program import ModelLibrary
    from roll_core.spec.train import MicroBatch, ParameterState
    from roll_modeling.backbone import LanguageHead
    from roll_modeling.strategy_config import HuggingFaceConfig

OptimizerT = TypeVar("OptimizerT")


class HuggingFaceStrategy(TrainStrategy, Generic[OptimizerT]):
    """Base class: roles that only score, adapters, portable state, and offload.

    `OptimizerT` is the class of the rank's optimizer.
    """

    spec: ModelSpec
    model: PreTrainedModel
    """With a library, its module, which is of another class."""
    library: ModelLibrary | None = None
    """Library of `spec.library`; None for models of transformers."""
    adapters: Adapters | None
    optimizer: OptimizerT | None = None
    """None for a role that only scores."""
    _frozen: frozenset[str] = frozenset()

    def _begin_build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Keep the arguments of `build`, create the library, and set this thread's device and number of threads."""
        if mesh.num_threads:
            torch.set_num_threads(mesh.num_threads)
        select_device(torch.device(mesh.device))
        self._mesh, self.spec = mesh, model
        self.library = model_library(model)
        if self.training is not None and self.library is None and mesh.rank == 0 and model.random_init is None:
            warn_of_mtp(model.path)
        self.offloader = Offloader(mesh.role, torch.device(mesh.device))

    def _load_model(self, device: str) -> PreTrainedModel:
        """Load the model of `spec`, of transformers or of the library; into host memory if it is quantized then."""
        if self.spec.lora is not None and self.spec.lora.load_in_4bit:
            device = "cpu"
        if self.library is None:
            return load_model(self.spec, device=device)
        return cast("PreTrainedModel", load_module(self.library, self.spec, device=device))

    def _add_adapters(self) -> Adapters | None:
        """Add the adapters of the spec, if any, to `model`, and set `requires_grad` of the parameters."""
        adapters = add_adapters(self.model, self.spec, device=self._mesh.device) if self.spec.lora is not None else None
        if adapters is None or self.training is None:
            self.model.requires_grad_(False)
            if self.training is not None:
                every = trained_parameters(self.model, self.spec) if self.library is None else self.model.parameters()
                for parameter in every:
                    parameter.requires_grad_(True)
        if self.library is None:
            self._frozen = frozenset(base_name(name) for name in frozen_parameters(self.model))
        return adapters

    def _prepare_blocks(self, config: HuggingFaceConfig) -> None:
        """Set up recomputation, activation offload and compilation of the blocks, after trials of the model.

        Raises `UnsupportedError` for losses of routers of a library's model.
        """
        if self.library is not None and config.router_loss:
            raise UnsupportedError(f"role {self._mesh.role}: {config.router_loss} is not supported for library models")
        recomputes = self.training is not None and self.spec.gradient_checkpointing
        if not recomputes and not config.torch_compile:
            return
        prepare_blocks(
            transformer_blocks(self.model) if self.library is None else self.library.blocks(self.model),
            recomputation=(config.recompute_granularity or "full") if recomputes else None,
            offload_from=torch.device(self._mesh.device) if config.activation_offloading else None,
            compiled=config.torch_compile,
        )

    def _require_training(self) -> OptimizerT:
        """Return the optimizer. Raises `UnsupportedError` for a role that only scores, or if a part is offloaded."""
        if self.optimizer is None:
            raise UnsupportedError(f"role {self._mesh.role} only scores: it was built without training settings")
        self.offloader.need("weights", "grads", "optimizer")
        return self.optimizer

    def activations(self, micro: MicroBatch) -> Mapping[str, Tensor]:
        """Activations of a forward pass, see `TrainStrategy.activations`. Fused modules have no points inside."""
        with recorded(self.model) as activations:
            self.forward(micro, WantedOutputs(logprobs=True))
        if any(micro.media_S):
            return activations  # an image encoder has a row for each patch
        return {name: tensor[: micro.num_tokens] for name, tensor in activations.items()}  # batches may be padded

    # -- module programs -----------------------------------------------------------------------------------------------

    def _program_module(
        self,
        forward: Callable[..., Any],
        average: Callable[[], AbstractContextManager[None]],
        dtype: torch.dtype | None = None,
    ) -> StrategyModule:
        """The module as programs see it. `average` puts the moving average into the parameters; `dtype` is the compute
        dtype, by default that of the spec.

        Raises `UnsupportedError` for a model of transformers.
        """
        self.offloader.need("weights")
        if self.library is None:
            raise UnsupportedError(f"role {self._mesh.role}: module programs need a model of a library")
        averages = self.training is not None and self.training.ema_decay is not None
        return StrategyModule(
            forward,
            device=self._mesh.device,
            dtype=dtype or DTYPES[self.spec.dtype],
            base=partial(adapters_off, self.model) if self.adapters is not None else None,
            average=average if averages else None,
        )

    # -- weights -------------------------------------------------------------------------------------------------------

    def frozen_weights(self) -> Collection[str]:
        """Parameters of the parts of `model_args.freeze`, unless an adapter of the part is trained."""
        return self._frozen

    def export_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Correction biases of routers, see `router_buffers`."""
        return router_buffers(self.model)

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """LoRA factors A and B as whole tensors; B includes the LoRA scale. Collective if parameters are sharded.

        Raises `UnsupportedError` without adapters.
        """
        self.offloader.need("weights")
        if self.adapters is None:
            raise UnsupportedError(f"role {self._mesh.role} trains the whole model: it has no adapters to export")
        return self.adapters.exported(self._whole)

    def _whole(self, parameter: Tensor) -> Tensor:
        """The whole tensor of a parameter, which a subclass may have to gather."""
        return parameter

    def _identity(self) -> dict[str, Any] | None:
        """Base model and adapters, which must match on resume; None without adapters. Collective."""
        return self.adapters.identity(self._whole) if self.adapters is not None else None

    def _write_gathered(
        self,
        path: Path,
        spec: ModelSpec,
        shape_of: Callable[[Tensor], tuple[int, ...]] = lambda parameter: tuple(parameter.shape),
    ) -> None:
        """Write a directory that transformers or the library loads: the model, or only the adapters with `lora_export:
        adapter`.

        Rank 0 writes. `shape_of` is the whole shape of a parameter. Collective.
        """
        write_gathered(
            self.model,
            spec,
            path,
            adapters=self.adapters,
            exported=self.export_weights(),
            gather=self._whole,
            shape_of=shape_of,
            writes=self._mesh.rank == 0,
            library=self.library,
        )

    def _write_head(self, head: LanguageHead | None, path: Path) -> None:
        """Write the output layer, for `export_head`. Rank 0 writes. Collective if parameters are sharded."""
        self.offloader.need("weights")
        if head is None:
            raise UnsupportedError(f"a model of task {self.spec.task} has no output layer of a vocabulary")
        head.write(path, self._whole, writes=self._mesh.rank == 0)

    # -- portable state ------------------------------------------------------------------------------------------------

    def _portable_state(
        self, step_count: int, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], ParameterState]
    ) -> PortableState:
        """The state of `export_state`, with the adapters' identity or the model's buffers.

        Raises `UnsupportedError` with `ema_decay`.
        """
        self._check_no_average()
        buffers = stored_buffers(self.model) if self.adapters is None else {}
        return PortableState(
            step_count=step_count, shapes=shapes, read=read, adapters=self._identity(), buffers=buffers
        )

    def _check_state(self, state: PortableState, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `CheckpointError` unless `import_state` may load `state`, and `UnsupportedError` with `ema_decay`."""
        self._check_no_average()
        check_same(state, shapes, adapters=self.adapters, identity=self._identity())

    def save_portable(self, path: Path) -> None:
        """Write the files of `export_state` into `path`. Collective; rank 0 writes."""
        write_portable_state(self.export_state(), self.spec, path, leads=self._mesh.rank == 0)

    def load_portable(self, path: Path) -> None:
        """Import the state whose files are in `path`. Collective. Raises `CheckpointError`."""
        with opened_portable_state(path) as state:
            self.import_state(state)

    def _check_no_average(self) -> None:
        if self.training is not None and self.training.ema_decay is not None:
            raise UnsupportedError(
                f"role {self._mesh.role} keeps a moving average (ema_decay), which a portable state does not contain:"
                " resume with the same strategy, and set portable_checkpoints: false"
            )

    # -- offload -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def part_tensors(self) -> dict[StateKind, list[Tensor]]:
        """This rank's tensors of each part."""

    def offload(self, parts: Sequence[StateKind]) -> None:
        """Move this rank's tensors of `parts` to host memory."""
        for part in parts:
            self.offloader.offload(part, self.part_tensors().get(part, ()))

    def onload(self, parts: Sequence[StateKind]) -> None:
        """Move `parts` back to the device, into the same tensors."""
        for part in parts:
            self.offloader.onload(part)

    def close(self) -> None:
        """Return host memory of offloaded parts. Subclasses release the rest."""
        if hasattr(self, "offloader"):
            self.offloader.close()

    def memory(self) -> Mapping[str, int]:
        """Bytes of this rank's tensors by part; 0 for offloaded parts."""
        held = {part: sum(tensor.nbytes for tensor in tensors) for part, tensors in self.part_tensors().items()}
        return {part: 0 if self.offloader.has(part) else size for part, size in held.items()}
