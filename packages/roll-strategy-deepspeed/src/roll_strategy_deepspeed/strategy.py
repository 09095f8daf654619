"""Train strategy on DeepSpeed: Hugging Face models, data parallel, sharded according to the ZeRO stage.

build -> { Passes: Computation (inside the engine) -> TokenOutputs -> loss -> engine.backward -> engine.step }*
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, cast

import torch

from roll_core.errors import NonFiniteError, UnsupportedError
from roll_core.spec.train import (
    LossFn,
    LossMetrics,
    MicroBatch,
    PortableState,
    StepStats,
    TokenOutputs,
    TrainStrategy,
    WantedOutputs,
)
from roll_modeling.backbone import checkpoint_layers
from roll_modeling.fused import fuse
from roll_modeling.host_memory import keep_freed_memory
from roll_modeling.model import load_model
from roll_modeling.moving import Mover, num_bytes
from roll_modeling.optimizer import adamw, schedule
from roll_modeling.portable_state import check_adapters, check_same, stored_buffers, take_buffers
from roll_modeling.task_model import TaskModel
from roll_strategy_deepspeed import whole_optimizer
from roll_strategy_deepspeed.computation import Computation, GatheredHead
from roll_strategy_deepspeed.config import DeepSpeedConfig
from roll_strategy_deepspeed.engine_config import clips_itself, engine_config
from roll_strategy_deepspeed.held_state import HeldState
from roll_strategy_deepspeed.loss_scale import LossScale
from roll_strategy_deepspeed.passes import Passes
from roll_strategy_deepspeed.plugin import CAPABILITIES
from roll_strategy_deepspeed.portable_state import gather, shapes, take_over
from roll_strategy_deepspeed.ranks import Ranks
from roll_strategy_deepspeed.state import load_state, save_state
from roll_strategy_deepspeed.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.train import StateKind, TrainingSpec
    from roll_modeling.backbone import LanguageHead
    from roll_modeling.lora import Adapters

log = logging.getLogger(__name__)


class DeepSpeedStrategy(TrainStrategy):
    """DeepSpeed strategy. Without `training` it is forward-only.

    Dropout is off: logprobs computed before an update and during it must come from the same function.
    """

    capabilities = CAPABILITIES

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the full model on every rank and start the DeepSpeed engine, which shards it. Collective."""
        if mesh.num_threads:
            torch.set_num_threads(mesh.num_threads)
        self._mesh, self.spec = mesh, model
        self.stage: int = self._config.zero_optimization.stage
        settings = engine_config(self._config, model, self.training)
        self.ranks = Ranks(mesh)
        # ZeRO-3 shards the model, so the full model need not fit on the device.
        self.model: PreTrainedModel = load_model(model, device="cpu" if self.stage == 3 else mesh.device)
        self.adapters: Adapters | None = None
        if model.lora is not None:
            from roll_modeling.lora import add_adapters

            self.adapters = add_adapters(self.model, model)
        if self._config.fused and self.ranks.device.type == "cpu":
            log.info("%s: %d modules fused", mesh.role, fuse(self.model))
            if mesh.device == "cpu":
                keep_freed_memory()
        if self.adapters is None or self.training is None:
            self.model.requires_grad_(self.training is not None)
        self.weights = Weights(self.model, model, self.adapters, self.ranks)
        self.mover = Mover(mesh.role, self.ranks.device)
        self.task_model = TaskModel(self.model, model, chunk_tokens=self._config.logprob_chunk_tokens)
        if self.training is not None and model.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.computation = Computation(self.model, self.task_model)
        if self.stage == 3:
            self._gather_head()
        self.engine: Any = None
        if self.training is not None:
            trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
            self._start_engine(settings, adamw(trained.values(), self.training))
            self.held = HeldState(self.engine, trained, stage=self.stage)
            self.loss_scale = LossScale(self.engine)
            self.step_count = 0
            self.schedule = schedule(self.training)
        elif self.stage == 3:
            self._start_engine(settings, None)
        compute = self.engine if self.engine is not None else self.computation
        self.passes = Passes(compute, self.engine, self.ranks, self.stage)

    # -- computing -----------------------------------------------------------------------------------------------------

    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Forward pass of one microbatch without gradients; outputs are on the mesh's device.

        Collective at stage 3: every rank must call it the same number of times. `forward_all` ensures this by idle
        passes.
        """
        self.mover.need("weights")
        return self.passes.score(micro, want)

    def forward_all(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Forward passes of all microbatches.

        At stage 3, a rank with fewer microbatches than others runs idle passes at the end.
        """
        self.mover.need("weights")
        return self.passes.score_all(micros, want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Accumulate the gradients of `micros`. Collective.

        Raises `NonFiniteError`, which names the sequences, on every rank, and drops the accumulated gradients. A rank
        with a non-finite loss completes its passes, because they are collective; the error is raised on all ranks
        afterwards.
        """
        self._check_trains("weights", "grads")
        try:
            return self.passes.forward_backward(micros, loss)
        except NonFiniteError:
            self.held.forget_gradients()
            self.passes.num_backwards = 0
            raise

    def optimizer_step(self) -> StepStats:
        """Run the optimizer step. Collective.

        If the gradient is not finite, the step is skipped.
        """
        training = self._check_trains("weights", "grads", "optimizer")
        learning_rate = training.learning_rate * self.schedule(self.step_count)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.stage and not self.passes.num_backwards:
            self.passes.idle_backward(
                WantedOutputs(logprobs=self.spec.task == "causal_lm", values=self.spec.task != "causal_lm")
            )
        self.passes.num_backwards = 0
        overflow = self.loss_scale.can_fall
        self.engine.step()
        if not self.engine.was_step_applied():
            # After a skipped step, DeepSpeed returns no gradient norm or that of the step before.
            return StepStats(grad_norm=math.inf, learning_rate=learning_rate, skipped=True, overflow=overflow)
        self.step_count += 1
        return StepStats(grad_norm=float(self.engine.get_global_grad_norm()), learning_rate=learning_rate)

    # -- building ------------------------------------------------------------------------------------------------------

    def _gather_head(self) -> None:
        head = self.task_model.head
        if head is None:
            return
        if not head.is_linear:
            raise UnsupportedError(
                f"{type(self.model).__name__}: the head of this architecture is not one matrix, so it cannot be applied"
                " chunk by chunk where parameters are spread; use zero_optimization.stage 2 or less"
            )
        self.computation.head = GatheredHead(head)
        # `GatheredHead` has the interface of `LanguageHead`.
        self.task_model.head = cast("LanguageHead", self.computation.head)

    def _start_engine(self, settings: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> None:
        import deepspeed

        if self.spec.dtype == "fp16" and not deepspeed.get_accelerator().is_fp16_supported():
            raise UnsupportedError(
                f"DeepSpeed cannot compute in fp16 on this {self.ranks.device.type}; use model_args.dtype bf16 or fp32"
            )
        self.engine = deepspeed.initialize(model=self.computation, optimizer=optimizer, config=settings)[0]
        self.engine.eval()
        if optimizer is not None and self.training is not None and not clips_itself(self._config, self.spec):
            whole_optimizer.guard(self.engine, optimizer, self.training.max_grad_norm)
        if self.stage == 3 and self.task_model.head is not None:
            layer = cast("nn.Linear", self.model.get_output_embeddings())
            for parameter in (layer.weight, layer.bias):
                if parameter is not None:
                    deepspeed.zero.register_external_parameter(self.computation.head, parameter)

    def _check_trains(self, *parts: StateKind) -> TrainingSpec:
        """The training settings.

        Raises `UnsupportedError` if the strategy is forward-only; also checks that `parts` are onloaded.
        """
        if self.training is None:
            raise UnsupportedError(f"role {self._mesh.role} only scores; it was built without training settings")
        self.mover.need(*parts)
        return self.training

    @property
    def _config(self) -> DeepSpeedConfig:
        if not isinstance(self.config, DeepSpeedConfig):
            raise UnsupportedError(f"deepspeed_train takes a DeepSpeedConfig, not a {type(self.config).__name__}")
        return self.config

    # -- weights -------------------------------------------------------------------------------------------------------

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of the weights; see `Weights.export`. Collective at stage 3."""
        self.mover.need("weights")
        return self.weights.export()

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """LoRA factors A and B; B includes the LoRA scale. At stage 3 they are gathered one at a time. Collective.

        Raises `UnsupportedError` without adapters.
        """
        self.mover.need("weights")
        if self.adapters is None:
            raise UnsupportedError(f"role {self._mesh.role} trains its whole model: there are no adapters to export")
        return self.adapters.exported(self.weights.whole)

    def export_model(self, path: Path) -> None:
        """Write a Hugging Face model directory; see `Weights.write`. Collective."""
        self.mover.need("weights")
        self.weights.write(path)

    # -- continuing ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Save a checkpoint into rank 0's directory, in the format of `state`. Collective.

        For a model with adapters, only the trained parameters are written, with an identity of the base model.
        """
        self._check_trains("weights", "optimizer")
        numbers = {"step_count": self.step_count, "loss_scale": self.loss_scale.state()}
        save_state(self.held, self.ranks, path, numbers | {"adapters": self.weights.identity()})

    def load(self, path: Path) -> None:
        """Load a checkpoint. The number of ranks and the ZeRO stage may differ from those of the save. Collective."""
        self._check_trains("weights", "grads", "optimizer")
        here = self.weights.identity()
        state = load_state(
            self.held, self.ranks, path, lambda state: check_adapters(state.get("adapters"), self.adapters, here, path)
        )
        self.step_count, self.passes.num_backwards = int(state["step_count"]), 0
        self.loss_scale.restore(state["loss_scale"])

    def export_state(self) -> PortableState:
        """Strategy-independent state. `read` gathers one full parameter at a time on every rank. Collective."""
        self._check_trains("weights", "optimizer")
        return PortableState(
            step_count=self.step_count,
            shapes=shapes(self.held),
            read=lambda name: gather(self.held, name),
            adapters=self.weights.identity(),
            buffers=stored_buffers(self.model) if self.adapters is None else {},
        )

    def import_state(self, state: PortableState) -> None:
        """Load strategy-independent state. Collective.

        Each rank reads one full parameter at a time and keeps its shard. The loss scale is reset to its initial state.
        """
        self._check_trains("weights", "grads", "optimizer")
        check_same(state, shapes(self.held), adapters=self.adapters, identity=self.weights.identity())
        take_over(self.held, state)
        take_buffers(state, stored_buffers(self.model))
        self.loss_scale.begin_anew()
        self.step_count, self.passes.num_backwards = state.step_count, 0

    # -- between phases ------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[StateKind]) -> None:
        """Move `parts` to host memory. Tensors that are already in host memory stay there."""
        for part in parts:
            scratch = self.held.scratch() if part == "grads" and self.training is not None else ()
            self.mover.away(part, self._held().get(part, ()), scratch)

    def onload(self, parts: Sequence[StateKind]) -> None:
        """Move `parts` back into the same tensors."""
        for part in parts:
            self.mover.back(part)

    def _held(self) -> dict[StateKind, list[Tensor]]:
        found: dict[StateKind, list[Tensor]] = {"weights": self.weights.held()}
        if self.training is not None:
            found |= {"grads": self.held.gradients(), "optimizer": self.held.optimizer_state()}
        return found

    # -- the rest ------------------------------------------------------------------------------------------------------

    def memory(self) -> Mapping[str, int]:
        """Bytes of this rank's tensors by part, on the device or on the host; 0 for parts that are offloaded."""
        return {part: num_bytes(tensors) for part, tensors in self._held().items()}

    def close(self) -> None:
        """Destroy the engine and leave the process group."""
        engine, self.engine = getattr(self, "engine", None), None
        if engine is not None:
            engine.destroy()
        if hasattr(self, "ranks"):
            self.ranks.close()
