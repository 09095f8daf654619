"""The conformance tests of policy losses: form, finite values, the gradient's sign, no dependence on the split."""

from typing import ClassVar

from roll_testing import PolicyLossConformance


class TestAcmeLoss(PolicyLossConformance):
    """`acme` with its default options."""

    name = "acme"


class TestAcmeLossWithoutMore(PolicyLossConformance):
    """No weight above 1."""

    name = "acme"
    options: ClassVar = {"cap": 1.0}
