"""The conformance tests of rewards, with responses whose reward is known."""

from typing import ClassVar

from roll_testing import RewardConformance, Scored

ROW = {"ground_truth": "42"}


class TestAcmeReward(RewardConformance):
    """`acme` with its default configuration."""

    name = "acme"
    examples = (
        Scored("6 * 7 =", "It is 42", 1.0, ROW),
        Scored("6 * 7 =", "42, or 43", 0.0, ROW),
        Scored("6 * 7 =", "I do not know", 0.0, ROW),
        Scored("6 * 7 =", "42", None, {}),
    )


class TestAcmeWithTolerance(RewardConformance):
    """Numbers may differ by a half."""

    name = "acme"
    settings: ClassVar = {"tolerance": 0.5}
    examples = (Scored("6 * 7 =", "42.5", 1.0, ROW), Scored("6 * 7 =", "42.6", 0.0, ROW))
