"""Spreads a model over ranks: the meshes, which layers are gathered as one, and the root in whose forward all happens.

    1-D        ranks 0 1 2 3      one copy of the model, a quarter of every parameter on each rank
    HSDP       ranks 0 1 | 2 3    two copies; gradients are reduce-scattered in a row, then all-reduced across
    FSDP × TP  ranks 0 1          0 and 1 compute the same sequences, each with half the heads; so do 2 and 3;
                     2 3          0 and 2 share the parameters of their half
    FSDP × EP  ranks 0 1          0 and 1 hold half of the experts each, of which 0 and 2 share one half; all four share
                     2 3          the rest of each layer

What belongs to no layer (embeddings, last norm, head) is not cut by tensor parallelism: every rank computes it alike.
It is shared among all ranks of a copy nevertheless, over a mesh of its own in which the tensor-parallel ranks stand
side by side; their gradients, which are equal, are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from roll_core.errors import ModelError, PlacementError
from roll_modeling.model import DTYPES

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Of one role. Dimensions: `replicate` where there are copies, and `shard`."""

    layers: DeviceMesh
    rest: DeviceMesh
    """Of what belongs to no layer: the same ranks as `layers` and `tensor` together."""
    tensor: DeviceMesh | None
    """One dimension, `tensor`; None where there is no tensor parallelism."""
    expert: DeviceMesh | None
    """One dimension, `expert`: of ranks that hold each some experts whole; None where every rank has a share of all."""
    expert_shards: DeviceMesh | None
    """Of ranks that share the same experts: `layers` without `expert`."""
    alone: DeviceMesh | None
    """This rank by itself, where there is expert parallelism."""
    context: DeviceMesh | None
    """One dimension, `context`: of ranks that share the tokens of their microbatches. It lies across `shard` and
    `replicate`: gradients of these ranks are added up like those of any others. None where there is none."""

    @property
    def tensor_size(self) -> int:
        """Ranks that compute the same tokens."""
        return self.tensor.size() if self.tensor is not None else 1

    @property
    def num_together(self) -> int:
        """Ranks that compute a sequence together."""
        return self.tensor_size * (self.context.size() if self.context is not None else 1)


def make_meshes(mesh: MeshInfo, config: FSDP2Config) -> Meshes:
    """Collective. Raises `PlacementError` for sizes that do not divide the ranks."""
    tensor, context = config.tensor_model_parallel_size, config.context_size
    if mesh.world_size % (tensor * context):
        sizes = {"tensor_model_parallel_size": tensor, config.context_key: context}
        asked = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise PlacementError(f"role {mesh.role}: {asked} does not divide its {mesh.world_size} ranks")
    data = mesh.world_size // tensor
    size = config.fsdp_size or data
    if data % size:
        of = f"{mesh.world_size} ranks" if tensor == 1 else f"{data} groups of {tensor} tensor-parallel ranks"
        raise PlacementError(
            f"role {mesh.role}: fsdp_size {size} does not divide its {of}; choose a divisor of {data}, or leave it out"
            " to share one copy of the model among all"
        )
    experts = config.ep_size
    if size % experts:
        raise PlacementError(
            f"role {mesh.role}: ep_size {experts} does not divide the {size} ranks that share a copy of the model"
        )
    rest = _mesh(mesh, ("replicate", data // size), ("shard", size * tensor))
    shared = None
    if context > 1:
        shared = _mesh(mesh, ("data", data // context), ("context", context), ("tensor", tensor))["context"]
    expert = expert_shards = alone = None
    if experts > 1:
        whole = _mesh(mesh, ("replicate", data // size), ("shard", size // experts), ("expert", experts))
        expert, expert_shards = whole["expert"], _without(whole, "expert")
        alone = _mesh(mesh, ("all", mesh.world_size), ("alone", 1))["alone"]
    layers, split = rest, None
    if tensor > 1:
        whole = _mesh(mesh, ("replicate", data // size), ("shard", size), ("tensor", tensor))
        layers, split = _without(whole, "tensor"), whole["tensor"]
    return Meshes(
        layers=layers,
        rest=rest,
        tensor=split,
        expert=expert,
        expert_shards=expert_shards,
        alone=alone,
        context=shared,
    )


def _without(whole: DeviceMesh, dimension: str) -> DeviceMesh:
    return whole[tuple(name for name in whole.mesh_dim_names or () if name != dimension)]


def _mesh(mesh: MeshInfo, *dimensions: tuple[str, int]) -> DeviceMesh:
    """Without the dimension of copies if there is one copy."""
    wanted = [(name, size) for name, size in dimensions if name != "replicate" or size > 1]
    names, sizes = zip(*wanted, strict=True)
    return init_device_mesh(torch.device(mesh.device).type, sizes, mesh_dim_names=names)


def shard(
    model: PreTrainedModel,
    meshes: Meshes,
    config: FSDP2Config,
    compute_dtype: torch.dtype,
    experts: Sequence[nn.Module] = (),
) -> Root:
    """Replace the parameters of `model` by this rank's shares, in place; they move to the mesh's device, or to the host
    with `offload_policy`. Modules of `experts` are shared among fewer ranks than the rest of their layer."""
    root = Root(model)
    layers = find_layers(model, config.wrap_policy.transformer_layer_cls_to_wrap)
    on_host = CPUOffloadPolicy(pin_memory=meshes.layers.device_type != "cpu")
    options: dict[str, Any] = {
        "mp_policy": _precision(model, compute_dtype, DTYPES[config.reduce_dtype]),
        "offload_policy": on_host if config.offload_policy else OffloadPolicy(),
        "reshard_after_forward": config.reshard_after_forward,
    }
    for each in experts:
        fully_shard(each, mesh=meshes.expert_shards, **options)
    for layer in layers:
        fully_shard(layer, mesh=meshes.layers, **options)
    fully_shard(root, mesh=meshes.rest, **options)
    for module in sharded_modules(root):
        # Sums, not means: what a batch's gradient is divided by is in the loss.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # Experts that no token went to, on this rank only.
        module.set_reduce_scatter_unused_params(True, recurse=False)
    as_fsdp(root).set_gradient_divide_factor(float(meshes.tensor_size))
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
