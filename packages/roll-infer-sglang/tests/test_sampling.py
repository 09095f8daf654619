"""Requests as SGLang gets them, what of them it could not serve, and where outputs end."""

from __future__ import annotations

import numpy as np
import pytest

from roll_core.errors import UnsupportedError
from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_sglang.output import SglangOutput
from roll_infer_sglang.sampling import (
    ENDS,
    MIN_NEW,
    SEED,
    check_served,
    image_ranges,
    output_seed,
    prompt_logprobs,
    sampling_params,
    top_tokens,
)
from roll_testing.errors import raises_error


def request(prompt=(1, 2, 3), n=1, **params):
    return GenerateRequest(
        id="r", prompt_ids=np.asarray(prompt), n=n, params=SamplingParams(**{"max_new_tokens": 4, **params})
    )


def drawn(tokens, **params):
    return SglangOutput(request=request(**params), index=0, response=None, tokens=list(tokens))


def said(tokens, *, of=None, version=0, spans=(), prompt=None):
    """A piece of an answer of SGLang's, `of` so many tokens until then."""
    meta = {
        "output_token_logprobs": [[-0.5 - token, token, None] for token in tokens],
        "completion_tokens": len(tokens) if of is None else of,
        "finish_reason": {"type": "abort"},
        "weight_version": str(version),
        "weight_versions": list(spans),
    }
    if prompt is not None:
        meta["input_token_logprobs"] = prompt
    return {"output_ids": list(tokens), "meta_info": meta}


# -- one way -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "facts"),
    [
        (request(repetition_penalty=1.1), ("repetition_penalty", "1.1")),
        (request(stop=tuple(map(str, range(33)))), ("32",)),
        (request(temperature=9e-7), ("9e-07", "1e-06")),
    ],
)
def test_unsupported_sampling_is_refused(asked, facts):
    with raises_error(UnsupportedError, *facts):
        check_served(asked)


def test_supported_sampling_is_accepted():
    check_served(request(temperature=5.0, top_p=0.9, top_k=3, min_p=0.1, seed=3, min_new_tokens=2, stop=("a", "b")))


def test_parameters_have_sglangs_names_and_values():
    found = sampling_params(request(top_k=0, temperature=0.5, stop_token_ids=(9,)), 0, 0, (1,))
    assert (found["top_k"], found["temperature"], found["stop_token_ids"]) == (-1, 0.5, [1, 9])
    assert "custom_params" not in found
    assert "stop" not in found


def test_only_the_rest_is_asked_for_after_an_interruption():
    found = sampling_params(request(max_new_tokens=10, min_new_tokens=6), 0, 4, (1,))
    assert found["max_new_tokens"] == 6
    assert found["custom_params"] == {MIN_NEW: 3 + 6, ENDS: [1]}  # counted from the prompt as the user gave it
    assert "custom_params" not in sampling_params(request(max_new_tokens=10, min_new_tokens=6), 0, 6, (1,))


def test_seeds_are_sent_only_for_sampled_requests():
    assert SEED in sampling_params(request(seed=3), 0, 0, ())["custom_params"]
    assert "custom_params" not in sampling_params(request(seed=3, temperature=0.0), 0, 0, ())


def test_ignore_eos_leaves_no_ends():
    found = sampling_params(request(ignore_eos=True, stop=("a",), stop_token_ids=(4,), min_new_tokens=2), 0, 0, (1,))
    assert found["ignore_eos"]
    assert found["stop_token_ids"] == []
    assert not {"stop", "custom_params"} & found.keys()


def test_seeds_of_outputs_and_of_neighbouring_requests_differ():
    seeds = {output_seed(seed, index) for seed in range(100) for index in range(100)}
    assert len(seeds) == 10_000
    assert max(seeds) < 2**63
    assert output_seed(7, 3) == output_seed(7, 3)


# -- the other way -----------------------------------------------------------------------------------------------------


def test_tokens_over_an_interruption_are_one_output():
    output = drawn([], max_new_tokens=8)
    output.append(said([5], of=1, version=3))
    output.append(said([6, 8], of=3, version=3))
    output.num_submitted = 3
    output.append(said([7], of=1, version=4))
    assert output.end((1,), None) is None
    found = output.completion()
    assert found.token_ids.tolist() == [5, 6, 8, 7]
    assert found.logprobs.tolist() == [-5.5, -6.5, -8.5, -7.5]
    assert found.versions.tolist() == [3, 3, 3, 4]
    assert output.prompt == [1, 2, 3, 5, 6, 8, 7]


def test_versions_of_what_has_ended_are_those_that_sglang_names():
    output = drawn([4], max_new_tokens=8)
    output.versions, output.logprobs, output.num_submitted = [1], [-1.0], 1
    output.append(said([5, 6], of=2, version=3))
    spans = [{"version": "2", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
    output.append(said([7], of=3, version=3, spans=spans))
    assert output.completion().versions.tolist() == [1, 2, 3, 3]


def test_tokens_that_are_said_twice_are_counted_once():
    """As of one that waits, drawn in part, and is then aborted; alone, or together with the piece before it."""
    output = drawn([], max_new_tokens=8)
    output.append(said([5, 6], of=2))
    output.append(said([6], of=2))
    assert output.tokens == [5, 6]
    output.append(said([7, 8, 8], of=4))
    assert output.tokens == [5, 6, 7, 8]
    assert output.logprobs == [-5.5, -6.5, -7.5, -8.5]


def test_the_first_token_of_a_prompt_has_no_logprob():
    output = SglangOutput(
        request=GenerateRequest(id="r", prompt_ids=np.asarray([1, 2]), params=SamplingParams(), prompt_logprobs=True),
        index=0,
        response=None,
    )
    output.append(said([5], prompt=[[None, 1, None], [-0.25, 2, None]]))
    output.append(said([6], of=2, prompt=[]))
    assert output.prompt_logprobs.tolist() == [0.0, -0.25]


def test_the_top_tokens_of_a_prompt_begin_at_its_second_token():
    tops = top_tokens([None, [[-0.5, 7, None], [-1.5, 3, None]]], 2)
    assert tops.ids.tolist() == [[0, 0], [7, 3]]
    assert tops.logprobs.tolist() == [[0.0, 0.0], [-0.5, -1.5]]


def test_end_token_during_an_interruption_ends_the_output():
    assert drawn([5, 9, 6], stop_token_ids=(9,)).end((1,), None) == (2, "stop", 9)
    assert drawn([5, 1], max_new_tokens=2).end((1,), None) == (2, "stop", 1)
    assert drawn([5, 1], max_new_tokens=2, ignore_eos=True).end((1,), None) == (2, "length", None)
    assert drawn([5, 6, 7, 8, 9], max_new_tokens=4).end((1,), None) == (4, "length", None)


def test_stop_string_over_an_interruption_ends_at_its_token():
    def decode(tokens):
        return "".join("abcdefghij"[token] for token in tokens)

    assert drawn([0, 2, 3, 4], max_new_tokens=9, stop=("de", "cd")).end((), decode) == (3, "stop", "cd")
    assert drawn([0, 2, 4], max_new_tokens=9, stop=("cd",)).end((), decode) is None
    assert drawn([0, 2, 3], max_new_tokens=9, stop=("cd",), stop_token_ids=(0,)).end((), decode) == (1, "stop", 0)


def test_ranges_are_the_runs_of_each_image():
    is_image = np.array([0, 1, 1, 0, 1, 1, 1, 0, 1], bool)
    assert image_ranges(is_image, [2, 3, 1]) == [[(1, 2)], [(4, 6)], [(8, 8)]]
    assert image_ranges(is_image, [3, 3]) == [[(1, 2), (4, 4)], [(5, 6), (8, 8)]]  # side by side, and with ends of rows
    with raises_error(ValueError, "6", "5"):
        image_ranges(is_image, [2, 3])


def test_logprobs_of_image_tokens_are_those_of_their_id():
    entries = [[None, 1, None], [-1.0, 10**6, None], [-2.0, 10**6, None], [-3.0, 2, None]]
    of_images = [None, [[-4.0, 9, None]], [[-5.0, 9, None]], [[-6.0, 9, None]]]
    prompt = np.array([1, 9, 9, 2])
    assert prompt_logprobs(prompt, entries, of_images).tolist() == [0, -4, -5, -3]
    assert prompt_logprobs(prompt, entries, ()).tolist() == [0, -1, -2, -3]
