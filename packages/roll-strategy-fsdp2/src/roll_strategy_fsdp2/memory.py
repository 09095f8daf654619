"""Memory model of the FSDP2 strategies: bytes per rank, by the formulas in docs/plan.md.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from roll_core.spec.plan import DTYPE_BYTES, MemoryEstimate, MemoryItem, MemorySaving
from roll_modeling.memory import computation, model_code, optimizer_uses, weight_use

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.model import LayerSize, ModelSize
    from roll_core.spec.plan import Memory, MemoryInput
    from roll_modeling.memory import Moment
    from roll_strategy_fsdp2.config import FSDP2Config


def memory(question: MemoryInput) -> MemoryEstimate:
    """Memory use of the rank that needs most; all ranks need about the same."""
    config = cast("FSDP2Config", question.config)
    parallel = config.tensor_model_parallel_size
    shards = parallel * (config.fsdp_size or max(1, question.world_size // parallel))
    uses = [model_code(), *_held(question, config, shards), *_gathered(question, config, shards)]
    uses += computation(
        replace(question, model=_cut(question.model, parallel)),
        fused=False,
        chunk_tokens=config.logprob_chunk_tokens,
        shards=config.context_size,
        beside=partial(_in_backward, question, config, shards),
    )
    return MemoryEstimate(uses=tuple(uses), savings=tuple(_savings(question, config)))


def _held(question: MemoryInput, config: FSDP2Config, shards: int) -> Iterator[MemoryItem]:
    """Sharded parameters, which are float32 if trained, sharded Adam moments, and sharded gradients."""
    count = question.model.parameters + question.added_parameters
    on: Memory = "host" if config.offload_policy else "device"
    weights = weight_use(question, 4 if question.trains else _computed(question, config), shards, on=on)
    yield weights
    if question.random_weights or question.added_parameters:
        size, less = 4 if question.random_weights else DTYPE_BYTES[question.dtype], weights.num_bytes * question.on_host
        note = "the whole model, before it is sharded"
        yield MemoryItem.of("weights", size, count, note=note, less=less, during=("start",), on="host")
    if question.trains:
        yield from optimizer_uses(question, shards, has_masters=False, on=on)
        yield MemoryItem.of("gradients", 4, question.trained_parameters, shards, during=("step",), on=on)


def _gathered(question: MemoryInput, config: FSDP2Config, shards: int) -> Iterator[MemoryItem]:
    """Gathered parameters of a forward pass and of an export. The start has a pass over a few tokens.

    In a forward pass, these are the parameters outside the layers, the current layer, and the prefetched next layer.
    Without `reshard_after_forward`, all layers stay gathered.
    """
    size, sizes = _computed(question, config), _sizes(question, config)
    count = sizes.rest + (sizes.all_layers if config.reshard_after_forward is False else 2 * sizes.layer)
    yield MemoryItem.of("buffers", size, count, note="gathered", during=("score",))
    if not question.on_host:
        count += (sizes.rest + sizes.layer) // shards
        yield MemoryItem.of("buffers", size, count, note="gathered and sent", during=("start",))
    yield MemoryItem.of("buffers", size, question.model.largest_matrix, note="gathered", during=("publish",))


def _in_backward(question: MemoryInput, config: FSDP2Config, shards: int, moment: Moment) -> Iterator[MemoryItem]:
    """Memory at one moment of the backward pass: gathered parameters, unreduced gradients, buffers of reductions in
    flight, and sharded gradients."""
    sizes, size, reduced = _sizes(question, config), _computed(question, config), DTYPE_BYTES[config.reduce_dtype]
    count = _gathered_by(moment, sizes, stays=config.reshard_after_forward is False)
    yield _now("buffers", moment, size, count, note="gathered")
    before = question.num_micro_batches > 1 and not _adds_up(question, config)
    came = question.trained_parameters if before or moment == "end" else _arrived_by(moment, question, sizes)
    on: Memory = "host" if config.offload_policy else "device"
    yield _now("gradients", moment, 4, came, shards, note="shards", on=on)
    if question.added_parameters:
        return  # gradients of adapters are negligible
    yield from _whole_gradients(question, config, sizes, moment)
    count = {"last layer": sizes.layer, "embedding": sizes.layer, "end": sizes.rest}.get(moment, 0)
    copies = 2 if moment == "end" and question.on_host else 1  # gloo reduces in a copy
    yield _now("buffers", moment, copies * reduced, count, note="in transit")


def _whole_gradients(question: MemoryInput, config: FSDP2Config, sizes: _Sizes, moment: Moment) -> Iterator[MemoryItem]:
    """Unsharded gradients that were not reduced yet.

    `roll_modeling.memory.computation` counts the gradients of the embedding and of a tied head.
    """
    size, reduced = _computed(question, config), DTYPE_BYTES[config.reduce_dtype]
    adds_up, in_layers = _adds_up(question, config), moment in ("first layer", "last layer")
    if adds_up:
        layers = {"head": sizes.all_layers, "first layer": sizes.all_layers, "last layer": sizes.layer}.get(moment, 0)
        count = 0 if moment == "end" else sizes.rest + layers
        yield _now("gradients", moment, reduced, count, note="whole, of all microbatches")
    elif in_layers or moment == "embedding":
        # An untied head's gradient is reduced together with the other parameters outside the layers.
        yield _now("gradients", moment, size, question.model.head, note="the output layer's")
    if in_layers and not (adds_up and size == reduced):
        yield _now("gradients", moment, size, sizes.layer, note="one layer's")


def _adds_up(question: MemoryInput, config: FSDP2Config) -> bool:
    """True if unsharded gradients are accumulated over the microbatches of a step."""
    several = question.num_micro_batches > 1 and not question.added_parameters
    return several and not config.reduce_scatter_during_grad_accumulation


def _gathered_by(moment: Moment, sizes: _Sizes, *, stays: bool) -> int:
    """Number of gathered parameters: those outside the layers, the current layer, and the prefetched next layer."""
    if moment == "end":
        return 0  # freed before gradients are reduced
    layers = {"head": 1, "first layer": 2, "last layer": 1}.get(moment, 0) * sizes.layer
    return sizes.rest + (sizes.all_layers if stays and moment in ("head", "first layer") else layers)


def _arrived_by(moment: Moment, question: MemoryInput, sizes: _Sizes) -> int:
    """Number of parameters whose gradients are reduced so far, if no earlier microbatch left sharded gradients."""
    return 0 if moment in ("head", "first layer") else max(0, question.trained_parameters - _rest(question.model))


def _now(
    what: str, moment: Moment, size: int, count: int, shards: int = 1, *, note: str, on: Memory = "device"
) -> MemoryItem:
    return MemoryItem.of(what, size, count, shards, f"{moment}, {note}", during=("backward",), on=on)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Numbers of parameters that a rank holds once they are gathered."""

    rest: int
    """Parameters outside the layers."""
    layer: int
    """Parameters of the largest layer."""
    all_layers: int


def _sizes(question: MemoryInput, config: FSDP2Config) -> _Sizes:
    layers = [_on_one(layer, config) for layer in question.model.layers]
    return _Sizes(rest=_rest(question.model), layer=max(layers, default=0), all_layers=sum(layers))


def _rest(model: ModelSize) -> int:
    return model.embedding + model.head + model.final_norm


def _on_one(layer: LayerSize, config: FSDP2Config) -> int:
    """Number of a layer's parameters that a rank holds once the layer is gathered."""
    return (layer.parameters - layer.experts + layer.experts // config.ep_size) // config.tensor_model_parallel_size


def _cut(model: ModelSize, parallel: int) -> ModelSize:
    """The model as one tensor-parallel rank computes it: a fraction of the heads and hidden units of each layer."""
    layers = tuple(replace(layer, active_width=layer.active_width // parallel) for layer in model.layers)
    return replace(
        model,
        query_width=model.query_width // parallel,
        key_width=model.key_width // parallel,
        num_heads=max(1, model.num_heads // parallel),
        layers=layers,
    )


def _computed(question: MemoryInput, config: FSDP2Config) -> int:
    return DTYPE_BYTES[config.param_dtype or question.dtype]


def _savings(question: MemoryInput, config: FSDP2Config) -> Iterator[MemorySaving]:
    if question.trains and question.num_micro_batches > 1 and not config.reduce_scatter_during_grad_accumulation:
        keys = {"reduce_scatter_during_grad_accumulation": True}
        yield MemorySaving(keys=keys, costs="gradients are reduced over ranks after each microbatch")
    if config.reshard_after_forward is False:
        yield MemorySaving(
            keys={"reshard_after_forward": True}, costs="layers are gathered again for the backward pass"
        )
    if not config.offload_policy and not question.on_host:
        yield MemorySaving(
            keys={"offload_policy": True}, costs="weights are copied from the host for every pass, and steps are slow"
        )
