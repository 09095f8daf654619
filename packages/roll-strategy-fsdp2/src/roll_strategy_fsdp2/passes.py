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
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from roll_core.errors import NonFiniteError
from roll_core.spec.train import MicroBatch, TokenOutputs
from roll_modeling.module_passes import ModulePasses
from roll_modeling.pending_losses import PendingLosses, moved_ahead
from roll_modeling.task_model import idle_microbatch, zero_loss
from roll_strategy_fsdp2.sharding import as_fsdp, sharded_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from roll_core.spec.module_program import ModuleBatch, ModuleLoss, ModuleProgram
    from roll_core.spec.train import LossFn, LossMetrics, WantedOutputs
    from roll_modeling.module_programs import StrategyModule
    from roll_modeling.process_group import ProcessGroup
    from roll_modeling.task_model import TaskModel
    from roll_strategy_fsdp2.sharding import Root

OUTPUTS = tuple(field.name for field in fields(TokenOutputs))


class Passes:
    """Forward and backward passes of one model. All methods are collective."""

    def __init__(
        self, root: Root, make: Callable[[], TaskModel] | None, process_group: ProcessGroup, *, reduces_each: bool
    ) -> None:
        """`make` builds the `TaskModel`. It runs inside the root's forward, because it evaluates the model. None for a
        model of a library.

        With `reduces_each`, gradients are reduced over ranks after each microbatch instead of once per call.
        """
        self.root, self.process_group, self.reduces_each = root, process_group, reduces_each
        self.device = str(process_group.device)
        self.module_passes = ModulePasses(process_group)
        if make is not None:
            with torch.no_grad():
                self.task_model: TaskModel = root(make)
            self.task_model.backbone.reduces_gradients = True
            self.free()

    def score(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> Iterator[TokenOutputs]:
        """Forward passes without gradients.

        If the ranks have different numbers of microbatches, all of them must call `make_up_for` before.
        """
        try:
            for micro, moved in moved_ahead(micros, self.device):
                yield self._score(moved, want, micro)
        finally:
            self.free()

    def make_up_for(self, micros: Sequence[MicroBatch], want: WantedOutputs) -> None:
        """Run idle passes until this rank has as many passes as the rank with the most microbatches. Collective."""
        self.task_model.join_images(micros, self.process_group)
        for idle in self._idle(len(micros)):
            self._score(idle.to(self.device), want, idle)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: LossFn) -> list[LossMetrics]:
        """Accumulate the gradients of all microbatches.

        Raises `NonFiniteError` on every rank after all passes are complete.
        """
        self.task_model.join_images(micros, self.process_group)
        idle = self._idle(len(micros))
        losses = PendingLosses(self.device, self.process_group)
        try:
            for index, (micro, moved) in enumerate(moved_ahead((*idle, *micros), self.device)):
                outputs = self._outputs(moved, loss.want, micro)
                total = zero_loss(outputs)
                if index >= len(idle):
                    try:
                        output = self.task_model.loss(loss, outputs, moved)
                        total = total + output.loss
                        losses.add_tokens(output, outputs, micro)
                    except NonFiniteError as raised:
                        losses.fail(raised)
                self._backward(total, index == len(idle) + len(micros) - 1)
        except BaseException:
            as_fsdp(self.root).reset_iter_state()
            raise
        return losses.read()

    def run_module(
        self, module: StrategyModule, batches: Sequence[ModuleBatch], program: ModuleProgram
    ) -> Iterator[Mapping[str, Tensor]]:
        """Run a program for each batch, without gradients. Idle batches are computed immediately."""
        outputs = self.module_passes.run(module, batches, program)

        def run() -> Iterator[Mapping[str, Tensor]]:
            try:
                yield from outputs
            finally:
                self.free()

        return run()

    def forward_backward_module(
        self, module: StrategyModule, batches: Sequence[ModuleBatch], loss: ModuleLoss
    ) -> list[LossMetrics]:
        """Accumulate the gradients of all batches.

        Raises `NonFiniteError` on every rank after all passes are complete.
        """
        try:
            return self.module_passes.forward_backward(module, batches, loss, self._backward)
        except NonFiniteError:
            raise
        except BaseException:
            as_fsdp(self.root).reset_iter_state()
            raise

    def call_module(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward pass inside the root."""
        structure: Any = None

        def compute() -> tuple[Any, ...]:
            nonlocal structure
            leaves, structure = tree_flatten(self.root.model(*args, **kwargs))
            return tuple(_hooked(leaf) for leaf in leaves)

        return tree_unflatten(self.root(compute), structure)

    def _backward(self, total: Tensor, last: bool) -> None:
        sharded = as_fsdp(self.root)
        sharded.set_is_last_backward(last)
        sharded.set_requires_gradient_sync(last or self.reduces_each)
        total.backward()  # type: ignore[no-untyped-call]

    def _outputs(self, micro: MicroBatch, want: WantedOutputs, host: MicroBatch) -> TokenOutputs:
        """Run the forward pass inside the root. FSDP only hooks tensors that are elements of a tuple, and no views."""

        def compute() -> tuple[Tensor | None, ...]:
            outputs = self.task_model.outputs(micro, want, host)
            return tuple(_hooked(getattr(outputs, name)) for name in OUTPUTS)

        return TokenOutputs(**dict(zip(OUTPUTS, self.root(compute), strict=True)))

    @torch.no_grad()
    def _score(self, micro: MicroBatch, want: WantedOutputs, host: MicroBatch) -> TokenOutputs:
        return self._outputs(micro, want, host)

    def free(self) -> None:
        """Free gathered parameters that remain after a forward pass without backward pass; they would become stale."""
        for module in sharded_modules(self.root):
            module.reshard()

    def _idle(self, num_micros: int) -> list[MicroBatch]:
        """Idle microbatches that this rank lacks compared with the rank with the most microbatches. Collective."""
        return [idle_microbatch()] * (self.process_group.most([num_micros])[0] - num_micros)


def _hooked(output: Any) -> Any:
    """An output that FSDP can hook: no view."""
    return output.clone() if isinstance(output, torch.Tensor) and output._is_view() else output
