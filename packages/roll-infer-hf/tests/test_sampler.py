"""Sampled tokens, against distributions worked out with numpy.

With the uniforms (i + 1/2) / N the inverse of a distribution function hits each token N × p times, up to one. The
sampled tokens then show the whole distribution without any randomness.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.types import SamplingParams
from roll_infer_hf.sampler import Sampler, invert_cdf, sampling_row
from shared_tests.deterministic_cuda import deterministic_cuda

NUM = 4000


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@dataclass(frozen=True)
class Drawn:
    tokens_N: np.ndarray
    logprobs_N: np.ndarray


def draw_rows(logits, params, uniforms, *, banned=None, seen=None):
    sampler = Sampler(
        np.array([sampling_row(each) for each in params]),
        np.array(uniforms)[None],
        torch.device("cpu"),
        vocab_size=len(logits[0]),
        banned_B2=None if banned is None else np.array(banned),
        seen=None if seen is None else (seen, np.arange(len(params))),
    )
    tokens, logprobs = sampler.sample(torch.from_numpy(np.array(logits, dtype=np.float32)))
    return Drawn(tokens.numpy(), logprobs.numpy())


def frequencies(logits, params):
    uniforms = (np.arange(NUM) + 0.5) / NUM
    drawn = draw_rows(np.tile(logits, (NUM, 1)), [params] * NUM, uniforms)
    return np.bincount(drawn.tokens_N, minlength=len(logits)) / NUM


def random_logits(size, seed=0, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@settings(max_examples=60)
@given(
    st.integers(1, 700).flatmap(
        lambda size: st.tuples(st.just(size), st.integers(0, 2**31), st.floats(0, 1, exclude_max=True))
    )
)
def test_inverse_is_the_first_token_above_the_uniform(case):
    size, seed, u = case
    rng = np.random.default_rng(seed)
    weights = rng.random(size).astype(np.float32) * (rng.random(size) < 0.5)
    weights[rng.integers(size)] = 1.0
    uniform = torch.tensor([min(u, 1 - 1e-12)], dtype=torch.float64)  # in float32 it would be 1
    found = int(invert_cdf(torch.from_numpy(weights).unsqueeze(0), uniform)[0])
    cumulative = np.cumsum(weights.astype(np.float64))
    exact = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    assert weights[found] > 0
    # Sums over blocks are rounded, so a uniform that falls on a boundary may go to either side of it.
    below = cumulative[found] - weights[found]
    assert found == exact or below - 1e-5 * size <= u * cumulative[-1] <= cumulative[found] + 1e-5 * size


@pytest.mark.parametrize("size", [3, 128, 500])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_plain_draws_follow_the_tempered_softmax(size, temperature):
    logits = random_logits(size)
    expected = softmax(logits / temperature)
    assert np.abs(frequencies(logits, SamplingParams(temperature=temperature)) - expected).max() < 1.5 / NUM


def cut(probs, top_k, top_p, min_p):
    """By the definition: in this order, renormalised after each."""
    order = np.argsort(-probs, kind="stable")
    kept = order[: top_k or None]
    mass = np.cumsum(probs[kept]) / probs[kept].sum()
    kept = kept[: int(np.searchsorted(mass, top_p - 1e-9)) + 1]
    kept = kept[probs[kept] >= min_p * probs[kept[0]]]
    result = np.zeros_like(probs)
    result[kept] = probs[kept] / probs[kept].sum()
    return result


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (20, 0.8, 0.0), (20, 0.9, 0.1), (1, 1.0, 0.0), (10_000, 0.5, 0.0)],
)
@pytest.mark.parametrize("size", [40, 400])
def test_cuts_keep_the_tokens_that_their_definitions_keep(size, top_k, top_p, min_p):
    logits = random_logits(size, seed=1)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    assert np.abs(frequencies(logits, params) - cut(softmax(logits), top_k, top_p, min_p)).max() < 1.5 / NUM


def test_top_p_sorts_all_tokens_if_candidates_do_not_suffice():
    logits = random_logits(1000, seed=2, scale=0.1)
    params = SamplingParams(top_p=0.95)
    found = frequencies(logits, params)
    assert np.abs(found - cut(softmax(logits), 0, 0.95, 0.0)).max() < 1.5 / NUM


def test_penalty_divides_positive_and_multiplies_negative_logits():
    logits = np.array([2.0, 1.5, -1.0, -1.1], dtype=np.float32)
    seen = torch.tensor([[True, False, True, False]])
    uniforms = (np.arange(NUM) + 0.5) / NUM
    params = SamplingParams(repetition_penalty=2.0, temperature=0.5)
    tokens = [draw_rows(logits[None], [params], [u], seen=seen.clone()).tokens_N[0] for u in uniforms[:: NUM // 200]]
    expected = softmax(np.array([1.0, 1.5, -2.0, -1.1]) / 0.5)
    assert np.abs(np.bincount(tokens, minlength=4) / len(tokens) - expected).max() < 1.5 / len(tokens)


def test_banned_tokens_are_never_sampled():
    logits = np.array([[9.0, 0.0, 0.0]], dtype=np.float32)
    drawn = {
        int(draw_rows(logits, [SamplingParams(temperature=t)], [u], banned=[(0, 0)]).tokens_N[0])
        for u in (0.0, 0.3, 0.9999999)
        for t in (0.0, 1.0)
    }
    assert drawn <= {1, 2}
    assert len(drawn) == 2


def test_logprobs_are_of_the_tempered_softmax_before_cuts():
    logits = np.stack([random_logits(300, seed=i) for i in range(4)])
    params = [
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=2.0, top_k=3),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5, top_p=0.5, min_p=0.1),
    ]
    drawn = draw_rows(logits, params, [0.1, 0.5, 0.9, 0.3])
    for row, each in enumerate(params):
        expected = np.log(softmax(logits[row] / (each.temperature or 1.0)))[drawn.tokens_N[row]]
        assert drawn.logprobs_N[row] == pytest.approx(expected, abs=2e-6)


def test_logprobs_stay_exact_where_the_probability_underflows():
    logits = np.array([[200.0, 0.0, -5.0]], dtype=np.float32)
    drawn = draw_rows(logits, [SamplingParams()], [0.99], banned=[(0, 0), (0, 2)])
    assert drawn.tokens_N[0] == 1
    assert drawn.logprobs_N[0] == pytest.approx(-200.0)


def test_a_row_draws_the_same_token_whatever_rows_are_beside_it():
    params = [
        SamplingParams(),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.6),
        SamplingParams(top_k=9, min_p=0.05),
        SamplingParams(temperature=0.0),
        SamplingParams(min_p=0.3, temperature=1.7),
    ]
    logits = np.stack([random_logits(333, seed=i) for i in range(len(params))])
    uniforms = np.random.default_rng(3).random(len(params))
    together = draw_rows(logits, params, uniforms)
    for row, each in enumerate(params):
        alone = draw_rows(logits[row : row + 1], [each], uniforms[row : row + 1])
        assert alone.tokens_N[0] == together.tokens_N[row]
        assert alone.logprobs_N[0] == together.logprobs_N[row]


def test_non_finite_logits_give_non_finite_logprobs():
    logits = np.full((2, 200), np.nan, dtype=np.float32)
    logits[1] = 0.0
    drawn = draw_rows(logits, [SamplingParams()] * 2, [0.5, 0.5])
    assert not np.isfinite(drawn.logprobs_N[0])
    assert drawn.logprobs_N[1] == pytest.approx(-np.log(200))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.97), SamplingParams(min_p=0.1)],
    ids=["plain", "top_k", "top_p", "min_p"],
)
def test_sampling_has_deterministic_kernels_on_cuda(params):
    """Executor `local` samples in the trainer's process, in which a step may request them."""
    logits, uniforms = random_logits(1000, scale=0.1)[None], [0.7]
    expected = draw_rows(logits, [params], uniforms)
    with deterministic_cuda():
        found = draw_rows(logits, [params], uniforms)
    assert found.tokens_N.tolist() == expected.tokens_N.tolist()
