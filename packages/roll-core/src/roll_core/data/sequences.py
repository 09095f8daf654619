"""From samples to training sequences: the prompt, then exactly the sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import DataError
from roll_core.types import CompletionOutput, Sample, TokenIds, TrainSequence

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


def sample_of(
    output: CompletionOutput,
    *,
    id: str,
    group_id: str,
    prompt_ids: TokenIds,
    tag: str = "",
    metadata: Mapping[str, Any] | None = None,
) -> Sample:
    """Convert one output of a completion to a sample whose loss mask covers every generated token."""
    return Sample(
        id=id,
        group_id=group_id,
        prompt_ids=prompt_ids,
        response_ids=output.token_ids,
        logprobs=output.logprobs,
        loss_mask=np.ones(len(output.token_ids), dtype=np.bool_),
        versions=output.versions,
        finish_reason=output.finish_reason,
        routed_experts=output.routed_experts,
        tag=tag,
        metadata=metadata or {},
    )


def sequence_of(sample: Sample, *, group: int) -> TrainSequence:
    """Convert a sample to one sequence of length L = P + R. Raises `DataError` if its arrays have different lengths."""
    num_response = len(sample.response_ids)
    for name in ("logprobs", "loss_mask", "versions"):
        if len(getattr(sample, name)) != num_response:
            raise DataError(
                f"sample {sample.id}: {num_response} response tokens but {len(getattr(sample, name))} {name}"
            )
    if len(sample.prompt_ids) == 0:
        raise DataError(f"sample {sample.id} has an empty prompt: a response's first token needs context")
    num_prompt = len(sample.prompt_ids)
    return TrainSequence(
        id=sample.id,
        tokens=np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64, copy=False),
        loss_mask=np.concatenate([np.zeros(num_prompt, dtype=np.bool_), sample.loss_mask]),
        behaviour_logprobs=np.concatenate([np.zeros(num_prompt, dtype=np.float32), sample.logprobs.astype(np.float32)]),
        routed_experts=sample.routed_experts,
        group=group,
    )
