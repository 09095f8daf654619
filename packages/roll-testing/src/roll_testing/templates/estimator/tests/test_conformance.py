"""The conformance tests of advantage estimators: form, finite values, zeros off the mask. And one value by hand."""

import torch
from roll_estimator_acme.estimator import acme

from roll_core.spec.algorithms import AdvantageInput
from roll_testing import AdvantageConformance


class TestAcmeEstimator(AdvantageConformance):
    """`acme` with its default options."""

    name = "acme"


def test_the_best_of_three_responses_beats_two_of_them() -> None:
    """Responses of one token each, which are two groups of three and one."""
    batch = AdvantageInput(
        scores_S=torch.tensor([5.0, 1.0, 1.0, 9.0]),
        groups_S=torch.tensor([0, 0, 0, 1]),
        segments_T=torch.arange(4),
        mask_T=torch.ones(4, dtype=torch.bool),
    )
    assert torch.allclose(acme(batch).advantages_T, torch.tensor([2.0, -1.0, -1.0, 0.0]) / torch.tensor([3, 3, 3, 1]))
