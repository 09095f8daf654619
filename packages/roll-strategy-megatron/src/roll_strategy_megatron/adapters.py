"""LoRA adapters on Megatron's layers, numerically equal to peft's on transformers' layers.

    y = x Wᵀ + scale · (x Aᵀ) Bᵀ          for each part of a fused layer: [q k v], [gate up]

| the layer is split by | A `[R, I]` | B `[O, R]` | over its ranks |
|---|---|---|---|
| outputs | replicated | rows, like W | the gradient of x Aᵀ is summed |
| inputs | columns, like W | replicated | x Aᵀ is summed |
| nothing | replicated | replicated | |

Collectives around an expert already sum its inputs' gradients and its outputs. So its adapters need no further sums,
except of the gradients of replicated factors.

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

    from roll_strategy_megatron.bridge.bridge import Shard
    from roll_strategy_megatron.bridge.transforms import Sizes, Transform

Cut = Literal["outputs", "inputs", "nothing"]


def cut_of(transform: Transform) -> Cut:
    """The dimension by which tensor-parallel ranks split a layer."""
    if transform.tp_dim is None:
        return "nothing"
    return "inputs" if type(transform) is Copy and transform.tp_dim == 1 else "outputs"


def attach(linear: nn.Module, adapter: Adapter) -> None:
    """Attach an adapter to a layer by a forward hook, which adds the adapter's output to that of the layer.

    A layer that computes several experts (grouped GEMM) gets one adapter per expert.
    """
    beside = getattr(linear, "adapter", None)
    if isinstance(beside, GroupedAdapters):
        beside.append(adapter)
        return
    together = hasattr(linear, "num_gemms")
    standing = GroupedAdapters([adapter]) if together else adapter
    linear.add_module("adapter", standing)
    linear.register_forward_hook(standing.added)


class Adapter(nn.Module):
    """Adapter of one of Megatron's layers, or of one expert's weight in a grouped layer."""

    enabled = True

    def __init__(
        self, linear: nn.Module, held: Shard, num_parts: int, sizes: Sizes, group: Any, *, scale: float
    ) -> None:
        """`sizes` are those of this rank's shard; `group` are the ranks that shard the layer.

        `add` adds the factors.
        """
        super().__init__()
        self.held, weight = held, held.parameter
        self._group = group
        self.cut, self.scale, self.is_expert = cut_of(held.rule.transform), scale, held.rule.is_expert
        config: Any = linear.config
        self.sequence_parallel = bool(config.sequence_parallel) and not self.is_expert
        self._transform, self._sizes = held.rule.transform, sizes
        empty = torch.empty(weight.shape, device="meta")
        shaped = empty.reshape(self._transform.whole_shape(empty, 1, sizes))
        self._rows = [len(rows) for rows in self._transform.split(shaped, num_parts, sizes)]
        self.factors_a, self.factors_b = nn.ParameterDict(), nn.ParameterDict()

    def add(self, part: int, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
        """Add the factors A (uninitialized) and B (zero) for a part of the layer, in float32. Returns both."""
        options: Any = {"dtype": torch.float32, "device": self.held.parameter.device}
        a_RI = nn.Parameter(torch.empty(rank, self.held.parameter.shape[1], **options))
        b_OR = nn.Parameter(torch.zeros(self._rows[part], rank, **options))
        # With sequence parallelism, a rank's gradient of a replicated factor only covers its own tokens.
        partial_a = self.sequence_parallel and self.cut != "inputs"
        partial_b = self.sequence_parallel and self.cut != "outputs"
        for factor, partial in ((a_RI, partial_a), (b_OR, partial_b)):
            factor.sequence_parallel = partial  # type: ignore[attr-defined]
        self.factors_a[str(part)], self.factors_b[str(part)] = a_RI, b_OR
        return a_RI, b_OR

    def added(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Forward hook of a layer: add the adapter's output."""
        if not self.enabled:
            return output
        base, bias = output
        delta_LO = self(inputs[0].flatten(0, -2))
        return (base + delta_LO.view(base.shape)).to(base.dtype), bias

    def forward(self, x_LI: Tensor) -> Tensor:
        """The adapter's output, `[L, O]` in float32."""
        x_LI = x_LI.float()
        parts: list[Tensor | None] = []
        for part in range(len(self._rows)):
            if str(part) in self.factors_a:
                low_LR = self._low(x_LI, self.factors_a[str(part)])
                parts.append(F.linear(low_LR, self.factors_b[str(part)]))
            else:
                parts.append(None)
        known = next(factor for factor in parts if factor is not None)
        columns = [
            (known.new_zeros(len(known), rows) if factor is None else factor).T
            for factor, rows in zip(parts, self._rows, strict=True)
        ]
        return self._transform.join(columns, self._sizes).flatten(0, -2).T * self.scale

    def _low(self, x_LI: Tensor, a_RI: Tensor) -> Tensor:
        """x Aᵀ of all tokens for which the layer computes outputs on this rank."""
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
        """This rank's shard of W + scale · B A: a new tensor in the weight's dtype, computed in float32."""
        weight = self.held.parameter.detach()
        parts = [
            self.factors_b[key] @ self.factors_a[key]
            if (key := str(part)) in self.factors_a
            else torch.zeros(rows, weight.shape[1], device=weight.device)
            for part, rows in enumerate(self._rows)
        ]
        delta = self._transform.join(parts, self._sizes).reshape(weight.shape)
        return delta.mul_(self.scale).add_(weight.float()).to(weight.dtype)


class GroupedAdapters(nn.ModuleList):
    """Adapters of a layer that computes a rank's experts together, from the number of tokens per expert."""

    def added(self, linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Forward hook of the layer. Its tokens are sorted by expert, and every expert has an adapter."""
        adapters: list[Any] = sorted(self, key=lambda adapter: adapter.held.expert)
        if not adapters[0].enabled:
            return output
        (tokens, counts), (base, bias) = inputs, output
        parts = torch.split(tokens, counts)
        delta = torch.cat([adapter(part) for adapter, part in zip(adapters, parts, strict=True)])
        return (base + delta).to(base.dtype), bias


def partial_factors(adapters: Sequence[Adapter]) -> list[nn.Parameter]:
    """Factors whose gradient is a partial sum over the ranks that shard an expert."""
    factors: list[nn.Parameter] = []
    for adapter in adapters:
        if adapter.is_expert and adapter.cut != "nothing":
            factors += (adapter.factors_a if adapter.cut == "outputs" else adapter.factors_b).values()
    return factors
