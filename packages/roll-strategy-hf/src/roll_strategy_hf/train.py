"""Embedded train strategy `hf_train`: Hugging Face models with data parallelism; every rank holds the whole model.

MicroBatch -> TaskModel -> TokenOutputs -> loss -> backward -> flat float32 gradients -> all-reduce, clip, AdamW
"""

from __future__ import annotations

import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import CheckpointError, NonFiniteError, RollError, UnsupportedError
from roll_core.spec.providers import TrainCapabilities
from roll_core.spec.train import (
    LossFn,
    LossMetrics,
    MicroBatch,
    PortableState,
    StateKind,
    StepStats,
    TokenOutputs,
    TrainStrategy,
    WantedOutputs,
)
from roll_modeling.backbone import checkpoint_layers
from roll_modeling.export import write_model
from roll_modeling.fused import fuse
from roll_modeling.host_memory import keep_freed_memory
from roll_modeling.layout import make_adjacent
from roll_modeling.model import load_model
from roll_modeling.moving import Mover, host_copies, num_bytes
from roll_modeling.portable_state import check_adapters, check_same, stored_buffers, take_buffers
from roll_modeling.task_model import TaskModel, finite_loss, plain_metrics
from roll_strategy_hf.config import HFTrainConfig
from roll_strategy_hf.optimizer import AdamW
from roll_strategy_hf.replicas import Replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_modeling.lora import Adapters

log = logging.getLogger(__name__)

FORMAT = 1
"""Format version of the saved training state."""


class HFTrainStrategy(TrainStrategy):
    """Trains a Hugging Face model or, without `training`, only runs forward passes.

    Dropout is off: logprobs before an update and during it must come from the same function.
    """

    capabilities = TrainCapabilities(
        tasks=("causal_lm", "value", "reward"),
        gradient_checkpointing=True,
        data_parallel=True,
        offload=True,
        lora=True,
        adapter_export=True,
        topk=True,
        portable_state=True,
        any_world_size=True,
        router_replay=True,
        weight_transports=("shared", "cuda_ipc", "shm", "collective", "disk"),
    )

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the model, add adapters, fuse modules, broadcast rank 0's parameters and create the optimizer."""
        if mesh.num_threads:
            torch.set_num_threads(mesh.num_threads)
        self._mesh, self.spec = mesh, model
        self.mover = Mover(mesh.role, torch.device(mesh.device))
        self.replicas = Replicas(mesh)
        self.model: PreTrainedModel = load_model(model, device=mesh.device)
        make_adjacent(self.model)
        self.adapters: Adapters | None = None
        if model.lora is not None:
            from roll_modeling.lora import add_adapters

            self.adapters = add_adapters(self.model, model)
        if self._config.fused:
            log.info("%s: %d modules fused", mesh.role, fuse(self.model))
            if mesh.device == "cpu":
                keep_freed_memory()
        if self.adapters is None or self.training is None:
            self.model.requires_grad_(self.training is not None)
        self.replicas.broadcast(self.model.parameters())
        self.task_model = TaskModel(self.model, model, chunk_tokens=self._config.logprob_chunk_tokens)
        self.optimizer: AdamW | None = None
        if self.training is not None:
            if model.gradient_checkpointing:
                checkpoint_layers(self.model)
            self.optimizer = AdamW(dict(self.model.named_parameters()), self.training, self.replicas)

    # -- computing -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Run a forward pass without gradients; outputs are on the mesh's device."""
        self.mover.need("weights")
        return self.task_model.outputs(micro.to(self._mesh.device), want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Run forward and backward passes and accumulate gradients. Collective over the ranks.

        If a loss is not finite, raises `NonFiniteError` with the sequences on every rank, before NaN reaches the
        gradients.
        """
        self._require_training()
        self.mover.need("weights", "grads")
        found: list[LossMetrics] = []
        error: NonFiniteError | None = None
        try:
            found.extend(self._one_backward(micro.to(self._mesh.device), loss) for micro in micros)
        except NonFiniteError as raised:
            error = raised
        self.replicas.raise_together(error)
        return found

    def optimizer_step(self) -> StepStats:
        """Reduce gradients over ranks, clip, and update the parameters. Collective over the ranks."""
        optimizer = self._require_training()
        self.mover.need("weights", "grads", "optimizer")
        return optimizer.step()

    def _require_training(self) -> AdamW:
        if self.optimizer is None:
            raise UnsupportedError(f"role {self._mesh.role} only scores; it was built without training settings")
        return self.optimizer

    def _one_backward(self, micro: MicroBatch, loss: LossFn) -> LossMetrics:
        outputs = self.task_model.outputs(micro, loss.want)
        found = finite_loss(loss, outputs, micro)
        if found.loss.requires_grad:
            found.loss.backward()  # type: ignore[no-untyped-call]
        return plain_metrics(found)

    @property
    def _config(self) -> HFTrainConfig:
        if not isinstance(self.config, HFTrainConfig):
            raise UnsupportedError(f"hf_train takes an HFTrainConfig, not a {type(self.config).__name__}")
        return self.config

    # -- weights -------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live parameters, or merged weights with adapters. Tied parameters occur once, under their first name."""
        self.mover.need("weights")
        if self.adapters is not None:
            yield from self.adapters.merged()
            return
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """LoRA matrices A and B only; the LoRA scale is included in B."""
        self.mover.need("weights")
        if self.adapters is None:
            raise UnsupportedError(f"role {self._mesh.role} trains its whole model: there are no adapters to export")
        yield from self.adapters.exported()

    def export_model(self, path: Path) -> None:
        """Write a Hugging Face model from rank 0: the whole model, or only the adapter with `lora_export: adapter`."""
        if self.replicas.rank == 0 and self.adapters is not None and self.adapters.lora.export == "adapter":
            self.adapters.export(path)
        elif self.replicas.rank == 0:
            whole = self.model.state_dict() if self.adapters is None else self.adapters.state_dict()
            # Copies, because parameters may be views of one buffer; tied parameters share one copy.
            copies: dict[int, Tensor] = {}
            state = {
                name: copies.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), tensor.detach().clone())
                for name, tensor in whole.items()
            }
            write_model(self.model, self.spec, state, path)
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
            files["weights.safetensors"] = self._kept()
            if self.adapters is not None:
                state["adapters"] = self.adapters.identity()
            if self.optimizer is not None:
                files["optimizer.safetensors"] = self.optimizer.tensors()
                state["step_count"] = self.optimizer.step_count
        _write({"random.safetensors": {"torch_cpu": torch.get_rng_state()}}, path)
        (path / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        if self._config.async_save_ckpt:
            return partial(_write, {name: host_copies(tensors) for name, tensors in files.items()}, path)
        _write(files, path)
        self.replicas.wait()
        return None

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Load the training state on rank 0 and broadcast it; the number of ranks may differ from that of the save.

        Raises `CheckpointError` if files are missing or invalid, or belong to another model or format.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        step_count = torch.zeros(1, dtype=torch.int64)
        if self.replicas.rank == 0:
            try:
                state = json.loads((path / "state.json").read_text(encoding="utf-8"))
                if state.get("format") != FORMAT:
                    raise CheckpointError(f"{path}: format {state.get('format')}; this version reads {FORMAT}")
                identity = self.adapters.identity() if self.adapters is not None else None
                check_adapters(state.get("adapters"), self.adapters, identity, path)
                _restore(self._kept(), path / "weights.safetensors")
                if self.optimizer is not None:
                    _restore(self.optimizer.tensors(), path / "optimizer.safetensors")
                    step_count[0] = state["step_count"]
            except (OSError, KeyError, ValueError) as error:
                if isinstance(error, RollError):
                    raise
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self.replicas.broadcast([step_count, *self._kept().values()])
        if self.optimizer is not None:
            self.replicas.broadcast(self.optimizer.tensors().values())
            self.optimizer.restored(int(step_count))
        random = path / "random.safetensors"
        if random.is_file():
            try:
                torch.set_rng_state(load_file(random)["torch_cpu"])
            except (SafetensorError, KeyError, RuntimeError) as error:
                raise CheckpointError(f"{random}: cannot be read: {error}") from error

    def export_state(self) -> PortableState:
        """Portable training state that reads the live tensors; available on every rank."""
        optimizer = self._require_training()
        self.mover.need("weights", "optimizer")
        return PortableState(
            step_count=optimizer.step_count,
            shapes=_shapes(optimizer.parameters),
            read=optimizer.held,
            adapters=self.adapters.identity() if self.adapters is not None else None,
            buffers=stored_buffers(self.model) if self.adapters is None else {},
        )

    @torch.no_grad()
    def import_state(self, state: PortableState) -> None:
        """Load a portable training state; each rank reads all of it."""
        optimizer = self._require_training()
        self.mover.need("weights", "grads", "optimizer")
        identity = self.adapters.identity() if self.adapters is not None else None
        check_same(state, _shapes(optimizer.parameters), adapters=self.adapters, identity=identity)
        for name in optimizer.parameters:
            found, held = state.read(name), optimizer.held(name)
            held.master.copy_(found.master)
            held.exp_avg.copy_(found.exp_avg)
            held.exp_avg_sq.copy_(found.exp_avg_sq)
        take_buffers(state, stored_buffers(self.model))
        optimizer.restored(state.step_count)

    def _kept(self) -> dict[str, Tensor]:
        """Live weights that a saved state contains: trained adapter weights, or all weights."""
        if self.adapters is not None:
            return {name: each.detach() for name, each in self.adapters.trained().items()}
        return dict(self.export_weights())

    # -- between phases ------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[StateKind]) -> None:
        """Move the parts to host memory. Parameters keep their identity; their device memory is empty meanwhile."""
        for part in parts:
            self.mover.away(part, self._held()[part])

    def onload(self, parts: Sequence[StateKind]) -> None:
        """Move the parts back to the device, into the same tensors."""
        for part in parts:
            self.mover.back(part)

    def _held(self) -> dict[StateKind, list[Tensor]]:
        held: dict[StateKind, list[Tensor]] = {"weights": [each.data for each in self.model.parameters()]}
        optimizer = self.optimizer
        held["grads"] = [optimizer.flat_grad] if optimizer is not None else []
        held["optimizer"] = optimizer.state() if optimizer is not None else []
        return held

    # -- the rest ------------------------------------------------------------------------------------------------------

    def memory(self) -> Mapping[str, int]:
        """Bytes of device memory by part, measured on the tensors' storages; 0 for offloaded parts."""
        return {part: num_bytes(tensors) for part, tensors in self._held().items() if tensors}

    def close(self) -> None:
        """Leave the process group and release the optimizer."""
        if hasattr(self, "replicas"):
            self.replicas.close()
        self.optimizer = None


def _shapes(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in parameters.items()}


def _write(files: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    from safetensors.torch import save_file

    for name, tensors in files.items():
        save_file({key: each.contiguous() for key, each in tensors.items()}, folder / name)


def _restore(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Overwrite `tensors` in place from the file. Raises `CheckpointError` unless names, shapes and dtypes match."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            names = set(stored.keys())
            if names != set(tensors):
                odd = min(names ^ set(tensors))
                raise CheckpointError(f"{file}: tensor {odd} is in only one of the checkpoint and the model")
            for name, tensor in tensors.items():
                found = stored.get_tensor(name)
                if found.shape != tensor.shape or found.dtype != tensor.dtype:
                    raise CheckpointError(
                        f"{file}: {name} is {found.dtype} {tuple(found.shape)}, the model has {tensor.dtype}"
                        f" {tuple(tensor.shape)}"
                    )
                tensor.copy_(found)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from error
