"""The model loaded in one of SGLang's processes: reads weights and the adapter back by Hugging Face names.

SGLang stores some weights in another form than they were sent: query, key and value projections fused in one matrix,
gate and up projections in another; with tensor parallelism sharded by rows or columns; embeddings padded with rows at
the end. Slicing and an all-gather undo all of this.

Experts are stored as `roll_modeling.engine_experts` says. Each of `ep_size` groups of ranks has consecutive experts;
the ranks of a group shard each expert. They are loaded by SGLang's own loader of one expert (`FusedMoE.weight_loader`),
whose names are those of all architectures, and read back one expert at a time.

SGLang computes multi-head latent attention with `w_kc` and `w_vc`, which it derives from `kv_b_proj` after each load.
The latter is read back from both.

For the adapter SGLang has one pool for A and one for B per module type, with a slot for each active adapter. In a slot
of a fused module the parts are concatenated: A by rows `[parts · R, I]`, B by outputs `[O of all parts, R]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.managers import mm_schedule
from sglang.srt.runtime_context import get_parallel
from typing_extensions import override

from roll_infer_sglang.hooks import ADAPTER_SLOT
from roll_infer_sglang.release import num_shards
from roll_modeling.engine_experts import ExpertLayout, ExpertName
from roll_modeling.engine_weights import ExpertsTensor, FusedTensor, LoadedModel, LoadedTensor, TransposedTensor
from roll_weight_transports.comparing import SIDES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

FUSED = {
    "qkv_proj": (QKVParallelLinear, ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": (MergedColumnParallelLinear, ("gate_proj", "up_proj")),
    "fused_qkv_a_proj_with_mqa": (ReplicatedLinear, ("q_a_proj", "kv_a_proj_with_mqa")),
}
"""Fused modules of SGLang: name, class, and the Hugging Face modules whose tensors they concatenate."""
POOLS = ("A_buffer", "B_buffer"), ("A_buffer_qkv", "B_buffer_qkv")
"""Attribute names of the pools of A and B in SGLang's modules."""
RENAMED = (
    ("model.language_model.", "model."),
    ("model.visual.", "visual."),
    (".mlp.", ".block_sparse_moe."),
    (".gate.moe_statics.", ".gate."),
    (".block_sparse_moe.router.", ".block_sparse_moe.gate."),
    (".attn.qkv.", ".attn.qkv_proj."),
    (".mlp.shared_experts.", ".mlp.shared_mlp."),
)
"""Parts of names in transformers, and what SGLang's models (Mixtral, Ernie, Granite, Qwen with images, Hy3) have."""
KV_B = ".kv_b_proj.weight"
"""End of the name of the weight from which SGLang derives `w_kc` and `w_vc`."""
ROUTER_BUFFER = "e_score_correction_bias"
"""Buffer of routers in transformers, which SGLang's Transformers backend computes with."""
ATTENTION_SINKS = "sinks"
"""Parameter of gpt-oss with one number per head, sharded over ranks as heads are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangTensor(LoadedTensor):
    """Location of a tensor in SGLang's model; the parameter is `weight` or `bias`."""

    sizes: tuple[int, ...] = ()
    """Rows of each fused tensor in this process's shard; empty if it is not fused."""

    @property
    def local(self) -> Tensor:
        """This process's shard of the tensor."""
        tensor: Tensor = getattr(self.module, self.parameter).detach()
        return tensor if self.index is None else torch.split(tensor, list(self.sizes), dim=0)[self.index]

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        module, local = self.module, tuple(self.local.shape)
        if self.parameter == ATTENTION_SINKS:
            return (local[0] * get_parallel().tp_size,)
        if isinstance(module, VocabParallelEmbedding):
            return module.org_vocab_size, *local[1:]
        if isinstance(module, RowParallelLinear):
            return local if self.parameter == "bias" else (local[0], local[1] * num_shards(module))
        if not isinstance(module, LinearBase):
            return local
        ranks = num_shards(module) // self._replicas
        return local[0] * ranks, *local[1:]

    @property
    def copied(self) -> bool:
        """True if SGLang's loader skips the tensor, or needs all tensors of a fused matrix in one call.

        Loaders skip buffers, and of a parameter with two names (correction biases of Hy3) that of transformers.
        """
        return self.parameter == ROUTER_BUFFER or (isinstance(self.module, ReplicatedLinear) and self.index is not None)

    @property
    def _replicas(self) -> int:
        """Number of ranks that hold the same key and value heads; 1 for other tensors."""
        return int(self.module.num_kv_head_replicas) if isinstance(self.module, QKVParallelLinear) and self.index else 1

    def whole(self, shard: Tensor | None = None) -> Tensor:
        """Full tensor, gathered over ranks. All ranks must call this for the same tensors in the same order.

        `shard` replaces this process's shard.
        """
        module, local = self.module, (self.local if shard is None else shard).contiguous()
        size = num_shards(module)
        if self.parameter == ATTENTION_SINKS:
            return _gathered(local, 0, get_parallel().tp_size)
        if isinstance(module, VocabParallelEmbedding):
            return _gathered(local, 0, size)[: module.org_vocab_size]
        if not isinstance(module, LinearBase):
            return local
        if isinstance(module, RowParallelLinear):
            return local if self.parameter == "bias" else _gathered(local, 1, size)
        gathered = _gathered(local, 0, size)
        own_copies = get_parallel().tp_rank % self._replicas  # each rank reads another copy of the heads
        return torch.cat(torch.split(gathered, len(local))[own_copies :: self._replicas])


class SglangModel(LoadedModel):
    """An SGLang model in this process."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.device, self.rank = str(next(model.parameters()).device), int(get_parallel().tp_rank)
        self.dtype = next(model.parameters()).dtype
        self._model_type = str(getattr(getattr(model, "config", None), "model_type", ""))  # GPT-J has no config

    @override
    def locate(self, name: str) -> LoadedTensor:
        expert = ExpertName.parse(name)
        if expert is not None:
            experts = self._find(self._renamed(expert.path))
            experts = getattr(experts, "experts", experts)  # SGLang's Transformers backend has them in another module
            if isinstance(experts, FusedMoE):
                return self._locate_experts(name, expert, experts)
        path, _, parameter = self._renamed(name).rpartition(".")
        parent, _, last = path.rpartition(".")
        for fused, (kind, members) in FUSED.items():
            if last in members and isinstance(module := self._find(f"{parent}.{fused}"), kind):
                if not isinstance(getattr(module, parameter, None), torch.nn.Parameter):
                    raise KeyError(name)
                return self._fused(parent, module, parameter, members.index(last))
        module = self._find(path)
        kind = torch.Tensor if parameter == ROUTER_BUFFER else torch.nn.Parameter
        if not isinstance(getattr(module, parameter, None), kind):
            raise KeyError(name)
        loaded = self._unfused(parent, module, parameter)
        return TransposedTensor.located(name, self._model_type, loaded)

    @override
    def located(self) -> Iterator[tuple[str, LoadedTensor]]:
        modules = dict(self._model.named_modules())
        buffers = (pair for pair in self._model.named_buffers() if pair[0].endswith(ROUTER_BUFFER))
        for name, _ in (*self._model.named_parameters(), *buffers):
            path, _, parameter = name.rpartition(".")
            parent, _, last = path.rpartition(".")
            module = modules[path]
            if isinstance(module, FusedMoE) and _computes_as_loaded(module):
                for matrix, member in (("w13_weight", "gate_up_proj"), ("w2_weight", "down_proj")):
                    if parameter.startswith(matrix):
                        sent = f"{path}.{member}{parameter.removeprefix(matrix)}"
                        yield sent, self.locate(sent)
            elif last in FUSED:
                for index, member in enumerate(FUSED[last][1]):
                    yield f"{parent}.{member}.{parameter}", self._fused(parent, module, parameter, index)
            else:
                yield name, self._unfused(parent, module, parameter)

    @override
    def read(self, name: str, loaded: SglangTensor | FusedTensor | TransposedTensor) -> Tensor:
        if isinstance(loaded, TransposedTensor):
            return self.read(name, loaded.of).t()
        if isinstance(loaded, FusedTensor):
            return torch.cat([self.read(name, member) for member in loaded.members])
        attention: Any = self._find(name.removesuffix(KV_B)) if name.endswith(KV_B) else None
        if getattr(attention, "w_kc", None) is None:
            return loaded.whole()
        # [heads, nope, latent] and [heads, latent, values]: the rows of kv_b_proj are those of each head in turn.
        derived = torch.cat([attention.w_kc, attention.w_vc.transpose(1, 2)], dim=1).flatten(0, 1)
        return loaded.whole(derived if not torch.equal(derived, loaded.local) else None)

    @override
    def expert_shards(self, loaded: ExpertsTensor, expert: int) -> list[Tensor]:
        group, local = divmod(expert, loaded.module.num_local_experts)
        matrix = getattr(loaded.module, loaded.parameter).detach()[local]
        size = loaded.module.moe_tp_size
        ranks = _gathered(matrix[None].contiguous(), 0, loaded.module.moe_ep_size * size)
        shards = ranks[group * size : (group + 1) * size]
        # SGLang adds the bias of w2 on the first rank of a group, and has zeros on the others.
        return [shards.sum(0)] if loaded.parameter == "w2_weight_bias" else list(shards)

    @override
    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        others = []
        for name, tensor in tensors:
            target = self.locate(name)
            if isinstance(target, ExpertsTensor):
                _load_experts(target, tensor)
            elif isinstance(target, SglangTensor) and target.copied:
                target.local.copy_(tensor)
            else:
                others.append((self._renamed(name), tensor))
        self._model.load_weights(others)
        if mm_schedule.embedding_cache is not None:  # SGLang keeps features of images when it drops the KV cache
            mm_schedule.embedding_cache.clear()

    def _locate_experts(self, name: str, expert: ExpertName, module: FusedMoE) -> ExpertsTensor:
        parameter = expert.stored.replace("_bias", "_weight_bias")
        if not _computes_as_loaded(module) or not isinstance(getattr(module, parameter, None), torch.nn.Parameter):
            raise KeyError(name)
        of_gpt_oss = self._model_type == "gpt_oss"
        layout = ExpertLayout(
            num_experts=module.num_experts,
            hidden=module.hidden_size,
            intermediate=module.intermediate_size_per_partition * module.moe_tp_size,
            interleaved=of_gpt_oss,
            transposed=of_gpt_oss,
        )
        return ExpertsTensor(module=module, parameter=parameter, name=expert, layout=layout)

    def _unfused(self, parent: str, module: Any, parameter: str) -> SglangTensor | FusedTensor:
        """Location of a parameter that Hugging Face's model has under one name."""
        if isinstance(module, MergedColumnParallelLinear | QKVParallelLinear):
            members = [self._fused(parent, module, parameter, index) for index in range(len(module.output_sizes))]
            return FusedTensor(module=module, parameter=parameter, members=tuple(members))
        return SglangTensor(module=module, parameter=parameter)

    def _fused(self, parent: str, module: Any, parameter: str, index: int) -> SglangTensor:
        if isinstance(module, ReplicatedLinear):  # q_a_proj and kv_a_proj_with_mqa
            first = self._find(parent).q_lora_rank
            sizes = [first, module.output_size - first]
        else:
            sizes = _local_sizes(module)
        return SglangTensor(module=module, parameter=parameter, index=index, sizes=tuple(sizes))

    def _renamed(self, path: str) -> str:
        """SGLang's path of a module or parameter of transformers."""
        mapper = getattr(self._model, "weight_mapper", None)  # of SGLang's Transformers backend
        if mapper is not None:
            (path,) = mapper.apply_list([path])
        for name, other in RENAMED:
            if name in path and self._find(path.partition(name)[0] + name.rstrip(".")) is None:
                path = path.replace(name, other)
        return path

    @override
    def adapter_buffer(self, name: str) -> Tensor:
        layer, _, side = name.rpartition(".lora_")
        if f"lora_{side}" not in SIDES:
            raise KeyError(name)
        module, members = self._adapter_module(layer)
        pools = ([getattr(module, name, None) for name in names] for names in POOLS)
        of_a, of_b = next((factors for factors in pools if all(factor is not None for factor in factors)), (None, None))
        if of_a is None or of_b is None:
            raise KeyError(name)
        index, slot = members.index(layer.rpartition(".")[2]), getattr(self._model, ADAPTER_SLOT, 0)
        buffer: Tensor
        if side.startswith("A"):
            buffer = of_a[slot].chunk(len(members))[index]
        else:
            buffer = torch.split(of_b[slot], _local_sizes(module.base_layer))[index] if len(members) > 1 else of_b[slot]
        return buffer

    @override
    def required(self, names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
        """Tensors missing in `names` for fused modules that `names` cover only in part.

        SGLang requires adapters for all parts of a fused module or for none.
        """
        given_names = set(names)
        for layer in sorted({name.rpartition(".lora_")[0] for name in given_names}):
            parent = layer.rpartition(".")[0]
            for member in self._adapter_module(layer)[1]:
                for side in SIDES:
                    name = f"{parent}.{member}.{side}"
                    if name not in given_names:
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
    return [size // num_shards(module) for size in module.output_sizes]


def _computes_as_loaded(module: FusedMoE) -> bool:
    """False if SGLang has shuffled or packed these experts after loading them, for its kernels."""
    method = module.quant_method
    return (
        isinstance(method, UnquantizedFusedMoEMethod)
        and method.runner.runner_backend.is_triton()
        and not getattr(method, "w13_swiglu_interleaved", False)
        and not getattr(module, "use_intel_amx_backend", False)
    )


def _load_experts(target: ExpertsTensor, tensor: Tensor) -> None:
    """Load this process's part of an expert tensor with SGLang's loaders."""
    module, parameter = target.module, getattr(target.module, target.parameter)
    if not target.layout.interleaved:
        for expert, part, matrix in target.layout.split(target.name, tensor):
            shard = "w2" if part is None else ("w1", "w3")[part]
            module.weight_loader(parameter, matrix, target.parameter, shard_id=shard, expert_id=expert)
        return
    # SGLang's loader for interleaved matrices loads all local experts at once.
    first = module.moe_ep_rank * module.num_local_experts
    local = tensor[first : first + module.num_local_experts]
    if target.parameter == "w2_weight_bias" and module.moe_tp_rank:
        local = torch.zeros_like(local)
    local = local.mT if local.ndim > 2 else local
    module.weight_loader_fused(parameter, local, target.parameter, shard_id=target.name.matrix)


def _gathered(local: Tensor, dim: int, size: int) -> Tensor:
    full: Tensor = tensor_model_parallel_all_gather(local, dim) if size > 1 else local
    return full
