"""The conformance kit for train strategies: all layers as one class that authors subclass."""

from __future__ import annotations

from roll_testing.contract import TrainContractTests
from roll_testing.failure import FailureTests
from roll_testing.numbers import TrainNumberTests
from roll_testing.packaging import PackagingTests
from roll_testing.portable import PortableTests
from roll_testing.state import StateTests


class TrainStrategyConformance(
    PackagingTests, TrainContractTests, TrainNumberTests, StateTests, PortableTests, FailureTests
):
    """What holds for every train strategy.

        class TestMine(TrainStrategyConformance):
            name = "my_train"

    The strategy is found by its name among the installed plugins, as a run finds it. `Subject` lists what an author may
    say beyond the name; docs/conformance.md says what each test asserts and with which bound.
    """
