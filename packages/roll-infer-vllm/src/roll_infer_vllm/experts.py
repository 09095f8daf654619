"""Experts in one of vLLM's processes: how they are loaded by Hugging Face names, and how one expert is read back.

vLLM shuffles expert weights after loading, for the kernel that computes with them (packing for a CPU, FlashInfer,
AITER); see `shuffles`. Those layouts that are no permutation are refused. Experts in fp8 stay as they were sent.

With tensor parallelism each rank has a part of every expert, which an all-gather joins. With expert parallelism each
rank has some of the experts whole, by the layer's expert map; their owner broadcasts them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed import (
    get_ep_group,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import convert_to_unquantized_kernel_format
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from roll_infer_vllm.fp8 import BlockExperts
from roll_infer_vllm.shuffles import learned
from roll_modeling.engine_experts import SCALE, UP, ExpertLayout
from roll_modeling.engine_weights import ExpertsTensor

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from roll_modeling.engine_experts import ExpertName


def located(routed: RoutedExperts, name: ExpertName) -> ExpertsTensor:
    """Location of an expert tensor. Raises `KeyError` if the layer has no such tensor, or it cannot be read back."""
    moe = routed.moe_config
    is_gpt_oss, method = isinstance(routed, GptOssRoutedExperts), type(routed.quant_method)
    readable = (
        method in (UnquantizedFusedMoEMethod, BlockExperts)
        and moe.is_act_and_mul
        and moe.num_experts == moe.num_logical_experts  # no redundant copies
        and routed.expert_map_manager.num_fused_shared_experts == 0
        and (routed.use_ep or moe.moe_parallel_config.tp_size == get_tensor_model_parallel_world_size())
        and not (routed.use_ep and routed.expert_map is routed.expert_mask)  # 0 or 1, without positions
        and not (is_gpt_oss and name.expert is not None)
    )
    if not readable or name.parameter not in ("weight", "bias", SCALE) or not hasattr(routed, name.stored):
        raise KeyError(name.path)
    if method is UnquantizedFusedMoEMethod and not routed.w13_weight.is_meta and positions(routed) is None:
        raise KeyError(name.path)
    layout = ExpertLayout(
        num_experts=moe.num_experts,
        hidden=moe.hidden_dim_unpadded,
        intermediate=moe.intermediate_size,
        interleaved=is_gpt_oss,
        transposed=is_gpt_oss,
    )
    return ExpertsTensor(module=routed, parameter=name.stored, name=name, layout=layout)


def load(target: ExpertsTensor, tensor: Tensor) -> None:
    """Load an expert tensor with the layer's own loader, which each process calls with all experts."""
    routed, name = target.module, target.name
    parameter = getattr(routed, target.parameter)
    for expert, part, matrix in target.layout.split(name, tensor):
        if routed.expert_map_manager.map_global_to_local(expert) < 0:
            continue  # buffered views would keep the whole tensor until the layer is complete
        if target.layout.interleaved:
            shard, sent = f"gpt_oss_{name.matrix}", matrix.T if matrix.ndim == 2 else matrix
        else:
            shard, sent = "w2" if name.matrix == "w2" else "w3" if part == UP else "w1", matrix
        parameter.weight_loader(
            parameter,
            sent.clone() if routed.use_ep else sent,
            weight_name=name.stored,
            shard_id=shard,
            expert_id=expert,
            return_success=True,
        )


def shards(loaded: ExpertsTensor, expert: int) -> list[Tensor]:
    """Matrix of one expert by tensor parallel rank, see `LoadedModel.expert_shards`."""
    routed = loaded.module
    if not routed.use_ep:
        local = _local(loaded, expert if routed.expert_map is None else int(routed.expert_map[expert])).contiguous()
        if get_tensor_model_parallel_world_size() == 1:
            return [local]
        gathered = tensor_model_parallel_all_gather(_gatherable(local)[None], 0)
        return list(gathered.to(local.dtype).unbind())
    # The map that the kernel uses, not that of the loader: a map that changed in between must show.
    owners = get_ep_group().all_gather(routed.expert_map[expert : expert + 1].contiguous(), 0).tolist()
    owner = max(range(len(owners)), key=owners.__getitem__)
    matrix = _local(loaded, max(owners[get_ep_group().rank_in_group], 0))
    matrix = matrix.clone(memory_format=torch.contiguous_format)  # a broadcast writes into its argument
    if owners[owner] < 0:
        matrix = torch.zeros_like(matrix)  # no rank computes this expert
    return [get_ep_group().broadcast(_gatherable(matrix), src=owner).to(matrix.dtype)]


def _gatherable(matrix: Tensor) -> Tensor:
    """The matrix; fp8 as bf16, which represents all its values, because vLLM cannot send fp8 on a CPU."""
    return matrix.bfloat16() if matrix.itemsize == 1 else matrix


def _local(loaded: ExpertsTensor, expert: int) -> Tensor:
    """This rank's part of its expert, without padding: `[2·I/tp, H]` of w13 or `[H, I/tp]` of w2, biases or scales."""
    routed, name = loaded.module, loaded.name
    moe = routed.moe_config
    hidden, part = moe.hidden_dim_unpadded, moe.intermediate_size_per_partition_unpadded
    if isinstance(routed.quant_method, BlockExperts):
        stored: Tensor = getattr(routed, loaded.parameter)[expert]
        return stored
    if name.parameter == "bias":
        # The kernel has its own reference, which an update could leave behind.
        kernel = routed.quant_method.moe_kernel.fused_experts
        bias: Tensor = (kernel.w1_bias if name.matrix == "w13" else kernel.w2_bias)[expert]
        return bias[:hidden] if name.matrix == "w2" else _unpadded(loaded, bias[:, None], part)[:, 0]
    w13, w2 = cast("tuple[Tensor, Tensor]", positions(routed))  # `located` refuses other layouts
    flat: Tensor = getattr(routed, loaded.parameter)[expert].reshape(-1)
    padded_hidden, padded_part = routed.hidden_size, routed.intermediate_size_per_partition
    if name.matrix == "w2":
        return flat[w2].view(padded_hidden, padded_part)[:hidden, :part]
    return _unpadded(loaded, flat[w13].view(2 * padded_part, padded_hidden), part)[:, :hidden]


def _unpadded(loaded: ExpertsTensor, rows: Tensor, part: int) -> Tensor:
    """Rows of gate and up without those that were added at the end of each half, or at the end if they alternate."""
    return rows[: 2 * part] if loaded.layout.interleaved else torch.cat([half[:part] for half in rows.chunk(2)])


def positions(routed: RoutedExperts) -> tuple[Tensor, Tensor] | None:
    """For each element of w13 and of w2 of one expert, in row-major order, its index in the shuffled weights.

    None if the layout is no permutation of each expert.
    """
    kernel = routed.quant_method.moe_kernel.fused_experts
    part, hidden = routed.intermediate_size_per_partition, routed.hidden_size
    shapes = (2 * part, hidden), (hidden, part)
    key = type(kernel), routed.quant_method.unquantized_backend
    w13, w2 = learned(key, lambda pair: _shuffled(routed, *pair), shapes, routed.w13_weight)
    return None if w13 is None or w2 is None else (w13, w2)


def _shuffled(routed: RoutedExperts, w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The weights as the layer stores them after loading."""
    method = routed.quant_method
    layer: Any = torch.nn.Module()
    layer.moe_config = copy.copy(routed.moe_config)  # some backends change it
    w13, w2 = convert_to_unquantized_kernel_format(
        method.unquantized_backend, moe_config=layer.moe_config, w13_weight=w13, w2_weight=w2, layer=layer
    )
    layer.w13_weight = torch.nn.Parameter(w13, requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(w2, requires_grad=False)
    copy.copy(method.moe_kernel.fused_experts).process_weights_after_loading(layer)
    return layer.w13_weight, layer.w2_weight
