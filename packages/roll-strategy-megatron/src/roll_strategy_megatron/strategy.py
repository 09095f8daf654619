"""Train strategy on Megatron-Core: Megatron's layers with tensor, pipeline, context and expert parallelism.

MicroBatch -> Computation (Megatron's schedules) -> TokenOutputs -> loss -> gradients in Megatron's buffers

`Optimizer` (distributed AdamW) updates the weights; `Bridge` loads and exports Hugging Face models.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from roll_core.algorithms.aggregate import aggregate
from roll_core.errors import ModelError, NonFiniteError, UnsupportedError
from roll_modeling.logprobs import linear_head, write_head
from roll_modeling.model import DTYPES
from roll_modeling.pending_losses import PendingLosses
from roll_modeling.pieces import write_gathered
from roll_modeling.portable_state import check_adapters, check_same, stored_buffers, take_buffers
from roll_modeling.strategy import HuggingFaceStrategy
from roll_modeling.task_model import zero_loss
from roll_strategy_megatron.config import MASTERS_APART
from roll_strategy_megatron.plugin import CAPABILITIES

with warnings.catch_warnings():
    # The warnings are about optional libraries that are not used, and about torch's deprecations.
    warnings.simplefilter("ignore")
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from roll_strategy_megatron.bridge.bridge import Bridge
    from roll_strategy_megatron.bridge.registry import find_architecture
    from roll_strategy_megatron.bridge.source import head_name, open_source
    from roll_strategy_megatron.bridge.transforms import Sizes
    from roll_strategy_megatron.computation import Computation
    from roll_strategy_megatron.engine import choose
    from roll_strategy_megatron.lora import Lora
    from roll_strategy_megatron.model import make_balancing, make_config, make_runs
    from roll_strategy_megatron.optimizer import Optimizer
    from roll_strategy_megatron.parallel import Parallel, check_sizes
    from roll_strategy_megatron.router_replay import RouterReplay
    from roll_strategy_megatron.state import load_state, portable_state, save_state, take_over
    from roll_strategy_megatron.versions import (
        latent_attention_as_specified,
        latent_attention_without_engine,
        name_missing_kernel,
    )

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from transformers import PreTrainedModel

    from roll_core.spec.model import MeshInfo, ModelSpec
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
    from roll_core.types import DataRank
    from roll_strategy_megatron.config import MegatronConfig
    from roll_strategy_megatron.packing import Passage


class MegatronStrategy(HuggingFaceStrategy[Optimizer]):
    """Megatron strategy. Without `training` it is forward-only. Dropout is off.

    `model` is transformers' model on the meta device; `runs` are Megatron's model chunks.
    """

    config: MegatronConfig

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Build this rank's shard of the model and load its weights. Collective.

        Raises `UnsupportedError` for unsupported tasks and options, and `ModelError` for models that do not fit the
        config.
        """
        if model.task not in CAPABILITIES.tasks:
            raise UnsupportedError(
                f"role {mesh.role}: the Megatron strategies do not support task {model.task}; use fsdp2_train or"
                " deepspeed_train"
            )
        check_sizes(mesh, self.config)
        if self.config.optimizer_cpu_offload and self.training and (model.dtype == "fp32" or model.lora is not None):
            raise UnsupportedError(f"role {mesh.role}: optimizer_cpu_offload is for {MASTERS_APART}")
        name_missing_kernel()
        latent_attention_without_engine()
        latent_attention_as_specified()
        self._begin_build(model, mesh)
        self.dtype = DTYPES[model.dtype]
        self.model, source = open_source(model)
        self._check_model()
        architecture = find_architecture(self.model.config.model_type)
        self.parallel = Parallel(mesh, self.config)
        described = architecture.settings(self.model.config)
        self.make = choose(self.config, model, self.parallel.device, described)
        settings = make_config(described, self.config, model, self.dtype, self.make)
        sizes = _sizes(self.model, settings, self.parallel)
        scalar = head_name(self.model) if model.task != "causal_lm" else ""
        number = self.config.runs_per_stage
        self.balancing = make_balancing(settings, self.config, self.parallel.device)
        self.runs = make_runs(
            settings, self.make, number, sizes, self.model, self.parallel, self.balancing, scalar=bool(scalar)
        )
        if self.config.activation_offloading and model.gradient_checkpointing:
            for chunk in self.runs:
                chunk.offload_from = self.parallel.device
        if model.router_replay:
            self._replay_experts()
        self.bridge: Bridge = Bridge(architecture, self.model, self.runs, sizes, self.parallel, scalar)
        self.bridge.load(source, self.dtype)
        source.close()
        self.lora = Lora(self.runs, self.bridge, model) if model.lora is not None else None
        self.trained: Bridge = self.bridge if self.lora is None else self.lora.adapter_bridge
        wrapped: list[Any] = list(self.runs)
        if self.training is not None:
            how = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                check_for_nan_in_grad=False,
                overlap_grad_reduce=self.config.overlap_grad_reduce,
                bucket_size=self.config.ddp_bucket_size,
            )
            wrapped = [DistributedDataParallel(settings, how, chunk) for chunk in self.runs]
            # Megatron's interleaved schedule takes a list of functions, its other schedules a single one.
            settings.no_sync_func = [chunk.no_sync for chunk in wrapped] if len(wrapped) > 1 else wrapped[0].no_sync
            partial = self.lora.partial if self.lora is not None else ()
            self.optimizer = Optimizer(wrapped, self.training, self.dtype, self.config, partial)
        else:
            for chunk in self.runs:
                chunk.requires_grad_(False)
        self.computation = Computation(
            self.runs, wrapped, sizes, self.parallel, self.config, model.task, self.model.config, self.balancing
        )

    @property
    def data_rank(self) -> DataRank:
        """Data-parallel rank; all ranks of a replica work on the same microbatches."""
        return self.parallel.data_rank

    @property
    def microbatch_multiple(self) -> int:
        """The number of pipeline stages.

        Interleaved schedules require a multiple; others have smaller bubbles with one.
        """
        return self.config.pipeline_model_parallel_size

    # -- computing -----------------------------------------------------------------------------------------------------

    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Forward pass of one microbatch without gradients; every rank of the replica gets all outputs.

        Collective over the replica, and over all ranks if experts are distributed over replicas.
        """
        return self._score([micro], want)[0]

    def forward_all(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Forward passes of all microbatches, run before this method returns, so that they are pipelined over the
        stages."""
        return iter(self._score(micros, want))

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Accumulate the gradients of `micros`. Collective.

        Raises `NonFiniteError`, which names the sequences, on every rank, and drops the accumulated gradients. A rank
        with a non-finite loss completes its passes, because they are collective; the error is raised on all ranks
        afterwards.
        """
        optimizer = self._require_training()
        self._check_wanted(loss.want)
        optimizer.begin()
        losses = PendingLosses(self._mesh.device)

        def at_end(passage: Passage, outputs: TokenOutputs) -> tuple[Tensor, None]:
            if passage.idle:
                return zero_loss(outputs), None
            try:
                output = loss(outputs, passage.micro)
            except NonFiniteError as raised:
                losses.fail(raised)
                return zero_loss(outputs), None
            losses.add_tokens(output, outputs, passage.micro)
            return output.loss if output.loss.requires_grad else output.loss + zero_loss(outputs), None

        if self.balancing is not None:
            self.balancing.begin(max(1, micros[0].totals.sequences) if micros else 1)
        _, disagreements = self.computation.run(micros, loss.want, at_end, backward=True)
        values, error = [], None
        try:
            values = losses.read()  # of the last stage
        except NonFiniteError as raised:
            error = raised
        try:
            self.parallel.raise_together(error)
        except NonFiniteError:
            optimizer.clear()
            raise
        metrics: list[LossMetrics] = self.parallel.object_from_last_stage(values)
        for metrics_of_micro, micro, disagreement_T in zip(metrics, micros, disagreements, strict=True):
            if disagreement_T is not None:  # only known after the losses are computed
                known_T = disagreement_T.to(micro.loss_mask_T.device)
                metrics_of_micro["routing_disagreement"] = float(aggregate(known_T, micro, "token-mean"))
        if self.balancing is not None and metrics:
            metrics[0] |= self.balancing.metrics()
        return metrics

    def optimizer_step(self) -> StepStats:
        """Clip gradients and run the optimizer step. Collective."""
        return self._require_training().step()

    def _score(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> list[TokenOutputs]:
        self._check_wanted(want)

        def at_end(passage: Passage, outputs: TokenOutputs) -> tuple[Tensor, TokenOutputs]:
            return zero_loss(outputs), outputs

        self.offloader.need("weights")
        with self._without_adapters() if want.base else nullcontext():
            outputs, disagreements = self.computation.run(micros, want, at_end, backward=False)
        every = zip(outputs, micros, disagreements, strict=True)
        return [self.computation.on_all_stages(output, micro, want, known) for output, micro, known in every]

    def _without_adapters(self) -> AbstractContextManager[None]:
        if self.lora is None:
            raise UnsupportedError(
                f"role {self._mesh.role} has no adapters that outputs of the base model could leave out"
            )
        return self.lora.off()

    def _check_wanted(self, want: WantedOutputs) -> None:
        if self.spec.task == "causal_lm" and want.values:
            raise UnsupportedError("a causal language model has no values; the role needs task value or reward")
        if self.spec.task != "causal_lm" and want.head:
            raise UnsupportedError(f"a model of task {self.spec.task} has no logprobs")

    def _replay_experts(self) -> None:
        if self.runs[0].config.num_moe_experts is None:
            raise UnsupportedError(f"router_replay needs experts, and a {self.model.config.model_type} has none")
        for run in self.runs:
            run.replay = RouterReplay(run)

    def _check_model(self) -> None:
        try:
            self.config.check_model(self.model.config.to_dict())
        except ValueError as error:
            raise ModelError(f"role {self._mesh.role}: {error}") from error

    # -- weights -------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of the weights, gathered one by one on every rank. Tied weights are yielded once. Collective."""
        self.offloader.need("weights")
        return self.bridge.export(self.lora.merged if self.lora is not None else Tensor.detach, self.dtype)

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Full LoRA factors, gathered one by one on every rank; those of experts separately. Collective.

        Raises `UnsupportedError` without adapters.
        """
        if self.lora is None:
            raise UnsupportedError(f"role {self._mesh.role} trains the whole model: it has no adapters to export")
        self.offloader.need("weights")
        return self.lora.exported()

    def export_model(self, path: Path) -> None:
        """Write a Hugging Face model directory, or only the adapters. Collective.

        Tensors are gathered one by one. Rank 0 writes them in files of bounded size and keeps one file in memory at a
        time.
        """
        leads = self._mesh.rank == 0
        if self.lora is not None and self.lora.lora.export == "adapter":
            self.lora.write(path, leads=leads)
        else:
            write_gathered(
                self.model,
                self.spec,
                path,
                adapters=None,
                exported=self.export_weights(),
                gather=lambda tensor: tensor,
                shape_of=lambda tensor: tuple(tensor.shape),
                writes=leads,
            )
        self.parallel.wait()

    def export_head(self, path: Path) -> None:
        """Write the output layer from rank 0, gathered from the ranks that shard the vocabulary. Collective."""
        if self.spec.task != "causal_lm":
            raise UnsupportedError(f"a model of task {self.spec.task} has no output layer of a vocabulary")
        self.offloader.need("weights")
        read = self.lora.merged if self.lora is not None else Tensor.detach
        ((_, weight_VH),) = self.bridge.export(read, self.dtype, only=(self.bridge.head,))
        if self._mesh.rank == 0:
            write_head(linear_head(self.model.config, weight_VH), path)
        self.parallel.wait()

    # -- continuing ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> Callable[[], None] | None:
        """Save into rank 0's directory, in the format of `state`. Collective.

        For a model with adapters, only the trained parameters are written. With `async_save_ckpt`, each rank copies its
        tensors to host memory, and the returned function writes them.
        """
        optimizer, later = self._require_training(), self.config.async_save_ckpt
        return save_state(self.trained, optimizer, path, adapters=self._identity(), later=later)

    def load(self, path: Path) -> None:
        """Load from rank 0's directory. The parallel sizes may differ from those of the save. Collective."""
        optimizer, here = self._require_training(), self._identity()
        described = self.lora.described if self.lora is not None else None
        load_state(self.trained, optimizer, path, lambda saved, place: check_adapters(saved, described, here, place))

    def export_state(self) -> PortableState:
        """Strategy-independent state. `read` gathers one full parameter at a time on every rank. Collective."""
        optimizer = self._require_training()
        buffers = stored_buffers(self.model) if self.lora is None else {}
        return portable_state(self.trained, optimizer, self._identity(), buffers)

    def import_state(self, state: PortableState) -> None:
        """Load strategy-independent state.

        Each rank reads the full tensors of its shards and keeps the shards. Collective.
        """
        optimizer = self._require_training()
        described = self.lora.described if self.lora is not None else None
        check_same(state, self.trained.shapes, adapters=described, identity=self._identity())
        take_over(self.trained, optimizer, state.read)
        take_buffers(state, stored_buffers(self.model))
        self.bridge.load_buffers(self.model.get_buffer)
        optimizer.restored(state.step_count)
        self.parallel.wait()

    def _identity(self) -> dict[str, Any] | None:
        return self.lora.identity() if self.lora is not None else None

    # -- the rest ------------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[StateKind]) -> None:
        """Move this rank's shards of `parts` to host memory.

        Megatron's parameters are views of weight and gradient buffers; the views stay valid.
        """
        if self.optimizer is not None:
            self.optimizer.settle()
        super().offload(parts)

    @override
    def part_tensors(self) -> dict[StateKind, list[Tensor]]:
        weights: list[Tensor] = [parameter for run in self.runs for parameter in run.parameters()]
        if self.optimizer is None:
            return {"weights": weights, "grads": [], "optimizer": []}
        return {"weights": weights, "grads": self.optimizer.gradients(), "optimizer": self.optimizer.states()}

    def close(self) -> None:
        """Leave Megatron's process groups."""
        super().close()
        if hasattr(self, "parallel"):
            self.parallel.close()


def _sizes(hf: PreTrainedModel, settings: Any, parallel: Parallel) -> Sizes:
    ranks = parallel.tp.size()
    return Sizes(
        num_heads=settings.num_attention_heads,
        num_groups=settings.num_query_groups,
        head_dim=settings.kv_channels,
        vocab=hf.config.vocab_size,
        padded_vocab=-(-hf.config.vocab_size // ranks) * ranks,
    )
