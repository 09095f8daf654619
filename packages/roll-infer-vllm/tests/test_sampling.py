"""Requests that vLLM could not serve as the contract has them are refused in words."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from roll_core.errors import UnsupportedError
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_vllm.sampling import check_served, output_seed, top_tokens
from roll_testing.errors import raises_error


def request(prompt=(1, 2, 3), n=1, **params):
    return GenerateRequest(
        id="r", prompt_ids=np.asarray(prompt), n=n, params=SamplingParams(**{"max_new_tokens": 4, **params})
    )


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        (request(temperature=2.5), ("2",)),
        (request(temperature=0.009), ("0.009", "0.01")),
        (request(top_p=0.9, min_p=0.1), ("top_p", "0.9", "min_p", "0.1")),
    ],
)
def test_unsupported_sampling_is_refused(asked, facts):
    with raises_error(UnsupportedError, *facts):
        check_served(asked)


def test_supported_sampling_is_accepted():
    check_served(request(max_new_tokens=5, temperature=2.0, top_p=0.9, top_k=3))
    check_served(request(temperature=0.01))
    check_served(request(top_p=0.9, min_p=0.1, temperature=0.0))


def test_seeds_of_outputs_and_of_neighbouring_requests_differ():
    seeds = {output_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) > 9_980  # of 32-bit numbers, so that one or two may meet by chance
    assert output_seed(7, 3) == output_seed(7, 3)


def test_the_top_tokens_of_a_prompt_follow_the_token_itself():
    """Positions have the token, then the K most likely ones, among which it may be once more; the first has none."""
    found = SimpleNamespace(
        start_indices=[0, 0, 3], end_indices=[0, 3, 6], token_ids=[4, 7, 3, 9, 9, 1], logprobs=[-4, -1, -2, -3, -3, -5]
    )
    tops = top_tokens(found, 2)
    assert tops.ids.tolist() == [[0, 0], [7, 3], [9, 1]]
    assert tops.logprobs.tolist() == [[0, 0], [-1, -2], [-3, -5]]
