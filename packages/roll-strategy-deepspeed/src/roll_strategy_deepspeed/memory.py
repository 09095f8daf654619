"""Memory model of the DeepSpeed strategies: bytes per rank, by the formulas in docs/plan.md. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from roll_core.spec.plan import DTYPE_BYTES, LATER, MemoryEstimate, MemoryItem, MemorySaving
from roll_modeling.memory import computation, model_code, optimizer_uses

if TYPE_CHECKING:
    from collections.abc import Iterator

    from roll_core.spec.plan import Activity, Memory, MemoryInput
    from roll_modeling.memory import Moment
    from roll_strategy_deepspeed.config import DeepSpeedConfig, Elements

REDUCE_ELEMENTS = 500_000_000
"""DeepSpeed's default of `reduce_bucket_size`."""
LIBRARIES_BYTES = 54 << 20
"""Memory of importing DeepSpeed, which also imports torch's compiler, in a process with a loaded transformers model.

Measured with DeepSpeed 0.19.8 and torch 2.13.0.
"""
LIVE_ELEMENTS = 1_000_000_000
"""DeepSpeed's default of `stage3_max_live_parameters` and `stage3_max_reuse_distance`."""


def memory(question: MemoryInput) -> MemoryEstimate:
    """Memory use of the rank that needs most; all ranks need about the same."""
    config = cast("DeepSpeedConfig", question.config)
    libraries = MemoryItem(what="libraries", num_bytes=LIBRARIES_BYTES, formula="DeepSpeed's modules", on="host")
    uses = [model_code(), libraries, *_weights(question, config)]
    if question.trains:
        zero = config.zero_optimization
        # Stages 1 to 3 always have masters, and allocate the moments at start, by a dummy step.
        uses += optimizer_uses(
            question,
            question.world_size if zero.stage else 1,
            has_masters=bool(zero.stage) or question.dtype != "fp32",
            during=() if zero.stage else LATER,
            on="host" if zero.offload_optimizer.device == "cpu" else "device",
        )
        uses += _gradients(question, config)
    uses += computation(
        question,
        fused=config.fused and question.on_host and question.dtype == "fp32",
        chunk_tokens=config.logprob_chunk_tokens,
        beside=partial(_in_backward, question, config),
    )
    return MemoryEstimate(uses=tuple(uses), savings=tuple(_savings(question, config)))


def _weights(question: MemoryInput, config: DeepSpeedConfig) -> Iterator[MemoryItem]:
    zero, size = config.zero_optimization, DTYPE_BYTES[question.dtype]
    count, is_sharded = question.model.parameters + question.added_parameters, zero.stage == 3
    on: Memory = "host" if zero.offload_param.device == "cpu" else "device"
    weights = MemoryItem.of("weights", size, count, question.world_size if is_sharded else 1, on=on, offloads=True)
    yield weights
    sampled = 4 if question.random_weights else size
    if is_sharded or sampled != size or not question.on_host:
        less = weights.num_bytes if question.on_host and is_sharded else 0
        note = "sampled or read before it is sharded"
        yield MemoryItem.of("weights", sampled, count, note=note, less=less, during=("start",), on="host")
    if zero.stage in (1, 2) and question.trains:
        yield MemoryItem.of("weights", size, count, note="in one buffer", during=("start",), on="host")
    if is_sharded:
        live = min(count, _elements(zero.stage3_max_live_parameters, LIVE_ELEMENTS))
        yield MemoryItem.of("buffers", size, live, note="gathered (stage3_max_live_parameters)", during=("score",))
        yield MemoryItem.of("buffers", size, question.model.largest_matrix, note="gathered", during=("publish",))


def _gradients(question: MemoryInput, config: DeepSpeedConfig) -> Iterator[MemoryItem]:
    """Gradients and the buffers of their reduction.

    Stage 0 keeps them in `.grad`. Later stages copy them into a bucket instead. For the reduction, the bucket's content
    is copied once more into a contiguous buffer; this rank keeps its shard.
    """
    zero, trained, ranks = config.zero_optimization, question.trained_parameters, question.world_size
    size, travel = DTYPE_BYTES[question.dtype], DTYPE_BYTES[config.communication_data_type]
    step: tuple[Activity, ...] = ("step",)
    if zero.stage == 0:
        yield MemoryItem.of("gradients", size, trained, during=step)
        if size != 4:
            yield MemoryItem.of("gradients", 4, trained, note="for the step", during=step)
        if ranks > 1:
            yield MemoryItem.of("buffers", travel, min(REDUCE_ELEMENTS, trained), note="in transit", during=step)
        return
    on: Memory = "host" if zero.offload_optimizer.device == "cpu" else "device"
    filled = _filled(question, config)
    if zero.stage == 1:
        yield MemoryItem.of("gradients", 4, trained, during=step)
        # After the reduction, the shard is copied into a contiguous buffer.
        in_transit = MemoryItem.of("buffers", travel, filled, note="in transit", during=step)
        reduced = MemoryItem.of("buffers", 8, trained, ranks, "reduced, and in one buffer", during=step)
        yield max(in_transit, reduced, key=lambda item: item.num_bytes)
    elif zero.stage == 2:
        if question.num_micro_batches > 1:
            note = "of previous microbatches"
            yield MemoryItem.of("gradients", 4, trained, ranks, note, during=("backward",), on=on)
        yield MemoryItem.of("gradients", 8, trained, ranks, "accumulated, and in one buffer", during=step, on=on)
    else:
        yield MemoryItem.of("gradients", 4, trained, ranks, "accumulated", on=on, offloads=True)
    # On a device, the full bucket is allocated; on a host, only written pages count.
    if not question.on_host:
        during = ("backward",) if zero.stage == 2 else LATER
        bucket = _elements(zero.reduce_bucket_size, REDUCE_ELEMENTS)
        yield MemoryItem.of("buffers", size, bucket, note="reduce_bucket_size", during=during)
    elif zero.stage == 3:
        yield MemoryItem.of("buffers", size, filled, note="reduce_bucket_size", during=step)


def _in_backward(question: MemoryInput, config: DeepSpeedConfig, moment: Moment) -> Iterator[MemoryItem]:
    """Memory at one moment of the backward pass.

    From stage 2 on, gradients go into the bucket. When it is full, and at the end, its content is copied for the
    reduction. At stage 3, a gathered parameter is freed once its gradient is in the bucket.
    """

    def now(what: str, size: int, count: int, note: str) -> MemoryItem:
        return MemoryItem.of(what, size, count, note=f"{moment}, {note}", during=("backward",))

    zero, trained, size = config.zero_optimization, question.trained_parameters, DTYPE_BYTES[question.dtype]
    ends = min(trained, question.model.embedding + question.model.head + question.model.final_norm)
    came = {"head": 0, "first layer": question.model.head, "end": trained}.get(moment, trained - ends)
    if zero.stage < 2:
        # They stay unsharded until the last microbatch; the bucket of stage 1 holds the same gradients.
        count = trained if question.num_micro_batches > 1 else came
        yield now("gradients", 4 if zero.stage else size, count, "unsharded")
        return
    filled = _filled(question, config)
    held = min(came, filled)
    if question.on_host:
        yield now("buffers", size, held, "reduce_bucket_size")
    if held == filled:
        copies = 2 if zero.stage == 3 and question.on_host else 1  # gloo reduces in a copy
        yield now("buffers", copies * DTYPE_BYTES[config.communication_data_type], filled, "in transit")
    if zero.stage == 3:
        count = question.model.parameters + question.added_parameters
        live = max(0, min(count, _elements(zero.stage3_max_live_parameters, LIVE_ELEMENTS)) - held)
        yield now("buffers", size, live, "gathered, next to the bucket")


def _filled(question: MemoryInput, config: DeepSpeedConfig) -> int:
    """Number of bucket elements that are ever written."""
    return min(_elements(config.zero_optimization.reduce_bucket_size, REDUCE_ELEMENTS), question.trained_parameters)


def _elements(value: Elements | int, otherwise: int) -> int:
    return otherwise if value == "auto" else int(value)


def _savings(question: MemoryInput, config: DeepSpeedConfig) -> Iterator[MemorySaving]:
    zero = config.zero_optimization
    if not question.trains:
        return
    small = 50_000_000
    if zero.stage and _elements(zero.reduce_bucket_size, REDUCE_ELEMENTS) > small:
        yield MemorySaving(
            keys={"zero_optimization.reduce_bucket_size": small},
            costs="gradients are reduced in smaller pieces",
        )
    if question.world_size > 1:
        what = {1: "optimizer state", 2: "gradients as well", 3: "parameters as well"}
        for stage in range(zero.stage + 1, 4):
            costs = f"{what[stage]} sharded over ranks: more communication"
            yield MemorySaving(keys={"zero_optimization.stage": stage}, costs=costs)
    if zero.stage and zero.offload_optimizer.device == "none" and not question.on_host:
        yield MemorySaving(
            keys={"zero_optimization.offload_optimizer.device": "cpu"}, costs="optimizer steps run on the host"
        )
