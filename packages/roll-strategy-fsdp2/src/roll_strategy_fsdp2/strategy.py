"""Train strategies on FSDP2: each rank holds a shard of every parameter, gradient and Adam moment.

build -> { Passes: outputs, gradients -> ShardedOptimizer: clip and step on the shards }* -> Weights: gather
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from typing_extensions import override

from roll_core.errors import NonFiniteError, UnsupportedError
from roll_core.types import DataRank
from roll_modeling.context_parallel import ContextParallel, Ulysses
from roll_modeling.model import DTYPES, check_ties, layer_configs, tied_names
from roll_modeling.portable_state import check_adapters, stored_buffers, take_buffers
from roll_modeling.process_group import ProcessGroup
from roll_modeling.quantization import quant_states
from roll_modeling.ring_attention import Ring
from roll_modeling.strategy import HuggingFaceStrategy
from roll_modeling.task_model import TaskModel
from roll_strategy_fsdp2.experts import exchange_tokens
from roll_strategy_fsdp2.loading import fill, open_empty
from roll_strategy_fsdp2.optimizer import ShardedOptimizer, local
from roll_strategy_fsdp2.passes import Passes
from roll_strategy_fsdp2.sharded_checkpoint import load_state, save_state
from roll_strategy_fsdp2.sharding import Root, make_meshes, shard, sharded_modules
from roll_strategy_fsdp2.tensor_parallel import parallelize
from roll_strategy_fsdp2.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.module_program import ModuleBatch, ModuleLoss, ModuleProgram
    from roll_core.spec.train import (
        LossFn,
        LossMetrics,
        MicroBatch,
        PortableState,
        StateKind,
        StepStats,
        TokenOutputs,
        WantedOutputs,
    )
    from roll_modeling.module_programs import StrategyModule
    from roll_strategy_fsdp2.config import FSDP2Config


class FSDP2Strategy(HuggingFaceStrategy[ShardedOptimizer]):
    """FSDP2 strategy. Without `training` it is forward-only. Dropout is off."""

    config: FSDP2Config

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the model, shard it, and set up passes, weights and optimizer. Collective."""
        self._begin_build(model, mesh)
        config = self.config
        if self.library is not None:
            self._check_whole_library()
        self.process_group = ProcessGroup(mesh)
        self.moves = self.process_group.device.type != "cpu"
        self.meshes = make_meshes(mesh, config)
        self.compute_dtype = DTYPES[config.param_dtype or model.dtype]
        opened = open_empty(model)
        self.model = opened[0] if opened else self._load_model("cpu")
        blocks = self.library.blocks(self.model) if self.library is not None else ()
        self.adapters = self._add_adapters()
        # Master weights are float32, initialized from weights rounded to the model's dtype. Buffers keep their dtype.
        held = torch.float32 if self.training is not None else self.compute_dtype
        for parameter in self.model.parameters():
            if parameter.is_floating_point():  # others are quantized
                parameter.data = parameter.data.to(held)
        if self.meshes.tensor is not None:
            parallelize(self.model, self.meshes.tensor)
        experts: list[nn.Module] = []
        if self.meshes.expert is not None and self.meshes.alone is not None:
            experts = exchange_tokens(self.model, self.meshes.expert, self.meshes.alone)
        ties = tied_names(self.model)
        self.root: Root = shard(self.model, self.meshes, config, self.compute_dtype, experts, blocks)
        if opened:
            fill(self.root, opened[1], model, device="cpu" if config.offload_policy else mesh.device)
        for state in quant_states(self.model).values():
            state.to(mesh.device)  # with `offload_policy`, sharding moves it to the host
        check_ties(self.model, ties)
        self.weights = Weights(self.model, model, self.adapters, self.compute_dtype, mesh.device)
        context = self._context()

        def make() -> TaskModel:
            return TaskModel(
                self.model,
                model,
                chunk_tokens=config.logprob_chunk_tokens,
                context=context,
                router_losses=config,
            )

        self.passes = Passes(
            self.root,
            make if self.library is None else None,
            self.process_group,
            reduces_each=config.reduce_scatter_during_grad_accumulation,
        )
        self._prepare_blocks(self.config)
        if self.library is not None and self.passes.module_passes.shared:
            self.library.call_together(self.model)
        if self.training is not None:
            for module in cast("list[Any]", sharded_modules(self.root)):
                # Passes over text never gather a vision tower, but torch's end of a backward pass expects it.
                if not any(parameter.requires_grad for parameter in module.parameters()):
                    module.unshard()
                    module.reshard()
            self.optimizer = ShardedOptimizer(dict(self.model.named_parameters()), self.training, mesh.device)

    @property
    def data_rank(self) -> DataRank:
        """Data-parallel rank. Adjacent ranks compute a sequence together; the first of them is the leader."""
        together = self.meshes.num_together
        index, place = divmod(self._mesh.rank, together)
        return DataRank(index=index, size=self._mesh.world_size // together, leader=place == 0)

    def _check_whole_library(self) -> None:
        """Raise `UnsupportedError` for ranks that would compute a library's module together."""
        config = self.config
        sizes = {
            "tensor_model_parallel_size": config.tensor_model_parallel_size,
            config.context_key: config.context_size,
            "ep_size": config.ep_size,
        }
        for key, size in sizes.items():
            if size > 1:
                raise UnsupportedError(
                    f"role {self._mesh.role}: strategy_config.{key} is {size}, expected 1: a model of a library has no"
                    " plan for it. Remove the key: its parameters are sharded over all ranks"
                )

    def _context(self) -> ContextParallel | None:
        if self.meshes.context is None:
            return None
        group = self.meshes.context.get_group()
        if self.config.ring_size > 1:
            return Ring(group)
        context = Ulysses(group)
        among = self.meshes.tensor_size
        for layer in layer_configs(self.model.config):
            heads: int = getattr(layer, "num_attention_heads", 0)  # state-space models have none
            key_heads: int = getattr(layer, "num_key_value_heads", None) or heads
            context.check_heads(heads // among, key_heads // among, "ulysses_size")
        return context

    # -- computing -----------------------------------------------------------------------------------------------------

    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Forward pass of one microbatch without gradients; outputs are on the mesh's device.

        Collective: every rank must call it the same number of times.
        """
        self.passes.task_model.join_images([micro], self.process_group)
        (outputs,) = self._score([micro], want)
        return outputs

    def forward_all(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Forward passes of all microbatches.

        Idle passes run immediately; the others run as the iterator is consumed.
        """
        self.offloader.need("weights")
        self.passes.make_up_for(micros, want)
        return self._score(micros, want)

    def _score(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        self.offloader.need("weights")
        with self._averaged() if want.ema else nullcontext():
            yield from self.passes.score(micros, want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Accumulate the gradients of `micros`. Collective.

        Raises `NonFiniteError`, which names the sequences, on every rank, and drops the accumulated gradients. A rank
        with a non-finite loss completes its passes, because they are collective; the error is raised on all ranks
        afterwards.
        """
        optimizer = self._require_training()
        try:
            return self.passes.forward_backward(micros, loss)
        except NonFiniteError:
            optimizer.clear()
            raise

    def run_module(self, batches: Sequence[ModuleBatch], program: ModuleProgram) -> Iterator[Mapping[str, Tensor]]:
        """Run a program for each batch. Collective.

        Idle batches are computed immediately; the others as the iterator is consumed.
        """
        return self.passes.run_module(self._module(), batches, program)

    def forward_backward_module(self, batches: Sequence[ModuleBatch], loss: ModuleLoss) -> list[LossMetrics]:
        """Accumulate the gradients of `batches`, like `forward_backward`. Collective."""
        optimizer = self._require_training()
        try:
            return self.passes.forward_backward_module(self._module(), batches, loss)
        except NonFiniteError:
            optimizer.clear()
            raise

    def _module(self) -> StrategyModule:
        passes = self.passes.module_passes
        return self._program_module(
            passes.called(self.passes.call_module), partial(passes.entered, self._averaged), self.compute_dtype
        )

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Compute with the moving averages. Gathered parameters are freed before they would become stale."""
        self.passes.free()
        with self._require_training().averaged():
            try:
                yield
            finally:
                self.passes.free()

    def optimizer_step(self) -> StepStats:
        """Clip gradients and run the optimizer step. Collective."""
        return self._require_training().step()

    @override
    def move_averages(self) -> None:
        self._require_training().move_averages()

    # -- weights -------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of the weights; see `Weights.export`. Collective."""
        self.offloader.need("weights")
        return self.weights.export()

    def _whole(self, parameter: Tensor) -> Tensor:
        return self.weights.whole(parameter)

    def export_model(self, path: Path) -> None:
        """Write a Hugging Face model directory, or only the adapters. Collective."""
        self._write_gathered(path, self.weights.spec)
        self.process_group.wait()

    def export_head(self, path: Path) -> None:
        """Write the output layer from rank 0. Collective."""
        self._write_head(self.passes.task_model.head if self.library is None else None, path)
        self.process_group.wait()

    # -- continuing ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> Callable[[], None] | None:
        """Save into rank 0's directory, in the format of `checkpoint`. Collective.

        For a model with adapters, only the trained parameters are written, with an identity of the base model. With
        `async_save_ckpt`, shards are copied to host memory, and the returned function writes them.
        """
        said: dict[str, Any] = {"step_count": self.optimizer.step_count if self.optimizer is not None else 0}
        if self.adapters is not None:
            said["adapters"] = self._identity()
        return save_state(path, self._state(), said, later=self.config.async_save_ckpt)

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Load from rank 0's directory. The number of ranks may differ from that of the save. Collective."""
        here = self._identity()
        said = load_state(
            path, self._state(), lambda said: check_adapters(said.get("adapters"), self.adapters, here, path)
        )
        if self.optimizer is not None:
            self.optimizer.restored(int(said["step_count"]))

    def export_state(self) -> PortableState:
        """Strategy-independent state. `read` gathers one full parameter at a time on every rank. Collective."""
        optimizer = self._require_training()
        return self._portable_state(optimizer.step_count, optimizer.shapes, optimizer.read)

    def import_state(self, state: PortableState) -> None:
        """Load strategy-independent state.

        Each rank reads one full parameter at a time and keeps its shard. Collective.
        """
        optimizer = self._require_training()
        self._check_state(state, optimizer.shapes)
        optimizer.load(state)
        take_buffers(state, stored_buffers(self.model))

    def _state(self) -> dict[str, Tensor]:
        self.offloader.need("weights", "grads", "optimizer")
        weights = {f"weight.{name}": tensor for name, tensor in self.weights.held().items()}
        return weights | self.optimizer.tensors() if self.optimizer is not None else weights

    # -- the rest ------------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[StateKind]) -> None:
        """Move this rank's shards of `parts` to host memory.

        No-op on CPU devices; with `offload_policy` they are on the host.
        """
        if self.moves:
            super().offload(parts)

    @override
    def part_tensors(self) -> dict[StateKind, list[Tensor]]:
        weights = [local(parameter) for parameter in self.model.parameters()]
        if self.optimizer is None:
            return {"weights": weights, "grads": [], "optimizer": []}
        return {"weights": weights, "grads": self.optimizer.gradients(), "optimizer": self.optimizer.states()}

    def close(self) -> None:
        """Drop the optimizer state and close the process group."""
        super().close()
        self.optimizer = None
        if hasattr(self, "process_group"):
            self.process_group.close()
