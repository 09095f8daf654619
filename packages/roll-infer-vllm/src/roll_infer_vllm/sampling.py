"""Between the contract's requests and vLLM's: parameters one way, logprobs the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.types import Floats, GenerateRequest

MAX_TEMPERATURE = 2.0
"""vLLM takes no higher one."""
PROGRESS_TOKENS = 64
"""Between two times that vLLM says what it has drawn of an output; it says the first token and the end at once."""


def check_served(request: GenerateRequest) -> None:
    """Raise `UnsupportedError` for what vLLM does not do, or does in another way than other engines."""
    params = request.params
    if params.temperature > MAX_TEMPERATURE:
        raise UnsupportedError(
            f"request {request.id!r}: temperature is {params.temperature:g}; vLLM takes at most {MAX_TEMPERATURE:g}"
        )
    if params.top_p < 1 and params.min_p > 0 and params.temperature > 0:
        raise UnsupportedError(
            f"request {request.id!r}: top_p {params.top_p:g} and min_p {params.min_p:g} together: vLLM applies min_p"
            " first, other engines last, which keeps other tokens; give one of them"
        )


def sampling_params(request: GenerateRequest, index: int, end_ids: Sequence[int]) -> Any:
    """vLLM's parameters for output `index` of a request. `end_ids` end a response as `stop_token_ids` do."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = request.params
    ends = [] if params.ignore_eos else sorted({*end_ids, *params.stop_token_ids})
    stops = [] if params.ignore_eos else list(params.stop)
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        max_tokens=max(params.max_new_tokens, 1),
        min_tokens=min(params.min_new_tokens, params.max_new_tokens),
        stop=stops,
        include_stop_str_in_output=True,
        stop_token_ids=ends,
        ignore_eos=True,  # `ends` has the model's own, from where every engine takes them
        seed=None if params.seed is None else output_seed(params.seed, index),
        logprobs=0,
        prompt_logprobs=0 if request.prompt_logprobs and index == 0 else None,
        flat_logprobs=True,
        detokenize=bool(stops),
        output_kind=RequestOutputKind.DELTA,  # the interval holds for deltas alone
        stream_interval=PROGRESS_TOKENS,
    )


def output_seed(seed: int, index: int) -> int:
    """A seed for `(seed, index)`: neighbouring requests with neighbouring seeds share no stream."""
    return int(np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint32)[0])


def flat_logprobs(found: Any) -> Floats:
    """Of the tokens themselves; each position begins with its own. 0 where a position has none."""
    if found is None:
        return np.zeros(0, np.float32)
    values = np.asarray([*found.logprobs, 0.0], np.float32)
    starts, ends = np.asarray(found.start_indices, np.int64), np.asarray(found.end_indices, np.int64)
    return np.where(ends > starts, values[np.minimum(starts, len(values) - 1)], np.float32(0)).astype(np.float32)
