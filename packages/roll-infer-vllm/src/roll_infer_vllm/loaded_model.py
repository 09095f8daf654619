"""The model loaded in one of vLLM's processes: reads weights and the adapter back by Hugging Face names.

vLLM stores some weights in another form than they were sent:

* Fused: query, key and value projections in one matrix, gate and up projections in another. Undone by slicing.
* Sharded over ranks by rows or columns (tensor parallelism). Undone by an all-gather.
* Packed on a CPU: linear layers are packed for the processor and the original is freed. Read back by multiplying the
  identity with the same kernel that computes with the weight. Each element of the product is one weight times one plus
  zeros, which is exact. Only the sign of zeros and subnormal numbers are lost; these few are stored when they arrive.

fp8 weights and their scales are fused and sharded, but never packed. An output layer is packed too, in addition to the
original, which it may share with the embeddings: both are read.

For the adapter vLLM has one buffer per layer for A and one for B, sized for its maximum rank. A fused layer has one
pair per part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

from roll_core.spec.fp8 import BLOCK
from roll_modeling.comparing import SIDES
from roll_modeling.engine_weights import LoadedModel, LoadedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

ROWS = 256
"""Number of rows of the identity per multiplication."""
BLOCK_SCALE = "weight_scale_inv"
"""Parameter with the scales of an fp8 matrix per block, see `roll_infer_vllm.fp8`."""
UNREADABLE = "_roll_unreadable"
"""Attribute of the model: by name, flat indices and values of the elements that a multiplication does not reproduce."""
ADAPTER_SLOT = 0
"""Slot of the adapter in vLLM's stacked buffers; the engine has only one (`max_loras` is 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmTensor(LoadedTensor):
    """Location of a tensor in vLLM's model. The parameter is `weight`, `bias`, `weight_scale` or `weight_scale_inv`."""

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        module = self.module
        if isinstance(module, LinearBase):
            rows = module.output_size
            if self.index is not None:
                rows = module.output_sizes[self.index]
                if isinstance(module, QKVParallelLinear) and self.index > 0:
                    rows //= module.num_kv_head_replicas
            if self.parameter == BLOCK_SCALE:
                return -(-rows // BLOCK), -(-module.input_size // BLOCK)
            columns = {"weight": (module.input_size,), "weight_scale": (1,)}
            return (rows, *columns.get(self.parameter, ()))
        if isinstance(module, VocabParallelEmbedding):
            return (module.org_vocab_size, module.embedding_dim)
        return tuple(getattr(module, self.parameter).shape)


class VllmModel(LoadedModel):
    """A vLLM model in this process."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._model = model
        self.device, self.rank = device, get_tensor_model_parallel_rank()
        heads = [each for each in model.modules() if isinstance(each, ParallelLMHead) and hasattr(each, "cpu_linear")]
        self._heads: dict[int, Any] = {id(each.weight): each for each in heads}
        """Packed output layers, by the id of the weight that they were packed from."""
        self._unreadable: dict[str, tuple[Tensor, Tensor]] = getattr(model, UNREADABLE, {})
        self._last: tuple[Any, Tensor] | None = None
        """Module and matrix that were unpacked last; a cache, because fused tensors mostly follow one another."""

    @override
    def locate(self, name: str) -> VllmTensor | None:
        module, index = self._find(name)
        if isinstance(module, PPMissingLayer):  # another pipeline stage has it
            return None
        parameter = self._rename(name).rpartition(".")[2]
        if not isinstance(getattr(module, parameter, None), torch.nn.Parameter):
            raise KeyError(name)
        return VllmTensor(module=module, parameter=parameter, index=index)

    @override
    def located(self) -> Iterator[tuple[str, VllmTensor]]:
        packed = getattr(self._model, "packed_modules_mapping", {})
        modules = dict(self._model.named_modules())
        for name, _ in self._model.named_parameters():
            path, _, parameter = name.rpartition(".")
            prefix, _, last = path.rpartition(".")
            members = packed.get(last, ())
            if len(members) < 2:
                yield name, VllmTensor(module=modules[path], parameter=parameter)
                continue
            for index, member in enumerate(members):
                at = VllmTensor(module=modules[path], parameter=parameter, index=index)
                yield f"{prefix}.{member}.{parameter}", at

    @override
    def read(self, name: str, at: VllmTensor) -> Tensor:
        module = at.module
        packed = at.parameter == "weight" and isinstance(module, LinearBase) and module.weight.numel() == 0
        local = self._unpacked(module) if packed else getattr(module, at.parameter).detach()
        if at.index is not None:
            height = BLOCK if at.parameter == BLOCK_SCALE else 1
            sizes = [-(-size // module.tp_size // height) for size in module.output_sizes]
            local = local.split(sizes, dim=0)[at.index]
        elif isinstance(module, VocabParallelEmbedding):
            local = self._as_multiplied(module, local)
        whole = _gathered(module, at, local)
        if isinstance(module, LinearBase) and at.parameter == "bias":
            whole = whole.to(module.params_dtype)  # vLLM converts the biases of some packed layers to a wider dtype
        if packed and name in self._unreadable:
            places, values = self._unreadable[name]
            whole = whole.clone()
            whole.view(-1)[places] = values.to(whole.dtype)
        return whole

    @override
    def adapter_buffer(self, name: str) -> Tensor:
        layer, _, side = name.rpartition(".lora_")
        if f"lora_{side}" not in SIDES:
            raise KeyError(name)
        module, index = self._find(f"{layer}.weight")
        stacked: Any = getattr(module, "lora_a_stacked" if side.startswith("A") else "lora_b_stacked", None)
        if stacked is None:
            raise KeyError(name)
        found: Tensor = stacked[index or 0][ADAPTER_SLOT, 0]
        return found

    def _find(self, name: str) -> tuple[Any, int | None]:
        """Module that has the parameter of this name, and the parameter's position if it is fused with others.

        Raises `KeyError` if there is no such module.
        """
        path = self._rename(name).rpartition(".")[0]
        last = name.rpartition(".")[0].rpartition(".")[2]
        index = None
        for fused, members in getattr(self._model, "packed_modules_mapping", {}).items():
            if last in members and len(members) > 1:
                path, index = f"{path.rpartition('.')[0]}.{fused}", members.index(last)
                break
        module: Any = self._model
        for step in path.split(".") if path else ():
            module = getattr(module, step, None)
            if module is None:
                raise KeyError(name)
            if isinstance(module, PPMissingLayer):
                break
        return module, index

    def _rename(self, name: str) -> str:
        """vLLM's name for a Hugging Face name, by the model's mapping if it has one. Raises `KeyError` if dropped."""
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        renamed = mapper.map_name(name) if mapper is not None else name
        if renamed is None:
            raise KeyError(name)
        return str(renamed)

    def _as_multiplied(self, module: Any, weight: Tensor) -> Tensor:
        """The weight, or the packed output layer's weight if it differs from the weight that it was packed from."""
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
    """Store the elements of a tensor that a packed matrix cannot reproduce: negative zeros and subnormal numbers.

    Called before the tensor is loaded.
    """
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


def _gathered(module: Any, at: VllmTensor, local: Tensor) -> Tensor:
    size = getattr(module, "tp_size", 1)
    if isinstance(module, VocabParallelEmbedding):
        whole = tensor_model_parallel_all_gather(local, 0) if size > 1 else local
        return whole[: module.org_vocab_size]
    if size == 1 or not isinstance(module, LinearBase):
        return local
    if isinstance(module, RowParallelLinear):
        return _all_gathered(local, 1) if at.parameter in ("weight", BLOCK_SCALE) else local
    if not isinstance(module, ColumnParallelLinear):
        return local
    rows = _all_gathered(local.contiguous(), 0)
    if isinstance(module, QKVParallelLinear) and at.index and module.num_kv_head_replicas > 1:
        replicas = rows.reshape(-1, module.num_kv_head_replicas, *local.shape)
        rows = replicas[:, 0].flatten(0, 1)
    return rows


def _all_gathered(local: Tensor, dim: int) -> Tensor:
    """All-gather; sends fp8 as bf16, which represents all its values, because vLLM cannot gather fp8 on a CPU."""
    whole: Tensor = tensor_model_parallel_all_gather(local.bfloat16() if local.itemsize == 1 else local, dim)
    return whole.to(local.dtype)
