"""Train strategy `acme`: a transformers model on one device, stepped by AdamW.

MicroBatch -> TaskModel (roll-modeling) -> TokenOutputs -> loss -> backward -> clip, AdamW
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from roll_core.algorithms.optimizers import adamw
from roll_core.errors import UnsupportedError
from roll_core.spec.train import StepStats, TrainStrategy
from roll_modeling.export import write_model
from roll_modeling.model import load_model
from roll_modeling.optimizer import clip_factor, moments, schedule
from roll_modeling.state_files import STATE, check_names, read_state, reading, write_json
from roll_modeling.task_model import TaskModel, finite_loss, plain_metrics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from roll_core.spec.model import MeshInfo, ModelSpec
    from roll_core.spec.train import LossFn, LossMetrics, MicroBatch, TokenOutputs, TrainingSpec, WantedOutputs
    from roll_strategy_acme.config import AcmeStrategyConfig

FORMAT = 1
"""Version of the saved state."""


class AcmeStrategy(TrainStrategy):
    """Trains the whole model. Without `training` it only scores."""

    config: AcmeStrategyConfig

    def build(self, model: ModelSpec, mesh: MeshInfo) -> None:
        """Load the model and create the optimizer."""
        self._mesh, self.spec, self.num_steps = mesh, model, 0
        self.model = load_model(model, device=mesh.device).requires_grad_(self.training is not None)
        self.task_model = TaskModel(self.model, model, chunk_tokens=self.config.chunk_tokens)
        if self.training is not None:
            self.optimizer = adamw(dict(self.model.named_parameters()), self.training)
            self.rate = schedule(self.training)

    @torch.no_grad()
    def forward(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Outputs without gradients."""
        return self.task_model.outputs(micro.to(self._mesh.device), want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Add gradients. The loss has its denominators from the whole step, so gradients are sums."""
        self._require_training()
        metrics = []
        for micro in (micro_batch.to(self._mesh.device) for micro_batch in micros):
            output = finite_loss(loss, self.task_model.outputs(micro, loss.want), micro)
            if output.loss.requires_grad:
                output.loss.backward()
            metrics.append(plain_metrics(output))
        return metrics

    def optimizer_step(self) -> StepStats:
        """Clip, step, and clear the gradients. A gradient that is not finite changes nothing."""
        training = self._require_training()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        rate = training.learning_rate * self.rate(self.num_steps)
        skipped = not math.isfinite(norm)
        if not skipped:
            for gradient in gradients:
                gradient.mul_(clip_factor(norm, training.max_grad_norm))
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.num_steps += 1
        self.optimizer.zero_grad()
        return StepStats(grad_norm=norm, learning_rate=rate, skipped=skipped)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live parameters under their names in transformers."""
        return ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def export_model(self, path: Path) -> None:
        """Write a directory that transformers loads."""
        write_model(self.model, self.spec, self.model.state_dict(), path)

    def save(self, path: Path) -> None:
        """Write weights, moments and the number of steps."""
        save_file({name: tensor.contiguous() for name, tensor in self._state().items()}, path / "state.safetensors")
        write_json(path / STATE, {"format": FORMAT, "num_steps": self.num_steps})

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Continue from `save`. Raises `CheckpointError` for files that are missing or invalid."""
        state = self._state()
        with reading(path):
            self.num_steps = int(read_state(path, FORMAT)["num_steps"])
            stored = load_file(path / "state.safetensors")
            check_names(stored, state, path)
            for name, tensor in state.items():
                tensor.copy_(stored[name])
        if self.training is not None:
            self.optimizer.zero_grad()
            for parameter in self.model.parameters():
                self.optimizer.state[parameter]["step"].fill_(self.num_steps)

    def _state(self) -> dict[str, Tensor]:
        """Live tensors of a checkpoint. The moments exist only if the role trains."""
        state = {f"weight.{name}": weight for name, weight in self.export_weights()}
        if self.training is not None:
            for name, parameter in self.model.named_parameters():
                state[f"first.{name}"], state[f"second.{name}"] = moments(self.optimizer, parameter)
        return state

    def _require_training(self) -> TrainingSpec:
        if self.training is None:
            raise UnsupportedError(f"role {self._mesh.role} only scores: it was built without training settings")
        return self.training
