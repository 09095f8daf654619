"""Conversion between ROLL's requests and vLLM's: sampling parameters in, logprobs out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import UnsupportedError
from roll_core.types import TopTokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.types import Floats, GenerateRequest

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""Range of temperatures above 0 that vLLM samples with. It replaces a lower one by the minimum, with a warning."""
PROGRESS_TOKENS = 64
"""Number of tokens between two partial outputs from vLLM. vLLM returns the first token and the end of an output at
once."""


def check_served(request: GenerateRequest) -> None:
    """Raise `UnsupportedError` for parameters that vLLM lacks or interprets differently from other engines."""
    params = request.params
    if params.temperature > 0 and not MIN_TEMPERATURE <= params.temperature <= MAX_TEMPERATURE:
        raise UnsupportedError(
            f"request {request.id!r}: temperature is {params.temperature:g}; vLLM samples with {MIN_TEMPERATURE:g} to"
            f" {MAX_TEMPERATURE:g}, and 0 is greedy decoding"
        )
    if params.top_p < 1 and params.min_p > 0 and params.temperature > 0:
        raise UnsupportedError(
            f"request {request.id!r}: top_p is {params.top_p:g} and min_p is {params.min_p:g}: vLLM applies min_p"
            " first, other engines apply it last, so the results differ; set only one of them"
        )


def sampling_params(request: GenerateRequest, index: int, end_ids: Sequence[int]) -> Any:
    """vLLM `SamplingParams` for output `index` of a request. `end_ids` end a response like `stop_token_ids`."""
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
        ignore_eos=True,  # `ends` has the model's end tokens, the same for every engine
        seed=None if params.seed is None else output_seed(params.seed, index),
        logprobs=0,
        prompt_logprobs=request.prompt_topk if request.prompt_logprobs and index == 0 else None,
        flat_logprobs=True,
        detokenize=bool(stops),
        output_kind=RequestOutputKind.DELTA,  # stream_interval applies only to deltas
        stream_interval=PROGRESS_TOKENS,
    )


def output_seed(seed: int, index: int) -> int:
    """32-bit seed derived from `(seed, index)`, so that requests with adjacent seeds use different random streams."""
    return int(np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint32)[0])


def top_tokens(flat: Any, k: int) -> TopTokens:
    """The K most likely tokens from vLLM's `FlatLogprobs` of a prompt, in which they follow the token itself."""
    starts = np.asarray(flat.start_indices, np.int64)
    has_N = np.asarray(flat.end_indices, np.int64) > starts
    places_NK = starts[has_N, None] + 1 + np.arange(k)
    ids, logprobs = np.zeros((len(starts), k), np.int64), np.zeros((len(starts), k), np.float32)
    ids[has_N] = np.asarray(flat.token_ids, np.int64)[places_NK]
    logprobs[has_N] = np.asarray(flat.logprobs, np.float32)[places_NK]
    return TopTokens(ids=ids, logprobs=logprobs)


def flat_logprobs(flat: Any) -> Floats:
    """Logprobs `[T]` of the tokens themselves from vLLM's `FlatLogprobs`, where each position begins with its token.

    0 for positions without logprobs; empty if `flat` is None.
    """
    if flat is None:
        return np.zeros(0, np.float32)
    values = np.asarray([*flat.logprobs, 0.0], np.float32)
    starts, ends = np.asarray(flat.start_indices, np.int64), np.asarray(flat.end_indices, np.int64)
    return np.where(ends > starts, values[np.minimum(starts, len(values) - 1)], np.float32(0)).astype(np.float32)
