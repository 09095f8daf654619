"""Workarounds for vLLM 0.32. Each states its reason, and a test fails as soon as it is no longer needed."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import ModelConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from roll_modeling.engine_weights import LoadedTensor


SCORES = ("softmax", "sigmoid")
"""Functions of router logits that correction biases are added to."""


class TemperedSampler(Sampler):  # type: ignore[misc]  # vLLM is untyped to mypy
    """Sampler of vLLM's first model runner, with logprobs as the contract has them.

    They are under softmax(logits / temperature), before penalties and filters, as in the trainer. In vLLM 0.32
    `logprobs_mode` selects the kind of logprobs for the whole engine. `raw` ignores the temperature; `processed`
    includes penalties and top-k, top-p and min-p. Neither matches the trainer if the temperature is not 1 and filters
    are set. Prompt logprobs also use `compute_logprobs`, but outside of `forward`: they stay raw.
    """

    never_sampled: Tensor | None = None
    """Ids of tokens that must not be sampled; None if all may be."""
    _temperature: Any = None
    """Temperature of each row during `forward`; None outside of it and if all rows are greedy."""

    def forward(self, logits: Any, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample tokens; makes the temperatures available to `compute_logprobs`."""
        self._temperature = sampling_metadata.temperature
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self._temperature = None

    def compute_logprobs(self, logits: Any) -> Any:
        """Logprobs in float32, after division by the temperature. A temperature of 0 counts as 1."""
        if self._temperature is not None:
            logits = self.apply_temperature(logits.float().clone(), self._temperature, all_random=False)
        return super().compute_logprobs(logits)

    def apply_logits_processors(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Logits after penalties and biases, without `never_sampled`."""
        return _without(super().apply_logits_processors(logits, *args, **kwargs), self.never_sampled)


class TemperedSamplerV2(SamplerV2):  # type: ignore[misc]
    """Sampler of vLLM's second model runner (V2), with the same logprobs as `TemperedSampler`.

    vLLM computes them from the logits that `sample` returns, in place of which this class returns tempered ones.
    """

    never_sampled: Tensor | None = None
    """Ids of tokens that must not be sampled; None if all may be."""

    def sample(
        self,
        logits: Any,
        expanded_idx_mapping: Any,
        idx_mapping: Any,
        idx_mapping_np: Any,
        *args: Any,
        return_logprobs: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Sampled tokens, and the logits for their logprobs: float32, divided by the temperature (1 if it is 0)."""
        tempered = logits.to(torch.float32, copy=True) if return_logprobs else None
        logits = _without(logits, self.never_sampled)
        rows = (expanded_idx_mapping, idx_mapping, idx_mapping_np)
        # With `return_logprobs` vLLM would not use its fused sampler, which computes no logits.
        sampled, processed = super().sample(logits, *rows, *args, return_logprobs=False, **kwargs)
        if tempered is None:
            return sampled, processed
        self.sampling_states.apply_temperature(tempered, expanded_idx_mapping, idx_mapping_np)
        return sampled, tempered


COPIED_SINKS = ("gpt_oss", "mimo_v2_flash")
"""Model types whose loaders copy attention sinks. Granite's have a `weight_loader`, which shards them."""
ENCODERS = ("CLIPVisionModel", "SiglipVisionModel")
"""Classes of image encoders whose parameters vLLM, and published checkpoints, have in a module `vision_model`."""
ENCODER_BODY = "vision_model."
TEMPERED = {Sampler: TemperedSampler, SamplerV2: TemperedSamplerV2}
"""Our sampler for each of vLLM's."""


def _without(logits: Any, ids: Tensor | None) -> Any:
    """The logits, in which these ids have become impossible in place."""
    return logits if ids is None else logits.index_fill_(-1, ids, -torch.inf)


def allocate_stage_inputs(model_runner: Any) -> None:
    """Allocate the input of a later pipeline stage, as vLLM's warm-up does.

    On a CPU vLLM skips its warm-up if `enforce_eager` and `kv_cache_memory_bytes` are set, and then fails at the first
    request.
    """
    from vllm.distributed.parallel_state import get_pp_group

    if getattr(model_runner, "intermediate_tensors", model_runner) is None and not get_pp_group().is_first_rank:
        model_runner.intermediate_tensors = model_runner.model.make_empty_intermediate_tensors(
            batch_size=model_runner.max_num_tokens, dtype=model_runner.model_config.dtype, device=model_runner.device
        )


def use_tempered_sampler(model_runner: Any, never_sampled: Sequence[int] = ()) -> None:
    """Turn the model runner's sampler into ours, with the same options. V2 has none on all but the last pipeline stage.

    It never samples the tokens `never_sampled`.

    Raises `UnsupportedError` for any other sampler of vLLM.
    """
    sampler = model_runner.sampler
    if sampler is None:
        return
    if type(sampler) not in TEMPERED:
        raise UnsupportedError(
            f"vLLM samples with {type(sampler).__module__}.{type(sampler).__name__}, which returns no logprobs at the"
            " sampling temperature: remove the key of strategy_config that selects this sampler"
        )
    sampler.__class__ = TEMPERED[type(sampler)]  # the object has other owners, such as a rejection sampler
    if never_sampled:
        sampler.never_sampled = torch.tensor(never_sampled, device=model_runner.device)
    if isinstance(sampler, SamplerV2):
        sampler.logprobs_mode = "processed_logprobs"  # of the logits that `sample` returns


def load_flat_encoders() -> None:
    """Make the encoders of Gemma 3, Llava and others load checkpoints that transformers 5 has saved. Idempotent.

    Since transformers 5 its modules have no `vision_model`, and neither have the names that it saves. vLLM 0.32 knows
    only those of published checkpoints.
    """
    load = AutoWeightsLoader._load_module
    if hasattr(load, "__wrapped__"):
        return

    @wraps(load)
    def load_module(loader: Any, prefix: str, module: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        if type(module).__name__ in ENCODERS:
            weights = ((f"{ENCODER_BODY}{name.removeprefix(ENCODER_BODY)}", tensor) for name, tensor in weights)
        return load(loader, prefix, module, weights)

    AutoWeightsLoader._load_module = load_module


def store_activations_in_dtype_of_model() -> None:
    """Make vLLM store the parameters of Apertus' activation (xIELU) in the model's dtype. Idempotent.

    vLLM 0.32 and 0.33 round them to bf16 in a model of any dtype.
    """
    construct = XIELU.__init__
    if hasattr(construct, "__wrapped__"):
        return

    @wraps(construct)
    def construct_in_dtype(module: Any, *args: Any, **kwargs: Any) -> None:
        construct(module, *args, **({"dtype": torch.get_default_dtype()} | kwargs))

    XIELU.__init__ = construct_in_dtype


def restore_activation_constants(model: Any) -> None:
    """Set the constants of Apertus' activations (xIELU) again after an update.

    vLLM's layerwise reload replaces them by uninitialized memory, because they are buffers that no weight loads beside
    parameters that weights load.
    """
    for module in model.modules():
        if isinstance(module, XIELU):
            module.beta.fill_(module._beta_scalar)
            module.eps.fill_(module._eps_scalar)


def name_partial_loaders(model: Any) -> None:
    """Name weight loaders that are partial functions. vLLM's layerwise reload reads their `__name__`, which they lack.

    MiniMax-M2 has such loaders.
    """
    for parameter in model.parameters():
        loader: Any = getattr(parameter, "weight_loader", None)
        if isinstance(loader, partial):
            loader.__dict__.setdefault("__name__", loader.func.__name__)


def pack_tied_heads(model: Any) -> None:
    """Repack output layers after an update, on a CPU.

    vLLM 0.32 packs a layer when the layer's own tensor has been loaded. An output layer tied to the embeddings has no
    tensor of its own, so it would keep computing with the old weights.
    """
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def pack_experts_again(model: Any) -> None:
    """Make vLLM pack experts again in the update that begins, on a CPU.

    vLLM 0.32 and 0.33 pack experts for a CPU only while they build the layer's kernel. In an update the kernel exists,
    so that plain weights would be copied over the packed ones and the layer would compute with permuted weights.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.quant_method.moe_kernel = None


def load_sinks(target: LoadedTensor | None, sinks_N: Tensor) -> None:
    """Load this rank's attention sinks of a model of `COPIED_SINKS`; `target` is None if another process has the layer.

    vLLM's loader copies them into the parameter itself, which has no memory during an update: they would stay stale.
    """
    if target is not None:
        parameter = getattr(target.module, target.parameter)
        local_N = sinks_N.chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]
        parameter.weight_loader(parameter, local_N.clone())


def route_with_correction_biases() -> None:
    """Make vLLM's router for a CPU add correction biases to the scores of experts without groups. Idempotent.

    vLLM 0.32 and 0.33 ignore them there (ERNIE 4.5), or raise for scores other than softmax (MiniMax-M2). With one
    group of all experts, vLLM's routing over groups is the same function.
    """
    compute = CPURouter._compute_routing
    if hasattr(compute, "__wrapped__"):
        return

    @wraps(compute)
    def compute_with_biases(router: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if router.use_grouped_topk or router.e_score_correction_bias is None or router.scoring_func not in SCORES:
            return compute(router, hidden_states, router_logits, *args, **kwargs)
        return cpu_router._grouped_topk(
            router_logits,
            router.top_k,
            router.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func=router.scoring_func,
            routed_scaling_factor=router.routed_scaling_factor,
            e_score_correction_bias=router.e_score_correction_bias,
        )

    CPURouter._compute_routing = compute_with_biases


def skip_experts_of_other_ranks() -> None:
    """Make vLLM's experts for a CPU skip those of other ranks (expert parallelism). Idempotent.

    vLLM 0.32 and 0.33 ignore the expert map there: the kernel reads past the experts of this rank, and crashes.
    """
    apply = CPUUnquantizedExperts.apply
    if hasattr(apply, "__wrapped__"):
        return

    @wraps(apply)
    def apply_own(
        experts: Any, *, output: Any, topk_weights: Any, topk_ids: Any, expert_map: Any, **arguments: Any
    ) -> None:
        others = None
        if expert_map is not None:
            local_ids_TK = expert_map[topk_ids.long()].to(topk_ids.dtype)
            others = local_ids_TK < 0
            topk_ids, topk_weights = local_ids_TK.clamp(min=0), topk_weights.masked_fill(others, 0)
        weights = {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map}
        apply(experts, output=output, **weights, **arguments)
        if others is not None and arguments["apply_router_weight_on_input"]:  # K is 1, and weights are not applied here
            output.masked_fill_(others, 0)

    CPUUnquantizedExperts.apply = apply_own


def rotate_every_head() -> None:
    """Make vLLM's rotary embedding for a CPU rotate every head of queries and keys `[T, N, D]`. Idempotent.

    The kernel of vLLM 0.32 takes each head for a token, and rotates as many as there are tokens (LFM2).
    """
    rotate = RotaryEmbedding.forward_cpu
    if hasattr(rotate, "__wrapped__"):
        return

    @wraps(rotate)
    def rotate_flat(module: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        if query.ndim != 3:
            return rotate(module, positions, query, key)
        query_TH, key_TH = rotate(module, positions, query.flatten(1), None if key is None else key.flatten(1))
        return query_TH.view_as(query), None if key is None else key_TH.view_as(key)

    RotaryEmbedding.forward_cpu = rotate_flat


def repeat_keys_for_experts() -> None:
    """Give attention whose queries have experts (JetMoE) as many heads of keys as transformers passes. Idempotent.

    transformers repeats keys and values for each chosen expert. Layers of vLLM's Transformers backend expect
    `num_key_value_heads` of them, and take the repeated ones for those of other tokens.
    """
    count = ModelConfig.get_num_kv_heads
    if hasattr(count, "__wrapped__"):
        return

    @wraps(count)
    def count_repeated(config: Any, parallel_config: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(config.hf_text_config, "model_type", None) == "jetmoe":
            return config.get_num_attention_heads(parallel_config)
        return count(config, parallel_config, *args, **kwargs)

    ModelConfig.get_num_kv_heads = count_repeated


def exchange_uneven_parts() -> None:
    """Give vLLM's communicator for a CPU the two operations by which data-parallel ranks share experts. Idempotent.

    vLLM 0.32 and 0.33 have them for accelerators only. Ranks may have different numbers of tokens.
    """
    if CpuCommunicator.all_gatherv is DeviceCommunicatorBase.all_gatherv:
        CpuCommunicator.all_gatherv = _all_gatherv
    if CpuCommunicator.reduce_scatterv is DeviceCommunicatorBase.reduce_scatterv:
        CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(group: Any, parts: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Concatenate the rows of all ranks: of a tensor, or of each tensor of a list. `sizes` has the rows by rank."""
    if isinstance(parts, list):
        return [_all_gatherv(group, part, dim, sizes) for part in parts]
    _check_rows(dim)
    if sizes is None:
        return group.all_gather(parts.contiguous(), 0)
    padded = parts.new_zeros(max(sizes), *parts.shape[1:])
    padded[: len(parts)] = parts
    gathered = group.all_gather(padded, 0).split(max(sizes))
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(group: Any, rows: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """Sum over ranks, of which this rank gets its own rows. `sizes` has the rows by rank."""
    _check_rows(dim)
    summed: Tensor = group.all_reduce(rows.clone())
    part: Tensor = torch.split(summed, sizes or len(summed) // group.world_size)[group.rank_in_group]
    return part.contiguous()


def _check_rows(dim: int) -> None:
    if dim:
        raise NotImplementedError(f"ranks exchange rows on a CPU; found dimension {dim}")
