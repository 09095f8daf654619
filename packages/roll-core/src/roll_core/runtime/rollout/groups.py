"""From completions to groups, the seeds of the draws, and what is known of a batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roll_core.data.sequences import sample_of
from roll_core.types import GenerateRequest, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.pipeline import Prompt
    from roll_core.types import Completion, SamplingParams


PROBE, EVALUATION, ROLLOUT = -2, -1, 0
"""Priorities of a run's requests, the lower the sooner: what the run waits for stands before what it will need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """How judging went: samples that were judged, and those of them that have no reward after the last retry."""

    judged: int = 0
    failed: int = 0
    first_failure: str = ""
    """Why the first of them has none."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Verdicts:
        """Of these groups; samples that nobody judged do not count."""
        rewards = [sample.reward for group in groups for sample in group.samples if sample.reward is not None]
        failures = [reward.failure for reward in rewards if reward.failed]
        return cls(judged=len(rewards), failed=len(failures), first_failure=failures[0] if failures else "")

    def __add__(self, other: Verdicts) -> Verdicts:
        return Verdicts(
            judged=self.judged + other.judged,
            failed=self.failed + other.failed,
            first_failure=self.first_failure or other.first_failure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """How a batch came about."""

    ages: tuple[int, ...]
    """Of its groups, in steps from their first token to this batch."""
    left_out: int
    """Groups that were judged and left out, since the last batch."""
    stale: int
    """Groups that were too old, since the last batch."""
    surplus: int
    """Groups that stay for the next batch, finished or not."""
    positions: tuple[int, ...]
    """Of its groups' prompts, each in the order of its tag."""
    verdicts: Verdicts
    """Of all groups that were judged since the last batch, whichever batch they are for and those left out too."""
    passed_over: int = 0
    """Groups that stay though the batch has later ones."""


def request_for(
    prompt: Prompt,
    params: SamplingParams,
    *,
    n: int,
    seed_of: tuple[int | str, ...] | None,
    id: str = "",
    routed_experts: bool = False,
    priority: int = ROLLOUT,
) -> GenerateRequest:
    """`n` answers to a prompt. The draws depend on the prompt and on `seed_of`, or on `params.seed` where that is set;
    where neither is, on the engine alone.

    Prompts never share a seed: equal draws in every answer would make an average far too noisy. What is asked about a
    row again, in another step or pass, is asked of the same replica where routing heeds that.
    """
    parts = seed_of if params.seed is None else (params.seed,)
    seed = None if parts is None else stable_seed(*parts, prompt.id)
    return GenerateRequest(
        id=id or prompt.id,
        prompt_ids=prompt.tokens,
        params=replace(params, seed=seed),
        n=n,
        routed_experts=routed_experts,
        priority=priority,
        routing_key=prompt.row or prompt.id,
    )


def group_of(prompt: Prompt, completion: Completion) -> Group:
    """A completion as the samples of its prompt."""
    samples = tuple(
        sample_of(
            output,
            id=f"{prompt.id}/{index}",
            group_id=prompt.id,
            prompt_ids=prompt.tokens,
            tag=prompt.tag,
            metadata=prompt.metadata,
        )
        for index, output in enumerate(completion.outputs)
    )
    return Group(id=prompt.id, samples=samples)


def stable_seed(*parts: int | str) -> int:
    """A 63-bit seed that is the same for the same parts on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
