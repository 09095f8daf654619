"""`roll-core plugins test NAME`: runs the conformance tests of every part of an installed plugin.

A suite of the plugin's author is more exact: it names variants, examples and configurations. This command needs none of
them. It tests what a kit can test of a part that it knows only by name.
"""

from __future__ import annotations

import re
import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from roll_core.errors import DataError, UnsupportedError
from roll_core.plugins.records import KINDS
from roll_core.spec import providers
from roll_testing.algorithms import AdvantageConformance, FunctionTests, PolicyLossConformance
from roll_testing.conformance import TrainStrategyConformance
from roll_testing.executors import ExecutorConformance
from roll_testing.infer.conformance import InferStrategyConformance
from roll_testing.kit import run_tests
from roll_testing.packaging import PackagingConformance
from roll_testing.platforms import PlatformConformance
from roll_testing.rewards import RewardConformance, score
from roll_testing.trackers import TrackerConformance
from roll_testing.transports import WeightTransportConformance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from roll_core.plugins.loader import Plugin
    from roll_core.spec.config import RewardConfig
    from roll_core.spec.rollout import RewardFunction, RewardRequest


class AnyReward(RewardConformance):
    """A reward with its default configuration."""

    def config(self) -> RewardConfig:
        """Skip the test if the configuration has required keys."""
        try:
            return super().config()
        except ValidationError as error:
            keys = ", ".join(".".join(map(str, problem["loc"])) or problem["msg"] for problem in error.errors())
            pytest.skip(f"the configuration needs {keys}: write a RewardConformance with settings")

    def _new(self, *, starts: bool = True) -> RewardFunction:
        """Skip the test if the reward does not score text."""
        try:
            return super()._new(starts=starts)
        except UnsupportedError as error:
            pytest.skip(str(error))

    def _requests(self) -> Iterator[RewardRequest]:
        """Skip the test if the reward refuses the row, which is invented."""
        requests = list(super()._requests())
        with closing(self._new()) as probe:
            try:
                score(probe, requests[0])
            except DataError as error:
                pytest.skip(f"the row needs other columns: write a RewardConformance with row ({error})")
        yield from requests


class AnyFunction(FunctionTests):
    """An estimator or a loss without options."""

    def _function(self) -> Callable[..., Any]:
        """Skip the test if an option is required."""
        try:
            return super()._function()
        except ValidationError as error:
            keys = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
            pytest.skip(f"the options need {keys}: write a suite with options")


class AnyEstimator(AnyFunction, AdvantageConformance):
    """An advantage estimator without options."""


class AnyLoss(AnyFunction, PolicyLossConformance):
    """A policy loss without options."""


KITS: dict[type[providers.Provider], type[Any]] = {
    providers.PlatformProvider: PlatformConformance,
    providers.TrainProvider: TrainStrategyConformance,
    providers.InferProvider: InferStrategyConformance,
    providers.RewardProvider: AnyReward,
    providers.TrackerProvider: TrackerConformance,
    providers.AdvantageProvider: AnyEstimator,
    providers.PolicyLossProvider: AnyLoss,
    providers.WeightTransportProvider: WeightTransportConformance,
    providers.ExecutorProvider: ExecutorConformance,
}
"""Conformance class of each kind of part that can be tested without further input."""
SUITES: dict[type[providers.Provider], str] = {
    providers.PipelineProvider: "PipelineConformance, with run_config",
    providers.EnvironmentProvider: "EnvironmentConformance, with replies",
}
"""What an author subclasses for the other kinds that have a kit."""


def suite(kind: str, name: str) -> type:
    """Conformance class of the part that a config calls `name`."""
    record: type[providers.Provider] = getattr(providers, kind)
    base = KITS.get(record)
    title = "Test" + "".join(word.capitalize() for word in re.split(r"\W|_", f"{kind.removesuffix('Provider')} {name}"))
    if base is not None:
        return type(title, (base,), {"name": name, "__module__": __name__})
    return type(title, (PackagingConformance,), {"name": name, "_kind": record, "__module__": __name__})


def run_suites(plugin: Plugin, expression: str) -> int:
    """Test every part of a plugin with pytest in a child process. Returns 1 if a test fails, otherwise 0.

    `expression` selects tests, as pytest's `-k`.
    """
    nouns = {kind.record: kind.noun for kind in KINDS}
    lines = []
    for number, record in enumerate(plugin.providers):
        if type(record) not in KITS:
            hint = SUITES.get(type(record))
            why = f"for the rest, subclass {hint}" if hint else "this kind of part has no kit"
            sys.stdout.write(f"{nouns[type(record)]} {record.name}: only its packaging is tested; {why}\n")
        name = f"{plugin.package}/{record.name}"
        lines.append(f"Test{number} = suite({type(record).__name__!r}, {name!r})")
    if not lines:
        sys.stdout.write(f"{plugin} provides no parts\n")
        return 0
    return run_tests("from roll_testing.suites import suite\n\n" + "\n".join(lines), expression)
