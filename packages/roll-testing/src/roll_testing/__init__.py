"""Conformance kits, reference models, small test models and rank processes, for tests of plugins and of the core."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll_testing.algorithms import AdvantageConformance, PolicyLossConformance
    from roll_testing.bench import Case, Split, Step
    from roll_testing.conformance import TrainStrategyConformance
    from roll_testing.environments import EnvironmentConformance
    from roll_testing.executors import ExecutorConformance
    from roll_testing.infer.conformance import InferStrategyConformance
    from roll_testing.integrity import EnvironmentIntegrity
    from roll_testing.packaging import PackagingConformance
    from roll_testing.pipelines import PipelineConformance
    from roll_testing.platforms import PlatformConformance
    from roll_testing.ranks import RankHost, RanksFailedError
    from roll_testing.reference import ReferenceModel, TransformersModel
    from roll_testing.rewards import RewardConformance, Scored
    from roll_testing.trackers import TrackerConformance
    from roll_testing.transports import WeightTransportConformance

__all__ = [
    "AdvantageConformance",
    "Case",
    "EnvironmentConformance",
    "EnvironmentIntegrity",
    "ExecutorConformance",
    "InferStrategyConformance",
    "PackagingConformance",
    "PipelineConformance",
    "PlatformConformance",
    "PolicyLossConformance",
    "RankHost",
    "RanksFailedError",
    "ReferenceModel",
    "RewardConformance",
    "Scored",
    "Split",
    "Step",
    "TrackerConformance",
    "TrainStrategyConformance",
    "TransformersModel",
    "WeightTransportConformance",
]

_HOMES = {
    name: module
    for module, names in {
        "algorithms": "AdvantageConformance PolicyLossConformance",
        "bench": "Case Split Step",
        "conformance": "TrainStrategyConformance",
        "environments": "EnvironmentConformance",
        "executors": "ExecutorConformance",
        "infer.conformance": "InferStrategyConformance",
        "integrity": "EnvironmentIntegrity",
        "packaging": "PackagingConformance",
        "pipelines": "PipelineConformance",
        "platforms": "PlatformConformance",
        "ranks": "RankHost RanksFailedError",
        "reference": "ReferenceModel TransformersModel",
        "rewards": "RewardConformance Scored",
        "trackers": "TrackerConformance",
        "transports": "WeightTransportConformance",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access.

    The process that forks ranks imports this package too and may not need torch.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
