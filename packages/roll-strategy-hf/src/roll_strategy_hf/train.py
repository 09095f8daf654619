"""Embedded train strategy `hf_train`: Hugging Face models with data parallelism; every rank holds the whole model.

MicroBatch -> TaskModel -> TokenOutputs -> loss -> backward -> flat float32 gradients -> all-reduce, clip, AdamW
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from roll_core.errors import NonFiniteError
from roll_modeling.export import write_model
from roll_modeling.kernels import fuse
from roll_modeling.layout import make_adjacent
from roll_modeling.offload import host_copies, keep_freed_memory
from roll_modeling.pending_losses import Batch, PendingLosses, moved_ahead
from roll_modeling.portable_state import check_adapters, stored_buffers, take_buffers
from roll_modeling.quantization import quant_states
from roll_modeling.state_files import (
    STATE,
    check_names,
    check_tensor,
    load_random,
    read_state,
    reading,
    save_random,
    write_json,
)
from roll_modeling.strategy import HuggingFaceStrategy
from roll_modeling.task_model import TaskModel
from roll_strategy_hf.optimizer import ModelOptimizer
from roll_strategy_hf.replicas import Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.module_program import ModuleBatch, ModuleLoss, ModuleProgram
    from roll_core.spec.train import (
        LossFn,
        LossMetrics,
        LossOutput,
        MicroBatch,
        PortableState,
        StateKind,
        StepStats,
        TokenOutputs,
        WantedOutputs,
    )
    from roll_modeling.module_programs import StrategyModule
    from roll_strategy_hf.config import HFTrainConfig

log = logging.getLogger(__name__)

FORMAT = 1
"""Format version of the saved training state."""


class HFTrainStrategy(HuggingFaceStrategy[ModelOptimizer]):
    """Trains a Hugging Face model or, without `training`, only runs forward passes.

    Dropout is off: logprobs before an update and during it must come from the same function.
    """

    config: HFTrainConfig

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the model, add adapters, fuse modules, broadcast rank 0's parameters and create the optimizer."""
        self._begin_build(model, mesh)
        self.replicas = Replicas(mesh)
        self.model = self._load_model(mesh.device)
        if self.library is None:
            make_adjacent(self.model)
        self.adapters = self._add_adapters()
        if self.config.fused:
            if self.library is None and not self.config.torch_compile:
                log.info("%s: %d modules fused", mesh.role, fuse(self.model))
            if mesh.device == "cpu":
                keep_freed_memory()
        self.replicas.broadcast(self._weights())
        if self.library is None:
            self.task_model = TaskModel(
                self.model, model, chunk_tokens=self.config.logprob_chunk_tokens, router_losses=self.config
            )
        self._prepare_blocks(self.config)
        if self.training is not None:
            self.optimizer = ModelOptimizer(dict(self.model.named_parameters()), self.training, self.replicas)

    # -- computing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Run a forward pass without gradients; outputs are on the mesh's device."""
        (outputs,) = self.forward_all([micro], want)
        return outputs

    @torch.no_grad()
    def forward_all(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Run forward passes, with the moving average of the parameters if wanted."""
        self.offloader.need("weights")
        with self._require_training().averaged() if want.ema else nullcontext():
            for micro, moved in moved_ahead(micros, self._mesh.device):
                yield self.task_model.outputs(moved, want, micro)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Run forward and backward passes and accumulate gradients. Collective over the ranks.

        If a loss is not finite, raises `NonFiniteError` with the sequences on every rank, and drops the accumulated
        gradients.
        """

        def compute(micro: MicroBatch, moved: MicroBatch, losses: PendingLosses) -> LossOutput:
            outputs = self.task_model.outputs(moved, loss.want, micro)
            output = self.task_model.loss(loss, outputs, moved)
            losses.add_tokens(output, outputs, micro)
            return output

        return self._backward(micros, compute)

    @torch.no_grad()
    def run_module(self, batches: Sequence[ModuleBatch], program: ModuleProgram) -> Iterator[Mapping[str, Tensor]]:
        """Run a program for each batch."""
        module = self._module()
        for _, moved in moved_ahead(batches, self._mesh.device):
            yield program(module, moved)

    def forward_backward_module(self, batches: Sequence[ModuleBatch], loss: ModuleLoss) -> list[LossMetrics]:
        """Run losses and their backward passes and accumulate gradients. Collective over the ranks.

        If a loss is not finite, raises `NonFiniteError` with the rows on every rank, and drops the accumulated
        gradients.
        """
        module = self._module()

        def compute(batch: ModuleBatch, moved: ModuleBatch, losses: PendingLosses) -> LossOutput:
            output = loss(module, moved)
            losses.add_rows(output, batch)
            return output

        return self._backward(batches, compute)

    def optimizer_step(self) -> StepStats:
        """Reduce gradients over ranks, clip, and update the parameters. Collective over the ranks."""
        return self._require_training().step()

    @override
    def move_averages(self) -> None:
        self._require_training().move_averages()

    def _backward(
        self, batches: Sequence[Batch], compute: Callable[[Batch, Batch, PendingLosses], LossOutput]
    ) -> list[LossMetrics]:
        """Compute the loss of each batch and its gradients. Raises `NonFiniteError` on every rank."""
        optimizer = self._require_training()
        losses = PendingLosses(self._mesh.device, self.replicas.group)
        try:
            for batch, moved in moved_ahead(batches, self._mesh.device):
                output = compute(batch, moved, losses)
                if output.loss.requires_grad:
                    output.loss.backward()  # type: ignore[no-untyped-call]
        except NonFiniteError as error:
            losses.fail(error)
        try:
            return losses.read()
        except NonFiniteError:
            optimizer.clear()
            raise

    def _module(self) -> StrategyModule:
        return self._program_module(self.model, lambda: self._require_training().averaged())

    # -- weights -------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live parameters, or merged weights with adapters. Tied parameters occur once, under their first name."""
        self.offloader.need("weights")
        if self.adapters is not None:
            return self.adapters.merged()
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def export_model(self, path: Path) -> None:
        """Write the model from rank 0, as transformers or its library loads it, or only the adapter with `lora_export:
        adapter`."""
        if self.replicas.rank == 0 and self.adapters is not None and self.adapters.lora.export == "adapter":
            self.adapters.export(path)
        elif self.replicas.rank == 0:
            tensors = self.model.state_dict() if self.adapters is None else self.adapters.state_dict()
            # Copies, because parameters may be views of one buffer; tied parameters share one copy.
            copies: dict[int, Tensor] = {}
            state = {
                name: copies.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), tensor.detach().clone())
                for name, tensor in tensors.items()
            }
            if self.library is not None:
                self.library.write(self.model, self.spec, state, path)
            else:
                write_model(self.model, self.spec, state, path)
        self.replicas.wait()

    def export_head(self, path: Path) -> None:
        """Write the output layer from rank 0."""
        self._write_head(self.task_model.head, path)
        self.replicas.wait()

    # -- continuing ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> Callable[[], None] | None:
        """Save the training state. Rank 0 writes weights and optimizer state, which are equal on all ranks.

        With adapters, writes only the trained weights and an identity of the base model. With `async_save_ckpt`, copies
        the tensors to host memory and returns a function that writes them; otherwise returns None.
        """
        state: dict[str, Any] = {"format": FORMAT, "world_size": self.replicas.size}
        files: dict[str, dict[str, Tensor]] = {}
        if self.replicas.rank == 0:
            files["weights.safetensors"] = self._saved_weights()
            if self.adapters is not None:
                state["adapters"] = self._identity()
            if self.optimizer is not None:
                files["optimizer.safetensors"] = self.optimizer.tensors()
                state["step_count"] = self.optimizer.step_count
        save_random(path)
        write_json(path / STATE, state)
        if self.config.async_save_ckpt:
            return partial(_write, {name: host_copies(tensors) for name, tensors in files.items()}, path)
        _write(files, path)
        self.replicas.wait()
        return None

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Load the training state on rank 0 and broadcast it; the number of ranks may differ from that of the save.

        Raises `CheckpointError` if files are missing or invalid, or belong to another model or format.
        """
        step_count = torch.zeros(1, dtype=torch.int64, device=self._mesh.device)
        if self.replicas.rank == 0:
            with reading(path):
                state = read_state(path, FORMAT)
                check_adapters(state.get("adapters"), self.adapters, self._identity(), path)
                _restore(self._saved_weights(), path / "weights.safetensors")
                if self.optimizer is not None:
                    _restore(self.optimizer.tensors(), path / "optimizer.safetensors")
                    step_count[0] = state["step_count"]
        self.replicas.broadcast([step_count, *self._saved_weights().values()])
        if self.optimizer is not None:
            self.replicas.broadcast(self.optimizer.tensors().values())
            self.optimizer.restored(int(step_count))
        load_random(path)

    def export_state(self) -> PortableState:
        """Portable training state that reads the live tensors; available on every rank."""
        optimizer = self._require_training()
        return self._portable_state(optimizer.step_count, _shapes(optimizer.parameters), optimizer.held)

    @torch.no_grad()
    def import_state(self, state: PortableState) -> None:
        """Load a portable training state; each rank reads all of it."""
        optimizer = self._require_training()
        self._check_state(state, _shapes(optimizer.parameters))
        for name in optimizer.parameters:
            loaded, held = state.read(name), optimizer.held(name)
            held.master.copy_(loaded.master)
            held.exp_avg.copy_(loaded.exp_avg)
            held.exp_avg_sq.copy_(loaded.exp_avg_sq)
        take_buffers(state, stored_buffers(self.model))
        optimizer.restored(state.step_count)

    def _saved_weights(self) -> dict[str, Tensor]:
        """Live weights that a saved state contains: trained adapter weights, or all weights."""
        if self.adapters is not None:
            return {name: tensor.detach() for name, tensor in self.adapters.trained().items()}
        return dict(self.export_weights())

    # -- between phases ------------------------------------------------------------------------------------------------

    @override
    def part_tensors(self) -> dict[StateKind, list[Tensor]]:
        weights = self._weights()
        if self.optimizer is None:
            return {"weights": weights}
        return {"weights": weights, "grads": [self.optimizer.flat_grad], "optimizer": self.optimizer.state()}

    def _weights(self) -> list[Tensor]:
        """Parameters, and the scales of those in 4 bits."""
        scales = [state.absmax for state in quant_states(self.model).values()]
        return [*(parameter.data for parameter in self.model.parameters()), *scales]

    def close(self) -> None:
        """Leave the process group and release the optimizer."""
        super().close()
        if hasattr(self, "replicas"):
            self.replicas.close()
        self.optimizer = None


def _shapes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def _write(files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    from safetensors.torch import save_file

    for name, tensors in files.items():
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name)


def _restore(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Overwrite `tensors` in place from the file. Raises `CheckpointError` unless names, shapes and dtypes match."""
    from safetensors import safe_open

    with reading(file), safe_open(file, framework="pt") as stored:
        check_names(stored.keys(), tensors, file)
        for name, tensor in tensors.items():
            loaded = stored.get_tensor(name)
            check_tensor(name, (loaded.dtype, loaded.shape), (tensor.dtype, tensor.shape), file)
            tensor.copy_(loaded)
