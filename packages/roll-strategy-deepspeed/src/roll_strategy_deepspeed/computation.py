"""The module that DeepSpeed wraps: it maps a microbatch to its outputs, so that ZeRO's hooks see the whole computation.

    engine -> Computation -> backbone's layers            ZeRO-3 gathers a module's parameters around its forward
                          -> GatheredHead -> logprobs     uses the output layer's weight outside of that layer's forward

Shapes: N tokens given to the head, H hidden size.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from roll_modeling.logprobs import HeadOutputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.train import Comparison, MicroBatch, TokenOutputs, WantedOutputs
    from roll_modeling.backbone import LanguageHead
    from roll_modeling.logprobs import HeadRequest
    from roll_modeling.task_model import TaskModel

T = TypeVar("T")


class Computation(nn.Module):
    """A `TaskModel` as a module, with keyword inputs and dictionary outputs, which DeepSpeed's hooks pass through."""

    def __init__(self, model: PreTrainedModel, task_model: TaskModel) -> None:
        super().__init__()
        self.model = model
        self.head: GatheredHead | None = None
        """The head, if ZeRO-3 gathers its weight for it."""
        self._task_model = [task_model]
        """In a list, so that it is not registered as a submodule."""

    def forward(self, *, micro: MicroBatch, want: WantedOutputs, host: MicroBatch) -> dict[str, Tensor]:
        """The outputs that are not None, by their names in `TokenOutputs`; see `TaskModel.outputs`."""
        return _present(self._task_model[0].outputs(micro, want, host))


class GatheredHead(nn.Module):
    """A `LanguageHead` as a module, for which ZeRO-3 can gather the output layer's weight."""

    def __init__(self, head: LanguageHead) -> None:
        super().__init__()
        self._head = head

    def outputs(
        self, hidden_NH: Tensor, targets_N: Tensor, request: HeadRequest, gather_ids_NK: Tensor | None = None
    ) -> HeadOutputs:
        """Outputs of the head, see `LanguageHead.outputs`."""
        return HeadOutputs(
            **self(
                hidden_NH, lambda given_NH: _present(self._head.outputs(given_NH, targets_N, request, gather_ids_NK))
            )
        )

    def compared(
        self,
        hidden_NH: Tensor,
        other_NH: Tensor,
        comparison: Comparison,
        request: HeadRequest,
        weights_N: Tensor | None = None,
    ) -> Tensor:
        """Values of a comparison with another model, see `LanguageHead.compared`."""
        values: Tensor = self(
            hidden_NH, lambda given_NH: self._head.compared(given_NH, other_NH, comparison, request, weights_N)
        )
        return values

    def forward(self, hidden_NH: Tensor, compute: Callable[[Tensor], T]) -> T:
        """What `compute` returns for the hidden states, which DeepSpeed's hooks see as input and output."""
        return compute(hidden_NH)


def _present(outputs: TokenOutputs | HeadOutputs) -> dict[str, Tensor]:
    named = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}
