"""Train strategy on DeepSpeed: Hugging Face models, data parallel, sharded according to the ZeRO stage.

build -> { Passes: Computation (inside the engine) -> TokenOutputs -> loss -> engine.backward -> engine.step }*
"""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from roll_core.algorithms.optimizers import adamw
from roll_core.errors import NonFiniteError, UnsupportedError
from roll_core.spec.train import StepStats, WantedOutputs
from roll_modeling.kernels import fuse
from roll_modeling.model import check_ties, tied_names
from roll_modeling.module_passes import ModulePasses
from roll_modeling.offload import keep_freed_memory, num_bytes
from roll_modeling.optimizer import schedule
from roll_modeling.portable_state import check_adapters, stored_buffers, take_buffers
from roll_modeling.strategy import HuggingFaceStrategy
from roll_modeling.task_model import TaskModel
from roll_strategy_deepspeed import workarounds
from roll_strategy_deepspeed.computation import Computation, GatheredHead
from roll_strategy_deepspeed.engine_config import clips_itself, engine_config
from roll_strategy_deepspeed.full_checkpoint import load_state, save_state
from roll_strategy_deepspeed.optimizer_state import LossScale, OptimizerState, by_kind
from roll_strategy_deepspeed.passes import Passes
from roll_strategy_deepspeed.ranks import Ranks
from roll_strategy_deepspeed.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.module_program import ModuleBatch, ModuleLoss, ModuleProgram
    from roll_core.spec.train import LossFn, LossMetrics, MicroBatch, PortableState, StateKind, TokenOutputs
    from roll_modeling.backbone import LanguageHead
    from roll_modeling.module_programs import StrategyModule
    from roll_strategy_deepspeed.config import DeepSpeedConfig

log = logging.getLogger(__name__)


class DeepSpeedStrategy(HuggingFaceStrategy[OptimizerState]):
    """DeepSpeed strategy. Without `training` it is forward-only.

    Dropout is off: logprobs computed before an update and during it must come from the same function.
    """

    config: DeepSpeedConfig

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the full model on every rank and start the DeepSpeed engine, which shards it. Collective."""
        self._begin_build(model, mesh)
        self.stage: int = self.config.zero_optimization.stage
        settings = engine_config(self.config, model, self.training)
        self.ranks = Ranks(mesh)
        # ZeRO-3 shards the model, so the full model need not fit on the device.
        self.model = self._load_model("cpu" if self.stage == 3 else mesh.device)
        self.adapters = self._add_adapters()
        if self.config.fused and self.ranks.device.type == "cpu":
            if self.library is None and not self.config.torch_compile:
                log.info("%s: %d modules fused", mesh.role, fuse(self.model))
            if mesh.device == "cpu":
                keep_freed_memory()
        self.weights = Weights(self.model, self.adapters)
        self.head: LanguageHead | None = None
        self.computation: Computation | None = None
        if self.library is None:
            self.task_model = TaskModel(
                self.model,
                model,
                chunk_tokens=self.config.logprob_chunk_tokens,
                router_losses=self.config,
                loss_scale=self.ranks.size,  # see `Passes.backward`
            )
            self.head = self.task_model.head
            self.computation = Computation(self.model, self.task_model)
            if self.stage == 3:
                self._gather_head(self.computation)
        self._prepare_blocks(self.config)
        self.engine: Any = None
        ties = tied_names(self.model)
        if self.training is not None:
            trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
            self._start_engine(settings, adamw(trained, self.training))
            self.optimizer = OptimizerState(self.engine, trained, self.training, stage=self.stage)
            self.loss_scale = LossScale(self.engine)
            self.step_count = 0
            self.schedule, self.peak_learning_rate = schedule(self.training), self.training.learning_rate
        elif self.stage == 3:
            self._start_engine(settings, None)
        check_ties(self.model, ties)
        self.compute: Any = self.engine or self.computation or self.model
        self.passes = Passes(
            self.compute, self.engine, self.ranks, self.stage, None if self.library is not None else self.task_model
        )
        # At stage 0, ranks meet only in the optimizer step.
        self.module_passes = ModulePasses(self.ranks, shared=self.stage > 0)
        if self.library is not None and self.module_passes.shared:
            self.library.call_together(self.model)

    # -- computing -----------------------------------------------------------------------------------------------------

    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Forward pass of one microbatch without gradients; outputs are on the mesh's device. Collective at stage 3,
        and from stage 1 on with the moving average."""
        (outputs,) = self.forward_all([micro], want)
        return outputs

    def forward_all(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Forward passes of all microbatches.

        At stage 3, a rank with fewer microbatches than others runs idle passes at the end. With the moving average,
        ranks exchange parameters before the first pass and after the last one, from stage 1 on.
        """
        self.offloader.need("weights")
        with self._require_training().averaged() if want.ema else nullcontext():
            yield from self.passes.score_all(micros, want)

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
            optimizer.forget_gradients()
            self.passes.num_backwards = 0
            raise

    def run_module(self, batches: Sequence[ModuleBatch], program: ModuleProgram) -> Iterator[Mapping[str, Tensor]]:
        """Run a program for each batch. Collective from stage 1 on.

        Idle batches are computed immediately; the others as the iterator is consumed.
        """
        return self.module_passes.run(self._module(), batches, program)

    def forward_backward_module(self, batches: Sequence[ModuleBatch], loss: ModuleLoss) -> list[LossMetrics]:
        """Accumulate the gradients of `batches`, like `forward_backward`. Collective."""
        optimizer = self._require_training()
        try:
            return self.module_passes.forward_backward(self._module(), batches, loss, self.passes.backward)
        except NonFiniteError:
            optimizer.forget_gradients()
            self.passes.num_backwards = 0
            raise

    def _module(self) -> StrategyModule:
        passes = self.module_passes
        return self._program_module(
            passes.called(self.compute), partial(passes.entered, lambda: self._require_training().averaged())
        )

    def optimizer_step(self) -> StepStats:
        """Run the optimizer step. Collective.

        If the gradient is not finite, the step is skipped.
        """
        optimizer = self._require_training()
        learning_rate = self.peak_learning_rate * self.schedule(self.step_count)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.stage and not self.passes.num_backwards and self.library is None:
            self.passes.idle_backward(
                WantedOutputs(logprobs=self.spec.task == "causal_lm", values=self.spec.task != "causal_lm")
            )
        self.passes.num_backwards = 0
        overflow = self.loss_scale.can_fall
        self.engine.step()
        optimizer.zero_buffers()
        if not self.engine.was_step_applied():
            # After a skipped step, DeepSpeed returns no gradient norm or that of the step before.
            return StepStats(grad_norm=math.inf, learning_rate=learning_rate, skipped=True, overflow=overflow)
        self.step_count += 1
        if not optimizer.training.ema_per_batch:
            optimizer.move_averages(self.step_count)
        return StepStats(grad_norm=float(self.engine.get_global_grad_norm()), learning_rate=learning_rate)

    @override
    def move_averages(self) -> None:
        self._require_training().move_averages(self.step_count)

    # -- building ------------------------------------------------------------------------------------------------------

    def _gather_head(self, computation: Computation) -> None:
        head = self.head
        if head is None or not head.is_linear:  # the model's own code computes other heads, inside of ZeRO's hooks
            return
        computation.head = GatheredHead(head)
        # `GatheredHead` has the interface of `LanguageHead`.
        self.task_model.head = cast("LanguageHead", computation.head)

    def _start_engine(self, settings: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
        import deepspeed

        if self.spec.dtype == "fp16" and not deepspeed.get_accelerator().is_fp16_supported():
            raise UnsupportedError(
                f"DeepSpeed cannot compute in fp16 on this {self.ranks.device.type}; use model_args.dtype bf16 or fp32"
            )
        self.engine = deepspeed.initialize(model=self.computation or self.model, optimizer=optimizer, config=settings)[
            0
        ]
        self.engine.eval()
        if optimizer is not None and self.training is not None and not clips_itself(self.config, self.spec):
            workarounds.add_norm_and_clipping(self.engine, optimizer, self.training.max_grad_norm)
        if self.computation is not None and self.computation.head is not None:
            layer = cast("nn.Linear", self.model.get_output_embeddings())
            for parameter in (layer.weight, layer.bias):
                if parameter is not None:
                    deepspeed.zero.register_external_parameter(self.computation.head, parameter)

    # -- weights -------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of the weights; see `Weights.export`. Collective at stage 3."""
        self.offloader.need("weights")
        return self.weights.export()

    def _whole(self, parameter: Tensor) -> Tensor:
        return self.weights.whole(parameter)

    def export_model(self, path: Path) -> None:
        """Write a Hugging Face model directory, or only the adapters. Collective."""
        self.offloader.need("weights")
        self._write_gathered(path, self.spec, lambda parameter: tuple(getattr(parameter, "ds_shape", parameter.shape)))
        self.ranks.wait()

    def export_head(self, path: Path) -> None:
        """Write the output layer from rank 0. Collective."""
        self._write_head(self.head, path)
        self.ranks.wait()

    # -- continuing ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Save a checkpoint into rank 0's directory, in the format of `checkpoint`. Collective.

        For a model with adapters, only the trained parameters are written, with an identity of the base model.
        """
        optimizer = self._require_training()
        numbers = {"step_count": self.step_count, "loss_scale": self.loss_scale.state()}
        save_state(optimizer, self.ranks, path, numbers | {"adapters": self._identity()})

    def load(self, path: Path) -> None:
        """Load a checkpoint. The number of ranks and the ZeRO stage may differ from those of the save. Collective."""
        optimizer, here = self._require_training(), self._identity()
        state = load_state(
            optimizer, self.ranks, path, lambda state: check_adapters(state.get("adapters"), self.adapters, here, path)
        )
        self.step_count, self.passes.num_backwards = int(state["step_count"]), 0
        self.loss_scale.restore(state["loss_scale"])

    def export_state(self) -> PortableState:
        """Strategy-independent state. `read` gathers one full parameter at a time on every rank. Collective."""
        optimizer = self._require_training()
        return self._portable_state(self.step_count, optimizer.shapes, optimizer.read_whole)

    def import_state(self, state: PortableState) -> None:
        """Load strategy-independent state. Collective.

        Each rank reads one full parameter at a time and keeps its shard. The loss scale is reset to its initial state.
        """
        optimizer = self._require_training()
        self._check_state(state, optimizer.shapes)
        optimizer.load(state.step_count, lambda name: by_kind(state.read(name)))
        take_buffers(state, stored_buffers(self.model))
        self.loss_scale.begin_anew()
        self.step_count, self.passes.num_backwards = state.step_count, 0

    # -- between phases ------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[StateKind]) -> None:
        """Move `parts` to host memory. Tensors that are already in host memory stay there."""
        if self.optimizer is not None and "grads" in parts:
            self.offloader.offload("grads", self.optimizer.gradients(), self.optimizer.scratch())
        super().offload(parts)

    @override
    def part_tensors(self) -> dict[StateKind, list[Tensor]]:
        weights = self.weights.held()
        if self.optimizer is None:
            return {"weights": weights}
        return {"weights": weights, "grads": self.optimizer.gradients(), "optimizer": self.optimizer.optimizer_state()}

    # -- the rest ------------------------------------------------------------------------------------------------------

    def memory(self) -> Mapping[str, int]:
        """Bytes of this rank's tensors by part, on the device or on the host; 0 for parts that are offloaded."""
        return {part: num_bytes(tensors) for part, tensors in self.part_tensors().items()}

    def close(self) -> None:
        """Destroy the engine and leave the process group."""
        super().close()
        engine, self.engine = getattr(self, "engine", None), None
        if engine is not None:
            engine.destroy()
        if hasattr(self, "ranks"):
            self.ranks.close()
