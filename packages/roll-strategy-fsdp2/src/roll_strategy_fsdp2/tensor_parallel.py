"""Tensor parallelism by the plan that transformers brings with an architecture.

    colwise   whole x  -> x Wᵀ, W cut by rows      -> a piece of the features (heads, hidden units)
    rowwise   a piece  -> x Wᵀ, W cut by columns   -> partial, added up over the ranks, and the bias once

Parameters become DTensors, which FSDP then cuts further; what computes is the module's own code on the plain tensors
inside. Where a rank uses a whole parameter on a piece (norms of queries and keys) its gradient is partial; FSDP adds it
up when it reduces it. What the plan does not name every rank computes alike.

Mixtures of experts: each rank holds some experts whole, and computes what all tokens want of them.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from roll_core.errors import PlacementError, UnsupportedError
from roll_core.modeling.collectives import copied, gathered, own_piece, summed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
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
"""Of modules in transformers' plans, those that are known here."""


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut what the model's plan names over `mesh`, which has one dimension, and let it compute on its pieces. In place;
    parameters may be on `meta`.

    Raises `UnsupportedError` for a plan that is not understood, `PlacementError` where sizes are no multiples of ranks.
    """
    modules = dict(model.base_model.named_modules())
    plan = {name: style for name in modules if (style := _plan(model).get(_generic(name)))}
    _check_plan(model, plan, modules)
    _check_heads(model, plan, mesh.size())
    for name, style in plan.items():
        if style == EXPERTS:
            _spread_experts(name, modules[name], mesh)
        else:
            _Piece(modules[name], mesh, style, name)


def _plan(model: PreTrainedModel) -> Mapping[str, str]:
    """By generic names below the base model."""
    found: Mapping[str, str] = getattr(model.base_model, "_tp_plan", None) or model.config.base_model_tp_plan or {}
    return found


def _generic(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


# -- what is refused ---------------------------------------------------------------------------------------------------


def _check_plan(model: PreTrainedModel, plan: dict[str, str], modules: Mapping[str, nn.Module]) -> None:
    """Also drops what belongs to no layer: it is spread by other means."""
    for name in [each for each in plan if not re.search(r"\.\d+\.", each)]:
        del plan[name]
    if not plan:
        raise UnsupportedError(
            f"transformers brings no plan for tensor parallelism with {type(model).__name__}; leave"
            " tensor_model_parallel_size out"
        )
    for name, style in plan.items():
        if style not in STYLES:
            raise UnsupportedError(
                f"{type(model).__name__}: the plan for tensor parallelism makes {name} {style!r}, which is not known"
                f" here ({', '.join(STYLES)} are); leave tensor_model_parallel_size out"
            )
        if style != "colwise":
            continue
        parent = modules[name.rpartition(".")[0]]
        beside = {f"{name.rpartition('.')[0]}.{child}": each for child, each in parent.named_children()}
        forgotten = [
            each for each, module in beside.items() if each not in plan and next(module.parameters(), None) is not None
        ]
        forgotten += [f"{name.rpartition('.')[0]}.{own}" for own, _ in parent.named_parameters(recurse=False)]
        if forgotten:
            raise UnsupportedError(
                f"{type(model).__name__}: the plan for tensor parallelism cuts {name} and says nothing of"
                f" {forgotten[0]}, whose gradient may then be wrong; a newer transformers may know, or leave"
                " tensor_model_parallel_size out"
            )


def _check_heads(model: PreTrainedModel, plan: Mapping[str, str], size: int) -> None:
    if not any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items()):
        return
    config = model.config.get_text_config()
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % size:
            raise PlacementError(
                f"tensor_model_parallel_size {size} does not divide {what} {heads} of {type(model).__name__}; choose a"
                f" divisor of {heads}"
            )


# -- one module --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter: where it stands, and whether its gradient is partial."""

    owner: nn.Module
    name: str
    grad: Placement


class _Piece:
    """Takes the place of a module's `forward`: the same code on this rank's piece of its parameters."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, style: str, path: str) -> None:
        self.style, self.group = style, mesh.get_group()
        self.forward: Callable[..., Any] = module.forward
        self.uses: list[_Use] = []
        self.biases: list[_Use] = []
        for at, owner in module.named_modules():
            for name, parameter in list(owner.named_parameters(recurse=False)):
                placement, grad = self._place(f"{at}.{name}")
                if isinstance(placement, Shard) and parameter.shape[placement.dim] % mesh.size():
                    raise PlacementError(
                        f"tensor_model_parallel_size {mesh.size()} does not divide dimension {placement.dim} of"
                        f" {path}.{name}, which is {tuple(parameter.shape)}"
                    )
                _distribute(owner, name, mesh, placement)
                late = style.startswith("rowwise") and name == "bias"
                (self.biases if late else self.uses).append(_Use(owner, name, grad))
        module.forward = self

    def _place(self, path: str) -> tuple[Placement, Placement]:
        """How a parameter is cut, and what its gradient is. Low-rank adapters W + B A are cut where W is: B by rows
        beside a W cut by rows, A by columns beside one cut by columns; the other factor is whole, on a piece."""
        is_bias, factor = path.endswith(".bias"), re.search(r"(?:^|\.)lora_([AB])\.", path)
        if self.style.startswith("colwise"):
            whole = factor is not None and factor[1] == "A"
            return (Replicate(), Partial()) if whole else (Shard(0), Shard(0))
        if self.style.startswith("rowwise"):
            if is_bias:
                return Replicate(), Replicate()
            whole = factor is not None and factor[1] == "B"
            return (Replicate(), Partial()) if whole else (Shard(1), Shard(1))
        return Replicate(), Partial()

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.style.startswith("colwise"):
            tensor = copied(tensor, self.group)
        elif self.style == "rowwise_split_input":
            tensor = own_piece(tensor, self.group)
        with local_parameters(self.uses), _without(self.biases):
            found: Tensor = self.forward(tensor, *args, **kwargs)
        if self.style == "colwise_gather_output":
            found = gathered(found, self.group)
        elif self.style.startswith("rowwise"):
            found = summed(found, self.group)
            for each in self.biases:
                found = found + _local(each)
        return found


def _spread_experts(path: str, module: Any, mesh: DeviceMesh) -> None:
    """Some whole experts on each rank. transformers' experts pass over the index that follows their last expert, once
    they are told that they are not all."""
    if not hasattr(module, "_is_expert_parallel"):
        raise UnsupportedError(
            f"{path}: experts of class {type(module).__name__} cannot be spread over ranks in this version of"
            " transformers; leave tensor_model_parallel_size out"
        )
    total, size, group = int(module.num_experts), mesh.size(), mesh.get_group()
    uses = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[0] != total or total % size:
            raise PlacementError(
                f"tensor_model_parallel_size {size} does not divide the {total} experts of {path}, of which each rank"
                f" holds some; {name} is {tuple(parameter.shape)}"
            )
        _distribute(module, name, mesh, Shard(0))
        uses.append(_Use(module, name, Shard(0)))
    here = total // size
    first = here * mesh.get_local_rank()
    module.num_experts, module._is_expert_parallel = here, True
    own: Callable[..., Tensor] = module.forward

    def forward(hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        elsewhere_TK = (chosen_TK < first) | (chosen_TK >= first + here)
        mine_TK = torch.where(elsewhere_TK, here, chosen_TK - first)
        weights_TK = copied(weights_TK, group).masked_fill(elsewhere_TK, 0.0)
        with local_parameters(uses):
            found = own(copied(hidden_TH, group), mine_TK, weights_TK)
        return summed(found, group)

    module.forward = forward


def _distribute(owner: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Every rank has the whole tensor, or none has any number yet: nothing travels."""
    parameter = owner._parameters[name]
    if parameter is None:
        return
    cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    if not cut.is_meta:
        # A copy: the whole tensor is not kept alive by a piece of it.
        cut = DTensor.from_local(
            cut.to_local().clone(memory_format=torch.contiguous_format), mesh, [placement], run_check=False
        )
    owner._parameters[name] = nn.Parameter(cut, requires_grad=parameter.requires_grad)


def _local(use: _Use) -> Tensor:
    parameter = use.owner._parameters[use.name]
    if not isinstance(parameter, DTensor):
        raise TypeError(f"{use.name} is no DTensor any more")
    return parameter.to_local(grad_placements=[use.grad])


@contextmanager
def local_parameters(uses: list[_Use]) -> Iterator[None]:
    """For the time being modules have the plain tensors, whose gradients find their way into the DTensors. Also ends
    when a recomputation in the backward pass stops in the middle, by an exception."""
    kept = [(each, each.owner._parameters[each.name]) for each in uses]
    for each in uses:
        each.owner._parameters[each.name] = _local(each)  # type: ignore[assignment]
    try:
        yield
    finally:
        for each, parameter in kept:
            each.owner._parameters[each.name] = parameter


@contextmanager
def _without(uses: list[_Use]) -> Iterator[None]:
    kept = [(each, each.owner._parameters[each.name]) for each in uses]
    for each in uses:
        each.owner._parameters[each.name] = None
    try:
        yield
    finally:
        for each, parameter in kept:
            each.owner._parameters[each.name] = parameter
