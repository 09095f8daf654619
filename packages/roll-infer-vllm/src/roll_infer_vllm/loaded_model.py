"""The model loaded in one of vLLM's processes: reads weights and the adapter back by Hugging Face names.

vLLM stores some weights in another form than they were sent:

* Fused: query, key and value projections in one matrix, gate and up projections in another. Undone by slicing.
* Sharded over ranks by rows or columns (tensor parallelism). Undone by an all-gather.
* Packed on a CPU: linear layers are packed for the processor and the original is freed. Read back by multiplying the
  identity with the same kernel that computes with the weight. Each element of the product is one weight times one plus
  zeros, which is exact. Only the sign of zeros and subnormal numbers are lost; these few are stored when they arrive.

Convolutions of linear attention are packed in bf16, as a permutation of their elements. fp8 weights and their scales
are fused and sharded, but never packed. An output layer is packed too, in addition to the
original, which it may share with the embeddings: both are read.

For the adapter vLLM has one buffer per layer for A and one for B, sized for its maximum rank. A fused layer has one
pair per part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.minimax_rms_norm import MiniMaxText01RMSNormTP
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

from roll_core.spec.fp8 import BLOCK
from roll_infer_vllm import experts
from roll_infer_vllm.shuffles import learned
from roll_infer_vllm.workarounds import ENCODER_BODY, ENCODERS
from roll_modeling.engine_experts import SCALE, ExpertName
from roll_modeling.engine_weights import ExpertsTensor, FusedTensor, LoadedModel, LoadedTensor, TransposedTensor
from roll_weight_transports.comparing import SIDES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor, nn

ROWS = 256
"""Number of rows of the identity per multiplication."""
UNREADABLE = "_roll_unreadable"
"""Attribute of the model: by name, flat indices and values of the elements that a multiplication does not reproduce."""
DECAYS = "_roll_decays"
"""Attribute of the model: by name, each `A_log` of Mamba as it was sent."""
DECAY = "A"
"""Parameter of Mamba's layers that vLLM computes as -exp(A_log), from which `A_log` cannot be computed exactly."""
DECAY_SENT = "A_log"
GROUPED = ("bloom", "falcon")
"""Types whose `query_key_value` has, for each key head, the rows of its queries, its key and its value; vLLM has first
all queries, then all keys."""
UNPACKED_CONVOLUTION = "_cpu_unpacked_conv_weight"
"""Attribute of a convolution that vLLM packed for the processor: a copy of its weight, `[R, W]`."""
MOE_STATICS = ".gate.moe_statics."
"""Module in which transformers has the correction bias of ERNIE 4.5, `[1, E]` there; in vLLM it is the gate."""
RENAMED = (
    (".mlp.", ".block_sparse_moe."),  # Mixtral, MiniMax-M2
    (".block_sparse_moe.router.", ".block_sparse_moe.gate."),  # Granite
    (MOE_STATICS, ".gate."),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),  # EXAONE
    (".mlp.e_score_correction_bias", ".mlp.expert_bias"),  # Hy3
    (".mlp.shared_experts.", ".mlp.shared_mlp."),  # Hy3
    (".feed_forward.expert_bias", ".feed_forward.gate.e_score_correction_bias"),  # LFM2
    (".self_attn.sinks", ".self_attn.attention_sink_bias"),  # MiMo-V2-Flash
)
"""Parts of names in transformers, and what vLLM has instead if it has a parameter with the second in its name."""
ROUTER_BUFFER = "e_score_correction_bias"
"""Buffer of routers in transformers, which vLLM's Transformers backend computes with."""
SHARDED = frozenset({"sinks", "attention_sink_bias", "A_log", "dt_bias", "A", "D"})
"""Parameters per attention head that layers other than linear ones shard by rows."""
ADAPTER_SLOT = 0
"""Slot of the adapter in vLLM's stacked buffers; the engine has only one (`max_loras` is 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmTensor(LoadedTensor):
    """Location of a tensor in vLLM's model. The parameter is `weight`, `bias`, `weight_scale`, `weight_scale_inv`, or a
    layer's own."""

    before: tuple[int, ...] = ()
    """Rows over all ranks of the parts of a fused matrix that precede this tensor."""
    parts: tuple[int, ...] = ()
    """Rows of the tensor over all ranks, in parts that are sharded one by one; empty if it is not fused."""
    copied: tuple[int, ...] = ()
    """Positions in `parts` of parts that every rank has in full."""
    shape_sent: tuple[int, ...] = ()
    """Shape of Hugging Face's tensor if it differs."""

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        module = self.module
        if self.shape_sent:
            return self.shape_sent
        if isinstance(module, VocabParallelEmbedding):
            return (module.org_vocab_size, module.embedding_dim)[: getattr(module, self.parameter).ndim]
        local = tuple(getattr(module, self.parameter).shape)
        if not isinstance(module, LinearBase):
            return (local[0] * _row_shards(module, self.parameter), *local[1:]) if local else local
        rows = sum(self.parts) or module.output_size
        if isinstance(module, QKVParallelLinear) and self.index:
            rows //= module.num_kv_head_replicas
        if self.parameter == "weight" and (len(local) == 3 or hasattr(module, UNPACKED_CONVOLUTION)):
            return (rows, 1, module.input_size)
        if self.parameter == SCALE:
            return -(-rows // BLOCK), -(-module.input_size // BLOCK)
        columns = {"weight": (module.input_size,), "weight_scale": (1,)}
        return (rows, *columns.get(self.parameter, ()))


class VllmModel(LoadedModel):
    """A vLLM model in this process."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._model = model
        self._packed = _packed_modules(model)
        config: Any = model.config
        self.model_type: str = config.model_type
        self.device, self.rank = device, get_tensor_model_parallel_rank()
        self.dtype = next(model.parameters()).dtype
        heads = [
            module for module in model.modules() if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear")
        ]
        self._heads: dict[int, Any] = {id(head.weight): head for head in heads}
        """Packed output layers, by the id of the weight that they were packed from."""
        parameters = [name for name, _ in model.named_parameters()]
        self._renamed = [pair for pair in RENAMED if any(pair[1] in name for name in parameters)]
        self._encoders = [f"{path}." for path, module in model.named_modules() if type(module).__name__ in ENCODERS]
        self._latent = {id(layer.kv_b_proj): layer for layer in model.modules() if isinstance(layer, MLAAttention)}
        """Layers of latent attention, by the id of their `kv_b_proj`."""
        self._unreadable: dict[str, tuple[Tensor, Tensor]] = getattr(model, UNREADABLE, {})
        self._decays: dict[str, Tensor] = getattr(model, DECAYS, {})
        self._last: tuple[Any, Tensor] | None = None
        """Module and matrix that were unpacked last; a cache, because fused tensors mostly follow one another."""

    @override
    def locate(self, name: str) -> LoadedTensor | None:
        if (expert := ExpertName.parse(name)) is not None:
            module = self._module(self._rename(f"{expert.path}.weight").rpartition(".")[0])
            if isinstance(module, PPMissingLayer):
                return None
            routed = getattr(module, "routed_experts", None)
            if not isinstance(routed, RoutedExperts):
                raise KeyError(name)
            return experts.located(routed, expert)
        path, index = self._find(name)
        module = self._module(path)
        if isinstance(module, PPMissingLayer):  # another pipeline stage has it
            return None
        parameter = self._rename(name).rpartition(".")[2]
        kind = torch.Tensor if parameter == ROUTER_BUFFER else torch.nn.Parameter
        if not isinstance(getattr(module, parameter, None), kind):
            raise KeyError(name)
        loaded = self._tensor(path, parameter, index)
        if MOE_STATICS in name and isinstance(loaded, VllmTensor):
            return replace(loaded, shape_sent=(1, *loaded.shape))
        return TransposedTensor.located(name, self.model_type, loaded)

    @override
    def located(self) -> Iterator[tuple[str, LoadedTensor]]:
        packed = self._packed
        modules = dict(self._model.named_modules())
        buffers = (pair for pair in self._model.named_buffers() if pair[0].endswith(ROUTER_BUFFER))
        for name, _ in (*self._model.named_parameters(), *buffers):
            path, _, parameter = name.rpartition(".")
            prefix, _, last = path.rpartition(".")
            if isinstance(modules[path], RoutedExperts):
                matrix, _, kind = parameter.partition("_")
                every = ExpertName(path=path, matrix="w2" if matrix == "w2" else "w13", parameter=kind)
                yield name, experts.located(modules[path], every)
                continue
            if isinstance(modules[path], MLAAttention):
                continue  # computed from `kv_b_proj`
            members = packed.get(last, ())
            if len(members) < 2:
                yield name, self._tensor(path, parameter, None)
                continue
            for index, member in enumerate(members):
                yield f"{prefix}.{member}.{parameter}", self._tensor(path, parameter, index)

    @override
    def read(self, name: str, loaded: VllmTensor | FusedTensor | TransposedTensor) -> Tensor:
        stored: Any = loaded.of if isinstance(loaded, TransposedTensor) else loaded
        if isinstance(stored, FusedTensor):
            parts = [self._whole(member) for member in stored.members]
            full = _grouped(stored.module, parts) if self.model_type in GROUPED else torch.cat(parts)
        else:
            full = self._whole(stored)
        if isinstance(loaded, TransposedTensor):
            full = full.t().contiguous()
        if loaded.parameter == DECAY and name in self._decays:
            sent = self._decays[name]
            return sent if torch.equal(-torch.exp(sent.float()), full) else full
        if _is_packed(loaded) and name in self._unreadable:
            places, values = self._unreadable[name]
            full = full.clone()
            full.view(-1)[places] = values.to(full.dtype)
        return full

    def _whole(self, loaded: VllmTensor) -> Tensor:
        """The tensor at this location, gathered over ranks and unpacked."""
        module = loaded.module
        local = self._unpacked(module) if _is_packed(loaded) else getattr(module, loaded.parameter).detach()
        if _is_matrix(loaded) and hasattr(module, UNPACKED_CONVOLUTION):
            local = _unpacked_convolution(module)
        if isinstance(module, VocabParallelEmbedding) and loaded.parameter == "weight":
            local = self._as_multiplied(module, local)
        elif id(module) in self._latent and loaded.parameter == "weight":
            local = _as_absorbed(self._latent[id(module)], local)
        if loaded.parts:
            height = BLOCK if loaded.parameter == SCALE else 1
            sizes = [
                -(-size // (1 if i in loaded.copied else module.tp_size) // height)
                for i, size in enumerate((*loaded.before, *loaded.parts), -len(loaded.before))
            ]
            parts = local[: sum(sizes)].split(sizes)[len(loaded.before) :]
            full = torch.cat(
                [
                    _equal_copies(part) if i in loaded.copied else _gathered(module, loaded, part)
                    for i, part in enumerate(parts)
                ]
            )
        else:
            full = _gathered(module, loaded, local)
        if isinstance(module, LinearBase) and loaded.parameter == "bias":
            full = full.to(module.params_dtype)  # vLLM converts the biases of some packed layers to a wider dtype
        return full

    @override
    def adapter_buffer(self, name: str) -> Tensor:
        layer, _, side = name.rpartition(".lora_")
        if f"lora_{side}" not in SIDES:
            raise KeyError(name)
        path, index = self._find(f"{layer}.weight")
        module = self._module(path)
        stacked: Any = getattr(module, "lora_a_stacked" if side.startswith("A") else "lora_b_stacked", None)
        if stacked is None:
            raise KeyError(name)
        buffers: list[Tensor] = [slots[ADAPTER_SLOT, 0] for slots in stacked]
        if index is not None or len(buffers) == 1:
            return buffers[index or 0]
        if side.startswith("B"):
            return torch.cat(buffers)
        first = buffers[0]
        return first if all(torch.equal(buffer, first) for buffer in buffers) else torch.full_like(first, torch.nan)

    @override
    def adapter_parts(self, layer: str) -> Mapping[str, int]:
        path, index = self._find(f"{layer}.weight")
        parent, _, last = path.rpartition(".")
        stacked = getattr(self._module(path), "lora_b_stacked", ())
        members = self._packed.get(last, ())
        if index is not None or len(stacked) != len(members) or len(members) < 2:
            return {}
        return {f"{parent}.{member}": int(slots.shape[2]) for member, slots in zip(members, stacked, strict=True)}

    @override
    def expert_shards(self, loaded: ExpertsTensor, expert: int) -> Sequence[Tensor]:
        return experts.shards(loaded, expert)

    def _tensor(self, path: str, parameter: str, index: int | None) -> VllmTensor | FusedTensor:
        """Location of a parameter of the module at `path`, or of the part of it at `index` among the fused ones."""
        module = self._module(path)
        before: tuple[int, ...] = ()
        parts: tuple[int, ...] = ()
        copied: tuple[int, ...] = ()
        if index is not None:
            outputs = module.output_sizes
            members = self._packed[path.rpartition(".")[2]]
            # Qwen3.5 fuses `in_proj_qkv`, which is three parts by itself, with `in_proj_z`.
            several = len(outputs) - len(members)
            start = 0 if index == 0 else index + several
            before, parts = tuple(outputs[:start]), tuple(outputs[start : index + several + 1])
        elif path.endswith((".conv1d", ".in_proj")):
            mixer = self._module(path.rpartition(".")[0])
            if isinstance(mixer, GatedDeltaNetAttention) and path.endswith(".conv1d"):
                parts = (mixer.key_dim, mixer.key_dim, mixer.value_dim)
            elif isinstance(mixer, MambaMixer2) and not isinstance(module, MergedColumnParallelLinear):
                # One group for all heads: every rank has it.
                inner, state = mixer.intermediate_size, mixer.ssm_state_size
                if path.endswith(".conv1d"):
                    parts, copied = (inner, state, state), (1, 2)
                else:
                    parts, copied = (inner, inner, state, state, mixer.num_heads), (2, 3)
        if index is None and not parts and isinstance(module, MergedColumnParallelLinear | QKVParallelLinear):
            outputs = tuple(module.output_sizes)
            tensors = [
                VllmTensor(module=module, parameter=parameter, index=i, before=outputs[:i], parts=(size,))
                for i, size in enumerate(outputs)
            ]
            return FusedTensor(module=module, parameter=parameter, members=tuple(tensors))
        return VllmTensor(module=module, parameter=parameter, index=index, before=before, parts=parts, copied=copied)

    def _find(self, name: str) -> tuple[str, int | None]:
        """Path of the module that has the parameter of this name, and its position if it is fused with others."""
        path = self._rename(name).rpartition(".")[0]
        last = name.rpartition(".")[0].rpartition(".")[2]
        for fused, members in self._packed.items():
            together = f"{path.rpartition('.')[0]}.{fused}"
            if last in members and len(members) > 1 and self._has(together):
                return together, members.index(last)
        return path, None

    def _has(self, path: str) -> bool:
        try:
            self._module(path)
        except KeyError:
            return False
        return True

    def _module(self, path: str) -> Any:
        """Module at this path, or the `PPMissingLayer` that contains it. Raises `KeyError` if there is none."""
        module: Any = self._model
        for step in path.split(".") if path else ():
            module = getattr(module, step, None)
            if module is None:
                raise KeyError(path)
            if isinstance(module, PPMissingLayer):
                break
        return module

    def sent_name(self, name: str) -> str:
        """The name that the model's loader knows for a tensor of transformers' module."""
        for part, other in self._renamed:
            name = name.replace(part, other)
        return name

    def _rename(self, name: str) -> str:
        """vLLM's name for a Hugging Face name, by the model's mapping if it has one. Raises `KeyError` if dropped."""
        name = self.sent_name(name)
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        renamed = mapper.map_name(name) if mapper is not None else name
        if renamed is None:
            raise KeyError(name)
        for path in self._encoders:
            if str(renamed).startswith(path):
                return path + ENCODER_BODY + str(renamed).removeprefix(path).removeprefix(ENCODER_BODY)
        layer, _, parameter = str(renamed).rpartition(".")
        if parameter == DECAY_SENT and self._has(layer) and isinstance(self._module(layer), MambaMixer | MambaMixer2):
            return f"{layer}.{DECAY}"  # the model's loader has its own rule for this name
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


def _packed_modules(model: Any) -> Mapping[str, Sequence[str]]:
    """Names of the layers that vLLM fuses, by the name of the fused one. InternVL has them in its language model.

    GPT-J has them only in the mapping of names.
    """
    language_model = getattr(model, "language_model", None)
    declared: Mapping[str, Sequence[str]] | None = getattr(model, "packed_modules_mapping", None)
    if declared is None and language_model is not None:
        declared = getattr(language_model, "packed_modules_mapping", None)
    if declared:
        return declared
    packed: dict[str, list[str]] = {}
    for member, (fused, _) in getattr(getattr(model, "hf_to_vllm_mapper", None), "orig_to_new_stacked", {}).items():
        packed.setdefault(fused.strip("."), []).append(member.strip("."))
    return packed


def _grouped(module: Any, parts: Sequence[Tensor]) -> Tensor:
    """Query, key and value of a fused layer as Hugging Face's model has them, see `GROUPED`."""
    heads = module.total_num_kv_heads
    return torch.cat([part.view(heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _is_matrix(loaded: LoadedTensor) -> bool:
    return loaded.parameter == "weight" and isinstance(loaded.module, LinearBase)


def _is_packed(loaded: LoadedTensor) -> bool:
    """True if vLLM packed this weight for the processor and freed the original."""
    return _is_matrix(loaded) and loaded.module.weight.numel() == 0 and hasattr(loaded.module, "cpu_linear")


def remember_unreadable(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Store the elements of a tensor that a packed matrix cannot reproduce: negative zeros and subnormal numbers.

    Called before the tensor is loaded.
    """
    unreadable: dict[str, tuple[Tensor, Tensor]] = model.__dict__.setdefault(UNREADABLE, {})
    unreadable.pop(name, None)
    if tensor.ndim != 2 or not tensor.is_floating_point() or tensor.itemsize == 1:
        return
    flat = tensor.reshape(-1)
    tiny = flat.abs() < torch.finfo(flat.dtype).tiny
    lost = tiny & ((flat != 0) | torch.signbit(flat))
    if lost.any():
        places = lost.nonzero().flatten()
        unreadable[name] = places, flat[places].clone()


def remember_decay(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Store an `A_log`, with which the stored -exp(A_log) is compared when it is read back."""
    if name.endswith(f".{DECAY_SENT}"):
        model.__dict__.setdefault(DECAYS, {})[name] = tensor.clone()


def _multiplied_identity(module: Any) -> Tensor:
    head = isinstance(module, ParallelLMHead)
    columns = module.embedding_dim if head else getattr(module, "input_size_per_partition", module.input_size)
    dtype = module.weight.dtype
    products = []
    for start in range(0, columns, ROWS):
        rows = torch.zeros(min(ROWS, columns - start), columns, dtype=dtype)
        rows[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = 1
        products.append(module.cpu_linear(rows, module.weight, None))
    return torch.cat(products).t().contiguous()


def _unpacked_convolution(module: Any) -> Tensor:
    """`[R, 1, W]` of a convolution that vLLM packed for the processor; NaN where the copy differs that it keeps.

    vLLM computes with the copy where the packed form does not support the layout of the sequences.
    """
    copy: Tensor = getattr(module, UNPACKED_CONVOLUTION)

    def pack(convolutions: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack([torch.ops._C.causal_conv1d_weight_pack(weight) for weight in convolutions[0]])]

    (places,) = learned("convolution", pack, [(len(copy), copy.shape[1])], module.weight)
    if places is None:
        raise RuntimeError("vLLM packs convolutions in a layout that cannot be read back: set model_args.dtype: fp32")
    weight = module.weight.detach().reshape(-1)[places].view(copy.shape)
    return torch.where(weight == copy, weight, torch.nan).unsqueeze(1)


def _as_absorbed(layer: MLAAttention, weight: Tensor) -> Tensor:
    """`kv_b_proj`'s weight `[N·(P+V), L]`, or the matrices that latent attention made of it if they differ from it.

    Decoding multiplies by them: `W_UK_T [N, P, L]` and `W_UV [N, L, V]`; N heads of this rank, P and V sizes of keys
    without position and of values, L latent size. With AMX the weight is released, and they are packed.
    """
    if weight.numel() == 0:
        packed = layer.impl._w_uk_packed, layer.impl._w_uv_packed
        sizes = (layer.kv_lora_rank, layer.qk_nope_head_dim), (layer.v_head_dim, layer.kv_lora_rank)
        key_LP, value_VL = [
            _unpacked_heads(packed_part, shape) for packed_part, shape in zip(packed, sizes, strict=True)
        ]
        key_PL = key_LP.transpose(1, 2)
    else:
        key_PL, value_VL = layer.W_UK_T, layer.W_UV.transpose(1, 2)
    absorbed = torch.cat([key_PL, value_VL], dim=1).flatten(0, 1)
    return weight if weight.numel() and torch.equal(absorbed.to(weight.dtype), weight) else absorbed


def _unpacked_heads(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """`[N, *shape]` of matrices that vLLM packed for AMX."""
    (places,) = learned("amx", lambda heads: [torch.ops._C.convert_weight_packed(heads[0])], [shape], packed)
    if places is None:
        raise RuntimeError("vLLM packs kv_b_proj in a layout that cannot be read back: set attention_backend: CPU_MLA")
    return packed.flatten(1)[:, places].view(len(packed), *shape)


def _row_shards(module: Any, parameter: str) -> int:
    """Number of different shards of rows of a parameter that is no linear layer's."""
    if isinstance(module, MiniMaxText01RMSNormTP):
        return int(module.weight_shard_world)
    if isinstance(module, Mixer2RMSNormGated):
        return int(module.tp_size)
    return get_tensor_model_parallel_world_size() if parameter in SHARDED else 1


def _gathered(module: Any, loaded: VllmTensor, local: Tensor) -> Tensor:
    if (num_shards := _row_shards(module, loaded.parameter)) > 1:
        ranks = _all_gathered(local.contiguous()[None], 0)
        return _own_copies(ranks, len(ranks) // num_shards)
    size = getattr(module, "tp_size", 1)
    if isinstance(module, VocabParallelEmbedding):
        full = tensor_model_parallel_all_gather(local, 0) if size > 1 else local
        return full[: module.org_vocab_size]
    if size == 1 or not isinstance(module, LinearBase):
        return local
    if isinstance(module, RowParallelLinear):
        return _all_gathered(local, 1) if loaded.parameter in ("weight", SCALE) else local
    if not isinstance(module, ColumnParallelLinear):
        return local
    rows = _all_gathered(local.contiguous(), 0)
    if isinstance(module, QKVParallelLinear) and loaded.index and module.num_kv_head_replicas > 1:
        rows = _own_copies(rows.reshape(-1, *local.shape), module.num_kv_head_replicas)
    return rows


def _own_copies(ranks: Tensor, num_copies: int) -> Tensor:
    """Rows of the shards of all ranks. Adjacent ranks have `num_copies` of each, of which each rank reads its own."""
    return ranks[get_tensor_model_parallel_rank() % num_copies :: num_copies].flatten(0, 1)


def _equal_copies(local: Tensor) -> Tensor:
    """The tensor that all ranks have; NaN where theirs differ."""
    copies = _all_gathered(local.contiguous()[None], 0)
    return torch.where((copies == copies[0]).all(0), copies[0], torch.nan)


def _all_gathered(local: Tensor, dim: int) -> Tensor:
    """All-gather; sends fp8 as bf16, which represents all its values, because vLLM cannot gather fp8 on a CPU."""
    full: Tensor = tensor_model_parallel_all_gather(local.bfloat16() if local.itemsize == 1 else local, dim)
    return full.to(local.dtype)
