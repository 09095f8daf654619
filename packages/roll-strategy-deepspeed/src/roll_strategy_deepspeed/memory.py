"""Memory model of the DeepSpeed strategies: bytes per rank, by the formulas in docs/plan.md. Imports no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from roll_core.spec.plan import DTYPE_BYTES, LATER, MemoryEstimate, MemoryItem, MemorySaving
from roll_modeling.memory import MASTER_BYTES, MOMENT_BYTES, computation, millions, model_code

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
        uses += [*_optimizer(question, config), *_gradients(question, config)]
    uses += computation(
        question,
        fused=config.fused and question.on_host and question.dtype == "fp32",
        chunk_tokens=config.logprob_chunk_tokens,
        beside=partial(_in_backward, question, config),
    )
    return MemoryEstimate(uses=tuple(uses), savings=tuple(_savings(question, config)))


def _weights(question: MemoryInput, config: DeepSpeedConfig) -> Iterator[MemoryItem]:
    zero, size = config.zero_optimization, DTYPE_BYTES[question.dtype]
    count, ranks = question.model.parameters + question.added_parameters, question.world_size
    shards = ranks if zero.stage == 3 else 1
    share = size * count // shards
    on: Memory = "host" if zero.offload_param.device == "cpu" else "device"
    yield MemoryItem(
        what="weights", num_bytes=share, formula=f"{size} × {millions(count)} / {shards}", on=on, offloads=True
    )
    sampled = 4 if question.random_weights else size
    if zero.stage == 3 or sampled != size or not question.on_host:
        more = sampled * count - (share if question.on_host and zero.stage == 3 else 0)
        formula = f"{sampled} × {millions(count)}, sampled or read before it is sharded"
        yield MemoryItem(what="weights", num_bytes=max(0, more), formula=formula, during=("start",), on="host")
    if zero.stage in (1, 2) and question.trains:
        formula = f"{size} × {millions(count)}, in one buffer"
        yield MemoryItem(what="weights", num_bytes=size * count, formula=formula, during=("start",), on="host")
    if zero.stage == 3:
        live = min(count, _elements(zero.stage3_max_live_parameters, LIVE_ELEMENTS))
        formula = f"gathered: {size} × {millions(live)} (stage3_max_live_parameters)"
        yield MemoryItem(what="buffers", num_bytes=size * live, formula=formula, during=("score",))
        largest = question.model.largest_matrix
        formula = f"gathered: {size} × {millions(largest)}"
        yield MemoryItem(what="buffers", num_bytes=size * largest, formula=formula, during=("publish",))


def _optimizer(question: MemoryInput, config: DeepSpeedConfig) -> Iterator[MemoryItem]:
    """Moments, and float32 master weights: of 16-bit weights, and always at stages 1 to 3."""
    zero, trained = config.zero_optimization, question.trained_parameters
    shards = question.world_size if zero.stage else 1
    masters = MASTER_BYTES if zero.stage or question.dtype != "fp32" else 0
    on: Memory = "host" if zero.offload_optimizer.device == "cpu" else "device"
    if masters:
        formula = f"{masters} × {millions(trained)} / {shards}"
        yield MemoryItem(what="optimizer", num_bytes=masters * trained // shards, formula=formula, on=on, offloads=True)
    if question.averages:
        formula = f"moving average of 4 × {millions(trained)} / {shards}"
        yield MemoryItem(what="optimizer", num_bytes=4 * trained // shards, formula=formula, on=on, offloads=True)
    formula = f"moments of {MOMENT_BYTES} × {millions(trained)} / {shards}"
    # ZeRO's optimizers allocate the moments at start, by a dummy step.
    during: tuple[Activity, ...] = () if zero.stage else LATER
    yield MemoryItem(
        what="optimizer",
        num_bytes=MOMENT_BYTES * trained // shards,
        formula=formula,
        during=during,
        on=on,
        offloads=True,
    )


def _gradients(question: MemoryInput, config: DeepSpeedConfig) -> Iterator[MemoryItem]:
    """Gradients and the buffers of their reduction.

    Stage 0 keeps them in `.grad`. Later stages copy them into a bucket instead. For the reduction, the bucket's content
    is copied once more into a contiguous buffer; this rank keeps its shard.
    """
    zero, trained, ranks = config.zero_optimization, question.trained_parameters, question.world_size
    size, travel = DTYPE_BYTES[question.dtype], DTYPE_BYTES[config.communication_data_type]
    on: Memory = "host" if zero.offload_optimizer.device == "cpu" else "device"
    if zero.stage == 0:
        yield MemoryItem(
            what="gradients", num_bytes=size * trained, formula=f"{size} × {millions(trained)}", during=("step",)
        )
        if size != 4:
            formula = f"4 × {millions(trained)} for the step"
            yield MemoryItem(what="gradients", num_bytes=4 * trained, formula=formula, during=("step",))
        if ranks > 1:
            bucket = min(REDUCE_ELEMENTS, trained)
            formula = f"{travel} × {millions(bucket)} in transit"
            yield MemoryItem(what="buffers", num_bytes=travel * bucket, formula=formula, during=("step",))
        return
    share, of_share = 4 * trained // ranks, f"4 × {millions(trained)} / {ranks}"
    filled = _filled(question, config)
    way, how = travel * filled, f"{travel} × {millions(filled)} in transit"
    if zero.stage == 1:
        yield MemoryItem(what="gradients", num_bytes=4 * trained, formula=f"4 × {millions(trained)}", during=("step",))
        # After the reduction, the shard is copied into a contiguous buffer.
        formula = f"{how}, or 2 × {of_share} once they are reduced"
        yield MemoryItem(what="buffers", num_bytes=max(way, 2 * share), formula=formula, during=("step",))
    elif zero.stage == 2:
        if question.num_micro_batches > 1:
            formula = f"{of_share} of previous microbatches"
            yield MemoryItem(what="gradients", num_bytes=share, formula=formula, during=("backward",), on=on)
        formula = f"2 × {of_share}, accumulated, and in one buffer"
        yield MemoryItem(what="gradients", num_bytes=2 * share, formula=formula, during=("step",), on=on)
    else:
        yield MemoryItem(what="gradients", num_bytes=share, formula=f"{of_share} accumulated", on=on, offloads=True)
    if question.on_host:
        if zero.stage == 3:
            formula = f"{size} × {millions(filled)}, a bucket (reduce_bucket_size)"
            yield MemoryItem(what="buffers", num_bytes=size * filled, formula=formula, during=("step",))
        return
    # On a device, the full bucket is allocated; on a host, only written pages count.
    bucket = _elements(zero.reduce_bucket_size, REDUCE_ELEMENTS)
    formula = f"{size} × {millions(bucket)}, a bucket (reduce_bucket_size)"
    during: tuple[Activity, ...] = ("backward",) if zero.stage == 2 else LATER
    yield MemoryItem(what="buffers", num_bytes=size * bucket, formula=formula, during=during)


def _in_backward(question: MemoryInput, config: DeepSpeedConfig, moment: Moment) -> Iterator[MemoryItem]:
    """Memory at one moment of the backward pass.

    From stage 2 on, gradients go into the bucket. When it is full, and at the end, its content is copied for the
    reduction. At stage 3, a gathered parameter is freed once its gradient is in the bucket.
    """
    zero, trained, size = config.zero_optimization, question.trained_parameters, DTYPE_BYTES[question.dtype]
    ends = min(trained, question.model.embedding + question.model.head + question.model.final_norm)
    came = {"head": 0, "first layer": question.model.head, "end": trained}.get(moment, trained - ends)
    if zero.stage < 2:
        # They stay unsharded until the last microbatch; the bucket of stage 1 holds the same gradients.
        num_gradients, gradient_bytes = trained if question.num_micro_batches > 1 else came, 4 if zero.stage else size
        formula = f"{moment}: {gradient_bytes} × {millions(num_gradients)}"
        num_bytes = gradient_bytes * num_gradients
        yield MemoryItem(what="gradients", num_bytes=num_bytes, formula=formula, during=("backward",))
        return
    filled = _filled(question, config)
    held = min(came, filled)
    if question.on_host:
        formula = f"{moment}: {size} × {millions(held)} in the bucket (reduce_bucket_size)"
        yield MemoryItem(what="buffers", num_bytes=size * held, formula=formula, during=("backward",))
    if held == filled:
        travel = DTYPE_BYTES[config.communication_data_type]
        copies = 2 if zero.stage == 3 and question.on_host else 1  # gloo reduces in a copy
        formula = f"{moment}: {copies} × {travel} × {millions(filled)} in transit"
        yield MemoryItem(what="buffers", num_bytes=copies * travel * filled, formula=formula, during=("backward",))
    if zero.stage == 3:
        count = question.model.parameters + question.added_parameters
        live = max(0, min(count, _elements(zero.stage3_max_live_parameters, LIVE_ELEMENTS)) - held)
        formula = f"{moment}: gathered: {size} × {millions(live)} next to the bucket"
        yield MemoryItem(what="buffers", num_bytes=size * live, formula=formula, during=("backward",))


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
