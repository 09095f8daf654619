"""The proof of the whole path: the engine and the trainer give the same tokens the same logprobs.

Digests prove that an engine holds the right bytes; the probe, that it computes the right thing with them. It may have
kept a cache or a fused copy of old ones, or run another architecture than the trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import NonFiniteError, WeightSyncError
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence

if TYPE_CHECKING:
    from roll_core.spec.pipeline import InferRole, TrainRole
    from roll_core.types import Floats, TokenIds


async def logprob_probe(train: TrainRole, infer: InferRole, tokens: TokenIds, *, num_requests: int = 1) -> float:
    """Mean |logprob by the engine - logprob by the trainer| in nats, over all tokens but the first, at temperature 1.

    The engine needs the capability `prompt_logprobs`. Requests are spread over its replicas, so as many equal ones as
    there are replicas ask them all; the largest mean is returned. Raises `NonFiniteError` where a logprob is none.
    """
    mask = np.arange(len(tokens)) > 0
    scored = await train.score([TrainSequence(id="probe", tokens=tokens, loss_mask=mask)], logprobs=True)
    if scored.logprobs is None:
        raise WeightSyncError(f"{train.name} returned no logprobs of the probe tokens")
    _require_finite(train.name, scored.logprobs[0])
    once = SamplingParams(max_new_tokens=1, temperature=1.0, seed=0)
    completions = await infer.generate(
        [
            GenerateRequest(id=f"probe/{number}", prompt_ids=tokens, params=once, prompt_logprobs=True)
            for number in range(num_requests)
        ]
    )
    gaps = []
    for completion in completions:
        found = completion.prompt_logprobs
        if found is None or len(found) != len(tokens):
            what = "no logprobs" if found is None else f"{len(found)} logprobs"
            raise WeightSyncError(f"{infer.name} returned {what} for the {len(tokens)} probe tokens")
        _require_finite(infer.name, found)
        gaps.append(float(np.abs(found.astype(np.float64) - scored.logprobs[0])[1:].mean()))
    return max(gaps)


def _require_finite(role: str, logprobs: Floats) -> None:
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if len(wrong):
        raise NonFiniteError(f"{role} gives probe token {wrong[0]} the logprob {logprobs[wrong[0]]}")
