"""Logprob probe, the end-to-end check of weight sync: trainer and replicas compute logprobs of the same tokens.

Digests prove that an engine loaded the right bytes; the probe proves that it computes with them. It detects stale
caches and fused copies, an architecture that differs from the trainer's, wrong logprobs, and a confirmed publish that
was never loaded.

    fixed tokens       prompt logprobs, if the engine returns them     compared with the trainer's, and with the
    sampled tokens     logprobs of a few tokens after fixed prompts    previous probe: do both sides change?

With router replay the trainer routes each token to the replica's experts, as in training. Without it a router may
choose other experts after a small change of the weights, at one side only: that token and all later ones of its
sequence move far. So one sequence, or one token, does not prove that weights are stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import NonFiniteError, StaleWeightsError, WeightSyncError
from roll_core.runtime.rollout.program import PROBE
from roll_core.spec.train import WantedOutputs
from roll_core.types import GenerateRequest, SamplingParams, TrainSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.runtime.run.roles import GroupInferRole
    from roll_core.spec.pipeline import TrainRole
    from roll_core.spec.providers import InferCapabilities
    from roll_core.types import Completion, Floats, RoutedExperts, TokenIds

SAMPLED_PROMPT, SAMPLED_TOKENS = 8, 16
"""Maximum prompt and response length of a sampled sequence in tokens; together shorter than `PROBE_TOKENS`."""
MOVED = 1e-4
"""Nats by which the trainer's logprobs must move before an engine must follow: engines in fp32 differ by less."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Logprobs of the same tokens, computed by a replica and by the trainer; shape [num_tokens] each."""

    tokens: TokenIds
    engine: Floats
    trainer: Floats

    @property
    def gap(self) -> float:
        """Mean absolute difference in nats."""
        return _distance(self.engine, self.trainer)

    def is_stale(self, before: Compared) -> bool:
        """True if the trainer's logprobs moved since `before`, far beyond the noise between both sides, and the
        replica's did not: neither on average nor at the median token."""
        if not np.array_equal(self.tokens, before.tokens):
            return False
        trainer, engine = np.abs(self.trainer - before.trainer), np.abs(self.engine - before.engine)
        moved = float(trainer.mean())
        return (
            moved > max(4 * before.gap, MOVED)
            and float(engine.mean()) < moved / 10
            and float(np.median(engine)) <= float(np.median(trainer)) / 10
        )


@dataclass(frozen=True, slots=True)
class ProbeReading:
    """Probe result of one replica: its logprobs beside the trainer's, by sequence."""

    fixed: tuple[Compared, ...]
    """Empty for an engine without prompt logprobs."""
    sampled: tuple[Compared | None, ...]
    """By prompt; None if the replica sampled nothing or ids outside the trainer's vocabulary. Rollout checks report
    such ids."""


def mean_gap(sequences: Sequence[Compared | None]) -> float | None:
    """Mean of the sequences' gaps in nats; None without sequences."""
    gaps = [sequence.gap for sequence in sequences if sequence is not None]
    return sum(gaps) / len(gaps) if gaps else None


async def logprob_probe(
    train: TrainRole,
    infer: GroupInferRole,
    tokens: TokenIds,
    *,
    can: InferCapabilities,
    vocab_size: int,
    max_length: int,
    replays_experts: bool = False,
) -> dict[int, ProbeReading]:
    """Probe every replica that is alive at temperature 1 and return the readings by rank.

    No request is longer than `max_length`, the run's longest sequence: models and engines may have no room for more.
    `replays_experts`: both roles were started with router replay.

    Raises `NonFiniteError` if a logprob is NaN or infinite, and `WeightSyncError` if the trainer or a replica returns
    no or too few logprobs.
    """
    size = min(SAMPLED_PROMPT, len(tokens) - 1)
    prompts = [tokens[start : start + size] for start in range(0, len(tokens) - size + 1, SAMPLED_PROMPT)]
    num_sampled = max(1, min(SAMPLED_TOKENS, max_length - size))

    def request(id: str, prompt: TokenIds, max_new_tokens: int, *, prompt_logprobs: bool = False) -> GenerateRequest:
        seed = 0 if can.seeds else None
        return GenerateRequest(
            id=id,
            prompt_ids=prompt,
            params=SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0, seed=seed),
            prompt_logprobs=prompt_logprobs,
            routed_experts=replays_experts,
            priority=PROBE,
        )

    prompt_logprobs = [request("probe", tokens, 1, prompt_logprobs=True)] if can.prompt_logprobs else []
    sampling = [request(f"probe sampled {i}", prompt, num_sampled) for i, prompt in enumerate(prompts)]
    completions = await infer.generate_on_each([*prompt_logprobs, *sampling])
    fixed = {rank: of_rank[0] for rank, of_rank in completions.items() if prompt_logprobs}
    sampled = {
        (rank, i): completion.outputs[0]
        for rank, of_rank in completions.items()
        for i, completion in enumerate(of_rank[len(prompt_logprobs) :])
        if completion.outputs and _exist(completion.outputs[0].token_ids, vocab_size)
    }
    sequences = {"fixed": _sequence("fixed", tokens, 1)}
    for rank, completion in fixed.items():
        if completion.outputs and (experts := completion.outputs[0].routed_experts) is not None:
            id = f"fixed {rank}"  # each replica may have chosen others
            sequences[id] = _sequence(id, tokens, 1, experts)
    for (rank, i), output in sampled.items():
        id = f"sampled {rank} {i}"
        sequences[id] = _sequence(id, np.concatenate([prompts[i], output.token_ids]), size, output.routed_experts)
    scored = await train.score(list(sequences.values()), WantedOutputs(logprobs=True))
    if scored.logprobs is None:
        raise WeightSyncError(f"{train.name} returned no logprobs of the probe tokens")
    by_trainer = dict(zip(sequences, scored.logprobs, strict=True))
    for logprobs in by_trainer.values():
        _require_finite(train.name, logprobs)

    def reading(rank: int) -> ProbeReading:
        who = f"{infer.name} rank {rank}"
        expected = by_trainer.get(f"fixed {rank}", by_trainer["fixed"])
        first = (_fixed(fixed[rank], tokens, expected, who),) if rank in fixed else ()
        return ProbeReading(first, tuple(response(rank, i) for i in range(len(prompts))))

    def response(rank: int, i: int) -> Compared | None:
        if (output := sampled.get((rank, i))) is None:
            return None
        _require_finite(f"{infer.name} rank {rank}", output.logprobs)
        return Compared(output.token_ids, output.logprobs, by_trainer[f"sampled {rank} {i}"][size:])

    return {rank: reading(rank) for rank in sorted(completions)}


def check_follows(who: str, version: int, before: ProbeReading | None, now: ProbeReading) -> None:
    """Raise `StaleWeightsError` if a replica still computes with the weights of the probe `before`: most sequences of a
    part are stale."""
    if before is None:
        return
    for earlier, later in ((before.fixed, now.fixed), (before.sampled, now.sampled)):
        pairs = zip(earlier, later, strict=False)
        stale = [(one, other) for one, other in pairs if one and other and other.is_stale(one)]
        if 2 * len(stale) > len(later):
            one, other = stale[0]
            raise StaleWeightsError(
                f"{who} confirmed weight version {version}, but computes with older weights: since the last probe the"
                f" trainer's logprobs of the same tokens changed by {_distance(other.trainer, one.trainer):.4g}, the"
                f" engine's by {_distance(other.engine, one.engine):.4g}"
            )


def _sequence(id: str, tokens: TokenIds, prompt: int, experts: RoutedExperts | None = None) -> TrainSequence:
    mask = np.arange(len(tokens)) >= prompt
    return TrainSequence(id=f"probe {id}", tokens=tokens, loss_mask=mask, routed_experts=experts)


def _exist(ids: TokenIds, vocab_size: int) -> bool:
    return len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < vocab_size


def _fixed(completion: Completion, tokens: TokenIds, expected: Floats, who: str) -> Compared:
    logprobs = completion.prompt_logprobs
    if logprobs is None or len(logprobs) != len(expected):
        num = 0 if logprobs is None else len(logprobs)
        raise WeightSyncError(f"{who} returned {num} logprobs for {len(expected)} probe tokens")
    _require_finite(who, logprobs)
    return Compared(tokens[1:], logprobs[1:], expected[1:])


def _distance(one: Floats, other: Floats) -> float:
    return float(np.abs(one.astype(np.float64) - other).mean())


def _require_finite(who: str, logprobs: Floats) -> None:
    wrong = np.flatnonzero(~np.isfinite(logprobs))
    if len(wrong):
        raise NonFiniteError(f"{who}: the logprob of probe token {wrong[0]} is {logprobs[wrong[0]]}, not finite")
