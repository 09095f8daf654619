"""The model loaded in one of SGLang's processes: reads weights and the adapter back by Hugging Face names.

SGLang stores some weights in another form than they were sent: query, key and value projections fused in one matrix,
gate and up projections in another; with tensor parallelism sharded by rows or columns; embeddings padded with rows at
the end. Slicing and an all-gather undo all of this.

For the adapter SGLang has one pool for A and one for B per module type, with a slot for each active adapter. In a slot
of a fused module the parts are concatenated: A by rows `[parts · R, I]`, B by outputs `[O of all parts, R]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.runtime_context import get_parallel
from typing_extensions import override

from roll_infer_sglang.hooks import ADAPTER_SLOT
from roll_modeling.comparing import SIDES
from roll_modeling.engine_weights import LoadedModel, LoadedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

FUSED = {
    "qkv_proj": (QKVParallelLinear, ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": (MergedColumnParallelLinear, ("gate_proj", "up_proj")),
}
"""Fused modules of SGLang: name, class, and the Hugging Face modules whose tensors they concatenate."""
POOLS = ("A_buffer", "B_buffer"), ("A_buffer_qkv", "B_buffer_qkv")
"""Attribute names of the pools of A and B in SGLang's modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangTensor(LoadedTensor):
    """Location of a tensor in SGLang's model; the parameter is `weight` or `bias`."""

    @property
    def local(self) -> Tensor:
        """This process's shard of the tensor."""
        found: Tensor = getattr(self.module, self.parameter).detach()
        if self.index is not None:
            return torch.split(found, _local_sizes(self.module), dim=0)[self.index]
        return found

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        module, local = self.module, tuple(self.local.shape)
        if isinstance(module, VocabParallelEmbedding):
            return module.org_vocab_size, *local[1:]
        if isinstance(module, RowParallelLinear):
            return local if self.parameter == "bias" else (local[0], local[1] * module.tp_size)
        if not isinstance(module, LinearBase) or not hasattr(module, "tp_size"):
            return local
        ranks = module.tp_size // self._replicas
        return local[0] * ranks, *local[1:]

    @property
    def _replicas(self) -> int:
        """Number of ranks that hold the same key and value heads; 1 for other tensors."""
        return int(self.module.num_kv_head_replicas) if isinstance(self.module, QKVParallelLinear) and self.index else 1

    def whole(self) -> Tensor:
        """Full tensor, gathered over ranks. All ranks must call this for the same tensors in the same order."""
        module, local = self.module, self.local.contiguous()
        size = getattr(module, "tp_size", 1)
        if isinstance(module, VocabParallelEmbedding):
            return _gathered(local, 0, size)[: module.org_vocab_size]
        if not isinstance(module, LinearBase):
            return local
        if isinstance(module, RowParallelLinear):
            return local if self.parameter == "bias" else _gathered(local, 1, size)
        whole = _gathered(local, 0, size)
        return torch.cat(torch.split(whole, len(local))[:: self._replicas]) if self._replicas > 1 else whole


class SglangModel(LoadedModel):
    """An SGLang model in this process."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.device, self.rank = str(next(model.parameters()).device), int(get_parallel().tp_rank)

    @override
    def locate(self, name: str) -> SglangTensor:
        path, _, parameter = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        index = None
        for fused, (_, members) in FUSED.items():
            if last in members and self._find(f"{parent}.{fused}") is not None:
                path, index = f"{parent}.{fused}", members.index(last)
        module = self._find(path)
        if not isinstance(getattr(module, parameter, None), torch.nn.Parameter):
            raise KeyError(name)
        if index is not None and not isinstance(module, FUSED[path.rpartition(".")[2]][0]):
            raise KeyError(name)
        return SglangTensor(module=module, parameter=parameter, index=index)

    @override
    def located(self) -> Iterator[tuple[str, SglangTensor]]:
        modules = dict(self._model.named_modules())
        for name, _ in self._model.named_parameters():
            path, _, parameter = name.rpartition(".")
            parent, _, last = path.rpartition(".")
            if last not in FUSED:
                yield name, SglangTensor(module=modules[path], parameter=parameter)
                continue
            for index, member in enumerate(FUSED[last][1]):
                at = SglangTensor(module=modules[path], parameter=parameter, index=index)
                yield f"{parent}.{member}.{parameter}", at

    @override
    def read(self, name: str, at: SglangTensor) -> Tensor:
        return at.whole()

    @override
    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._model.load_weights(list(tensors))

    @override
    def adapter_buffer(self, name: str) -> Tensor:
        layer, _, side = name.rpartition(".lora_")
        if f"lora_{side}" not in SIDES:
            raise KeyError(name)
        module, members = self._adapter_module(layer)
        pools = ([getattr(module, name, None) for name in names] for names in POOLS)
        of_a, of_b = next((found for found in pools if all(each is not None for each in found)), (None, None))
        if of_a is None or of_b is None:
            raise KeyError(name)
        index, slot = members.index(layer.rpartition(".")[2]), getattr(self._model, ADAPTER_SLOT, 0)
        found: Tensor
        if side.startswith("A"):
            found = of_a[slot].chunk(len(members))[index]
        else:
            found = torch.split(of_b[slot], _local_sizes(module.base_layer))[index] if len(members) > 1 else of_b[slot]
        return found

    @override
    def required(self, names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
        """Tensors missing in `names` for fused modules that `names` cover only in part.

        SGLang requires adapters for all parts of a fused module or for none.
        """
        given = set(names)
        for layer in sorted({name.rpartition(".lora_")[0] for name in given}):
            parent = layer.rpartition(".")[0]
            for member in self._adapter_module(layer)[1]:
                for side in SIDES:
                    name = f"{parent}.{member}.{side}"
                    if name not in given:
                        yield name, list(self.adapter_buffer(name).shape)

    def _adapter_module(self, layer: str) -> tuple[Any, Sequence[str]]:
        """LoRA module that computes this layer, and the last name components of all layers that it computes.

        The module is None if there is no such module.
        """
        parent, _, last = layer.rpartition(".")
        for fused, (_, members) in FUSED.items():
            if last in members:
                module = self._find(f"{parent}.{fused}")
                if isinstance(module, BaseLayerWithLoRA):
                    return module, members
        module = self._find(layer)
        return (module if isinstance(module, BaseLayerWithLoRA) else None), (last,)

    def _find(self, path: str) -> Any:
        """Module at this path; None if there is none."""
        module: Any = self._model
        for step in path.split(".") if path else ():
            module = getattr(module, step, None)
            if module is None:
                return None
        return module


def _local_sizes(module: Any) -> list[int]:
    """Number of rows of each part of a fused module in this process's shard."""
    if isinstance(module, QKVParallelLinear):
        return [module.q_proj_shard_size, module.kv_proj_shard_size, module.v_proj_shard_size]
    return [size // module.tp_size for size in module.output_sizes]


def _gathered(local: Tensor, dim: int, size: int) -> Tensor:
    whole: Tensor = tensor_model_parallel_all_gather(local, dim) if size > 1 else local
    return whole
