"""Decoding on a simulated device: the CPU's responses, and what a step copies and waits for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shared_tests.simulated import program

KINDS = ("sampled", "greedy", "top-k, top-p", "min-p", "penalty", "banned ends")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return program("decoding", folder=tmp_path_factory.mktemp("decoding"))


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_a_device_samples_the_tokens_of_the_cpu(found, kind):
    pairs = zip(found["device"][kind]["responses"], found["cpu"][kind]["responses"], strict=True)
    for (tokens, logprobs, reason), (right, right_logprobs, right_reason) in pairs:
        assert (tokens, reason) == (right, right_reason)
        np.testing.assert_allclose(logprobs, right_logprobs, atol=1e-5)


def test_responses_end_in_both_ways(found):
    assert {reason for _, _, reason in found["device"]["mixed"]["responses"]} == {"stop", "length"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_copies_once_to_the_host_and_waits_once(found, kind):
    assert found["device"][kind]["per_step"] == {"d2h": 1, "h2d": 0, "host_waits": 1}
