"""Outputs in pieces."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.runtime.rollout.requests import PartialOutput, cut_at, rest_of, stop_finder
from roll_core.types import CompletionOutput, GenerateRequest, SamplingParams


def part(*tokens, version=0, finish="abort", stop=None):
    return CompletionOutput(
        token_ids=np.array(tokens, dtype=np.int64),
        logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
        versions=np.full(len(tokens), version, dtype=np.int32),
        finish_reason=finish,
        stop=stop,
    )


def test_parts_make_one_output_that_ends_as_the_last_does():
    output = PartialOutput(0)
    output.add(part(1, 2, version=3), 10)
    assert not output.complete
    output.add(part(version=4), 10)
    output.add(part(5, version=5, finish="stop", stop=5), 10)
    assert output.complete
    assert output.sampled.token_ids.tolist() == [1, 2, 5]
    assert output.sampled.versions.tolist() == [3, 3, 5]
    assert (output.sampled.finish_reason, output.sampled.stop) == ("stop", 5)
    assert output.sampled.token_ids.dtype == np.int64
    assert output.sampled.logprobs.dtype == np.float32


def test_output_cut_at_its_last_token_has_the_maximal_length():
    output = PartialOutput(0)
    output.add(part(1, 2), 3)
    output.add(part(3), 3)
    assert output.complete
    assert output.sampled.finish_reason == "length"


def test_remaining_request_has_the_tokens_and_a_new_seed():
    params = SamplingParams(max_new_tokens=10, min_new_tokens=3, seed=4, temperature=0.5)
    request = GenerateRequest(id="r", prompt_ids=np.array([8, 9]), params=params, n=3, prompt_logprobs=True, priority=2)
    output = PartialOutput(1)
    output.add(part(1, 2), 10)
    rest = rest_of(request, output, "r#1")
    assert rest.prompt_ids.tolist() == [8, 9, 1, 2]
    assert (rest.n, rest.priority, rest.prompt_logprobs) == (1, 2, False)
    assert (rest.params.max_new_tokens, rest.params.min_new_tokens, rest.params.temperature) == (8, 1, 0.5)
    seeds = {rest.params.seed, params.seed}
    for other in (PartialOutput(1), PartialOutput(2)):
        seeds.add(rest_of(request, other, "x").params.seed)
    assert len(seeds) == 4
    assert rest_of(request, output, "again").params.seed == rest.params.seed


def letters(ids):
    return "".join(chr(i) for i in ids)


def tokens(text):
    return np.array([ord(c) for c in text])


@pytest.mark.parametrize(
    ("text", "seam", "stops", "found"),
    [
        ("hello END of", 8, ["END"], (9, "END")),  # "hello EN|D of"
        ("hello END of", 7, ["END"], (9, "END")),
        ("hello END of", 6, ["END"], None),  # the engine saw it whole
        ("hello END of", 9, ["END"], None),  # it was there before the cut, where the engine had seen it
        ("hello of", 4, ["END"], None),
        ("abcd", 2, ["bcd", "bc"], (3, "bc")),
        ("abab", 2, ["ba"], (3, "ba")),
        ("ab", 0, ["a"], None),
        ("ab", 2, ["ab"], None),
    ],
)
def test_stop_string_across_a_cut_is_found(text, seam, stops, found):
    assert stop_finder(letters)(tokens(text), seam, stops) == found


def computed(tokens, name):
    """What an engine returns beside an answer to a prompt: a row for each token but the last, with its own mark."""
    at = np.arange(len(tokens) - 1, dtype=np.uint8)
    return np.stack([at, np.full(len(at), name, dtype=np.uint8)], axis=-1)[:, None, :]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_experts_come_from_the_engine_that_generated_the_rest(parts, num_prompt):
    """A part that an engine did not live to tell has none, and a part may have no token."""
    request = GenerateRequest(
        id="r", prompt_ids=np.arange(num_prompt), params=SamplingParams(max_new_tokens=99), routed_experts=True
    )
    output, expected = PartialOutput(0), []
    for name, (num, told) in enumerate(parts):
        asked = rest_of(request, output, "again")
        assert asked.routed_experts
        drawn = part(*range(num))
        experts = computed([*asked.prompt_ids, *drawn.token_ids], name) if told else None
        output.add(replace(drawn, routed_experts=experts), 99)
        if told:
            expected += [[at, name] for at in range(len(expected), len(asked.prompt_ids) + num - 1)]
    found = output.sampled.routed_experts
    if found is None:
        assert not any(told for _, told in parts)
    else:
        assert found[:, 0].tolist() == expected
        assert found.dtype == np.uint8


def test_cut_output_drops_the_experts_of_dropped_tokens():
    output = replace(part(10, 11, 12, 13), routed_experts=computed(range(7), 0))  # a prompt of three tokens
    cut = cut_at(output, 2, "stop")
    assert cut.token_ids.tolist() == [10, 11]
    assert cut.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3]
