"""The weights that an engine's process holds, read back under their Hugging Face names.

vLLM holds some of them otherwise than they were sent: queries, keys and values in one matrix, gates and ups in another;
with tensor parallelism a share of the rows or columns; on a CPU linear layers packed for the processor, where the
original is gone. The first two are undone by slicing and gathering; so are those of weights in 8 bits and their scales,
which are never packed. A packed matrix is read by letting the very kernel that computes with it multiply the identity:
each element of the product is one weight times one plus zeros, which is exact. Only the sign of a zero and subnormal
numbers do not survive a multiplication; these few are remembered when they arrive. An output layer is packed too,
beside the original that it may share with the embeddings: both are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

ROWS = 256
"""Rows of the identity that are multiplied at a time."""
UNREADABLE = "_roll_unreadable"
"""Attribute of the model: by name, places and values of what a multiplication does not give back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where a tensor of the Hugging Face model is."""

    module: Any
    parameter: str
    """`weight`, `bias` or `weight_scale`."""
    index: int | None = None
    """Which of the fused tensors; None where it stands alone."""

    @property
    def key(self) -> tuple[int, int | None]:
        """The same for two names of one tensor (tied embeddings)."""
        return id(getattr(self.module, self.parameter)), self.index

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, over all ranks."""
        module = self.module
        if isinstance(module, LinearBase):
            rows = module.output_size
            if self.index is not None:
                rows = module.output_sizes[self.index]
                if isinstance(module, QKVParallelLinear) and self.index > 0:
                    rows //= module.num_kv_head_replicas
            columns = {"weight": (module.input_size,), "weight_scale": (1,)}
            return (rows, *columns.get(self.parameter, ()))
        if isinstance(module, VocabParallelEmbedding):
            return (module.org_vocab_size, module.embedding_dim)
        return tuple(getattr(module, self.parameter).shape)


def locate(model: nn.Module, name: str) -> Part | None:
    """The part of this name; None where another pipeline stage has it. Raises `KeyError` where none can have it."""
    module, index = find(model, name)
    if isinstance(module, PPMissingLayer):
        return None
    parameter = _rename(model, name).rpartition(".")[2]
    if not isinstance(getattr(module, parameter, None), torch.nn.Parameter):
        raise KeyError(name)
    return Part(module=module, parameter=parameter, index=index)


def find(model: nn.Module, name: str) -> tuple[Any, int | None]:
    """The module that has the parameter of this name, and its place where it is fused with others. Raises `KeyError`
    where there is none."""
    path = _rename(model, name).rpartition(".")[0]
    fused, index = _fused(model, name)
    if index is not None:
        path = f"{path.rpartition('.')[0]}.{fused}"
    module: Any = model
    for step in path.split(".") if path else ():
        module = getattr(module, step, None)
        if module is None:
            raise KeyError(name)
        if isinstance(module, PPMissingLayer):
            break
    return module, index


def parts(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """Everything that an update has to bring, by vLLM's name for it, fused tensors one by one."""
    packed = getattr(model, "packed_modules_mapping", {})
    modules = dict(model.named_modules())
    for name, _ in model.named_parameters():
        path, _, parameter = name.rpartition(".")
        prefix, _, last = path.rpartition(".")
        members = packed.get(last, ())
        if len(members) < 2:
            yield name, Part(module=modules[path], parameter=parameter)
            continue
        for index, member in enumerate(members):
            yield f"{prefix}.{member}.{parameter}", Part(module=modules[path], parameter=parameter, index=index)


class Reader:
    """Reads one tensor after the other. With tensor parallelism all ranks read the same ones in the same order."""

    def __init__(self, model: nn.Module) -> None:
        heads = [each for each in model.modules() if isinstance(each, ParallelLMHead) and hasattr(each, "cpu_linear")]
        self._heads: dict[int, Any] = {id(each.weight): each for each in heads}
        """Packed output layers, by the weight that they were packed from."""
        self._unreadable: dict[str, tuple[Tensor, Tensor]] = getattr(model, UNREADABLE, {})
        self._last: tuple[Any, Tensor] | None = None
        """The matrix that was unpacked last: fused tensors mostly follow one another."""

    def read(self, name: str, part: Part) -> Tensor:
        """The whole tensor, as this engine computes with it."""
        module = part.module
        packed = part.parameter == "weight" and _is_packed(module)
        local = self._unpacked(module) if packed else getattr(module, part.parameter).detach()
        if part.index is not None:
            sizes = [size // module.tp_size for size in module.output_sizes]
            local = local.split(sizes, dim=0)[part.index]
        elif isinstance(module, VocabParallelEmbedding):
            local = self._as_multiplied(module, local)
        whole = _gathered(module, part, local)
        if isinstance(module, LinearBase) and part.parameter == "bias":
            whole = whole.to(module.params_dtype)  # vLLM widens those of some packed layers
        if packed and name in self._unreadable:
            places, values = self._unreadable[name]
            whole = whole.clone()
            whole.view(-1)[places] = values.to(whole.dtype)
        return whole

    def _as_multiplied(self, module: Any, weight: Tensor) -> Tensor:
        """The weight, unless the output layer that was packed from it computes with another."""
        head = self._heads.get(id(module.weight))
        if head is None:
            return weight
        multiplied = self._unpacked(head)
        differs = (multiplied != weight) & (weight.abs() >= torch.finfo(weight.dtype).tiny)
        return multiplied if differs.any() else weight

    def _unpacked(self, module: Any) -> Tensor:
        if self._last is None or self._last[0] is not module:
            self._last = module, _multiplied_identity(module)
        return self._last[1]


def remember_unreadable(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Keep what a packed matrix would not give back of a tensor that is about to be loaded."""
    kept: dict[str, tuple[Tensor, Tensor]] = model.__dict__.setdefault(UNREADABLE, {})
    kept.pop(name, None)
    if tensor.ndim != 2 or not tensor.is_floating_point() or tensor.itemsize == 1:
        return
    flat = tensor.reshape(-1)
    tiny = flat.abs() < torch.finfo(flat.dtype).tiny
    lost = tiny & ((flat != 0) | torch.signbit(flat))
    if lost.any():
        places = lost.nonzero().flatten()
        kept[name] = places, flat[places].clone()


def _rename(model: nn.Module, name: str) -> str:
    """By the model's own table, where it has one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renamed = mapper.map_name(name) if mapper is not None else name
    if renamed is None:
        raise KeyError(name)
    return str(renamed)


def _fused(model: nn.Module, name: str) -> tuple[str, int | None]:
    """The module that a tensor is fused into, and its place there."""
    path = name.rpartition(".")[0]
    last = path.rpartition(".")[2]
    for fused, members in getattr(model, "packed_modules_mapping", {}).items():
        if last in members and len(members) > 1:
            return fused, members.index(last)
    return "", None


def _is_packed(module: Any) -> bool:
    return isinstance(module, LinearBase) and module.weight.numel() == 0


def _multiplied_identity(module: Any) -> Tensor:
    head = isinstance(module, ParallelLMHead)
    columns = module.embedding_dim if head else module.input_size_per_partition
    dtype = module.weight.dtype
    products = []
    for start in range(0, columns, ROWS):
        rows = torch.zeros(min(ROWS, columns - start), columns, dtype=dtype)
        rows[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = 1
        products.append(module.cpu_linear(rows, module.weight, None))
    return torch.cat(products).t().contiguous()


def _gathered(module: Any, part: Part, local: Tensor) -> Tensor:
    size = getattr(module, "tp_size", 1)
    if isinstance(module, VocabParallelEmbedding):
        whole = tensor_model_parallel_all_gather(local, 0) if size > 1 else local
        return whole[: module.org_vocab_size]
    if size == 1 or not isinstance(module, LinearBase):
        return local
    if isinstance(module, RowParallelLinear):
        return _all_gathered(local, 1) if part.parameter == "weight" else local
    if not isinstance(module, ColumnParallelLinear):
        return local
    rows = _all_gathered(local.contiguous(), 0)
    if isinstance(module, QKVParallelLinear) and part.index and module.num_kv_head_replicas > 1:
        replicas = rows.reshape(-1, module.num_kv_head_replicas, *local.shape)
        rows = replicas[:, 0].flatten(0, 1)
    return rows


def _all_gathered(local: Tensor, dim: int) -> Tensor:
    """Numbers of 8 bits travel as bf16, which has them all: on a CPU vLLM gathers no smaller ones."""
    whole: Tensor = tensor_model_parallel_all_gather(local.bfloat16() if local.itemsize == 1 else local, dim)
    return whole.to(local.dtype)
