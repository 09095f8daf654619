"""Spreads a model over ranks: the mesh, which layers are gathered as one, and the root in whose forward all happens.

1-D:   ranks 0 1 2 3            one copy of the model, a quarter of every parameter on each rank
HSDP:  ranks 0 1 | 2 3          two copies; gradients are reduce-scattered in a row, then all-reduced across
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from roll_core.errors import ModelError, PlacementError
from roll_core.modeling.model import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from roll_core.spec.model import MeshInfo
    from roll_strategy_fsdp2.config import FSDP2Config

Found = TypeVar("Found")


class Root(nn.Module):
    """Runs computations inside its own `forward`: there FSDP has gathered what belongs to no layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Found]) -> Found:
        """Tensors that need a backward pass must stand in a tuple, where FSDP finds them."""
        return compute()


def make_mesh(mesh: MeshInfo, fsdp_size: int | None) -> DeviceMesh:
    """One dimension, `shard`, or two, `replicate` and `shard`. Collective."""
    size = fsdp_size or mesh.world_size
    if mesh.world_size % size:
        raise PlacementError(
            f"role {mesh.role}: fsdp_size {size} does not divide its {mesh.world_size} ranks; choose a divisor of"
            f" {mesh.world_size}, or leave it out to share one copy of the model among all"
        )
    kind = torch.device(mesh.device).type
    if size == mesh.world_size:
        return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (mesh.world_size // size, size), mesh_dim_names=("replicate", "shard"))


def shard(model: PreTrainedModel, mesh: DeviceMesh, config: FSDP2Config, compute_dtype: torch.dtype) -> Root:
    """Replace the parameters of `model` by this rank's shares, in place; they move to the mesh's device, or to the host
    with `offload_policy`."""
    root = Root(model)
    layers = find_layers(model, config.wrap_policy.transformer_layer_cls_to_wrap)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": _precision(model, compute_dtype, DTYPES[config.reduce_dtype]),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if config.offload_policy
        else OffloadPolicy(),
        "reshard_after_forward": config.reshard_after_forward,
    }
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(root, **options)
    for module in sharded_modules(root):
        # Sums, not means: what a batch's gradient is divided by is in the loss.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # Experts that no token went to, on this rank only.
        module.set_reduce_scatter_unused_params(True, recurse=False)
    return root


def find_layers(model: PreTrainedModel, class_names: Sequence[str]) -> list[nn.Module]:
    """The outermost modules of these classes, by default of those that the architecture says must not be split."""
    wanted = set(class_names) or set(model._no_split_modules or ())
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            if type(child).__name__ in wanted:
                found.append(child)
            else:
                search(child)

    search(model)
    if not found:
        asked = f"no module of class {', '.join(sorted(wanted))}" if wanted else "no list of layers of its own"
        known = sorted({type(each).__name__ for each in model.modules()})
        raise ModelError(
            f"{type(model).__name__} has {asked}; name its layers in wrap_policy.transformer_layer_cls_to_wrap: it has"
            f" {', '.join(known)}"
        )
    return found


def as_fsdp(root: Root) -> FSDPModule:
    """The root by the methods that `shard` has given it."""
    return cast("FSDPModule", root)


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """The root and the layers."""
    return [each for each in root.modules() if isinstance(each, FSDPModule)]


def _precision(model: PreTrainedModel, compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    """Inputs are not cast: a model whose parameters are bfloat16 says itself what it keeps in float32."""
    held = {each.dtype for each in model.parameters()}
    if held == {compute}:
        return MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    keep = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    kept = [name for name, _ in model.named_parameters() if keep & set(name.split("."))]
    if kept:
        raise ModelError(
            f"{type(model).__name__} keeps {kept[0]} in float32 while the rest computes in {compute}, which one shard"
            " cannot; set dtype: fp32"
        )
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
