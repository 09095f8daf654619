"""Read-back of the weights loaded in an engine process, by Hugging Face names.

SGLang stores some weights in another form than they were sent: query, key and value projections fused in one matrix,
gate and up projections in another; with tensor parallelism sharded by rows or columns; embeddings padded with rows at
the end. Slicing and an all-gather undo all of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

FUSED = {
    "qkv_proj": (QKVParallelLinear, ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": (MergedColumnParallelLinear, ("gate_proj", "up_proj")),
}
"""Fused modules of SGLang: name, class, and the Hugging Face modules whose tensors they concatenate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Location of a tensor of the Hugging Face model in SGLang's model."""

    module: Any
    parameter: str
    """`weight` or `bias`."""
    index: int | None = None
    """Position among the fused tensors; None if the tensor is not fused."""

    @property
    def key(self) -> tuple[int, int | None]:
        """Identity of the tensor: equal for two names of one tensor (tied embeddings)."""
        return id(getattr(self.module, self.parameter)), self.index

    @property
    def local(self) -> Tensor:
        """This process's shard of the tensor."""
        held: Tensor = getattr(self.module, self.parameter).detach()
        if self.index is not None:
            return torch.split(held, local_sizes(self.module), dim=0)[self.index]
        return held

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor, over all ranks."""
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


def locate(model: nn.Module, name: str) -> Part:
    """Location of the tensor of this Hugging Face name. Raises `KeyError` if the model has none."""
    path, _, parameter = name.rpartition(".")
    parent, _, last = path.rpartition(".")
    index = None
    for fused, (_, members) in FUSED.items():
        if last in members and find(model, f"{parent}.{fused}") is not None:
            path, index = f"{parent}.{fused}", members.index(last)
    module = find(model, path)
    if not isinstance(getattr(module, parameter, None), torch.nn.Parameter):
        raise KeyError(name)
    if index is not None and not isinstance(module, FUSED[path.rpartition(".")[2]][0]):
        raise KeyError(name)
    return Part(module=module, parameter=parameter, index=index)


def parts(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """All tensors that an update must send, by parameter name; fused tensors one by one."""
    modules = dict(model.named_modules())
    for name, _ in model.named_parameters():
        path, _, parameter = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        if last not in FUSED:
            yield name, Part(module=modules[path], parameter=parameter)
            continue
        for index, member in enumerate(FUSED[last][1]):
            yield f"{parent}.{member}.{parameter}", Part(module=modules[path], parameter=parameter, index=index)


def find(model: nn.Module, path: str) -> Any:
    """Module at this path; None if there is none."""
    module: Any = model
    for step in path.split(".") if path else ():
        module = getattr(module, step, None)
        if module is None:
            return None
    return module


def local_sizes(module: Any) -> list[int]:
    """Number of rows of each part of a fused module in this process's shard."""
    if isinstance(module, QKVParallelLinear):
        return [module.q_proj_shard_size, module.kv_proj_shard_size, module.v_proj_shard_size]
    return [size // module.tp_size for size in module.output_sizes]


def _gathered(local: Tensor, dim: int, size: int) -> Tensor:
    whole: Tensor = tensor_model_parallel_all_gather(local, dim) if size > 1 else local
    return whole
