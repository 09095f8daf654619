"""Memory estimate of `hf_train` and forward-only `hf_infer`, as in docs/plan.md. Light: imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from roll_core.spec.plan import DTYPE_BYTES, LATER, MemoryEstimate, MemoryItem
from roll_modeling.memory import (
    MASTER_BYTES,
    MOMENT_BYTES,
    computation,
    millions,
    model_code,
    parameter_bytes,
    start_uses,
)

if TYPE_CHECKING:
    from roll_core.spec.plan import MemoryInput
    from roll_strategy_hf.config import HFTrainConfig

BUCKET_BYTES = 64 << 20
"""Bytes of gradients per all-reduce; the same as `replicas.BUCKET_BYTES`."""


def training(question: MemoryInput) -> MemoryEstimate:
    """Memory per rank of `hf_train` and forward-only `hf_infer`: each rank holds the whole model."""
    config = cast("HFTrainConfig", question.config)
    size = DTYPE_BYTES[question.dtype]
    num_bytes, formula = parameter_bytes(question, size)
    uses = [
        model_code(),
        MemoryItem(what="weights", num_bytes=num_bytes, formula=formula, offloads=True),
        *start_uses(question),
    ]
    if question.trains:
        trained = question.trained_parameters
        uses += [
            MemoryItem(what="gradients", num_bytes=4 * trained, formula=f"4 × {millions(trained)}", offloads=True),
            MemoryItem(
                what="optimizer",
                num_bytes=MOMENT_BYTES * trained,
                formula=f"moments of {MOMENT_BYTES} × {millions(trained)}",
                during=LATER,
                offloads=True,
            ),
        ]
        if size != 4:
            formula = f"float32 copy of {MASTER_BYTES} × {millions(trained)}"
            uses.append(MemoryItem(what="optimizer", num_bytes=MASTER_BYTES * trained, formula=formula, offloads=True))
        if question.averages:
            uses.append(
                MemoryItem(
                    what="optimizer",
                    num_bytes=4 * trained,
                    formula=f"moving average of 4 × {millions(trained)}",
                    offloads=True,
                )
            )
        if question.world_size > 1:
            bucket = min(BUCKET_BYTES, 4 * trained)
            uses.append(
                MemoryItem(
                    what="buffers", num_bytes=bucket, formula="a bucket of gradients in transit", during=("step",)
                )
            )
        if question.dtype != "fp32":
            largest = size * question.model.largest_matrix
            uses.append(
                MemoryItem(what="gradients", num_bytes=largest, formula="the largest in transit", during=("backward",))
            )
    fused = config.fused and question.on_host and question.dtype == "fp32"
    uses += computation(question, fused=fused, chunk_tokens=config.logprob_chunk_tokens)
    return MemoryEstimate(uses=tuple(uses))
