"""FSDP2 sharding of a model: device meshes, wrapped layers, and the root module that runs every computation.

    1-D        ranks 0 1 2 3      one replica, a quarter of every parameter on each rank
    HSDP       ranks 0 1 | 2 3    two replicas; gradients are reduce-scattered within a replica, then all-reduced across
    FSDP × TP  ranks 0 1          0 and 1 compute the same sequences, each with half the heads; so do 2 and 3;
                     2 3          0 and 2 shard the parameters of their half
    FSDP × EP  ranks 0 1          0 and 1 hold half of the experts each; 0 and 2 shard the same half; all four shard
                     2 3          the rest of each layer

Parameters outside the layers (embeddings, final norm, head) are not split by tensor parallelism; every rank computes
them identically. FSDP shards them over all ranks of a replica, on a mesh of its own in which the tensor-parallel ranks
are adjacent. Their gradients are equal on the tensor-parallel ranks and are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from roll_core.errors import ModelError, PlacementError
from roll_modeling.model import DTYPES, kept_in_float32

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from roll_core.spec.model import MeshInfo
    from roll_strategy_fsdp2.config import FSDP2Config

Found = TypeVar("Found")


class Root(nn.Module):
    """Root FSDP module.

    Runs a computation inside its `forward`, where FSDP has gathered the parameters outside the layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Found]) -> Found:
        """Call `compute`. Tensors that need a backward pass must be elements of a tuple, where FSDP finds them."""
        return compute()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """Device meshes of one role.

    `layers` and `rest` have a dimension `shard`, and a dimension `replicate` if there are several replicas.
    """

    layers: DeviceMesh
    rest: DeviceMesh
    """Mesh of the parameters outside the layers: the same ranks as `layers` and `tensor` together."""
    tensor: DeviceMesh | None
    """One dimension, `tensor`; None without tensor parallelism."""
    expert: DeviceMesh | None
    """One dimension, `expert`: the ranks among which the experts are distributed. None without expert parallelism."""
    expert_shards: DeviceMesh | None
    """Mesh of the ranks that shard the same experts: `layers` without the ranks of `expert`.

    None without expert parallelism.
    """
    alone: DeviceMesh | None
    """A mesh of this rank only; None without expert parallelism."""
    context: DeviceMesh | None
    """One dimension, `context`: the ranks that split the tokens of each microbatch.

    None without context parallelism.

    It overlaps `shard` and `replicate`, so the gradients of these ranks are summed like those of all ranks.
    """

    @property
    def tensor_size(self) -> int:
        """Number of ranks that compute the same tokens."""
        return self.tensor.size() if self.tensor is not None else 1

    @property
    def num_together(self) -> int:
        """Number of ranks that compute a sequence together."""
        return self.tensor_size * (self.context.size() if self.context is not None else 1)


def make_meshes(mesh: MeshInfo, config: FSDP2Config) -> Meshes:
    """Build the device meshes of a role. Collective.

    Raises `PlacementError` if the configured sizes do not divide the ranks.
    """
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
            f"role {mesh.role}: fsdp_size {size} does not divide its {of}; use a divisor of {data}, or remove it to"
            " shard one copy of the model over all ranks"
        )
    experts = config.ep_size
    if size % experts:
        raise PlacementError(
            f"role {mesh.role}: ep_size {experts} does not divide the {size} ranks that shard a copy of the model"
        )
    rest = _mesh(mesh, ("replicate", data // size), ("shard", size * tensor))
    shared = None
    if context > 1:
        shared = _mesh(mesh, ("data", data // context), ("context", context), ("tensor", tensor))["context"]
    expert = expert_shards = alone = None
    if experts > 1:
        full_mesh = _mesh(mesh, ("replicate", data // size), ("shard", size // experts), ("expert", experts))
        expert, expert_shards = full_mesh["expert"], _without(full_mesh, "expert")
        alone = _mesh(mesh, ("all", mesh.world_size), ("alone", 1))["alone"]
    layers, split = rest, None
    if tensor > 1:
        full_mesh = _mesh(mesh, ("replicate", data // size), ("shard", size), ("tensor", tensor))
        layers, split = _without(full_mesh, "tensor"), full_mesh["tensor"]
    return Meshes(
        layers=layers,
        rest=rest,
        tensor=split,
        expert=expert,
        expert_shards=expert_shards,
        alone=alone,
        context=shared,
    )


def _without(mesh: DeviceMesh, dimension: str) -> DeviceMesh:
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name != dimension)]


def _mesh(mesh: MeshInfo, *dimensions: tuple[str, int]) -> DeviceMesh:
    """Build a device mesh; omit the dimension `replicate` if there is only one replica."""
    dims = [(name, size) for name, size in dimensions if name != "replicate" or size > 1]
    names, sizes = zip(*dims, strict=True)
    return init_device_mesh(torch.device(mesh.device).type, sizes, mesh_dim_names=names)


def shard(
    model: PreTrainedModel,
    meshes: Meshes,
    config: FSDP2Config,
    compute_dtype: torch.dtype,
    experts: Sequence[nn.Module] = (),
    blocks: Sequence[nn.Module] = (),
) -> Root:
    """Replace the parameters of `model` by this rank's shards, in place. The layers are `blocks` by default.

    They move to the mesh's device, or to host memory with `offload_policy`. The modules in `experts` are sharded over
    fewer ranks (`meshes.expert_shards`) than the rest of their layer.
    """
    root = Root(model)
    named = config.wrap_policy.transformer_layer_cls_to_wrap
    layers = list(blocks) if blocks and not named else find_layers(model, named)
    _check_apart(model, layers)
    on_host = CPUOffloadPolicy(pin_memory=meshes.layers.device_type != "cpu")
    options: dict[str, Any] = {
        "mp_policy": _precision(model, compute_dtype, DTYPES[config.reduce_dtype]),
        "offload_policy": on_host if config.offload_policy else OffloadPolicy(),
        "reshard_after_forward": config.reshard_after_forward,
    }
    for layer_experts in experts:
        fully_shard(layer_experts, mesh=meshes.expert_shards, **options)
    for layer in layers:
        fully_shard(layer, mesh=meshes.layers, **options)
    fully_shard(root, mesh=meshes.rest, **options)
    for module in sharded_modules(root):
        # Sum instead of average: the loss already contains the batch's divisor.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        # On some ranks, an expert may receive no tokens and have no gradient.
        module.set_reduce_scatter_unused_params(True, recurse=False)
    as_fsdp(root).set_gradient_divide_factor(float(meshes.tensor_size))
    return root


def _check_apart(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Raise `ModelError` for a parameter of two layers (Zamba): each would shard a copy of its own."""
    owners: dict[nn.Parameter, nn.Module] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if owners.setdefault(parameter, layer) is not layer:
                raise ModelError(
                    f"{type(model).__name__}: two layers share their {name}, and FSDP2 shards each layer by itself: use"
                    " strategy hf_train"
                )


def find_layers(model: PreTrainedModel, class_names: Sequence[str]) -> list[nn.Module]:
    """The outermost modules of the classes `class_names`.

    Default: the classes in the model's `_no_split_modules`, or if it has none, in its lists of one module per layer.
    Raises `ModelError` if the model has no such module.
    """
    names = set(class_names) or set(getattr(model, "_no_split_modules", None) or ()) or _listed_classes(model)
    layers: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            if type(child).__name__ in names:
                layers.append(child)
            else:
                search(child)

    search(model)
    if not layers:
        asked = f"no module of class {', '.join(sorted(names))}" if names else "no list of layers of its own"
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ModelError(
            f"{type(model).__name__} has {asked}; set wrap_policy.transformer_layer_cls_to_wrap to its layers:"
            f" it has {', '.join(known)}"
        )
    return layers


def _listed_classes(model: PreTrainedModel) -> set[str]:
    """Classes of the modules in the model's lists of `num_hidden_layers` modules (BioGPT, CTRL, OpenAI GPT)."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):  # a library's model
        return set()
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    return {type(layer).__name__ for layers in lists for layer in layers}


def as_fsdp(root: Root) -> FSDPModule:
    """The root, typed with the methods that `fully_shard` adds to it."""
    return cast("FSDPModule", root)


def sharded_modules(root: nn.Module) -> list[FSDPModule]:
    """All modules that FSDP wraps: the root, the layers, and the experts if they are distributed."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def _precision(model: PreTrainedModel, compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    """The mixed-precision policy. Inputs are not cast: a bfloat16 model itself keeps some computations in float32.

    Raises `ModelError` if the architecture keeps some parameters in float32 while the others compute in `compute`.
    """
    held = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if held == {compute}:
        return MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
    in_float32 = [name for name, _ in kept_in_float32(model, model.named_parameters())]
    if in_float32:
        raise ModelError(
            f"{type(model).__name__} keeps {in_float32[0]} in float32 while the rest computes in {compute}, which one"
            " shard cannot; set dtype: fp32"
        )
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
