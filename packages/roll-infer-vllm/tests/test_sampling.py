"""Requests that vLLM could not serve as the contract has them are refused in words."""

from __future__ import annotations

import numpy as np
import pytest

from roll_core.errors import DataError, UnsupportedError
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_vllm.sampling import check_request, output_seed


def request(prompt=(1, 2, 3), n=1, **params):
    return GenerateRequest(
        id="r", prompt_ids=np.asarray(prompt), n=n, params=SamplingParams(**{"max_new_tokens": 4, **params})
    )


@pytest.mark.parametrize(
    ("refused", "error", "words"),
    [
        (request(prompt=np.zeros(0, np.int64)), DataError, "the prompt is empty"),
        (request(prompt=(0.5, 1.0)), DataError, "token ids are integers"),
        (request(prompt=(1, 40)), DataError, "token 1 is id 40, but the model's vocabulary has 40"),
        (request(n=0), DataError, "neither makes sense"),
        (request(max_new_tokens=6), DataError, r"3 prompt tokens \+ max_new_tokens 6 = 9 are more than.* 8"),
        (request(stop_token_ids=(40,)), DataError, "stop_token_ids has 40"),
        (request(temperature=-1.0), DataError, "temperature is -1.0"),
        (request(top_p=0.0), DataError, "top_p is 0.0"),
        (request(temperature=2.5), UnsupportedError, "at most 2"),
        (request(top_p=0.9, min_p=0.1), UnsupportedError, "top_p 0.9 and min_p 0.1 together"),
    ],
)
def test_what_cannot_be_served_is_refused(refused, error, words):
    with pytest.raises(error, match=words):
        check_request(refused, vocab_size=40, max_model_len=8)


def test_what_can_be_served_is_not_refused():
    check_request(request(max_new_tokens=5, temperature=2.0, top_p=0.9, top_k=3), vocab_size=40, max_model_len=8)
    check_request(request(top_p=0.9, min_p=0.1, temperature=0.0), vocab_size=40, max_model_len=8)


def test_seeds_of_outputs_and_of_neighbouring_requests_differ():
    seeds = {output_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) > 9_980  # of 32-bit numbers, so that one or two may meet by chance
    assert output_seed(7, 3) == output_seed(7, 3)
