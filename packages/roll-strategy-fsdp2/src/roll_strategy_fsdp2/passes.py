"""Forward and backward passes of a sharded model.

    Root.forward { gather a layer, compute, free it }*  -> TokenOutputs -> loss
    backward     { gather a layer, compute, free it, reduce-scatter its gradient }*

Gathering a layer is collective. Ranks with fewer microbatches than others therefore run idle passes on two dummy
tokens, which contribute nothing to loss or gradients. Idle passes come first, so that the last pass is a real one if
there is any.

Shapes: T flat tokens.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch

from roll_core.errors import NonFiniteError
from roll_core.spec.train import MicroBatch, TokenOutputs
from roll_modeling.task_model import finite_loss, idle_microbatch, plain_metrics, zero_loss
from roll_strategy_fsdp2.sharding import as_fsdp, sharded_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from roll_core.spec.train import LossFn, LossMetrics, WantedOutputs
    from roll_modeling.process_group import ProcessGroup
    from roll_modeling.task_model import TaskModel
    from roll_strategy_fsdp2.sharding import Root

OUTPUTS = tuple(each.name for each in fields(TokenOutputs))


class Passes:
    """Forward and backward passes of one model. All methods are collective."""

    def __init__(
        self, root: Root, make: Callable[[], TaskModel], process_group: ProcessGroup, *, reduces_each: bool
    ) -> None:
        """`make` builds the `TaskModel`. It runs inside the root's forward, because it evaluates the model.

        With `reduces_each`, gradients are reduced over ranks after each microbatch instead of once per call.
        """
        self.root, self.process_group, self.reduces_each = root, process_group, reduces_each
        self.device = str(process_group.device)
        with torch.no_grad():
            self.task_model: TaskModel = root(make)
        self._free()

    def score(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Forward passes without gradients.

        If the ranks have different numbers of microbatches, all of them must call `make_up_for` before.
        """
        try:
            for micro in micros:
                yield self._score(micro, want)
        finally:
            self._free()

    def make_up_for(self, num_micros: int, want: WantedOutputs) -> None:
        """Run idle passes until this rank has as many passes as the rank with the most microbatches. Collective."""
        for idle in self._idle(num_micros):
            self._score(idle, want)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Accumulate the gradients of all microbatches.

        Raises `NonFiniteError` on every rank after all passes are complete.
        """
        idle = self._idle(len(micros))
        sharded = as_fsdp(self.root)
        found: list[LossMetrics] = []
        error: NonFiniteError | None = None
        try:
            for at, micro in enumerate((*idle, *micros)):
                last = at == len(idle) + len(micros) - 1
                sharded.set_is_last_backward(last)
                sharded.set_requires_gradient_sync(last or self.reduces_each)
                on_device = micro.to(self.device)
                outputs = self._outputs(on_device, loss.want)
                total = zero_loss(outputs)
                if at >= len(idle) and error is None:
                    try:
                        each = finite_loss(loss, outputs, on_device)
                        total = total + each.loss
                        found.append(plain_metrics(each))
                    except NonFiniteError as raised:
                        error = raised
                total.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            sharded.reset_iter_state()
            raise
        self.process_group.raise_together(error)
        return found

    def _outputs(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        """Run the forward pass inside the root. FSDP only hooks tensors that are elements of a tuple, and no views."""

        def compute() -> tuple[Tensor | None, ...]:
            outputs = self.task_model.outputs(micro, want)
            found = [getattr(outputs, name) for name in OUTPUTS]
            return tuple(each.clone() if each is not None and each._is_view() else each for each in found)

        return TokenOutputs(**dict(zip(OUTPUTS, self.root(compute), strict=True)))

    @torch.no_grad()
    def _score(self, micro: MicroBatch, want: WantedOutputs) -> TokenOutputs:
        return self._outputs(micro.to(self.device), want)

    def _free(self) -> None:
        """Free gathered parameters that remain after a forward pass without backward pass; they would become stale."""
        for module in sharded_modules(self.root):
            module.reshard()

    def _idle(self, num_micros: int) -> list[MicroBatch]:
        """Idle microbatches that this rank lacks compared with the rank with the most microbatches. Collective."""
        return [idle_microbatch()] * (self.process_group.most([num_micros])[0] - num_micros)
