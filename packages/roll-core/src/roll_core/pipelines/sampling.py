"""From `generating_args` to what an engine is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.types import SamplingParams

if TYPE_CHECKING:
    from roll_core.spec.config import GeneratingArguments


def sampling_params(args: GeneratingArguments, *, default_max_new_tokens: int) -> SamplingParams:
    """The request's parameters; `default_max_new_tokens` where the config gives no length."""
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=max(args.top_k, 0),
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        max_new_tokens=args.max_new_tokens or default_max_new_tokens,
        min_new_tokens=args.min_new_tokens,
        stop=tuple(args.stop_strings),
        seed=args.seed,
    )
