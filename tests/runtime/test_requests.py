"""Requests that make no sense to any engine are refused in words."""

import numpy as np
import pytest

from roll_core.errors import DataError
from roll_core.spec.requests import check_request
from roll_core.types import GenerateRequest, SamplingParams


def request(prompt=(1, 2, 3), n=1, **params):
    return GenerateRequest(
        id="r", prompt_ids=np.asarray(prompt), n=n, params=SamplingParams(**{"max_new_tokens": 4, **params})
    )


def check(asked):
    check_request(asked, vocab_size=40, max_tokens=8, limit="the model's 8 positions")


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (request(prompt=np.zeros(0, np.int64)), "the prompt is empty"),
        (request(prompt=(0.5, 1.0)), "token ids are integers"),
        (request(prompt=(1, 40)), "token 1 is id 40, but the model's vocabulary has 40"),
        (request(prompt=(-1,)), "token 0 is id -1"),
        (request(n=0), "neither makes sense"),
        (request(max_new_tokens=-1), "neither makes sense"),
        (request(max_new_tokens=6), r"3 prompt tokens \+ max_new_tokens 6 = 9 are more than the model's 8 positions"),
        (request(stop_token_ids=(40,)), "stop_token_ids has 40"),
        (request(temperature=-1.0), "temperature is -1.0"),
        (request(temperature=float("nan")), "temperature is nan"),
        (request(top_p=0.0), "top_p is 0.0"),
        (request(min_p=1.5), "min_p is 1.5"),
        (request(repetition_penalty=0.0), "repetition_penalty is 0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(refused, words):
    with pytest.raises(DataError, match=words):
        check(refused)


def test_what_fits_exactly_is_not_refused():
    check(request(max_new_tokens=5, top_p=1.0, min_p=1.0, temperature=0.0, stop_token_ids=(39,)))
    check(request(max_new_tokens=0))
