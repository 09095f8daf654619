"""Forward and backward passes, and which of them are collective.

| stage | backward passes | forward passes | step |
|---|---|---|---|
| 0, 1 | local | local | collective: gradients are reduced |
| 2 | collective: gradients are reduced | local | collective |
| 3 | collective: parameters are gathered | collective: parameters are gathered | collective |
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import NonFiniteError
from roll_core.spec.train import TokenOutputs
from roll_modeling.pending_losses import PendingLosses, moved_ahead
from roll_modeling.task_model import idle_microbatch, zero_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from roll_core.spec.train import LossFn, LossMetrics, MicroBatch, WantedOutputs
    from roll_modeling.task_model import TaskModel
    from roll_strategy_deepspeed.ranks import Ranks


class Passes:
    """Forward and backward passes of one model."""

    def __init__(self, compute: Any, engine: Any, ranks: Ranks, stage: int, task_model: TaskModel | None) -> None:
        """`compute` is the engine, or the `Computation` if there is no engine."""
        self._compute, self._engine, self._ranks, self._stage = compute, engine, ranks, stage
        self._task_model = task_model
        if task_model is not None:
            task_model.backbone.reduces_gradients = True
        self.num_backwards = 0
        """Number of backward passes since the last optimizer step."""

    @torch.no_grad()
    def score(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Forward pass of one microbatch without gradients. Collective at stage 3."""
        return self._outputs(micro.to(self._ranks.device), want, micro)

    def score_all(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Forward passes of all microbatches; at stage 3, followed by idle passes if other ranks have more
        microbatches."""
        self._join_images(micros)
        num_idle = self._ranks.most([len(micros)])[0] - len(micros) if self._stage == 3 else 0
        for micro in micros:
            yield self.score(micro, want)
        for _ in range(num_idle):
            self.score(idle_microbatch(), want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Accumulate the gradients of all microbatches.

        Raises `NonFiniteError` on every rank after all passes are complete.
        """
        self._join_images(micros)
        num_idle = self._ranks.most([len(micros)])[0] - len(micros) if self._stage >= 2 else 0
        losses = PendingLosses(self._ranks.device, self._ranks)
        compute = loss if self._task_model is None else partial(self._task_model.loss, loss)
        for micro, moved in moved_ahead(micros, self._ranks.device):
            outputs = self._outputs(moved, loss.want, micro)
            total = zero_loss(outputs)
            try:
                output = compute(outputs, moved)
                total = output.loss if output.loss.requires_grad else total
                losses.add_tokens(output, outputs, micro)
            except NonFiniteError as raised:
                losses.fail(raised)
            if total.requires_grad:
                self.backward(total)
        for _ in range(num_idle):
            self.idle_backward(loss.want)
        return losses.read()

    def idle_backward(self, want: WantedOutputs) -> None:
        """Backward pass that adds 0 to the gradients.

        It runs if other ranks have more microbatches, or if DeepSpeed needs a backward pass before a step.
        """
        idle = idle_microbatch()
        self.backward(zero_loss(self._outputs(idle.to(self._ranks.device), want, idle)))

    def backward(self, loss: Tensor, last: bool = False) -> None:
        """Backward pass of this rank's share of the loss. `last` is ignored: when gradients are reduced depends on the
        stage."""
        # DeepSpeed averages over ranks; the objective is a sum.
        self._engine.backward(loss * self._ranks.size)
        self.num_backwards += 1

    def _join_images(self, micros: Sequence[MicroBatch]) -> None:
        if self._stage == 3 and self._task_model is not None:
            self._task_model.join_images(micros, self._ranks)

    def _outputs(self, micro: MicroBatch, want: WantedOutputs, host: MicroBatch) -> TokenOutputs:
        return TokenOutputs(**self._compute(micro=micro, want=want, host=host))
