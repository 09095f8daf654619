"""Mixture-of-experts (MoE) layers whose experts are distributed over several ranks.

    tensor parallel   ranks have the same tokens: each computes its own experts for all tokens; results are summed
    expert parallel   ranks have different tokens, which are sent to their experts, and the results back:

    rank 0   a b c ─┐ all-to-all ┌─ a c e   experts 0..3 ─┐ all-to-all ┌─ a b c
    rank 1   d e f ─┘            └─ b d f   experts 4..7 ─┘            └─ d e f

The all-to-all is collective, so ranks without microbatches run idle passes through every layer. In the backward pass,
the all-to-all sums an expert's gradient over the tokens of its group. FSDP sums it over the groups.

Shapes: T tokens, H hidden size, K experts per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import Shard

from roll_core.errors import PlacementError, UnsupportedError
from roll_modeling.collectives import copied, summed
from roll_strategy_fsdp2.sharded_parameters import ShardedParameter, distribute, generic, local_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

EXCHANGED = "ep_dispatch_experts"
"""Style in transformers' plans for experts with token dispatch."""


def spread_experts(path: str, module: Any, mesh: DeviceMesh) -> None:
    """Distribute the experts of `module` over ranks that have the same tokens (tensor parallelism), in place.

    With `_is_expert_parallel`, transformers' experts skip the expert index that equals the number of local experts.
    Tokens of remote experts are mapped to that index.
    """
    total = int(getattr(module, "num_experts", 0))
    parameters = _cut_experts(path, module, mesh, "tensor_model_parallel_size")
    group, here = mesh.get_group(), total // mesh.size()
    first = here * mesh.get_local_rank()
    local_forward: Callable[..., Tensor] = module.forward

    def forward(hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        elsewhere_TK = (chosen_TK < first) | (chosen_TK >= first + here)
        mine_TK = torch.where(elsewhere_TK, here, chosen_TK - first)
        weights_TK = copied(weights_TK, group).masked_fill(elsewhere_TK, 0.0)
        with local_parameters(parameters):
            partial_TH = local_forward(copied(hidden_TH, group), mine_TK, weights_TK)
        return summed(partial_TH, group)

    module.forward = forward


def exchange_tokens(model: PreTrainedModel, mesh: DeviceMesh, alone: DeviceMesh) -> list[nn.Module]:
    """Distribute experts over ranks that have different tokens (expert parallelism).

    Returns the modules that hold the experts.

    The model is changed in place; its parameters may be on the meta device. `mesh` is the one-dimensional mesh of an
    expert-parallel group; `alone` contains only this rank.

    Raises `UnsupportedError` if transformers has no expert-parallel plan for the architecture, or its experts do not
    support it. Raises `PlacementError` if the number of experts is not a multiple of the number of ranks.
    """
    plan = _plan(model)
    modules = model.base_model.named_modules()
    exchanged = {name: module for name, module in modules if plan.get(generic(name)) == EXCHANGED}
    if not exchanged:
        raise UnsupportedError(f"transformers has no expert-parallel plan for {type(model).__name__}; remove ep_size")
    for name, module in exchanged.items():
        _exchange(name, module, mesh, alone)
    return list(exchanged.values())


def _plan(model: PreTrainedModel) -> Mapping[str, str]:
    """The model's expert-parallel plan. Its keys are module paths relative to the base model, with `*` for numbers."""
    plan: Mapping[str, str] = getattr(model.base_model, "_ep_plan", None) or model.config.base_model_ep_plan or {}
    return plan


def _exchange(path: str, module: Any, mesh: DeviceMesh, alone: DeviceMesh) -> None:
    from transformers.distributed.expert_parallel import AllToAllEP

    parameters = _cut_experts(path, module, mesh, "ep_size")
    exchanged: Callable[..., Tensor] = AllToAllEP(module, mesh, alone)

    def forward(hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        with local_parameters(parameters):
            return exchanged(hidden_TH, chosen_TK, weights_TK).to(hidden_TH.dtype)

    module.forward = forward


def _cut_experts(path: str, module: Any, mesh: DeviceMesh, key: str) -> list[ShardedParameter]:
    """Assign an equal number of experts to each rank. `key` is the configuration key named in errors."""
    if not hasattr(module, "_is_expert_parallel"):
        raise UnsupportedError(
            f"{path}: experts of class {type(module).__name__} cannot be distributed over ranks in this version of"
            f" transformers; remove {key}"
        )
    total, size = int(module.num_experts), mesh.size()
    parameters = []
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.shape[0] != total or total % size:
            raise PlacementError(
                f"{key} {size} does not divide the {total} experts of {path}; {name} has shape {tuple(parameter.shape)}"
            )
        distribute(module, name, mesh, Shard(0))
        parameters.append(ShardedParameter(module, name, Shard(0)))
    module.num_experts, module._is_expert_parallel = total // size, True
    return parameters
