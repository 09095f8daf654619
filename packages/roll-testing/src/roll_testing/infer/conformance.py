"""Conformance kit for infer strategies: all test groups in one class that authors subclass."""

from __future__ import annotations

from roll_testing.infer.adapters import AdapterTests
from roll_testing.infer.contract import InferContractTests
from roll_testing.infer.ends import EndTests
from roll_testing.infer.images import ImageTests
from roll_testing.infer.lifecycle import LifecycleTests
from roll_testing.infer.numbers import InferNumberTests
from roll_testing.infer.routing import RoutingTests
from roll_testing.infer.sampling import SamplingTests
from roll_testing.infer.starting import StartingTests
from roll_testing.infer.weights import WeightTests
from roll_testing.packaging import PackagingTests


class InferStrategyConformance(
    PackagingTests,
    RoutingTests,
    ImageTests,
    AdapterTests,
    StartingTests,
    LifecycleTests,
    WeightTests,
    InferContractTests,
    EndTests,
    SamplingTests,
    InferNumberTests,
):
    """Tests that every infer strategy must pass.

        class TestMine(InferStrategyConformance):
            name = "my_infer"

    The kit finds the strategy by its name among the installed plugins, as a run does. `InferKit` lists what an
    author can configure. docs/conformance.md states what each test asserts and with which bound. pytest runs the tests
    of the last base class first.
    """
