"""Memory estimate of `hf_train` and forward-only `hf_infer`, as in docs/plan.md. Light: imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from roll_core.spec.plan import DTYPE_BYTES, MemoryEstimate, MemoryItem
from roll_modeling.memory import computation, model_code, optimizer_uses, start_uses, weight_use

if TYPE_CHECKING:
    from roll_core.spec.plan import MemoryInput
    from roll_strategy_hf.config import HFTrainConfig

BUCKET_BYTES = 64 << 20
"""Bytes of gradients per all-reduce; the same as `replicas.BUCKET_BYTES`."""


def training(question: MemoryInput) -> MemoryEstimate:
    """Memory per rank of `hf_train` and forward-only `hf_infer`: each rank holds the whole model."""
    config = cast("HFTrainConfig", question.config)
    size, trained = DTYPE_BYTES[question.dtype], question.trained_parameters
    uses = [model_code(), weight_use(question, size), *start_uses(question)]
    if question.trains:
        uses += [
            MemoryItem.of("gradients", 4, trained, offloads=True),
            *optimizer_uses(question, has_masters=size != 4),
        ]
        if question.world_size > 1:
            bucket = min(BUCKET_BYTES // 4, trained)
            uses.append(MemoryItem.of("buffers", 4, bucket, note="in transit", during=("step",)))
        if size != 4:
            largest = question.model.largest_matrix
            note = "the largest in transit"
            uses.append(MemoryItem.of("gradients", size, largest, note=note, during=("backward",)))
    fused = config.fused and question.on_host and question.dtype == "fp32"
    uses += computation(question, fused=fused, chunk_tokens=config.logprob_chunk_tokens)
    return MemoryEstimate(uses=tuple(uses))
