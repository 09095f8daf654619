"""Low-rank adapters on Megatron's layers, with the numbers of peft's on the layers of transformers.

    y = x Wᵀ + scale · (x Aᵀ) Bᵀ          of a fused layer for each part of it: [q k v], [gate up]

| the layer is cut by | A `[R, I]` | B `[O, R]` | over its ranks |
|---|---|---|---|
| outputs | whole | rows, like W | the gradient of x Aᵀ is summed |
| inputs | columns, like W | whole | x Aᵀ is summed |
| nothing | whole | whole | |

Experts that ranks cut stand between collectives that sum for them: here nothing is, but gradients of what is whole.

Shapes: L tokens of this rank, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn

from roll_strategy_megatron.bridge.transforms import Copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from roll_strategy_megatron.bridge.bridge import Held
    from roll_strategy_megatron.bridge.transforms import Sizes, Transform

Cut = Literal["outputs", "inputs", "nothing"]


def cut_of(transform: Transform) -> Cut:
    """How tensor parallel ranks share a layer."""
    if transform.tp_dim is None:
        return "nothing"
    return "inputs" if type(transform) is Copy and transform.tp_dim == 1 else "outputs"


def stand_on(linear: nn.Module, adapter: Adapter) -> None:
    """The layer adds to its output what the adapter finds; one that computes several experts together, what theirs
    find of their tokens."""
    beside = getattr(linear, "adapter", None)
    if isinstance(beside, OfExperts):
        beside.append(adapter)
        return
    together = hasattr(linear, "num_gemms")
    standing = OfExperts([adapter]) if together else adapter
    linear.add_module("adapter", standing)
    linear.register_forward_hook(standing.added)


class Adapter(nn.Module):
    """Of one of Megatron's layers, or of an expert's weight in one."""

    enabled = True

    def __init__(
        self, linear: nn.Module, held: Held, num_parts: int, sizes: Sizes, group: Any, *, scale: float
    ) -> None:
        """`sizes` are those of this rank's share, `group` the ranks that share the layer. Without factors: see
        `add`."""
        super().__init__()
        self.held, weight = held, held.parameter
        self._group = group
        self.cut, self.scale, self.is_expert = cut_of(held.rule.transform), scale, held.rule.is_expert
        config: Any = linear.config
        self.sequence_parallel = bool(config.sequence_parallel) and not self.is_expert
        self._transform, self._sizes = held.rule.transform, sizes
        empty = torch.empty(weight.shape, device="meta")
        shaped = empty.reshape(self._transform.whole_shape(empty, 1, sizes))
        self._rows = [len(each) for each in self._transform.split(shaped, num_parts, sizes)]
        self.factors_a, self.factors_b = nn.ParameterDict(), nn.ParameterDict()

    def add(self, part: int, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
        """A, without numbers, and B, which is 0, of a part of the layer; in float32 whatever the layer is."""
        options: Any = {"dtype": torch.float32, "device": self.held.parameter.device}
        a_RI = nn.Parameter(torch.empty(rank, self.held.parameter.shape[1], **options))
        b_OR = nn.Parameter(torch.zeros(self._rows[part], rank, **options))
        # With sequence parallel a rank has the gradient of its tokens, of factors that are whole on every rank.
        partial_a = self.sequence_parallel and self.cut != "inputs"
        partial_b = self.sequence_parallel and self.cut != "outputs"
        for each, partial in ((a_RI, partial_a), (b_OR, partial_b)):
            each.sequence_parallel = partial  # type: ignore[attr-defined]
        self.factors_a[str(part)], self.factors_b[str(part)] = a_RI, b_OR
        return a_RI, b_OR

    def added(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """The hook of a layer."""
        if not self.enabled:
            return output
        found, bias = output
        delta_LO = self(inputs[0].flatten(0, -2))
        return (found + delta_LO.view(found.shape)).to(found.dtype), bias

    def forward(self, x_LI: Tensor) -> Tensor:
        """`[L, O]` in float32, to be added."""
        x_LI = x_LI.float()
        parts: list[Tensor | None] = []
        for part in range(len(self._rows)):
            if str(part) in self.factors_a:
                low_LR = self._low(x_LI, self.factors_a[str(part)])
                parts.append(F.linear(low_LR, self.factors_b[str(part)]))
            else:
                parts.append(None)
        known = next(each for each in parts if each is not None)
        columns = [
            (known.new_zeros(len(known), rows) if each is None else each).T
            for each, rows in zip(parts, self._rows, strict=True)
        ]
        return self._transform.join(columns, self._sizes).flatten(0, -2).T * self.scale

    def _low(self, x_LI: Tensor, a_RI: Tensor) -> Tensor:
        """x Aᵀ of all the tokens of which the layer gives outputs here."""
        group = self._group
        low_LR: Tensor = F.linear(x_LI, a_RI)
        if self.is_expert or self.cut == "nothing":
            return low_LR
        if self.cut == "outputs":
            if self.sequence_parallel:
                low_LR = gather_from_sequence_parallel_region(low_LR, tensor_parallel_output_grad=True, group=group)
            else:
                low_LR = copy_to_tensor_model_parallel_region(low_LR, group=group)
        elif self.sequence_parallel:
            low_LR = reduce_scatter_to_sequence_parallel_region(low_LR, group=group)
        else:
            low_LR = reduce_from_tensor_model_parallel_region(low_LR, group=group)
        return low_LR

    @torch.no_grad()
    def merged(self) -> Tensor:
        """This rank's share of W + scale · B A, a new tensor in the weight's dtype, computed in float32."""
        weight = self.held.parameter.detach()
        parts = [
            self.factors_b[key] @ self.factors_a[key]
            if (key := str(part)) in self.factors_a
            else torch.zeros(rows, weight.shape[1], device=weight.device)
            for part, rows in enumerate(self._rows)
        ]
        delta = self._transform.join(parts, self._sizes).reshape(weight.shape)
        return delta.mul_(self.scale).add_(weight.float()).to(weight.dtype)


class OfExperts(nn.ModuleList):
    """Of a layer that computes the experts of a rank together, and is told how many tokens each has."""

    def added(self, linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """The hook of the layer. Its tokens stand in the order of its experts, which all have an adapter."""
        adapters: list[Any] = sorted(self, key=lambda each: each.held.expert)
        if not adapters[0].enabled:
            return output
        (tokens, counts), (found, bias) = inputs, output
        parts = torch.split(tokens, counts)
        delta = torch.cat([adapter(part) for adapter, part in zip(adapters, parts, strict=True)])
        return (found + delta).to(found.dtype), bias


def partial_factors(adapters: Sequence[Adapter]) -> list[nn.Parameter]:
    """Those whose gradient is a part of a sum over the ranks that cut an expert."""
    found: list[nn.Parameter] = []
    for each in adapters:
        if each.is_expert and each.cut != "nothing":
            found += (each.factors_a if each.cut == "outputs" else each.factors_b).values()
    return found
