"""The proof of the whole path: every replica of an engine gives tokens the logprobs that the trainer gives them.

Digests prove that an engine holds the right bytes; the probe, that it computes the right thing with them. It may have
kept a cache or a fused copy of old ones, or run another architecture than the trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import NonFiniteError, WeightSyncError
from roll_core.runtime.rollout.groups import PROBE
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence

if TYPE_CHECKING:
    from roll_core.runtime.roles import GroupInferRole
    from roll_core.spec.pipeline import TrainRole
    from roll_core.types import Completion, Floats, TokenIds


async def logprob_probe(train: TrainRole, infer: GroupInferRole, tokens: TokenIds) -> dict[int, float]:
    """Mean |logprob by the engine - logprob by the trainer| in nats, over all tokens but the first, at temperature 1:
    of each replica that lives, by rank.

    The engine needs the capability `prompt_logprobs`. Raises `NonFiniteError` where a logprob is none.
    """
    mask = np.arange(len(tokens)) > 0
    scored = await train.score([TrainSequence(id="probe", tokens=tokens, loss_mask=mask)], logprobs=True)
    if scored.logprobs is None:
        raise WeightSyncError(f"{train.name} returned no logprobs of the probe tokens")
    _require_finite(train.name, scored.logprobs[0])
    once = SamplingParams(max_new_tokens=1, temperature=1.0, seed=0)
    request = GenerateRequest(id="probe", prompt_ids=tokens, params=once, prompt_logprobs=True, priority=PROBE)
    answers = await infer.generate_on_each(request)
    return {rank: _gap(answer, scored.logprobs[0], f"{infer.name} rank {rank}") for rank, answer in answers.items()}


def _gap(answer: Completion, expected: Floats, who: str) -> float:
    found = answer.prompt_logprobs
    if found is None or len(found) != len(expected):
        what = "no logprobs" if found is None else f"{len(found)} logprobs"
        raise WeightSyncError(f"{who} returned {what} for the {len(expected)} probe tokens")
    _require_finite(who, found)
    return float(np.abs(found.astype(np.float64) - expected)[1:].mean())


def _require_finite(who: str, logprobs: Floats) -> None:
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if len(wrong):
        raise NonFiniteError(f"{who} gives probe token {wrong[0]} the logprob {logprobs[wrong[0]]}")
