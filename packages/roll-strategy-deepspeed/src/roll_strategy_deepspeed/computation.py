"""The module that DeepSpeed wraps: from a microbatch to its outputs, so that ZeRO sees everything that is computed.

    engine -> Computation -> backbone's layers            ZeRO-3 gathers the parameters of a module around its forward
                          -> GatheredHead -> logprobs     the output layer's weight is used apart from its module

Shapes: N tokens given to the head, H hidden size.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from torch import nn

from roll_core.spec.train import TokenOutputs
from roll_modeling.logprobs import HeadOutputs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from roll_core.spec.train import MicroBatch, Want
    from roll_modeling.backbone import LanguageHead
    from roll_modeling.logprobs import HeadRequest
    from roll_modeling.task_model import TaskModel


class Computation(nn.Module):
    """A `TaskModel` as a module. What goes in by keyword and comes out as a dictionary passes DeepSpeed's hooks."""

    def __init__(self, model: PreTrainedModel, task_model: TaskModel) -> None:
        super().__init__()
        self.model = model
        self._task_model = [task_model]
        """In a list, for it is no module of this one."""

    def forward(self, *, micro: MicroBatch, want: Want) -> dict[str, Tensor]:
        """The outputs that are there, by the names of `TokenOutputs`."""
        return _present(self._task_model[0].outputs(micro, want))


class GatheredHead(nn.Module):
    """Stands for a `LanguageHead`, as a module that ZeRO-3 can be told to gather the output layer's weight for."""

    def __init__(self, head: LanguageHead) -> None:
        super().__init__()
        self._head = head

    def outputs(self, hidden_NH: Tensor, targets_N: Tensor, request: HeadRequest) -> HeadOutputs:
        """As `LanguageHead.outputs`."""
        return HeadOutputs(**self(hidden_NH, targets_N=targets_N, request=request))

    def forward(self, hidden_NH: Tensor, *, targets_N: Tensor, request: HeadRequest) -> dict[str, Tensor]:
        """The outputs that are there, by the names of `HeadOutputs`."""
        return _present(self._head.outputs(hidden_NH, targets_N, request))


def token_outputs(found: dict[str, Tensor]) -> TokenOutputs:
    """What `Computation` returned."""
    return TokenOutputs(**found)


def _present(outputs: TokenOutputs | HeadOutputs) -> dict[str, Tensor]:
    named = {each.name: getattr(outputs, each.name) for each in fields(outputs)}
    return {name: tensor for name, tensor in named.items() if tensor is not None}
