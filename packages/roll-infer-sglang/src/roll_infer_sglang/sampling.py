"""Between the contract's requests and SGLang's: parameters one way, outputs the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.types import Floats, GenerateRequest

MAX_STOP_STRINGS = 32
"""SGLang takes no more."""
SEED, MIN_NEW, ENDS = "roll_seed", "roll_min_new", "roll_ends"
"""Parameters of `sampler.ContractSampler`."""
PROGRESS_TOKENS = 64
"""Between two times that SGLang says what it has drawn of an output; it says the first token and the end at once."""


def check_served(request: GenerateRequest) -> None:
    """Raise `UnsupportedError` for what SGLang does not do, or does in another way than other engines."""
    params = request.params
    if params.repetition_penalty != 1:
        raise UnsupportedError(
            f"request {request.id!r}: repetition_penalty is {params.repetition_penalty:g}; SGLang penalises tokens"
            " of the response alone, other engines those of the prompt too; leave it at 1"
        )
    if len(params.stop) > MAX_STOP_STRINGS:
        raise UnsupportedError(
            f"request {request.id!r}: {len(params.stop)} stop strings; SGLang takes at most {MAX_STOP_STRINGS}"
        )


def sampling_params(request: GenerateRequest, index: int, drawn: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """SGLang's parameters for the rest of output `index`, of which `drawn` tokens are there. `end_ids` end a response
    as `stop_token_ids` do."""
    params = request.params
    ends = [] if params.ignore_eos else sorted({*end_ids, *params.stop_token_ids})
    ours: dict[str, Any] = {}
    if params.seed is not None and params.temperature > 0:
        ours[SEED] = output_seed(params.seed, index)
    if params.min_new_tokens > drawn and ends:
        ours |= {MIN_NEW: len(request.prompt_ids) + min(params.min_new_tokens, params.max_new_tokens), ENDS: ends}
    found: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "max_new_tokens": max(params.max_new_tokens, 1) - drawn,
        "stop_token_ids": ends,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "stream_interval": PROGRESS_TOKENS,
    }
    if params.stop and not params.ignore_eos:
        found["stop"] = list(params.stop)
    if ours:
        found["custom_params"] = ours
    return found


def output_seed(seed: int, index: int) -> int:
    """A seed for `(seed, index)`: neighbouring requests with neighbouring seeds share no stream."""
    return int(np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def logprobs_of(entries: Sequence[Sequence[Any]] | None) -> Floats:
    """SGLang's `[logprob, token, text]`, of which the first token of a prompt has no logprob."""
    return np.asarray([each[0] or 0.0 for each in entries or ()], np.float32)
