"""Validation of generation requests, shared by all infer strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from roll_core.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from roll_core.types import GenerateRequest


def check_request(
    request: GenerateRequest, *, vocab_size: int, max_tokens: int, limit: str, routed_experts: bool = False
) -> None:
    """Validate a request before it is queued.

    `max_tokens` is the maximum length of prompt and response together. `limit` describes it in the message, for example
    "the model's 4096 positions". `routed_experts`: the engine was started to return the experts it chose.

    Raises `DataError` for a request that is invalid for every engine. Raises `UnsupportedError` if the request needs
    `routed_experts` and the engine does not return them.
    """
    params, prompt, name = request.params, np.asarray(request.prompt_ids), f"request {request.id!r}"
    if prompt.ndim != 1 or len(prompt) == 0:
        raise DataError(f"{name}: the prompt is empty; a model needs at least one token (a bos token, for example)")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise DataError(f"{name}: prompt_ids are {prompt.dtype}; token ids are integers")
    wrong = np.flatnonzero((prompt < 0) | (prompt >= vocab_size))
    if len(wrong):
        raise DataError(
            f"{name}: prompt token {int(wrong[0])} is id {int(prompt[wrong[0]])}, but the model's vocabulary has"
            f" {vocab_size}; does the tokenizer belong to the model?"
        )
    if request.routed_experts and not routed_experts:
        raise UnsupportedError(f"{name}: asks for routed_experts, which this engine was not started to return")
    if request.n < 1 or params.max_new_tokens < 0:
        raise DataError(f"{name}: n is {request.n} and max_new_tokens {params.max_new_tokens}; neither makes sense")
    total = len(prompt) + params.max_new_tokens
    if total > max_tokens:
        raise DataError(
            f"{name}: {len(prompt)} prompt tokens + max_new_tokens {params.max_new_tokens} = {total} are more than"
            f" {limit}"
        )
    foreign = [each for each in params.stop_token_ids if not 0 <= each < vocab_size]
    if foreign:
        raise DataError(f"{name}: stop_token_ids has {foreign[0]}; the vocabulary has {vocab_size}")
    ranges: tuple[tuple[str, bool, str], ...] = (
        ("temperature", params.temperature >= 0 and bool(np.isfinite(params.temperature)), "at least 0"),
        ("top_p", 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= params.min_p <= 1, "between 0 and 1"),
        ("repetition_penalty", params.repetition_penalty > 0, "above 0"),
    )
    for key, valid, wanted in ranges:
        if not valid:
            raise DataError(f"{name}: {key} is {getattr(params, key)}; it must be {wanted}")


def check_stop_strings(request: GenerateRequest, *, has_tokenizer: bool) -> None:
    """Validate the stop strings of a request, unless `ignore_eos` disables them.

    Raises `DataError` for an empty string, and `UnsupportedError` if the role's model has no tokenizer.
    """
    if not request.params.stop or request.params.ignore_eos:
        return
    if not all(request.params.stop):
        raise DataError(f"request {request.id!r}: a stop string is empty, which would end every response at once")
    if not has_tokenizer:
        raise UnsupportedError(
            f"request {request.id!r}: stop strings need a tokenizer, and this role's model has none; use stop_token_ids"
        )
