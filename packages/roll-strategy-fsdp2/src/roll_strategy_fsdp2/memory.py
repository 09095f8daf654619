"""How much memory a rank of the FSDP2 strategies takes: the formulas of docs/plan.md. Light."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.modeling.memory import MOMENT_BYTES, computation, largest_matrix, millions
from roll_core.spec.plan import DTYPE_BYTES, LATER, UPDATE, Lever, MemoryAnswer, Use
from roll_strategy_fsdp2.config import FSDP2Config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.plan import LayerSize, Memory, MemoryQuestion, ModelSize


def memory(question: MemoryQuestion) -> MemoryAnswer:
    """Of the rank that takes most; all take about the same."""
    config = question.config
    if not isinstance(config, FSDP2Config):
        raise TypeError(f"the FSDP2 strategies take an FSDP2Config, not a {type(config).__name__}")
    parallel = config.tensor_model_parallel_size
    shards = parallel * (config.fsdp_size or max(1, question.world_size // parallel))
    uses = [*_held(question, config, shards), *_gathered(question, config)]
    if question.trains:
        uses += _gradients(question, config, shards)
    cut = replace(question, model=_cut(question.model, parallel))
    uses += computation(cut, fused=False, chunk_tokens=config.logprob_chunk_tokens, shards=config.context_size)
    return MemoryAnswer(uses=tuple(uses), levers=tuple(_levers(question, config)))


def _held(question: MemoryQuestion, config: FSDP2Config, shards: int) -> Iterator[Use]:
    """Shares of parameters, which are float32 where they are trained, and of AdamW's moments."""
    count = question.model.parameters + question.added_parameters
    size = 4 if question.trains else _computed(question, config)
    on: Memory = "host" if config.offload_policy else "device"
    share = size * count // shards
    yield Use(what="weights", num_bytes=share, formula=f"{size} × {millions(count)} / {shards}", on=on, leaves=True)
    if question.random_weights or question.added_parameters:
        whole = (4 if question.random_weights else DTYPE_BYTES[question.dtype]) * count
        yield Use(
            what="weights",
            num_bytes=max(0, whole - (share if question.on_host else 0)),
            formula=f"the whole model of {millions(count)}, before it is cut",
            during=("start",),
            on="host",
        )
    if question.trains:
        trained = question.trained_parameters
        yield Use(
            what="optimizer",
            num_bytes=MOMENT_BYTES * trained // shards,
            formula=f"moments of {MOMENT_BYTES} × {millions(trained)} / {shards}",
            during=LATER,
            on=on,
            leaves=True,
        )


def _gathered(question: MemoryQuestion, config: FSDP2Config) -> Iterator[Use]:
    """What stands in no layer is whole for a forward and its backward pass; of layers the one that computes and the one
    that is gathered meanwhile, unless they are not freed."""
    model, size = question.model, _computed(question, config)
    rest = model.embedding + model.head + model.final_norm
    layers = [_on_one(layer, config) for layer in model.layers]
    whole = sum(layers) if config.reshard_after_forward is False else 2 * max(layers, default=0)
    yield Use(
        what="buffers",
        num_bytes=size * (rest + whole),
        formula=f"gathered: {size} × ({millions(rest)} outside of layers and {millions(whole)} of layers)",
        during=("score", "backward"),
    )
    largest = largest_matrix(question)
    yield Use(
        what="buffers", num_bytes=size * largest, formula=f"{size} × {millions(largest)}, gathered", during=("publish",)
    )


def _gradients(question: MemoryQuestion, config: FSDP2Config, shards: int) -> Iterator[Use]:
    """Shares until the step; whole ones until they are added up over ranks, which is once a step if not more often."""
    model, trained = question.model, question.trained_parameters
    reduced = DTYPE_BYTES[config.reduce_dtype]
    yield Use(
        what="gradients", num_bytes=4 * trained // shards, formula=f"4 × {millions(trained)} / {shards}",
        during=UPDATE, on="host" if config.offload_policy else "device",
    )  # fmt: skip
    rest = model.embedding + model.head + model.final_norm
    layers = [_on_one(layer, config) for layer in model.layers]
    if question.added_parameters:
        whole, how = trained, "of adapters"
    elif question.num_micro_batches > 1 and not config.reduce_scatter_during_grad_accumulation:
        whole, how = rest + sum(layers), "of the whole model, over all microbatches"
    else:
        whole, how = rest + max(layers, default=0), "of what stands in no layer and of one layer"
    yield Use(
        what="gradients",
        num_bytes=reduced * whole,
        formula=f"{reduced} × {millions(whole)}, {how}",
        during=("backward",),
    )
    yield Use(
        what="buffers",
        num_bytes=0 if question.added_parameters else reduced * rest,
        formula=f"{reduced} × {millions(rest)} on its way to other ranks",
        during=("backward",),
    )


def _on_one(layer: LayerSize, config: FSDP2Config) -> int:
    """Parameters of a layer that a rank has when it is gathered."""
    return (layer.parameters - layer.experts + layer.experts // config.ep_size) // config.tensor_model_parallel_size


def _cut(model: ModelSize, parallel: int) -> ModelSize:
    """Tensor parallel ranks have some of the heads and hidden units of each layer."""
    layers = tuple(replace(layer, active_width=layer.active_width // parallel) for layer in model.layers)
    return replace(
        model,
        query_width=model.query_width // parallel,
        key_width=model.key_width // parallel,
        num_heads=max(1, model.num_heads // parallel),
        layers=layers,
    )


def _computed(question: MemoryQuestion, config: FSDP2Config) -> int:
    return DTYPE_BYTES[config.param_dtype or question.dtype]


def _levers(question: MemoryQuestion, config: FSDP2Config) -> Iterator[Lever]:
    if question.trains and question.num_micro_batches > 1 and not config.reduce_scatter_during_grad_accumulation:
        keys = {"reduce_scatter_during_grad_accumulation": True}
        yield Lever(keys=keys, costs="gradients are added up over ranks after each microbatch")
    if config.reshard_after_forward is False:
        yield Lever(keys={"reshard_after_forward": True}, costs="layers are gathered again for the backward pass")
    if not config.offload_policy and not question.on_host:
        yield Lever(
            keys={"offload_policy": True}, costs="weights travel from the host for every pass, and steps are slow"
        )
