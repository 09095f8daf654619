"""Module programs on ranks that share a module, where each call of the module is collective."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from roll_core.errors import ContractError, NonFiniteError
from roll_modeling.pending_losses import PendingLosses, moved_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from roll_core.spec.module_program import ModuleBatch, ModuleLoss, ModuleProgram
    from roll_core.spec.train import LossMetrics
    from roll_modeling.module_programs import StrategyModule
    from roll_modeling.process_group import ProcessGroup

Found = TypeVar("Found")
NEXT = (
    "ends",
    "fails",
    "calls the module without gradients",
    "calls the module",
    "enters average()",
    "leaves average()",
)
"""What a program does next, as ranks that share a module exchange it."""
ENDS, FAILS, CALLS, ENTERS, LEAVES = 0, 1, 2, 4, 5


class ModulePasses:
    """Programs and losses on the ranks that share a module.

    Before each call of the module, and at the end of a batch, the ranks exchange what they do next. If they differ, all
    of them raise `ContractError`: otherwise some would block in the collectives of a call. Ranks with fewer batches
    than others compute idle batches, of one row, which count for nothing.
    """

    def __init__(self, group: ProcessGroup, *, shared: bool = True) -> None:
        """`group` has the ranks of the role. Unless they share the module, only errors are exchanged."""
        self._group = group
        self.shared = shared and group.size > 1
        """True if several ranks share the module."""
        self._outputs: list[Tensor] = []
        """Outputs of the module in the current batch that have gradients."""
        self._failed = False

    def called(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, as a call that all ranks make together."""
        from torch.utils._pytree import tree_leaves

        def call(*args: Any, **kwargs: Any) -> Any:
            self._meet(CALLS + torch.is_grad_enabled())
            self._failed = True  # the other ranks cannot learn of an error in the middle of a call
            result = forward(*args, **kwargs)
            self._failed = False
            self._outputs += [leaf for leaf in tree_leaves(result) if getattr(leaf, "requires_grad", False)]
            return result

        return call

    @contextmanager
    def entered(self, context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """`context()`, which all ranks enter and leave together."""
        self._meet(ENTERS)
        with context():
            try:
                yield
            except BaseException:
                self._tell_failure()
                raise
            self._meet(LEAVES)

    def run(
        self, module: StrategyModule, batches: Sequence[ModuleBatch], program: ModuleProgram
    ) -> Iterator[Mapping[str, Tensor]]:
        """Run a program for each batch, without gradients. Idle batches are computed immediately."""
        for idle in self._idle(batches):
            self._run(module, idle, program)
        return (self._run(module, batch, program) for batch in batches)

    @torch.no_grad()
    def _run(self, module: StrategyModule, batch: ModuleBatch, program: ModuleProgram) -> Mapping[str, Tensor]:
        return self._together(partial(program, module, batch.to(module.device)))

    def forward_backward(
        self,
        module: StrategyModule,
        batches: Sequence[ModuleBatch],
        loss: ModuleLoss,
        backward: Callable[[Tensor, bool], None],
    ) -> list[LossMetrics]:
        """Accumulate the gradients of all batches by `backward(loss, is_last)`.

        Every backward pass goes through every call of the module, so that ranks have the same collectives. Raises
        `NonFiniteError` on every rank after all passes are complete.
        """
        idle = self._idle(batches)
        losses = PendingLosses(module.device, self._group)
        for index, (batch, moved) in enumerate(moved_ahead((*idle, *batches), module.device)):
            self._outputs = []
            own_loss: Tensor | None = None
            try:
                output = self._together(partial(loss, module, moved))
                if index >= len(idle):
                    own_loss = output.loss
                    losses.add_rows(output, batch)
            except NonFiniteError as raised:
                losses.fail(raised)
            # The sum over no elements: a loss of 0 with gradients of 0, also for outputs that are not finite.
            total = sum((output.flatten()[:0].sum() for output in self._outputs), torch.zeros((), device=module.device))
            total = total if own_loss is None else total + own_loss
            self._outputs = []
            if total.requires_grad:
                backward(total, index == len(idle) + len(batches) - 1)
        return losses.read()

    def _together(self, compute: Callable[[], Found]) -> Found:
        """What a program returns for one batch. Raises `ContractError` unless all ranks' programs end."""
        self._failed = False
        try:
            result = compute()
        except NonFiniteError:
            self._meet(ENDS)
            raise
        except BaseException:
            self._tell_failure()
            raise
        self._meet(ENDS)
        return result

    def _tell_failure(self) -> None:
        with suppress(ContractError):
            if not self._failed:
                self._meet(FAILS)
        self._failed = True

    def _meet(self, following: int) -> None:
        """Exchange what this rank does next. Collective. Raises `ContractError` if another rank does something else."""
        if not self.shared:
            return
        most, least = self._group.most([following, -following])
        if most != -least:
            self._failed = True
            other = most if following != most else -least
            raise ContractError(
                f"the program of rank {self._group.rank} {NEXT[following]}, but that of another rank {NEXT[other]}: a"
                " program must call the module, and enter average(), equally often for every batch"
            )

    def _idle(self, batches: Sequence[ModuleBatch]) -> list[ModuleBatch]:
        """Idle batches that this rank needs. A rank without batches gets one from another rank. Collective."""
        if not self.shared:
            return []
        rank, size, number = self._group.rank, self._group.size, len(batches)
        most, least, holder = self._group.most([number, -number, size - rank if number else 0])
        example = [_one_row(batches[0]) if batches else None]
        if least == 0 and most:
            dist.broadcast_object_list(example, src=size - holder)
        return [_one_row(batches[0]) if batches else example[0]] * (most - number)  # type: ignore[list-item]


def _one_row(batch: ModuleBatch) -> ModuleBatch:
    return replace(batch, ids=batch.ids[:1], tensors={name: tensor[:1] for name, tensor in batch.tensors.items()})
