"""Rollouts: prompts are answered n times each, and judged as the answers come.

    prompts --requests--> infer role --completions--> judges --> groups in prompt order

Each request carries a seed of its own that is a pure function of the run's seed, the step and the prompt, so a batch
depends neither on the order in which answers finish nor on what was generated before: a resumed run draws the same
tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.data.sequences import sample_of
from roll_core.types import Completion, GenerateRequest, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.judging import Judges
    from roll_core.spec.pipeline import InferRole, Prompt
    from roll_core.types import SamplingParams


async def roll_out(
    role: InferRole,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    n: int,
    seed_of: tuple[int | str, ...],
    judges: Judges | None,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Group]:
    """One group per prompt, in prompt order. Without judges the samples have no reward.

    The draws depend on the prompt and on `seed_of`, or on `params.seed` instead where that is set.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    requests = [
        GenerateRequest(
            id=prompt.id,
            prompt_ids=prompt.tokens,
            # Prompts never share a seed: equal draws in every answer would make an average far too noisy.
            params=replace(params, seed=stable_seed(*(seed_of if params.seed is None else (params.seed,)), prompt.id)),
            n=n,
        )
        for prompt in prompts
    ]
    judging: list[asyncio.Task[Group]] = []

    async def judge(completion: Completion) -> Group:
        prompt = by_id[completion.id]
        group = group_of(prompt, completion)
        if judges is None:
            return group
        return Group(id=group.id, samples=tuple(await judges.judge(group, prompt.text, tokenizer)))

    try:
        await role.generate(requests, lambda completion: judging.append(asyncio.create_task(judge(completion))))
        groups = {group.id: group for group in await asyncio.gather(*judging)}
    finally:
        for task in judging:
            task.cancel()
    return [groups[prompt.id] for prompt in prompts]


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
