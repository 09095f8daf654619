"""Train strategy on DeepSpeed: Hugging Face models, data parallel, with what ZeRO's stage says spread over the ranks.

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
    Want,
)
from roll_modeling.backbone import checkpoint_layers
from roll_modeling.fused import fuse
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
    from roll_core.spec.train import Part, TrainingSpec
    from roll_modeling.backbone import LanguageHead
    from roll_modeling.lora import Adapters

log = logging.getLogger(__name__)


class DeepSpeedStrategy(TrainStrategy):
    """Trains or, without `training`, only scores.

    Dropout is off: the logprobs before an update and those inside it must come from the same function.
    """

    capabilities = CAPABILITIES

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the model on every rank, find out how it computes, and let DeepSpeed spread it."""
        if mesh.num_threads:
            torch.set_num_threads(mesh.num_threads)
        self._mesh, self.spec = mesh, model
        self.stage: int = self._config.zero_optimization.stage
        settings = engine_config(self._config, model, self.training)
        self.ranks = Ranks(mesh)
        # What is cut into shards anyway need not be whole on the device before.
        self.model: PreTrainedModel = load_model(model, device="cpu" if self.stage == 3 else mesh.device)
        self.adapters: Adapters | None = None
        if model.lora is not None:
            from roll_modeling.lora import add_adapters

            self.adapters = add_adapters(self.model, model)
        if self._config.fused and self.ranks.device.type == "cpu":
            log.info("%s: %d modules fused", mesh.role, fuse(self.model))
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

    def forward(self, micro: MicroBatch, want: Want) -> TokenOutputs:
        """On the mesh's device. At stage 3 all ranks call it together; `forward_all` sees to that."""
        self.mover.need("weights")
        return self.passes.score(micro, want)

    def forward_all(self, micros: Sequence[MicroBatch], want: Want) -> Iterator[TokenOutputs]:
        """At stage 3 a rank with fewer microbatches than others computes for nobody until they are done."""
        self.mover.need("weights")
        return self.passes.score_all(micros, want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Raises `NonFiniteError`, which names the sequences, on every rank; the gradients are forgotten then.
        Collective: a rank that finds one makes the passes that the others need, and then tells them."""
        self._check_trains("weights", "grads")
        try:
            return self.passes.forward_backward(micros, loss)
        except NonFiniteError:
            self.held.forget_gradients()
            self.passes.num_backwards = 0
            raise

    def optimizer_step(self) -> StepStats:
        """Collective over the ranks."""
        training = self._check_trains("weights", "grads", "optimizer")
        learning_rate = training.learning_rate * self.schedule(self.step_count)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.stage and not self.passes.num_backwards:
            self.passes.idle_backward(
                Want(logprobs=self.spec.task == "causal_lm", values=self.spec.task != "causal_lm")
            )
        self.passes.num_backwards = 0
        overflow = self.loss_scale.can_fall
        self.engine.step()
        if not self.engine.was_step_applied():
            # Of such a step DeepSpeed gives no norm, or that of the step before.
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
        # It takes the place of what it stands for.
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

    def _check_trains(self, *parts: Part) -> TrainingSpec:
        """And has `parts` on its device."""
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
        """See `Weights.export`."""
        self.mover.need("weights")
        return self.weights.export()

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """A and B alone, the scale in B; at stage 3 they are gathered one at a time. Collective."""
        self.mover.need("weights")
        if self.adapters is None:
            raise UnsupportedError(f"role {self._mesh.role} trains its whole model: there are no adapters to export")
        return self.adapters.exported(self.weights.whole)

    def export_model(self, path: Path) -> None:
        """See `Weights.write`."""
        self.mover.need("weights")
        self.weights.write(path)

    # -- continuing ----------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Collective. Ranks share the folder. Of a model with adapters only what is trained is written, and what
        identifies the rest."""
        self._check_trains("weights", "optimizer")
        numbers = {"step_count": self.step_count, "loss_scale": self.loss_scale.state()}
        save_state(self.held, self.ranks, path, numbers | {"adapters": self.weights.identity()})

    def load(self, path: Path) -> None:
        """Collective. The number of ranks and the stage may differ from when it was saved."""
        self._check_trains("weights", "grads", "optimizer")
        here = self.weights.identity()
        state = load_state(
            self.held, self.ranks, path, lambda state: check_adapters(state.get("adapters"), self.adapters, here, path)
        )
        self.step_count, self.passes.num_backwards = int(state["step_count"]), 0
        self.loss_scale.restore(state["loss_scale"])

    def export_state(self) -> PortableState:
        """Gathered parameter by parameter, on every rank. Collective."""
        self._check_trains("weights", "optimizer")
        return PortableState(
            step_count=self.step_count,
            shapes=shapes(self.held),
            read=lambda name: gather(self.held, name),
            adapters=self.weights.identity(),
            buffers=stored_buffers(self.model) if self.adapters is None else {},
        )

    def import_state(self, state: PortableState) -> None:
        """Each rank reads all of it, a parameter at a time, and keeps its share. The search for the loss's scale begins
        anew. Collective."""
        self._check_trains("weights", "grads", "optimizer")
        check_same(state, shapes(self.held), adapters=self.adapters, identity=self.weights.identity())
        take_over(self.held, state)
        take_buffers(state, stored_buffers(self.model))
        self.loss_scale.begin_anew()
        self.step_count, self.passes.num_backwards = state.step_count, 0

    # -- between phases ------------------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[Part]) -> None:
        """What lives on the host anyway stays there."""
        for part in parts:
            scratch = self.held.scratch() if part == "grads" and self.training is not None else ()
            self.mover.away(part, self._held().get(part, ()), scratch)

    def onload(self, parts: Sequence[Part]) -> None:
        """Into the same tensors."""
        for part in parts:
            self.mover.back(part)

    def _held(self) -> dict[Part, list[Tensor]]:
        found: dict[Part, list[Tensor]] = {"weights": self.weights.held()}
        if self.training is not None:
            found |= {"grads": self.held.gradients(), "optimizer": self.held.optimizer_state()}
        return found

    # -- the rest ------------------------------------------------------------------------------------------------------

    def memory(self) -> Mapping[str, int]:
        """Measured on the tensors, wherever they live; 0 for what is offloaded."""
        return {part: num_bytes(tensors) for part, tensors in self._held().items()}

    def close(self) -> None:
        """Drop the engine and leave the process group."""
        engine, self.engine = getattr(self, "engine", None), None
        if engine is not None:
            engine.destroy()
        if hasattr(self, "ranks"):
            self.ranks.close()
