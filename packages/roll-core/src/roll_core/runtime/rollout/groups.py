"""From completions to groups, and the seeds of the draws."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.data.sequences import sample_of
from roll_core.types import GenerateRequest, Group

if TYPE_CHECKING:
    from roll_core.spec.pipeline import Prompt
    from roll_core.types import Completion, SamplingParams


def request_for(
    prompt: Prompt, params: SamplingParams, *, n: int, seed_of: tuple[int | str, ...], id: str = ""
) -> GenerateRequest:
    """`n` answers to a prompt. The draws depend on the prompt and on `seed_of`, or on `params.seed` where that is set.

    Prompts never share a seed: equal draws in every answer would make an average far too noisy.
    """
    seed = stable_seed(*(seed_of if params.seed is None else (params.seed,)), prompt.id)
    return GenerateRequest(id=id or prompt.id, prompt_ids=prompt.tokens, params=replace(params, seed=seed), n=n)


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
