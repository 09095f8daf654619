"""Tokens of high entropy, and the coefficient of the entropy bonus."""

import math

import pytest
import torch

from roll_core.algorithms.entropy import EntropyController, top_entropy
from roll_core.errors import NonFiniteError
from roll_testing.errors import raises_error
from shared_tests.deterministic_cuda import deterministic_cuda


@pytest.mark.parametrize(
    ("quantile", "kept"),
    [(0.0, []), (0.2, [3]), (0.25, [3]), (0.5, [3, 5]), (0.75, [1, 3, 5, 6]), (1.0, [1, 3, 5, 6])],
)
def test_the_share_of_tokens_with_the_highest_entropy_is_kept(quantile, kept):
    # Masked entropies 0.5, 2, 1, 0.5; those outside of the mask are higher, or NaN.
    entropy = torch.tensor([9, 0.5, math.nan, 2, 9, 1, 0.5])
    mask = torch.tensor([0, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    with deterministic_cuda():
        assert top_entropy(entropy, mask, quantile).nonzero()[:, 0].tolist() == kept
    assert not top_entropy(entropy, torch.zeros_like(mask), quantile).any()


def controller(init, target):
    return EntropyController(init, target, delta=0.1, minimum=0.0, maximum=0.25)


def test_the_coefficient_follows_the_target():
    entropy = controller(0.1, 0.5)
    assert entropy.current == 0.1
    seen = []
    for measured in (0.4, 0.4, 0.5, 0.6, 0.6, 0.4):
        entropy.update(measured)
        seen.append((round(entropy.coef, 6), round(entropy.current, 6)))
    # + 0.1; + 0.1 up to 0.25; - 0.1 at the target, where it still applies; above it, it does not.
    assert seen == [(0.2, 0.2), (0.25, 0.25), (0.15, 0.15), (0.05, 0.0), (0.0, 0.0), (0.1, 0.1)]


def test_without_a_target_the_coefficient_is_fixed():
    entropy = controller(0.3, None)
    entropy.update(9.0)
    assert entropy.current == 0.3


def test_a_resumed_controller_continues():
    entropy, resumed = controller(0.1, 0.5), controller(0.1, 0.5)
    entropy.update(0.6)
    resumed.load_state(entropy.state())
    assert (resumed.coef, resumed.current) == (entropy.coef, entropy.current) == (0.0, 0.0)
    with raises_error(NonFiniteError, "nan"):
        resumed.update(math.nan)
