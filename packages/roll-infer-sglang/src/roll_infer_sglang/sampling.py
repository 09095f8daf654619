"""Conversion between ROLL's requests and SGLang's: sampling parameters and images in, logprobs and experts out."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import UnsupportedError
from roll_core.types import TopTokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from roll_core.types import Floats, GenerateRequest, RoutedExperts, TokenIds
    from roll_modeling.routing import RoutingLayout

MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0. For a lower one SGLang decodes greedily, with logprobs at temperature 1."""
MAX_STOP_STRINGS = 32
"""Maximum number of stop strings per request in SGLang."""
SEED, MIN_NEW, ENDS = "roll_seed", "roll_min_new", "roll_ends"
"""Keys of `custom_params` that `sampler.ContractSampler` reads."""
MEDIA_TOKENS = "ROLL_SGLANG_MEDIA_TOKENS"
"""Environment variable of our server processes: ids of tokens of images, separated by commas; not set for a model that
reads text alone."""
PROGRESS_TOKENS = 64
"""Number of tokens between two partial outputs from SGLang. SGLang returns the first token and the end of an output at
once."""


def check_served(request: GenerateRequest) -> None:
    """Raise `UnsupportedError` for parameters that SGLang lacks or interprets differently from other engines."""
    params = request.params
    if params.repetition_penalty != 1:
        raise UnsupportedError(
            f"request {request.id!r}: repetition_penalty is {params.repetition_penalty:g}; SGLang penalises tokens"
            " of the response alone, other engines those of the prompt too; leave it at 1"
        )
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise UnsupportedError(
            f"request {request.id!r}: temperature is {params.temperature:g}; SGLang samples with at least"
            f" {MIN_TEMPERATURE:g}, and 0 is greedy decoding"
        )
    if len(params.stop) > MAX_STOP_STRINGS:
        raise UnsupportedError(
            f"request {request.id!r}: {len(params.stop)} stop strings; SGLang takes at most {MAX_STOP_STRINGS}"
        )


def sampling_params(request: GenerateRequest, index: int, num_generated: int, end_ids: Sequence[int]) -> dict[str, Any]:
    """SGLang's sampling parameters for the rest of output `index`, which already has `num_generated` tokens.

    `end_ids` end a response like `stop_token_ids`.
    """
    params = request.params
    ends = [] if params.ignore_eos else sorted({*end_ids, *params.stop_token_ids})
    ours: dict[str, Any] = {}
    if params.seed is not None and params.temperature > 0:
        ours[SEED] = output_seed(params.seed, index)
    if params.min_new_tokens > num_generated and ends:
        ours |= {MIN_NEW: len(request.prompt_ids) + min(params.min_new_tokens, params.max_new_tokens), ENDS: ends}
    body: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "max_new_tokens": max(params.max_new_tokens, 1) - num_generated,
        "stop_token_ids": ends,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "stream_interval": PROGRESS_TOKENS,
    }
    if params.stop and not params.ignore_eos:
        body["stop"] = list(params.stop)
    if ours:
        body["custom_params"] = ours
    return body


def output_seed(seed: int, index: int) -> int:
    """63-bit seed derived from `(seed, index)`, so that requests with adjacent seeds use different random streams."""
    return int(np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def top_tokens(entries: Sequence[Sequence[Sequence[Any]] | None], k: int) -> TopTokens:
    """The K most likely tokens from SGLang's entries `[logprob, token, text]` of each prompt token but the first."""
    ids, logprobs = np.zeros((len(entries), k), np.int64), np.zeros((len(entries), k), np.float32)
    for position, top in enumerate(entries):
        if top:
            ids[position], logprobs[position] = [entry[1] for entry in top[:k]], [entry[0] for entry in top[:k]]
    return TopTokens(ids=ids, logprobs=logprobs)


def logprobs_of(entries: Sequence[Sequence[Any]] | None) -> Floats:
    """Logprobs `[T]` from SGLang's entries `[logprob, token, text]`; 0 for the first prompt token, which has none."""
    return np.asarray([entry[0] or 0.0 for entry in entries or ()], np.float32)


def prompt_logprobs(
    prompt_ids: TokenIds, entries: Sequence[Sequence[Any]], of_images: Sequence[Sequence[Sequence[Any]] | None]
) -> Floats:
    """Logprobs `[P]` of the prompt's tokens.

    SGLang replaces tokens of images by hashes, so the logprobs of these tokens are in `of_images`: for each token the
    entries of the ids of images and videos, empty for the first and if the prompt has no images.
    """
    logprobs = logprobs_of(entries)
    for position, known in enumerate(of_images):
        for entry in known or ():
            if entry[1] == prompt_ids[position]:
                logprobs[position] = entry[0]
    return logprobs


def routed_experts(meta: Mapping[str, Any], layout: RoutingLayout) -> RoutedExperts | None:
    """Routed experts `[tokens, M, K]` from a response's `meta_info`, M layers with experts; None if missing.

    SGLang returns rows for all layers. They cover all tokens of a sequence but the last, including tokens that were in
    its prefix cache.
    """
    if not (text := meta.get("routed_experts")):
        return None
    rows = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    return layout.routed_experts(rows.reshape(-1, layout.num_layers, layout.top_k))


def image_ranges(is_image: npt.NDArray[np.bool_], num_features: Sequence[int]) -> list[list[tuple[int, int]]]:
    """First and last index of each run of image tokens `[L]`, by image.

    An image has several runs if its model has other tokens between them, such as the ends of its rows. Raises
    `ValueError` if the prompt has another number of image tokens.
    """
    indices = np.flatnonzero(is_image)
    if len(indices) != sum(num_features):
        raise ValueError(
            f"the prompt has {len(indices)} image tokens, but its {len(num_features)} images have {sum(num_features)}"
            " features"
        )
    ranges = []
    for of_image in np.split(indices, np.cumsum(num_features)[:-1]):
        runs = np.split(of_image, np.flatnonzero(np.diff(of_image) > 1) + 1)
        ranges.append([(int(run[0]), int(run[-1])) for run in runs])
    return ranges
