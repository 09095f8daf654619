"""Tensor parallelism by the plan that transformers ships with an architecture.

    colwise   full x   -> x Wᵀ, W split by rows      -> a slice of the features (heads, hidden units)
    rowwise   a slice  -> x Wᵀ, W split by columns   -> partial sums, all-reduced; the bias is added once

Parameters become DTensors, which FSDP then shards further. The module's own code computes on the local tensors. If a
rank applies a replicated parameter to a slice (query and key norms), its gradient is partial; FSDP sums it during the
reduction. Every rank computes modules outside the plan identically.

Each rank holds some of the experts of an MoE layer, see `experts`.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import Partial, Replicate, Shard

from roll_core.errors import PlacementError, UnsupportedError
from roll_modeling.collectives import copied, gathered, own_piece, summed
from roll_modeling.model import layer_configs
from roll_strategy_fsdp2.experts import spread_experts
from roll_strategy_fsdp2.sharded_parameters import (
    ShardedParameter,
    distribute,
    generic,
    local_of,
    local_parameters,
    without_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement
    from transformers import PreTrainedModel

EXPERTS = "moe_tp_experts"
STYLES = (
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    EXPERTS,
)
"""Supported module styles of transformers' plans."""


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard the modules in the model's tensor-parallel plan over `mesh`, which has one dimension.

    The model is changed in place; its parameters may be on the meta device.

    Raises `UnsupportedError` if the plan is missing or unsupported, and `PlacementError` if a size is not a multiple of
    the number of ranks.
    """
    modules = dict(model.base_model.named_modules())
    plan = {name: style for name in modules if (style := _plan(model).get(generic(name)))}
    _check_plan(model, plan, modules)
    _check_heads(model, plan, mesh.size())
    for name, style in plan.items():
        if style == EXPERTS:
            spread_experts(name, modules[name], mesh)
        else:
            _ShardedModule(modules[name], mesh, style, name)


def _plan(model: PreTrainedModel) -> Mapping[str, str]:
    """The model's tensor-parallel plan. Its keys are module paths relative to the base model, with `*` for numbers."""
    plan: Mapping[str, str] = getattr(model.base_model, "_tp_plan", None) or model.config.base_model_tp_plan or {}
    return plan


# -- what is refused ---------------------------------------------------------------------------------------------------


def _check_plan(model: PreTrainedModel, plan: dict[str, str], modules: Mapping[str, nn.Module]) -> None:
    """Raise `UnsupportedError` for an unsupported plan.

    Also removes modules outside the layers, which FSDP shards, from `plan`.
    """
    for name in [key for key in plan if not re.search(r"\.\d+\.", key)]:
        del plan[name]
    if not plan:
        raise UnsupportedError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}; remove tensor_model_parallel_size"
        )
    for name, style in plan.items():
        if style not in STYLES:
            raise UnsupportedError(
                f"{type(model).__name__}: the tensor-parallel plan has style {style!r} for {name}, supported are"
                f" {', '.join(STYLES)}; remove tensor_model_parallel_size"
            )
        if style != "colwise":
            continue
        parent = modules[name.rpartition(".")[0]]
        beside = {f"{name.rpartition('.')[0]}.{child}": key for child, key in parent.named_children()}
        forgotten = [
            key for key, module in beside.items() if key not in plan and next(module.parameters(), None) is not None
        ]
        forgotten += [
            f"{name.rpartition('.')[0]}.{parameter_name}"
            for parameter_name, _ in parent.named_parameters(recurse=False)
        ]
        if forgotten:
            raise UnsupportedError(
                f"{type(model).__name__}: the tensor-parallel plan shards {name} but does not contain"
                f" {forgotten[0]}, whose gradient may then be wrong; use another version of transformers, or remove"
                " tensor_model_parallel_size"
            )


def _check_heads(model: PreTrainedModel, plan: Mapping[str, str], size: int) -> None:
    if not any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items()):
        return
    for layer, what in product(layer_configs(model.config), ("num_attention_heads", "num_key_value_heads")):
        heads = getattr(layer, what, None)
        if isinstance(heads, int) and heads % size:
            raise PlacementError(
                f"tensor_model_parallel_size {size} does not divide {what} {heads} of {type(model).__name__}; use a"
                f" divisor of {heads}"
            )


# -- one module --------------------------------------------------------------------------------------------------------


class _ShardedModule:
    """Replacement of a module's `forward`: runs the original code on this rank's local parameters."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, style: str, path: str) -> None:
        self.style, self.group = style, mesh.get_group()
        self.forward: Callable[..., Any] = module.forward
        self.parameters: list[ShardedParameter] = []
        self.biases: list[ShardedParameter] = []
        for owner_path, owner in module.named_modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                placement, grad = self._place(f"{owner_path}.{name}")
                if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
                    raise PlacementError(
                        f"tensor_model_parallel_size {mesh.size()} does not divide dimension {placement.dim} of"
                        f" {path}.{name}, which is {tuple(parameter.shape)}"
                    )
                distribute(owner, name, mesh, placement)
                late = style.startswith("rowwise") and name == "bias"
                (self.biases if late else self.parameters).append(ShardedParameter(owner, name, grad))
        module.forward = self

    def _place(self, path: str) -> tuple[Placement, Placement]:
        """Placement of a parameter and of its gradient.

        For LoRA, W + B A, one factor is split like W: B by rows for colwise, A by columns for rowwise modules. The
        other factor is replicated but applied to a slice, so its gradient is partial.
        """
        is_bias, factor = path.endswith(".bias"), re.search(r"(?:^|\.)lora_([AB])\.", path)
        if self.style.startswith("colwise"):
            replicated = factor is not None and factor[1] == "A"
            return (Replicate(), Partial()) if replicated else (Shard(0), Shard(0))
        if self.style.startswith("rowwise"):
            if is_bias:
                return Replicate(), Replicate()
            replicated = factor is not None and factor[1] == "B"
            return (Replicate(), Partial()) if replicated else (Shard(1), Shard(1))
        return Replicate(), Partial()

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.style.startswith("colwise"):
            tensor = copied(tensor, self.group)
        elif self.style == "rowwise_split_input":
            tensor = own_piece(tensor, self.group)
        with local_parameters(self.parameters), without_parameters(self.biases):
            output: Tensor = self.forward(tensor, *args, **kwargs)
        if self.style == "colwise_gather_output":
            output = gathered(output, self.group)
        elif self.style.startswith("rowwise"):
            output = summed(output, self.group)
            for bias in self.biases:
                output = output + local_of(bias)
        return output
