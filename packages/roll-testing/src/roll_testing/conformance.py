"""Conformance kit for train strategies: all test groups in one class that authors subclass."""

from __future__ import annotations

from roll_testing.contract import TrainContractTests
from roll_testing.failure import FailureTests
from roll_testing.module_programs import ModuleProgramTests
from roll_testing.numbers import TrainNumberTests
from roll_testing.packaging import PackagingTests
from roll_testing.portable_state import PortableTests
from roll_testing.state import StateTests


class TrainStrategyConformance(
    PackagingTests,
    TrainContractTests,
    TrainNumberTests,
    ModuleProgramTests,
    StateTests,
    PortableTests,
    FailureTests,
):
    """Tests that every train strategy must pass.

        class TestMine(TrainStrategyConformance):
            name = "my_train"

    The kit finds the strategy by its name among the installed plugins, as a run does. `TrainKit` lists what an author
    can configure. docs/conformance.md states what each test asserts and with which bound.
    """
