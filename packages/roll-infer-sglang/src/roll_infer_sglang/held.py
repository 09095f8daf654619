"""The weights that an engine's process holds, read back under their Hugging Face names.

SGLang holds some of them otherwise than they were sent: queries, keys and values in one matrix, gates and ups in
another; with tensor parallelism a share of the rows or columns; embeddings with rows added at their end. Slicing and
gathering undo all of it.
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
"""Modules of SGLang's, their class, and the Hugging Face modules whose tensors they hold one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Where a tensor of the Hugging Face model is."""

    module: Any
    parameter: str
    """`weight` or `bias`."""
    index: int | None = None
    """Which of the fused tensors; None where it stands alone."""

    @property
    def key(self) -> tuple[int, int | None]:
        """The same for two names of one tensor (tied embeddings)."""
        return id(getattr(self.module, self.parameter)), self.index

    @property
    def local(self) -> Tensor:
        """This process's share."""
        held: Tensor = getattr(self.module, self.parameter).detach()
        if self.index is not None:
            return torch.split(held, local_sizes(self.module), dim=0)[self.index]
        return held

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor, over all ranks."""
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
        """Ranks that hold the same keys and values."""
        return int(self.module.num_kv_head_replicas) if isinstance(self.module, QKVParallelLinear) and self.index else 1

    def whole(self) -> Tensor:
        """The whole tensor. With tensor parallelism all ranks ask for the same ones in the same order."""
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
    """The part of this Hugging Face name. Raises `KeyError` where the model has none."""
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
    """Everything that an update has to bring, by the name of the parameter, fused tensors one by one."""
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
    """The module of this path; None where there is none."""
    module: Any = model
    for step in path.split(".") if path else ():
        module = getattr(module, step, None)
        if module is None:
            return None
    return module


def local_sizes(module: Any) -> list[int]:
    """Rows of this process's share of each part of a fused module."""
    if isinstance(module, QKVParallelLinear):
        return [module.q_proj_shard_size, module.kv_proj_shard_size, module.v_proj_shard_size]
    return [size // module.tp_size for size in module.output_sizes]


def _gathered(local: Tensor, dim: int, size: int) -> Tensor:
    whole: Tensor = tensor_model_parallel_all_gather(local, dim) if size > 1 else local
    return whole
